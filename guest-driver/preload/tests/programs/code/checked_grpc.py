# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""The echo server and client of checked.py, with gRPC: unary calls, and a stream per connection."""
import os
import sys
import threading
import time
from concurrent import futures

import grpc


class Echo(grpc.GenericRpcHandler):
    def service(self, call):
        if call.method == "/test/Stream":
            return grpc.stream_stream_rpc_method_handler(lambda messages, _: messages)
        return grpc.unary_unary_rpc_method_handler(lambda message, _: message)


def ask(address, requests):
    # Otherwise all channels of the process share a connection.
    options = [("grpc.use_local_subchannel_pool", 1)]
    with grpc.insecure_channel(address, options) as channel:
        call, stream = channel.unary_unary("/test/Call"), channel.stream_stream("/test/Stream")
        bodies = [os.urandom(100_000 if n % 100 == 0 else 1 + n % 200) for n in range(requests)]
        if any(call(body) != body for body in bodies) or list(stream(iter(bodies))) != bodies:
            os._exit(1)


role, address = sys.argv[1:3]
if role == "serve":
    server = grpc.server(futures.ThreadPoolExecutor(32))
    server.add_generic_rpc_handlers((Echo(),))
    server.add_insecure_port(address)
    server.start()
    server.wait_for_termination()
connections, requests = int(sys.argv[3]), int(sys.argv[4])
begun = time.monotonic()
share = requests // connections
threads = [threading.Thread(target=ask, args=(address, share)) for _ in range(connections)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print("per second:", requests / (time.monotonic() - begun))
