#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""Clients of a server at its limit of descriptors, all connected at the same time.

    many.py http|redis|echo ADDRESS PORT NUMBER
"""
import resource
import socket
import sys

kind, address, port, number = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
_, most = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))

ASK = {
    "http": b"GET /small HTTP/1.1\r\nHost: x\r\n\r\n",
    "redis": b"PING\r\n",
    "echo": b"ping\n",
}[kind]


def answer(client):
    """Reads one answer, and says whether it is right."""
    got = b""
    while True:
        part = client.recv(1 << 16)
        if not part:
            return False
        got += part
        if kind != "http":
            if got.endswith(b"\n"):
                return got in (b"+PONG\r\n", ASK)
        elif b"\r\n\r\n" in got:
            head, body = got.split(b"\r\n\r\n", 1)
            if not head.startswith(b"HTTP/1.1 200"):
                return False
            if len(body) >= 612:
                return True


clients = []
for at in range(number):
    client = socket.create_connection((address, port), timeout=60)
    clients.append(client)
for turn in range(2):
    for at, client in enumerate(clients):
        client.sendall(ASK)
        if not answer(client):
            sys.exit(f"client {at} of {number} has no answer in turn {turn}")
