// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A program with the library, not started by `smc run`, uses the settings of the machine.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on may stop")]

mod common;

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::Command;

use common::{Fabric, await_listener, free_port, my_role, role};

/// A program with nothing but the library and a file of settings.
fn program(fabric: &Fabric, settings: &Path) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.env("LD_PRELOAD", common::library()).env("SMC_CONFIG", settings);
    // The report is not the machine's to set.
    command.env("SMC_RUN_STATUS", fabric.file("status")).env("TMPDIR", fabric.file(""));
    command
}

/// The connections of one exchange: on SMC, and on TCP.
fn exchanged(test: &str, settings: &str) -> (usize, usize) {
    let fabric = Fabric::new(2);
    let file = fabric.file("smc.toml");
    std::fs::write(&file, settings.replace("DEVICES", &fabric.devices().display().to_string()))
        .unwrap();
    let port = free_port();
    let server = role(&mut program(&fabric, &file), test, "server", port);
    await_listener(port);
    let client = role(&mut program(&fabric, &file), test, "client", port);
    client.finish();
    server.finish();
    fabric.decided()
}

/// Runs the program of a test.
fn act(role: &str, port: u16) {
    if role == "server" {
        let listener = TcpListener::bind(("127.0.0.1", port)).unwrap();
        let (mut stream, _) = listener.accept().unwrap();
        let mut got = [0; 5];
        stream.read_exact(&mut got).unwrap();
        stream.write_all(&got).unwrap();
        return;
    }
    let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
    stream.write_all(b"bytes").unwrap();
    let mut got = Vec::new();
    stream.read_to_end(&mut got).unwrap();
    assert_eq!(got, b"bytes");
}

#[test]
fn a_program_with_the_library_alone_is_on_smc() {
    const TEST: &str = "a_program_with_the_library_alone_is_on_smc";
    if let Some((name, port)) = my_role() {
        return act(&name, port);
    }
    assert_eq!(exchanged(TEST, "device = \"DEVICES\"\npeers = \"*\""), (2, 0));
}

#[test]
fn settings_with_a_mistake_leave_everything_on_tcp() {
    const TEST: &str = "settings_with_a_mistake_leave_everything_on_tcp";
    if let Some((name, port)) = my_role() {
        return act(&name, port);
    }
    let (smc, _) = exchanged(TEST, "device = \"DEVICES\"\npeers = \"*\"\npolici = \"/x\"");
    assert_eq!(smc, 0);
}

#[test]
fn the_table_of_descriptors_has_grown_before_a_program_has_threads() {
    let size = |command: &mut Command| -> usize {
        let output = command.args(["FDSize", "/proc/self/status"]).output().unwrap();
        let line = String::from_utf8(output.stdout).unwrap();
        line.split_whitespace().nth(1).unwrap().parse().unwrap()
    };
    let fabric = Fabric::new(1);
    let with_library = size(&mut fabric.smc("grep"));
    assert!(with_library >= 1024, "{with_library}");
    assert!(size(&mut Command::new("grep")) < 1024);
}
