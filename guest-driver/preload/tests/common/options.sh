# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# shellcheck shell=bash
# The command lines of programs.sh, suites.sh and outlive.sh, and the packages that they install.

install=false names=()
[ "${CI:-}" != true ] || install=true

# parse ARGUMENT...: puts the arguments that are no options into `names`. Calls `own_option` of the
# script with options that are not common to both; it fails if it does not know one.
parse() {
    while [ $# -gt 0 ]; do
        case $1 in
        --install-deps) install=true ;;
        -h | --help)
            sed -n '2,/^set/s/^# \{0,1\}//p' "$0"
            exit
            ;;
        -*)
            if ! own_option "$1"; then
                echo "$0: unknown option $1" >&2
                exit 2
            fi
            ;;
        *) names+=("$1") ;;
        esac
        shift
    done
}

# install_missing PACKAGE...: installs the packages that are missing.
install_missing() {
    local package missing=() wanted=()
    for package in "$@"; do
        dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null | grep -qx installed || missing+=("$package")
    done
    # Any flavour of these will do.
    has() { PATH="$PATH:/usr/sbin" command -v "$1" >/dev/null; }
    for package in "${missing[@]}"; do
        case $package in
        nginx-light) has nginx || wanted+=("$package") ;;
        nodejs) has node || wanted+=("$package") ;;
        golang-go) has go || wanted+=("$package") ;;
        default-jdk-headless) has javac || wanted+=("$package") ;;
        *) wanted+=("$package") ;;
        esac
    done
    [ ${#wanted[@]} -gt 0 ] || return 0
    echo "installing ${wanted[*]}"
    apt-get update -q
    # The run level keeps the packages from starting their services.
    DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 apt-get install -y -q --no-install-recommends "${wanted[@]}"
}
