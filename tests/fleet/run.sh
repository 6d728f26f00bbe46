#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# The day of a fleet, by docs/rollout.md: ten hosts with a daemon, redis and nginx each, whose clients go
# to SMC by 5 %, 50 % and 100 %. Then the release is exchanged, and a client of one host breaks the
# device's protocol: the alert names that host, which is switched off and on again. Clients of both
# services run all the while, and fail at the first error or wrong answer.
#
#     run.sh [HOSTS]
#
# A host is a network, mount and process namespace. $SMC_BUILD is a directory with the programs and the
# library, which are built by default. $SMC_OLDER_BUILD is one of the release before: its library stays in
# programs that run, under the newer daemon and beside newer clients. It needs root, redis, nginx, curl
# and python3; a missing one fails where CI is true, and is said aloud elsewhere.
set -euo pipefail
cd "$(dirname "$0")/../.."
. tests/containers/common.sh
need redis-server:redis-server redis-benchmark:redis-tools nginx:nginx-light curl:curl python3:python3 \
    unshare:util-linux ip:iproute2
hosts=$(seq -s " " "${1:-10}")
# The whole workspace is selected so that this shares the artifacts of `cargo test --workspace`.
build=${SMC_BUILD:-target/debug}
[ -n "${SMC_BUILD:-}" ] || cargo build -q --workspace --lib --bin smc --bin vhost-device-ism
scratch=$(mktemp -d)
declare -A first daemon counting
end() {
    : >"$scratch/over"
    # The other processes of a host end with its first one.
    [ ${#first[@]} = 0 ] || kill -KILL "${first[@]}" 2>/dev/null || true
    wait
    rm -rf "$scratch"
}
trap end EXIT
mkdir "$scratch"/{older,newer}
cp "${SMC_OLDER_BUILD:-$build}"/{smc,vhost-device-ism,libsmc_preload.so} "$scratch/older"
cp "$build"/{smc,vhost-device-ism,libsmc_preload.so} "$scratch/newer"
ln -s older "$scratch/installed"

# A host ----------------------------------------------------------------------------------------------

# on HOST COMMAND...: runs a command there.
on() {
    local host=$1
    shift
    XDG_RUNTIME_DIR=/run SMC_POLICY=$scratch/$host/policy.toml \
        nsenter --target "${first[$host]}" --net --mount --pid -- "$@"
}

# write_policy HOST LINE...: a file in place of the other, as the page does.
write_policy() {
    local file=$scratch/$1/policy
    printf '%s\n' "${@:2}" >"$file.new"
    mv "$file.new" "$file.toml"
}
# policy LINES: what the clients of every host may do from now on.
policy() {
    local host
    for host in $hosts; do
        write_policy "$host" 'default = "always-smc"' '[[rule]]' 'when = "connect"' "$1"
    done
}

# start_daemon HOST OLDER|NEWER
start_daemon() {
    on "$1" bash -c 'echo $$ >/run/daemon; exec "$0" --config "$1"' "$scratch/$2/vhost-device-ism" \
        "$scratch/fabric.toml" >>"$scratch/$1/daemon" 2>&1 &
    daemon[$1]=$!
    wait_for on "$1" test -S /run/vhost-device-ism/any/any.sock
}

# serve HOST COMMAND...
serve() {
    local host=$1
    shift
    on "$host" "$scratch/older/smc" run --peer '*' "$@" >"$scratch/$host/$1" 2>&1 </dev/null &
}

start_host() {
    local host=$1 place=$scratch/$1 outer
    mkdir "$place"
    unshare --net --mount --pid --fork --kill-child --mount-proc -- bash -euc '
        for directory in run dev/shm; do mount -t tmpfs tmpfs "/$directory"; done
        mkdir -p /run/vhost-device-ism/any
        ip link set lo up
        : >"$0/up"
        exec sleep infinity' "$place" 2>"$place/unshare" &
    outer=$!
    wait_for test -e "$place/up"
    first[$host]=$(tr -d ' ' <"/proc/$outer/task/$outer/children")
}

printf '%s\n' 'management = "/run/vhost-device-ism/management.sock"' '[[guest]]' \
    'socket = "/run/vhost-device-ism/any/any.sock"' 'devices = 64' >"$scratch/fabric.toml"
head -c 2000000 /dev/urandom >"$scratch/page"
cat >"$scratch/nginx.conf" <<END
user root; daemon off; worker_processes 1; pid /run/nginx.pid; error_log /run/nginx.log;
events {}
http { access_log off; keepalive_requests 1000000; client_body_temp_path /run/body;
proxy_temp_path /run/proxy; fastcgi_temp_path /run/fastcgi; uwsgi_temp_path /run/uwsgi;
scgi_temp_path /run/scgi; server { listen 127.0.0.1:8080; root $scratch; } }
END

# Its clients -----------------------------------------------------------------------------------------

# again HOST CLIENT: repeats a client until the day is over, or until it fails.
again() {
    local rounds=0
    until [ -e "$scratch/over" ]; do
        if ! "$2" "$1" >"$scratch/$1/$2" 2>&1; then
            echo "host $1, $2: $(tail -n 5 "$scratch/$1/$2")" >>"$scratch/failed"
            break
        fi
        rounds=$((rounds + 1))
        echo "$rounds" >"$scratch/$1/$2.new"
        mv "$scratch/$1/$2.new" "$scratch/$1/$2.rounds"
        # Twenty of them share two processors.
        sleep 2
    done
}
# Short connections of redis, and some of nginx with a file each.
asks_redis() {
    on "$1" "$scratch/installed/smc" run --peer '*' redis-benchmark -c 20 -n 200 -t set,get --csv \
        >"$scratch/$1/csv"
    [ "$(grep -cE '^"(SET|GET)"' "$scratch/$1/csv")" = 2 ] && ! grep -i error "$scratch/$1/csv"
}
asks_nginx() {
    on "$1" "$scratch/installed/smc" run --peer '*' curl -sS --fail http://127.0.0.1:8080/page \
        -o "$scratch/$1/got"
    cmp "$scratch/page" "$scratch/$1/got"
}
# One connection for the day: each answer is the next number. A client that waited for its device says so
# beside them.
counts() {
    until [ -e "$scratch/over" ]; do
        echo incr count
        sleep 0.1
    done | tee "$scratch/$1/asked" |
        on "$1" "$scratch/older/smc" run --peer '*' redis-cli \
            >"$scratch/$1/counts" 2>"$scratch/$1/counts.errors"
}
no_error() { [ ! -e "$scratch/failed" ] || fail "$(cat "$scratch/failed")"; }

# after_rounds NUMBER: waits until every client has been repeated so often.
has_rounds() { [ -e "$scratch/failed" ] || [ "$(cat "$scratch/$1.rounds")" -ge "$2" ]; }
after_rounds() {
    local host client name
    local -A wanted
    for host in $hosts; do
        for client in asks_redis asks_nginx; do
            name=$host/$client
            wanted[$name]=$(($(cat "$scratch/$name.rounds" 2>/dev/null || echo 0) + $1))
        done
    done
    for name in "${!wanted[@]}"; do
        wait_for has_rounds "$name" "${wanted[$name]}"
        no_error
    done
}

# Steps of the day ------------------------------------------------------------------------------------

# ends HOST CARRIER: ends of connections which this carries now.
ends() {
    on "$1" "$scratch/newer/smc" stat --json | { grep -oE "\"now\": ?\"$2\"" || true; } | wc -l
}
# servers: connections of all servers that became SMC, and those that became TCP.
servers() {
    local host
    for host in $hosts; do
        # A busy machine may keep a process from answering: its connections would be missing here.
        wait_for eval 'on "$host" "$scratch/newer/smc" stat metrics >"$scratch/$host/metrics" &&
            ! grep -E "timed out|no time for" "$scratch/$host/metrics"'
        cat "$scratch/$host/metrics"
    done | awk '
        /^smc_handshakes_total/ && /program="(redis-server|nginx)"/ { count[/kind="SMC-D"/] += $NF }
        END { print count[1] + 0, count[0] + 0 }'
}
# step SHARE LEAST MOST: changes the policy; of the connections after that, so many in 100 are SMC. The
# bounds are far from those that chance reaches.
step() {
    local smc tcp more_smc more_tcp percent
    policy "$1"
    after_rounds 1
    read -r smc tcp <<<"$(servers)"
    after_rounds 1
    read -r more_smc more_tcp <<<"$(servers)"
    smc=$((more_smc - smc)) tcp=$((more_tcp - tcp))
    percent=$((100 * smc / (smc + tcp)))
    echo "$SECONDS s: ${1//$'\n'/, }: $smc connections on SMC, $tcp on TCP"
    [ "$percent" -ge "$2" ] && [ "$percent" -le "$3" ] || fail "$percent % are on SMC"
}
# daemons: counts of faults of all hosts, one a line.
daemons() {
    local host
    for host in $hosts; do
        on "$host" "$scratch/newer/vhost-device-ism" ctl metrics | awk -v host="$host" -v metric="$metric" '
            index($0, metric "{") == 1 { sum += $NF } END { print host, sum + 0 }'
    done
}
# alerts: hosts for which the rule IsmFaults holds, against the counts of before. Prometheus is not there.
alerts() { join <(sort "$scratch/before") <(daemons | sort) | awk '$3 > $2 { print $1 }' | paste -sd ' '; }
metric=$(sed -n '/alert: IsmFaults/,/expr:/s/.*expr: increase(\([a-z_]*\)\[5m\]) > 0$/\1/p' \
    packaging/prometheus-alerts.yaml)
[ -n "$metric" ] || fail "the rule IsmFaults has another form"
on_smc() { [ "$(ends "$1" device)" -ge 2 ]; }
off_smc() { [ "$(ends "$1" device)" = 0 ]; }

echo "$(wc -w <<<"$hosts") hosts with a policy that says TCP"
for host in $hosts; do start_host "$host"; done
policy 'use = "tcp"'
for host in $hosts; do
    start_daemon "$host" older
    serve "$host" redis-server --port 6379 --bind 127.0.0.1 --save '' --dir "$scratch/$host"
    serve "$host" nginx -e /run/nginx.log -c "$scratch/nginx.conf"
done
for host in $hosts; do
    wait_for on "$host" bash -c 'exec 3<>/dev/tcp/127.0.0.1/6379 4<>/dev/tcp/127.0.0.1/8080'
    again "$host" asks_redis &
    again "$host" asks_nginx &
done

step 'use = "tcp"' 0 0
step 'use = "always-smc"
share = "5%"' 1 15
step 'use = "always-smc"
share = "50%"' 35 65
step 'use = "always-smc"' 95 100

echo "$SECONDS s: another release, host by host: the programs that run keep their library"
ln -sfn newer "$scratch/installed"
for host in $hosts; do
    counts "$host" &
    counting[$host]=$!
done
for host in $hosts; do
    wait_for on_smc "$host"
    on "$host" bash -c 'kill "$(cat /run/daemon)"'
    wait "${daemon[$host]}" || true
    start_daemon "$host" newer
done
for host in $hosts; do wait_for on_smc "$host"; done
step 'use = "always-smc"' 95 100

echo "$SECONDS s: a client that breaks the device's protocol, on one host"
daemons >"$scratch/before"
[ -z "$(alerts)" ] || fail "an alert before: $(alerts)"
bad=2
on "$bad" python3 -c '
import socket
pool = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
pool.connect("/run/vhost-device-ism/any/any.sock")
_, descriptors, _, _ = socket.recv_fds(pool, 100, 1)
device = socket.socket(fileno=descriptors[0])
device.sendall(b"\xff" * 12)
device.recv(1)'
wait_for eval '[ "$(alerts)" = "$bad" ]'
echo "    the alert IsmFaults is for host $bad alone"
begin=$(date +%s%N)
write_policy "$bad" 'default = "tcp"'
# A busy machine may take longer than the second of the page.
on "$bad" "$scratch/newer/vhost-device-ism" ctl drain any --timeout 10 >"$scratch/drained"
echo "    $(cat "$scratch/drained"), after $((($(date +%s%N) - begin) / 1000000)) ms"
wait_for off_smc "$bad"
after_rounds 1
off_smc "$bad" || fail "host $bad is on SMC"
for host in $hosts; do [ "$host" = "$bad" ] || wait_for on_smc "$host"; done
[ "$(alerts)" = "$bad" ] || fail "alerts: $(alerts)"

echo "$SECONDS s: on again"
policy 'use = "always-smc"'
on "$bad" "$scratch/newer/vhost-device-ism" ctl undrain any >"$scratch/drained"
wait_for on_smc "$bad"
after_rounds 1

: >"$scratch/over"
for host in $hosts; do
    wait "${counting[$host]}" || fail "host $host: $(tail -n 3 "$scratch/$host"/counts*)"
    seq "$(wc -l <"$scratch/$host/asked")" | cmp - "$scratch/$host/counts" ||
        fail "host $host counts wrongly: $(head -n 3 "$scratch/$host"/counts*)"
done
no_error
runs=$(awk '{ runs += $1 } END { print runs }' "$scratch"/*/*.rounds)
echo "$SECONDS s: the day of a fleet: $runs runs of clients, 0 errors"
