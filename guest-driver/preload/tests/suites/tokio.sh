# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# tokio: the tests of its package on crates.io that use TCP.

obtain() {
    [ ! -e "$cache/tokio/complete" ] || return 0
    rm -rf "$cache/tokio"
    mkdir -p "$cache/tokio/wish/src"
    cd "$cache/tokio/wish"
    printf '[package]\nname = "wish"\nversion = "0.0.0"\nedition = "2021"\n[dependencies]\ntokio = "1"\n[workspace]\n' >Cargo.toml
    touch src/lib.rs
    cargo vendor -q ../vendor >/dev/null
    cp -r ../vendor/tokio ../source
    cd ../source
    # Without the list of checksums, cargo takes it for any package.
    rm -f .cargo-checksum.json
    CARGO_TARGET_DIR=$cache/tokio/target cargo test -q --features full --no-run $(tests)
    touch ../complete
}

tests() {
    cd "$cache/tokio/source/tests"
    local file
    for file in tcp_*.rs io_driver*.rs io_async_fd.rs io_split.rs net_*.rs rt_common.rs unix_shutdown.rs buffered.rs; do
        [ ! -e "$file" ] || echo "--test ${file%.rs}"
    done
}

run() {
    cd "$cache/tokio/source"
    CARGO_TARGET_DIR=$cache/tokio/target on "$1" \
        cargo test --features full --no-fail-fast $(tests) -- --test-threads=1 2>&1 | "$here/libtest.sh"
}
