#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# The daemon and two guests, a and b, that reach each other.
set -euo pipefail

usage() {
    cat <<END
usage: qemu/two.sh [--devices N] [--shell] [COMMAND-IN-A COMMAND-IN-B]

Starts vhost-device-ism and two guests, a (10.0.0.1) and b (10.0.0.2), with an ISM device each and a
network between them; runs a command in each, as sh -c does, and ends everything when b's is over.
Without commands: shows the devices, and sends a line from b to a over SMC.

  --devices N  so many ISM devices in each guest, as many as processes of it are to be on SMC (default: 1);
               each takes 64M of the guest's memory, see MEM
  --shell      instead of commands a shell in each guest, in two panes of tmux; without tmux it says how
               to reach the consoles. Leave the shells to end.

environment:
  QEMU, KERNEL, INITRD  as for run.sh; what is missing "cargo xtask vm build" makes
  DAEMON                a vhost-device-ism (default: built from this repository)
  DAEMON_ARGS           more arguments for it
  WINDOW                size of each guest's window (default: 4G)
  ACCEL, MEM, CPUS      as for run.sh

examples:
  qemu/two.sh 'smc listen -v 5000' 'sleep 1; uname -a | smc connect -v 10.0.0.1 5000'
  qemu/two.sh 'smc perf --serve 10.0.0.1:7000' 'sleep 1; smc perf --to 10.0.0.1:7000'
  qemu/two.sh --devices 3 'smc devices' true
  ACCEL=kvm qemu/two.sh --shell
END
}

# shellcheck source-path=SCRIPTDIR source=parts.sh
. "$(dirname "${BASH_SOURCE[0]}")/parts.sh"

shell=no
while [[ ${1:-} == -* ]]; do
    case $1 in
        -h | --help) usage; exit ;;
        --shell) shell=yes; shift ;;
        --devices) set_devices "${2:-}"; shift 2 ;;
        *) usage >&2; die "unknown argument $1" ;;
    esac
done
case $# in
    0) in_a='smc devices; smc listen -v 5000'
        in_b='smc devices; sleep 1; echo "a line from b" | smc connect -v 10.0.0.1 5000' ;;
    2) in_a=$1 in_b=$2 ;;
    *) usage >&2; die "two commands, or none" ;;
esac

find_parts
start
start_daemon a b

if [ "$shell" = yes ]; then
    shell_of() {
        local name=$1 options
        shift
        guest_options "$name"
        printf '%q ' "$here/run.sh" --name "$name" "${options[@]}" \
            --net "pair-$name:$directory/net" "$@"
    }
    cat >&2 <<END
In each guest "smc devices" shows its device. Then, for example:
  a# smc listen --device pci -v 5000
  b# echo hello | smc connect --device pci -v 10.0.0.1 5000
"exit" ends a guest; Ctrl-A X ends its QEMU.
END
    export SMC_DEVICE=pci
    if [ -t 0 ] && command -v tmux >/dev/null; then
        tmux new-session -s "ism-$$" "$(shell_of a)" \; split-window -h "$(shell_of b)"
    else
        say "type in two other terminals (Ctrl-C here ends the daemon):"
        variables=("KERNEL=$KERNEL" "INITRD=$INITRD" "QEMU=$QEMU" "ACCEL=${ACCEL:-tcg}")
        for guest in a b; do
            { printf '  %q ' env "${variables[@]}"; shell_of "$guest"; echo; } | tr -s ' '
        done
        wait "${processes[0]}"
    fi
    exit
fi

export SMC_DEVICE=${SMC_DEVICE:-pci}
start_guest a --net "pair-a:$directory/net"
start_guest b --net "pair-b:$directory/net"
say "a: $in_a"
in_guest a sh -c "$in_a" > >(sed -u 's/^/a: /') 2> >(sed -u 's/^/a! /' >&2) &
processes+=($!)
say "b: $in_b"
status=0
in_guest b sh -c "$in_b" > >(sed -u 's/^/b: /') 2> >(sed -u 's/^/b! /' >&2) || status=$?
# What b sent may be on its way through a's command.
for _ in {1..20}; do
    kill -0 "${processes[-1]}" 2>/dev/null || break
    sleep 0.1
done
exit "$status"
