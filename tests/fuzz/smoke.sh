#!/usr/bin/env bash
# Builds every fuzz target and runs each for SECONDS_EACH (5) seconds. Needs cargo-fuzz, which is
# installed when it is missing.
set -euo pipefail
cd "$(dirname "$0")"
seconds=${SECONDS_EACH:-5}
if ! command -v cargo-fuzz >/dev/null; then
    cargo install cargo-fuzz --locked --version 0.13.2 -q
    PATH="${CARGO_HOME:-$HOME/.cargo}/bin:$PATH"
fi
# libFuzzer's own runtime is C++.
command -v c++ >/dev/null || { echo "missing prerequisite: a C++ compiler" >&2; exit 1; }
cargo fuzz build -s none
log=$(mktemp)
trap 'rm -f "$log"' EXIT
for target in $(cargo fuzz list); do
    mkdir -p "corpus/$target" "seeds/$target"
    echo "-- $target"
    status=0
    cargo fuzz run -s none "$target" "corpus/$target" "seeds/$target" -- \
        -max_total_time="$seconds" -max_len=4096 -verbosity=0 -print_final_stats=1 >"$log" 2>&1 || status=$?
    grep -E "number_of_executed_units" "$log" || true
    if [ "$status" != 0 ]; then
        tail -40 "$log" >&2
        # Where nobody can fetch the file, this is how to have it again: base64 -d.
        for input in "artifacts/$target"/*; do
            [ ! -f "$input" ] || { echo "$target: failing input $input:" && base64 "$input"; } >&2
        done
        echo "$target: failed (exit code $status)" >&2
        exit 1
    fi
done
