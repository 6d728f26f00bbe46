// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Connections without a link come back to RNICs once a port is up again: no byte is lost, doubled or
//! reordered.
//!
//! `SMC_LINKS_BACK=50` is the number of losses of the link under the streams; the default is four for
//! each kind of loss.

use std::net::Shutdown;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use guest_driver::socket::CurrentCarrier;
use guest_driver::{SmcStream, Stack};
use smc_tests::bytes::{Rng, fill};
use smc_tests::watch::LIMIT;
use smc_tests::{eventually, read_exactly, send_all, watched};

use crate::scene::{LOSSES, Loss, Scene, Terms};
use crate::streams::receive;

const STREAMS: usize = 16;

fn losses() -> usize {
    std::env::var("SMC_LINKS_BACK").map_or(4, |text| text.parse().expect("a number"))
}

/// How many connections of a stack are on SMC, and how many on TCP.
fn carriers(stack: &Arc<Stack>) -> [usize; 2] {
    let all = stack.connections();
    let on = |now| all.iter().filter(|c| c.changes.clone().unwrap_or_default().now == now).count();
    [on(CurrentCarrier::Device), on(CurrentCarrier::Tcp)]
}

fn are_all(scene: &Scene, wanted: [usize; 2]) -> bool {
    scene.stacks.iter().all(|stack| carriers(stack) == wanted)
}

/// The ports are up again.
fn join(scene: &Scene) {
    for rnic in &scene.rnics {
        rnic.hold(false);
        rnic.join();
    }
}

#[test]
fn a_connection_comes_back_when_its_port_is_up_again() {
    for loss in LOSSES {
        watched(LIMIT, || {
            let mut scene = Scene::new(Terms::default(), 5);
            let [client, server] = scene.connect();
            for round in 0..3u8 {
                let begun = Instant::now();
                eventually("it is on SMC", || are_all(&scene, [1, 0]));
                println!("{loss:?} {round}: on SMC after {:?}", begun.elapsed());
                for (from, to) in [(&client, &server), (&server, &client)] {
                    send_all(from, &[round; 30_000]);
                    assert_eq!(read_exactly(to, 30_000), [round; 30_000]);
                }
                scene.lose(loss);
                send_all(&client, b"by TCP");
                assert_eq!(read_exactly(&server, 6), b"by TCP");
                eventually("it is on TCP", || are_all(&scene, [0, 1]));
                join(&scene);
            }
        });
    }
}

/// Sends until the stop, and then the end. TCP's own queues stay short: a handshake takes the time of
/// four queues.
fn send(stream: &SmcStream, seed: u64, stop: &AtomicBool, sent: &AtomicUsize) -> usize {
    let mut random = Rng::new(seed);
    let (mut block, mut done) = (vec![0; 6000], 0);
    while !stop.load(Ordering::Relaxed) {
        let len = 1 + random.below(block.len() as u32) as usize;
        let block = &mut block[..len];
        fill(seed, done, block);
        let n = stream.send(block).unwrap_or_else(|e| panic!("{seed} {done}: {e}"));
        done += n;
        sent.fetch_add(n, Ordering::Relaxed);
        thread::sleep(Duration::from_millis(u64::from(random.below(4))));
    }
    stream.shutdown(Shutdown::Write).unwrap();
    done
}

fn lose_and_come_back(loss: Loss, terms: Terms, seed: u64) {
    let mut scene = Scene::new(terms, seed);
    let mut random = Rng::new(seed);
    let pairs: Vec<_> = (0..STREAMS).map(|_| scene.connect()).collect();
    let (stop, sent) = (AtomicBool::new(false), AtomicUsize::new(0));
    thread::scope(|scope| {
        let mut ends = Vec::new();
        for (n, [client, server]) in pairs.iter().enumerate() {
            let (stop, sent) = (&stop, &sent);
            let seeds = [2 * n as u64, 2 * n as u64 + 1];
            ends.push((
                scope.spawn(move || send(client, seeds[0], stop, sent)),
                scope.spawn(move || receive(server, seeds[0])),
            ));
            ends.push((
                scope.spawn(move || send(server, seeds[1], stop, sent)),
                scope.spawn(move || receive(client, seeds[1])),
            ));
        }
        let mut longest = Duration::ZERO;
        for at in 0..losses() {
            let before = sent.load(Ordering::Relaxed) + random.below(1 << 20) as usize;
            eventually("the streams flow", || sent.load(Ordering::Relaxed) > before);
            if random.below(4) > 0 {
                scene.hold();
            }
            scene.lose(loss);
            // Some go before others have heard of the loss.
            thread::sleep(Duration::from_millis(u64::from(random.below(100))));
            if random.below(2) == 0 {
                eventually("all are on TCP", || are_all(&scene, [0, STREAMS]));
            }
            join(&scene);
            let begun = Instant::now();
            if at % 2 == 0 || random.below(2) == 0 {
                eventually("all are on SMC", || are_all(&scene, [STREAMS, 0]));
                longest = longest.max(begun.elapsed());
            }
            if at % 2 == 0 {
                // After this time the link does not count as flapping.
                thread::sleep(Duration::from_millis(2100));
            }
        }
        println!("{loss:?}: {} losses, back after {longest:?} at most", losses());
        stop.store(true, Ordering::Relaxed);
        for (sender, receiver) in ends {
            assert_eq!(sender.join().unwrap(), receiver.join().unwrap());
        }
    });
    drop(pairs);
    for stack in &scene.stacks {
        eventually("closed connections are gone", || stack.totals().closing == 0);
    }
}

#[test]
fn streams_come_back_to_their_rnics_again_and_again_and_lose_nothing() {
    for (seed, loss) in (0..).zip(LOSSES) {
        let terms = Terms { eye_catcher: seed == 2, ..Terms::default() };
        lose_and_come_back(loss, terms, seed);
    }
}
