# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# A container's life; sourced by engines.sh, in the host of its own.

# totals ENGINE NAME COLUMN: connections that the web server of a container has had: 1 SMC-D, 3 TCP.
totals() {
    "$1" exec "$2" smc stat totals 2>/dev/null |
        sed -nE 's/^[^n]*nginx [0-9]+ +([0-9]+) +([0-9]+) +([0-9]+) .*/\'"$3"'/p' |
        awk '{ sum += $1 } END { print sum + 0 }'
}
# more ENGINE NAME: waits for another connection by SMC-D.
more() {
    local before
    before=$(totals "$1" "$2" 1) || before=0
    grown() { [ "$(totals "$1" "$2" 1)" -gt "$before" ]; }
    wait_for grown "$1" "$2"
}
# remains: what containers could leave: devices of the pool, files, mounts, processes.
remains() {
    (
        smc stat fabric --management /run/vhost-device-ism/management.sock |
            grep -o '[0-9]* of 64 devices in use'
        find /run /dev/shm -path /run/docker -prune -o -path /run/containerd -prune -o \
            -path /run/libpod -prune -o -path /run/containers -prune -o -path /run/runc -prune -o \
            -path /run/crun -prune -o -print
        cut -d' ' -f5 /proc/self/mountinfo
        ps -e -o comm= | grep -E 'nginx|redis|curl|shim|conmon|runc|crun' || true
    ) | sort
}
# life ENGINE OPTIONS...: exec, kill, out of memory. OPTIONS of "run" are those of a device.
life() {
    local engine=$1 ids id round
    shift
    echo "a container's life with $engine $(printf '%.40s' "$*"): start, exec, kill, out of memory"
    "$engine" run --rm debian true
    remains >before
    # With names: podman gives a container that it starts again another address.
    "$engine" network create life >/dev/null
    set -- --network life "$@"
    "$engine" run -d --name web "$@" debian nginx -g 'daemon off;' >/dev/null
    "$engine" run -d --name client "$@" debian sh -c "
        while :; do curl -sS -o /dev/null http://web/ || echo failed; sleep 0.1; done" >/dev/null
    more "$engine" web
    for round in 1 2 3; do
        "$engine" kill --signal KILL client >/dev/null
        wait_for "$engine" start client
        more "$engine" web
    done
    said=$("$engine" logs client 2>/dev/null | grep -c failed || true)
    [ "$said" = 0 ] || fail "$said rounds of a client have failed, which was killed and started"
    "$engine" kill --signal KILL web >/dev/null
    wait_for "$engine" start web
    more "$engine" web
    said=$("$engine" exec client sh -c 'smc stat; kill -KILL $(pidof curl) 2>/dev/null; echo on')
    expect "exec client" '^on$'

    # Half of the requests are answered, and then the server is killed under its client.
    "$engine" run -d --name greedy --memory 48m --memory-swap 48m "$@" debian \
        redis-server --protected-mode no --save '' >/dev/null
    "$engine" run --rm "$@" debian timeout 120 \
        redis-benchmark -h greedy -t set -d 100000 -r 100000 -n 20000 -q >/dev/null 2>&1 &&
        fail "a server without memory has served its client"
    killed() {
        [ "$("$engine" inspect --format '{{.State.Status}} {{.State.ExitCode}}' greedy)" = 'exited 137' ]
    }
    wait_for killed
    said=$("$engine" inspect --format '{{.State.OOMKilled}} {{.State.ExitCode}}' greedy)
    echo "    out of memory: $said"
    more "$engine" web

    ids=$("$engine" ps --all --quiet --no-trunc)
    "$engine" rm --force $ids >/dev/null
    "$engine" network rm life >/dev/null
    nothing() {
        remains >after
        comm -13 before after >difference
        [ ! -s difference ]
    }
    wait_for nothing
    for id in $ids; do
        said=$(find /sys/fs/cgroup -type d -path "*$id*" 2>/dev/null || true)
        [ -z "$said" ] || fail "cgroups are left: $said"
    done
    echo "    ok: nothing is left"
}
