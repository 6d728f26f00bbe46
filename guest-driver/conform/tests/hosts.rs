// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The suite against hosts with more or fewer features than in the other tests.

#![allow(clippy::unwrap_used, reason = "a target that cannot run fails the test")]

mod target;

use std::net::TcpListener;
use std::time::Duration;

use smc_conform::{Fabric, Options, RdmaDevice, Results, Role, Target, Verdict, run};
use target::{Clients, Fault, Host, Network, Server, failures, names};

/// Plays the cases with an id containing one of `only`, or all cases, against a host in a role.
fn play(host: &Host, role: Role, only: &[&str]) -> Results {
    let listener = TcpListener::bind((host.address, 0)).unwrap();
    let address = listener.local_addr().unwrap();
    let network = Network::default();
    let (target, network, clients, _server) = match role {
        Role::Server => {
            let server = Server::start(host.clone(), Fault::NONE);
            (Target::Server(server.address), server.network.clone(), None, Some(server))
        }
        Role::Client => {
            let clients = Clients::start(address, host.clone(), network.clone(), Fault::NONE);
            (Target::Client { listener, program: None }, network, Some(clients), None)
        }
    };
    let options = Options {
        target,
        echo: true,
        aggressive: true,
        connections: 16,
        wait: Duration::from_secs(20),
        time_factor: target::time_factor(&[]),
        only: only.iter().map(|part| (*part).to_owned()).collect(),
        layers: vec!["clc".into(), "llc".into()],
        fabric: host.fabric.as_ref().map(|fabric| fabric as &dyn Fabric),
        rdma: Some(&network as &dyn RdmaDevice),
        announce: None,
        names: names(host),
    };
    let results = run(target::cases(), &options, &target::progress);
    // A listener ends with the options, and so do its clients.
    drop(options);
    if let Some(clients) = clients {
        clients.join();
    }
    results.unwrap()
}

/// Checks the facts found about the host, the absence of failures, and at least `fewest` passed
/// cases.
#[track_caller]
fn passes(host: &Host, role: Role, known: &str, only: &[&str], fewest: usize) {
    let results = play(host, role, only);
    let facts: Vec<&str> = results.facts.iter().collect();
    let passed = results.count(Verdict::Pass);
    println!("{role:?}, {}: {passed} pass in {:?}", facts.join(" "), results.took);
    let bad = failures(&results);
    assert!(bad.is_empty(), "{}", bad.join("\n"));
    assert_eq!(facts.join(" "), known);
    assert!(passed >= fewest, "{passed} pass");
}

/// Cases depending on the features of a server.
const OF_SERVERS: [&str; 12] = [
    "server-types-",
    "server-accept-",
    "server-d1-",
    "server-seid-",
    "server-records-",
    "server-prefix-",
    "server-r-",
    "server-release-",
    "server-confirm-wrong",
    "server-confirm-token",
    "server-contact-",
    "llc-server-terms-",
];

#[test]
fn a_server_with_everything_passes() {
    let known = "confirm d2 data device echo link-r2 prefix prefix-d1 prefix-r1 r2 records \
                 release-2.1 rnic second-rnic seid smc takes-second two-links";
    passes(&Host::rich(), Role::Server, known, &OF_SERVERS, 100);
}

#[test]
fn a_server_without_names_passes() {
    let known = "d1 data echo link-r1 r1 rnic second-rnic smc";
    passes(&Host::nameless(), Role::Server, known, &OF_SERVERS, 30);
}

#[test]
fn a_server_without_smc_d_passes() {
    let known = "data echo link-r1 link-r2 r1 r2 rnic second-rnic smc takes-second two-links";
    passes(&Host::without_d(), Role::Server, known, &OF_SERVERS, 30);
}

#[test]
fn a_server_of_release_2_0_passes() {
    let known = "confirm d1 d2 data echo r2 rnic second-rnic smc";
    let only = [
        "server-types-v2",
        "server-types-reasons",
        "server-types-offered",
        "server-release-declined",
        "server-release-limits",
        "server-r-confirm",
        "server-d1-",
    ];
    passes(&Host::old(), Role::Server, known, &only, 20);
}

/// Cases depending on the features of a client.
const OF_CLIENTS: [&str; 6] = [
    "client-offer-",
    "client-proposal-",
    "client-devices-",
    "client-d1-",
    "client-accept-",
    "client-r-",
];

#[test]
fn a_client_with_everything_passes() {
    let known = "confirm d2 data device echo link-r1 link-r2 lists-gids offers-associated \
                 offers-d1 offers-d2 offers-emulated offers-prefixes offers-r1 offers-r2 \
                 offers-records offers-second offers-seid offers-v1 prefix release-2.1 remembers \
                 rnic second-rnic seid smc takes-second";
    passes(&Host::rich(), Role::Client, known, &OF_CLIENTS, 100);
}

#[test]
fn a_client_without_names_passes() {
    let known = "data echo link-r1 offers-d1 offers-r1 offers-v1 rnic second-rnic smc";
    passes(&Host::nameless(), Role::Client, known, &OF_CLIENTS, 10);
}

#[test]
fn a_client_without_smc_d_passes() {
    let known =
        "data echo link-r1 link-r2 offers-r1 offers-r2 offers-v1 rnic second-rnic smc takes-second";
    passes(&Host::without_d(), Role::Client, known, &OF_CLIENTS, 10);
}

#[test]
fn a_client_of_release_2_0_passes() {
    let known = "data echo offers-associated offers-d1 offers-r2 offers-v1 rnic second-rnic smc";
    let only =
        ["client-offer-", "client-proposal-", "client-d1-", "client-r-accept-r2-taken-release"];
    passes(&Host::old(), Role::Client, known, &only, 10);
}
