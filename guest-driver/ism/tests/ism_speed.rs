// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Cost of the driver, measured against a daemon in this process:
//! `cargo test --release -p virtio-ism --test ism_speed -- --ignored --nocapture`
#![allow(clippy::unwrap_used, reason = "a test that cannot go on may stop")]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use smc_test_support::TestDir;
use vhost_device_ism::config::GuestSpec;
use vhost_device_ism::{Config, Daemon};
use virtio_ism::{IsmDevice, OpenOptions, OwnDmb, PeerDmb, Prefer};

struct World {
    _daemon: Daemon,
    dir: TestDir,
}

impl World {
    fn new(_name: &str) -> World {
        let dir = TestDir::new();
        let guests = vec![GuestSpec::new(dir.join("a")), GuestSpec::new(dir.join("b"))];
        let daemon = Daemon::start(Config { guests, ..Config::default() }).unwrap();
        World { _daemon: daemon, dir }
    }

    fn open(&self, name: &str, prefer: Prefer) -> Arc<IsmDevice> {
        let options = OpenOptions { prefer, ..OpenOptions::new(self.dir.join(name)) };
        IsmDevice::open(options).unwrap()
    }

    fn dmb(&self, prefer: Prefer, len: u32) -> (Arc<IsmDevice>, OwnDmb, PeerDmb) {
        let (a, b) = (self.open("a", prefer), self.open("b", prefer));
        let own = a.register(b.gid(), len, 0).unwrap();
        let peer = b.attach(own.token(), len).unwrap();
        (a, own, peer)
    }
}

fn per_call(n: u32, mut f: impl FnMut(u32)) -> Duration {
    for i in 0..n / 10 {
        f(i);
    }
    let start = Instant::now();
    for i in 0..n {
        f(i);
    }
    start.elapsed() / n
}

#[test]
#[ignore = "a measurement"]
fn deliveries() {
    let world = World::new("deliveries");
    let (_a, _own, peer) = world.dmb(Prefer::Window, 1 << 20);
    let bytes = vec![7; 64 << 10];
    for len in [8, 100, 1000, 4096, 65536] {
        let n = if len > 10_000 { 20_000 } else { 1_000_000 };
        let took = per_call(n, |i| {
            let at = 64 + (i % 8) * (64 << 10);
            peer.deliver(&[(at, &bytes[..len])], [u64::from(i), 0], true).unwrap();
        });
        let rate = len as f64 / took.as_secs_f64() / 1e9;
        println!("window, {len} bytes: {} ns, {rate:.1} GB/s", took.as_nanos());
    }
    drop(peer);
    drop(_own);
    drop(_a);
}

#[test]
#[ignore = "a measurement"]
fn moves() {
    let world = World::new("moves");
    let (a, own, peer) = world.dmb(Prefer::Move, 1 << 20);
    let bytes = vec![7; 64 << 10];
    for len in [100, 4096, 65536] {
        let n = 20_000u32;
        let start = Instant::now();
        for i in 1..=n {
            peer.deliver(&[(64, &bytes[..len])], [u64::from(i), len as u64], false).unwrap();
        }
        while own.words() != [u64::from(n), len as u64] {
            std::hint::spin_loop();
        }
        let took = start.elapsed() / n;
        let rate = len as f64 / took.as_secs_f64() / 1e9;
        println!("moves in a row, {len} bytes: {} ns, {rate:.2} GB/s", took.as_nanos());
        let took = per_call(2000, |i| {
            peer.deliver(&[(64, &bytes[..len])], [u64::from(i), u64::MAX], false).unwrap();
            while own.words() != [u64::from(i), u64::MAX] {
                std::hint::spin_loop();
            }
        });
        println!("one move to a polling owner, {len} bytes: {} ns", took.as_nanos());
    }
    drop((a, own, peer));
}

#[test]
#[ignore = "a measurement"]
fn control_commands() {
    let world = World::new("control");
    let (a, own, _peer) = world.dmb(Prefer::Auto, 1 << 20);
    let user = own.user();
    // Slower than the device's rate limit, so no command is put off.
    let paced = |f: &dyn Fn()| {
        let mut times: Vec<u128> = (0..1000)
            .map(|_| {
                thread::sleep(Duration::from_micros(200));
                let start = Instant::now();
                f();
                start.elapsed().as_micros()
            })
            .collect();
        times.sort_unstable();
        times[times.len() / 2]
    };
    println!("STATS: p50 {} us", paced(&|| assert!(a.stats().is_ok())));
    let register = || drop(a.register(user, 64 << 10, 0).unwrap());
    println!("REGISTER and UNREGISTER: p50 {} us", paced(&register));
}

/// From the sender's raise to the sleeping owner's first instruction.
#[test]
#[ignore = "a measurement"]
fn wake_ups() {
    let world = World::new("wake");
    let (a, own, peer) = world.dmb(Prefer::Window, 1 << 20);
    let epoch = Instant::now();
    let now = move || epoch.elapsed().as_nanos() as u64;
    let (woken_at, asleep, done) =
        (AtomicU64::new(0), AtomicBool::new(false), AtomicBool::new(false));
    let mut times = Vec::new();
    let mut kick_times = Vec::new();
    thread::scope(|scope| {
        scope.spawn(|| {
            let line = own.line().unwrap();
            while !done.load(Ordering::Relaxed) {
                line.take();
                if line.arm() {
                    asleep.store(true, Ordering::Release);
                    a.wait_events(Duration::from_secs(1)).unwrap();
                    woken_at.store(now(), Ordering::Release);
                }
                line.disarm();
                a.poll_events(&mut |_| ()).unwrap();
            }
        });
        for i in 0..3000u64 {
            while !asleep.swap(false, Ordering::Acquire) {
                thread::yield_now();
            }
            thread::sleep(Duration::from_micros(200));
            woken_at.store(0, Ordering::Relaxed);
            let sent = now();
            peer.deliver(&[(64, &[1; 100])], [i, 0], true).unwrap();
            kick_times.push(now() - sent);
            let mut woken = 0;
            while woken == 0 {
                woken = woken_at.load(Ordering::Acquire);
                std::hint::spin_loop();
            }
            times.push(woken.saturating_sub(sent));
        }
        done.store(true, Ordering::Relaxed);
        peer.signal().unwrap();
    });
    for (what, times) in [("kick to wake", &mut times), ("deliver with kick", &mut kick_times)] {
        times.sort_unstable();
        let at = |part: usize| times[times.len() * part / 100] / 1000;
        println!("{what}: p50 {} us, p90 {} us, p99 {} us", at(50), at(90), at(99));
    }
}
