# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""Writes and reads nodes of ZooKeeper, with a watch for each: keeper.py ADDRESS PORT COUNT"""
import sys
import threading

from kazoo.client import KazooClient

address, port, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
clients = [KazooClient(hosts=f"{address}:{port}", timeout=20) for _ in range(3)]
for client in clients:
    client.start(timeout=30)
writer, reader, watcher = clients
writer.create("/test", b"")
for n in range(count):
    path, value = f"/test/{n}", bytes([n % 251]) * (1 + n * 397 % 50_000)
    seen = threading.Event()
    assert watcher.exists(path, watch=lambda event: seen.set()) is None
    writer.create(path, value)
    assert seen.wait(20), f"nobody told of {path}"
    reader.sync(path)
    assert reader.get(path)[0] == value, f"{path} has another value"
for client in clients:
    client.stop()
    client.close()
