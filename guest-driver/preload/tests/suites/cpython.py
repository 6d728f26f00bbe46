# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""Runs files of CPython's test suite, each in a process of its own, and appends a line "RESULT TEST" for
each test to the file that RESULTS names.

With --apart, the clients of test_socket are processes, not threads, and only tests of TCP run.
"""

import faulthandler
import importlib
import os
import subprocess
import sys
import unittest

# How long a file of tests may take, and a test, seconds.
FILE, TEST = 900, 60 if "--apart" not in sys.argv else 20


def report(result, test):
    with open(os.environ["RESULTS"], "a") as results:
        results.write(f"{result}\t{test}\n")


class Result(unittest.TextTestResult):
    """Writes down each result at once, and which test runs, because the process may die."""

    def startTest(self, test):
        super().startTest(test)
        faulthandler.dump_traceback_later(TEST, exit=True)
        self.outcome = "ok"
        with open("running", "w") as running:
            running.write(test.id())

    def stopTest(self, test):
        report(self.outcome, test.id())
        os.remove("running")
        faulthandler.cancel_dump_traceback_later()
        super().stopTest(test)

    def addError(self, test, error):
        super().addError(test, error)
        self.outcome = "failed"
        if not isinstance(test, unittest.TestCase):
            report("failed", test.id())  # of a whole class or module

    def addFailure(self, test, error):
        super().addFailure(test, error)
        self.outcome = "failed"

    def addSubTest(self, test, subtest, error):
        super().addSubTest(test, subtest, error)
        if error is not None:
            self.outcome = "failed"

    def addSkip(self, test, reason):
        super().addSkip(test, reason)
        self.outcome = "skipped"

    def addUnexpectedSuccess(self, test):
        super().addUnexpectedSuccess(test)
        self.outcome = "failed"


def run_here(name, apart):
    from test import support

    # Of loopback; no hosts of the internet, and nothing that takes minutes.
    support.use_resources = ["network"]
    module = importlib.import_module(f"test.{name}")
    if apart:
        import apart as clients

        tests = clients.load(module)
    else:
        tests = unittest.defaultTestLoader.loadTestsFromModule(module)
    done = reported()
    tests = unittest.TestSuite(test for test in flat(tests) if test.id() not in done)
    unittest.TextTestRunner(verbosity=2, resultclass=Result).run(tests)


def flat(tests):
    for test in tests:
        if isinstance(test, unittest.TestSuite):
            yield from flat(test)
        else:
            yield test


def reported():
    with open(os.environ["RESULTS"]) as results:
        return {line.strip().partition("\t")[2] for line in results}


def main():
    arguments = sys.argv[1:]
    if arguments[0] == "--here":
        run_here(arguments[-1], "--apart" in arguments)
        return
    *options, _ = [word for word in arguments if word.startswith("--")] + [None]
    for name in (word for word in arguments if not word.startswith("--")):
        print(f"\n== {name}", flush=True)
        command = [sys.executable, __file__, "--here", *options, name]
        while True:
            try:
                code = subprocess.run(command, timeout=FILE).returncode
            except subprocess.TimeoutExpired:
                code = "timeout"
            if not os.path.exists("running"):
                break
            # A test took too long, or the process died. The others still run.
            with open("running") as running:
                report("timeout" if code in (1, "timeout") else f"died ({code})", running.read())
            os.remove("running")


if __name__ == "__main__":
    main()
