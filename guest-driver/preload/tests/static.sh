#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# Runs the sequences of the differential suite by a static program, whose system calls the kernel dispatches
# to the library (docs/preload.md). Arguments are those of the test.
set -euo pipefail
cd "$(dirname "$0")/.."
if [ "$(uname -m)" != x86_64 ]; then
    echo "not x86-64: NOT TESTED"
    exit
fi
# Only the test is static; the library that it loads is not.
made=$(cargo rustc --test differential --message-format json -- -C target-feature=+crt-static)
program=$(sed -n 's/.*"executable":"\([^"]*\)".*/\1/p' <<<"$made")
exec "$program" "$@"
