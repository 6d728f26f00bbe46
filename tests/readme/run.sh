#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# Runs the commands of README.md as they stand there, from the root of the sources, in one shell.
#
# It works in a network, mount and process namespace of its own, as root or by a user namespace. It
# needs python3 and curl. What is missing fails where CI is true, and is said aloud elsewhere.
set -euo pipefail
cd "$(dirname "$0")/../.."

fail() {
    echo "FAILED: $*" >&2
    exit 1
}
missing() {
    echo "NOT TESTED: the commands of README.md: $*" >&2
    [ "${CI:-false}" = true ] && exit 1
    exit 0
}
if [ "${1:-}" != inside ]; then
    for tool in python3 curl; do
        command -v "$tool" >/dev/null && continue
        [ "${CI:-false}" = true ] || missing "there is no $tool"
        apt-get update -q
        DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=600 install -y -q \
            --no-install-recommends python3 curl
        break
    done
    namespaces=(unshare --net --mount --pid --fork --mount-proc)
    [ "$(id -u)" = 0 ] || namespaces+=(--map-root-user)
    "${namespaces[@]}" true 2>/dev/null || missing "there are no namespaces"
    [ ! -e copy ] || fail "there is a file \"copy\", which the commands would overwrite"
    directory=$(mktemp -d)
    status=0
    # Where they put the programs is what the page says.
    env --unset=CARGO_TARGET_DIR --unset=SMC_DEVICE XDG_RUNTIME_DIR="$directory" \
        "${namespaces[@]}" "$0" inside || status=$?
    rm -rf "$directory" copy
    exit "$status"
fi
ip link set lo up

# chapter TITLE: its commands, the lines of code before the first block of another language.
chapter() {
    sed -n "/^## $1\$/,/^## \|^\`\`\`/s/^    //p" README.md
}

echo "what takes minutes is a step of .ci/run"
mapfile -t commands < <(chapter 'Try it')
[ ${#commands[@]} = 2 ] || fail "\"Try it\" has ${#commands[@]} commands"
for command in "${commands[@]}"; do
    command=$(sed 's/  *#.*//' <<<"$command")
    grep -qF -- " $command" .ci/run || fail ".ci/run does not run: $command"
    echo "    $command"
done

# until CONDITION: waits until a command succeeds. A person takes some time between two lines.
until_true() {
    for _ in $(seq 200); do
        eval "$1" && return
        sleep 0.1
    done
    fail "this did not happen: $1"
}
listens() {
    grep -q ":$(printf %04X "$1") .* 0A " /proc/net/tcp /proc/net/tcp6 2>/dev/null
}

said=$XDG_RUNTIME_DIR/said
# What the output of a command has to fit, by a word of the command.
declare -A wanted=(
    ['smc connect']='SMC-D v2.1 over fabric'
    ['curl']='Directory listing'
    ['stat totals']='python3 [0-9]+ +[1-9][0-9]* +0 +0 '
)
mapfile -t commands < <(chapter 'Your own programs')
for command in "${commands[@]}"; do
    echo "\$ $command"
    case $command in
        # The server writes the file, and may end after the client.
        *'cmp copy'*) until_true 'cmp -s copy /bin/ls' ;;
    esac
    # Of lines that begin a process, that one goes on writing; it is ended with the namespace.
    eval "$command" >"$said" 2>&1 </dev/null || fail "$command: $(cat "$said")"
    case $command in
        'smc fabric'*) until_true '[ -S "$XDG_RUNTIME_DIR/smc/management.sock" ]' ;;
        'smc listen'*) until_true 'listens 5000' ;;
        *'http.server'*) until_true 'listens 8000' ;;
    esac
    for word in "${!wanted[@]}"; do
        case $command in
            *"$word"*)
                grep -qE -- "${wanted[$word]}" "$said" || fail "$command: $(cat "$said")"
                unset "wanted[$word]"
                ;;
        esac
    done
done
[ ${#commands[@]} -ge 9 ] || fail "\"Your own programs\" has only ${#commands[@]} commands"
[ ${#wanted[@]} = 0 ] || fail "no command for: ${!wanted[*]}"
echo "the commands of README.md: all done"
