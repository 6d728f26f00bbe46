#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# Reads what a Rust test program prints, and appends "ok", "failed" or "skipped" and each test's name to
# $RESULTS.
tee /dev/stderr | sed -n \
    -e 's/^test \(.*\) \.\.\. ok.*/ok\t\1/p' \
    -e 's/^test \(.*\) \.\.\. FAILED.*/failed\t\1/p' \
    -e 's/^test \(.*\) \.\.\. ignored.*/skipped\t\1/p' | sed 's/ - should panic$//' >>"$RESULTS"
