// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Connections leaving a working device about to go.

use std::io::ErrorKind;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use guest_driver::{ConnectionInfo, socket::CurrentCarrier};
use smc_tests::watch::LIMIT;
use smc_tests::{TIMEOUT, eventually, read_exactly, send_all, watched};

use crate::outlive::{BYTES, LOSSES, Loss, Scene, bounce};

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

/// The number of bytes up to the end of a stream, and the error, if it is one.
fn count_to_end(stream: &guest_driver::SmcStream) -> (usize, Option<ErrorKind>) {
    stream.set_read_timeout(Some(TIMEOUT)).unwrap();
    let (mut count, mut buf) = (0, [0; 4096]);
    loop {
        match stream.recv(&mut buf) {
            Ok(0) => return (count, None),
            Ok(n) => count += n,
            Err(error) => return (count, Some(error.kind())),
        }
    }
}

// Bytes written between two carriers are in no ring and in no kernel. With them lost, the end of the
// process is a reset. Under TCP no byte would be lost.
#[test]
fn a_process_that_is_killed_while_it_changes_its_carrier_ends_no_stream_early() {
    let mut ends = [0; 2];
    for n in 0..50 {
        watched(LIMIT, || {
            let mut scene = Scene::new();
            let (mut writer, stream) = scene.trickle();
            (0..10).for_each(|_| assert_eq!(writer.line(), "."));
            thread::scope(|scope| {
                let written = scope.spawn(|| {
                    thread::sleep(Duration::from_micros(200 * (n / LOSSES.len() as u64)));
                    10 + writer.kill_and_read().lines().count()
                });
                let read = scope.spawn(|| count_to_end(&stream));
                match LOSSES[n as usize % LOSSES.len()] {
                    // Its answer depends on the moment of the kill.
                    Loss::Left => drop(scene.ask("leave\n")),
                    loss => scene.lose(loss),
                }
                let (written, (read, error)) = (written.join().unwrap(), read.join().unwrap());
                // The process may have been killed before it said so.
                assert!(read <= written + 1, "{n}: {read} of {written}");
                match error {
                    None => assert!(read >= written, "{n}: an end after {read} of {written}"),
                    Some(error) => assert_eq!(error, ErrorKind::ConnectionReset, "{n}"),
                }
                ends[usize::from(error.is_some())] += 1;
            });
        });
    }
    println!("{} streams ended whole, {} were reset", ends[0], ends[1]);
}
