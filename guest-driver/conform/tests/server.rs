// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The suite against a server.

#![allow(clippy::unwrap_used, reason = "a target that cannot run fails the test")]

mod target;

use std::time::{Duration, Instant};

use smc_conform::{CaseResult, Options, RdmaDevice, Results, Target, Verdict, run};
use smc_core::handshake::Kinds;
use target::{Fault, Host, Server, failures, names};

fn play(server: &Server, layer: &str, only: &[&str]) -> Results {
    let options = Options {
        target: Target::Server(server.address),
        echo: true,
        aggressive: true,
        connections: 16,
        wait: Duration::from_secs(5),
        time_factor: target::time_factor(only),
        only: only.iter().map(|part| (*part).to_owned()).collect(),
        layers: vec![layer.into()],
        fabric: None,
        rdma: (layer == "llc").then_some(&server.network as &dyn RdmaDevice),
        announce: None,
        names: names(&server.host),
    };
    run(target::cases(), &options, &target::progress).unwrap()
}

#[test]
fn a_server_without_faults_passes() {
    let began = Instant::now();
    for (kinds, known) in [
        (Kinds::SMCD_V2, "confirm d2 data echo release-2.1 smc"),
        (Kinds::all(), "confirm d1 d2 data echo r1 r2 release-2.1 smc"),
    ] {
        let results = play(&Server::start(Host::of(kinds), Fault::NONE), "clc", &[]);
        let facts: Vec<&str> = results.facts.iter().collect();
        assert_eq!(facts.join(" "), known);
        let bad = failures(&results);
        let count = |verdict| results.count(verdict);
        println!(
            "{facts:?}: {} pass, {} fail, {} not applicable, {} not observable, {:?}",
            count(Verdict::Pass),
            count(Verdict::Fail),
            count(Verdict::NotApplicable),
            count(Verdict::NotObservable),
            began.elapsed()
        );
        assert!(bad.is_empty(), "{}", bad.join("\n"));
        assert!(count(Verdict::Pass) > 600);
    }
}

#[test]
fn links_of_a_server_without_faults_pass() {
    let results = play(&Server::start(Host::of(Kinds::all()), Fault::NONE), "llc", &[]);
    let facts: Vec<&str> = results.facts.iter().collect();
    println!("{facts:?}: {} pass", results.count(Verdict::Pass));
    let bad = failures(&results);
    assert!(bad.is_empty(), "{}", bad.join("\n"));
    assert!(results.count(Verdict::Pass) >= 100);
}

#[test]
fn every_fault_is_found() {
    let mut faults = target::faults::of_server();
    faults.extend(target::llc_faults::of_server());
    println!("{} faults", faults.len());
    assert!(faults.len() >= 40);
    let found = |fault: &Fault| {
        let results = play(
            &Server::start(Host::of(Kinds::all()), fault.clone()),
            fault.layer,
            &[fault.found_by],
        );
        // A deviation known of Linux has a verdict of its own.
        let bad =
            |one: &&CaseResult| matches!(one.verdict, Verdict::Fail | Verdict::DeviatesAsLinux);
        let found = results.results.iter().find(bad);
        found.map(|one| format!("{} {}: {}", one.verdict.name(), one.case.id, one.says))
    };
    let missed = target::missed(&faults, found);
    assert!(missed.is_empty(), "not found: {missed:?}");
}
