# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""A server of files that accepts from the listener that it was started with: descriptor 3."""

import functools
import http.server
import socket
import sys


class Server(http.server.ThreadingHTTPServer):
    def __init__(self, handler):
        super().__init__(("127.0.0.1", 0), handler, bind_and_activate=False)
        self.socket.close()
        self.socket = socket.socket(fileno=3)
        self.server_name, self.server_port = self.socket.getsockname()[:2]


Server(functools.partial(http.server.SimpleHTTPRequestHandler, directory=sys.argv[1])).serve_forever()
