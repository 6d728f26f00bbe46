# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# shellcheck shell=bash
# The command lines of programs.sh and suites.sh.

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
