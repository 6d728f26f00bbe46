#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# Builds every fuzz target and runs each for SECONDS_EACH (5) seconds, one per processor at a time.
# With --build it only builds. It needs nothing but cargo and a C++ compiler; for longer runs see
# README.md.
set -euo pipefail
cd "$(dirname "$0")"
seconds=${SECONDS_EACH:-5}

# The runtime of libFuzzer is C++.
command -v c++ >/dev/null || { echo "missing prerequisite: a C++ compiler" >&2; exit 1; }

# What `cargo fuzz build -s none` asks of rustc, except for one: more than one code generation unit,
# and less optimisation, build in half the time. The host is named so that only the targets are built
# with these flags, and no build script.
host=$(rustc -vV | sed -n 's/^host: //p')
export RUSTFLAGS="--cfg fuzzing -Cpasses=sancov-module \
    -Cllvm-args=-sanitizer-coverage-level=4 \
    -Cllvm-args=-sanitizer-coverage-inline-8bit-counters \
    -Cllvm-args=-sanitizer-coverage-pc-table \
    -Cllvm-args=-sanitizer-coverage-trace-compares"
export CARGO_PROFILE_RELEASE_OPT_LEVEL=1 CARGO_PROFILE_RELEASE_DEBUG=false
cargo build --release --target "$host" --target-dir target/smoke --bins
[ "${1:-}" != --build ] || exit 0

# run TARGET: a short run; its output is in target/smoke/TARGET.log.
run() {
    local target=$1 log=target/smoke/$1.log
    mkdir -p "corpus/$target" "seeds/$target" "artifacts/$target"
    "target/smoke/$host/release/$target" -artifact_prefix="artifacts/$target/" \
        -max_total_time="$seconds" -max_len=4096 -verbosity=0 -print_final_stats=1 \
        "corpus/$target" "seeds/$target" >"$log" 2>&1
}

failed=()
running=() names=()
# Waits for the first of those that run, and says what came of it.
reap() {
    local target=${names[0]} log=target/smoke/${names[0]}.log status=0
    wait "${running[0]}" || status=$?
    running=("${running[@]:1}") names=("${names[@]:1}")
    printf '%-18s ' "$target"
    grep -o 'number_of_executed_units.*' "$log" || echo "said nothing"
    [ "$status" != 0 ] || return 0
    failed+=("$target")
    tail -40 "$log" >&2
    # Where nobody can fetch the file, base64 -d makes it again.
    for input in "artifacts/$target"/*; do
        [ ! -f "$input" ] || { echo "$target: failing input $input:" && base64 "$input"; } >&2
    done
    echo "$target: failed (exit code $status)" >&2
}

for source in fuzz_targets/*.rs; do
    target=$(basename "$source" .rs)
    [ ${#running[@]} -lt "$(nproc)" ] || reap
    run "$target" &
    running+=($!) names+=("$target")
done
while [ ${#running[@]} -gt 0 ]; do
    reap
done
[ ${#failed[@]} = 0 ] || { echo "failed: ${failed[*]}" >&2; exit 1; }
