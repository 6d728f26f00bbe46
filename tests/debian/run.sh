#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# Guests that are Debian 13, with systemd and udev, and the packages of `cargo xtask package`: runs the
# commands of docs/virtual-machines.md ("In a guest of Debian") under Debian's own kernel, and those of
# docs/linux.md under a kernel that is built from Debian's source, with the driver that DKMS builds.
#
#   tests/debian/run.sh [user] [kernel]
#
# Two guests are emulated; nothing needs KVM. The images are made once and kept in ~/.cache: some 500 MB
# are downloaded, and the kernel takes half an hour on two busy processors. So this is no part of
# .ci/run. It needs root and mmdebstrap; where one is missing, it says so, or fails where CI is true.
#
# Two things are not as on the page: the kernel has the small configuration of tests/debian/kernel.config
# instead of Debian's, and packages are installed in a chroot, before the guests boot.
set -euo pipefail
cd "$(dirname "$0")/../.."
here=tests/debian

missing() {
    echo "NOT TESTED: guests of Debian: $*" >&2
    [ "${CI:-false}" = true ] && exit 1
    exit 0
}
[ "$(id -u)" = 0 ] || missing "this is not root"
for tool in mmdebstrap mkfs.ext4 python3; do
    command -v "$tool" >/dev/null && continue
    [ "${CI:-false}" = true ] || missing "there is no $tool"
    apt-get update -q
    DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=600 install -y -q \
        --no-install-recommends mmdebstrap e2fsprogs python3
    break
done
kinds=("$@")
[ $# -gt 0 ] || kinds=(user kernel)

cargo xtask package
target=${CARGO_TARGET_DIR:-target}
parts=$(cargo xtask vm build)
QEMU=$(sed -n 's/^QEMU=//p' <<<"$parts")
DAEMON=$(sed -n 's/^DAEMON=//p' <<<"$parts")
export QEMU MEM=${MEM:-768M}
cache=${XDG_CACHE_HOME:-$HOME/.cache}/vhost-device-ism
place=$(mktemp -d "$cache/debian.XXXXXX")
processes=()
end() {
    local status=$? process
    for process in "${processes[@]}"; do
        kill "$process" 2>/dev/null || true
    done
    wait
    umount --recursive --lazy "$place/root/proc" "$place/root/dev" 2>/dev/null || true
    if [ "$status" != 0 ]; then
        tail -n 20 "$place"/*.console "$place"/*.log >&2 2>/dev/null || true
    fi
    rm -rf --one-file-system "$place"
}
trap end EXIT
fail() {
    echo "FAILED: $*" >&2
    exit 1
}

# block PAGE NAME: the commands of a page after <!-- run: NAME -->, without their prompts.
block() {
    local found
    found=$(awk -v mark="<!-- run: $2 -->" '
        $0 == mark { marked = 1; next }
        marked && /^```/ { if (inside) exit; inside = 1; next }
        inside { sub(/^\$ /, ""); print }' "$1")
    [ -n "$found" ] || fail "$1 has no block $2"
    echo "$found"
}

# Images ---------------------------------------------------------------------------------------------

# in_root COMMANDS: runs them in the root file system, by a shell that shows them.
in_root() {
    chroot "$place/root" /usr/bin/env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root \
        DEBIAN_FRONTEND=noninteractive sh -exc "cd /root
        $1"
}
enter() {
    rm -rf --one-file-system "$place/root"
    mkdir "$place/root"
    tar -C "$place/root" -xf "$1"
    mount -t proc proc "$place/root/proc"
    mount --rbind /dev "$place/root/dev"
    mount --make-rslave "$place/root/dev"
}
leave() {
    umount --recursive --lazy "$place/root/proc" "$place/root/dev"
}

mirror=http://deb.debian.org/debian
# What a small Debian has, and the programs of the test. The kernel is Debian's for clouds.
packages=systemd-sysv,udev,iproute2,kmod,initramfs-tools,linux-image-cloud-amd64,ca-certificates,curl,python3
user_image() {
    local image
    image=$cache/debian-user-$(echo "$packages" | sha256sum | cut -c1-12).tar
    if [ ! -e "$image" ]; then
        mmdebstrap --quiet --variant=apt --include="$packages" \
            --aptopt='APT::Install-Recommends "false"' trixie "$image.$$.tar" \
            "deb $mirror trixie main" "deb $mirror trixie-backports main" >&2
        mv "$image.$$.tar" "$image"
    fi
    echo "$image"
}

# The packages of a kernel, as the page builds them, in an image that is not the guests'.
kernel_packages() {
    local commands out
    commands=$(block docs/linux.md "build a kernel")
    out=$cache/debian-kernel-$(cat "$here/kernel.config" tests/vm/kernel.config - <<<"$commands" |
        sha256sum | cut -c1-12)
    if [ ! -d "$out" ]; then
        enter "$(user_image)" >&2
        cat tests/vm/kernel.config "$here/kernel.config" >"$place/root/root/small.config"
        # In the place of Debian's whole configuration.
        commands=$(sed 's,^cp /boot/config.*,make KCONFIG_ALLCONFIG=/root/small.config tinyconfig\n&,
            s,^cp /boot/config.*,scripts/kconfig/merge_config.sh -m .config /root/small.config,' \
            <<<"$commands")
        in_root "apt-get update -q
            $commands" >"$cache/debian-kernel-build.log" 2>&1 ||
            { tail -n 30 "$cache/debian-kernel-build.log" >&2; fail "the kernel does not build"; }
        mkdir "$out.$$"
        cp "$place"/root/root/linux-image-*.deb "$place"/root/root/linux-headers-*.deb "$out.$$"
        mv "$out.$$" "$out"
        leave
    fi
    echo "$out"
}

# disk_of: makes the root file system the disks of two guests, with the agent.
disks() {
    leave
    local lib=$place/root/usr/local/lib/test
    mkdir -p "$lib"
    cp "$here/agent" "$target/release/smc-test-peer" "$lib"
    cp "$here/agent.service" "$place/root/etc/systemd/system/test-agent.service"
    ln -sf /etc/systemd/system/test-agent.service \
        "$place/root/etc/systemd/system/multi-user.target.wants/test-agent.service"
    mkfs.ext4 -q -F -d "$place/root" "$place/a.img" 2500M
    cp --sparse=always "$place/a.img" "$place/b.img"
}

# Guests ---------------------------------------------------------------------------------------------

start() {
    local name
    KERNEL=$(echo "$place"/root/boot/vmlinuz-"$1") INITRD=$(echo "$place"/root/boot/initrd.img-"$1")
    export KERNEL INITRD
    "$DAEMON" -s "$place/a.ism" -s "$place/b.ism" --window-size 4G --stopped-grace 0 >"$place/daemon.log" 2>&1 &
    processes+=($!)
    for name in a b; do
        until [ -S "$place/$name.ism" ]; do sleep 0.1; done
        qemu/run.sh --name "$name" --ism "$place/$name.ism" --net "pair-$name:$place/net" \
            --control "$place/$name.control" --console "$place/$name.console" \
            --append "root=/dev/vda rw net.ifnames=0" \
            -- -drive "file=$place/$name.img,format=raw,if=virtio" >"$place/$name.qemu.log" 2>&1 &
        processes+=($!)
        until [ -S "$place/net" ]; do sleep 0.1; done
    done
}
stop() {
    local process
    for process in "${processes[@]}"; do
        kill "$process" 2>/dev/null || true
        wait "$process" 2>/dev/null || true
    done
    processes=()
    rm -f "$place"/*.ism "$place"/*.control "$place/net" "$place"/*.img
}
# in_guest NAME COMMANDS: runs them there, and shows them and what they say.
in_guest() {
    local name=$1 line
    while IFS= read -r line; do
        echo "$name# $line"
    done <<<"$2"
    timeout --kill-after=5 400 python3 qemu/guest-run.py --wait 300 "$place/$name.control" \
        sh -c "set -e; cd /root; $2" >"$place/said" 2>&1 ||
        { cat "$place/said"; fail "$name: $2"; }
    sed 's/^/    /' "$place/said"
}
# says PATTERN: what the last commands in a guest have to have said.
says() {
    grep -qE -- "$1" "$place/said" || fail "not said: $1"
}
# waits NAME COMMAND: until it succeeds there, a minute long.
waits() {
    timeout --kill-after=5 90 python3 qemu/guest-run.py "$place/$1.control" \
        sh -c "for i in \$(seq 120); do $2 && exit; sleep 0.5; done; exit 1" >/dev/null ||
        fail "$1: this did not happen: $2"
}
listens() {
    waits "$1" "grep -qE ':$(printf %04X "$2") .* 0A ' /proc/net/tcp /proc/net/tcp6"
}

user() {
    local page=docs/virtual-machines.md version
    enter "$(user_image)"
    cp "$target"/package/*.deb "$place/root/root"
    in_root "$(block $page "debian install")" >"$place/install.log" 2>&1 || fail "the installation"
    version=$(cd "$place/root/boot" && echo vmlinuz-*)
    disks
    start "${version#vmlinuz-}"
    in_guest a 'uname -r; cat /etc/debian_version; smc devices --bind || echo refused'
    says 'CONFIG_VFIO_NOIOMMU' && says '^refused'
    for name in a b; do
        in_guest $name "$(block $page "debian both")"
        says '^0000:.*bound to uio_pci_generic' && says 'data path +window' && says '^ok +virtio-ism'
    done
    in_guest a "$(block $page "debian line a")"
    listens a 5000
    in_guest b "$(block $page "debian line b")"
    says 'SMC-D .* window'
    in_guest a "$(block $page "debian web a")"
    listens a 8080
    in_guest b "$(block $page "debian web b")"
    in_guest a "smc stat"
    says '│ python3 .* pci '
    stop
    echo "debian: user: done"
}

kernel() {
    local page=docs/linux.md built release name
    built=$(kernel_packages)
    enter "$(user_image)"
    echo 'COMPRESS=gzip' >"$place/root/etc/initramfs-tools/conf.d/test"
    cp "$built"/*.deb "$target"/package/*.deb "$place/root/root"
    in_root "apt-get update -q
        $(block $page "install a kernel")" >"$place/install.log" 2>&1 || fail "the installation"
    release=$(cd "$place"/root/lib/modules/*/updates/dkms/../.. && basename "$PWD")
    disks
    start "$release"
    for name in a b; do
        in_guest $name "uname -r; cat /etc/debian_version; $(block $page "the device")"
        says '^0xff00$' && says VIRTIO-ISM
    done
    in_guest a "$(block $page "web a")"
    listens a 8080
    in_guest b "$(block $page "web b")"
    says "200 OK"
    in_guest a "smcss -a; cat /sys/kernel/debug/virtio_ism/*/counters"
    # Of a page of 35 kB, by the driver's own count.
    says '^(move|store)_bytes [1-9][0-9]{4}'
    stop
    echo "debian: kernel: done"
}

for kind in "${kinds[@]}"; do
    case $kind in
        user | kernel) "$kind" ;;
        *) fail "usage: tests/debian/run.sh [user] [kernel]" ;;
    esac
done
echo "debian: all done"
