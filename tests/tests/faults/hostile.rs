// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A peer lying after a proper handshake: in cursors and flags, and by writing over all memory within
//! reach. Its victim's connection is reset at worst; others are not harmed, and no call hangs.

use std::io::ErrorKind;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use guest_driver::SmcStream;
use smc_core::wire::Cursor;
use smc_core::wire::cdc::{ProducerFlags, StateFlags};
use smc_core::wire::ids::DmbToken;
use smc_test_support::Stopwatch;
use smc_tests::hostile::{self, Hostile, Says, flood, slabs};
use smc_tests::raw::{self, Device, End, LINK, dmbe, propose, put};
use smc_tests::watch::LIMIT;
use smc_tests::{
    Bench, Fabric, Rng, TIMEOUT, eventually, note, pattern, read_exactly, send_all, watched,
};
use virtio_ism_abi::Gid;

use crate::support::{
    Door, SOON, Stage, StopAtEnd, all_closed, is_broken, read_until_it_fails, serves, stage, works,
};

/// Ring of the victim, and of the hostile peer, bytes.
const RING: u32 = hostile::LEN - 32;

/// The victim's reads and writes fail, soon, as on a broken connection.
#[track_caller]
fn is_aborted(victim: &SmcStream, what: &str) {
    note(what);
    let start = Stopwatch::start();
    victim.set_read_timeout(Some(TIMEOUT)).unwrap();
    let mut buf = vec![0; 1 << 20];
    let error = loop {
        match victim.recv(&mut buf) {
            Ok(0) => panic!("{what}: an orderly end"),
            Ok(_) => {}
            Err(error) => break error,
        }
    };
    let kinds = [ErrorKind::ConnectionAborted, ErrorKind::ConnectionReset];
    assert!(kinds.contains(&error.kind()), "{what}: {error}");
    assert!(start.elapsed() < SOON, "{what}: {:?}", start.elapsed());
    let error = victim.send(b"x").unwrap_err();
    assert!(is_broken(error.kind()), "{what}: {error}");
}

/// A lie and its name.
type Lie = (&'static str, Says);

/// Lies noticed by a reader, and lies noticed by a writer.
fn lies() -> (Vec<Lie>, Vec<Lie>) {
    let producer = |wrap, count| Says { producer: Cursor::new(wrap, count), ..Says::default() };
    let consumer = |wrap, count| Says { consumer: Cursor::new(wrap, count), ..Says::default() };
    let of_producer = vec![
        ("producer beyond the window", producer(1, 1)),
        ("producer one round ahead", producer(1, 5000)),
        ("producer skips a wrap", producer(2, 0)),
        ("producer half the sequence ahead", producer(0x8000, 0)),
        ("producer at the end of the sequence", producer(u16::MAX, 0)),
        ("producer outside the ring", producer(0, RING)),
        ("producer far outside the ring", producer(0, u32::MAX)),
    ];
    let of_consumer = vec![
        ("consumer of what was never sent", consumer(0, 1)),
        ("consumer one round ahead", consumer(1, 0)),
        ("consumer outside the ring", consumer(0, u32::MAX)),
        ("consumer before the start", consumer(u16::MAX, RING - 1)),
    ];
    (of_producer, of_consumer)
}

// Shows: SEC-11, SEC-16.
#[test]
fn lying_cursors_reset_the_connection() {
    for fabric in [Fabric::Window, Fabric::Loopback] {
        watched(LIMIT, || {
            let stage = stage(fabric);
            let (of_producer, of_consumer) = lies();
            for (what, says) in of_producer {
                let (hostile, victim) = stage.attack();
                hostile.say(says);
                is_aborted(&victim, what);
                drop(victim);
                assert_eq!(raw::read_to_end(&hostile.tcp).1, End::Reset, "{what}");
            }
            for (what, says) in of_consumer {
                let (hostile, victim) = stage.attack();
                hostile.say(says);
                // A store into the window is there at once.
                assert!(is_broken(victim.send(b"x").unwrap_err().kind()), "{what}");
                is_aborted(&victim, what);
            }
            stage.nobody_else_is_harmed();
        });
    }
}

#[test]
fn a_producer_cursor_that_runs_backwards_resets_the_connection() {
    watched(LIMIT, || {
        let stage = stage(Fabric::Window);
        for back in [(0, 999), (0, 0), (u16::MAX, 1000), (u16::MAX, RING - 1)] {
            let (hostile, victim) = stage.attack();
            hostile.say(Says { producer: Cursor::new(0, 1000), ..Says::default() });
            // The first thousand bytes are fine, and none is read twice.
            read_exactly(&victim, 1000);
            hostile.say(Says { producer: Cursor::new(back.0, back.1), ..Says::default() });
            is_aborted(&victim, &format!("back to {back:?}"));
        }
        stage.nobody_else_is_harmed();
    });
}

#[test]
fn a_consumer_cursor_that_runs_backwards_resets_the_connection() {
    watched(LIMIT, || {
        let stage = stage(Fabric::Window);
        let (hostile, victim) = stage.attack();
        send_all(&victim, &pattern(1, 50_000));
        hostile.say(Says { consumer: Cursor::new(0, 50_000), ..Says::default() });
        send_all(&victim, &pattern(1, 60_000));
        hostile.say(Says { consumer: Cursor::new(0, 40_000), ..Says::default() });
        let start = Stopwatch::start();
        let error = loop {
            match victim.send(&[1; 10_000]) {
                Ok(_) => assert!(start.elapsed() < SOON),
                Err(error) => break error,
            }
        };
        assert!(is_broken(error.kind()), "{error}");
        stage.nobody_else_is_harmed();
    });
}

#[test]
fn every_combination_of_flags_is_survived() {
    watched(LIMIT, || {
        let stage = stage(Fabric::Window);
        for bits in 0..=u8::MAX {
            note(format!("flags {bits:#04x}"));
            let (hostile, victim) = stage.attack();
            let flags = ProducerFlags::from_bits_retain(bits);
            let state = StateFlags::from_bits_retain(bits.rotate_left(4));
            let producer = Cursor::new(0, 10);
            hostile.say(Says { producer, flags, state, ..Says::default() });
            victim.set_nonblocking(true).unwrap();
            let mut buf = [0; 64];
            for _ in 0..3 {
                let _ = victim.recv(&mut buf);
                let _ = victim.send(b"x");
                let _ = victim.has_urgent();
                let _ = victim.recv_urgent();
                let _ = victim.readable();
            }
            let _ = victim.shutdown(std::net::Shutdown::Write);
        }
        stage.nobody_else_is_harmed();
        eventually("the victims are closed", || stage.pair.server.totals().closing == 0);
    });
}

#[test]
fn random_words_in_a_loop_hang_and_harm_nobody() {
    let seed = std::process::id().into();
    println!("seed {seed}");
    watched(LIMIT, || {
        let stage = stage(Fabric::Window);
        let stop = AtomicBool::new(false);
        let end = Instant::now() + Duration::from_secs(2);
        let mut rounds = 0;
        let mut rng = Rng::new(seed);
        thread::scope(|scope| {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    works(&stage.honest.0, &stage.honest.1);
                }
            });
            let _stop = StopAtEnd(&stop);
            while Instant::now() < end {
                let (hostile, victim) = stage.attack();
                victim.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
                victim.set_write_timeout(Some(Duration::from_millis(200))).unwrap();
                let over = AtomicBool::new(false);
                thread::scope(|scope| {
                    let _over = StopAtEnd(&over);
                    scope.spawn(|| {
                        let mut buf = vec![0; 5000];
                        while !victim.recv(&mut buf).is_err_and(|e| is_broken(e.kind())) {
                            if over.load(Ordering::Relaxed) {
                                break;
                            }
                        }
                    });
                    scope.spawn(|| {
                        while !victim.send(&[1; 3000]).is_err_and(|e| is_broken(e.kind())) {
                            if over.load(Ordering::Relaxed) {
                                break;
                            }
                        }
                    });
                    for _ in 0..rng.below(200) {
                        // Mostly near the truth: a lie noticed at once tests little.
                        let near = rng.bits() as u32 % (RING / 8);
                        match rng.below(4) {
                            0 => hostile.words(rng.bits(), rng.bits()),
                            1 => hostile.scribble(0, &pattern(rng.bits(), 64)),
                            _ => hostile.say(Says {
                                producer: Cursor::new(rng.below(2) as u16, near),
                                consumer: Cursor::new(0, near / 2),
                                flags: ProducerFlags::from_bits_retain(rng.bits() as u8 & 0xf0),
                                state: StateFlags::empty(),
                            }),
                        }
                    }
                    thread::sleep(Duration::from_millis(2));
                });
                rounds += 1;
            }
        });
        println!("{rounds} rounds");
        stage.nobody_else_is_harmed();
    });
}

#[test]
fn writing_over_whole_slabs_harms_the_writers_own_connections_only() {
    watched(LIMIT, || {
        let Stage { bench, pair, honest, device } = stage(Fabric::Window);
        drop(device);
        let mut rng = Rng::new(11);
        let stop = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    works(&honest.0, &honest.1);
                }
            });
            let _stop = StopAtEnd(&stop);
            for round in 0..4 {
                note(format!("round {round}"));
                // A device with a slab written over gets no trust again: the nonce is gone.
                eventually("the port is free", || {
                    bench
                        .daemon()
                        .list()
                        .iter()
                        .all(|p| p.spec.name != "port2" || p.device.is_none())
                });
                let device = Device::open(&bench, 2);
                let victims: Vec<_> = (0..3).map(|_| Hostile::connect(&pair, &device)).collect();
                let readers: Vec<_> = victims
                    .iter()
                    .map(|(_, victim)| {
                        let victim = victim.try_clone().unwrap();
                        scope.spawn(move || read_until_it_fails(&victim))
                    })
                    .collect();
                thread::sleep(Duration::from_millis(20));
                let slabs = slabs(&device);
                assert!(slabs.len() >= 2, "the victim's slab and the own one");
                for slab in &slabs {
                    match round {
                        0 => flood(slab, || u64::MAX),
                        1 => flood(slab, || 0),
                        _ => flood(slab, || rng.bits()),
                    }
                }
                if round == 1 {
                    // Zeros alone are no lie.
                    victims.iter().for_each(|(hostile, _)| hostile.words(u64::MAX, 0));
                }
                for (reader, (hostile, _)) in readers.into_iter().zip(&victims) {
                    // In case the flood took the wake-up along.
                    hostile.words(u64::MAX, u64::MAX);
                    assert!(is_broken(reader.join().unwrap()));
                }
            }
        });
        works(&honest.0, &honest.1);
        serves(&pair);
    });
}

#[test]
fn handshakes_of_a_peer_that_destroyed_its_slabs_delay_nobody() {
    watched(LIMIT, || {
        let Stage { bench, pair, honest, device } = stage(Fabric::Window);
        let (hostile, victim) = Hostile::connect(&pair, &device);
        // Both slabs: the server's next DMB for this peer, and this peer's next one for the server.
        slabs(&device).iter().for_each(|slab| flood(slab, || u64::MAX));
        assert!(is_broken(read_until_it_fails(&victim)));
        drop(hostile);
        let door = Door::new(pair);
        let start = Instant::now();
        let attempts: Vec<_> = (0..10).map(|_| propose(door.addr(), &device.config())).collect();
        door.serves();
        println!("served after {:?}", start.elapsed());
        works(&honest.0, &honest.1);
        drop((attempts, bench));
    });
}

#[test]
fn a_storm_of_signals_starves_nobody() {
    watched(LIMIT, || {
        let stage = stage(Fabric::Window);
        let (hostile, victim) = stage.attack();
        let stop = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    let _ = hostile.theirs.signal();
                    for slab in slabs(&stage.device) {
                        // All bits of the lines, armed or not.
                        let tail = slab.len() - virtio_ism_abi::slab::CONTROL_LEN;
                        for line in 0..8 {
                            let at = tail + virtio_ism_abi::slab::line_offset(line).unwrap();
                            slab.atomic_u32(at).unwrap().store(1, Ordering::Relaxed);
                            slab.atomic_u64(at + 8).unwrap().store(u64::MAX, Ordering::Relaxed);
                        }
                    }
                }
            });
            let _stop = StopAtEnd(&stop);
            let sleeping = scope.spawn(|| {
                victim.set_read_timeout(Some(Duration::from_secs(1))).unwrap();
                victim.recv(&mut [0; 1]).unwrap_err().kind()
            });
            let start = Instant::now();
            let mut rounds = 0;
            while rounds < 20 || start.elapsed() < Duration::from_millis(1500) {
                works(&stage.honest.0, &stage.honest.1);
                rounds += 1;
            }
            println!("{rounds} rounds beside the storm");
            assert_eq!(sleeping.join().unwrap(), ErrorKind::WouldBlock);
        });
        stage.nobody_else_is_harmed();
    });
}

#[test]
fn a_peer_that_never_reads_blocks_its_own_connection_only() {
    watched(LIMIT, || {
        let stage = stage(Fabric::Window);
        let (hostile, victim) = stage.attack();
        victim.set_write_timeout(Some(Duration::from_millis(200))).unwrap();
        victim.set_send_buffer(0);
        assert_eq!(victim.send(&vec![1; 1 << 20]).unwrap(), RING as usize);
        assert_eq!(victim.send(b"x").unwrap_err().kind(), ErrorKind::WouldBlock);
        stage.nobody_else_is_harmed();
        // Closing does not wait for the peer, and the buffers come back without any word of the peer.
        let start = Stopwatch::start();
        drop(victim);
        assert!(start.elapsed() < SOON);
        let (honest, device) = (stage.honest, stage.device);
        eventually("the close is over", || stage.pair.server.totals().closing == 0);
        println!("closed after {:?}", start.elapsed());
        works(&honest.0, &honest.1);
        drop((hostile, device));
    });
}

#[test]
fn peers_that_never_close_are_timed_out() {
    watched(LIMIT, || {
        let stage = stage(Fabric::Window);
        let done = Says { state: StateFlags::SENDING_DONE, ..Says::default() };
        let (half, of_half) = stage.attack();
        half.say(done);
        assert_eq!(of_half.recv(&mut [0; 1]).unwrap(), 0);
        let (silent, of_silent) = stage.attack();
        let (mute, of_mute) = stage.attack();
        // Reset by the victim, and never answered.
        of_mute.set_linger(Some(Duration::ZERO)).unwrap();
        let start = Instant::now();
        drop((of_half, of_silent, of_mute));
        eventually("nothing is left of them", || stage.pair.server.totals().closing == 0);
        println!("after {:?}", start.elapsed());
        assert!(start.elapsed() > Duration::from_millis(900));
        stage.nobody_else_is_harmed();
        drop((half, silent, mute));
    });
}

#[test]
fn a_peer_that_resets_wakes_readers_and_writers() {
    watched(LIMIT, || {
        let stage = stage(Fabric::Window);
        let (hostile, victim) = stage.attack();
        thread::scope(|scope| {
            let reading = scope.spawn(|| read_until_it_fails(&victim));
            let writing = scope.spawn(|| crate::support::write_until_it_fails(&victim));
            thread::sleep(Duration::from_millis(50));
            hostile.say(Says { state: StateFlags::ABORT, ..Says::default() });
            assert_eq!(reading.join().unwrap(), ErrorKind::ConnectionReset);
            assert!(is_broken(writing.join().unwrap()));
        });
        stage.nobody_else_is_harmed();
    });
}

#[test]
fn a_dmb_that_is_in_use_cannot_be_offered_again() {
    watched(LIMIT, || {
        let bench = Bench::new(Fabric::Window, 3);
        let pair = bench.pair();
        let device = Device::open(&bench, 2);
        let (hostile, first) = Hostile::connect(&pair, &device);
        let door = Door::new(pair);
        let (tcp, accepted) = propose(door.addr(), &device.config()).accepted();
        let token = hostile.own.token().0;
        let (_, confirm) = accepted.confirm(dmbe(token, hostile::LEN), LINK);
        put(&tcp, &confirm);
        assert_eq!(raw::read_to_end(&tcp).1, End::Reset);
        assert_eq!(door.others(), 0);
        // The first connection is unharmed.
        assert_eq!(first.send(b"fine").unwrap(), 4);
        hostile.scribble(32, b"good");
        hostile.say(Says { producer: Cursor::new(0, 4), ..Says::default() });
        assert_eq!(read_exactly(&first, 4), b"good");
        door.serves();
    });
}

// Shows: RMB-33.
#[test]
fn the_dmb_of_another_peer_cannot_be_offered() {
    watched(LIMIT, || {
        let bench = Bench::new(Fabric::Window, 4);
        let pair = bench.pair();
        let (honest, thief) = (Device::open(&bench, 2), Device::open(&bench, 3));
        // The honest peer's DMB is for the server, in use, or not yet.
        let (good, stream) = Hostile::connect(&pair, &honest);
        let server_gid: Gid = pair.server.devices()[0].1;
        let unused = honest.ism.register(server_gid, hostile::LEN, 0).unwrap();
        let door = Door::new(pair);
        for token in [good.own.token(), unused.token()] {
            let (tcp, accepted) = propose(door.addr(), &thief.config()).accepted();
            let (_, confirm) = accepted.confirm(dmbe(token.0, hostile::LEN), LINK);
            put(&tcp, &confirm);
            assert_eq!(raw::read_to_end(&tcp).1, End::Reset);
        }
        assert_eq!(door.others(), 0);
        assert_eq!(stream.send(b"fine").unwrap(), 4);
        good.scribble(32, b"good");
        good.say(Says { producer: Cursor::new(0, 4), ..Says::default() });
        assert_eq!(read_exactly(&stream, 4), b"good");
        door.serves();
    });
}

// Shows: SEC-8.
#[test]
fn nothing_of_a_connection_is_shown_to_the_next_one() {
    watched(LIMIT, || {
        let stage = stage(Fabric::Window);
        let secret = pattern(99, 3000);
        let token = {
            let (hostile, victim) = stage.attack();
            let DmbToken(token) = DmbToken(hostile.theirs.token().0);
            hostile.scribble(32, &secret);
            hostile.say(Says { producer: Cursor::new(0, 3000), ..Says::default() });
            assert!(read_exactly(&victim, 3000) == secret);
            // Both close in order: the DMB may serve again.
            let state = StateFlags::CLOSED;
            hostile.say(Says { producer: Cursor::new(0, 3000), state, ..Says::default() });
            assert_eq!(victim.recv(&mut [0; 1]).unwrap(), 0);
            drop(victim);
            all_closed(&stage.pair);
            token
        };
        let (hostile, victim) = stage.attack();
        assert_eq!(hostile.theirs.token().0, token, "the same DMB");
        let found = slabs(&stage.device).iter().any(|slab| {
            let mut bytes = vec![0; slab.len()];
            slab.copy_out(0, &mut bytes).unwrap();
            bytes.windows(64).any(|window| window == &secret[64..128])
        });
        assert!(!found, "bytes of the first connection are still there");
        hostile.scribble(32, b"new");
        hostile.say(Says { producer: Cursor::new(0, 3), ..Says::default() });
        assert_eq!(read_exactly(&victim, 3), b"new");
        drop(stage.bench);
    });
}
