#!/usr/bin/env bash
# Containers on SMC-D: runs the commands of docs/containers.md as they stand there, with podman and
# programs of the distribution, and looks at what they print.
#
# It works in a mount and a network namespace of its own, so it leaves neither /etc/cdi nor /run/ism
# nor a bridge behind. It needs root, podman, runc, mmdebstrap, musl-gcc and objdump; a missing one
# fails where CI is true, and is said aloud elsewhere. The image is made once and kept in ~/.cache.
set -euo pipefail
cd "$(dirname "$0")/../.."

missing() {
    echo "NOT TESTED: containers: $*" >&2
    [ "${CI:-false}" = true ] && exit 1
    exit 0
}
[ "$(id -u)" = 0 ] || missing "this is not root"
if [ "${1:-}" != inside ]; then
    needed=(podman runc mmdebstrap musl-gcc objdump iptables)
    for tool in "${needed[@]}"; do
        command -v "$tool" >/dev/null && continue
        [ "${CI:-false}" = true ] || missing "there is no $tool"
        apt-get update -q
        DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=600 install -y -q \
            podman runc mmdebstrap musl-tools binutils iptables
        break
    done
    cargo build -q -p vhost-device-ism -p smc-cli -p smc-preload
    packages=nginx-light,curl,redis-server,redis-tools
    cache=${XDG_CACHE_HOME:-$HOME/.cache}/vhost-device-ism
    image=$cache/containers-$(echo "$packages" | sha256sum | head -c 12).tar
    if [ ! -e "$image" ]; then
        mkdir -p "$cache"
        mmdebstrap --quiet --variant=essential --include="$packages" \
            --aptopt='APT::Install-Recommends "false"' bookworm "$image.$$.tar"
        mv "$image.$$.tar" "$image"
    fi
    exec unshare --mount --net -- "$0" inside "$image"
fi
image=$2

# A host of its own ----------------------------------------------------------------------------------

place=$(mktemp -d)
# The last one is where podman notes which addresses are given away.
for directory in /etc/cdi /run/ism /run/containers; do
    mkdir -p "$directory"
    mount -t tmpfs tmpfs "$directory"
done
mkdir "$place/run"
ip link set lo up
PATH=$PWD/target/debug:$PATH
# The directory of containers' state is short, since paths of sockets lie in it.
# Without overlayfs each container is a copy of its image.
driver=vfs
grep -qw overlay /proc/filesystems && driver=overlay
options=(--root "$place/root" --runroot "$place/run" --storage-driver "$driver" --cgroup-manager cgroupfs
    --runtime runc --events-backend file)
limits=(--ulimit nofile=1024:1024 --ulimit nproc=4096:4096)
podman() {
    local verb=$1
    shift
    case $verb in
        run) command podman "${options[@]}" run "${limits[@]}" "$@" ;;
        *) command podman "${options[@]}" "$verb" "$@" ;;
    esac
}
end() {
    podman rm --force --time 0 --all >/dev/null 2>&1 || true
    [ -z "${daemon:-}" ] || kill "$daemon" 2>/dev/null || true
    umount "$place"/root/vfs* 2>/dev/null || true
    rm -rf "$place" 2>/dev/null || true
}
trap end EXIT
fail() {
    echo "FAILED: $*" >&2
    exit 1
}
expect() {
    grep -qE -- "$2" <<<"$said" || fail "after \`$1\` nothing fits $2 in: $said"
    echo "    ok: $2"
}

podman import -q "$image" localhost/debian >/dev/null

# The commands of the document -----------------------------------------------------------------------

# What the output of a command has to fit, by a word of the command.
declare -A wanted=(
    ['curl']='Welcome to nginx'
    ['exec web']='nginx [0-9]+ +[1-9]'
    ['redis-benchmark']='GET: [0-9.]+ requests per second'
    ['exec store']='redis-server [0-9]+ +[1-9]'
    ['stat fabric']='pool: 2 of 64 devices in use'
)
commands=0
while IFS= read -r command; do
    commands=$((commands + 1))
    echo "\$ $command"
    case $command in
        *'&')
            # Without exec the process that ends it would be a shell.
            eval "exec ${command%&}" >"$place/daemon.log" 2>&1 &
            daemon=$!
            for _ in $(seq 100); do [ -S /run/ism/any/any.sock ] && break || sleep 0.1; done
            continue
            ;;
    esac
    said=$(eval "$command" 2>&1) || fail "$command: $said"
    for word in "${!wanted[@]}"; do
        case $command in
            *"$word"*)
                expect "$command" "${wanted[$word]}"
                unset "wanted[$word]"
                ;;
        esac
    done
done < <(sed -n 's/^\$ //p' docs/containers.md)
[ "$commands" -ge 9 ] || fail "docs/containers.md has only $commands commands"
[ ${#wanted[@]} = 0 ] || fail "no command for: ${!wanted[*]}"

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
said=$(smc run --device /run/ism/any/any.sock --status "$place/status" curl -sS http://10.88.0.10/)
expect "smc run curl" 'Welcome to nginx'
said=$(cat "$place"/status/*)
expect "smc run curl" 'SMC-D'

echo "a container's processes have the option without capabilities, and doctor says so"
said=$("${run[@]}" --cap-drop all debian smc doctor || true)
expect "smc doctor" 'granted to this cgroup'

echo "without the hook the container starts, and rules name the servers"
smc cdi --pool /run/ism/any/any.sock --no-hook --output /etc/cdi/smc.json
said=$("${run[@]}" debian smc doctor || true)
expect "smc doctor" 'servers that speak SMC must be named'
said=$("${run[@]}" -e SMC_RUN_CONNECT='*:80' debian curl -sS http://10.88.0.10/)
expect "curl" 'Welcome to nginx'
smc grant --hook </dev/null || fail "a hook that fails would keep the container from starting"

echo "programs for musl start, and stay on TCP"
printf '#include <stdio.h>\nint main(void) { puts("started"); return 0; }\n' >"$place/musl.c"
musl-gcc -o "$place/musl" "$place/musl.c"
mkdir -p "$place/alpine/lib"
cp "$(readlink -f /lib/ld-musl-*.so.1)" "$place/alpine/lib/$(basename /lib/ld-musl-*.so.1)"
cp "$place/musl" "$place/alpine/program"
tar -C "$place/alpine" -c . | podman import -q - localhost/musl >/dev/null
said=$("${run[@]}" localhost/musl /program 2>&1)
[ "$said" = started ] || fail "a program for musl: $said"

echo "the libraries that an image needs are those that the document names"
newest=$(objdump -T target/debug/libsmc_preload.so | grep -oE 'GLIBC_[0-9.]+' | sort -Vu | tail -1)
grep -qF "glibc ${newest#GLIBC_} or newer" docs/containers.md ||
    fail "the library needs $newest, and docs/containers.md says something else"
others=$(objdump -p target/debug/libsmc_preload.so | awk '/NEEDED/ {print $2}' | sort | tr '\n' ' ')
case $others in
    *libgcc_s.so.1*) ;;
    *) fail "the library needs $others" ;;
esac
echo "containers: all done"
