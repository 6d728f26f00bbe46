#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# Containers on SMC-D, from nothing: in a Debian with podman and nothing else, runs the commands of
# docs/containers.md as they stand there, the first of which installs the packages of `cargo xtask
# package`. Looks at what they print.
#
# It works in a root directory, and in mount, network and process namespaces of its own, so nothing of
# it is left. It needs root, debhelper, lintian, mmdebstrap, musl-gcc and objdump; a missing one fails
# where CI is true, and is said aloud elsewhere. The image of the host and that of the containers are
# made once and kept in ~/.cache.
set -euo pipefail
[ "${1:-}" = root ] || cd "$(dirname "$0")/../.."

if [ "${1:-}" = "" ]; then
    . tests/containers/common.sh
    need mmdebstrap:mmdebstrap dh:debhelper lintian:lintian musl-gcc:musl-tools objdump:binutils
    DEB_BUILD_OPTIONS=noautodbgsym cargo xtask package
    library=${CARGO_TARGET_DIR:-target}/release/libsmc_preload.so
    echo "the libraries that an image needs are those that the document names"
    newest=$(objdump -T "$library" | grep -oE 'GLIBC_[0-9.]+' | sort -Vu | tail -1)
    grep -qF "glibc ${newest#GLIBC_} or newer" docs/containers.md ||
        fail "the library needs $newest, and docs/containers.md says something else"
    others=$(objdump -p "$library" | awk '/NEEDED/ && $2 !~ /^ld-linux/ {print $2}' | tr '\n' ' ')
    [ "$others" = 'libc.so.6 ' ] || fail "the library needs $others"
    host=$(image containers-host bookworm apt \
        podman,podman-compose,runc,netavark,aardvark-dns,iptables,iproute2,mount,curl,systemd-standalone-sysusers,systemd-standalone-tmpfiles,passwd)
    inside=$(image containers bookworm essential nginx-light,curl,redis-server,redis-tools)
    place=$(mktemp -d)
    printf '#include <stdio.h>\nint main(void) { puts("started"); return 0; }\n' >"$place/musl.c"
    mkdir -p "$place/alpine/lib"
    musl-gcc -o "$place/alpine/program" "$place/musl.c"
    cp "$(readlink -f /lib/ld-musl-*.so.1)" "$place/alpine/lib/$(basename /lib/ld-musl-*.so.1)"

    status=0
    packages=${CARGO_TARGET_DIR:-target}/package
    unshare --mount --net --pid --fork -- "$0" host "$host" "$inside" "$place" "$packages" || status=$?
    rm -rf "$place"
    exit "$status"
fi

# A host of its own: the root of a new mount namespace --------------------------------------------------

if [ "$1" = host ]; then
    host=$2 inside=$3 place=$4 packages=$5
    root=$place/root
    mkdir "$root"
    mount -t tmpfs -o mode=755 tmpfs "$root"
    tar -C "$root" -xf "$host"
    mount -t proc proc "$root/proc"
    for directory in dev sys; do
        mount --rbind "/$directory" "$root/$directory"
    done
    mkdir -p "$root/srv/docs" "$root/srv/packaging"
    cp "$packages"/*.deb "$0" "$(dirname "$0")/common.sh" "$root/srv"
    cp docs/containers.md "$root/srv/docs"
    cp packaging/compose.yaml "$root/srv/packaging"
    cp "$inside" "$root/srv/image.tar"
    tar -C "$place/alpine" -cf "$root/srv/musl.tar" .
    cd "$root"
    mkdir old
    pivot_root . old
    exec env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root DEBIAN_FRONTEND=noninteractive \
        chroot . /bin/bash -c 'umount --lazy /old; cd /srv; exec bash ./run.sh root'
fi

. ./common.sh
place=/srv/place
mkdir -p "$place/run" /run/containers /etc/containers
printf '[network]\nnetwork_backend = "netavark"\n' >/etc/containers/containers.conf
ip link set lo up
# The directory of containers' state is short, since paths of sockets lie in it.
# Without overlayfs each container is a copy of its image.
driver=vfs
grep -qw overlay /proc/filesystems && driver=overlay
options=(--root "$place/root" --runroot "$place/run" --storage-driver "$driver" --cgroup-manager cgroupfs
    --runtime runc --events-backend file)
limits=(--ulimit nofile=1024:1024 --ulimit nproc=4096:4096)
# The tests and podman-compose call this podman.
podman=$(command -v podman)
mkdir "$place/bin"
cat >"$place/bin/podman" <<END
#!/bin/sh
verb=\$1
shift
case \$verb in
    run | create) exec $podman ${options[*]} "\$verb" ${limits[*]} "\$@" ;;
    *) exec $podman ${options[*]} "\$verb" "\$@" ;;
esac
END
chmod +x "$place/bin/podman"
PATH=$place/bin:$PATH
end() {
    podman rm --force --time 0 --all >/dev/null 2>&1 || true
    [ -z "${daemon:-}" ] || kill "$daemon" 2>/dev/null || true
}
trap end EXIT
podman import -q image.tar localhost/debian >/dev/null

# The commands of the document -----------------------------------------------------------------------

page=docs/containers.md
say_block $page packages
# In the place of systemd, which is not here.
vhost-device-ism --config /etc/vhost-device-ism.toml >"$place/daemon.log" 2>&1 &
daemon=$!
pool=/run/vhost-device-ism/any/any.sock
for _ in $(seq 100); do [ -S $pool ] && break || sleep 0.1; done
say_block $page specification
say_block $page podman curl 'Welcome to nginx' 'exec web' 'nginx [0-9]+ +[1-9]' \
    redis-benchmark 'GET: [0-9.]+ requests per second' 'exec store' 'redis-server [0-9]+ +[1-9]' \
    'stat fabric' 'pool: [2-9] of 64 devices in use'
say_block $page host curl 'Welcome to nginx'
say_block $page podman-compose 'run -T --rm client' 'GET: [0-9.]+ requests per second' \
    'exec -T web' 'nginx [0-9]+ +[1-9]'

# What it says beside them ---------------------------------------------------------------------------

run=(podman run --rm --device virtio-ism/fabric=any)
echo "nothing of the host can be written"
said=$("${run[@]}" debian sh -c 'touch /run/smc/pool/x /usr/local/bin/smc 2>&1; true')
expect "touch" 'touch.*/run/smc/pool/x.*Read-only'
expect "touch" 'touch.*/usr/local/bin/smc.*Read-only'

echo "a server without a device gets no byte of SMC"
podman run -d --name plain --ip 10.88.0.12 debian nginx -g 'daemon off;' >/dev/null
said=$("${run[@]}" debian curl -sS --retry 9 --retry-connrefused http://10.88.0.12/)
expect "curl" 'Welcome to nginx'

echo "a program of the host and a container find each other"
mkdir "$place/status"
said=$(smc run --device $pool --status "$place/status" curl -sS http://10.88.0.10/)
expect "smc run curl" 'Welcome to nginx'
said=$(cat "$place"/status/*)
expect "smc run curl" 'SMC-D'

echo "a container's processes have the option without capabilities, and doctor says so"
said=$("${run[@]}" --cap-drop all debian smc doctor || true)
expect "smc doctor" 'granted to this cgroup'

echo "without the hook the container starts, and rules name the servers"
smc cdi --pool $pool --no-hook --output /etc/cdi/smc.json
said=$("${run[@]}" debian smc doctor || true)
expect "smc doctor" 'servers that speak SMC must be named'
said=$("${run[@]}" -e SMC_RUN_CONNECT='*:80' debian curl -sS http://10.88.0.10/)
expect "curl" 'Welcome to nginx'
smc grant --hook </dev/null || fail "a hook that fails would keep the container from starting"

echo "programs for musl start, and stay on TCP"
podman import -q musl.tar localhost/musl >/dev/null
said=$("${run[@]}" localhost/musl /program 2>&1)
[ "$said" = started ] || fail "a program for musl: $said"

echo "on the host, too, where a program under smc run starts them"
mkdir musl
tar -C musl -xf musl.tar
cp musl/lib/ld-musl-* /lib/
said=$(smc run --device $pool sh -c 'musl/program' 2>&1)
[ "$said" = started ] || fail "a program for musl that sh has started: $said"
said=$(smc run --device $pool musl/program 2>&1)
expect "smc run" 'musl/program stays on TCP: it is linked with musl .--system-calls puts it on SMC.'
expect "smc run" '^started$'

echo "containers: all done"
