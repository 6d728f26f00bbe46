#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# Prints the directories of the firmware that a QEMU needs to boot a guest, one a line.
set -euo pipefail

usage() {
    cat <<END
usage: qemu/firmware.sh [--install-deps] [QEMU]

Prints the directories of the firmware that QEMU needs to boot a guest, for its option -L.

  --install-deps  install missing Debian packages, as root; CI=true does the same
END
}

install=${CI:-false} qemu=''
for argument in "$@"; do
    case $argument in
        -h | --help) usage; exit ;;
        --install-deps) install=true ;;
        *) qemu=$argument ;;
    esac
done

own=()
[ -z "$qemu" ] || own=("$(dirname "$(readlink -f "$(command -v "$qemu")")")/pc-bios")
directory_of() {
    local directory
    for directory in "${own[@]}" /usr/share/seabios /usr/share/qemu /usr/share/qemu-kvm \
        /usr/local/share/qemu /usr/share/kvm /usr/share/seavgabios \
        /run/current-system/sw/share/qemu; do
        if [ -f "$directory/$1" ]; then
            echo "$directory"
            return
        fi
    done
    return 1
}

missing=()
need() { directory_of "$1" >/dev/null || missing+=("$2"); }
need bios-256k.bin seabios
need linuxboot_dma.bin qemu-system-data
need pvh.bin qemu-system-data
if [ ${#missing[@]} -gt 0 ]; then
    if [ "$install" != true ] || [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
        echo "qemu: no firmware; on Debian: apt-get install ${missing[*]}" >&2
        exit 1
    fi
    echo "qemu: installs ${missing[*]}" >&2
    # Not while another of these scripts installs something.
    export DEBIAN_FRONTEND=noninteractive
    flock /var/lib/dpkg bash -c 'apt-get update -q && apt-get install -y -q "$@"' - "${missing[@]}" >&2
fi
directory_of bios-256k.bin
directory_of linuxboot_dma.bin
