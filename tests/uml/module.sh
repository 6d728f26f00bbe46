#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# Builds the kernel's driver for a kernel of tests/uml/kernel.sh or tests/vm/kernel.sh, with all warnings
# as errors, and prints the path of the module as the last line. For user-mode Linux it also checks the
# sources and the patches.
#
#   tests/uml/module.sh KERNEL OUT
#
# KERNEL has source/ and build/.
set -euo pipefail
kernel=$1 out=$2
driver=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../guest-driver/kernel" && pwd)
source=$kernel/source
arch=x86
! grep -qx CONFIG_UML=y "$kernel/build/.config" || arch=um

say() { echo "module: $*" >&2; }
need() { command -v "$1" >/dev/null || { say "missing; on Debian: apt-get install $2"; exit 1; }; }
need cc gcc
need make make
need perl perl
need patch patch
need flock util-linux
mkdir -p "$out"
# One build at a time: both would write the same files.
exec 9>"$out/lock"
flock 9
options=(W=1)
if command -v sparse >/dev/null; then
    # Debian's release does not know this word, which only drops qualifiers.
    options+=(C=1 "CHECK=sparse -D__typeof_unqual__=__typeof__")
elif [ "${CI:-false}" = true ]; then
    say "no sparse"
    exit 1
else
    say "not checked by sparse, which is not installed"
fi
# Warnings of the compiler and of sparse fail alike.
log=$out/build.log
make -C "$source" ARCH="$arch" O="$kernel/build" M="$driver" MO="$out" "${options[@]}" modules >"$log" 2>&1 \
    || { cat "$log" >&2; exit 1; }
if grep -E 'warning:|WARNING:' "$log" >&2; then
    say "the driver builds with warnings"
    exit 1
fi
if [ "$arch" != um ]; then
    echo "$out/virtio_ism.ko"
    exit
fi
cd "$driver"
"$source/scripts/checkpatch.pl" --no-tree --strict --terse --quiet -f ./*.[ch] include/uapi/linux/*.h \
    Kbuild Kconfig Makefile >"$out/checkpatch.log" 2>&1 || { cat "$out/checkpatch.log" >&2; exit 1; }
if [ -x "$source/scripts/kernel-doc" ]; then
    "$source/scripts/kernel-doc" -none -Wall -Werror ./*.[ch] >&2
fi
# The patches apply to the kernel, and are the driver's sources.
rm -rf "$out/patches" "$out/tree"
"$driver/patches.sh" "$out/patches" >/dev/null
mkdir -p "$out/tree/drivers"
cp -r "$source/drivers/dibs" "$out/tree/drivers/"
for patch in "$out"/patches/000[1-9]*.patch; do
    patch --directory "$out/tree" -p1 --fuzz=0 --silent --input "$patch" >&2
done
for file in ./*.[ch]; do
    cmp "$file" "$out/tree/drivers/dibs/virtio_ism/$file" >&2
done
echo "$out/virtio_ism.ko"
