#!/usr/bin/env bash
# Builds user-mode Linux once and prints the directory of it as the last line. In there are
#
#   linux     the kernel, a program
#   source/   of its source, what modules are built of
#   build/    of its build, what modules are built of
#
#   tests/uml/kernel.sh [--plain] [--install-deps]
#
# --plain builds one for measurements, without what finds mistakes.
# The source is linux-7.2.12-slim.tar.xz and uml/linux-7.2-arch-um.tar.xz (what kernel.config compiles)
# in $VM_SOURCES, by default the directory shared/vm beside this repository; where there is none, the
# release is downloaded. The result is kept in ${XDG_CACHE_HOME:-~/.cache}/vhost-device-ism/uml-<hash>/,
# where the hash is that of the source's name and size, of the configuration and of this script.
# --install-deps installs missing Debian packages, as root; so does CI=true. $JOBS compilers run at a time.
set -euo pipefail

version=7.2.12
release=https://cdn.kernel.org/pub/linux/kernel/v7.x
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
repository=$(cd "$here/../.." && pwd)
cache=${XDG_CACHE_HOME:-$HOME/.cache}/vhost-device-ism

say() { echo "uml: $*" >&2; }
die() { say "$*"; exit 1; }

install=${CI:-false} plain=false
for argument in "$@"; do
    case $argument in
        --install-deps) install=true ;;
        --plain) plain=true ;;
        *) die "unknown argument $argument; usage: kernel.sh [--plain] [--install-deps]" ;;
    esac
done

sources=${VM_SOURCES:-$repository/../shared/vm}
local_archive=$sources/linux-$version-slim.tar.xz
local_um=$sources/uml/linux-7.2-arch-um.tar.xz
if [ -f "$local_archive" ] && [ -f "$local_um" ]; then
    source_id="slim $(stat -c %s "$local_archive" "$local_um" | tr '\n' ' ')"
else
    source_id=release
fi
options=$(cat "$here/kernel.config")
[ "$plain" = false ] || options=$(sed '/^# What finds mistakes/,$d' "$here/kernel.config")
hash=$({ echo "$version $source_id $options"; cat "${BASH_SOURCE[0]}"; } | sha256sum | cut -c1-16)
out=$cache/uml-$hash

done_already() { [ -f "$out/linux" ] && echo "$out"; }
done_already && exit

# Packages -------------------------------------------------------------------------------------------

missing=()
need() { command -v "$1" >/dev/null || missing+=("$2"); }
need_header() { echo "#include <$1>" | cc -E - >/dev/null 2>&1 || missing+=("$2"); }
need cc gcc
need strip binutils
need make make
need flex flex
need bison bison
need bc bc
need perl perl
need patch patch
need xz xz-utils
need flock util-linux
need_header stdlib.h libc6-dev
[ "$source_id" != release ] || need curl curl
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
exec 9>"$cache/uml.lock"
flock -n 9 || { say "waits for another build"; flock 9; }
done_already && exit

# The build's files name the directory of the source, so it is built where it stays.
rm -rf "$out"
mkdir -p "$out/source" "$out/build"

archives=("$local_archive" "$local_um")
if [ "$source_id" = release ]; then
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
    archives=("$archive")
fi
say "unpacks ${archives[*]}"
tar -xf "${archives[0]}" -C "$out/source" --strip-components=1
[ ${#archives[@]} = 1 ] || tar -xf "${archives[1]}" -C "$out/source"

config=$out/config
echo "$options" >"$config"
cd "$out/source"
# Mistakes of user-mode Linux, which would be taken for the driver's.
repair() { # FILE SED-SCRIPT: it must change the file
    sed -i.old "$2" "$1"
    ! cmp -s "$1.old" "$1" || die "$1 is not the file that is repaired here"
    rm "$1.old"
}
# The handler of SIGIO walks a static array of events, each of which epoll reports once. A softirq lets
# it be entered again, and that overwrites the array: the rest of the events is lost. One at a time.
repair arch/um/os-Linux/irq.c 's/^#define MAX_EPOLL_EVENTS 64$/#define MAX_EPOLL_EVENTS 1/'
# Softirqs take these locks, too. Lockdep reports it, and looks for no other mistake from then on.
repair arch/um/drivers/vector_kern.c \
    '/^static void vector_reset_stats/,/^}/s/spin_\(un\)\?lock(/spin_\1lock_bh(/'
# A device that its driver resets, and negotiates with again, has lost what the driver does not know: that
# it has protocol features, without which no queue is enabled.
repair arch/um/drivers/virtio_uml.c \
    's/^\tu64 supported = vdev->features & VHOST_USER_SUPPORTED_F;/\tu64 supported = vu_dev->features \& VHOST_USER_SUPPORTED_F;/'
# An interrupt that cannot be had leaves its descriptor behind, and the next with that number is refused.
repair arch/um/kernel/irq.c \
    '/^\terr = request_irq(irq, handler/,/^\t\tgoto error;/s/^\tif (err < 0)$/\tif (err < 0 \&\& fd != -1)\n\t\tfree_irq_by_fd(fd);\n\tif (err < 0)/'
log=$cache/uml-build.log
say "builds user-mode Linux $version: about 6 minutes on two processors, once (log: $log)"
run_make() { make ARCH=um O="$out/build" "$@"; }
configure() {
    KCONFIG_ALLCONFIG="$config" run_make allnoconfig
    scripts/kconfig/merge_config.sh -m -O "$out/build" "$out/build/.config" "$config"
    run_make olddefconfig
}
configure >"$log" 2>&1 || { tail -20 "$log" >&2; die "cannot configure"; }
# An option whose dependencies are missing disappears without a word.
while read -r option; do
    grep -qx "$option" "$out/build/.config" || die "$option of kernel.config has no effect"
done < <(grep -E '^CONFIG_[A-Z0-9_]+=(y|[0-9])' "$config")
KBUILD_BUILD_TIMESTAMP="@0" KBUILD_BUILD_USER=builder KBUILD_BUILD_HOST=localhost \
    run_make -j"${JOBS:-$(nproc)}" >>"$log" 2>&1 || { tail -30 "$log" >&2; die "cannot build"; }

# Modules need headers, scripts and the list of symbols.
find "$out/build" \( -name '*.o' -o -name '*.a' -o -name '.*.cmd' \) -not -path '*/scripts/*' -delete
find "$out/source" -type f \( -name '*.[cS]' -o -name '*.rs' -o -name '*.dts*' -o -name '*.rst' \) \
    -not -path "$out/source/scripts/*" -not -path "$out/source/arch/*" -delete
# The driver's patches are tried on what is left of drivers/.
find "$out/source/drivers" -mindepth 1 -maxdepth 1 -not -name dibs -exec rm -rf {} +
rm -rf "$out/source"/{Documentation,tools/testing,sound,fs,samples}
find "$out/source/arch" -mindepth 1 -maxdepth 1 -type d -not -name um -not -name x86 -exec rm -rf {} +
strip -o "$out/linux.new" "$out/build/linux"
rm -f "$out/build/linux" "$out/build/vmlinux" "$out/build"/vmlinux.*
mv "$out/linux.new" "$out/linux"
echo "$out"
