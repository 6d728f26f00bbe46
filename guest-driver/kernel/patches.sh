#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# Writes the driver as a series of patches against Linux, with a cover letter, as one would mail it to
# netdev.
#
#   guest-driver/kernel/patches.sh DIRECTORY ["NAME <ADDRESS>"]
#
# Who mails it signs it off (Documentation/process/submitting-patches.rst), and is named as author and as
# maintainer. Without a name its place is marked, and the series is not to be mailed.
#
# The patches only add files, but for the lines of Kconfig, Makefile and MAINTAINERS, which name their
# place in Linux 7.2.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
out=${1:?usage: patches.sh DIRECTORY ["NAME <ADDRESS>"]}
author=${2:-AUTHOR <ADDRESS>}
if [[ ! $author =~ ^[^\<\>]+\ \<[^\<\>]+\>$ ]]; then
    echo "patches.sh: \"$author\" is not of the form NAME <ADDRESS>" >&2
    exit 1
fi
mkdir -p "$out"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# added NAME FILE: FILE as a new file of the kernel.
added() {
    local lines
    lines=$(wc -l <"$2")
    printf -- '--- /dev/null\n+++ b/%s\n@@ -0,0 +1,%d @@\n' "$1" "$lines"
    sed 's/^/+/' "$2"
}

# patch NUMBER SUBJECT <<DESCRIPTION, with the change in $work/change
mail() {
    local number=$1 subject=$2 name
    name=$(tr -cs 'A-Za-z0-9' - <<<"$subject" | sed 's/-$//' | cut -c1-52)
    {
        printf 'From: %s\nSubject: [PATCH net-next %s/3] %s\n\n' "$author" "$number" "$subject"
        cat
        printf '\nSigned-off-by: %s\n---\n' "$author"
        cat "$work/change"
    } >"$out/000$number-$name.patch"
}

rm -f "$out"/000*.patch
{ printf 'From: %s\n' "$author"; cat <<'TEXT'; } >"$out/0000-cover-letter.patch"
Subject: [PATCH net-next 0/3] dibs: virtio ISM device

The virtio specification reserves device id 44 for an ISM (Internal Shared
Memory) device, and has no text for it. This series adds a driver for one
revision of such a device. It is a dibs device, so AF_SMC runs SMC-D over it
between virtual machines, and between a virtual machine and processes of its
host.

DMBs lie in guest memory, or in slabs of the device's shared memory region.
A guest writes into a peer's DMB by a request on a virtqueue, and the device
copies; or it stores into the slab, which both guests have mapped. Each DMB
has one user, named by its GID; the device checks token and GID. A slab is of
one owner and one user.

A move is posted and not awaited, since move_data() may not sleep. A move
that the device refuses later fails the next move to the same DMB. Clients do
not say before the first move that they will write a DMB, so that one is the
device's, and a work attaches the DMB meanwhile.

The driver does not trust the device: it copies what the device says, and
checks it. A device that breaks a rule is reset, and begins a new session.
TEXT

added include/uapi/linux/virtio_ism.h "$here/include/uapi/linux/virtio_ism.h" >"$work/change"
mail 1 "virtio: add the layouts of the ISM device" <<'TEXT'
Requests, replies, moves and event records of revision 1 of the device.
TEXT

: >"$work/change"
for file in vism.h window.h main.c control.c event.c move.c dibs.c debugfs.c window.c peer.c; do
    added "drivers/dibs/virtio_ism/$file" "$here/$file" >>"$work/change"
done
# In the tree the option comes from Kconfig, and the header from include/uapi.
grep -v -e '^ccflags' -e '^CONFIG_' -e '^# ' -e '^#$' "$here/Kbuild" | sed '/./,$!d' >"$work/rules"
{ echo '# SPDX-License-Identifier: GPL-2.0'; echo; cat "$work/rules"; } >"$work/Makefile"
added drivers/dibs/virtio_ism/Makefile "$work/Makefile" >>"$work/change"
added drivers/dibs/virtio_ism/Kconfig "$here/Kconfig" >>"$work/change"
cat >>"$work/change" <<'TEXT'
--- a/drivers/dibs/Kconfig
+++ b/drivers/dibs/Kconfig
@@ -21,3 +21,5 @@
 	  occurs within the same OS. This helps in convenient testing of
 	  dibs clients, since dibs loopback is independent of architecture or
 	  hardware.
+
+source "drivers/dibs/virtio_ism/Kconfig"
--- a/drivers/dibs/Makefile
+++ b/drivers/dibs/Makefile
@@ -5,4 +5,5 @@
 
 dibs-y += dibs_main.o
 obj-$(CONFIG_DIBS) += dibs.o
+obj-$(CONFIG_VIRTIO_ISM) += virtio_ism/
 dibs-$(CONFIG_DIBS_LO) += dibs_loopback.o
\ No newline at end of file
TEXT
mail 2 "dibs: add a driver for the virtio ISM device" <<'TEXT'
Control, event and move queues, DMBs in guest memory and in the shared
memory region, software events, the end of peers, restart of a device that
has failed, and counters in debugfs.
TEXT

cat >"$work/maintainers" <<TEXT
VIRTIO ISM DRIVER
M:	$author
L:	netdev@vger.kernel.org
L:	virtualization@lists.linux.dev
S:	Maintained
F:	drivers/dibs/virtio_ism/
F:	include/uapi/linux/virtio_ism.h
TEXT
cp "$work/maintainers" "$out/MAINTAINERS.entry"
: >"$work/change"
cat >"$work/documentation" <<'TEXT'
.. SPDX-License-Identifier: GPL-2.0

=================
Virtio ISM device
=================

The driver virtio_ism makes a virtio device of id 44 a dibs device. SMC
(AF_SMC) uses it as SMC-D, version 2.1, if it has an enterprise id.

debugfs
=======

``virtio_ism/<device>/counters`` has one counter per line: those of the
driver (moves, stores, kicks, commands, records of the event queue by kind),
and those that the device keeps (``device_*``), if it offers
VIRTIO_ISM_F_STATS.

Module parameters
=================

``window``
  0: the device copies all data. By default the driver stores into the memory
  that it shares with peers.

``poll_us``
  How often, in microseconds, the driver looks at a peer that had news lately
  (50). Meanwhile that peer need not wake it. 0: it is woken each time.
TEXT
added Documentation/networking/virtio_ism.rst "$work/documentation" >"$work/change"
mail 3 "Documentation: networking: describe virtio_ism" <<'TEXT'
What the driver is for, and its counters.
TEXT
[ "$#" -gt 1 ] || echo "patches.sh: not signed off: name yourself to mail it" >&2
ls "$out"
