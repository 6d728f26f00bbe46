#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# The drop-in of docs/start.md and the unit of docs/rollout.md as they stand there, under systemd as
# the first process of a Debian 12 and a Debian 13, for services with the distribution's own units. Then
# the daemon's package is exchanged for an older and a newer one, and the daemon restarts, hangs and dies
# again and again, under twenty programs with open connections.
#
#     services.sh [SUITE...]      bookworm and trixie, if none is named
#
# It takes the packages that `cargo xtask package` has made, or makes them; SMC_PACKAGES names a
# directory with others, and SMC_OLDER_PACKAGES one with older packages. Without the latter, the same
# packages have a lower version. It works in a root directory, namespaces and a cgroup of its own. It needs
# root, mmdebstrap and cgroups of version 2; a missing one fails where CI is true, and is said aloud
# elsewhere. The root directories are made once and kept in ~/.cache.
set -euo pipefail

# On the machine that tests ---------------------------------------------------------------------------

if [ "${1:-}" != boot ] && [ "${1:-}" != inside ]; then
    cd "$(dirname "$0")/../.."
    . tests/containers/common.sh
    need mmdebstrap:mmdebstrap
    grep -qw cgroup2 /proc/filesystems || missing "there are no cgroups of version 2"
    packages=${SMC_PACKAGES:-${CARGO_TARGET_DIR:-target}/package}
    [ -n "$(ls "$packages"/smc_*.deb 2>/dev/null)" ] || cargo xtask package
    place='' cgroup=smc-services-$$
    # The processes have ended with the first one of their namespace. Their cgroups are left.
    end() {
        [ -d "$place" ] || return 0
        unshare --mount sh -ec 'mount -t cgroup2 cgroup2 "$1"
            [ ! -d "$1/$2" ] || find "$1/$2" -depth -type d -exec rmdir {} +' sh "$place/mnt" "$cgroup"
        rm -rf --one-file-system "$place"
    }
    trap end EXIT
    [ $# -gt 0 ] || set -- bookworm trixie
    for suite in "$@"; do
        image=$(image services "$suite" apt \
            systemd,redis-server,redis-tools,memcached,nginx-light,prometheus-node-exporter,curl,iproute2,mount,bsdutils,passwd)
        place=$(mktemp -d)
        tar -C "$place" -xf "$image"
        mkdir "$place/srv/older"
        if [ -n "${SMC_OLDER_PACKAGES:-}" ]; then
            cp "$SMC_OLDER_PACKAGES"/{vhost-device-ism,smc}_*.deb "$place/srv/older"
        else
            for package in vhost-device-ism smc; do
                dpkg-deb -R "$packages/$package"_*.deb "$place/tmp/older"
                sed -i 's/^Version: .*/Version: 0.1.0~older/' "$place/tmp/older/DEBIAN/control"
                dpkg-deb -Zgzip -z1 -b "$place/tmp/older" "$place/srv/older" >/dev/null
                rm -r "$place/tmp/older"
            done
        fi
        cp "$packages"/{vhost-device-ism,smc}_*.deb tests/containers/common.sh \
            tests/packages/services.sh docs/{start,rollout}.md "$place/srv"
        status=0
        enter "$place" ./services.sh boot "$cgroup" || status=$?
        cat "$place/srv/log" || fail "systemd of $suite does not start"
        [ "$status" = 0 ] || fail "services on $suite"
        end
    done
    echo "services under systemd: all done"
    exit
fi

. ./common.sh

# The first process becomes systemd -------------------------------------------------------------------

if [ "$1" = boot ]; then
    cat >/etc/systemd/system/services.service <<END
[Unit]
Wants=multi-user.target
After=multi-user.target
SuccessAction=exit-force
FailureAction=exit-force
[Service]
Type=oneshot
WorkingDirectory=/srv
Environment=HOME=/root DEBIAN_FRONTEND=noninteractive SYSTEMD_EDITOR=/srv/editor
ExecStart=/srv/services.sh inside
StandardOutput=file:/srv/log
StandardError=file:/srv/log
END
    mount -t cgroup2 cgroup2 /mnt
    mkdir "/mnt/$2"
    echo $$ >"/mnt/$2/cgroup.procs"
    umount /mnt
    # Services can change nothing of the machine: /sys and /proc/sys are read-only, and /dev has only the
    # devices of any container.
    exec unshare --cgroup --uts --ipc bash -ec '
        mkdir /tmp/dev
        mount -t tmpfs -o mode=755 tmpfs /tmp/dev
        for name in null zero full random urandom tty; do cp -a "/dev/$name" /tmp/dev; done
        for link in fd:fd stdin:fd/0 stdout:fd/1 stderr:fd/2; do
            ln -s "/proc/self/${link#*:}" "/tmp/dev/${link%:*}"
        done
        ln -s pts/ptmx /tmp/dev/ptmx
        mkdir /tmp/dev/pts /tmp/dev/shm
        umount --recursive --lazy /dev /sys
        mount --move /tmp/dev /dev
        mount -t devpts -o newinstance,ptmxmode=666 devpts /dev/pts
        mount -t tmpfs -o mode=1777 tmpfs /dev/shm
        mount -o remount,mode=755 /run
        mount -t sysfs -o ro sysfs /sys
        mount -t cgroup2 cgroup2 /sys/fs/cgroup
        mount --bind /proc/sys /proc/sys
        mount -o remount,bind,ro /proc/sys
        exec env -i container=other PATH="$PATH" /lib/systemd/systemd --unit=services.service \
            </dev/null >/dev/null 2>&1'
fi

# In a host of its own --------------------------------------------------------------------------------

systemctl --version | sed -n 1p
apt-get install -y ./vhost-device-ism_*.deb ./smc_*.deb >/tmp/apt.log 2>&1 || fail "$(cat /tmp/apt.log)"
wait_for systemctl is-active vhost-device-ism

# indented PAGE TEXT: the first indented block of a page behind the line with this text.
indented() {
    local found
    found=$(awk -v text="$2" '
        index($0, text) { marked = 1; next }
        marked && /^    / { inside = 1; print substr($0, 5); next }
        inside && !/^$/ { exit }
        inside' "$1")
    [ -n "$found" ] || fail "$1 has no block behind: $2"
    echo "$found"
}
# journal UNIT: lines since the last start of a unit.
# in_journal UNIT PATTERN, in_metrics PATTERN: whether a line fits.
journal() {
    journalctl --no-pager --output cat "_SYSTEMD_INVOCATION_ID=$(systemctl show -P InvocationID "$1")"
}
in_journal() { grep -qE -- "$2" <<<"$(journal "$1")"; }
in_metrics() { grep -qE -- "$1" <<<"$(smc stat metrics --all)"; }

# clients SERVICE CLIENT ANSWER CARRIER: a client without SMC and one under smc run have the answer, and
# the connection of the latter has this carrier.
clients() {
    local service=$1 client=$2 answer=$3 carrier=$4
    wait_for bash -c "$client"
    said=$(bash -c "$client" 2>&1) || fail "$service: $client: $said $(journal "$service")"
    grep -qE -- "$answer" <<<"$said" || fail "$service: $client: $said"
    rm -rf /tmp/status
    said=$(smc run --status /tmp/status bash -c "$client" 2>&1) || fail "$service: smc run: $client: $said"
    grep -qE -- "$answer" <<<"$said" || fail "$service: smc run: $client: $said"
    said=$(sed -n 's/.*"info":"\([^"]*\)".*/\1/p' /tmp/status/* | tail -n 1)
    grep -q -- "$carrier" <<<"$said" ||
        fail "$service is not on $carrier: $said $(journal "$service") $(smc stat metrics --all)"
    systemctl is-active --quiet "$service" || fail "$(systemctl status --no-pager "$service")"
    echo "    $service: ${said%% over *}"
}

plain='TCP (the peer speaks plain TCP)'

# The distribution's services -------------------------------------------------------------------------

declare -A client=(
    [redis-server]='redis-cli ping'
    [memcached]='exec 3<>/dev/tcp/127.0.0.1/11211; printf "version\r\nquit\r\n" >&3; cat <&3'
    [nginx]='curl -sS http://127.0.0.1/'
    [prometheus-node-exporter]='curl -sS http://127.0.0.1:9100/metrics'
)
declare -A answer=([redis-server]=PONG [memcached]='^VERSION' [nginx]='Welcome to nginx'
    [prometheus-node-exporter]='^node_uname_info')

echo "on SMC by the drop-in of docs/start.md, and the commands for users of workers"
mapfile -t usermods < <(grep -oE '`usermod -[aGg]+ kvm (www-data|memcache)`' start.md | tr -d '`')
[ ${#usermods[@]} = 2 ] || fail "the page has other commands: ${usermods[*]}"
for command in "${usermods[@]}"; do
    $command || fail "$command"
done

# systemctl edit gives the file to an editor, and only on a terminal.
indented start.md 'Write this with `systemctl edit' >drop-in
printf '#!/bin/sh\nfor file; do :; done\nexec cp /srv/drop-in "$file"\n' >editor
chmod +x editor
for service in redis-server memcached nginx prometheus-node-exporter; do
    said=$(script -qec "systemctl edit $service" /dev/null) || fail "systemctl edit $service: $said"
    systemctl restart "$service" || fail "$(journal "$service")"
    if [ "$service" != prometheus-node-exporter ]; then
        clients "$service" "${client[$service]}" "${answer[$service]}" SMC-D
        wait_for in_metrics "^smc_handshakes_total.*service=\"$service.service\",kind=\"SMC-D\"} 1$"
        ! in_journal "$service" 'stays on TCP|cannot be preloaded' || fail "$(journal "$service")"
    else
        clients "$service" "${client[$service]}" "${answer[$service]}" "$plain"
        # A program in Go calls the kernel around libc, although the library is in the process.
        grep -q libsmc_preload.so "/proc/$(systemctl show -P MainPID "$service")/maps" ||
            fail "$service: no library"
    fi
done

echo "the unit of docs/rollout.md gives metrics to the exporter"
indented rollout.md 'timer that writes the metrics' >/etc/systemd/system/smc-metrics.service
systemctl daemon-reload
systemctl start smc-metrics || fail "$(journal smc-metrics)"
wait_for bash -c 'curl -sS http://127.0.0.1:9100/metrics |
    grep "^smc_handshakes_total.*service=\"redis-server.service\""'

echo "without the drop-in they are on TCP"
for service in redis-server memcached nginx prometheus-node-exporter; do
    systemctl revert "$service" 2>/dev/null
    systemctl restart "$service"
    clients "$service" "${client[$service]}" "${answer[$service]}" "$plain"
done

# Options of units ------------------------------------------------------------------------------------

# with_options CARRIER OPTION...: a service with the drop-in and these options of its unit.
with_options() {
    local carrier=$1 options=() line
    shift
    systemctl stop options 2>/dev/null || true
    systemctl reset-failed options 2>/dev/null || true
    for line in "$@"; do options+=(-p "$line"); done
    while IFS= read -r line; do
        case $line in *=*) options+=(-p "$line") ;; esac
    done <drop-in
    systemd-run --quiet --unit=options -p User=redis "${options[@]}" \
        /usr/bin/redis-server --port 6390 --save '' || fail "$*"
    echo "$*"
    clients options 'redis-cli -p 6390 ping' PONG "$carrier"
}
none='TCP (declined by the peer: 0x03030003 NOISM2SUPP'
short='TCP (declined by the peer: 0x0a070000 NODESCR'

mapfile -t harmless < <(awk 'BEGIN { RS = "" } /change nothing\.$/' start.md |
    grep -oE '`[A-Za-z]+=' | tr -d '`')
[ ${#harmless[@]} -ge 10 ] || fail "the page has no list of options that change nothing"
with_options SMC-D "${harmless[@]/%/yes}"
with_options SMC-D SystemCallFilter=@system-service 'SystemCallFilter=~@privileged @resources'
with_options SMC-D LimitNOFILE=256
with_options "$short" LimitNOFILE=255
wait_for in_journal options 'stays on TCP: too few descriptors are left'
wait_for in_metrics 'service="options.service",reason="NODESCR",side="here"'
with_options "$none" 'RestrictAddressFamilies=AF_INET AF_INET6'
wait_for in_journal options 'stays on TCP: .*Address family not supported'
with_options "$none" InaccessiblePaths=/run/vhost-device-ism
wait_for in_journal options 'stays on TCP: .*/run/vhost-device-ism/any \(Permission denied'
with_options "$none" TemporaryFileSystem=/run
wait_for in_journal options 'stays on TCP: no device is in .*/run/vhost-device-ism/any,'
with_options "$plain" 'SystemCallFilter=~clone wait4' SystemCallErrorNumber=EPERM
with_options "$plain" SystemCallFilter=@system-service SystemCallFilter=~memfd_create
wait_for in_journal options 'stays on TCP: a filter of system calls \(seccomp\) forbids memfd_create'
wait_for in_metrics 'service="options.service",reason="FILTER",side="here"'
with_options "$plain" NoExecPaths=/usr/lib/smc
wait_for in_journal options 'ld.so: .*libsmc_preload.so.* cannot be preloaded'

# The daemon ends and changes -------------------------------------------------------------------------

echo "open connections of twenty programs while the daemon ends and changes"
systemctl stop options
dd if=/dev/urandom of=/var/www/html/large bs=1M count=${SMC_LARGE:-100} status=none
mkfifo /tmp/pause
for service in redis-server memcached nginx; do
    script -qec "systemctl edit $service" /dev/null >/dev/null
    systemctl restart "$service"
done
mkdir /tmp/programs
cd /tmp/programs
programs=()
# A redis-cli that reads commands from a pipe keeps its connection, and an error is in its answers.
for i in {1..14}; do
    while [ ! -e /tmp/stop ]; do
        echo 'incr counter'
        sleep 0.05
    done | tee "redis.$i.asked" | smc run redis-cli >"redis.$i" 2>&1 &
    programs+=($!)
done
for i in {1..2}; do
    smc run bash -euc 'exec 3<>/dev/tcp/127.0.0.1/11211 4<>/tmp/pause
        printf "set $0 0 0 1\r\n0\r\n" >&3
        for ((n = 0; ; n++)); do
            read -r -u 3 answer
            echo "$n $answer"
            [ ! -e /tmp/stop ] || exit 0
            read -r -t 0.05 -u 4 || true
            printf "incr $0 1\r\n" >&3
        done' "memcached.$i" >"memcached.$i" &
    programs+=($!)
done
for i in {1..4}; do
    smc run curl -sS --limit-rate 2M http://127.0.0.1/large -o "nginx.$i" 2>"nginx.$i.errors" &
    programs+=($!)
done

# on_smc CONNECTIONS: both ends of so many connections are on SMC.
on_smc() {
    local ends
    ends=$(smc stat connections --all | grep -v ' on TCP' | grep -c 'SMC-D v2.1 .* Active ')
    [ "$ends" -ge $((2 * $1)) ]
}
# through WHAT COMMAND...: the connections are on SMC before and after.
through() {
    echo "    $1"
    shift
    "$@"
    wait_for systemctl is-active vhost-device-ism
    wait_for on_smc 16
}
restarts() { for i in {1..5}; do systemctl restart vhost-device-ism; done; }
# installed FILE...: installs packages, and restarts the daemon by hand as docs/operating.md says.
installed() {
    apt-get install -y --allow-downgrades "$@" >/tmp/apt.log 2>&1 || fail "$(cat /tmp/apt.log)"
    systemctl restart vhost-device-ism
}
dies_often() {
    local end=$((SECONDS + ${SMC_LOOP:-10}))
    while [ $SECONDS -lt $end ]; do
        systemctl kill -s KILL vhost-device-ism 2>/dev/null || true
        sleep 0.2
    done
}
# A daemon that hangs is ended by the watchdog of the unit, which waits for 30 s without the drop-in.
hangs() {
    local first
    first=$(systemctl show -P MainPID vhost-device-ism)
    kill -STOP "$first"
    wait_for test ! -d "/proc/$first"
}
wait_for on_smc 20
through "an older package" installed /srv/older/*.deb
[ "$(dpkg-query -f '${Version}' -W smc)" = "$(dpkg-deb -f /srv/older/smc_*.deb Version)" ] || fail "no older package"
through "the newer package again" installed /srv/*.deb
through "five restarts" restarts
through "a kill every 200 ms" dies_often
through "a daemon that hangs" hangs
touch /tmp/stop
for program in "${programs[@]}"; do
    wait "$program" || fail "a program: $(tail -n 3 /tmp/programs/*)"
done
for i in {1..14}; do
    [ "$(wc -l <"redis.$i")" = "$(wc -l <"redis.$i.asked")" ] || fail "redis-cli $i: $(tail -n 3 "redis.$i")"
    ! grep -vE '^[0-9]+$' "redis.$i" || fail "redis-cli $i"
done
asked=$(cat redis.*.asked | wc -l)
[ "$(redis-cli get counter)" = "$asked" ] || fail "$(redis-cli get counter) of $asked"
for i in {1..2}; do
    ! tr -d '\r' <"memcached.$i" | grep -vE '^0 STORED$|^([0-9]+) \1$' || fail "memcached"
done
for i in {1..4}; do
    cmp /var/www/html/large "nginx.$i" || fail "$(cat "nginx.$i.errors")"
done
echo "    $asked answers of redis, $(cat memcached.? | wc -l) of memcached, 4 files of nginx"
