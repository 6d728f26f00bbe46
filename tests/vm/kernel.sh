#!/usr/bin/env bash
# Builds the guests' kernel once and prints the path of its vmlinux as the last line.
#
#   tests/vm/kernel.sh [--v1] [--install-deps]
#
# With --v1 that of the same kernel with smc-v1-over-rxe.patch, whose AF_SMC speaks version 1 of SMC-R over
# soft-RoCE. Both are built together.
#
# The source is linux-7.2.12-slim.tar.xz (only what kernel.config compiles) in $VM_SOURCES, by default
# the directory shared/vm beside this repository; where there is none, the release is downloaded. The
# result is kept in ${XDG_CACHE_HOME:-~/.cache}/vhost-device-ism/kernel-<hash>/, where the hash is that
# of the source's name and size, of kernel.config, of the patch and of this script. --install-deps installs
# missing Debian packages, as root; so does CI=true.
set -euo pipefail

version=7.2.12
release=https://cdn.kernel.org/pub/linux/kernel/v7.x
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
repository=$(cd "$here/../.." && pwd)
cache=${XDG_CACHE_HOME:-$HOME/.cache}/vhost-device-ism
config=$here/kernel.config
v1_patch=$here/smc-v1-over-rxe.patch

say() { echo "kernel: $*" >&2; }
die() { say "$*"; exit 1; }

install=${CI:-false}
wanted=vmlinux
for argument in "$@"; do
    case $argument in
        --install-deps) install=true ;;
        --v1) wanted=vmlinux-v1 ;;
        *) die "unknown argument $argument; usage: kernel.sh [--v1] [--install-deps]" ;;
    esac
done

local_archive=${VM_SOURCES:-$repository/../shared/vm}/linux-$version-slim.tar.xz
if [ -f "$local_archive" ]; then
    source_id="slim $(stat -c %s "$local_archive")"
else
    source_id=release
fi
hash=$({ echo "$version $source_id"; cat "$config" "$v1_patch" "${BASH_SOURCE[0]}"; } | sha256sum | cut -c1-16)
out=$cache/kernel-$hash

done_already() { [ -f "$out/$wanted" ] && echo "$out/$wanted"; }
done_already && exit

# Packages -------------------------------------------------------------------------------------------

missing=()
need() { command -v "$1" >/dev/null || missing+=("$2"); }
need_header() { echo "#include <$1>" | cc -E - >/dev/null 2>&1 || missing+=("$2"); }
need cc gcc
need strip binutils
need make make
need patch patch
need flex flex
need bison bison
need bc bc
need perl perl
need xz xz-utils
need flock util-linux
need_header stdlib.h libc6-dev
need_header gelf.h libelf-dev
need_header openssl/opensslv.h libssl-dev
[ -f "$local_archive" ] || need curl curl
if [ ${#missing[@]} -gt 0 ]; then
    if [ "$install" = true ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        say "installs ${missing[*]}"
        # Not while another of these scripts installs something.
        export DEBIAN_FRONTEND=noninteractive
        flock /var/lib/dpkg bash -c 'apt-get update -q && apt-get install -y -q "$@"' - "${missing[@]}" >&2
    else
        die "missing packages; on Debian: apt-get install ${missing[*]}"
    fi
fi

# One build at a time ---------------------------------------------------------------------------------

mkdir -p "$cache"
exec 9>"$cache/kernel.lock"
flock -n 9 || { say "waits for another build"; flock 9; }
done_already && exit

work=$(mktemp -d "$cache/kernel-build.XXXXXX")
trap 'rm -rf "$work"' EXIT

archive=$local_archive
if [ ! -f "$archive" ]; then
    archive=$cache/linux-$version.tar.xz
    if [ ! -f "$archive" ]; then
        say "downloads $release/linux-$version.tar.xz (about 150 MB)"
        curl -fSL --retry 3 -o "$work/download" "$release/linux-$version.tar.xz"
        sums=$(curl -fsSL --retry 3 "$release/sha256sums.asc")
        sum=$(awk -v file="linux-$version.tar.xz" '$2 == file { print $1 }' <<<"$sums")
        [ -n "$sum" ] || die "$release/sha256sums.asc does not list linux-$version.tar.xz"
        echo "$sum  $work/download" | sha256sum --check --quiet >&2
        mv "$work/download" "$archive"
    fi
fi

say "unpacks $archive"
mkdir "$work/linux" "$work/out"
tar -xf "$archive" -C "$work/linux" --strip-components=1

cd "$work/linux"
log=$cache/kernel-build.log
say "builds Linux $version: about 8 minutes on two processors, once (log: $log)"
configure() {
    KCONFIG_ALLCONFIG="$config" make O="$work/out" tinyconfig
    scripts/kconfig/merge_config.sh -m -O "$work/out" "$work/out/.config" "$config"
    make O="$work/out" olddefconfig
}
configure >"$log" 2>&1 || { tail -20 "$log" >&2; die "cannot configure"; }
# An option whose dependencies are missing disappears without a word.
while read -r option; do
    grep -qx "$option" "$work/out/.config" || die "$option of kernel.config has no effect"
done < <(grep -E '^CONFIG_[A-Z0-9_]+=(y|[0-9])' "$config")
compile() {
    KBUILD_BUILD_TIMESTAMP="@0" KBUILD_BUILD_USER=builder KBUILD_BUILD_HOST=localhost \
        make -j"$(nproc)" O="$work/out" vmlinux >>"$log" 2>&1 \
        || { tail -30 "$log" >&2; die "cannot build"; }
}
mkdir -p "$out"
# keep NAME: what was compiled last
keep() {
    strip -o "$out/$1.new" "$work/out/vmlinux"
    mv "$out/$1.new" "$out/$1"
}
compile
cp "$work/out/.config" "$out/config"
keep vmlinux
say "builds it with ${v1_patch##*/}"
patch -p1 --fuzz=0 -i "$v1_patch" >>"$log" || die "cannot apply $v1_patch"
compile
keep vmlinux-v1
echo "$out/$wanted"
