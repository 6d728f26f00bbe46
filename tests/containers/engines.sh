#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# Container engines on SMC-D: in a Debian with Docker, containerd and podman, runs the commands of
# docs/containers.md for each as they stand there, and looks at what they print. Containers are killed
# under traffic, one runs out of memory, containerd is asked by its CRI, and nothing may be left.
#
#   tests/containers/engines.sh [--quick] [SUITE]
#
# SUITE is one of Debian: trixie, or bookworm for Docker without CDI. With --quick only Docker and
# containerd start and restart containers, in a minute or two.
#
# It works in a root directory, and in mount, network and process namespaces of its own. It needs root
# and mmdebstrap; a missing one fails where CI is true, and is said aloud elsewhere. The images are made
# once and kept in ~/.cache: 300 MB are downloaded. So this is no part of .ci/run.
set -euo pipefail

# On the machine that tests ---------------------------------------------------------------------------

if [ "${1:-}" != inside ]; then
    cd "$(dirname "$0")/../.."
    . tests/containers/common.sh
    need mmdebstrap:mmdebstrap
    quick=
    [ "${1:-}" != --quick ] || { quick=$1 && shift; }
    suite=${1:-trixie}
    tree=$(tree)
    host=$(host_image "$suite")
    inside=$(inside_image)
    cargo build -q -p smc-device-plugin --example cri
    root=$(mktemp -d "${TMPDIR:-/var/tmp}/engines.XXXXXX")
    # Where podman is interrupted, mounts of it may be left.
    trap 'rm -rf --one-file-system "$root"' EXIT
    tar -C "$root" -xf "$host"
    cp -r "$tree/bin" "$tree/lib" "$root/usr/local"
    mkdir -p "$root/srv/docs" "$root/srv/packaging"
    cp tests/containers/{engines,common,life}.sh "$root/srv"
    cp docs/containers.md "$root/srv/docs"
    cp packaging/compose.yaml packaging/vhost-device-ism.toml "$root/srv/packaging"
    cp "$inside" "$root/srv/image.tar"
    cp "${CARGO_TARGET_DIR:-target}/debug/examples/cri" "$root/usr/local/bin"
    enter "$root" ./engines.sh inside "$suite" $quick
    exit
fi

# In a host of its own --------------------------------------------------------------------------------

. ./common.sh
. ./life.sh
suite=$2 quick=${3:-}
page=docs/containers.md
ulimit -u 4096 # of containers: rootless engines cannot raise it
umask 077      # what is written for engines can be read all the same
export PODMAN_IGNORE_CGROUPSV1_WARNING=1
started=()
end() {
    local status=$?
    [ "$status" = 0 ] || tail -n 20 difference /var/log/*.log >&2 2>/dev/null
    podman rm --force --time 0 --all >/dev/null 2>&1 || true
    docker rm --force $(docker ps -aq) >/dev/null 2>&1 || true
    kill "${started[@]}" 2>/dev/null || true
}
trap end EXIT
# begin NAME COMMAND...: a service.
begin() {
    (umask 022 && exec "${@:2}") >"/var/log/$1.log" 2>&1 &
    started+=($!)
}
# The cgroups of version 2.
unified=/sys/fs/cgroup
[ ! -d $unified/unified ] || unified=$unified/unified

install -d -m 755 /run/vhost-device-ism/any /run/ism/any
begin pool vhost-device-ism --config packaging/vhost-device-ism.toml
begin open vhost-device-ism --socket-path /run/ism/any/any.sock,devices=16,mode=666
wait_for test -S /run/vhost-device-ism/any/any.sock
wait_for test -S /run/ism/any/any.sock
say_block $page specification
mode=$(stat -c %a /etc/cdi/smc.json /etc/cdi /usr/local/lib/smc/ld.so.preload | tr '\n' ' ')
[ "$mode" = "644 755 644 " ] || fail "with umask 077, modes are $mode"

echo "== Docker: $(dockerd --version)"
mkdir -p /etc/docker
sed "s|/sys/fs/cgroup|$unified|" $page >page.md
if [ "$suite" = bookworm ]; then
    begin dockerd dockerd
    wait_for docker info
    docker import image.tar debian:latest >/dev/null
    say_block page.md docker-plain curl 'Welcome to nginx' 'exec web' 'nginx [0-9]+ +[1-9]'
    life docker $(smc cdi --pool /run/vhost-device-ism/any/any.sock --format options)
    echo "engines: all done"
    exit
fi
block $page 'docker configuration' >/etc/docker/daemon.json
chmod 644 /etc/docker/daemon.json
begin dockerd dockerd
wait_for docker info
docker import image.tar debian:latest >/dev/null
say_block $page docker curl 'Welcome to nginx' 'exec web' 'nginx [0-9]+ +[1-9]'

echo "an LD_PRELOAD of the image, or of the command line, is kept"
jemalloc=/usr/lib/x86_64-linux-gnu/libjemalloc.so.2
echo "FROM debian:latest
ENV LD_PRELOAD=$jemalloc" | DOCKER_BUILDKIT=0 docker build -q -t jemalloc - >/dev/null 2>&1
look='grep -o "libjemalloc.so.2\|libsmc_preload.so" /proc/self/maps | sort -u | tr "\n" " "'
said=$(docker run --rm --device virtio-ism/fabric=any jemalloc sh -c "$look")
expect 'ENV LD_PRELOAD' 'libjemalloc.so.2 libsmc_preload.so'
said=$(docker run --rm --device virtio-ism/fabric=any -e LD_PRELOAD=$jemalloc debian sh -c "$look")
expect '-e LD_PRELOAD' 'libjemalloc.so.2 libsmc_preload.so'

echo "a program with more rights than its user looks at none of its variables"
install -m 4755 /usr/bin/cat privileged
# Whether it says on a descriptor that the library was loaded.
said=$(docker run --rm --device virtio-ism/fabric=any --user 33 -v /srv/privileged:/privileged debian sh -c '
    /privileged /proc/self/maps | grep -c libsmc_preload.so
    SMC_RUN_PROOF=3 /privileged /dev/null 3>/tmp/proof; echo "$(cat /tmp/proof)."
    SMC_RUN_PROOF=3 cat /dev/null 3>/tmp/proof; echo "$(cat /tmp/proof)."')
expect '/privileged' '^[1-9]$'
expect '/privileged' '^[.]$'
expect 'cat' '^loaded[.]$'

say_block page.md docker-plain curl 'Welcome to nginx' 'exec web' 'nginx [0-9]+ +[1-9]'
say_block $page docker-compose 'run -T --rm client' 'GET: [0-9.]+ requests per second' \
    'exec -T web' 'nginx [0-9]+ +[1-9]'

echo "a restarted daemon is found, and connections are TCP meanwhile"
docker run -d --name web --restart always --device virtio-ism/fabric=any debian nginx -g 'daemon off;' >/dev/null
kill "${started[0]}"
wait "${started[0]}" || true
client=(docker run --rm --network container:web --device virtio-ism/fabric=any debian curl -sS --retry 9 --retry-connrefused http://127.0.0.1/)
said=$("${client[@]}")
expect 'curl without a daemon' 'Welcome to nginx'
begin pool vhost-device-ism --config packaging/vhost-device-ism.toml
wait_for grep -q listening /var/log/pool.log
on_smc() {
    "${client[@]}" >/dev/null && docker exec web smc stat totals | grep -qE 'nginx [0-9]+ +[1-9]'
}
wait_for on_smc
docker rm -f web >/dev/null
[ -n "$quick" ] || life docker --device virtio-ism/fabric=any

echo "== containerd: $(containerd --version)"
# The image of pods' first processes. Their score for the lack of memory is below what root may have here.
docker import --change 'CMD ["/bin/sleep", "infinity"]' image.tar pause:latest >/dev/null
{
    block $page 'containerd configuration'
    echo '  sandbox_image = "docker.io/library/pause:latest"'
    echo '  restrict_oom_score_adj = true'
} >containerd.toml
begin containerd containerd --config /srv/containerd.toml
wait_for ctr version
docker save debian:latest | ctr image import - >/dev/null
say_block $page containerd curl 'Welcome to nginx' 'exec --exec-id' 'nginx [0-9]+ +[1-9]'
ctr task kill -s KILL web
echo "its CRI plugin, as a kubelet asks it"
docker save debian:latest pause:latest | ctr --namespace k8s.io image import - >/dev/null
said=$(cri /run/containerd/containerd.sock docker.io/library/debian:latest virtio-ism/fabric=any \
    "exec nginx -g 'daemon off;'" 'curl -sS --retry 9 --retry-connrefused http://127.0.0.1/' \
    'smc stat totals')
expect 'cri' 'nginx [0-9]+ +[1-9]'
if [ -n "$quick" ]; then
    echo "engines: done quickly, without podman"
    exit
fi

echo "== podman: $(podman --version)"
# Docker leaves a firewall that lets nobody else's bridges through.
iptables -P FORWARD ACCEPT
printf '[engine]\nruntime = "runc"\ncgroup_manager = "cgroupfs"\nevents_logger = "file"\n' \
    >/etc/containers/containers.conf
chmod 644 /etc/containers/containers.conf
podman import -q image.tar localhost/debian >/dev/null
say_block $page podman curl 'Welcome to nginx' 'exec web' 'nginx [0-9]+ +[1-9]' \
    redis-benchmark 'GET: [0-9.]+ requests per second' 'exec store' 'redis-server [0-9]+ +[1-9]' \
    'stat fabric' 'pool: [2-9] of 64 devices in use'
say_block $page metrics metrics \
    'smc_handshakes_total\{container="web",program="nginx",kind="SMC-D"\} [1-9]'
podman rm --force --time 0 --all >/dev/null
life podman --device virtio-ism/fabric=any
if [ $unified = /sys/fs/cgroup ]; then
    life podman --runtime crun --device virtio-ism/fabric=any
else
    echo "NOT TESTED: crun, which refuses cgroup version 1 beside version 2"
fi
mkdir -p -m 755 /run/ism/red /run/ism/blue
begin tenants $(block $page 'tenants daemon')
wait_for test -S /run/ism/blue/blue.sock
say_block $page tenants fabric=blue 'Welcome to nginx' fabric=red 'Welcome to nginx' \
    'exec red' 'nginx [0-9]+ +[1-9]'
expect 'smc stat totals' 'no common CHID'
podman rm --force --time 0 --all >/dev/null

echo "== podman without root"
# pasta copies the host's way to the world.
ip link add world type veth peer name router
ip addr add 192.0.2.1/24 dev world
ip link set world up
ip link set router up
ip route add default via 192.0.2.2
useradd --create-home user
chmod 666 /dev/net/tun
echo user:100000:65536 | tee /etc/subuid >/etc/subgid
chmod 644 /etc/subuid /etc/subgid image.tar page.md common.sh
chmod 755 /srv
install -d -o user /run/user/1000
mkdir -p $unified/user.slice
smc grant --cgroup $unified/user.slice >/dev/null
echo 0 >$unified/user.slice/cgroup.procs
setpriv --reuid user --regid user --clear-groups env HOME=/home/user XDG_RUNTIME_DIR=/run/user/1000 \
    bash -euc '. ./common.sh
        podman import -q image.tar localhost/debian >/dev/null
        say_block page.md rootless curl "Welcome to nginx" "exec web" "nginx [0-9]+ +[1-9]"'
echo 0 >$unified/cgroup.procs
echo "engines: all done"
