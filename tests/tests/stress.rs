// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Many connections doing random things against a model, with a seed.
//!
//! Each direction of a connection is a stream of a known pattern: every read must return the next
//! bytes, and the end of data may come only at the writer's end. If one end gives a connection up, the
//! connection may end anywhere, and by an error; bytes read before are right all the same.
//!
//! `SMC_STRESS_SEED` repeats a run (as far as threads can be repeated), `SMC_STRESS_SECONDS` makes the
//! run longer.
#![allow(clippy::unwrap_used, reason = "a test ends at its first surprise")]

use std::collections::HashMap;
use std::io::{ErrorKind, IoSlice, IoSliceMut, Read, Write};
use std::net::Shutdown;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use guest_driver::{SmcStream, Stack};
use smc_tests::bytes::{check, fill};
use smc_tests::leaks::Devices;
use smc_tests::{Bench, Fabric, Pair, Rng, eventually, note, read_exactly, send_all, watched};

/// Connections at the same time; each has four threads.
const WORKERS: u64 = 4;

/// The planned end of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    /// Both ends write everything, read everything, and close.
    Orderly,
    /// One end closes after so many bytes read, with whatever is left unread.
    GivenUp { by_client: bool, after: u64 },
    /// The same, by a reset.
    Reset { by_client: bool, after: u64 },
}

/// Both ends' common knowledge of a connection.
struct Plan {
    seed: u64,
    fate: Fate,
    /// Bytes of the two directions, the client's first.
    len: [u64; 2],
    /// Whether the client, and the server, has written everything.
    finished: [AtomicBool; 2],
}

impl Plan {
    fn new(seed: u64) -> Plan {
        let mut rng = Rng::new(seed);
        let mut len =
            || u64::from(if rng.one_in(3) { rng.below(1 << 20) } else { rng.below(5000) });
        let len = [len(), len()];
        let (by_client, after) = (rng.one_in(2), u64::from(rng.below(200_000)));
        let fate = match rng.below(6) {
            0 => Fate::GivenUp { by_client, after },
            1 => Fate::Reset { by_client, after },
            _ => Fate::Orderly,
        };
        Plan { seed, fate, len, finished: Default::default() }
    }

    fn is_orderly(&self) -> bool {
        self.fate == Fate::Orderly
    }

    /// After how many bytes this end stops to read.
    fn limit(&self, client: bool) -> Option<u64> {
        match self.fate {
            Fate::GivenUp { by_client, after } | Fate::Reset { by_client, after } => {
                (by_client == client).then_some(after)
            }
            Fate::Orderly => None,
        }
    }
}

/// Checks the error of a call: of a right kind, and never on an orderly connection.
#[track_caller]
fn judge(plan: &Plan, what: &str, error: &std::io::Error) {
    use ErrorKind::{BrokenPipe, ConnectionAborted, ConnectionReset};
    let broken = matches!(error.kind(), BrokenPipe | ConnectionAborted | ConnectionReset);
    assert!(broken, "{what}: {error}, seed {:#x}, {:?}", plan.seed, plan.fate);
    assert!(!plan.is_orderly(), "{what}: {error} out of nothing, seed {:#x}", plan.seed);
}

fn write_side(mut stream: &SmcStream, plan: &Plan, client: bool, stop: &AtomicBool) {
    let me = usize::from(!client);
    let mut rng = Rng::new(plan.seed ^ (0xaaaa + me as u64));
    let (len, mut at, mut piece) = (plan.len[me], 0u64, vec![0; 100_000]);
    while at < len {
        if stop.load(Ordering::Relaxed) {
            return;
        }
        let most = [8, 500, 20_000, 100_000][rng.below(4) as usize];
        let n = u64::from(1 + rng.below(most)).min(len - at) as usize;
        fill(plan.seed + me as u64, at as usize, &mut piece[..n]);
        note(format!("seed {:#x}: writes {n} at {at} of {len}", plan.seed));
        let (a, b) = piece[..n].split_at(rng.below(n as u32) as usize);
        let result = match rng.one_in(8) {
            true => stream.write_vectored(&[IoSlice::new(a), IoSlice::new(b)]),
            false => stream.write(&piece[..n]),
        };
        match result {
            Ok(n) => at += n as u64,
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(error) => return judge(plan, "write", &error),
        }
        if rng.one_in(40) {
            thread::sleep(Duration::from_micros(rng.below(2000).into()));
        }
    }
    plan.finished[me].store(true, Ordering::SeqCst);
    match stream.shutdown(Shutdown::Write) {
        Ok(()) => {}
        // TCP's word for "reset meanwhile".
        Err(error) if error.kind() == ErrorKind::NotConnected => assert!(!plan.is_orderly()),
        Err(error) => judge(plan, "shutdown", &error),
    }
}

fn read_side(mut stream: &SmcStream, plan: &Plan, client: bool) {
    let peer = usize::from(client);
    let (seed, len) = (plan.seed + peer as u64, plan.len[peer]);
    let mut rng = Rng::new(plan.seed ^ (0x5555 + peer as u64));
    let (mut at, mut buf) = (0u64, vec![0; 70_000]);
    loop {
        if plan.limit(client).is_some_and(|limit| at >= limit) {
            return;
        }
        let most = [16, 1000, 70_000][rng.below(3) as usize];
        let want = 1 + rng.below(most - 1) as usize;
        note(format!("seed {:#x}: reads {want} at {at} of {len}", plan.seed));
        let peek = rng.one_in(8);
        let result = if peek {
            stream.peek(&mut buf[..want])
        } else if rng.one_in(8) {
            let (a, b) = buf[..want].split_at_mut(want / 2);
            stream.read_vectored(&mut [IoSliceMut::new(a), IoSliceMut::new(b)])
        } else {
            stream.read(&mut buf[..want])
        };
        match result {
            Ok(0) if plan.is_orderly() => {
                assert!(plan.finished[peer].load(Ordering::SeqCst), "the end came before the end");
                assert_eq!(at, len, "bytes are missing, seed {:#x}", plan.seed);
                return;
            }
            Ok(0) => return,
            Ok(n) => {
                check(seed, at as usize, &buf[..n]);
                at += if peek { 0 } else { n as u64 };
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(error) => return judge(plan, "read", &error),
        }
        if rng.one_in(60) {
            thread::sleep(Duration::from_micros(rng.below(3000).into()));
        }
    }
}

/// One end of a connection, from its first byte to its close.
fn live(stream: SmcStream, plan: &Plan, client: bool) {
    let mut rng = Rng::new(plan.seed ^ u64::from(client));
    if rng.one_in(3) {
        let limit = Some(Duration::from_millis(1 + u64::from(rng.below(20))));
        stream.set_read_timeout(limit).unwrap();
        stream.set_write_timeout(limit).unwrap();
    } else if plan.limit(client).is_some() {
        // An end about to give up must not be stuck in a write.
        stream.set_write_timeout(Some(Duration::from_millis(50))).unwrap();
    }
    if rng.one_in(4) {
        // Readiness is kept up to date from now on.
        stream.pollable().unwrap();
    }
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let name = format!("writer-{client}");
        thread::Builder::new()
            .name(name)
            .spawn_scoped(scope, || write_side(&stream, plan, client, &stop))
            .unwrap();
        read_side(&stream, plan, client);
        stop.store(plan.limit(client).is_some(), Ordering::Relaxed);
    });
    if let (Fate::Reset { .. }, Some(_)) = (plan.fate, plan.limit(client)) {
        stream.set_linger(Some(Duration::ZERO)).unwrap();
    }
}

type Plans = Mutex<HashMap<u64, Arc<Plan>>>;

fn stress(bench: &Bench, seed: u64, time: Duration) {
    println!("{:?}: seed {seed:#x} (SMC_STRESS_SEED)", bench.fabric());
    let open = |n: usize, recv_buffer| {
        let mut config = bench.config(n);
        config.recv_buffer = recv_buffer;
        config.testing.close_timeout = Duration::from_secs(5);
        Stack::open(config).unwrap()
    };
    let pair = Pair::new(open(0, 64 << 10), open(1, 16 << 10), bench.is_smc());
    let clients = [pair.client.clone(), open(2, 256 << 10), open(3, 32 << 10)];
    let (plans, done) = (Plans::default(), AtomicU64::new(0));
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            loop {
                let (stream, _) = pair.listener.accept().unwrap();
                if over.load(Ordering::SeqCst) {
                    return;
                }
                let (plans, done) = (&plans, &done);
                scope.spawn(move || {
                    let id = read_exactly(&stream, 8).try_into().unwrap();
                    let plan = plans.lock().unwrap()[&u64::from_be_bytes(id)].clone();
                    live(stream, &plan, false);
                    done.fetch_add(1, Ordering::SeqCst);
                });
            }
        });
        let workers: Vec<_> = (0..WORKERS)
            .map(|worker| {
                let (pair, plans, clients) = (&pair, &plans, &clients);
                scope.spawn(move || {
                    let end = Instant::now() + time;
                    let mut rng = Rng::new(seed ^ (worker << 32));
                    while Instant::now() < end || plans.lock().unwrap().len() <= 10 {
                        let plan = Arc::new(Plan::new(rng.bits()));
                        plans.lock().unwrap().insert(plan.seed, plan.clone());
                        let client = &clients[rng.below(3) as usize];
                        let stream = SmcStream::connect(client, pair.addr()).unwrap();
                        assert_eq!(stream.is_smc(), bench.is_smc(), "{}", stream.info());
                        send_all(&stream, &plan.seed.to_be_bytes());
                        live(stream, &plan, true);
                    }
                })
            })
            .collect();
        let failed = workers.into_iter().filter_map(|worker| worker.join().err()).next();
        over.store(true, Ordering::SeqCst);
        drop(std::net::TcpStream::connect(pair.addr()));
        if let Some(panic) = failed {
            std::panic::resume_unwind(panic);
        }
    });
    let made = plans.lock().unwrap().len();
    println!("{made} connections, {} ended at the server", done.load(Ordering::SeqCst));
    eventually("all connections are closed", || {
        clients.iter().chain([&pair.server]).all(|stack| stack.totals().closing == 0)
    });
    if bench.is_smc() {
        eventually("what is left is in pools", || {
            let stacks = clients.iter().chain([&pair.server]);
            let pooled: usize = stacks.map(|stack| stack.totals().pooled).sum();
            Devices::of(bench.daemon()).dmbs == pooled as u64
        });
    }
}

fn run(fabric: Fabric) {
    let number = |name| std::env::var(name).ok().and_then(|text: String| text.parse().ok());
    let seed = number("SMC_STRESS_SEED").unwrap_or_else(|| {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        now.unwrap().as_nanos() as u64
    });
    let time = Duration::from_secs(number("SMC_STRESS_SECONDS").unwrap_or(3));
    watched(time * 4 + Duration::from_secs(60), || {
        let bench = Bench::new(fabric, 4);
        stress(&bench, seed, time);
        bench.assert_faultless();
    });
}

smc_test_support::tests_of! {
    run:
    fn random_connections_over_window_keep_to_the_model(Fabric::Window);
    fn random_connections_over_moves_keep_to_the_model(Fabric::Move);
    fn random_connections_over_loopback_keep_to_the_model(Fabric::Loopback);
    fn random_connections_over_tcp_keep_to_the_model(Fabric::Fallback);
}
