// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Dying or misbehaving guests: their peers notice, and no other guest does.

use std::thread;
use std::time::{Duration, Instant};

use smc_tests::vm::{Bed, Guest, Job, Run, Vm};

use crate::ends::{Client, PORT, serve};

/// How soon the survivor of a connection must hear of its end.
const SOON: Duration = Duration::from_secs(1);

pub(crate) fn rogue(guest: &Guest, words: &[&str]) -> Job {
    let words = ["smc-test-peer", "rogue"].iter().chain(words).map(ToString::to_string);
    guest.spawn(Run::new(words).within(Duration::from_secs(120)))
}

/// Ends one of two guests in the middle of a transfer.
#[track_caller]
fn in_mid_transfer(end: impl Fn(&Guest), dies: usize, limit: Duration) {
    let bed = Bed::new();
    let mut guests = bed.pair();
    let mut server = serve(&guests[0]);
    let mut client = Client::new(&guests[1], &guests[0]);
    client.connect();
    assert_eq!(server.line(), "0 accepted smc");
    assert_eq!(client.command("stream"), "streams");
    thread::sleep(Duration::from_millis(500));
    let start = Instant::now();
    end(&guests[dies]);
    if dies == 0 {
        client.failed_after();
    } else {
        let said = server.line();
        assert!(said.starts_with("0 ended Connection"), "{said}");
    }
    println!("the survivor heard after {:?}", start.elapsed());
    assert!(start.elapsed() < limit, "{:?}", start.elapsed());
    // The survivor's program serves the next peer.
    guests[dies].restart();
    if dies == 0 {
        let _server = serve(&guests[0]);
        client.connect();
    } else {
        Client::new(&guests[1], &guests[0]).connect();
    }
    bed.assert_faultless();
}

#[test]
fn a_server_whose_vm_is_killed_in_mid_transfer_is_missed_at_once() {
    in_mid_transfer(Guest::kill, 0, SOON);
}

#[test]
fn a_client_whose_vm_is_killed_in_mid_transfer_is_missed_at_once() {
    in_mid_transfer(Guest::kill, 1, SOON);
}

#[test]
fn a_guest_that_panics_is_missed_when_it_reboots() {
    in_mid_transfer(
        |guest| {
            let panic = guest.spawn("echo c > /proc/sysrq-trigger");
            guest.qmp_event("RESET", Duration::from_secs(30));
            drop(panic);
        },
        0,
        // Until the reboot the guest writes to its console, slow under emulation.
        Duration::from_secs(10),
    );
}

#[test]
fn random_bytes_over_rings_and_window_harm_nobody_else() {
    let bed = Bed::with(&["--window-size", "64M"]);
    let [a, b, c] = bed.boot(["a", "b", "c"].map(Vm::named));
    let mut server = serve(&a);
    let mut client = Client::new(&b, &a);
    client.connect();
    assert_eq!(server.line(), "0 accepted smc");

    let mut smear = rogue(&c, &["smear", "pci", &format!("{}:{PORT}", a.ip())]);
    assert_eq!(smear.line(), "connected");
    assert_eq!(server.line(), "1 accepted smc");
    client.ping();
    // The guest's own connection must end; the bytes decide the error.
    let end = server.line();
    println!("{end}");
    assert!(end.starts_with("1 ended"), "{end}");
    client.ping();
    smear.kill();

    let mut scribble = rogue(&c, &["scribble", "pci", "10"]);
    let said = thread::scope(|scope| {
        let said = scope.spawn(|| scribble.line());
        while !said.is_finished() {
            client.ping();
        }
        said.join().unwrap()
    });
    println!("{said}; the daemon says {:?}", bed.counters("c").faults);
    client.connect();
    for innocent in ["a", "b"] {
        assert!(bed.counters(innocent).faults.is_empty(), "{:?}", bed.list());
    }
    // The guest can join again as before.
    Client::new(&c, &a).connect();
}

#[test]
fn a_guest_that_takes_no_events_costs_its_peers_nothing() {
    let bed = Bed::new();
    let [a, b, c, d] = bed.boot(["a", "b", "c", "d"].map(|name| Vm::named(name).mem("256M")));
    let _server = serve(&a);
    let mut client = Client::new(&b, &a);
    client.connect();
    let mut flicker = rogue(&c, &["flicker", "pci", "6000", "15"]);
    assert_eq!(flicker.line(), "6000");
    let mut deaf = rogue(&d, &["deaf", "pci", &format!("{}:6000", c.ip())]);
    println!("{}", deaf.line());
    let said = thread::scope(|scope| {
        let said = scope.spawn(|| flicker.line());
        while !said.is_finished() {
            client.ping();
        }
        said.join().unwrap()
    });
    println!("{said}\n{}", deaf.line());
    client.connect();
    bed.assert_faultless();
}
