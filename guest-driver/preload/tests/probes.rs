// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The probes of docs/rollout.md: their functions are exported, and bpftrace, if installed, puts
//! probes on them.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on may stop")]

mod common;

use std::process::{Command, Stdio};
use std::time::Duration;

use common::{Fabric, Running, library};

const PAGE: &str = include_str!("../../../docs/rollout.md");
const INSTALLED: &str = "/usr/lib/smc/libsmc_preload.so";

/// The programs of bpftrace on the page.
fn programs() -> Vec<&'static str> {
    let programs = PAGE.split("bpftrace -e '").skip(1);
    let programs: Vec<_> = programs.map(|rest| rest.split('\'').next().unwrap()).collect();
    assert_eq!(programs.len(), 3, "{programs:?}");
    programs
}

#[test]
fn functions_with_probes_are_exported() {
    let output = Command::new("nm").args(["-D", "--defined-only"]).arg(library()).output();
    let Ok(output) = output else {
        eprintln!("SKIPPED: there is no nm");
        return;
    };
    let symbols = String::from_utf8(output.stdout).unwrap();
    let is_there = |name: &str| symbols.lines().any(|line| line.ends_with(&format!(" T {name}")));
    let mut found = 0;
    for program in programs() {
        for rest in program.split(&format!("{INSTALLED}:")).skip(1) {
            let end = rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap();
            assert!(is_there(&rest[..end]), "{} is not exported", &rest[..end]);
            found += 1;
        }
    }
    assert!(found >= 6, "{found}");
    for name in "sendmsg writev recvmsg readv accept4 poll epoll_wait close".split(' ') {
        assert!(is_there(name) && PAGE.contains(&format!("`{name}`")), "{name}");
    }
}

/// Each program of the page, with the library that was built, while a program sends and receives.
#[test]
fn bpftrace_takes_the_programs_of_the_page() {
    let fabric = Fabric::new(2);
    for program in programs() {
        let program = program.replace(INSTALLED, library().to_str().unwrap());
        let mut trace = Command::new("bpftrace");
        let script = "
import socket, time
listener = socket.create_server(('127.0.0.1', 0))
while True:
    client = socket.create_connection(listener.getsockname())
    server, _ = listener.accept()
    client.send(b'x' * 1000)
    server.recv(1000)
    time.sleep(0.05)
";
        let python = Running::start(fabric.smc("/usr/bin/python3").args(["-c", script]));
        trace.args(["-e", &program, "-c", "/usr/bin/sleep 3"]).stdin(Stdio::null());
        let Ok(output) = trace.output() else {
            eprintln!("SKIPPED: there is no bpftrace");
            return;
        };
        std::thread::sleep(Duration::from_millis(10));
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        let error = String::from_utf8_lossy(&output.stderr);
        if !output.status.success() && !said.contains('@') {
            eprintln!("SKIPPED: bpftrace does not work on this kernel: {error}");
            return;
        }
        assert!(said.contains("python3"), "{program}: {said}{error}");
        drop(python);
    }
}
