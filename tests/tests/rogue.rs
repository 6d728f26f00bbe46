// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Misbehaving guests only harm themselves: the programs of `smc_tests::rogue` as processes of the
//! host. The same programs run in virtual machines in the suite `vm`.
#![allow(clippy::unwrap_used, reason = "a test ends at its first surprise")]

use std::io::Read;
use std::thread;

use smc_tests::helper::Helper;
use smc_tests::{Bench, Fabric, Pair, eventually, pattern, read_exactly, run, send_all};

const PEER: &str = env!("CARGO_BIN_EXE_smc-test-peer");

fn rogue(bench: &Bench, what: &str, port: usize, rest: &[&str]) -> Helper {
    let socket = bench.socket(port).display().to_string();
    let mut args = vec!["rogue", what, socket.as_str()];
    args.extend(rest);
    Helper::spawn(PEER, &args)
}

/// Bytes go both ways.
fn works(pair: &Pair) {
    let (client, server) = pair.connect();
    for seed in 0..20 {
        let bytes = pattern(seed, 50_000);
        send_all(&client, &bytes);
        assert!(read_exactly(&server, bytes.len()) == bytes);
        send_all(&server, &bytes);
        assert!(read_exactly(&client, bytes.len()) == bytes);
    }
}

#[test]
fn random_bytes_over_the_own_rings_stay_the_own_problem() {
    smc_tests::watched(smc_tests::watch::LIMIT, || {
        let bench = Bench::new(Fabric::Window, 4);
        let pair = bench.pair();
        let mut rogue = rogue(&bench, "scribble", 2, &["2"]);
        let said = thread::scope(|scope| {
            let said = scope.spawn(|| rogue.line());
            works(&pair);
            said.join().unwrap()
        });
        println!("{said}");
        works(&pair);
        let innocent = bench.daemon().list();
        for port in innocent.iter().take(2) {
            assert_eq!(port.faults.iter().sum::<u64>(), 0, "{}: {:?}", port.spec.name, port.faults);
        }
    });
}

#[test]
fn random_bytes_over_the_window_end_the_own_connection_only() {
    run(Fabric::Window, |bench| {
        let pair = bench.pair();
        let (client, server) = pair.connect();
        let mut rogue = rogue(bench, "smear", 2, &[&pair.addr().to_string()]);
        let (mut victim, _) = pair.listener.accept().unwrap();
        assert_eq!(rogue.line(), "connected");
        let end = victim.read_to_end(&mut Vec::new());
        println!("the victim of the smear: {end:?}");
        let bytes = pattern(1, 50_000);
        send_all(&client, &bytes);
        assert!(read_exactly(&server, bytes.len()) == bytes);
        works(&pair);
    });
}

#[test]
fn a_bystander_finds_nothing_in_its_window() {
    run(Fabric::Window, |bench| {
        let pair = bench.pair();
        let (client, server) = pair.connect();
        send_all(&client, &[7; 10_000]);
        let said = rogue(bench, "look", 2, &[]).line();
        assert!(said.ends_with(", 0 not zero"), "{said}");
        read_exactly(&server, 10_000);
    });
}

#[test]
fn a_device_that_never_listens_costs_its_peers_nothing() {
    run(Fabric::Window, |bench| {
        let pair = bench.pair();
        let mut flicker = rogue(bench, "flicker", 2, &["0", "5"]);
        let address = format!("127.0.0.1:{}", flicker.line());
        let mut deaf = rogue(bench, "deaf", 3, &[&address]);
        works(&pair);
        println!("{}\n{}\n{}", deaf.line(), deaf.line(), flicker.line());
        works(&pair);
    });
}

#[test]
fn wakes_without_a_pause_stop_nobody() {
    run(Fabric::Window, |bench| {
        let pair = bench.pair();
        let other = bench.socket(3).display().to_string();
        let mut storm = rogue(bench, "storm", 2, &[&other, "2"]);
        println!("{}", storm.line());
        works(&pair);
        println!("{}", storm.line());
    });
}

#[test]
fn registering_and_dropping_at_full_speed_stops_nobody() {
    run(Fabric::Window, |bench| {
        let pair = bench.pair();
        let gid = pair.server.devices()[0].1.to_string();
        let mut churn = rogue(bench, "churn", 2, &[&gid, "2"]);
        println!("{}", churn.line());
        works(&pair);
        println!("{}", churn.line());
        eventually("nothing is left of it", || {
            bench.daemon().list()[2].device.as_ref().is_none_or(|device| device.dmbs == 0)
        });
    });
}
