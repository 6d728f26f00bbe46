// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! How long programs wait when the daemon ends: streams of requests and answers beside streams in
//! bulk, whose ends are in two processes.
//!
//! `SMC_OUTLIVE=1000` is the number of daemons that end, `SMC_SEED` chooses when and how, and
//! `cargo test -p smc-tests --test faults pauses -- --nocapture` shows the times. The default is two.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use guest_driver::SmcStream;
use smc_tests::bytes::{check, fill};
use smc_tests::watch::LIMIT;
use smc_tests::{TIMEOUT, eventually, note, watched};

use crate::outlive::{BYTES, Loss, Scene, bounce, runs};

/// Streams of either kind.
const STREAMS: usize = 8;
/// Bytes of a request, and of its answer.
const REQUEST: usize = 100;
/// Requests after the daemon has ended.
const AFTER: usize = 50;

/// Sends requests until `AFTER` of them have begun after the loss; returns the longest time to an
/// answer since just before it.
fn ask(stream: &SmcStream, seed: u64, lost: &AtomicUsize) -> Duration {
    stream.set_read_timeout(Some(TIMEOUT)).unwrap();
    stream.set_write_timeout(Some(TIMEOUT)).unwrap();
    let (mut done, mut longest, mut after) = (0, Duration::ZERO, 0);
    let mut bytes = [0; REQUEST];
    while after < AFTER {
        // 1: it is about to go.
        let counts = lost.load(Ordering::SeqCst) > 0;
        after += usize::from(lost.load(Ordering::SeqCst) > 1);
        fill(seed, done, &mut bytes);
        let begun = Instant::now();
        stream.send(&bytes).unwrap_or_else(|error| panic!("{seed} {done}: {error}"));
        let mut got = 0;
        while got < REQUEST {
            match stream.recv(&mut bytes[got..]) {
                Ok(0) => panic!("{seed} {done}: an end of data"),
                Ok(n) => got += n,
                Err(error) => panic!("{seed} {done}: {error}"),
            }
        }
        if counts {
            longest = longest.max(begun.elapsed());
        }
        check(seed, done, &bytes);
        done += REQUEST;
        // As a program that thinks between two requests, so that bulk has the processor, too.
        thread::sleep(Duration::from_micros(200));
    }
    longest
}

fn end_one(loss: Loss, random: usize) -> Vec<Duration> {
    let mut scene = Scene::with_leave_time(3600);
    let (mut peer, streams) = scene.repeat(2 * STREAMS);
    let (asking, pouring) = streams.split_at(STREAMS);
    let (lost, sent) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let before = random % (STREAMS * BYTES * 3 / 4);
    let pauses = thread::scope(|scope| {
        let asked: Vec<_> = (0..STREAMS)
            .map(|n| (n, &asking[n], &lost))
            .map(|(n, stream, lost)| scope.spawn(move || ask(stream, n as u64, lost)))
            .collect();
        let bounced: Vec<_> = (0..STREAMS)
            .map(|n| (n + STREAMS, &pouring[n], &sent))
            .map(|(n, stream, sent)| scope.spawn(move || bounce(stream, n as u64, sent)))
            .collect();
        eventually("the streams flow", || sent.load(Ordering::Relaxed) > before);
        lost.store(1, Ordering::SeqCst);
        scene.lose(loss);
        lost.store(2, Ordering::SeqCst);
        assert!(bounced.into_iter().all(|bounced| bounced.join().unwrap() == BYTES));
        asked.into_iter().map(|asked| asked.join().unwrap()).collect()
    });
    drop(streams);
    for _ in 0..2 * STREAMS {
        assert_eq!(peer.line(), "whole");
    }
    pauses
}

fn show(what: &str, pauses: &mut [Duration]) {
    pauses.sort();
    let at = |part: usize| pauses.get(pauses.len() * part / 100).copied().unwrap_or_default();
    let last = pauses.last().copied().unwrap_or_default();
    println!("{what}: median {:.1?}, p99 {:.1?}, longest {last:.1?}", at(50), at(99));
}

#[test]
fn requests_and_bulk_go_on_when_daemons_end() {
    let seed = std::env::var("SMC_SEED").map_or(1, |text| text.parse().unwrap());
    let mut random: u64 = seed;
    let losses = [Loss::Left, Loss::Killed];
    let mut pauses = losses.map(|_| Vec::new());
    for run in 0..runs().max(2) as usize {
        note(format!("seed {seed}, run {run}"));
        let kind = run % losses.len();
        // Knuth's generator; its high bits are the good ones.
        random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        let found = watched(LIMIT, || end_one(losses[kind], (random >> 33) as usize));
        pauses[kind].extend(found);
    }
    let [left, killed] = &mut pauses;
    show("SIGTERM", left);
    show("kill -9", killed);
}
