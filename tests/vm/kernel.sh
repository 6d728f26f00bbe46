#!/usr/bin/env bash
# Builds the guests' kernel once and prints the path of its vmlinux as the last line.
#
#   tests/vm/kernel.sh [--v1] [--install-deps]
#
# With --v1 that of the same kernel with smc-v1-over-rxe.patch, whose AF_SMC speaks version 1 of SMC-R over
# soft-RoCE. Both are built together. Beside it are source/ and build/, what modules are built of.
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

# The build's files name the directory of the source, so it is built where it stays.
rm -rf "$out"
mkdir -p "$out/source" "$out/build"

archive=$local_archive
if [ ! -f "$archive" ]; then
    archive=$cache/linux-$version.tar.xz
    if [ ! -f "$archive" ]; then
        say "downloads $release/linux-$version.tar.xz (about 150 MB)"
        curl -fSL --retry 3 -o "$out/download" "$release/linux-$version.tar.xz"
        sums=$(curl -fsSL --retry 3 "$release/sha256sums.asc")
        sum=$(awk -v file="linux-$version.tar.xz" '$2 == file { print $1 }' <<<"$sums")
        [ -n "$sum" ] || die "$release/sha256sums.asc does not list linux-$version.tar.xz"
        echo "$sum  $out/download" | sha256sum --check --quiet >&2
        mv "$out/download" "$archive"
    fi
fi

say "unpacks $archive"
tar -xf "$archive" -C "$out/source" --strip-components=1

cd "$out/source"
log=$cache/kernel-build.log
say "builds Linux $version: about 8 minutes on two processors, once (log: $log)"
configure() {
    KCONFIG_ALLCONFIG="$config" make O="$out/build" tinyconfig
    scripts/kconfig/merge_config.sh -m -O "$out/build" "$out/build/.config" "$config"
    make O="$out/build" olddefconfig
}
configure >"$log" 2>&1 || { tail -20 "$log" >&2; die "cannot configure"; }
# An option whose dependencies are missing disappears without a word.
while read -r option; do
    grep -qx "$option" "$out/build/.config" || die "$option of kernel.config has no effect"
done < <(grep -E '^CONFIG_[A-Z0-9_]+=(y|[0-9])' "$config")
compile() {
    KBUILD_BUILD_TIMESTAMP="@0" KBUILD_BUILD_USER=builder KBUILD_BUILD_HOST=localhost \
        make -j"$(nproc)" O="$out/build" "$@" >>"$log" 2>&1 \
        || { tail -30 "$log" >&2; die "cannot build"; }
}
# Modules need the list of symbols.
compile vmlinux modules
strip -o "$out/vmlinux.new" "$out/build/vmlinux"
cp "$out/build/Module.symvers" "$out/symvers"
say "builds it with ${v1_patch##*/}"
patch -p1 --fuzz=0 -i "$v1_patch" >>"$log" || die "cannot apply $v1_patch"
compile vmlinux
strip -o "$out/vmlinux-v1.new" "$out/build/vmlinux"
mv "$out/symvers" "$out/build/Module.symvers"

# Of source and build, what modules need: headers, scripts and the list of symbols.
find "$out/build" \( -name '*.o' -o -name '*.a' -o -name '.*.cmd' \) -not -path '*/scripts/*' -delete
find "$out/source" -type f \( -name '*.[cS]' -o -name '*.rs' -o -name '*.dts*' -o -name '*.rst' \) \
    -not -path "$out/source/scripts/*" -not -path "$out/source/arch/*" -delete
rm -rf "$out/source"/{Documentation,tools/testing,tools/perf,sound,fs,samples,drivers,net}
find "$out/source/arch" -mindepth 1 -maxdepth 1 -type d -not -name x86 -exec rm -rf {} +
rm -f "$out/build/vmlinux" "$out/build"/vmlinux.*
cp "$out/build/.config" "$out/config"
# Last, since they say that all is there.
mv "$out/vmlinux-v1.new" "$out/vmlinux-v1"
mv "$out/vmlinux.new" "$out/vmlinux"
echo "$out/$wanted"
