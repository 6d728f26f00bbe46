#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""Runs a command in a guest that qemu/run.sh started with --control SOCKET.

usage: guest-run.py [--wait SECONDS] SOCKET COMMAND [ARGUMENT...]

Output, error output and exit status of the command become those of this program, also before the
guest has booted: it waits for the guest's end of the channel. Environment variables whose name begins
with SMC_ or RUST_ are passed on.
"""

import json
import os
import signal
import socket
import sys
import time


def connect(path, deadline):
    while True:
        channel = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            channel.connect(path)
            return channel
        except OSError as error:
            channel.close()
            if time.monotonic() > deadline:
                sys.exit(f"guest-run.py: {path}: {error.strerror}")
            time.sleep(0.1)


def main(args):
    wait = 60.0
    if args[:1] == ["--wait"] and len(args) > 1:
        wait = float(args[1])
        args = args[2:]
    if len(args) < 2 or args[0].startswith("-"):
        sys.exit(__doc__.strip())
    path, command = args[0], args[1:]

    channel = connect(path, time.monotonic() + wait)
    # Another program may have used the channel before, with numbers of its own.
    job = int.from_bytes(os.urandom(4), "little")
    env = {name: value for name, value in os.environ.items() if name.startswith(("SMC_", "RUST_"))}

    def send(message):
        channel.sendall(json.dumps({"id": job, **message}).encode() + b"\n")

    def stop(number, _frame):
        send({"kill": number})

    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)
    send({"run": command, "env": env, "stdin": ""})
    for line in channel.makefile("r", encoding="utf-8", errors="replace"):
        try:
            message = json.loads(line)
        except ValueError:
            continue
        if message.get("id") != job:
            continue
        if "out" in message:
            sys.stdout.write(message["out"])
            sys.stdout.flush()
        if "err" in message:
            sys.stderr.write(message["err"])
            sys.stderr.flush()
        if "exit" in message:
            return message["exit"]
        if "signal" in message:
            return 128 + message["signal"]
    sys.exit("guest-run.py: the guest is gone")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
