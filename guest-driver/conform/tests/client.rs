// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The suite against a client.

#![allow(clippy::unwrap_used, reason = "a target that cannot run fails the test")]

mod target;

use std::net::TcpListener;
use std::time::Duration;

use smc_conform::{CaseResult, Options, RdmaDevice, Results, Target, Verdict, run};
use smc_core::handshake::Kinds;
use target::{Clients, Fault, Host, Network, failures, names};

fn play(kinds: Kinds, fault: Fault, layer: &str, only: &[&str]) -> Results {
    let network = Network::default();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let host = Host::of(kinds);
    let address = listener.local_addr().unwrap();
    let clients = Clients::start(address, host.clone(), network.clone(), fault);
    let options = Options {
        target: Target::Client { listener, program: None },
        echo: true,
        aggressive: true,
        connections: 8,
        wait: Duration::from_secs(20),
        time_factor: target::time_factor(only),
        only: only.iter().map(|part| (*part).to_owned()).collect(),
        layers: vec![layer.into()],
        fabric: None,
        rdma: (layer == "llc").then_some(&network as &dyn RdmaDevice),
        announce: None,
        names: names(&host),
    };
    let results = run(target::cases(), &options, &target::progress);
    // The listener ends with the options, and so do the clients.
    drop(options);
    clients.join();
    results.unwrap()
}

#[test]
fn a_client_without_faults_passes() {
    let one = "confirm d2 data echo offers-d2 offers-emulated release-2.1 remembers smc";
    let all = "confirm d2 data echo offers-d1 offers-d2 offers-emulated offers-r1 offers-r2 \
               offers-v1 release-2.1 remembers smc";
    for (kinds, known) in [(Kinds::SMCD_V2, one), (Kinds::all(), all)] {
        let results = play(kinds, Fault::NONE, "clc", &[]);
        let facts: Vec<&str> = results.facts.iter().collect();
        assert_eq!(facts.join(" "), known);
        let bad = failures(&results);
        println!("{:?}: {} pass", kinds, results.count(Verdict::Pass));
        assert!(bad.is_empty(), "{}", bad.join("\n"));
        assert!(results.count(Verdict::Pass) > 200);
    }
}

#[test]
fn links_of_a_client_without_faults_pass() {
    let results = play(Kinds::all(), Fault::NONE, "llc", &[]);
    let facts: Vec<&str> = results.facts.iter().collect();
    println!("{facts:?}: {} pass in {:?}", results.count(Verdict::Pass), results.took);
    let bad = failures(&results);
    assert!(bad.is_empty(), "{}", bad.join("\n"));
    assert!(results.count(Verdict::Pass) >= 100);
}

#[test]
fn every_fault_is_found() {
    let found = |fault: &Fault| {
        let results = play(fault.kinds(), fault.clone(), fault.layer, &[fault.found_by]);
        let bad =
            |one: &&CaseResult| matches!(one.verdict, Verdict::Fail | Verdict::DeviatesAsLinux);
        let found = results.results.iter().find(bad);
        found.map(|one| format!("{} {}: {}", one.verdict.name(), one.case.id, one.says))
    };
    let mut faults = target::faults::of_client();
    faults.extend(target::llc_faults::of_client());
    println!("{} faults", faults.len());
    assert!(faults.len() >= 40);
    let missed = target::missed(&faults, found);
    assert!(missed.is_empty(), "not found: {missed:?}");
}
