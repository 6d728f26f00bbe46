// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Static programs in C, and programs linked with musl: the kernel refuses their system calls for the
//! library. The other ends are such programs, programs of libc, and programs in Go.

use std::process::Command;

use smc_test_support::TestDir;

use crate::bed::{Net, Place, Program, are_installed};
use crate::case::{Carried, times};
use crate::languages::{compile, echoes_checked};
use crate::script::{Script, code};

/// Each byte is checked, by threads that block.
#[test]
#[ignore = "tests/programs.sh installs the programs and runs it"]
fn of_c() {
    if !are_installed("static programs in C", &["cc", "musl-gcc", "python3"]) {
        return;
    }
    let net = Net::new();
    let dir = TestDir::for_programs();
    let [of_glibc, of_musl, by_musl] =
        [("cc", "-static"), ("musl-gcc", "-static"), ("musl-gcc", "-pie")].map(|(cc, option)| {
            let program = dir.path(format!("{cc}{option}"));
            compile(
                Command::new(cc)
                    .args([option, "-O1", "-pthread", "-o"])
                    .arg(&program)
                    .arg(code("checked.c")),
            );
            program.display().to_string()
        });
    let python = format!("python3 {}", code("checked.py"));
    for (name, server, client) in [
        ("C, static, of glibc", &of_glibc, &of_glibc),
        ("C, static, of musl", &of_musl, &of_musl),
        ("C, linked with musl", &by_musl, &by_musl),
        ("C, static, client in Python", &of_glibc, &python),
        ("C, static, server in Python", &python, &of_musl),
    ] {
        echoes_checked(name, server, client, times(3000, 100_000), &net);
    }
}

/// Sends a file, ends its direction, and reads the hash of the arrived bytes.
const HASHES: &str = r#"
hash=$(sha256sum <$D/sent)
for n in $(seq $N); do
    got=$(busybox nc $A $P <$D/sent)
    [ "$got" = "$hash" ] || fail "hash $n is $got"
done
rate $N
"#;

const FETCHES: &str = r#"
for n in $(seq $N); do
    busybox wget -q -O $D/got http://$A:$P/sent
    cmp $D/sent $D/got
done
rate $N
"#;

/// Debian's busybox-static, as client of programs of libc, and as server.
#[test]
#[ignore = "tests/programs.sh installs the programs and runs it"]
fn busybox() {
    let net = Net::new();
    let sender = |place: &Place| {
        place.data("sent", 3_000_000);
        place.script("server", "exec busybox nc -l -p $P <$D/sent\n")
    };
    let hashes = |place: &Place| {
        let Place { address, port, .. } = place;
        place.data("sent", 3_000_000);
        Program::new(format!("socat TCP-LISTEN:{port},bind={address},fork,reuseaddr"))
            .and(&["EXEC:sha256sum"])
    };
    let python = |place: &Place| {
        let Place { address, port, .. } = place;
        place.data("sent", 3_000_000);
        Program::new(format!("python3 -m http.server {port} --bind {address}"))
    };
    // A child for each connection, and the child has the connection as its standard input.
    let httpd = |place: &Place| {
        let Place { address, port, dir } = place;
        place.data("sent", 3_000_000);
        Program::new(format!("busybox httpd -f -p {address}:{port} -h {}", dir.display()))
    };
    // An end of a client's input would end the server.
    let receives =
        "mkfifo $D/open\nbusybox nc $A $P <>$D/open >$D/got\ncmp $D/sent $D/got\nrate 1\n";
    let case = |name, server: &dyn Fn(&Place) -> Program, client, carried| {
        let needs = &["busybox", "socat", "python3"];
        Script { name, needs, server, client, count: times(3, 20), carried }.run(&net);
    };
    case("busybox nc, both ends", &sender, receives, Carried::Both);
    case("busybox nc, socat", &hashes, HASHES, Carried::Both);
    case("busybox wget, Python", &python, FETCHES, Carried::Both);
    case("busybox httpd, wget", &httpd, FETCHES, Carried::Never);
}
