#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# Two domains of libvirt on SMC-D: runs the commands and the domain of docs/virtual-machines.md as they
# stand there, types into the domains' consoles, and does what operators of libvirt do.
#
#     tests/libvirt/run.sh [SUITE]
#
# QEMU, kernel and initramfs are those of `cargo xtask vm build`, or what the variables say that it
# prints. libvirt is the distribution's, with its own configuration: QEMU is the user libvirt-qemu, and
# the DAC security driver is on. With a suite of Debian (trixie, sid) it is that suite's, in a root
# directory that is made once and kept in ~/.cache. Both daemons of libvirt work in mount, network and
# process namespaces of their own, so nothing of it is left. Control groups are not there: they would be
# those of the machine. A second mount and network namespace, with daemons of its own, is the host to
# which domains are migrated.
#
# It needs root, /dev/net/tun and libvirt-daemon-system, with a suite mmdebstrap; a missing one fails where
# CI is true, and is said aloud elsewhere. It is no part of .ci/run. On two busy processors it takes a
# minute and a half; with sid, whose libvirt migrates the domains, five minutes.
set -euo pipefail
cd "$(dirname "$0")/../.."
. tests/containers/common.sh

page=docs/virtual-machines.md
if [ "${1:-}" != inside ]; then
    suite=${1:-}
    if [ -n "$suite" ]; then
        need mmdebstrap:mmdebstrap
    else
        need libvirtd:libvirt-daemon-system virtlogd:libvirt-daemon-driver-qemu virsh:libvirt-clients
    fi
    [ -e /dev/net/tun ] || missing "there is no /dev/net/tun"
    if [ -z "${QEMU:-}" ] || [ -z "${KERNEL:-}" ] || [ -z "${INITRD:-}" ] || [ -z "${DAEMON:-}" ]; then
        built=$(cargo xtask vm build)
        while IFS= read -r line; do
            export "${line?}"
        done <<<"$built"
    fi
    [ -n "$suite" ] ||
        exec unshare --mount --net --pid --fork --kill-child --mount-proc -- "$0" inside
    image=$(image libvirt "$suite" apt \
        libvirt-daemon-system,libvirt-daemon-driver-qemu,libvirt-clients,iproute2,procps,seabios,qemu-system-data)
    root=$(mktemp -d "${TMPDIR:-/var/tmp}/libvirt.XXXXXX")
    trap 'rm -rf --one-file-system "$root"' EXIT
    tar -C "$root" -xf "$image"
    mkdir -p "$root"/srv/{docs,tests/libvirt,tests/containers,built}
    cp "$page" "$root/srv/docs"
    cp tests/libvirt/run.sh "$root/srv/tests/libvirt"
    cp tests/containers/common.sh "$root/srv/tests/containers"
    variables=()
    for name in QEMU KERNEL INITRD DAEMON; do
        cp "${!name}" "$root/srv/built"
        variables+=("$name=/srv/built/$(basename "${!name}")")
    done
    enter "$root" env "${variables[@]}" tests/libvirt/run.sh inside
    exit
fi

# Hosts of its own -----------------------------------------------------------------------------------

umount --recursive --lazy /sys/fs/cgroup 2>/dev/null || true
for directory in /run /var/lib/libvirt /var/cache/libvirt /var/log/libvirt; do
    mount -t tmpfs -o mode=755 tmpfs "$directory"
done
cp -a /etc/libvirt /run/configuration
mkdir /run/lock /run/test /run/test/there
# libvirt asks for the addresses of its host at each migration.
echo "127.0.0.1 localhost there $(hostname)" >/run/test/hosts
mount --bind /run/test/hosts /etc/hosts
# The other one is a copy, and shares /run/test.
unshare --mount --uts --net sleep infinity &
other=$!
for _ in $(seq 600); do
    [ "$(readlink "/proc/$other/ns/net")" = "$(readlink /proc/self/ns/net)" ] || break
    sleep 0.1
done
# These words before a command run it on the other host.
there=(nsenter --target "$other" --mount --uts --net --)
"${there[@]}" bash -euc '
    mkdir /run/there /run/there/test /run/there/lock
    mount --bind /run/test /run/there/test
    cp -a /etc/libvirt /run/there/configuration
    mount --rbind /run/there /run
    for directory in /var/lib/libvirt /var/cache/libvirt /var/log/libvirt; do
        mount -t tmpfs -o mode=755 tmpfs "$directory"
    done
    mount --bind /run/configuration /etc/libvirt
    hostname there
    ip link set lo up
    # libvirt refuses to migrate a domain to the host where it is.
    cat >>/etc/libvirt/libvirtd.conf <<END
host_uuid = "$(cat /proc/sys/kernel/random/uuid)"
unix_sock_dir = "/run/test/there"
END'
there_uri='qemu:///system?socket=/run/test/there/libvirt-sock'
mount --bind /run/configuration /etc/libvirt
ip link set lo up
# The commands of the page are typed here.
terminal=/run/test
PATH=$(dirname "$DAEMON"):$PATH

# page NAME [WORD...]: runs the commands of a block, after these words.
page() {
    local script
    script=$(block "$page" "$1")
    # A domain waits without limit for a socket that it cannot connect to.
    (cd "$terminal" && "${@:2}" timeout 150 bash -euc "$script") || fail "the block $1"
}
# until_true SECONDS CONDITION: waits until a command succeeds.
until_true() {
    local _
    for _ in $(seq "$(($1 * 10))"); do
        eval "$2" && return
        sleep 0.1
    done
    fail "this did not happen within $1 s: $2"
}
logs() {
    local log
    for log in /run/test/*.log /var/log/libvirt/qemu/*.log \
        "/proc/$other/root/var/log/libvirt/qemu/"*.log; do
        echo "--- $log"
        tail -n 30 "$log"
    done
}
trap '[ $? = 0 ] || logs >&2' EXIT

# start_daemon [WORD...]: runs the page's daemon in the background, by the id $daemon.
start_daemon() {
    local script
    script=$(block "$page" 'libvirt daemon')
    (cd "$terminal" && exec "$@" bash -euc "${script/$'\n'vhost/$'\n'exec vhost}") >>/run/test/daemon.log 2>&1 &
    daemon=$!
}
# start_libvirtd: starts it, by the id $libvirtd.
start_libvirtd() {
    libvirtd --timeout 0 >>/run/test/libvirtd.log 2>&1 &
    libvirtd=$!
    until_true 60 'virsh list >/dev/null 2>&1'
}

# The consoles of the domains ------------------------------------------------------------------------

declare -A consoles uris=([a]=qemu:///system [b]=qemu:///system)
typed=0
# console NAME: connects to the console of a domain, and waits for its shell.
console() {
    local console pty
    pty=$(virsh -c "${uris[$1]}" ttyconsole "ism-$1")
    pty=${pty%%$'\n'*}
    [ -c "$pty" ] || fail "ism-$1 has no console: $pty"
    exec {console}<>"$pty"
    consoles[$1]=$console
    : >"/run/test/$1.log"
    cat <&"$console" >"/run/test/$1.log" 2>/dev/null &
    # What a domain says before somebody opens its console is lost. A shell answers to an empty line.
    until_true 200 "echo >&$console; grep -aq '/ #' /run/test/$1.log"
}
# inside NAME COMMAND: types a command in a guest, and waits for its end: its output is in $said, its code
# in $code.
inside() {
    local log=/run/test/$1.log from end
    typed=$((typed + 1)) end="end-$typed-"
    from=$(($(stat -c %s "$log") + 1))
    printf '%s\necho "end-%s-$?"\n' "$2" $typed >&"${consoles[$1]}"
    until_true 100 "tail -c +$from $log | grep -aq '^${end}[0-9]'"
    said=$(tail -c "+$from" "$log" | tr -d '\r')
    code=$(sed -n "s/^$end\([0-9]*\).*/\1/p" <<<"$said")
}
# fine NAME COMMAND: the same with a command that has to succeed.
fine() {
    inside "$1" "$2"
    [ "$code" = 0 ] || fail "ism-$1: $2: exit code $code: $said"
}
# eventually NAME COMMAND: the same with a command that succeeds after some attempts.
eventually() {
    local _
    for _ in $(seq 60); do
        inside "$1" "$2"
        [ "$code" != 0 ] || return 0
        sleep 0.5
    done
    fail "ism-$1: $2: exit code $code: $said"
}
# listens NAME PORT: waits until a program in a guest listens.
listens() {
    eventually "$1" "netstat -lnt | grep -q ':$2 '"
}
# carries DEVICE PORT: bytes from b to a, from one device of this address to the other. A busy host may find
# the window slow, so it is asked for.
carries() {
    fine a "smc listen --device $1 --path window -v $2 </dev/null >/tmp/got-$2 2>/tmp/said-$2 &"
    listens a "$2"
    fine b "head -c 3000000 /dev/urandom >/tmp/sent"
    fine b "smc connect --device $1 --path window -v 10.0.0.1 $2 </tmp/sent"
    expect "smc connect" 'SMC-D'
    expect "smc connect" 'window'
    fine a 'wait'
    fine b 'sha256sum </tmp/sent'
    local sum
    sum=$(grep -oE '^[0-9a-f]{64}' <<<"$said")
    fine a "sha256sum </tmp/got-$2"
    expect "sha256sum" "^$sum"
}
# open_stream: bytes from b to a over a connection that outlives its device, until /tmp/go is there. A
# connection comes back to a device as long as neither direction has ended.
open_stream() {
    fine a 'rm -f /tmp/go; (until [ -e /tmp/go ]; do sleep 0.5; done) | smc listen --device pci --path window --outlive-device 5000 >/tmp/got 2>/tmp/errors &'
    listens a 5000
    fine b 'rm -f /tmp/go; (until [ -e /tmp/go ]; do head -c 20000 /dev/urandom; sleep 0.1; done) | tee /tmp/sent | smc connect --device pci --path window --outlive-device 10.0.0.1 5000 2>/tmp/errors &'
    eventually a 'test -s /tmp/got'
    carried_by b ' window'
}
# carried_by NAME PATTERN: waits until a domain's statistics say so of its connection.
carried_by() {
    eventually "$1" "smc stat connections | tee /tmp/stat; grep '$2' /tmp/stat"
}
# stream_goes_on: more bytes of it arrive.
stream_goes_on() {
    fine a 'stat -c %s /tmp/got >/tmp/before'
    eventually a 'test $(stat -c %s /tmp/got) -gt $(($(cat /tmp/before) + 100000))'
}
# end_stream: all of its bytes have arrived.
end_stream() {
    fine a 'touch /tmp/go'
    fine b 'touch /tmp/go; wait; sha256sum </tmp/sent'
    local sum
    sum=$(grep -oE '^[0-9a-f]{64}' <<<"$said")
    fine a 'wait; cat /tmp/errors; sha256sum </tmp/got'
    expect "sha256sum" "^$sum"
    fine a 'stat -c "%s bytes" /tmp/got'
    echo "$said" | sed 's/^/    /'
}
# open_connection: one that lasts until /tmp/go is there in b. still_open: sends its rest.
open_connection() {
    fine a 'rm -f /tmp/lines; smc listen --device pci 5000 </dev/null >/tmp/lines 2>/tmp/errors &'
    listens a 5000
    fine b 'rm -f /tmp/go; (echo first; until [ -e /tmp/go ]; do sleep 0.1; done; echo last) | smc connect --device pci 10.0.0.1 5000 &'
    eventually a 'grep -q first /tmp/lines'
}
end_connection() {
    fine b 'touch /tmp/go; wait'
    fine a 'wait; grep -x last /tmp/lines'
}
running() {
    local name state
    for name in "$@"; do
        state=$(virsh -c "${uris[${name#ism-}]}" domstate "$name")
        [ "${state%%$'\n'*}" = running ] || fail "$name: $state"
    done
}

# Domains that start and talk ------------------------------------------------------------------------

begin=$SECONDS
say() {
    printf '%4d s  %s\n' $((SECONDS - begin)) "$*"
}
virtlogd >>/run/test/virtlogd.log 2>&1 &
start_libvirtd
page 'libvirt files'
block "$page" 'libvirt domain' >/run/test/ism-a.xml
page 'libvirt network'
"${there[@]}" virtlogd >>/run/test/virtlogd.log 2>&1 &
"${there[@]}" libvirtd --timeout 0 >>/run/test/libvirtd-there.log 2>&1 &
page 'libvirt files' "${there[@]}"
page 'libvirt network' "${there[@]}"
ip link add cable type veth peer name cable netns "$other"
ip address add 10.9.0.1/24 dev ism-bridge
"${there[@]}" ip address add 10.9.0.2/24 dev ism-bridge
ip link set cable master ism-bridge up
"${there[@]}" ip link set cable master ism-bridge up
start_daemon "${there[@]}"
start_daemon
until_true 60 'virsh -c "$there_uri" list >/dev/null 2>&1'
until_true 60 '[ -S /run/ism/b-2.sock ]'
page 'libvirt start'
said=$("$QEMU" --version)
say "$(libvirtd --version), ${said%%$'\n'*}"
console a
console b
for pid in $(pgrep -x qemu-system-x86); do
    [ "$(stat -c %U "/proc/$pid")" = libvirt-qemu ] || fail "QEMU is the user $(stat -c %U "/proc/$pid")"
done
say "two domains run, QEMU as libvirt-qemu"
for name in a b; do
    fine $name 'smc devices'
    [ "$(grep -cE '^0000:00:1[01].0 .*free' <<<"$said")" = 2 ] || fail "smc devices: $said"
done
say "both see two devices"
# In the background it must not read what is typed.
fine a "$(block "$page" 'inside a') </dev/null >/tmp/said 2>&1 &"
listens a 5000
fine b "$(block "$page" 'inside b')"
echo "$said" | sed 's/^/    /'
expect "smc connect" 'SMC-D'
fine a 'wait; cat /tmp/said'
expect "smc listen" '^hello'
carries 0000:00:10.0 5001
carries 0000:00:11.0 5002
say "both devices carry bytes over SMC-D"

# What operators do ----------------------------------------------------------------------------------

open_connection
fine b 'smc stat connections | cat'
echo "$said" | sed 's/^/    /'
expect "smc stat" 'SMC-D'
virsh dump --memory-only ism-a /run/test/dumped >/dev/null
rm /run/test/dumped
virsh suspend ism-a >/dev/null
virsh resume ism-a >/dev/null
kill "$libvirtd"
wait "$libvirtd" || true
start_libvirtd
running ism-a ism-b
virsh destroy nobody 2>/dev/null && fail "libvirtd destroys a domain that is not there"
end_connection
say "a connection outlives these, a pause, and another start of libvirtd"

# Domains that move ----------------------------------------------------------------------------------

fine a 'rm -f /tmp/got*'
open_stream
# back_on_device: the stream of b is on SMC-D again, and goes on.
back_on_device() {
    running ism-a ism-b
    carried_by b 'device (a device is there again'
    stream_goes_on
}
# refused COMMAND PATTERN: virsh refuses a command, and the domain goes on.
refused() {
    # shellcheck disable=SC2086 # these are several words
    said=$(virsh $1 2>&1) && fail "virsh $1 succeeds"
    expect "virsh $1" "$2"
    running ism-a ism-b
}
# from_file WORD...: a command that reads a domain's memory from a file. libvirt 11.3 passes the file in a
# way that QEMU 11.1 does not take, unless it is read through a pipe.
from_file() {
    said=$(virsh "$@" 2>&1) && return
    expect "virsh $*" 'fd: migration to a file is not supported'
    echo "    virsh $1 needs --bypass-cache with this libvirt"
    virsh "$@" --bypass-cache >/dev/null
}
# stays: what a domain outlives where it is.
stays() {
    local aborted
    virsh "${migrate[@]}" --bandwidth 1 >/run/test/aborted.log 2>&1 &
    aborted=$!
    until_true 60 "virsh domjobinfo ism-b | grep -q '^Memory processed'"
    carried_by b ' TCP ('
    virsh domjobabort ism-b >/dev/null
    wait "$aborted" && fail "a migration that was aborted succeeds"
    said=$(cat /run/test/aborted.log)
    expect "virsh migrate" 'cancell?ed by client'
    back_on_device
    say "a migration is aborted, and the stream is on SMC-D again"
    refused "${migrate[*]} --postcopy" 'vhost-user backend not capable of postcopy'
    refused 'detach-device-alias ism-b ism-device0' 'no device found with alias'
    back_on_device
    say "post-copy is refused, and so is detach-device-alias"
    virsh snapshot-create-as ism-b snapshot --live --memspec /run/test/memory,snapshot=external >/dev/null
    back_on_device
    # A domain with snapshots is not migrated.
    virsh snapshot-delete ism-b snapshot --metadata >/dev/null
    virsh dump ism-b /run/test/dumped >/dev/null
    rm /run/test/dumped /run/test/memory
    back_on_device
    say "the stream outlives a snapshot with memory, and a dump"
}
# move_and_come_back: b is on the other host. Migrates it back, saves and restores it.
move_and_come_back() {
    local _
    uris[b]=$there_uri
    running ism-a ism-b
    console b
    carried_by b ' TCP ('
    stream_goes_on
    say "a stream goes on over TCP"
    virsh -c "$there_uri" migrate --live ism-b qemu:///system --migrateuri tcp://10.9.0.1 >/dev/null
    uris[b]=qemu:///system
    console b
    back_on_device
    carried_by a 'device (a device is there again'
    say "and over SMC-D when both are on one host again"
    # The stream takes one device and the other by turns: the one that it has left is saved, too.
    for _ in 1 2 3 4 5 6; do
        virsh save ism-b /run/test/saved >/dev/null
        from_file restore /run/test/saved
        console b
        back_on_device
    done
    virsh managedsave ism-b >/dev/null
    from_file start ism-b
    console b
    back_on_device
    say "save, restore, managedsave and start cost no byte"
}
# revert: b is again what it was at a snapshot, and its devices work.
revert() {
    virsh snapshot-create-as ism-b snapshot --live --memspec /run/test/memory,snapshot=external >/dev/null
    if said=$(virsh snapshot-revert ism-b snapshot --running 2>&1); then
        said="a domain that is reverted to a snapshot has its devices"
    else
        expect "virsh snapshot-revert" 'fd: migration to a file is not supported'
        timeout 150 virsh start ism-b >/dev/null || fail "virsh start"
        said="this libvirt does not revert a domain of this QEMU"
    fi
    say "$said"
    console b
    virsh snapshot-delete ism-b snapshot --metadata >/dev/null
    carries 0000:00:10.0 5009
    carries 0000:00:11.0 5010
}
migrate=(migrate --live ism-b "$there_uri" --migrateuri tcp://10.9.0.2)
moves=true
if said=$(virsh "${migrate[@]}" 2>&1); then
    move_and_come_back
    stays
else
    moves=false
    # A libvirt that is older than the QEMU.
    expect "virsh migrate" "Parameter 'detach' is unexpected"
    for attempt in 'save ism-b /run/test/saved' 'managedsave ism-b'; do
        refused "$attempt" "Parameter 'detach' is unexpected"
    done
    stream_goes_on
    echo "NOT TESTED: migration by libvirt, whose command has an argument that this QEMU does not know" >&2
fi
end_stream
carries 0000:00:11.0 5008
say "the stream has cost no byte"
[ $moves = false ] || revert

kill "$daemon"
wait "$daemon" || true
start_daemon
until_true 60 '[ -S /run/ism/b-2.sock ]'
running ism-a ism-b
for name in a b; do
    eventually $name 'test $(smc devices | grep -c "^0000:00:1.*free") = 2'
done
carries 0000:00:10.0 5003
carries 0000:00:11.0 5004
say "both devices work again after another start of vhost-device-ism"

open_connection
virsh destroy ism-b >/dev/null
fine a 'wait; cat /tmp/errors'
expect "smc listen after the end of its peer" 'reset'
timeout 150 virsh start ism-b >/dev/null || fail "virsh start"
console b
carries 0000:00:10.0 5005
carries 0000:00:11.0 5006
say "and after destroy and start of a domain"

virsh destroy ism-b >/dev/null
kill "$daemon"
wait "$daemon" || true
timeout 150 virsh start ism-b >/run/test/start.log 2>&1 &
starting=$!
until_true 60 "grep -q \"Unable to connect character device ism0\" /var/log/libvirt/qemu/ism-b.log"
kill -0 "$starting" || fail "virsh start without a daemon: $(cat /run/test/start.log)"
start_daemon
wait "$starting" || fail "virsh start: $(cat /run/test/start.log)"
console b
carries 0000:00:11.0 5007
say "a domain that starts before the daemon waits for it"

if grep -E 'WARN|ERROR' /run/test/daemon.log | grep -v 'running as root'; then
    fail "the daemon complains"
fi
virsh destroy ism-a >/dev/null
virsh destroy ism-b >/dev/null
[ "$(stat -c %U /var/lib/libvirt/ism/kernel)" = root ] || fail "the kernel still belongs to libvirt-qemu"
echo "libvirt: all done"
