#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# Measures a server and a client in Go on TCP and on SMC, in turn, and prints for each measure the median
# per second of both, and the median of the ratios with the least and the greatest one.
#
#     go-bench.sh             5 rounds, each of a measure for half a second
#     go-bench.sh 9 1s        9 rounds of a second
#     CGO_ENABLED=1 go-bench.sh    programs linked with libc; without it they are static
#
# gRPC is measured if the Debian package golang-google-grpc-dev is there. $SMC_BUILD is a directory with
# the release build of the programs and the library, which are built by default. x86-64 only.
set -euo pipefail
cd "$(dirname "$0")/../../.."
rounds=${1:-5} duration=${2:-500ms} port=7100
build=${SMC_BUILD:-target/release}
[ -n "${SMC_BUILD:-}" ] || cargo build -q --release --workspace --lib --bin smc --bin vhost-device-ism

scratch=$(mktemp -d)
processes=()
clean_up() {
    kill "${processes[@]}" 2>/dev/null || true
    wait "${processes[@]}" 2>/dev/null || true
    rm -rf "$scratch"
}
trap clean_up EXIT
mkdir "$scratch/run" "$scratch/status"
: >"$scratch/daemon"
export XDG_RUNTIME_DIR=$scratch/run GOPATH=/usr/share/gocode GO111MODULE=off CGO_ENABLED=${CGO_ENABLED:-0}
tags=()
[ ! -d "$GOPATH/src/google.golang.org/grpc" ] || tags=(-tags grpc)
(cd guest-driver/preload/tests/programs/code/bench && go build "${tags[@]}" -o "$scratch/bench" .)

"$build/vhost-device-ism" --socket-path "$scratch/1.sock" --socket-path "$scratch/2.sock" >"$scratch/daemon" 2>&1 &
processes+=("$!")
until [ "$(grep -c 'listening guest' "$scratch/daemon")" = 2 ]; do sleep 0.02; done

smc=("$build/smc" run --system-calls --device "$scratch" --status "$scratch/status" --peer '*' --always '*')
serve() {
    : >"$scratch/server"
    "$@" >"$scratch/server" &
    processes+=("$!")
    until grep -q listens "$scratch/server"; do sleep 0.02; done
}
serve "$scratch/bench" serve $port
serve "${smc[@]}" "$scratch/bench" serve $((port + 100))
for ((n = 0; n < rounds; n++)); do
    "$scratch/bench" ask $port "$duration" >"$scratch/tcp.$n"
    "${smc[@]}" "$scratch/bench" ask $((port + 100)) "$duration" >"$scratch/smc.$n"
done
if cat "$scratch"/status/* | grep -q '"smc":false'; then
    echo "connections of the programs on SMC were on TCP" >&2
    exit 1
fi
paste -d '\t' "$scratch"/tcp.* "$scratch"/smc.* | awk -F '\t' -v rounds="$rounds" '
    function median(values, n,  i, j, t) {
        for (i = 2; i <= n; i++)
            for (j = i; j > 1 && values[j - 1] > values[j]; j--) {
                t = values[j]; values[j] = values[j - 1]; values[j - 1] = t
            }
        return n % 2 ? values[(n + 1) / 2] : (values[n / 2] + values[n / 2 + 1]) / 2
    }
    BEGIN { printf "%-38s %10s %10s %7s\n", "per second", "TCP", "SMC", "ratio" }
    {
        for (i = 1; i <= rounds; i++) {
            tcp[i] = $(2 * i); smc[i] = $(2 * (rounds + i)); ratio[i] = smc[i] / tcp[i]
        }
        middle = median(ratio, rounds)
        printf "%-38s %10d %10d %7.2f (%.2f to %.2f)\n", $1, median(tcp, rounds), median(smc, rounds), middle,
            ratio[1], ratio[rounds]
    }'
