#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# Ends the daemon again and again under programs of the distribution, both ends of which run by
# `smc run`, and fails if a client sees an error or wrong data.
# A program without a connection off its device fails, too.
#
#     outlive.sh                 50 deaths under each program, half of them by SIGTERM, half by SIGKILL
#     outlive.sh --quick         two of them
#     outlive.sh redis nginx     some of the programs, by name
#     outlive.sh --install-deps  installs missing packages first, as CI=true does
#
# $SMC_DEATHS is another number of deaths, and $SMC_SEED chooses when they come. $SMC_BUILD is a
# directory with the programs and the library, which are built by default. Between two daemons
# new connections go by TCP. As root, each program has a network namespace of its own, and TCP option
# 254. A program that is not installed is left out aloud; with CI=true that fails.
set -euo pipefail
cd "$(dirname "$0")/../../.."

all=(redis nginx haproxy postgresql tokio)
packages=(redis-server redis-tools nginx-light wrk curl haproxy postgresql iproute2)
# Programs with system calls of their own.
if [ "$(uname -m)" = x86_64 ]; then
    all+=(static go)
    packages+=(golang-go)
fi
deaths=50
own_option() {
    [ "$1" = --quick ] || return 1
    deaths=2
}
# shellcheck source-path=SCRIPTDIR source=common/options.sh
. guest-driver/preload/tests/common/options.sh
parse "$@"
deaths=${SMC_DEATHS:-$deaths}
RANDOM=${SMC_SEED:-1}
wanted=("${names[@]}")
[ ${#wanted[@]} -gt 0 ] || wanted=("${all[@]}")
if $install; then install_missing "${packages[@]}"; fi

# The daemon ------------------------------------------------------------------------------------------

# The whole workspace is selected so that this shares the artifacts of `cargo test --workspace`.
build=${SMC_BUILD:-target/debug}
[ -n "${SMC_BUILD:-}" ] || cargo build -q --workspace --lib --bin smc --bin vhost-device-ism
scratch=$(mktemp -d)
daemon='' own='' processes=() clients=()
clean_up() {
    [ ! -d "$own" ] || : >"$own/over"
    kill "${clients[@]}" "${processes[@]}" 2>/dev/null || true
    [ -z "$daemon" ] || kill -KILL "$daemon" 2>/dev/null || true
    rm -rf "$scratch"
}
trap clean_up EXIT
mkdir "$scratch"/{devices,run}
# PostgreSQL refuses to run as root. Any user has to reach the programs and the devices.
chmod 755 "$scratch"
cp "$build"/{smc,vhost-device-ism,libsmc_preload.so} "$scratch"
export XDG_RUNTIME_DIR=$scratch/run
sockets=()
for i in {10..41}; do
    sockets+=(--socket-path "$scratch/devices/$i.sock")
done

start_daemon() {
    : >"$scratch/daemon.log"
    "$scratch/vhost-device-ism" --socket-mode 666 "${sockets[@]}" >"$scratch/daemon.log" 2>&1 &
    daemon=$!
    # Its sockets are in a network namespace of its own, so ss does not list them.
    until [ "$(grep -c 'listening guest' "$scratch/daemon.log")" = 32 ]; do
        kill -0 "$daemon" || fail "the daemon has ended: $(tail -3 "$scratch/daemon.log")"
        sleep 0.02
    done
}

# end_daemon SIGNAL
end_daemon() {
    kill -s "$1" "$daemon"
    wait "$daemon" 2>/dev/null || true
    daemon=
}

fail() {
    echo "$*" >&2
    exit 1
}

# ends CARRIER: number of ends of connections that this carries now and that can outlive their device.
ends() {
    { "$scratch/smc" stat --json 2>/dev/null || true; } | { grep -oE "\"now\": ?\"$1\"" || true; } | wc -l
}

# Programs --------------------------------------------------------------------------------------------

# test_PROGRAM starts servers by `serve` and clients by `again`. Clients have their files in $own. A
# client that fails says why on standard output or standard error.

# on COMMAND...: runs a command on SMC.
on() {
    ${as_process:-} "${network[@]}" "${user[@]}" "$scratch/smc" run --device "$scratch/devices" --always '*' \
        "${peers[@]}" "${door[@]}" "$@"
}

# serve PORT COMMAND...: starts a server on SMC, and waits until it listens.
serve() {
    local port=$1 server
    shift
    # The signal at the end is for the server, and not for a shell that waits for it.
    as_process=exec on "$@" >"$own/server.$port" 2>&1 </dev/null &
    server=$!
    processes+=("$server")
    until "${network[@]}" ss -Hltn "sport = :$port" | grep -q .; do
        kill -0 "$server" 2>/dev/null || fail "$1 has ended: $(tail -5 "$own/server.$port")"
        sleep 0.05
    done
}

# again FUNCTION: repeats a client until $own/over is there, or until it fails.
again() {
    (
        rounds=0
        while [ ! -e "$own/over" ]; do
            # Not as the condition itself, in which no command would end the function.
            "$1" >"$own/$1" 2>&1 </dev/null &
            if ! wait "$!"; then
                { echo "$1, round $rounds:" && tail -20 "$own/$1"; } >>"$own/failed"
                break
            fi
            rounds=$((rounds + 1))
        done
        echo "$1 $rounds times" >>"$own/rounds"
    ) &
    clients+=("$!")
}

test_redis() {
    serve 7001 redis-server --port 7001 --bind 127.0.0.1 --save '' --dir "$own"
    again redis_benchmark
    again redis_counts
}

redis_benchmark() {
    on redis-benchmark -p 7001 -n 20000 -c 20 -t set,get --csv >"$own/benchmark" 2>&1 ||
        fail "redis-benchmark ends with $?: $(cat "$own/benchmark")"
    [ "$(grep -cE '^"(SET|GET)"' "$own/benchmark")" = 2 ] || fail "$(cat "$own/benchmark")"
    # Without what the library says of a daemon that is not there.
    ! grep -v '^smc run: ' "$own/benchmark" | grep -i error
}

# One connection for some seconds, whose answers are numbers in their order.
redis_counts() {
    on redis-cli -p 7001 del count >"$own/deleted"
    for _ in {1..100}; do
        echo incr count
        sleep 0.03
    done | on redis-cli -p 7001 >"$own/counts"
    seq 100 | cmp - "$own/counts"
}

# nginx_on PORT: starts nginx, which serves the files of $own.
nginx_on() {
    head -c 612 /dev/urandom >"$own/small"
    head -c 20000000 /dev/urandom >"$own/large"
    local paths='' name root=''
    for name in client_body proxy fastcgi uwsgi scgi; do
        paths+="${name}_temp_path $own/$name;"
    done
    [ "$(id -u)" != 0 ] || root='user root;'
    cat >"$own/nginx.conf" <<END
$root daemon off; worker_processes 2; pid $own/pid; error_log $own/log;
events {}
http { access_log off; keepalive_requests 10000000; $paths sendfile on; tcp_nopush on;
server { listen 127.0.0.1:$1; root $own; } }
END
    serve "$1" nginx -e "$own/log" -c "$own/nginx.conf"
}

test_nginx() {
    web=7002
    nginx_on 7002
    again wrk_small
    again curl_large
}

test_haproxy() {
    web=7003
    nginx_on 7002
    cat >"$own/haproxy.cfg" <<END
global
  nbthread 1
defaults
  mode http
  timeout connect 10s
  timeout client 100s
  timeout server 100s
frontend front
  bind 127.0.0.1:7003
  default_backend back
backend back
  server one 127.0.0.1:7002
END
    serve 7003 haproxy -db -f "$own/haproxy.cfg"
    again wrk_small
    again curl_large
}

wrk_small() {
    on wrk -t 1 -c 10 -d 3 "http://127.0.0.1:$web/small" >"$own/wrk" || fail "$(cat "$own/wrk")"
    ! grep -E 'Socket errors|Non-2xx' "$own/wrk"
}

# Two files by one connection, each of which takes a while.
curl_large() {
    local url=http://127.0.0.1:$web/large
    on curl -sS --fail --limit-rate 15M "$url" -o "$own/first" "$url" -o "$own/second"
    cmp "$own/large" "$own/first"
    cmp "$own/large" "$own/second"
}

test_postgresql() {
    local bin root=()
    bin=$(printf '%s\n' /usr/lib/postgresql/*/bin | sort -V | tail -1)
    PATH=$bin:$PATH
    if [ "$(id -u)" = 0 ]; then
        root=(setpriv --reuid=postgres --regid=postgres --init-groups)
        chown postgres "$own"
        mkdir -m 700 "$own/run"
        chown postgres "$own/run"
    fi
    (cd / && "${root[@]}" initdb -A trust -U postgres --no-sync -D "$own/data") >"$own/initdb" 2>&1
    user=("${root[@]}" env "XDG_RUNTIME_DIR=$own/run")
    serve 7004 postgres -D "$own/data" -h 127.0.0.1 -p 7004 -k "$own" -F
    user=()
    # The server has no rights for TCP option 254.
    peers=(--peer '*')
    until pg_here pg_isready -q; do sleep 0.05; done
    pg_here pgbench -i -q -s 2 >"$own/init" 2>&1
    again pg_bench
}

pg_here() {
    PGHOST=127.0.0.1 PGPORT=7004 PGUSER=postgres PGDATABASE=postgres on "$@"
}

# As many transactions are in the history as the client has counted.
pg_bench() {
    pg_here pgbench -n -c 4 -j 1 -T 3 >"$own/pgbench" 2>&1 || fail "$(cat "$own/pgbench")"
    grep -q '^number of failed transactions: 0 ' "$own/pgbench" || fail "$(cat "$own/pgbench")"
    local done before=0
    done=$(sed -n 's/^number of transactions actually processed: //p' "$own/pgbench")
    [ ! -e "$own/history" ] || before=$(cat "$own/history")
    pg_here psql -tAc 'select count(*) from pgbench_history' >"$own/history"
    [ "$(cat "$own/history")" = $((before + done)) ] ||
        fail "$(cat "$own/history") rows of history; before: $before, transactions: $done"
}

# Programs of the workspace's own tests: messages of many lengths over eight connections at a time.
test_tokio() {
    echoes cargo test --workspace --test programs --no-run --message-format=json
}

# The same as a static program.
test_static() {
    door=(--system-calls)
    echoes cargo rustc -p smc-preload --test programs --message-format=json -- -C target-feature=+crt-static
}

# echoes COMMAND...: the command builds the program.
echoes() {
    test=$("$@" 2>"$own/build" |
        sed -n 's/.*"name":"programs".*"executable":"\([^"]*\)".*/\1/p' | tail -1)
    serve 7005 env PRELOAD_TEST_ROLE=server "${echo[@]}" "$test" "${exactly[@]}"
    again tokio_asks
}
echo=(PRELOAD_TEST_PORT=7005 PRELOAD_TEST_ADDRESS=127.0.0.1 RUST_TEST_THREADS=1)
exactly=(echo::tokio_echo --exact --include-ignored --nocapture)

tokio_asks() {
    on env PRELOAD_TEST_ROLE=client SMC_PROGRAMS_FULL=1 "${echo[@]}" "$test" "${exactly[@]}"
}

# A static program in Go, whose runtime is busy with signals, collections and children meanwhile.
test_go() {
    door=(--system-calls)
    CGO_ENABLED=0 GOFLAGS=-mod=mod GOCACHE=$own/cache \
        go build -o "$own/checked" guest-driver/preload/tests/programs/code/checked.go
    serve 7006 "$own/checked" serve 127.0.0.1:7006
    again go_asks
}

go_asks() {
    on "$own/checked" ask 127.0.0.1:7006 20 5000
}

# What each of them needs.
declare -A needs=(
    [redis]='redis-server redis-cli redis-benchmark' [nginx]='nginx wrk curl'
    [haproxy]='haproxy nginx wrk curl' [postgresql]=/usr/lib/postgresql [tokio]=cargo
    [static]=cargo [go]=go
)

# Deaths ----------------------------------------------------------------------------------------------

# await_device: waits until a connection is on a device, for some seconds: clients come and go.
await_device() {
    local _
    for _ in {1..100}; do
        [ "$(ends device)" = 0 ] && [ ! -e "$own/failed" ] || return 0
        sleep 0.1
    done
}

# under PROGRAM: ends daemons while the program's clients run. Fails if one of the clients has.
under() {
    local n signal network=() user=() peers=(--peer '*') door=() left=0 stayed=0 pid
    own=$scratch/$1 clients=() processes=()
    mkdir "$own"
    : >"$own/rounds"
    if [ "$(id -u)" = 0 ]; then
        unshare --net sleep infinity &
        pid=$!
        processes+=("$pid")
        until [ "$(readlink "/proc/$pid/ns/net")" != "$(readlink /proc/self/ns/net)" ]; do
            sleep 0.01
        done
        network=(nsenter "--net=/proc/$pid/ns/net") peers=()
        "${network[@]}" ip link set lo up
    fi
    start_daemon
    "test_$1"
    for ((n = 0; n < deaths; n++)); do
        sleep "1.$((RANDOM % 10))$((RANDOM % 10))"
        await_device
        [ ! -e "$own/failed" ] || break
        signal=TERM
        [ $((n % 2)) = 0 ] || signal=KILL
        stayed=$((stayed + $(ends device)))
        end_daemon "$signal"
        sleep "0.$((RANDOM % 5))"
        left=$((left + $(ends tcp)))
        start_daemon
    done
    : >"$own/over"
    for pid in "${clients[@]}"; do
        wait "$pid" || true
    done
    kill "${processes[@]}" 2>/dev/null || true
    wait "${processes[@]}" 2>/dev/null || true
    processes=()
    end_daemon TERM
    echo "$1: $n deaths; $(paste -sd ' ' "$own/rounds"); before the deaths $stayed ends of connections" \
        "were on a device, and after them $left had left theirs"
    if [ -e "$own/failed" ]; then
        cat "$own/failed"
        return 1
    fi
    [ "$left" -gt 0 ] || fail "$1: no connection has left its device, so this shows nothing"
    rm -rf "$own"
}

is_there() {
    local need
    for need in ${needs[$1]}; do
        [ -e "$need" ] || command -v "$need" >/dev/null || return 1
    done
}

PATH=$PATH:/usr/sbin
left_out=()
for program in "${wanted[@]}"; do
    [ -n "${needs[$program]:-}" ] || fail "$0: no program $program; there are: ${all[*]}"
    if ! is_there "$program"; then
        left_out+=("$program")
        continue
    fi
    under "$program"
done
if [ ${#left_out[@]} -gt 0 ]; then
    echo "LEFT OUT, for they are not installed: ${left_out[*]}"
    [ "${CI:-}" != true ]
fi
