// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Late or silent targets: the suite repeats a case if a busy machine may explain the failure.

#![allow(clippy::unwrap_used, reason = "a target that cannot run fails the test")]

mod target;

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::thread;
use std::time::Duration;

use smc_conform::{Cases, Options, Report, Results, RunHeader, Target, Verdict, run};
use smc_core::handshake::Kinds;
use target::{Fault, Host, Server, names};

/// Cases with a time shorter than a late answer takes. The relay between suite and server tells the
/// cases apart by the peer id.
const CASES: &str = "
layer = 'clc'
role = 'server'
prefix = 'mine'
[[case]]
id = '{row.name}-{n}'
title = 'An answer within 300 ms'
rules = ['CLC-23']
each.row = [{ name = 'late', id = 'text:LATE 123' }, { name = 'never', id = 'text:NEVER 12' }]
each.n = { from = 11, to = 30 }
say = [
  { send = 'proposal', fields = { peer_id = '{row.id}' } },
  { expect = ['accept'], within = 300 },
]
";

/// A relay between the suite and a server.
fn between(server: SocketAddr) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    thread::spawn(move || {
        for suite in listener.incoming().map_while(Result::ok) {
            let server = TcpStream::connect(server).unwrap();
            let (to_suite, to_server) = (suite.try_clone().unwrap(), server.try_clone().unwrap());
            thread::spawn(move || pass(suite, to_server));
            thread::spawn(move || pass(server, to_suite));
        }
    });
    address
}

/// Forwards the bytes, some late or never.
fn pass(mut from: TcpStream, mut to: TcpStream) {
    let mut buffer = [0; 4096];
    while let Ok(n @ 1..) = from.read(&mut buffer) {
        let bytes = &buffer[..n];
        let has = |word: &[u8]| bytes.windows(word.len()).any(|window| window == word);
        if has(b"NEVER") {
            continue;
        }
        if has(b"LATE") {
            thread::sleep(Duration::from_millis(600));
        }
        if to.write_all(bytes).is_err() {
            break;
        }
    }
    let _ = to.shutdown(Shutdown::Write);
}

fn play(only: &str, time_factor: u32) -> Results {
    let directory = smc_test_support::TestDir::new();
    std::fs::write(directory.path("mine.toml"), CASES).unwrap();
    let all = Cases::load(Some(&directory)).unwrap();
    let server = Server::start(Host::of(Kinds::SMCD_V2), Fault::NONE);
    let options = Options {
        target: Target::Server(between(server.address)),
        echo: true,
        aggressive: false,
        connections: 8,
        wait: Duration::from_secs(20),
        time_factor,
        only: vec![only.to_owned()],
        layers: vec!["clc".into()],
        fabric: None,
        rdma: None,
        announce: None,
        names: names(&server.host),
    };
    run(&all, &options, &|_| {}).unwrap()
}

const LATE: &str = "expected accept; came nothing within 300 ms";

#[test]
fn a_late_answer_counts_when_the_case_is_played_again() {
    // Enough time even for a busy machine.
    let results = play("mine-late-11", 200);
    let [one] = results.results.as_slice() else { panic!("{}", results.results.len()) };
    assert_eq!((one.verdict, one.says.as_str()), (Verdict::Pass, ""));
    assert_eq!(one.first.as_deref(), Some(LATE));
    let about = RunHeader {
        program: "test".into(),
        command: "test".into(),
        again: String::new(),
        target: "late".into(),
        began: std::time::SystemTime::now(),
        not_tried: Vec::new(),
    };
    let report = Report { results: &results, about: &about };
    let text = report.text(false);
    assert!(text.contains("Played again, alone"), "{text}");
    assert!(text.contains(&format!("mine-late-11, at first: {LATE}")), "{text}");
    assert!(report.json().contains(&format!("\"first\": \"{LATE}\"")));
    assert!(report.html().contains(&format!("at first: {LATE}")));
}

#[test]
fn a_time_factor_of_1_plays_no_case_again() {
    let results = play("mine-late-11", 1);
    let [one] = results.results.as_slice() else { panic!("{}", results.results.len()) };
    assert_eq!((one.verdict, one.says.as_str(), &one.first), (Verdict::Fail, LATE, &None));
}

#[test]
fn an_answer_that_never_comes_fails_both_times() {
    let results = play("mine-never-11", 3);
    let [one] = results.results.as_slice() else { panic!("{}", results.results.len()) };
    assert_eq!((one.verdict, one.first.as_deref()), (Verdict::Fail, Some(LATE)));
    assert_eq!(one.says, "expected accept; came nothing within 900 ms");
}

#[test]
fn a_silent_target_is_not_waited_for_again() {
    let results = play("mine-never-", 200);
    assert_eq!(results.results.len(), 20);
    for one in &results.results {
        assert_eq!((one.verdict, one.says.as_str(), &one.first), (Verdict::Fail, LATE, &None));
    }
}
