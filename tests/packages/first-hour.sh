#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# The commands of docs/start.md as they stand there, in a Debian 12 and a Debian 13 without
# anything else than the distribution's packages that the first command names.
#
#     first-hour.sh [SUITE...]      bookworm and trixie, if none is named
#
# It takes the packages that `cargo xtask package` has made, or makes them; SMC_PACKAGES names a
# directory with others. It works in a root directory and namespaces of its own. It needs root and
# mmdebstrap; a missing one fails where CI is true, and is said aloud elsewhere. The root directories
# are made once and kept in ~/.cache.
set -euo pipefail

if [ "${1:-}" != inside ]; then
    cd "$(dirname "$0")/../.."
    . tests/containers/common.sh
    need mmdebstrap:mmdebstrap
    packages=${SMC_PACKAGES:-${CARGO_TARGET_DIR:-target}/package}
    [ -n "$(ls "$packages"/smc_*.deb 2>/dev/null)" ] || cargo xtask package
    [ $# -gt 0 ] || set -- bookworm trixie
    for suite in "$@"; do
        image=$(image first-hour "$suite" apt \
            redis-server,redis-tools,tshark,iproute2,mount,passwd,systemd-standalone-sysusers,systemd-standalone-tmpfiles)
        place=$(mktemp -d)
        tar -C "$place" -xf "$image"
        cp "$packages"/*.deb tests/containers/common.sh tests/packages/first-hour.sh docs/start.md \
            "$place/srv"
        status=0
        echo "on $suite"
        enter "$place" ./first-hour.sh inside || status=$?
        rm -rf --one-file-system "$place"
        [ "$status" = 0 ] || exit "$status"
    done
    echo "the first hour: all done"
    exit
fi

. ./common.sh
echo '127.0.0.1 localhost' >/etc/hosts
export DEBIAN_FRONTEND=noninteractive
before=$(find /etc /usr /var/lib /run -xdev ! -path '/var/lib/dpkg/*' ! -path '/var/lib/apt/*' | sort)

# What a person has beside the commands: systemd, and the time between two lines.
one() {
    case $1 in
        *'&')
            bash -c "$1" >/tmp/background.log 2>&1
            wait_for grep -qE ":18F6 .* 01 " /proc/net/tcp
            sleep 1
            ;;
        apt-get\ install*)
            eval "$1" || return
            vhost-device-ism --config /etc/vhost-device-ism.toml >/tmp/daemon.log 2>&1 &
            echo $! >/tmp/daemon.pid
            wait_for test -S /run/vhost-device-ism/any/any.sock
            ;;
        apt-get\ purge*)
            # As systemd would.
            kill "$(cat /tmp/daemon.pid)"
            wait_for test ! -e /run/vhost-device-ism/management.sock
            eval "$1"
            ;;
        *redis-server*)
            eval "$1"
            wait_for redis-cli -p 6390 ping
            ;;
        *) eval "$1" ;;
    esac
}
runner=(one)
[ "$(block start.md first-hour | wc -l)" -le 8 ] || fail "the page has more than eight commands"
say_block start.md first-hour 'stat connections' 'SMC-D.*6390|redis-server.*SMC-D|SMC-D v2' \
    'tshark -r' 'colour|blue'
left=$(comm -13 <(echo "$before") <(find /etc /usr /var/lib /run -xdev ! -path '/var/lib/dpkg/*' \
    ! -path '/var/lib/apt/*' | sort) | grep -vE '/(passwd|group|shadow|gshadow|subuid|subgid)-?$|cache|/redis' || true)
[ -z "$left" ] || fail "after the last command there are: $left"
echo "    nothing is left"
