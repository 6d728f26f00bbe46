#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# The daemon and N guests on one fabric and one network.
set -euo pipefail

usage() {
    cat <<END
usage: qemu/many.sh [--devices M] N [COMMAND]

Starts vhost-device-ism and N guests, g1 to gN, 10.0.0.1 to 10.0.0.N, each with an ISM device, all on one
network. Runs COMMAND in every guest at once, as sh -c does, with its number in \$N, and ends everything
when all are over; the result is 0 if all succeeded. Without COMMAND it says where the guests' control
channels are and waits for Ctrl-C.

  --devices M  so many ISM devices in each guest (default: 1); each takes 64M of its memory, see MEM

environment:
  PORT    UDP port of the network on the loopback interface (default: 5558)
  WINDOW  size of each guest's window (default: 1G; 16 guests of 4G want a firmware that can place them)
  MEM     memory of each guest (default: 256M)
  others  as for two.sh

examples:
  qemu/many.sh 4 'smc devices'
  qemu/many.sh 3 'case \$N in 1) smc listen -v 5000 ;; *) sleep \$N; echo \$N | smc connect 10.0.0.1 5000 ;; esac'
END
}

# shellcheck source-path=SCRIPTDIR source=parts.sh
. "$(dirname "${BASH_SOURCE[0]}")/parts.sh"

while [[ ${1:-} == -* ]]; do
    case $1 in
        -h | --help) usage; exit ;;
        --devices) set_devices "${2:-}"; shift 2 ;;
        *) usage >&2; die "unknown argument $1" ;;
    esac
done
if [[ ! ${1:-} =~ ^[1-9][0-9]*$ ]] || [ "$1" -gt 100 ] || [ $# -gt 2 ]; then
    usage >&2
    die "a number of guests, 1 to 100, and at most one command"
fi
count=$1 in_each=${2:-}
export WINDOW=${WINDOW:-1G} MEM=${MEM:-256M} SMC_DEVICE=${SMC_DEVICE:-pci}

find_parts
start
names=()
for ((i = 1; i <= count; i++)); do
    names+=("g$i")
done
start_daemon "${names[@]}"
for name in "${names[@]}"; do
    start_guest "$name" --net "lan:${PORT:-5558}"
done

if [ -z "$in_each" ]; then
    say "run a command in guest 1 with: python3 $here/guest-run.py $directory/g1.control COMMAND"
    say "logs are in $directory; Ctrl-C ends the guests"
    wait "${processes[@]:1}"
    exit
fi

jobs=()
for ((i = 1; i <= count; i++)); do
    in_guest "g$i" sh -c "N=$i; $in_each" > >(sed -u "s/^/g$i: /") 2> >(sed -u "s/^/g$i! /" >&2) &
    jobs+=($!)
done
processes+=("${jobs[@]}")
status=0
for job in "${jobs[@]}"; do
    wait "$job" || status=$?
done
exit "$status"
