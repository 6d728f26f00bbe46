#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# A Swarm of two nodes, each a dockerd and a daemon of its own in a network namespace: services by the
# commands of docs/clusters.md, pairs on one node on SMC-D, pairs across on TCP.
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
    host=$(image engines trixie apt \
        docker.io,docker-cli,docker-compose,containerd,runc,podman,netavark,aardvark-dns,nftables,iptables,fuse-overlayfs,passt,uidmap,iproute2,mount,passwd,curl,procps)
    inside=$(image containers-more bookworm essential \
        nginx-light,curl,redis-server,redis-tools,iperf3,libjemalloc2)
    root=$(mktemp -d "${TMPDIR:-/var/tmp}/swarm.XXXXXX")
    trap 'rm -rf --one-file-system "$root"' EXIT
    tar -C "$root" -xf "$host"
    cp -r "$tree/bin" "$tree/lib" "$root/usr/local"
    cp tests/swarm/run.sh tests/containers/common.sh "$root/srv"
    cp packaging/vhost-device-ism.toml "$root/srv"
    cp "$inside" "$root/srv/image.tar"
    enter "$root" ./run.sh inside
    exit
fi

# In a host of its own --------------------------------------------------------------------------------

. ./common.sh
ulimit -u 8192
unified=/sys/fs/cgroup
[ ! -d $unified/unified ] || unified=$unified/unified
end() {
    local status=$?
    [ "$status" = 0 ] || tail -n 15 /var/log/*.log | cut -c1-300 >&2
}
trap end EXIT
# engine NODE, daemon NODE: start the node's dockerd, in namespaces of its own, and its daemon.
engine() {
    nsenter --net="/run/netns/$1" unshare --mount --uts sh -euc "
        hostname $1
        mount --bind /srv/$1/sockets /run/vhost-device-ism
        exec dockerd --host unix:///srv/$1/docker.sock --data-root /srv/$1/data \
            --exec-root /srv/$1/state --pidfile /srv/$1/pid --cgroup-parent /$1" \
        >>"/var/log/dockerd-$1.log" 2>&1 &
    engines[$1]=$!
    wait_for on "$1" info
}
daemon() {
    unshare --mount sh -euc "
        mount --bind /srv/$1/sockets /run/vhost-device-ism
        exec vhost-device-ism --config /srv/vhost-device-ism.toml" >>"/var/log/ism-$1.log" 2>&1 &
    daemons[$1]=$!
}
# on NODE COMMAND...: a command of docker.
on() {
    docker --host "unix:///srv/$1/docker.sock" "${@:2}"
}
# task NODE SERVICE: its container.
task() {
    on "$1" ps --quiet --filter "name=pairs_$2" | head -n 1
}
wait_for() {
    local attempt
    for attempt in $(seq 300); do "$@" >/dev/null 2>&1 && return || sleep 0.2; done
    fail "never: $*"
}
# handshakes COLUMN: how many the web server has had: 1 SMC-D, 3 TCP.
handshakes() {
    on one exec "$(task one web)" smc stat totals |
        sed -nE 's/^[^n]*nginx [0-9]+ +([0-9]+) +([0-9]+) +([0-9]+) .*/\'"$1"'/p' |
        awk '{ sum += $1 } END { print sum + 0 }'
}
# grows COLUMN: whether there are more of them than before.
grows() {
    local before
    before=$(handshakes "$1")
    for _ in $(seq 50); do
        sleep 0.2
        [ "$(handshakes "$1")" -le "$before" ] || return 0
    done
    return 1
}
# running N: whether so many tasks run.
running() {
    [ "$(on one stack ps pairs --filter desired-state=running --format '{{.CurrentState}}' |
        grep -c ^Running)" = "$1" ]
}

declare -A engines daemons
ip link add wire type bridge
ip link set wire up
number=0
mkdir -p /run/vhost-device-ism
for node in one two; do
    number=$((number + 1))
    ip netns add $node
    ip link add "wire-$node" type veth peer name eth0 netns $node
    ip link set "wire-$node" master wire up
    ip -n $node addr add "10.9.0.$number/24" dev eth0
    ip -n $node link set eth0 up
    ip -n $node link set lo up
    mkdir -p "/srv/$node/sockets/any" "$unified/$node"
    daemon $node
    smc grant --cgroup "$unified/$node" >/dev/null
    engine $node
    on $node import image.tar debian:latest >/dev/null
done
docker --version
on one swarm init --advertise-addr 10.9.0.1 >/dev/null
on two swarm join --advertise-addr 10.9.0.2 --token "$(on one swarm join-token -q worker)" 10.9.0.1:2377

(
    echo 'version: "3.8"'
    smc cdi --later --pool /run/vhost-device-ism/any/any.sock --format compose
    cat <<'END'
services:
  web:
    image: debian
    command: ["nginx", "-g", "daemon off;"]
    deploy: {endpoint_mode: dnsrr, placement: {constraints: [node.hostname == one]}}
    <<: *smc-any
  store:
    image: debian
    command: ["redis-server", "--protected-mode", "no", "--save", ""]
    deploy: {endpoint_mode: dnsrr, placement: {constraints: [node.hostname == one]}}
    <<: *smc-any
  near:
    image: debian
    command: &get [sh, -c, "while :; do curl -sS http://web/ >/dev/null; sleep 0.2; done"]
    deploy: {endpoint_mode: dnsrr, placement: {constraints: [node.hostname == one]}}
    <<: *smc-any
  far:
    image: debian
    command: *get
    deploy: {endpoint_mode: dnsrr, placement: {constraints: [node.hostname == two]}}
    <<: *smc-any
  spread:
    image: debian
    command: *get
    deploy: {endpoint_mode: dnsrr, replicas: 2}
    <<: *smc-any
END
) >stack.yaml
on one stack deploy --resolve-image never -c stack.yaml pairs >/dev/null 2>&1
wait_for running 6

echo "pairs on one node are on SMC-D, those across on TCP"
wait_for grows 1
wait_for grows 3
on one exec "$(task one web)" smc stat totals
said=$(on one exec "$(task one web)" smc stat totals)
expect 'smc stat totals' "no device reaches the peer's GID"
for pair in one:near two:far; do
    said=$(on ${pair%:*} exec "$(task ${pair%:*} ${pair#*:})" \
        redis-benchmark -h store -t get -n 20000 -q --csv | tail -n 1)
    echo "    ${pair#*:}: GET, requests per second: $said"
done

echo "a service is updated"
on one service update --force --no-resolve-image --detach pairs_near >/dev/null 2>&1
wait_for running 6
wait_for grows 1

echo "the daemon restarts under traffic"
kill "${daemons[one]}"
wait "${daemons[one]}" || true
wait_for grows 3
daemon one
wait_for grows 1

echo "dockerd restarts"
kill "${engines[one]}"
wait "${engines[one]}" || true
engine one
wait_for running 6
wait_for grows 1

echo "a node is drained, and comes back"
on one node update --availability drain two >/dev/null
on_one() {
    [ "$(on one ps --quiet --filter name=pairs_spread | wc -l)" = 2 ]
}
wait_for on_one
on one node update --availability active two >/dev/null
wait_for running 6
wait_for grows 3

echo "a node is killed"
kill -KILL "${engines[two]}" "${daemons[two]}"
wait_for on_one
wait_for grows 1

echo "swarm: all done"
