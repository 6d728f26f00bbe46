#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# Starts one guest in the foreground: the process becomes QEMU.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

usage() {
    cat <<END
usage: qemu/run.sh --name NAME [OPTION]... [-- QEMU ARGUMENT...]

Starts one guest and becomes its QEMU, so that the guest's process id is the caller's.

  --name NAME       of the guest: a, b, c... or with a number at its end (node12); decides MAC and IP
  --ism SOCKET      an ISM device, whose other end is vhost-device-ism at this Unix socket; may be
                    repeated. Starting waits for the socket, and a lost connection is made again.
  --ism SOCKET,vfio-user  the same for a socket that speaks vfio-user, which has to be there already
  --queues N        virtqueues of each ISM device (default: 4)
  --net pair-a:SOCKET   a network of two guests: this end listens at the Unix socket. --net may be
                    repeated for eth1 and so on, whose address is 10.0.1.N.
  --net pair-b:SOCKET   the other end
  --net lan:PORT    a network of all guests of this host that name the same UDP port (multicast on
                    the loopback interface)
  --net lan:PORT@ADDRESS   the same on the interface that has this address
  --net tap:IF      a tap interface that exists
  --ip ADDRESS/LEN  address of the first network interface (default: 10.0.0.N/24, N from the name: a
                    is 1)
  --vsock SOCKET    a vsock device, whose other end is vhost-device-vsock at this Unix socket
  --control SOCKET  a virtio-serial port named "control", to be found at this Unix socket
  --qmp SOCKET      QEMU's machine protocol at this Unix socket
  --console FILE    write the serial console to a file (default: this terminal; Ctrl-A X ends QEMU)
  --append ARGS     more arguments for the kernel
  --reboot          a guest that reboots starts again (default: it ends)
  --print           print the command instead of running it

environment:
  KERNEL, INITRD    what to boot: "cargo xtask vm build" makes both and prints their paths
  QEMU              the binary (default: what qemu/build.sh prints)
  ACCEL             tcg (default) or kvm
  MEM               memory (default: 512M); QEMU's options for more may follow: 512M,slots=2,maxmem=1G
  CPUS              processors (default: 1)
  CPU               model (default: host with kvm, else QEMU's)
END
}

die() { echo "run.sh: $*" >&2; exit 1; }

name='' ip='' console='' append='' reboot=no print=no queues=4
ism=() net=() devices=()
socket_chardev() { devices+=(-chardev "socket,id=$1,path=$2,$3"); }
while [ $# -gt 0 ]; do
    case $1 in
        -h | --help) usage; exit ;;
        --reboot) reboot=yes; shift; continue ;;
        --print) print=yes; shift; continue ;;
        --) shift; break ;;
        --*) [ $# -ge 2 ] || die "$1 needs a value; see --help" ;;
    esac
    case $1 in
        --name) name=$2 ;;
        --ism) ism+=("$2") ;;
        --queues) queues=$2 ;;
        --net) net+=("$2") ;;
        --ip) ip=$2 ;;
        --vsock)
            # With reconnect-ms it would not be connected yet when the device wants it.
            socket_chardev vsock "$2" server=off
            devices+=(-device "vhost-user-vsock-pci,chardev=vsock,romfile=") ;;
        --control)
            socket_chardev control "$2" server=on,wait=off
            devices+=(-device "virtio-serial-pci,romfile=")
            devices+=(-device "virtserialport,chardev=control,name=control") ;;
        --qmp) devices+=(-qmp "unix:$2,server=on,wait=off") ;;
        --console) console=$2 ;;
        --append) append+=" $2" ;;
        *) die "unknown argument $1; see --help" ;;
    esac
    shift 2
done
[ -n "$name" ] || die "--name is missing; see --help"
[ -f "${KERNEL:-}" ] || die "KERNEL is not set to a file; \"cargo xtask vm build\" makes one"
[ -f "${INITRD:-}" ] || die "INITRD is not set to a file; \"cargo xtask vm build\" makes one"
qemu=${QEMU:-$("$here/build.sh")}

# Firmware -------------------------------------------------------------------------------------------

firmware=()
directories=$("$here/firmware.sh" "$qemu")
for directory in $directories; do
    firmware+=(-L "$directory")
done

# Machine --------------------------------------------------------------------------------------------

accel=${ACCEL:-tcg}
case $accel in
    tcg) cpu=${CPU:-} ;;
    kvm)
        [ -w /dev/kvm ] || die "ACCEL=kvm, and /dev/kvm cannot be used"
        cpu=${CPU:-host} ;;
    *) die "ACCEL=$accel is neither tcg nor kvm" ;;
esac
mem=${MEM:-512M}

# The last part of the address: a number at the end of the name, or the place in the alphabet.
if [[ $name =~ ([0-9]+)$ ]]; then
    number=$((10#${BASH_REMATCH[1]}))
elif [[ $name =~ ^[a-z]$ ]]; then
    number=$(($(printf %d "'$name") - 96))
else
    number=0
fi
if [ -z "$ip" ] && [ ${#net[@]} -gt 0 ]; then
    if [ "$number" -lt 1 ] || [ "$number" -gt 254 ]; then
        die "no address follows from the name $name; give one with --ip"
    fi
    ip=10.0.0.$number/24
fi

# An emulated processor on a busy host misses ticks by which the kernel would see that its timer works;
# so it does not try.
append=" no_timer_check$append"
# With one processor the kernel patches thousands of locked instructions out of itself. Emulation gains
# nothing by that, and is busy with it for a sixth of the boot.
[ "$accel" != tcg ] || append=" noreplace-smp$append"

arguments=(
    -name "$name,process=ism-$name" "${firmware[@]}"
    -nodefaults -no-user-config -display none
    -machine "q35,memory-backend=memory" -accel "$accel" -m "$mem" -smp "${CPUS:-1}"
    # vhost-user needs memory that can be shared, and the daemon wants it sealed.
    -object "memory-backend-memfd,id=memory,size=${mem%%,*},share=on"
    -kernel "$KERNEL" -initrd "$INITRD"
    -append "console=ttyS0 quiet panic=-1 ism.name=$name${ip:+ ism.ip=$ip}$append"
    -object "rng-random,id=random,filename=/dev/urandom"
    -device "virtio-rng-pci,rng=random,romfile="
)
[ -z "$cpu" ] || arguments+=(-cpu "$cpu")
[ "$reboot" = yes ] || arguments+=(-no-reboot)
if [ -n "$console" ]; then
    arguments+=(-serial "file:$console")
else
    arguments+=(-serial mon:stdio)
fi

for i in "${!net[@]}"; do
    where=${net[i]#*:}
    case ${net[i]} in
        pair-a:?*) netdev=stream,server=on,addr.type=unix,addr.path=$where ;;
        pair-b:?*) netdev=stream,server=off,addr.type=unix,addr.path=$where,reconnect-ms=200 ;;
        lan:?*) netdev=dgram,remote.type=inet,remote.host=230.0.0.1,remote.port=${where%@*}
            [[ $where = *@* ]] && address=${where#*@} || address=127.0.0.1
            netdev+=,local.type=inet,local.host=$address,local.port=0 ;;
        tap:?*) netdev=tap,ifname=$where,script=no,downscript=no ;;
        *) die "--net ${net[i]} is none of pair-a:SOCKET, pair-b:SOCKET, lan:PORT[@ADDRESS], tap:IF" ;;
    esac
    id=net mac=$name
    [ "$i" = 0 ] || id=net$i mac=$name-$i
    mac=52:54:00:$(printf %s "$mac" | sha256sum | sed 's/\(..\)\(..\)\(..\).*/\1:\2:\3/')
    arguments+=(-netdev "${netdev/,/,id=$id,}" -device "virtio-net-pci,netdev=$id,mac=$mac,romfile=")
done

# With KVM an interrupt goes straight from the daemon to the guest. Without, it goes through a thread of
# QEMU, and the main loop has much else to look at.
interrupts=''
if [ "$accel" = tcg ] && [ ${#ism[@]} -gt 0 ]; then
    devices+=(-object "iothread,id=ism-interrupts")
    interrupts=,iothread=ism-interrupts
fi
for i in "${!ism[@]}"; do
    if [[ ${ism[i]} = *,vfio-user ]]; then
        socket="{\"type\": \"unix\", \"path\": \"${ism[i]%,vfio-user}\"}"
        devices+=(-device "{\"driver\": \"vfio-user-pci\", \"id\": \"ism-device$i\", \"socket\": $socket}")
        continue
    fi
    socket_chardev "ism$i" "${ism[i]}" reconnect-ms=200
    device=vhost-user-ism-pci,id=ism-device$i,chardev=ism$i,num-queues=$queues$interrupts,romfile=
    devices+=(-device "$device")
done

command=("$qemu" "${arguments[@]}" "${devices[@]}" "$@")
if [ "$print" = yes ]; then
    printf '%q ' "${command[@]}"
    echo
    exit
fi
exec "${command[@]}"
