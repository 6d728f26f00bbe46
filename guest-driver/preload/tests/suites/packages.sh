# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# Packages of the distribution and of crates.io, in the cache. For suites.sh.

# apt with lists of its own that have source packages, too. Nothing of the system changes.
apt_in_cache() {
    local tool=$1
    shift
    APT_CONFIG=$cache/apt/apt.conf "$tool" "$@"
}

update_lists() {
    if ! command -v apt-get >/dev/null; then
        echo "missing: apt-get, which downloads packages of Debian"
        return 1
    fi
    # Once per run.
    [ ! -e "$scratch/lists-are-new" ] || return 0
    mkdir -p "$cache/apt/lists/partial" "$cache/apt/archives/partial" "$cache/apt/sources"
    local file
    for file in /etc/apt/sources.list.d/*.sources; do
        [ ! -e "$file" ] || sed 's/^Types:.*/Types: deb deb-src/' "$file" >"$cache/apt/sources/${file##*/}"
    done
    for file in /etc/apt/sources.list /etc/apt/sources.list.d/*.list; do
        [ ! -e "$file" ] || sed -n 's/^deb /deb /p; s/^deb /deb-src /p' "$file" >"$cache/apt/sources/${file##*/}"
    done
    cat >"$cache/apt/apt.conf" <<END
Dir::Etc::sourcelist "/dev/null";
Dir::Etc::sourceparts "$cache/apt/sources";
Dir::State::lists "$cache/apt/lists";
Dir::Cache "$cache/apt";
APT::Sandbox::User "";
END
    apt_in_cache apt-get update -q
    touch "$scratch/lists-are-new"
}

# once FILE COMMAND...: calls a command in the directory of FILE, which is new but for the directory
# `download`, unless FILE is there. The command makes FILE at last.
once() {
    local dir=${1%/*}
    [ ! -e "$1" ] || return 0
    update_lists
    rm -rf "${dir:?}"
    mkdir -p "$dir/download"
    (cd "$dir" && "${@:2}")
}

# unpacked NAME PACKAGE...: unpacks binary packages into $cache/NAME, once.
unpacked() {
    once "$cache/$1/complete" unpack_binaries "${@:2}"
}

unpack_binaries() {
    local deb
    (cd download && apt_in_cache apt-get download -q "$@")
    for deb in download/*.deb; do
        dpkg-deb -x "$deb" .
    done
    touch complete
}

# source_of PACKAGE [PATTERN...]: unpacks the source of a package, or the files that match, into
# $cache/PACKAGE/source, once.
source_of() {
    once "$cache/$1/source" unpack_source "$@"
}

unpack_source() {
    local tar
    (cd download && apt_in_cache apt-get source -q --download-only --tar-only "$1")
    mkdir new
    for tar in download/*.orig.tar.*; do
        [[ $tar != *.asc ]] || continue
        tar -xf "$tar" -C new --strip-components=1 --wildcards "${@:2}"
    done
    mv new source
}

# needs COMMAND PACKAGE: a command that has to be there, and the package that has it.
needs() {
    command -v "$1" >/dev/null && return
    if $install; then
        DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "$2" >&2 && return
    fi
    echo "missing: $1 (package $2)"
    return 1
}
