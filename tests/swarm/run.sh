#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# A Swarm of two nodes, each with a dockerd and a daemon of its own in mount, network and process
# namespaces: the commands of docs/containers.md as they stand there. Pairs on one node are on SMC-D, those
# across on TCP. Then nodes, engines and daemons come and go, and nothing may be left of it.
#
# It needs root and mmdebstrap; a missing one fails where CI is true, and is said aloud elsewhere. The
# images are those of tests/containers/engines.sh. It is no part of .ci/run.
set -euo pipefail

# On the machine that tests ---------------------------------------------------------------------------

if [ "${1:-}" != inside ]; then
    cd "$(dirname "$0")/../.."
    . tests/containers/common.sh
    need mmdebstrap:mmdebstrap
    tree=$(tree)
    host=$(host_image trixie)
    inside=$(inside_image)
    root=$(mktemp -d "${TMPDIR:-/var/tmp}/swarm.XXXXXX")
    name=${root##*/}
    end() {
        rm -rf --one-file-system "$root"
        # Those of the node that was killed.
        find /sys/fs/cgroup -depth -type d -path "*/$name-*" -exec rmdir {} + 2>/dev/null || true
    }
    trap end EXIT
    tar -C "$root" -xf "$host"
    cp -r "$tree/bin" "$tree/lib" "$root/usr/local"
    mkdir -p "$root/srv/docs" "$root/srv/packaging"
    cp tests/swarm/run.sh tests/containers/common.sh "$root/srv"
    cp docs/containers.md "$root/srv/docs"
    cp packaging/swarm.yaml packaging/vhost-device-ism.toml "$root/srv/packaging"
    cp "$inside" "$root/srv/image.tar"
    enter "$root" ./run.sh inside "$name"
    exit
fi

# In a host of its own --------------------------------------------------------------------------------

. ./common.sh
name=$2
ulimit -u 8192
unified=/sys/fs/cgroup
[ ! -d $unified/unified ] || unified=$unified/unified
end() {
    local status=$?
    [ "$status" = 0 ] || tail -n 15 difference /var/log/*.log 2>/dev/null | cut -c1-300 >&2
}
trap end EXIT
declare -A outer init engines daemons
# at NODE COMMAND...: runs it in the node.
at() {
    nsenter --target "${init[$1]}" --mount --uts --net --pid --wdns=/srv -- "${@:2}"
}
# node NAME ADDRESS: makes a node, with engine and daemon.
node() {
    mkdir -p "/srv/$1-data" "$unified/$name-$1"
    unshare --net --uts --mount --pid --fork --kill-child --mount-proc bash -euc '
        hostname "$1"
        mount -t tmpfs tmpfs /run
        mount -t tmpfs tmpfs /dev/shm
        mkdir -p /run/vhost-device-ism/any /var/lib/docker
        mount --bind "/srv/$1-data" /var/lib/docker
        ip link set lo up
        touch "/srv/$1-data/begun"
        while :; do sleep 1; done' bash "$1" &
    outer[$1]=$!
    wait_for test -e "/srv/$1-data/begun"
    init[$1]=$(pgrep -P "${outer[$1]}")
    ip link add "wire-$1" type veth peer name eth0 netns "${init[$1]}"
    ip link set "wire-$1" master wire up
    at "$1" ip addr add "$2/24" dev eth0
    at "$1" ip link set eth0 up
    daemon "$1"
    sed "s|/sys/fs/cgroup/docker|$unified/$name-$1|" docs/containers.md >page.md
    runner=(at "$1" bash -euc)
    say_block page.md node
    engine "$1"
    at "$1" docker import image.tar debian:latest >/dev/null
}
# engine NODE, daemon NODE: starts it. stop engine|daemon NODE: ends it.
engine() {
    at "$1" sh -euc 'echo $$ >/run/engine.pid; exec dockerd --cgroup-parent "$0"' "/$name-$1" \
        >>"/var/log/dockerd-$1.log" 2>&1 &
    engines[$1]=$!
    wait_for at "$1" docker info
}
daemon() {
    at "$1" sh -euc 'echo $$ >/run/daemon.pid
        exec vhost-device-ism --config packaging/vhost-device-ism.toml' >>"/var/log/ism-$1.log" 2>&1 &
    daemons[$1]=$!
    wait_for at "$1" test -S /run/vhost-device-ism/management.sock
}
stop() {
    at "$2" sh -euc 'kill "$(cat "/run/$0.pid")"' "$1"
    [ "$1" = engine ] && wait "${engines[$2]}" || wait "${daemons[$2]}" || true
}
# task NODE SERVICE: its container there, if there is one.
task() {
    at "$1" docker ps --quiet --filter "name=pairs_$2" | head -n 1
}
# place SERVICE: the node that runs it.
place() {
    local node
    for node in one two; do
        [ -z "${init[$node]}" ] || [ -z "$(task $node "$1")" ] || echo $node
    done
}
# has NODE SERVICE N: whether so many of its containers run there.
has() {
    [ "$(at "$1" docker ps --quiet --filter "name=pairs_$2" | wc -l)" = "$3" ]
}
# handshakes COLUMN: how many the web server has had: 1 SMC-D, 3 TCP.
handshakes() {
    local node
    node=$(place web)
    at "$node" docker exec "$(task "$node" web)" smc stat totals 2>/dev/null |
        sed -nE 's/^[^n]*nginx [0-9]+ +([0-9]+) +([0-9]+) +([0-9]+) .*/\'"$1"'/p' |
        awk '{ sum += $1 } END { print sum + 0 }'
}
# grows COLUMN: waits until there are more of them than before. A new server begins at 0.
grows() {
    local before now
    before=$(handshakes "$1") || before=0
    more() {
        now=$(handshakes "$1") || return
        [ "$now" -ge "$before" ] || before=$now
        [ "$now" -gt "$before" ]
    }
    wait_for more "$1"
}
# running N: whether so many tasks run.
running() {
    [ "$(at one docker stack ps pairs --filter desired-state=running --format '{{.CurrentState}}' |
        grep -c ^Running)" = "$1" ]
}
# failures NODE: how many rounds of the client there have failed.
failures() {
    at "$1" docker logs "$(task "$1" client)" 2>/dev/null | grep -c failed || true
}
other() {
    [ "$1" = one ] && echo two || echo one
}
# left NODE: what containers could leave there: files, mounts, processes, cgroups. The engine has a
# socket of each start.
left() {
    (
        at "$1" sh -euc 'find /run /dev/shm -path /run/docker/swarm -prune -o \
            -path "/run/docker/libnetwork/*" -prune -o -print
            cut -d" " -f5 /proc/self/mountinfo
            ps -e -o comm= | grep -vxE "sh|bash|sleep|ps|grep|find|cut"'
        find /sys/fs/cgroup -type d -path "*/$name-$1*" 2>/dev/null || true
    ) | sort
}

ip link add wire type bridge
ip link set wire up
init=([one]='' [two]='')
node one 10.9.0.1
node two 10.9.0.2
at one docker --version
runner=(at one bash -euc)
say_block page.md manager init 'docker swarm join'
join=$(grep 'docker swarm join --token' <<<"$said")
at two bash -euc "$join"
# A container without a device shows what the engine itself leaves.
at one docker run --rm --network none debian true
left one >before
say_block page.md deploy
wait_for running 4

echo "pairs on one node are on SMC-D, those across on TCP"
web=$(place web) store=$(place store)
grows 1
grows 3
runner=(at "$web" bash -euc)
say_block page.md look totals "no device reaches the peer's GID"
echo "$said"
# It serves for throughput.
at "$web" docker exec -d "$(task "$web" web)" iperf3 -s
for client in one two; do
    kind() { [ $client = "$1" ] && echo "on one node" || echo "across    "; }
    said=$(at $client docker exec "$(task $client client)" \
        redis-benchmark -h store -t get -n 20000 -q --csv | awk -F'"' 'END { print $4 }')
    echo "    $(kind "$store"): redis GET, requests per second: $said"
    said=$(at $client docker exec "$(task $client client)" iperf3 -c web -t 5 -f g |
        awk '/receiver/ { print $7, $8 }')
    echo "    $(kind "$web"): iperf3, one stream: $said"
done

echo "services are updated"
for service in client web; do
    at one docker service update --quiet --force "pairs_$service" >/dev/null
done
wait_for running 4
grows 1
grows 3

echo "the daemon restarts under traffic: connections are TCP until it is back"
web=$(place web)
sleep 1
before=$(failures "$web")
for _ in 1 2 3; do
    stop daemon "$web"
    grows 3
    daemon "$web"
    grows 1
done
# One that the daemon's end has cut off may fail.
failed=$(($(failures "$web") - before))
echo "    $failed rounds of the client beside it failed"
[ "$failed" -le 3 ] || fail "more than one for each restart"

echo "dockerd restarts on each node, with and without a daemon"
for node in one two; do
    stop engine $node
    engine $node
    stop daemon $node
    stop engine $node
    engine $node
    daemon $node
done
wait_for running 4
wait_for has one client 1
wait_for has two client 1
grows 1

echo "a node is drained, and comes back"
for node in two one; do
    at one docker node update --availability drain $node >/dev/null
    wait_for has $node . 0
    wait_for has "$(other $node)" web 1
    wait_for has "$(other $node)" client 1
    grows 1
    at one docker node update --availability active $node >/dev/null
    wait_for has $node client 1
    grows 3
done

echo "services from options instead of a file"
runner=(at one bash -euc)
say_block page.md service
wait_for running 4
at one docker service rm web >/dev/null

echo "a node is killed"
kill -KILL "${init[two]}"
wait "${outer[two]}" 2>/dev/null || true
init[two]=''
wait_for has one web 1
wait_for has one store 1
wait_for has one client 1
grows 1

echo "nothing is left on the other"
say_block page.md remove
at one docker network rm net >/dev/null
nothing() {
    left one >after
    comm -13 before after >difference
    [ ! -s difference ]
}
wait_for nothing
said=$(at one smc stat fabric --management /run/vhost-device-ism/management.sock)
expect 'smc stat fabric' 'pool: 0 of 64 devices in use'
stop daemon one
said=$(at one find /run/vhost-device-ism | tr '\n' ' ')
expect 'find /run/vhost-device-ism' '^/run/vhost-device-ism /run/vhost-device-ism/any $'
echo "swarm: all done"
