// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A thousand clients a second, each with a part of a Proposal and no close, beside proper clients.

use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use guest_driver::{SmcListener, SmcStream, Stack};
use smc_tests::raw::{self, Device, put};
use smc_tests::{Bench, Fabric, TIMEOUT, note, read_exactly, send_all, watched};

use crate::handshake::{allow_descriptors, connect_from};
use crate::support::StopAtEnd;

/// New half-open clients, per second.
const RATE: u32 = 1_000;
/// The attacking clients' address.
const ATTACKER: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 2);
/// Attackers allowed to arrive before half of the other clients are served. On an idle machine so many
/// take 300 ms, and the measurement shows far less; a loaded machine slows the flood, too.
const PROMPT: usize = 300;

/// Echoes a byte to every client except the attacker's.
fn serve(listener: &SmcListener, end: &AtomicBool) {
    while !end.load(Ordering::Relaxed) {
        let Ok((stream, from)) = listener.accept() else { continue };
        if from.ip() != IpAddr::from(ATTACKER) {
            stream.set_read_timeout(Some(TIMEOUT)).unwrap();
            let mut byte = [0];
            if stream.recv(&mut byte).is_ok_and(|n| n == 1) {
                let _ = stream.send(&byte);
            }
        }
    }
}

/// How long a client has waited, and how many half-open ones have come meanwhile.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Wait(Duration, usize);

/// Runs `client`, and measures the time until the client is served.
fn timed(others: &AtomicUsize, client: impl FnOnce()) -> Wait {
    let (start, before) = (Instant::now(), others.load(Ordering::Relaxed));
    client();
    Wait(start.elapsed(), others.load(Ordering::Relaxed) - before)
}

/// A client without SMC; returns when served.
fn plain(addr: SocketAddr) {
    let mut tcp = TcpStream::connect(addr).unwrap();
    tcp.set_read_timeout(Some(TIMEOUT)).unwrap();
    tcp.write_all(b"x").unwrap();
    tcp.read_exact(&mut [0]).unwrap();
}

/// A client with SMC; returns when served.
fn smc(stack: &Arc<Stack>, addr: SocketAddr) {
    let stream = SmcStream::connect(stack, addr).unwrap();
    assert!(stream.is_smc(), "{}", stream.info());
    send_all(&stream, b"x");
    read_exactly(&stream, 1);
}

/// Times of the two kinds of clients, sorted.
struct Served {
    plain: Vec<Wait>,
    smc: Vec<Wait>,
}

impl Served {
    /// Clients one after the other, until `enough` of them were served.
    fn measure(
        stack: &Arc<Stack>,
        addr: SocketAddr,
        others: &AtomicUsize,
        mut enough: impl FnMut(usize) -> bool,
    ) -> Served {
        let mut served = Served { plain: Vec::new(), smc: Vec::new() };
        while !enough(served.plain.len()) {
            served.plain.push(timed(others, || plain(addr)));
            served.smc.push(timed(others, || smc(stack, addr)));
            thread::sleep(Duration::from_millis(5));
        }
        served.plain.sort();
        served.smc.sort();
        served
    }
}

fn at(times: &[Wait], percent: usize) -> Wait {
    times[times.len() * percent / 100]
}

/// A number of /proc/self/status.
fn status(key: &str) -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with(key)).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

/// Floods a server with `count` clients, each with so many bytes of a Proposal, at most the whole.
fn flood(bytes: usize, count: usize) {
    allow_descriptors(count as u64 + 4_000);
    let bench = Bench::new(Fabric::Window, 3);
    let listener = SmcListener::bind(&bench.stack(0), "127.0.0.1:0").unwrap();
    let addr = listener.local_addr().unwrap();
    let client = bench.stack(1);
    let device = Device::open(&bench, 2);
    let (_, proposal) = raw::proposal(&device.config());
    let part = &proposal[..bytes.min(proposal.len())];
    let (end, connected) = (AtomicBool::new(false), AtomicUsize::new(0));
    thread::scope(|scope| {
        scope.spawn(|| serve(&listener, &end));
        // Ends the thread's last wait in `accept`.
        struct Last<'a>(StopAtEnd<'a>, SocketAddr);
        impl Drop for Last<'_> {
            fn drop(&mut self) {
                self.0.0.store(true, Ordering::Relaxed);
                drop(TcpStream::connect(self.1).map(|mut last| last.write_all(b"x")));
            }
        }
        let _last = Last(StopAtEnd(&end), addr);
        note("without a flood");
        let without = Served::measure(&client, addr, &connected, |served| served >= 100);
        let (memory, threads) = (status("VmRSS"), status("Threads"));
        let flood = scope.spawn(|| {
            let start = Instant::now();
            let clients: Vec<TcpStream> = (0..count)
                .map_while(|_| {
                    let due = Instant::now() + Duration::from_secs(1) / RATE;
                    let tcp = connect_from(ATTACKER, addr);
                    put(&tcp, part);
                    connected.fetch_add(1, Ordering::Relaxed);
                    thread::sleep(due.saturating_duration_since(Instant::now()));
                    (!end.load(Ordering::Relaxed)).then_some(tcp)
                })
                .collect();
            (clients, start.elapsed())
        });
        note("beside the flood");
        let with = Served::measure(&client, addr, &connected, |_| flood.is_finished());
        let (grown, more) = (status("VmRSS").saturating_sub(memory), status("Threads"));
        let (clients, took) = flood.join().unwrap();
        let rate = clients.len() as f64 / took.as_secs_f64();
        println!("{} clients of {} bytes, {rate:.0} per second:", clients.len(), part.len());
        for (name, without, with) in
            [("TCP", &without.plain, &with.plain), ("SMC", &without.smc, &with.smc)]
        {
            println!(
                "  {name}: p50 {:.1?} -> {:.1?}, p99 {:.1?} -> {:.1?} ({} served)",
                at(without, 50).0,
                at(with, 50).0,
                at(without, 99).0,
                at(with, 99).0,
                with.len(),
            );
            let mut others: Vec<usize> = with.iter().map(|wait| wait.1).collect();
            others.sort();
            let half = others[others.len() / 2];
            println!("  half of them before {half} others had come");
            assert!(half < PROMPT, "{name}: {half} others came before half of them were served");
        }
        println!("  memory grew by {grown} KiB, threads from {threads} to {more}");
        // Other tests of this process have threads, too, but not hundreds.
        assert!(more < threads + count / 10, "{threads} threads, then {more}");
        assert!(grown < 128 << 10, "{grown} KiB");
    });
}

/// One byte, the header, all.
const PARTS: [usize; 3] = [1, 8, usize::MAX];

#[test]
fn a_thousand_half_open_clients_a_second_delay_nobody() {
    watched(smc_tests::watch::LIMIT, || PARTS.into_iter().for_each(|bytes| flood(bytes, 1_500)));
}

#[test]
#[ignore = "a measurement: cargo test --release -p smc-tests --test faults -- --ignored ten_thousand"]
fn ten_thousand_half_open_clients_delay_nobody() {
    watched(Duration::from_secs(300), || PARTS.into_iter().for_each(|bytes| flood(bytes, 10_000)));
}
