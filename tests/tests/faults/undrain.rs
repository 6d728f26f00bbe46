// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A drain taken back, before or after the connections have left: the device takes new connections,
//! and the departed ones come back.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use guest_driver::Stack;
use guest_driver::socket::CurrentCarrier;
use smc_tests::watch::LIMIT;
use smc_tests::{eventually, note, watched};

use crate::back::{is_back, talk};
use crate::outlive::{BYTES, Scene, bounce};

/// How often the only connection of a stack has changed its carrier.
fn count(stack: &Stack) -> u32 {
    stack.connections().pop().unwrap().changes.unwrap().count
}

/// Drains these guests and takes the drain back, over and over. The client is port1.
fn drain_and_undrain(guests: &[&str], rounds: u32) {
    note(format!("{guests:?}"));
    let mut scene = Scene::new();
    let (stack, client, server) = scene.pair(true);
    talk(&client, &server);
    for round in 1..=rounds {
        for guest in guests {
            assert_eq!(scene.ask(&format!("drain {guest}\n")), "left 1 of 1");
        }
        assert!(!is_back(&stack) && !is_back(&scene.stack));
        talk(&client, &server);
        let tcp = scene.connect(&stack);
        assert!(tcp.iter().all(|end| !end.is_smc()));
        drop(tcp);
        for guest in guests {
            assert_eq!(scene.ask(&format!("undrain {guest}\n")), "undrained 1");
            assert_eq!(scene.ask(&format!("undrain {guest}\n")), "undrained 0", "again");
        }
        // A client refused meanwhile waits for up to twice the time of the refusals.
        while !(is_back(&stack) && is_back(&scene.stack)) {
            thread::sleep(Duration::from_millis(5));
        }
        assert_eq!([count(&stack), count(&scene.stack)], [2 * round; 2]);
        talk(&client, &server);
        let smc = scene.connect(&stack);
        assert!(smc.iter().all(|end| end.is_smc()), "{}", smc[0].info());
        drop(smc);
        eventually("the other one is gone", || {
            [&stack, &scene.stack].iter().all(|stack| stack.connections().len() == 1)
        });
    }
}

#[test]
fn connections_come_back_when_a_drain_is_taken_back() {
    watched(2 * LIMIT, || drain_and_undrain(&["port0", "port1"], 2));
    watched(2 * LIMIT, || drain_and_undrain(&["port1"], 2));
    watched(2 * LIMIT, || drain_and_undrain(&["port0"], 1));
}

// The process at the other end stands still, so the connection is about to leave all the time.
#[test]
fn a_drain_that_is_taken_back_before_connections_have_left_costs_no_byte() {
    watched(LIMIT, || {
        let mut scene = Scene::new();
        let (mut peer, streams) = scene.repeat(1);
        let sent = AtomicUsize::new(0);
        thread::scope(|scope| {
            let bounced = scope.spawn(|| bounce(&streams[0], 0, &sent));
            eventually("the stream flows", || sent.load(Ordering::Relaxed) > BYTES / 8);
            peer.stop();
            scene.daemon.as_mut().unwrap().feed("begin-drain port0\n");
            eventually("it leaves", || {
                let all = scene.stack.connections();
                all.iter()
                    .any(|c| c.changes.as_ref().is_some_and(|c| c.now == CurrentCarrier::Leaving))
            });
            let mut said = [scene.ask("undrain port0\n"), scene.daemon.as_mut().unwrap().line()];
            said.sort();
            assert_eq!(said, ["left 0 of 1", "undrained 1"]);
            peer.resume();
            assert_eq!(bounced.join().unwrap(), BYTES);
        });
        assert_eq!(peer.line(), "whole");
    });
}
