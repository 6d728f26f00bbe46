// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Connections leaving a working device about to go.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use guest_driver::{ConnectionInfo, socket::CurrentCarrier};
use smc_tests::watch::LIMIT;
use smc_tests::{eventually, read_exactly, send_all, watched};

use crate::outlive::{BYTES, Scene, bounce};

// The device of one end stays with this driver, so the test sees connections leave before any loss.
#[test]
fn connections_leave_a_device_that_drains_and_new_ones_are_tcp() {
    for ends in [&["port0", "port1"][..], &["port0"], &["port1"]] {
        watched(LIMIT, || {
            let mut scene = Scene::new();
            let (stack, client, server) = scene.pair(true);
            send_all(&client, b"in the ring");
            for guest in ends {
                // With nothing to leave a driver is not waited for.
                let left = scene.ask(&format!("drain {guest}\n"));
                assert_eq!(left, "left 1 of 1", "{guest}");
            }
            send_all(&server, b"by TCP");
            assert_eq!(read_exactly(&client, 6), b"by TCP");
            send_all(&client, b" and by TCP");
            assert_eq!(read_exactly(&server, 22), b"in the ring and by TCP");
            // Each end reports the change of carrier, and the reason.
            let mut why = [&stack, &scene.stack].map(|stack| {
                let changes = stack.connections().pop().unwrap().changes.unwrap();
                assert_eq!((changes.now, changes.count), (CurrentCarrier::Tcp, 1));
                changes.why.unwrap()
            });
            why.sort();
            let expected = "the device is about to go";
            assert_eq!(why, [expected.to_owned(), format!("the peer leaves: {expected}")]);
            for end in scene.connect(&stack) {
                let ConnectionInfo::Tcp(_) = end.info() else { panic!("{}", end.info()) };
            }
            drop((client, server));
            eventually("nothing is left", || {
                stack.totals().closing + scene.stack.totals().closing == 0
            });
        });
    }
}

#[test]
fn a_peer_that_does_not_answer_keeps_a_device_no_longer_than_its_time() {
    watched(LIMIT, || {
        let mut scene = Scene::with_leave_time(1);
        let (mut peer, streams) = scene.repeat(1);
        let sent = AtomicUsize::new(0);
        thread::scope(|scope| {
            let bounced = scope.spawn(|| bounce(&streams[0], 0, &sent));
            eventually("the stream flows", || sent.load(Ordering::Relaxed) > BYTES / 8);
            peer.stop();
            assert_eq!(scene.ask("drain port0\n"), "left 1 of 1");
            peer.resume();
            assert_eq!(bounced.join().unwrap(), BYTES);
        });
        assert_eq!(peer.line(), "whole");
    });
}
