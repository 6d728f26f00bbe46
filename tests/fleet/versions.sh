#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# Two versions on one host: the release before (older.sh) and this one. Each daemon has servers and
# clients of each library, whose connections have to be SMC-D; the daemons are exchanged under open
# connections in both orders; the commands of each version read the other's daemon and programs; nginx
# is upgraded (USR2) to a master with the other library, and a program gives an open connection to a
# program that loads the other library. It prints the table of docs/when-it-is-tcp.md.
#
#     versions.sh
#
# $SMC_BUILD is a directory with the programs and the library, which are built by default, and
# $SMC_OLDER_BUILD one with those of the release before. It needs root, nginx, curl and python3; a missing
# one fails where CI is true, and is said aloud elsewhere.
set -euo pipefail

if [ "${1:-}" != inside ]; then
    cd "$(dirname "$0")/../.."
    . tests/containers/common.sh
    need nginx:nginx-light curl:curl python3:python3 unshare:util-linux ip:iproute2 strip:binutils
    older=${SMC_OLDER_BUILD:-} status=0
    [ -n "$older" ] || older=$(tests/fleet/older.sh) || status=$?
    if [ "$status" = 3 ]; then
        echo "VERSIONS ARE NOT TESTED: this clone lacks the release before" >&2
        exit
    fi
    [ "$status" = 0 ] || fail "the release before cannot be built"
    newer=${SMC_BUILD:-target/debug}
    # The whole workspace is selected so that this shares the artifacts of `cargo test --workspace`.
    [ -n "${SMC_BUILD:-}" ] || cargo build -q --workspace --lib --bin smc --bin vhost-device-ism
    scratch=$(mktemp -d)
    host=''
    # All processes of the host end with its first one.
    trap '[ -z "$host" ] || kill -KILL "$host" 2>/dev/null || true; wait; rm -rf "$scratch"' EXIT
    mkdir "$scratch"/{older,newer,installed}
    for version in older newer; do
        cp "${!version}"/{smc,vhost-device-ism,libsmc_preload.so} "$scratch/$version"
    done
    cp tests/containers/common.sh "$scratch"
    head -c 2000000 /dev/urandom >"$scratch/page"
    unshare --net --mount --pid --fork --kill-child --mount-proc -- "$0" inside "$scratch" &
    host=$!
    wait "$host"
    host=''
    exit
fi

# In a host of its own --------------------------------------------------------------------------------

scratch=$2
cd "$scratch"
. ./common.sh
for directory in run dev/shm; do mount -t tmpfs tmpfs "/$directory"; done
mkdir -p /run/vhost-device-ism/any
ip link set lo up
printf 'default = "always-smc"\n' >policy.toml
export XDG_RUNTIME_DIR=/run SMC_POLICY=$scratch/policy.toml
printf '%s\n' 'management = "/run/vhost-device-ism/management.sock"' '[[guest]]' \
    'socket = "/run/vhost-device-ism/any/any.sock"' 'devices = 64' >fabric.toml

# start_daemon VERSION: in place of the one before.
daemon=''
start_daemon() {
    if [ -n "$daemon" ]; then
        kill "$daemon"
        wait "$daemon" || true
    fi
    "./$1/vhost-device-ism" --config fabric.toml >>daemon.log 2>&1 &
    daemon=$!
    wait_for "./$1/vhost-device-ism" ctl list
}
# serve NAME PORT DIRECTORY: an nginx with the library of a directory, alone or the first of its masters.
# It is a process of its own: USR2 is for a master without the parent that started it, and runs the
# program by the path of its command line.
serve() {
    local kept
    # nginx keeps the variables that its file names, and gives no others to a second master.
    kept=$("./$3/smc" run --peer '*' env | sed -nE 's/^(LD_PRELOAD|SMC_[A-Z_]+|XDG_RUNTIME_DIR)=.*/env \1;/p')
    cat >"$1.conf" <<END
$kept
user root; worker_processes 1; pid /run/$1.pid; error_log /run/$1.log;
events {}
http { access_log off; keepalive_requests 1000000; client_body_temp_path /run/$1.body;
proxy_temp_path /run/$1.proxy; fastcgi_temp_path /run/$1.fastcgi; uwsgi_temp_path /run/$1.uwsgi;
scgi_temp_path /run/$1.scgi; server { listen 127.0.0.1:$2; root $scratch; } }
END
    "./$3/smc" run --peer '*' "$(command -v nginx)" -e "/run/$1.log" -c "$scratch/$1.conf" \
        >"$1.out" 2>&1 </dev/null
    wait_for curl -sS "http://127.0.0.1:$2/policy.toml"
}
# get VERSION PORT: a client gets the page; prints what carried the connection.
get() {
    rm -rf status
    "./$1/smc" run --status status --peer '*' curl -sS --fail "http://127.0.0.1:$2/page" -o got
    cmp page got
    sed -n 's/.*"info":"\([^"]*\)".*/\1/p' status/* | tail -n 1 | sed 's/ over .*//'
}
# carried DAEMON SERVER CLIENT PORT: the kind of a connection has to be SMC-D. A busy machine may keep a
# process waiting for its device, so one connection of five has to; no byte of any may differ.
carried() {
    for _ in {1..5}; do
        carrier=$(get "$3" "$4") || fail "a client $3 of a server $2 with a daemon $1"
        [[ $carrier != SMC-D* ]] || return 0
    done
    fail "a client $3 of a server $2 with a daemon $1: $carrier"
}
# row DAEMON SERVER CLIENT PORT: a line of the table.
row() {
    carried "$@"
    echo "| $1 | $2 | $3 | $carrier |"
}
# on_smc VERSION ENDS: so many ends of connections are carried by a device now, as this version sees it.
on_smc() {
    [ "$("./$1/smc" stat --json | { grep -oE '"now": ?"device"' || true; } | wc -l)" -ge "$2" ]
}
# asks FILE PORT: asks again and again by one connection.
asks() {
    python3 -c '
import http.client, os, sys, time
page = open("page", "rb").read()
server = http.client.HTTPConnection("127.0.0.1", int(sys.argv[2]), timeout=120)
server.connect()
server.auto_open = 0
answers = 0
while not os.path.exists("over"):
    server.request("GET", "/page")
    assert server.getresponse().read() == page
    answers += 1
    time.sleep(0.1)
print(answers, file=open(sys.argv[1], "w"))' "$@"
}

echo "| daemon | server | client | connection |"
start_daemon older
serve older 8081 older
serve newer 8082 newer
declare -A client
for version in older newer; do
    for port in 8081 8082; do
        name=$version-$port
        (export -f asks; "./$version/smc" run --peer '*' bash -c 'asks "$@"' asks "$name" "$port") \
            >"$name.out" 2>&1 </dev/null &
        client[$name]=$!
    done
done
for daemon_version in older newer older; do
    [ -n "${again:-}" ] && start_daemon "$daemon_version"
    again=yes
    # Both ends of the four connections that stay open.
    for version in older newer; do wait_for on_smc "$version" 8; done
    for version in older newer; do
        row "$daemon_version" older "$version" 8081
        row "$daemon_version" newer "$version" 8082
        "./$version/vhost-device-ism" ctl list | grep -q any || fail "ctl list of $version"
        "./$version/vhost-device-ism" ctl metrics | grep -q ^ism_ || fail "ctl metrics of $version"
    done
done
: >over
for name in "${!client[@]}"; do
    wait "${client[$name]}" || fail "the open connection of $name: $(cat "$name.out")"
done
echo "four connections stayed open under three daemons: $(tail -qn 1 ./*-808? | paste -sd ' ') answers"

# Packages under programs that run ---------------------------------------------------------------------

rm over
# unpack VERSION: in place of the version that was there, as dpkg does.
unpack() {
    local file
    for file in smc vhost-device-ism libsmc_preload.so; do
        cp "$1/$file" "installed/$file.new"
        mv "installed/$file.new" "installed/$file"
    done
}
# upgrade VERSION: nginx gets a second master by USR2, with the library of another version, and then
# loses the first one.
upgrade() {
    local first second
    first=$(cat /run/upgraded.pid)
    unpack "$1"
    kill -USR2 "$first"
    wait_for test -e /run/upgraded.pid.oldbin -a -s /run/upgraded.pid
    second=$(cat /run/upgraded.pid)
    grep -q '/libsmc_preload\.so (deleted)$' "/proc/$first/maps" || fail "the first master: another library"
    grep -q '/libsmc_preload\.so$' "/proc/$second/maps" ||
        fail "the second master: another library"
    # The workers of both accept. Which one does is the kernel's choice.
    for _ in {1..4}; do
        for version in older newer; do
            carried "$daemon_version" both "$version" 8083
        done
    done
    kill -QUIT "$first"
    wait_for test ! -d "/proc/$first"
    for version in older newer; do row "$daemon_version" "$1, by USR2" "$version" 8083; done
}
# hand_over VERSION: a shell opens a connection, and becomes a program with the library of this version.
hand_over() {
    rm -f opened go
    ./installed/smc run --peer '*' bash -c 'exec 3<>/dev/tcp/127.0.0.1/8083
        : >opened
        until [ -e go ]; do sleep 0.1; done
        printf "GET /page HTTP/1.0\r\n\r\n" >&3
        exec cat <&3' >answer 2>handed.out &
    local program=$!
    wait_for test -e opened
    unpack "$1"
    : >go
    wait "$program" || fail "a program that becomes one of $1: $(cat handed.out)"
    tail -c 2000000 answer | cmp page - || fail "a program that becomes one of $1: $(cat handed.out)"
}
unpack older
serve upgraded 8083 installed
upgrade newer
upgrade older
echo "nginx was upgraded and taken back under clients of both versions"
hand_over newer
hand_over older
echo "programs gave their connections to programs of the other version"
kill "$(cat /run/upgraded.pid)" "$(cat /run/older.pid)" "$(cat /run/newer.pid)" "$daemon"
