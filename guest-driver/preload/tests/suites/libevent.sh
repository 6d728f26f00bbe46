# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# libevent: its `regress`, built from Debian's source package.

obtain() {
    source_of libevent
    unpacked libssl-dev libssl-dev
    [ ! -e "$cache/libevent/regress" ] || return 0
    needs gcc gcc
    needs make make
    cd "$cache/libevent/source"
    local ssl
    ssl=$(echo "$cache"/libssl-dev/usr/lib/*/libssl.a)
    ./configure --quiet --disable-shared --disable-samples --disable-dependency-tracking \
        CPPFLAGS="-I$cache/libssl-dev/usr/include -I$(echo "$cache"/libssl-dev/usr/include/*-linux-gnu)" \
        LDFLAGS="-L${ssl%/*}" OPENSSL_LIBS="$ssl ${ssl%/*}/libcrypto.a -ldl -lpthread" OPENSSL_INCS=" " \
        CFLAGS='-O1 -w'
    # `test/regress` alone does not make the headers that are generated.
    make -s include/event2/event-config.h
    make -s -j2 test/regress
    cp test/regress ..
}

run() {
    cd "$cache/libevent/source/test"
    local tests
    # Those of clocks depend on what else the machine does.
    mapfile -t tests < <("$cache/libevent/regress" --list-tests | grep -v monotonic | sed -n 's/^ *\([a-z0-9_]*\/[^ ]*\).*/\1/p')
    on "$1" bash "$here/each.sh" 2 60 "$cache/libevent/regress" -- "${tests[@]}"
}
