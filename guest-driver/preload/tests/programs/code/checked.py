# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""The echo server and client of checked.go, in Python."""
import os
import socket
import sys
import threading
import time


def exactly(connection, size):
    room = bytearray()
    while len(room) < size:
        part = connection.recv(size - len(room))
        if not part:
            return None
        room += part
    return room


def echo(connection):
    with connection:
        while (head := exactly(connection, 4)) is not None:
            connection.sendall(exactly(connection, int.from_bytes(head, "big")))


def ask(address, requests):
    with socket.create_connection(address) as connection:
        for n in range(requests):
            body = os.urandom(100_000 if n % 100 == 0 else 1 + n % 200)
            connection.sendall(len(body).to_bytes(4, "big") + body)
            if exactly(connection, len(body)) != body:
                os._exit(1)


def serve(address):
    listener = socket.create_server(address)
    while True:
        threading.Thread(target=echo, args=(listener.accept()[0],), daemon=True).start()


def run(serve, ask):
    role, address = sys.argv[1], sys.argv[2].rsplit(":", 1)
    address = (address[0], int(address[1]))
    if role == "serve":
        serve(address)
    connections, requests = int(sys.argv[3]), int(sys.argv[4])
    begun = time.monotonic()
    share = requests // connections
    threads = [threading.Thread(target=ask, args=(address, share)) for _ in range(connections)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print("per second:", requests / (time.monotonic() - begun))


if __name__ == "__main__":
    run(serve, ask)
