#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# Runs tests as static programs, whose system calls the kernel dispatches to the library (docs/preload.md).
# The test programs in C are static, too.
#
#     static.sh                  the sequences of the differential suite, signals, forks, and devices that go
#     static.sh outlive -- WORD  one of the tests, by name; words behind `--` are for its program
set -euo pipefail
cd "$(dirname "$0")/../../.."
if [ "$(uname -m)" != x86_64 ]; then
    echo "not x86-64: NOT TESTED"
    exit
fi
tests=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do
    tests+=("$1")
    shift
done
shift $(($# > 0))
[ ${#tests[@]} -gt 0 ] || tests=(differential interrupts forks outlive)
programs=()
for test in "${tests[@]}"; do
    # Only the test is static; the library that it loads is not.
    made=$(cargo rustc -p smc-preload --test "$test" --message-format json -- -C target-feature=+crt-static)
    programs+=("$(sed -n 's/.*"executable":"\([^"]*\)".*/\1/p' <<<"$made")")
done
cd guest-driver/preload
for program in "${programs[@]}"; do
    "$program" "$@"
done
