// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The suite against a client.

#![allow(clippy::unwrap_used, reason = "a target that cannot run fails the test")]

mod target;

use std::net::TcpListener;
use std::time::Duration;

use smc_conform::{CaseResult, Cases, Names, Options, Results, Target, Verdict, run};
use smc_core::handshake::Kinds;
use target::{Clients, Fault};

fn play(kinds: Kinds, fault: Fault, only: &[&str]) -> Results {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let clients = Clients::start(listener.local_addr().unwrap(), kinds, fault);
    let options = Options {
        target: Target::Client { listener, program: None },
        echo: true,
        aggressive: true,
        connections: 8,
        wait: Duration::from_secs(20),
        only: only.iter().map(|part| (*part).to_owned()).collect(),
        layers: vec!["clc".into()],
        fabric: None,
        announce: None,
        names: Names {
            eid: target::EID.into(),
            chid: target::CHID,
            gid: [0x43, 2, 3, 4, 5, 6, 0x47, 8, 0x99, 10, 11, 12, 13, 14, 15, 17],
            mac: [2, 0x43, 0x46, 0, 0, 1],
            roce_gid: [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 127, 0, 0, 1],
            subnet: ([127, 0, 0, 0], 8),
        },
    };
    let results = run(&Cases::load(None).unwrap(), &options, &|_| ());
    // The listener ends with the options, and so do the clients.
    drop(options);
    clients.join();
    results.unwrap()
}

#[test]
fn a_client_without_faults_passes() {
    for kinds in [Kinds::SMCD_V2, Kinds::all()] {
        let results = play(kinds, Fault::NONE, &[]);
        let bad: Vec<String> = results
            .results
            .iter()
            .filter(|one| one.verdict == Verdict::Fail)
            .map(|one| format!("{} {}: {}", one.case.level.name(), one.case.id, one.says))
            .collect();
        println!("{:?}: {} pass", kinds, results.count(Verdict::Pass));
        assert!(bad.is_empty(), "{}", bad.join("\n"));
        assert!(results.count(Verdict::Pass) > 200);
        let mistakes = results.results.iter().map(|one| one.says.as_str());
        let mistakes: Vec<&str> = mistakes.filter(|says| says.contains(" has no field ")).collect();
        assert!(mistakes.is_empty(), "{mistakes:?}");
    }
}

#[test]
fn every_fault_is_found() {
    let found = |fault: &Fault| {
        let results = play(Kinds::SMCD_V2, fault.clone(), &[fault.found_by]);
        let bad =
            |one: &&CaseResult| matches!(one.verdict, Verdict::Fail | Verdict::DeviatesAsLinux);
        let found = results.results.iter().find(bad);
        found.map(|one| format!("{} {}: {}", one.verdict.name(), one.case.id, one.says))
    };
    let faults = target::faults::of_client();
    let mut missed = Vec::new();
    std::thread::scope(|scope| {
        let runs: Vec<_> =
            faults.iter().map(|fault| (fault.name, scope.spawn(|| found(fault)))).collect();
        for (name, run) in runs {
            match run.join().unwrap() {
                Some(found) => println!("{name}: {found}"),
                None => missed.push(name),
            }
        }
    });
    assert!(missed.is_empty(), "not found: {missed:?}");
}
