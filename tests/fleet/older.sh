#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# The programs and the library of the release before, for tests of two versions that meet: prints their
# directory. The file `older` beside this script names the commit. It is built once, in some minutes, and
# kept in ~/.cache; a clone without this commit fetches it. The exit status is 3 if it cannot: from a
# shallow clone without its origin, or where there is no clone.
set -euo pipefail
cd "$(dirname "$0")/../.."
commit=$(cat tests/fleet/older)
cache=${XDG_CACHE_HOME:-$HOME/.cache}/vhost-device-ism
# The programs need the C library of the machine that builds them.
place=$cache/older-${commit:0:12}-$(uname -m)-$(getconf GNU_LIBC_VERSION | tr ' ' -)
mkdir -p "$cache"
exec 9>"$cache/older.lock"
flock 9
if [ ! -e "$place" ]; then
    if ! git cat-file -e "$commit^{commit}" 2>/dev/null && ! git fetch -q --depth 1 origin "$commit"; then
        echo "the release before, $commit, is not in this clone, and cannot be fetched" >&2
        # A whole clone has it: then the file names a wrong commit.
        [ "$(git rev-parse --is-shallow-repository 2>/dev/null)" = false ] && exit 1
        exit 3
    fi
    source=$(mktemp -d)
    trap 'rm -rf "$source" "$place.new"' EXIT
    git archive "$commit" | tar -x -C "$source"
    (cd "$source" && CARGO_TARGET_DIR=$source/target cargo build -q \
        -p smc-cli -p smc-preload -p vhost-device-ism --lib --bins) 9>&- >&2
    mkdir -p "$place.new"
    for file in smc vhost-device-ism libsmc_preload.so; do
        strip --strip-debug -o "$place.new/$file" "$source/target/debug/$file"
    done
    mv "$place.new" "$place"
fi
echo "$place"
