// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Signal handlers that call the library, jumps out of its calls, and threads ending in calls: as
//! on TCP, with the library at both ends and at none.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on may stop")]

mod common;

use std::process::Stdio;

use common::{Fabric, await_listener, compiled, free_port};

/// Runs the program in a mode against the server, which serves so many connections. Each connection
/// has an end, and not a reset.
fn run(mode: &str, connections: usize, expected: &str) {
    let program = compiled("program", &[]);
    for smc in [false, true] {
        let fabric = Fabric::new(6);
        let port = free_port().to_string();
        let command = |arguments: &[&str]| {
            // A limit for the program alone: `timeout` ends it, with a core of none.
            let mut command = fabric.on(smc, "timeout");
            command.args(["-s", "ABRT", "300"]).arg(&program).args(arguments);
            command.stdout(Stdio::piped());
            command
        };
        let connections_text = connections.to_string();
        let server = command(&["server", &port, &connections_text]).spawn().unwrap();
        await_listener(port.parse().unwrap());
        let client = command(&[mode, &port]).output().unwrap();
        let text = String::from_utf8_lossy(&client.stdout).into_owned();
        assert!(client.status.success(), "smc: {smc}, {:?}: {text}", client.status);
        assert_eq!(text, expected, "smc: {smc}");
        let server = server.wait_with_output().unwrap();
        let ended = String::from_utf8_lossy(&server.stdout).into_owned();
        assert_eq!(ended, "end\n".repeat(connections), "smc: {smc}");
        if smc {
            let (decided, broken) = (fabric.decided(), fabric.broken());
            assert!(decided.0 > 0, "the connections were on TCP: {decided:?}, {broken:?}");
        }
    }
}

smc_test_support::tests_of! {
    run:
    fn a_handler_sends_while_the_program_sends_and_receives("sends", 1, "all bytes\n");
    fn a_handler_polls_while_the_program_polls("polls", 1, "all bytes\n");
    fn a_handler_looks_at_bytes_and_options_and_closes_a_copy("peeks", 1, "all bytes\n");
    fn a_handler_forks_in_the_middle_of_any_call("forks", 1, "all bytes\n");
    fn a_handler_makes_connections_while_the_program_does("connects", 80, "80 connections\n");
    fn the_program_ends_in_a_handler("leaves", 1, "left\n");
    fn a_connection_is_usable_and_ends_after_jumps_out_of_its_calls("jumps", 1, "jumped\n");
    fn threads_are_cancelled_in_calls_and_the_connections_stay("cancels", 21, "cancelled\n");
    fn threads_end_in_epoll_wait_and_in_handlers("ends", 1, "ended\n");
    fn handlers_are_told_what_the_kernel_tells_and_calls_begin_again("handlers", 1, "told\n");
    fn a_handler_that_does_not_block_its_signal_sends("nests", 1, "nested\n");
    fn signals_that_wait_in_a_queue_come_once_each("queues", 1, "queued\n");
    fn a_connect_that_a_signal_ends_goes_on_in_the_kernel("begins", 100, "100 connections\n");
}

/// The source files under a directory.
fn sources(directory: &std::path::Path, all: &mut String) {
    for entry in std::fs::read_dir(directory).unwrap().flatten() {
        let path = entry.path();
        if path.is_dir() {
            sources(&path, all);
        } else if path.extension().is_some_and(|ending| ending == "rs") {
            all.push_str(&std::fs::read_to_string(path).unwrap());
        }
    }
}

#[test]
fn each_promise_of_the_page_has_a_test_that_exists() {
    let here = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut all = String::new();
    for directory in ["tests", "src", "../sys/src"] {
        sources(&here.join(directory), &mut all);
    }
    let page = std::fs::read_to_string(here.join("../../docs/preload-contract.md")).unwrap();
    let rows = page.lines().filter(|line| line.starts_with("| ") && !line.ends_with("| test |"));
    let tests: Vec<_> = rows.map(|row| row.rsplit('|').nth(1).unwrap().trim()).collect();
    assert!(tests.len() > 10);
    for test in tests {
        let declared = format!("fn {}(", test.trim_matches('`'));
        assert!(all.contains(&declared), "{test}");
    }
}
