# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""Makes the clients of CPython's test_socket processes instead of threads."""

import multiprocessing
import os
import threading
import unittest

processes = multiprocessing.get_context("fork")


def set_up(self):
    """What `ThreadableTest._setUp` does, with a process.

    The client is forked before the server listens: a process that inherits a listening socket shares
    the server's device.
    """
    self.server_ready = processes.Event()
    self.client_ready = processes.Event()
    self.done = processes.Event()
    self.server_crashed = False
    self.events = [processes.Event() for _ in range(8)]
    Threading.unused = list(self.events)
    server, client = processes.Pipe()
    method = getattr(self, "_" + self.id().rpartition(".")[2])
    child = processes.Process(target=client_process, args=(self, method, client))
    child.start()
    client.close()

    def end_client():
        child.join(30)
        if child.is_alive():
            child.kill()
            raise TimeoutError("the client does not end")
        try:
            if server.poll():
                raise RuntimeError(f"the client: {server.recv()}")
        except EOFError:
            pass

    self.addCleanup(end_client)
    ready = self.server_ready.set

    def set_ready():
        # A test may do so itself. The child has the addresses before it goes on.
        if not self.server_ready.is_set():
            numbers = {name: self.events.index(value) for name, value in vars(self).items()
                       if value in self.events}
            server.send((addresses(self), numbers))
            ready()

    self.server_ready.set = set_ready
    try:
        self._ThreadableTest__setUp()
    finally:
        set_ready()
    self.client_ready.wait(30)
    self.cli_addr = server.recv()


def addresses(self):
    """What a client knows of its server."""
    known = {name: vars(self)[name] for name in ("port", "serv_addr") if name in vars(self)}
    return known | {"serv": Server(self.serv.getsockname())}


class Threading:
    """The module `threading` for tests: their events are those that both processes have."""

    def __getattr__(self, name):
        return getattr(threading, name)

    unused = []

    def Event(self):
        return self.unused.pop(0) if self.unused else processes.Event()


class Server:
    """The server's socket, as the client sees it."""

    def __init__(self, name):
        self.name = name

    def getsockname(self):
        return self.name


def client_process(self, method, pipe):
    try:
        self.server_ready.wait(30)
        known, numbers = pipe.recv()
        vars(self).update(known, **{name: self.events[at] for name, at in numbers.items()})
        try:
            self.clientSetUp()
        finally:
            pipe.send(vars(self).get("cli_addr"))
            self.client_ready.set()
        method()
    except unittest.SkipTest:
        pass
    except BaseException as error:
        pipe.send(repr(error))
    finally:
        try:
            self.clientTearDown()
        except BaseException as error:
            pipe.send(f"at the end: {error!r}")
        os._exit(0)


def load(module):
    """The tests with a client that connects by TCP."""
    # Tests keep what they find here when they are made.
    module.ThreadableTest._setUp = set_up
    module.ThreadableTest.clientTearDown = lambda self: self.done.set()
    module.threading = Threading()
    tests = unittest.defaultTestLoader.loadTestsFromModule(module)
    bases = (module.SocketTCPTest, module.TCPTestBase)
    chosen = unittest.TestSuite()

    def choose(suite):
        for test in suite:
            if isinstance(test, unittest.TestSuite):
                choose(test)
            elif isinstance(test, bases) and isinstance(test, module.ThreadableTest):
                chosen.addTest(test)

    choose(tests)
    return chosen
