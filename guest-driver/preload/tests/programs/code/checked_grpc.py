# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""The echo server and client of checked.py, with gRPC: unary calls, and a stream per connection."""
import os
from concurrent import futures

import grpc

from checked import run


class Echo(grpc.GenericRpcHandler):
    def service(self, call):
        if call.method == "/test/Stream":
            return grpc.stream_stream_rpc_method_handler(lambda messages, _: messages)
        return grpc.unary_unary_rpc_method_handler(lambda message, _: message)


def serve(address):
    server = grpc.server(futures.ThreadPoolExecutor(32))
    server.add_generic_rpc_handlers((Echo(),))
    server.add_insecure_port("%s:%d" % address)
    server.start()
    server.wait_for_termination()


def ask(address, requests):
    # Otherwise all channels of the process share a connection.
    options = [("grpc.use_local_subchannel_pool", 1)]
    with grpc.insecure_channel("%s:%d" % address, options) as channel:
        call, stream = channel.unary_unary("/test/Call"), channel.stream_stream("/test/Stream")
        bodies = [os.urandom(100_000 if n % 100 == 0 else 1 + n % 200) for n in range(requests)]
        if any(call(body) != body for body in bodies) or list(stream(iter(bodies))) != bodies:
            os._exit(1)


run(serve, ask)
