#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# Two guests whose QEMU is that of a distribution, without a patch: runs the commands of
# docs/virtual-machines.md about vfio-user, and those inside the guests. The QEMU is that of Debian sid,
# in an image of its own that is kept outside of the clone; the guests' kernel and files are those of
# `cargo xtask vm`.
#
# It needs root, for making the image. A missing prerequisite fails where CI is true, and is said aloud
# elsewhere.
set -euo pipefail
cd "$(dirname "$0")/../.."
. tests/containers/common.sh

need mmdebstrap:mmdebstrap
image=$(image vfio-user sid apt qemu-system-x86,seabios)
root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
tar -C "$root" -xf "$image" ./usr
VFIO_USER_ROOT=$root cargo xtask vm --show-output --only page::vfio_user::
