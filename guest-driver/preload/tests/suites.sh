#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# Runs other projects' own tests with and without `smc run`, and compares the result of each test.
#
#     suites.sh                 all suites, about half an hour
#     suites.sh --quick         those that take a minute or two together
#     suites.sh libuv node      some of them, by name
#     suites.sh --install-deps  installs missing packages first, as CI=true does
#
# Each suite is a file of tests/suites. The suites come from packages of the distribution and from
# crates.io at run time, into $SMC_SUITES_CACHE (~/.cache/vhost-device-ism/suites); nothing of them is
# in this repository. As root, each run has a network namespace of its own, and TCP option 254.
#
# Most tests have both ends of a connection in one process, with one device, so SMC does not carry the
# connection; such a test shows only that the library does not disturb. cpython-apart puts the clients of
# CPython's test_socket into processes of their own, and helpers of libuv are such processes, too. The
# last line of a suite says how many ends of connections were on SMC. $SMC_SUITES_LOGS is a directory
# for the output of the tests.
#
# A difference fails, unless suites/accepted.txt lists it with its reason; so does a listed one that no
# longer occurs, if it is marked `always`. A suite that cannot be obtained is left out aloud; with CI=true
# that fails.
set -euo pipefail
cd "$(dirname "$0")/../../.."
here=$PWD/guest-driver/preload/tests/suites
cache=${SMC_SUITES_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/vhost-device-ism/suites}

all=(cpython cpython-apart libuv libevent node rust-std tokio)
quick=(cpython cpython-apart rust-std libuv)
# The tests of Go are static programs, whose system calls the library takes over.
[ "$(uname -m)" != x86_64 ] || { all+=(go) quick+=(go); }

export SMC_SUITES_QUICK=false
own_option() {
    [ "$1" = --quick ] || return 1
    SMC_SUITES_QUICK=true names+=("${quick[@]}")
}
# shellcheck source-path=SCRIPTDIR source=common/options.sh
. guest-driver/preload/tests/common/options.sh
parse "$@"
wanted=("${names[@]}")
[ ${#wanted[@]} -gt 0 ] || wanted=("${all[@]}")

# The daemon, and the command with the library --------------------------------------------------------

# The whole workspace is selected so that this shares the artifacts of `cargo test --workspace`.
cargo build -q --workspace
scratch=$(mktemp -d)
daemon=
clean_up() {
    [ -z "$daemon" ] || kill "$daemon" 2>/dev/null || true
    rm -rf "$scratch"
}
trap clean_up EXIT
mkdir "$scratch"/{devices,results,status,own}
# Some suites refuse to run as root. Any user has to reach the programs and the devices.
chmod 755 "$scratch"
chmod 1777 "$scratch/status"
cp target/debug/{smc,vhost-device-ism,libsmc_preload.so} "$scratch"
sockets=()
for i in {10..33}; do
    sockets+=(--socket-path "$scratch/devices/$i.sock")
done
"$scratch/vhost-device-ism" --socket-mode 666 "${sockets[@]}" >"$scratch/daemon.log" 2>&1 &
daemon=$!

# on WITH|WITHOUT COMMAND...: runs a command in a network namespace of its own, under `smc run` or not.
# The tests of a suite write lines "RESULT TEST" into the file $RESULTS; the directory $own is theirs.
on() {
    local how=$1 run=()
    shift
    if [ "$(id -u)" = 0 ]; then
        # shellcheck disable=SC2016 # the words are those of the inner shell
        run=(unshare --net bash -c 'ip link set lo up; exec "$@"' -)
    fi
    if [ "$how" = with ]; then
        run+=("$scratch/smc" run --device "$scratch/devices" --status "$scratch/status")
    fi
    "${run[@]}" "$@"
}
export -f on
export scratch here cache install

# Suites -------------------------------------------------------------------------------------------------

# compare SUITE: prints the tests whose results differ, and those that the list has wrongly.
compare() {
    awk -v suite="$1" -F '\t' '
        FILENAME ~ /accepted.txt$/ { if ($1 == suite) { listed[$2] = $3; reason[$2] = $4 } next }
        FILENAME ~ /without$/ { without[$2] = $1; all[$2]; next }
        { with[$2] = $1; all[$2] }
        END {
            for (test in all) {
                a = test in without ? without[test] : "not run"
                b = test in with ? with[test] : "not run"
                tests++
                if (a == b) {
                    if (listed[test] == "always") { print "no longer differs: " suite "\t" test; bad++ }
                } else if (a != "ok" && b == "ok") {
                    print "only without: " suite "\t" test "\t" a
                } else if (test in listed) {
                    print "accepted: " suite "\t" test "\t" a "\t" b "\t" reason[test]
                } else {
                    print "DIFFERS: " suite "\t" test "\twithout " a "\twith " b; bad++
                }
            }
            printf "%s: %d tests, %d ok without\n", suite, tests, ok(without)
            exit bad > 0
        }
        function ok(results,  test, n) { for (test in results) n += results[test] == "ok"; return n + 0 }
    ' "$here/accepted.txt" "$scratch/results/$1.without" "$scratch/results/$1.with" | sort
}

# of_suite COMMAND...: calls a function of the suite $suite in a shell that ends with the first failure.
of_suite() {
    # shellcheck disable=SC2016 # the words are those of the inner shell
    bash -euo pipefail -c '. "$here/packages.sh"; . "$here/$0.sh"; "$@"' "$suite" "$@"
}

# one_way WITH|WITHOUT: runs the suite $suite one way.
one_way() {
    local results=$scratch/results/$suite.$1 own=$scratch/own/$suite.$1
    mkdir -p "$own"
    : >"$results"
    RESULTS=$results own=$own of_suite run "$1" >"$results.log" 2>&1 </dev/null ||
        echo "the suite ended with status $?, $1 smc run"
}

status=0 left_out=()
for suite in "${wanted[@]}"; do
    if [ ! -e "$here/$suite.sh" ]; then
        echo "$0: no suite $suite; there are: ${all[*]}" >&2
        exit 2
    fi
    begin=$SECONDS
    printf '\n== %s ==\n' "$suite"
    if ! of_suite obtain >"$scratch/obtain.log" 2>&1; then
        cat "$scratch/obtain.log"
        left_out+=("$suite")
        continue
    fi
    if $SMC_SUITES_QUICK && [ "$(id -u)" = 0 ]; then
        # Each run has a network of its own, so they do not disturb each other.
        one_way without &
        one_way with
        wait "$!"
    else
        one_way without
        one_way with
    fi
    if [ ! -s "$scratch/results/$suite.without" ]; then
        tail -30 "$scratch/results/$suite.without.log"
        echo "$suite: no test ran"
        status=1
        continue
    fi
    compare "$suite" || status=1
    if [ -n "${SMC_SUITES_LOGS:-}" ]; then
        mkdir -p "$SMC_SUITES_LOGS"
        cp "$scratch/results/$suite."* "$SMC_SUITES_LOGS"
    fi
    smc=$(cat "$scratch"/status/* 2>/dev/null | grep -c '"smc":true' || true)
    rm -f "$scratch"/status/*
    echo "$suite: $((SECONDS - begin)) s, $smc ends of connections were on SMC"
done

if [ ${#left_out[@]} -gt 0 ]; then
    echo "LEFT OUT, for what is named above is missing: ${left_out[*]}"
    [ "${CI:-}" != true ] || status=1
fi
exit "$status"
