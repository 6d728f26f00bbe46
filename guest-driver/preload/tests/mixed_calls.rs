// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A program that makes some calls by libc and others by an instruction of its own, unseen by the
//! library: both ends read the same as on TCP, with any choice of calls. Peers find each other by
//! TCP option 254. The option needs root. Without root these tests print SKIPPED, and fail where
//! `CI=true`.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on may stop")]

#[path = "../../tests/rendezvous/bed.rs"]
mod bed;
mod common;

use std::io::Read;
use std::path::Path;
use std::process::{Child, Stdio};
use std::time::Instant;

use common::{Fabric, TIMEOUT, await_listener, compiled};
use smc_rendezvous::{Options, PassedOn, Rendezvous};

/// Calls by their numbers in `tests/contract/mixed.c`, in groups; the calls of a group are all made
/// in one way.
const NAMES: u32 = 0b111;
const ACCEPT: u32 = 1 << 3;
const CONNECT: u32 = 1 << 4;
const CREATE: u32 = 1 << 5;
const CONTROL: u32 = 1 << 6;
const WAIT: u32 = 1 << 7;
const POLL: u32 = 1 << 8;
const READ: u32 = 0b11 << 9;
const WRITE: u32 = 0b11 << 11;
const CLOSE: u32 = 1 << 13;

/// Each choice of these groups.
fn choices(groups: &[u32]) -> impl Iterator<Item = u32> {
    (0..1u32 << groups.len()).map(move |choice| {
        let chosen = groups.iter().enumerate().filter(|(at, _)| choice >> at & 1 != 0);
        chosen.map(|(_, group)| group).sum()
    })
}

/// The ways to wait, with the choices of each. `first`: the calls to make connections.
fn mixtures(first: u32) -> Vec<(&'static str, u32)> {
    let of = |how, groups: &[u32]| choices(groups).map(|choice| (how, choice)).collect::<Vec<_>>();
    let mut all = of("block", &[first, READ, WRITE, CLOSE]);
    all.extend(of("poll", &[first, POLL, READ, WRITE]));
    all.extend(of("epoll", &[first, CREATE | CONTROL, WAIT, READ, WRITE]));
    // Reads and writes, each second one by the library.
    all.extend([READ & (READ << 1), WRITE & (WRITE << 1)].map(|half| ("epoll", half)));
    all
}

/// The output of both ends.
fn expected() -> String {
    let line = |client, line| format!("line {line} of client {client}\n");
    (0..3).flat_map(|client| (0..4).map(move |n| line(client, n))).collect()
}

/// An end, with the library.
fn start(fabric: &Fabric, passed: &PassedOn, program: &Path, words: &[&str]) -> Child {
    let mut command = fabric.smc(program);
    command
        .args(words)
        .env("SMC_RUN_CONNECT", "")
        .env("SMC_RUN_RENDEZVOUS", "auto")
        .env("SMC_RUN_OPTION", passed.to_string())
        .stdout(Stdio::piped())
        .stderr(Stdio::null());
    command.spawn().unwrap()
}

/// The output of an end, or `hangs`.
fn finish(mut end: Child) -> String {
    let begun = Instant::now();
    while end.try_wait().unwrap().is_none() {
        if begun.elapsed() > TIMEOUT {
            end.kill().unwrap();
            end.wait().unwrap();
            return "hangs".into();
        }
        std::thread::sleep(std::time::Duration::from_millis(2));
    }
    let mut text = String::new();
    end.stdout.unwrap().read_to_string(&mut text).unwrap();
    text
}

/// Runs each mixture as one end, while the other end makes all calls by libc. `options`: of the
/// compiler, for the mixed end. `decided`: connections on SMC of a program without own calls.
fn run_all(mixtures: &[(&str, u32)], mixed_server: bool, options: &[&str], decided: usize) {
    let (mixed, plain) = (compiled("mixed", options), compiled("mixed", &["-DNO_OWN_CALLS"]));
    let expected = expected();
    bed::run(|| {
        bed::ip("link set lo up");
        let passed = Rendezvous::attach(Options::default()).unwrap().pass_on().unwrap();
        let (mut wrong, mut port) = (Vec::new(), 6000);
        for (how, calls) in mixtures {
            port += 1;
            let fabric = Fabric::new(2);
            let (calls, number) = (format!("{calls:#x}"), port.to_string());
            let end = |name, is_mixed| match is_mixed {
                true => start(&fabric, &passed, &mixed, &[name, *how, &calls, &number]),
                false => start(&fabric, &passed, &plain, &[name, *how, "0", &number]),
            };
            let server = end("server", mixed_server);
            await_listener(port);
            let client = end("client", !mixed_server);
            let said = [finish(client), finish(server)];
            if said.iter().any(|text| *text != expected) {
                wrong.push(format!("{how} {calls}: {said:?}"));
            }
            if calls == "0x0" {
                assert_eq!(fabric.decided().0, decided, "{how}: all calls are libc's");
            }
        }
        assert!(wrong.is_empty(), "{} of {}: {wrong:#?}", wrong.len(), mixtures.len());
    });
}

/// The instructions in the program's file show the own calls, whether used or not.
#[test]
fn a_server_reads_the_same_whichever_calls_are_its_own() {
    run_all(&mixtures(NAMES | ACCEPT), true, &[], 0);
}

#[test]
fn a_client_reads_the_same_whichever_calls_are_its_own() {
    run_all(&mixtures(1 | CONNECT), false, &[], 0);
}

/// Files with Rust in them do not show own calls. Such a program is on SMC while all of its calls
/// are libc's, and sees its own data in its set after any wait.
#[test]
fn a_program_that_waits_by_its_own_calls_sees_its_own_data() {
    let on_epoll = |groups: &[u32]| choices(groups).map(|calls| ("epoll", calls)).collect();
    let server: Vec<_> = on_epoll(&[NAMES, CREATE, WAIT]);
    run_all(&server, true, &["-DLIKE_RUST"], 6);
    let client: Vec<_> = on_epoll(&[CREATE, WAIT]);
    run_all(&client, false, &["-DLIKE_RUST"], 6);
}
