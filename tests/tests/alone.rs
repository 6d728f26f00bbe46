// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Measurements of a process at rest: processor time, descriptors, mappings, threads. The tests of
//! this file run one after the other.
#![allow(clippy::unwrap_used, reason = "a test ends at its first surprise")]

use std::io::ErrorKind;
use std::net::{Shutdown, TcpStream};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use guest_driver::{Interest, Poller, SmcListener, SmcStream, Stack};
use ism_sys::Doorbell;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::time::{ClockId, clock_gettime};
use smc_tests::leaks::{Devices, Process};
use smc_tests::watch::LIMIT;
use smc_tests::{Bench, Fabric, Pair, TIMEOUT, eventually, note, read_exactly, send_all, watched};

/// Waits for this test's turn.
fn alone() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    // The harness now starts the next test's thread; give the thread time to reach the lock.
    thread::sleep(Duration::from_millis(200));
    turn
}

/// Processor time of this process, user and system.
fn processor_time() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Asserts less than 20 ms of processor time in two seconds.
#[track_caller]
fn is_idle(what: &str) {
    note(what);
    // Let earlier work come to rest.
    thread::sleep(Duration::from_millis(200));
    // On a busy machine the same little work costs more now and then: take the best of three.
    let mut used = Duration::MAX;
    for _ in 0..3 {
        let before = processor_time();
        thread::sleep(Duration::from_secs(2));
        used = processor_time() - before;
        println!("{what}: {used:?} in 2 s");
        if used < Duration::from_millis(20) {
            return;
        }
    }
    panic!("{what}: {used:?}");
}

#[test]
fn idle_daemons_stacks_and_connections_use_no_processor() {
    let _alone = alone();
    watched(LIMIT, || {
        let bench = Bench::new(Fabric::Window, 4);
        is_idle("a daemon without front ends");
        let pair = bench.pair();
        let streams: Vec<_> = (0..50).map(|_| pair.connect()).collect();
        is_idle("50 connections");
        for (client, _) in &streams {
            client.pollable().unwrap();
        }
        is_idle("50 connections with pollable descriptors");
        drop(streams);
        eventually("all are closed", || {
            pair.client.totals().closing + pair.server.totals().closing == 0
        });
    });
}

#[test]
fn sleeping_threads_use_no_processor() {
    let _alone = alone();
    for fabric in [Fabric::Window, Fabric::Move] {
        watched(LIMIT, || {
            let bench = Bench::new(fabric, 2);
            let pair = bench.pair();
            let streams: Vec<_> = (0..10).map(|_| pair.connect()).collect();
            thread::scope(|scope| {
                for (_, server) in &streams {
                    scope.spawn(|| assert_eq!(server.recv(&mut [0; 1]).unwrap(), 0));
                }
                let accepting = scope.spawn(|| pair.listener.accept().unwrap());
                is_idle("10 blocked readers and a listener");
                for (client, _) in &streams {
                    client.shutdown(Shutdown::Write).unwrap();
                }
                drop(TcpStream::connect(pair.addr()).unwrap());
                accepting.join().unwrap();
            });
        });
    }
}

#[test]
fn waiting_pollers_use_no_processor() {
    let _alone = alone();
    watched(LIMIT, || {
        let bench = Bench::new(Fabric::Window, 4);
        let pairs = [bench.pair(), Pair::new(bench.stack(2), bench.stack(3), true)];
        let streams: Vec<_> = pairs.iter().map(Pair::connect).collect();
        let poller = Poller::new(Duration::from_micros(50)).unwrap();
        for (key, (client, server)) in streams.iter().enumerate() {
            server.set_nonblocking(true).unwrap();
            poller.add(server, key as u64, Interest::READ).unwrap();
            // Something has happened before.
            send_all(client, b"x");
            poller.wait(&mut Vec::new(), 8, Some(TIMEOUT)).unwrap();
            eventually("it is read", || server.recv(&mut [0; 1]).is_ok());
        }
        thread::scope(|scope| {
            let waiting = scope.spawn(|| {
                let mut ready = Vec::new();
                while ready.is_empty() {
                    poller.wait(&mut ready, 8, Some(TIMEOUT)).unwrap();
                }
            });
            is_idle("a poller over two stacks");
            send_all(&streams[1].0, b"x");
            waiting.join().unwrap();
        });
    });
}

#[test]
fn half_closed_and_blocked_connections_use_no_processor() {
    let _alone = alone();
    watched(LIMIT, || {
        let bench = Bench::new(Fabric::Window, 2);
        let pair = bench.pair();
        let (half, _half) = pair.connect();
        half.shutdown(Shutdown::Write).unwrap();
        half.pollable().unwrap();
        let (full, unread) = pair.connect();
        full.set_nonblocking(true).unwrap();
        full.send(&vec![1; 1 << 20]).unwrap();
        full.pollable().unwrap();
        // Closed here, and the peer does not close.
        let (closing, open) = pair.connect();
        drop(closing);
        is_idle("a half close, a full ring, a close that waits");
        drop((unread, open));
    });
}

#[test]
fn clients_in_the_middle_of_a_handshake_use_no_processor() {
    let _alone = alone();
    watched(LIMIT, || {
        let bench = Bench::new(Fabric::Window, 1);
        let mut config = bench.config(0);
        config.detect_timeout = Duration::from_secs(20);
        let listener = SmcListener::bind(&Stack::open(config).unwrap(), "127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let accepting = thread::spawn(move || listener.accept().unwrap().0);
        // One says nothing, one as much as could be the beginning of a Proposal, and one ends there.
        let silent = TcpStream::connect(address).unwrap();
        is_idle("a silent client");
        let mut unclear = TcpStream::connect(address).unwrap();
        std::io::Write::write_all(&mut unclear, &[0xe2, 0xd4]).unwrap();
        is_idle("a client that has begun");
        unclear.shutdown(Shutdown::Write).unwrap();
        is_idle("a client that has begun and ended");
        std::io::Write::write_all(&mut &silent, b"plain").unwrap();
        accepting.join().unwrap();
    });
}

/// Connections with every kind of end.
fn some_connections(pair: &Pair) {
    for round in 0..30 {
        let (client, server) = pair.connect();
        send_all(&client, b"hello");
        match round % 5 {
            0 => drop(read_exactly(&server, 5)),
            // Unread.
            1 => drop(eventually("it is there", || server.readable().unwrap() == 5)),
            2 => client.set_linger(Some(Duration::ZERO)).unwrap(),
            3 => {
                server.pollable().unwrap();
                read_exactly(&server, 5);
                client.shutdown(Shutdown::Write).unwrap();
                assert_eq!(server.recv(&mut [0; 1]).unwrap(), 0);
            }
            _ => {
                // One client with bytes of another protocol, and another gone in the middle.
                drop((client, server));
                let mut tcp = TcpStream::connect(pair.addr()).unwrap();
                std::io::Write::write_all(&mut tcp, b"GET /").unwrap();
                drop(pair.listener.accept().unwrap());
            }
        }
    }
    eventually("all are closed", || {
        pair.client.totals().closing + pair.server.totals().closing == 0
    });
}

/// Bytes of two slabs. A device maps a slab itself at its first write there, at any time.
const DEVICE_VIEWS: usize = 2 * ((4 << 20) + (64 << 10));

#[test]
fn nothing_leaks() {
    let _alone = alone();
    for fabric in [Fabric::Window, Fabric::Move, Fabric::Loopback] {
        watched(LIMIT, || {
            let whole = |process: Process| (process.descriptors, process.mapped, process.threads);
            // Resources made once per process: for the first daemon, the first front end, and after
            // the first wake-ups.
            Doorbell::prepare();
            some_connections(&Bench::new(fabric, 2).pair());
            // Threads of these connections may still be ending.
            thread::sleep(Duration::from_millis(300));
            let start = whole(Process::now());
            {
                let bench = Bench::new(fabric, 2);
                let pair = bench.pair();
                // Some descriptors and threads come and go: each time as many as at most before.
                let mut most = whole(Process::now());
                for _ in 0..3 {
                    some_connections(&pair);
                    let now = whole(Process::now());
                    most = (most.0.max(now.0), most.1.max(now.1), most.2.max(now.2));
                }
                let devices = Devices::of(bench.daemon());
                for _ in 0..6 {
                    some_connections(&pair);
                }
                println!("{most:?} {devices:?}");
                let begun = Instant::now();
                let mut now = whole(Process::now());
                while now.0 > most.0 || now.1 > most.1 + DEVICE_VIEWS || now.2 > most.2 {
                    assert!(
                        begun.elapsed() < TIMEOUT,
                        "{now:?} are there, before at most {most:?}"
                    );
                    thread::sleep(Duration::from_millis(5));
                    now = whole(Process::now());
                }
                // How many DMBs the pools hold depends on how many connections were open at once.
                eventually("every DMB is in a pool", || {
                    let pooled = pair.client.totals().pooled + pair.server.totals().pooled;
                    Devices::of(bench.daemon()).dmbs == pooled as u64
                });
                assert_eq!(Devices::of(bench.daemon()).slabs, devices.slabs);
                drop(pair);
            }
            note("waits for threads to end");
            let ended = Instant::now();
            let mut end = whole(Process::now());
            while end.0 > start.0 || end.1 > start.1 || end.2 > start.2 {
                assert!(ended.elapsed() < TIMEOUT, "{end:?} is left, before: {start:?}");
                thread::sleep(Duration::from_millis(5));
                end = whole(Process::now());
            }
        });
    }
}

/// Runs `body` with room for this many more descriptors.
fn with_room_for<T>(more: u64, body: impl FnOnce() -> T) -> T {
    use std::os::fd::AsRawFd;
    let limit = getrlimit(Resource::Nofile);
    let next = std::fs::File::open("/dev/null").unwrap();
    let current = Some(next.as_raw_fd() as u64 + more);
    drop(next);
    setrlimit(Resource::Nofile, Rlimit { current, maximum: limit.maximum }).unwrap();
    let value = body();
    setrlimit(Resource::Nofile, limit).unwrap();
    value
}

const EMFILE: Option<i32> = Some(24);

#[test]
fn running_out_of_descriptors_is_an_error_and_no_end() {
    let _alone = alone();
    watched(LIMIT, || {
        let bench = Bench::new(Fabric::Window, 2);
        let pair = bench.pair();
        let (client, server) = pair.connect();
        let works = || {
            send_all(&client, b"still");
            assert_eq!(read_exactly(&server, 5), b"still");
        };
        let addr = pair.addr();
        let error = with_room_for(0, || SmcStream::connect(&pair.client, addr).unwrap_err());
        assert_eq!(error.raw_os_error(), EMFILE, "{error}");
        let error = with_room_for(0, || client.pollable().unwrap_err());
        assert_eq!(error.raw_os_error(), EMFILE, "{error}");
        let error = with_room_for(1, || client.pollable().unwrap_err());
        assert_eq!(error.raw_os_error(), EMFILE, "{error}");
        works();
        client.pollable().unwrap();

        // A waiting client, and no descriptor for the client's connection at the server.
        pair.listener.set_nonblocking(true).unwrap();
        let mut waiting = TcpStream::connect(addr).unwrap();
        std::io::Write::write_all(&mut waiting, b"plain").unwrap();
        thread::sleep(Duration::from_millis(50));
        let error = with_room_for(0, || pair.listener.accept().unwrap_err());
        assert_eq!(error.raw_os_error(), EMFILE, "{error}");
        works();
        let mut accepted = None;
        eventually("the client is taken when there is room again", || {
            match pair.listener.accept() {
                Ok((stream, _)) => accepted = Some(stream),
                Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock),
            }
            accepted.is_some()
        });
        assert_eq!(read_exactly(&accepted.unwrap(), 5), b"plain");

        pair.listener.set_nonblocking(false).unwrap();
        let (client, server) = pair.connect();
        send_all(&client, b"again");
        assert_eq!(read_exactly(&server, 5), b"again");
    });
}
