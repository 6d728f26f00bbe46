// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Doorbells: event loops wake each other with the daemon stopped, and peers change the counter at
//! will. Such peers harm their own connections, and for a second at most.

use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use guest_driver::{Config, Interest, Poller, SmcListener, SmcStream, Stack};
use ism_sys::Doorbell;
use rustix::fs::OFlags;
use smc_core::wire::Cursor;
use smc_test_support::Stopwatch;
use smc_tests::helper::Helper;
use smc_tests::hostile::{Hostile, Says};
use smc_tests::watch::LIMIT;
use smc_tests::{Dir, Fabric, TIMEOUT, eventually, note, watched};

use crate::support::{PEER, Stage, StopAtEnd, stage};

#[test]
fn an_event_loop_is_woken_by_another_process_while_the_daemon_is_stopped() {
    watched(LIMIT, || {
        let dir = Dir::new();
        let sockets = [0, 1].map(|n| dir.socket(n).display().to_string());
        let (daemon, ready) = Helper::start(PEER, &["daemon", &*sockets[0], &*sockets[1]]);
        assert_eq!(ready, "ready");
        let config = Config { spin: Duration::ZERO, ..Fabric::Window.config(0, &*sockets[0]) };
        let stack = Stack::open(config).unwrap();
        let listener = SmcListener::bind(&stack, "127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let mut peer = Helper::spawn(PEER, &["echo", &*sockets[1], &*address]);
        let (mut stream, _) = listener.accept().unwrap();
        assert_eq!(peer.line(), "connected smc");
        let poller = Poller::new(Duration::ZERO).unwrap();
        poller.add(&stream, 1, Interest::READ).unwrap();
        let mut ready = Vec::new();
        let mut round_trip = |n: u32| {
            let (sent, mut back) = ([n as u8; 64], [0; 64]);
            stream.write_all(&sent).unwrap();
            poller.wait(&mut ready, 8, None).unwrap();
            stream.read_exact(&mut back).unwrap();
            assert_eq!(sent, back);
        };
        (0..20).for_each(&mut round_trip);
        note("stops the daemon's process");
        daemon.stop();
        let slow = (0..500).filter(|n| {
            let start = Stopwatch::start();
            round_trip(*n);
            start.elapsed() >= RECHECK
        });
        // A round trip in need of the daemon lasts a second.
        let slow = slow.count();
        daemon.resume();
        assert!(slow <= 5, "{slow} of 500 round trips waited for a recheck");
    });
}

/// A wait of this length was ended by a recheck.
const RECHECK: Duration = Duration::from_millis(900);

/// Has this process ring from the first time on.
fn warm_up(doorbell: &Doorbell) {
    Doorbell::prepare();
    eventually("this process rings", || doorbell.ring());
}

/// The victim's doorbell, rung by the peer.
fn of_victim(hostile: &Hostile) -> &Doorbell {
    hostile.theirs.doorbell().expect("processes on one kernel have doorbells")
}

/// Waits in a poller for the victim's bytes.
fn await_bytes(victim: &SmcStream, wanted: usize) {
    let poller = Poller::new(Duration::ZERO).unwrap();
    poller.add(victim, 1, Interest::READ).unwrap();
    let (mut ready, mut got) = (Vec::new(), 0);
    while got < wanted {
        poller.wait(&mut ready, 8, None).unwrap();
        got += victim.recv(&mut [0; 10]).unwrap();
    }
}

/// The peer's words after so many bytes sent.
fn sent(bytes: u32) -> Says {
    Says { producer: Cursor::new(0, bytes), ..Says::default() }
}

fn attack(body: impl FnOnce(&Stage, &Hostile, &SmcStream)) {
    watched(LIMIT, || {
        let stage = stage(Fabric::Window);
        let (hostile, victim) = stage.attack();
        warm_up(of_victim(&hostile));
        body(&stage, &hostile, &victim);
        stage.nobody_else_is_harmed();
    });
}

#[test]
fn a_peer_that_takes_its_rings_back_is_heard_within_a_second() {
    attack(|stage, hostile, victim| {
        let stop = AtomicBool::new(false);
        thread::scope(|scope| {
            let stop = &stop;
            let _stop = StopAtEnd(stop);
            let doorbell = of_victim(hostile).as_fd();
            scope.spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    let _ = rustix::io::read(doorbell, &mut [0; 8]);
                }
            });
            let reader = scope.spawn(|| await_bytes(victim, 10));
            thread::sleep(Duration::from_millis(50));
            hostile.say(sent(10));
            let start = Instant::now();
            reader.join().unwrap();
            println!("heard after {:?}", start.elapsed());
            assert!(start.elapsed() < TIMEOUT / 2);
            stage.honest_works();
        });
    });
}

#[test]
fn a_peer_that_fills_the_counter_still_wakes() {
    attack(|_, hostile, victim| {
        let _ = rustix::io::read(of_victim(hostile), &mut [0; 8]);
        rustix::io::write(of_victim(hostile), &(u64::MAX - 1).to_ne_bytes()).unwrap();
        let slow = (1..=8).filter(|n| {
            thread::scope(|scope| {
                let reader = scope.spawn(|| await_bytes(victim, 10));
                // Asleep, most likely.
                thread::sleep(Duration::from_millis(50));
                let start = Stopwatch::start();
                hostile.say(sent(10 * n));
                reader.join().unwrap();
                start.elapsed() >= RECHECK
            })
        });
        let slow = slow.count();
        assert!(slow <= 2, "{slow} of 8 waits ended with a recheck");
    });
}

#[test]
fn an_owner_that_fills_the_counter_of_its_own_doorbell_hangs_nobody_who_rings() {
    attack(|_, hostile, victim| {
        let own = hostile.own.doorbell().expect("the peer's own doorbell");
        let flags = rustix::fs::fcntl_getfl(own).unwrap();
        rustix::fs::fcntl_setfl(own, flags - OFlags::NONBLOCK).unwrap();
        rustix::io::write(own, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        let start = Instant::now();
        for _ in 0..1000 {
            let line = hostile.own.line().unwrap();
            line.take();
            assert!(line.arm());
            assert_eq!(victim.send(&[7]).unwrap(), 1);
        }
        println!("1000 rings in {:?}", start.elapsed());
    });
}

#[test]
fn a_storm_of_rings_starves_nobody() {
    attack(|stage, hostile, victim| {
        let stop = AtomicBool::new(false);
        thread::scope(|scope| {
            let stop = &stop;
            let _stop = StopAtEnd(stop);
            let doorbell = of_victim(hostile);
            scope.spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    let _ = doorbell.ring();
                }
            });
            let reader = scope.spawn(|| await_bytes(victim, 10));
            let (start, mut rounds) = (Instant::now(), 0);
            while rounds < 20 || start.elapsed() < Duration::from_millis(1500) {
                stage.honest_works();
                rounds += 1;
            }
            println!("{rounds} rounds beside the storm");
            hostile.say(sent(10));
            reader.join().unwrap();
        });
    });
}
