# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""Clients that write everything before they read: `ahead.py WHAT HOST PORT N`."""

import signal
import socket
import struct
import sys


def pattern(n):
    return bytes(at % 251 for at in range(251)) * (n // 251 + 1)


def read_exactly(stream, n):
    parts = []
    while n > 0:
        part = stream.recv(min(n, 1 << 16))
        if not part:
            sys.exit(f"the stream ended with {n} bytes to come")
        parts.append(part)
        n -= len(part)
    return b"".join(parts)


def echo(stream, n):
    data = pattern(n)[:n]
    stream.sendall(data)
    if read_exactly(stream, n) != data:
        sys.exit("other bytes came back")


def socks(stream, n):
    """An echo server at the port behind the proxy's, through a SOCKS5 proxy."""
    host, port = stream.getpeername()
    stream.sendall(b"\5\1\0")
    read_exactly(stream, 2)
    stream.sendall(b"\5\1\0\1" + socket.inet_aton(host) + struct.pack(">H", port + 1))
    if read_exactly(stream, 10)[1] != 0:
        sys.exit("the proxy does not connect")
    echo(stream, n)


def memcached(stream, n):
    stream.sendall(b"set k 0 0 3\r\nabc\r\n")
    read_exactly(stream, 8)
    answer = b"VALUE k 0 3\r\nabc\r\nEND\r\n"
    stream.sendall(b"get k\r\n" * n)
    if read_exactly(stream, n * len(answer)) != answer * n:
        sys.exit("other values came back")


def postgres(stream, n):
    parameters = b"user\0postgres\0database\0postgres\0\0"
    stream.sendall(struct.pack(">ii", 8 + len(parameters), 196608) + parameters)

    def await_ready():
        while True:
            kind, length = struct.unpack(">ci", read_exactly(stream, 5))
            body = read_exactly(stream, length - 4)
            if kind == b"E":
                sys.exit(body)
            if kind == b"Z":
                return

    await_ready()
    query = b"select 1, 'some text'\0"
    stream.sendall((b"Q" + struct.pack(">i", 4 + len(query)) + query) * n)
    for _ in range(n):
        await_ready()


what, host, port, n = sys.argv[1:]
signal.alarm(120)
client = socket.socket()
# TCP's buffers grow with what is read, so a client on TCP needs one that is large from the start. SMC
# has a send queue at the other end.
SO_RCVBUFFORCE = 33
try:
    client.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 8 << 20)
except PermissionError:
    pass
client.connect((host, int(port)))
with client:
    globals()[what](client, int(n))
