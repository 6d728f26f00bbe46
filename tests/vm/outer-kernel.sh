#!/usr/bin/env bash
# Fetches the kernel of the outer guest once and prints the path of its vmlinuz as the last line. The outer
# guest runs guests with KVM (cargo xtask vm --nested).
#
#   tests/vm/outer-kernel.sh
#
# It is the kernel that Debian makes for clouds, kept in ${XDG_CACHE_HOME:-~/.cache}/vhost-device-ism with
# the modules that are needed, numbered in the order in which they are loaded. An older one from the cache
# will do. Linux 7.2 will not: it takes an exception that the emulated SVM has delivered for one under way,
# and gives up on the guest ("KVM internal error. Suberror: 3").
set -euo pipefail

meta=linux-image-cloud-amd64
modules=(virtio_ring virtio virtio_pci_legacy_dev virtio_pci_modern_dev virtio_pci virtio_console
    irqbypass kvm kvm-amd tun llc stp bridge)
cache=${XDG_CACHE_HOME:-$HOME/.cache}/vhost-device-ism

say() { echo "outer kernel: $*" >&2; }
die() { say "$*"; exit 1; }

# The hash is that of this script.
out=$cache/outer-kernel-$(sha256sum "${BASH_SOURCE[0]}" | cut -c1-16)
done_already() { [ -f "$out/vmlinuz" ] && echo "$out/vmlinuz"; }
done_already && exit

command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null \
    || die "without apt-get: set OUTER_KERNEL to a vmlinuz with the modules beside it, 01-NAME.ko and so on"
mkdir -p "$cache"
exec 9>"$cache/outer-kernel.lock"
flock 9
done_already && exit

work=$(mktemp -d "$cache/outer-kernel.XXXXXX")
trap 'rm -rf "$work"' EXIT
package() { apt-cache depends "$meta" 2>/dev/null | sed -n 's/^ *Depends: \(linux-image-[0-9].*\)/\1/p' | head -n 1; }
name=$(package)
if [ -z "$name" ] && [ "$(id -u)" = 0 ]; then
    apt-get update -q >&2
    name=$(package)
fi
[ -n "$name" ] || die "no package $meta is known: apt-get update"
say "downloads $name (some 30 MB)"
(cd "$work" && apt-get download -q "$name" >&2) || die "cannot download $name"
mkdir "$work/files" "$work/out"
dpkg-deb -x "$work"/linux-image-*.deb "$work/files"
cp "$work"/files/boot/vmlinuz-* "$work/out/vmlinuz"
number=10
for module in "${modules[@]}"; do
    file=$(find "$work/files" -name "$module.ko")
    [ -n "$file" ] || die "$name has no module $module"
    cp "$file" "$work/out/$number-$module.ko"
    number=$((number + 1))
done
rm -rf "$out"
mv "$work/out" "$out"
done_already
