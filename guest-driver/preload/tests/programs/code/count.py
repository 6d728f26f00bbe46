# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# A server that takes lines, a connection at a time or many, and appends them to a file at the end
# of each connection: count.py ADDRESS PORT FILE. An incomplete line or an error is a line "broken".
import socket
import sys
import threading

address, port, name = sys.argv[1], int(sys.argv[2]), sys.argv[3]
lock = threading.Lock()


def serve(connection):
    data = b""
    try:
        while part := connection.recv(4096):
            data += part
        if data and not data.endswith(b"\n"):
            data += b" broken: incomplete\n"
    except OSError as error:
        data += f" broken: {error}\n".encode()
    connection.close()
    with lock, open(name, "ab") as file:
        file.write(data)


listener = socket.create_server((address, port), backlog=128)
while True:
    connection, _ = listener.accept()
    threading.Thread(target=serve, args=(connection,), daemon=True).start()
