# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# What two.sh and many.sh have in common. Not a program: they source it.
# shellcheck shell=bash

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
repository=$(cd "$here/.." && pwd)

say() { echo "${0##*/}: $*" >&2; }
die() { say "$*"; exit 1; }

# Sets QEMU, KERNEL, INITRD and DAEMON, as far as the environment does not.
find_parts() {
    local line name
    if [ -z "${KERNEL:-}" ] || [ -z "${INITRD:-}" ] || [ -z "${QEMU:-}" ]; then
        say "builds kernel, QEMU and guest image where they are not built yet"
        while read -r line; do
            name=${line%%=*}
            case $name in
                KERNEL | INITRD | QEMU) [ -n "${!name:-}" ] || export "${line?}" ;;
            esac
        done < <(cd "$repository" && cargo xtask vm build)
    fi
    if [ -z "${KERNEL:-}" ] || [ -z "${INITRD:-}" ] || [ -z "${QEMU:-}" ]; then
        die "\"cargo xtask vm build\" did not say where kernel, guest image and QEMU are"
    fi
    if [ -z "${DAEMON:-}" ]; then
        (cd "$repository" && cargo build --quiet --release -p vhost-device-ism) >&2
        DAEMON=${CARGO_TARGET_DIR:-$repository/target}/release/vhost-device-ism
    fi
    export KERNEL INITRD QEMU
}

processes=()

# A directory for sockets and logs, which goes with everything that was started.
start() {
    directory=$(mktemp -d "${XDG_RUNTIME_DIR:-/tmp}/ism.XXXXXX")
    trap finish EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM
}

finish() {
    local status=$? process
    trap - EXIT
    for process in "${processes[@]}"; do
        kill "$process" 2>/dev/null || true
    done
    for process in "${processes[@]}"; do
        wait "$process" 2>/dev/null || true
    done
    if [ "$status" -ne 0 ] && [ "$status" -ne 130 ]; then
        say "logs are in $directory"
    else
        rm -rf "$directory"
    fi
    exit "$status"
}

# ISM devices of each guest
devices=1

# set_devices N: from the command line
set_devices() {
    [[ $1 =~ ^[1-9][0-9]?$ ]] || die "--devices wants a number from 1 to 99"
    devices=$1
}

# sockets_of NAME: where the other ends of a guest's devices are, a line for each
sockets_of() {
    local i
    echo "$directory/$1.ism"
    for ((i = 2; i <= devices; i++)); do
        echo "$directory/$1.$i.ism"
    done
}

# guest_options NAME: its devices as options of run.sh, in $options
guest_options() {
    local socket sockets
    mapfile -t sockets < <(sockets_of "$1")
    # Each process that has a device wants memory that can be pinned.
    options=(--append "ism.hugepages=$((32 * devices))")
    for socket in "${sockets[@]}"; do
        options+=(--ism "$socket")
    done
}

# start_daemon NAME...: a daemon with the devices of each guest
start_daemon() {
    local name socket sockets arguments=()
    for name in "$@"; do
        mapfile -t sockets < <(sockets_of "$name")
        for socket in "${sockets[@]}"; do
            arguments+=(--socket-path "$socket")
        done
    done
    # shellcheck disable=SC2086
    "$DAEMON" --window-size "${WINDOW:-4G}" --stopped-grace 0 "${arguments[@]}" ${DAEMON_ARGS:-} \
        >"$directory/daemon.log" 2>&1 &
    processes+=($!)
    for _ in {1..100}; do
        [ ! -S "$socket" ] || return 0
        kill -0 $! 2>/dev/null || break
        sleep 0.1
    done
    cat "$directory/daemon.log" >&2
    die "the daemon did not start"
}

# start_guest NAME ARGUMENT...: in the background, with ISM devices and control channel
start_guest() {
    local name=$1 options
    shift
    guest_options "$name"
    "$here/run.sh" --name "$name" "${options[@]}" --control "$directory/$name.control" \
        --console "$directory/$name.console" "$@" </dev/null >"$directory/$name.log" 2>&1 &
    processes+=($!)
}

# in_guest NAME COMMAND...: run it there
in_guest() {
    local name=$1
    shift
    python3 "$here/guest-run.py" "$directory/$name.control" "$@"
}
