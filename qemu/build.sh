#!/usr/bin/env bash
# Builds QEMU with this project's patches once and prints the path of the binary as the last line.
set -euo pipefail

version=11.1.1
release=https://download.qemu.org/qemu-$version.tar.xz
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
repository=$(cd "$here/.." && pwd)
cache=${XDG_CACHE_HOME:-$HOME/.cache}/vhost-device-ism

usage() {
    cat <<END
usage: qemu/build.sh [--stock] [--jobs N] [--install-deps]

Builds qemu-system-x86_64 $version with the patches of qemu/patches, and without them, and prints the
path of the patched binary as the last line of its output; progress goes to the standard error output.

  --stock         print the path of the binary without patches
  --jobs N        compile with N processes (default: number of processors)
  --install-deps  install missing Debian packages, as root; CI=true does the same

environment:
  QEMU            a QEMU that is there already: print this, build nothing (QEMU_STOCK for --stock)
  VM_SOURCES      directory of qemu-$version.tar.xz (default: shared/vm beside the repository);
                  without that file the release is downloaded from $release
  XDG_CACHE_HOME  results are kept in vhost-device-ism/ below it (default: ~/.cache)

Results are kept under a hash of the source's name and size, of the patches and of this script. About
4 minutes on two processors and 1 GB of disk for the time of the build; 60 MB stay.
END
}

say() { echo "qemu: $*" >&2; }
die() { say "$*"; exit 1; }

flavour=patched
jobs=$(nproc)
install=${CI:-false}
while [ $# -gt 0 ]; do
    case $1 in
        --stock) flavour=stock ;;
        --jobs) jobs=${2:?--jobs needs a number}; shift ;;
        --jobs=*) jobs=${1#*=} ;;
        --install-deps) install=true ;;
        -h | --help) usage; exit ;;
        *) usage >&2; die "unknown argument $1" ;;
    esac
    shift
done
[[ $jobs =~ ^[1-9][0-9]*$ ]] || die "--jobs: $jobs is not a number"

# A QEMU that is there already -----------------------------------------------------------------------

if [ "$flavour" = patched ] && [ -n "${QEMU:-}" ]; then
    "$QEMU" -device help 2>/dev/null | grep -q '"vhost-user-ism-pci"' \
        || die "$QEMU (from \$QEMU) has no device vhost-user-ism-pci"
    command -v "$QEMU"
    exit
fi
if [ "$flavour" = stock ] && [ -n "${QEMU_STOCK:-}" ]; then
    command -v "$QEMU_STOCK" || die "$QEMU_STOCK (from \$QEMU_STOCK) is no program"
    exit
fi

mapfile -t patches < <(grep -v '^#' "$here/patches/series")
patches=("${patches[@]/#/$here/patches/}")

local_archive=${VM_SOURCES:-$repository/../shared/vm}/qemu-$version.tar.xz
if [ -f "$local_archive" ]; then
    source_id="local $(stat -c %s "$local_archive")"
else
    source_id=release
fi
hash_of() { sha256sum | cut -c1-16; }
stock_hash=$({ echo "$version $source_id"; cat "${BASH_SOURCE[0]}"; } | hash_of)
patched_hash=$({ echo "$version $source_id"; cat "${BASH_SOURCE[0]}" "${patches[@]}"; } | hash_of)
stock=$cache/qemu-stock-$stock_hash/qemu-system-x86_64
patched=$cache/qemu-$patched_hash/qemu-system-x86_64
[ "$flavour" = stock ] && wanted=$stock || wanted=$patched

done_already() { [ -x "$wanted" ] && echo "$wanted"; }
done_already && exit

# Packages -------------------------------------------------------------------------------------------

# QEMU's configure wants the modules venv and tomllib (Python 3.11), or tomli.
python_with() { "$1" -c 'import sys, venv, ensurepip
try: import tomllib
except ImportError: import tomli' 2>/dev/null; }
find_python() {
    for python in python3 /usr/bin/python3; do
        ! python_with "$python" || return 0
    done
    return 1
}

missing=()
need() { command -v "$1" >/dev/null || missing+=("$2"); }
need_library() { pkg-config --exists "$1" 2>/dev/null || missing+=("$2"); }
need cc gcc
need make make
need ninja ninja-build
need pkg-config pkg-config
need xz xz-utils
need git git
need strip binutils
need dtc device-tree-compiler
need flock util-linux
need_library glib-2.0 libglib2.0-dev
need_library pixman-1 libpixman-1-dev
echo '#include <libfdt.h>' | cc -E - >/dev/null 2>&1 || missing+=(libfdt-dev)
find_python || missing+=(python3-venv python3-tomli)
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
    find_python || die "no Python with the modules venv and tomllib or tomli"
fi

# One build at a time ---------------------------------------------------------------------------------

mkdir -p "$cache"
exec 9>"$cache/qemu.lock"
flock -n 9 || { say "waits for another build"; flock 9; }
done_already && exit

# What an aborted build left: nobody uses it, since we have the lock.
rm -rf "$cache"/qemu-build.*
work=$(mktemp -d "$cache/qemu-build.XXXXXX")
trap 'rm -rf "$work"' EXIT
log=$cache/qemu-build.log
: >"$log"
failed() { tail -30 "$log" >&2; die "$1 (log: $log)"; }

archive=$local_archive
if [ ! -f "$archive" ]; then
    archive=$cache/qemu-$version.tar.xz
    if [ ! -f "$archive" ]; then
        say "downloads $release (about 140 MB)"
        curl -fSL --retry 3 -o "$work/download" "$release" || die "cannot download $release"
        xz --test "$work/download" || die "the download is damaged"
        mv "$work/download" "$archive"
    fi
fi

say "unpacks $archive"
mkdir "$work/qemu"
tar -xf "$archive" -C "$work/qemu" --strip-components=1
cd "$work/qemu"
# Debian's variant of the archive ("+ds") has no firmware in it.
if [ ! -e pc-bios/edk2-x86_64-code.fd.bz2 ]; then
    sed -i 's/unpack_edk2_blobs = bzip2.found()/unpack_edk2_blobs = false/' meson.build
fi
# It has no Python packages either.
wheels() { compgen -G "python/wheels/$1-*.whl" >/dev/null; }
if ! wheels meson || ! wheels pycotap; then
    say "gets meson and pycotap from PyPI"
    "$python" -m venv "$work/venv" >>"$log" 2>&1 || failed "cannot make a Python environment"
    "$work/venv/bin/pip" --disable-pip-version-check download --quiet --no-deps \
        -d python/wheels meson==1.11.1 pycotap==1.3.1 >>"$log" 2>&1 || failed "cannot get meson"
fi

# Patches applied outside of a repository, even if the cache lies in one.
apply() { GIT_CEILING_DIRECTORIES=$work git -c core.autocrlf=false apply "$@" >>"$log" 2>&1; }
compile() { ninja -C build -j "$jobs" qemu-system-x86_64 >>"$log" 2>&1; }
keep() {
    mkdir -p "$(dirname "$1")"
    strip -o "$1.new" build/qemu-system-x86_64
    mv "$1.new" "$1"
}

# A new Kconfig symbol recompiles everything. Nobody reads it in stock QEMU: have it from the start.
apply --include='*/Kconfig' "${patches[@]}" || failed "cannot apply the patches"

# No hardware that a virtual machine of today has no use for: sound, old network cards, displays, USB.
# What is virtual, what is passed through and what PCI Express needs stays.
{
    echo 'include ../i386-softmmu/default.mak'
    for without in ISAPC I440FX MICROVM NITRO_ENCLAVE AMD_IOMMU HYPERV XEN_EMU SEV SGX TDX \
        PCI_DEVICES VGA_PCI QXL VIRTIO_VGA VIRTIO_GPU VHOST_USER_GPU ADLIB CS4231A GUS SB16 \
        E1000E_PCI_EXPRESS NE2000_ISA APPLESMC FDC_ISA PARALLEL PVPANIC_ISA VMMOUSE VMPORT \
        IPMI_SSIF ISA_IPMI_BT ISA_IPMI_KCS PCI_IPMI_BT PCI_IPMI_KCS TPM_CRB TPM_TIS_ISA \
        ISA_DEBUG TEST_DEVICES WDT_IB700 SPDM_SOCKET UEFI_VARS; do
        echo "CONFIG_$without=n"
    done
    for with in VIRTIO_PCI PCI_BRIDGE PCIE_PORT; do
        echo "CONFIG_$with=y"
    done
} >configs/devices/x86_64-softmmu/virtual.mak

say "builds QEMU $version: about 4 minutes on two processors, once (log: $log)"
mkdir build
(cd build && ../configure --python="$(command -v "$python")" --target-list=x86_64-softmmu \
    --with-devices-x86_64=virtual --without-default-features --enable-system --enable-tcg --enable-kvm \
    --enable-vhost-user --enable-fdt --disable-docs --disable-werror --disable-debug-info --disable-install-blobs) \
    >>"$log" 2>&1 || failed "cannot configure"
if [ ! -x "$stock" ]; then
    compile || failed "cannot build stock QEMU"
    keep "$stock"
fi

if [ ! -x "$patched" ]; then
    say "builds it with ${#patches[@]} patches"
    for patch in "${patches[@]}"; do
        apply --exclude='*/Kconfig' "$patch" || failed "cannot apply $patch"
    done
    compile || failed "cannot build patched QEMU"
    "$PWD/build/qemu-system-x86_64" -device help 2>/dev/null | grep -q '"vhost-user-ism-pci"' \
        || die "the patched QEMU has no device vhost-user-ism-pci"
    keep "$patched"
fi
echo "$wanted"
