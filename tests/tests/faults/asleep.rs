// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Threads asleep on the armed word of their line: with the daemon stopped, and with a peer changing
//! the word at will. Such a peer harms its own connections, and for seconds at most.

use std::io::{ErrorKind, Read, Write};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use guest_driver::{Config, SmcListener, Stack};
use ism_sys::SharedSlice;
use rustix::thread::futex;
use smc_core::wire::Cursor;
use smc_test_support::Stopwatch;
use smc_tests::helper::Helper;
use smc_tests::hostile::{Hostile, Says, slabs};
use smc_tests::raw::Device;
use smc_tests::watch::LIMIT;
use smc_tests::{Dir, Fabric, TIMEOUT, eventually, note, watched};
use virtio_ism_abi::signal::Sleepers;
use virtio_ism_abi::slab::{CONTROL_LEN, line_offset};

use crate::support::{PEER, SOON, StopAtEnd, stage};

#[test]
fn sleepers_of_two_processes_wake_each_other_while_the_daemon_is_stopped() {
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
        let mut round_trip = |n: u32| {
            let (sent, mut back) = ([n as u8; 64], [0; 64]);
            stream.write_all(&sent).unwrap();
            stream.read_exact(&mut back).unwrap();
            assert_eq!(sent, back);
        };
        (0..10).for_each(&mut round_trip);
        note("stops the daemon's process");
        daemon.stop();
        let slow = (0..500).filter(|n| {
            let start = Stopwatch::start();
            round_trip(*n);
            start.elapsed() >= Duration::from_millis(900)
        });
        // A round trip in need of the daemon lasts a second.
        let slow = slow.count();
        assert!(slow <= 5, "{slow} of 500 round trips waited for a recheck");
        daemon.resume();
    });
}

/// The line on whose word a thread of the victim sleeps in one of these ways.
fn asleep(device: &Device, how: Sleepers) -> (SharedSlice, Sleepers) {
    let mut found = None;
    eventually("the victim sleeps", || {
        let lines = slabs(device).into_iter().flat_map(|slab| {
            let tail = slab.len() - CONTROL_LEN;
            (0..8).map(move |line| slab.slice(tail + line_offset(line).unwrap(), 64).unwrap())
        });
        found = lines
            .map(|line| {
                let armed = armed(&line).load(Ordering::SeqCst);
                (line, Sleepers::from_bits_truncate(armed))
            })
            .find(|(_, armed)| armed.intersects(how));
        found.is_some()
    });
    // Between its word and its sleep there are a few microseconds.
    thread::sleep(Duration::from_millis(20));
    found.unwrap()
}

fn armed(line: &SharedSlice) -> &AtomicU32 {
    line.atomic_u32(0).unwrap()
}

/// A victim reading `total` bytes, made to arrive by `attack`.
fn reads(total: usize, attack: impl FnOnce(&Device, &Hostile, &AtomicUsize)) {
    watched(LIMIT, || {
        let stage = stage(Fabric::Window);
        let (hostile, victim) = stage.attack();
        let read = AtomicUsize::new(0);
        thread::scope(|scope| {
            scope.spawn(|| {
                victim.set_read_timeout(Some(TIMEOUT)).unwrap();
                while read.load(Ordering::SeqCst) < total {
                    let n = victim.recv(&mut [0; 10]).unwrap();
                    read.fetch_add(n, Ordering::SeqCst);
                }
            });
            attack(&stage.device, &hostile, &read);
        });
        stage.nobody_else_is_harmed();
    });
}

/// The peer's words after so many bytes sent.
fn sent(bytes: u32) -> Says {
    Says { producer: Cursor::new(0, bytes), ..Says::default() }
}

#[test]
fn a_peer_that_never_wakes_by_the_word_is_slept_for_on_the_device() {
    const MOST: u32 = 20;
    reads(10 * MOST as usize, |device, hostile, read| {
        let mut rounds = 0;
        loop {
            let (line, how) = asleep(device, Sleepers::all());
            if how == Sleepers::KICK {
                break;
            }
            rounds += 1;
            assert!(rounds < MOST, "it goes on trusting");
            let start = Stopwatch::start();
            hostile.say_silently(sent(10 * rounds));
            armed(&line).swap(0, Ordering::SeqCst);
            let all = 10 * rounds as usize;
            eventually("the victim looks", || read.load(Ordering::SeqCst) == all);
            println!("round {rounds}: {:?}", start.elapsed());
            assert!(start.elapsed() < SOON);
        }
        assert!(rounds >= 3, "{rounds} rounds");
        // Asleep on the device, the victim is woken at once.
        hostile.say(sent(10 * MOST));
    });
}

#[test]
fn a_sleeper_that_its_peer_moves_to_another_word_wakes_all_the_same() {
    for round in 0..2 {
        reads(10, |device, hostile, _| {
            let (line, _) = asleep(device, Sleepers::FUTEX);
            let elsewhere = line.atomic_u32(32).unwrap();
            let everybody = i32::MAX as u32;
            let flags = futex::Flags::empty();
            let moved = futex::requeue(armed(&line), flags, 0, everybody, elsewhere);
            println!("moved: {moved:?}");
            if round == 1 {
                armed(&line).store(0x5555_5555, Ordering::SeqCst);
            }
            // The wake-up finds no sleeper.
            hostile.say(sent(10));
        });
    }
    // The victim's own process wakes the thread at once.
    watched(LIMIT, || {
        let stage = stage(Fabric::Window);
        // A recheck, a second later at most, would wake the thread as well.
        let wakes = [(); 4].map(|()| {
            let (_hostile, victim) = stage.attack();
            thread::scope(|scope| {
                let reader = scope.spawn(|| victim.recv(&mut [0; 10]).unwrap());
                let (line, _) = asleep(&stage.device, Sleepers::FUTEX);
                let elsewhere = line.atomic_u32(32).unwrap();
                let everybody = i32::MAX as u32;
                let flags = futex::Flags::empty();
                let _ = futex::requeue(armed(&line), flags, 0, everybody, elsewhere);
                let start = Instant::now();
                victim.shutdown(std::net::Shutdown::Read).unwrap();
                assert_eq!(reader.join().unwrap(), 0);
                start.elapsed()
            })
        });
        let slow = wakes.iter().filter(|wake| **wake >= Duration::from_millis(700)).count();
        assert!(slow <= 1, "{wakes:?}");
        stage.nobody_else_is_harmed();
    });
}

#[test]
fn a_storm_of_wake_ups_and_words_starves_nobody() {
    watched(LIMIT, || {
        let stage = stage(Fabric::Window);
        let (_hostile, victim) = stage.attack();
        let stop = AtomicBool::new(false);
        thread::scope(|scope| {
            let sleeping = scope.spawn(|| {
                victim.set_read_timeout(Some(Duration::from_secs(1))).unwrap();
                let start = Stopwatch::start();
                (victim.recv(&mut [0; 1]).unwrap_err().kind(), start.elapsed())
            });
            let (line, _) = asleep(&stage.device, Sleepers::FUTEX);
            let stop = &stop;
            scope.spawn(move || {
                let mut n = 0u32;
                while !stop.load(Ordering::Relaxed) {
                    n = n.wrapping_add(1);
                    if n.is_multiple_of(2) {
                        armed(&line).store(n / 2, Ordering::SeqCst);
                    }
                    let _ = futex::wake(armed(&line), futex::Flags::empty(), 1);
                }
            });
            let _stop = StopAtEnd(stop);
            let start = Instant::now();
            let mut rounds = 0;
            while rounds < 20 || start.elapsed() < Duration::from_millis(1500) {
                stage.honest_works();
                rounds += 1;
            }
            println!("{rounds} rounds beside the storm");
            let (kind, took) = sleeping.join().unwrap();
            assert_eq!(kind, ErrorKind::WouldBlock);
            assert!(took < SOON, "{took:?}");
        });
        stage.nobody_else_is_harmed();
    });
}
