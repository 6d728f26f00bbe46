// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Streams over the only link of their group, with the link lost: no byte is lost or doubled.
//!
//! `SMC_LINKS=100` is the number of runs; the default is three of each kind.

use std::net::Shutdown;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use guest_driver::SmcStream;
use smc_tests::bytes::{Rng, check, fill};
use smc_tests::watch::LIMIT;
use smc_tests::{eventually, watched};

use crate::scene::{LOSSES, Loss, Scene, Terms};

const STREAMS: usize = 16;
/// Bytes of each direction of a stream.
const BYTES: usize = 1 << 20;

fn runs() -> u64 {
    std::env::var("SMC_LINKS").map_or(3, |text| text.parse().expect("SMC_LINKS is a number"))
}

fn send(stream: &SmcStream, seed: u64, sent: &AtomicUsize) {
    let mut random = Rng::new(seed);
    let (mut block, mut done) = (vec![0; 20_000], 0);
    while done < BYTES {
        let len = 1 + random.below(block.len() as u32) as usize;
        let block = &mut block[..len.min(BYTES - done)];
        fill(seed, done, block);
        let n = stream.send(block).unwrap_or_else(|e| panic!("{seed} {done}: {e}"));
        done += n;
        sent.fetch_add(n, Ordering::Relaxed);
    }
    stream.shutdown(Shutdown::Write).unwrap();
}

/// Receives to the end. Returns how many bytes came.
pub(crate) fn receive(stream: &SmcStream, seed: u64) -> usize {
    let (mut buf, mut done) = (vec![0; 7000], 0);
    loop {
        match stream.recv(&mut buf).unwrap_or_else(|e| panic!("{seed} {done}: {e}")) {
            0 => return done,
            n => {
                check(seed, done, &buf[..n]);
                done += n;
            }
        }
    }
}

fn lose_under_streams(loss: Loss, terms: Terms, run: u64) {
    let mut scene = Scene::new(terms, run);
    let mut random = Rng::new(run);
    let pairs: Vec<_> = (0..STREAMS).map(|_| scene.connect()).collect();
    let sent = AtomicUsize::new(0);
    let all = 2 * STREAMS * BYTES;
    let before = all / 8 + random.below(all as u32 / 2) as usize;
    thread::scope(|scope| {
        let mut ends = Vec::new();
        for (n, [client, server]) in pairs.iter().enumerate() {
            let (to_server, to_client, sent) = (2 * n as u64, 2 * n as u64 + 1, &sent);
            ends.push(scope.spawn(move || send(client, to_server, sent)));
            ends.push(scope.spawn(move || send(server, to_client, sent)));
            ends.push(scope.spawn(move || assert_eq!(receive(server, to_server), BYTES)));
            ends.push(scope.spawn(move || assert_eq!(receive(client, to_client), BYTES)));
        }
        eventually("the streams flow", || sent.load(Ordering::Relaxed) > before);
        if random.below(4) > 0 {
            scene.hold();
        }
        scene.lose(loss);
        for end in ends {
            end.join().unwrap();
        }
    });
    drop(pairs);
    for stack in &scene.stacks {
        eventually("closed connections are gone", || stack.totals().closing == 0);
    }
}

fn lose_under_streams_often(terms: Terms) {
    for run in 0..runs() {
        for loss in LOSSES {
            watched(LIMIT, || lose_under_streams(loss, terms, run));
        }
    }
}

#[test]
fn no_byte_is_lost_when_the_last_link_is_lost_under_streams() {
    lose_under_streams_often(Terms::default());
}

#[test]
fn no_byte_is_lost_behind_eye_catchers() {
    lose_under_streams_often(Terms { eye_catcher: true, ..Terms::default() });
}
