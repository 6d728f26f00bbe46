# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# The tests of the Rust standard library for TCP, built as a program of their own.

obtain() {
    source_of rustc '*/library/std/src/net/*'
    [ -e "$cache/rustc/net-tests" ] && return
    cd "$cache/rustc"
    mkdir -p tests
    cp source/library/std/src/net/test.rs tests/
    cp source/library/std/src/net/tcp/tests.rs tests/tcp.rs
    sed -i 's/crate::net::test::/super::test::/; s/\bcrate::/std::/' tests/*.rs
    echo '#![feature(tcp_linger, io_error_uncategorized, can_vector, read_buf, core_io_borrowed_buf)]
        mod test; mod tcp;' >tests/main.rs
    # The standard library may use what is not stable.
    RUSTC_BOOTSTRAP=1 rustc --edition 2021 --test -A warnings -o net-tests tests/main.rs
}

run() {
    cd "$cache/rustc"
    on "$1" ./net-tests --test-threads=1 | "$here/libtest.sh"
}
