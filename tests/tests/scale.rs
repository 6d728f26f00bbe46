// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Sixteen guests' worth of front ends with a thousand DMBs each: the daemon's use of memory and time.
//!
//! The daemon is a separate process, with its own memory and processor time. The figures are printed
//! (`cargo test -p smc-tests --test scale -- --nocapture`); the asserted limits are wide enough for
//! any machine.
#![allow(clippy::unwrap_used, reason = "a test ends at its first surprise")]

use std::fmt;
use std::fs;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use smc_tests::helper::Helper;
use smc_tests::watch::LIMIT;
use smc_tests::{Dir, eventually, note, watched};
use virtio_ism::{IsmDevice, OpenOptions, OwnDmb, PeerDmb};

const DEVICES: usize = 16;
const DMBS: usize = 1000;
/// Bytes of a DMB: the smallest.
const LEN: u32 = 16 << 10;

/// The kernel's account of a process.
struct Usage {
    /// Private memory, KiB: the daemon's own need.
    private: u64,
    /// Touched shared memory (slabs, guests' rings), KiB.
    shared: u64,
    /// Processor time so far.
    busy: Duration,
    descriptors: usize,
    threads: u64,
}

impl fmt::Display for Usage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Usage { private, shared, descriptors, threads, .. } = self;
        write!(f, "{private} KiB private, {shared} KiB shared, {descriptors} descriptors, ")?;
        write!(f, "{threads} threads")
    }
}

impl Usage {
    fn of(pid: u32) -> Usage {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        let field = |name: &str| -> u64 {
            let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
            line.split_whitespace().next().unwrap().parse().unwrap()
        };
        // The fields behind the name in parentheses: utime and stime are 14th and 15th.
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
        let after: Vec<&str> = stat.rsplit(')').next().unwrap().split_whitespace().collect();
        let ticks: u64 = after[11..13].iter().map(|ticks| ticks.parse::<u64>().unwrap()).sum();
        Usage {
            private: field("RssAnon:"),
            shared: field("RssShmem:"),
            busy: Duration::from_secs(ticks) / rustix::param::clock_ticks_per_second() as u32,
            descriptors: fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count(),
            threads: field("Threads:"),
        }
    }
}

/// Registers one device's DMBs, spread over all others.
fn register(devices: &[Arc<IsmDevice>], n: usize) -> Vec<(usize, OwnDmb)> {
    let others = |i: usize| (n + 1 + i % (devices.len() - 1)) % devices.len();
    (0..DMBS)
        .map(|i| {
            let user = others(i);
            (user, devices[n].register(devices[user].gid(), LEN, (i % 64) as u16).unwrap())
        })
        .collect()
}

#[test]
fn sixteen_devices_with_a_thousand_dmbs_each_cost_the_daemon_little() {
    watched(LIMIT, || {
        let dir = Dir::new();
        let sockets: Vec<_> =
            (0..DEVICES).map(|n| dir.socket(n).to_str().unwrap().to_owned()).collect();
        let mut args = vec!["daemon"];
        args.extend(sockets.iter().map(String::as_str));
        let (daemon, ready) = Helper::start(env!("CARGO_BIN_EXE_smc-test-peer"), &args);
        assert_eq!(ready, "ready");
        let devices: Vec<_> = sockets
            .iter()
            .map(|socket| IsmDevice::open(OpenOptions::new(socket)).unwrap())
            .collect();
        let before = Usage::of(daemon.pid());

        note("registers and attaches");
        let start = Instant::now();
        let owned: Vec<Vec<(usize, OwnDmb)>> = thread::scope(|scope| {
            let jobs: Vec<_> = (0..DEVICES)
                .map(|n| {
                    let devices = &devices;
                    scope.spawn(move || register(devices, n))
                })
                .collect();
            jobs.into_iter().map(|job| job.join().unwrap()).collect()
        });
        let used: Vec<PeerDmb> = owned
            .iter()
            .flatten()
            .map(|(user, dmb)| devices[*user].attach(dmb.token(), LEN).unwrap())
            .collect();
        let took = start.elapsed();
        let full = Usage::of(daemon.pid());

        note("each DMB carries bytes");
        for (dmb, (_, own)) in used.iter().zip(owned.iter().flatten()) {
            dmb.deliver(&[(64, &[7; 64])], [1, 1], true).unwrap();
            assert_eq!(own.words(), [1, 1]);
        }

        note("idles");
        // Earlier work may still be under way.
        let mut idle = Duration::MAX;
        eventually("two seconds without work", || {
            let from = Usage::of(daemon.pid());
            thread::sleep(Duration::from_secs(2));
            idle = Usage::of(daemon.pid()).busy - from.busy;
            idle < Duration::from_millis(100)
        });

        note("lets go");
        let start = Instant::now();
        drop((used, owned));
        let dropped = start.elapsed();

        let commands = (DEVICES * DMBS * 2) as u32;
        println!(
            "{DEVICES} devices, {DMBS} DMBs of {} KiB each, registered and attached",
            LEN >> 10
        );
        println!("  daemon before: {before}");
        println!("  daemon with them: {full}");
        println!(
            "  per DMB {} bytes of private memory; built in {took:?}, {:?} a command, of which the \
             daemon's processor {:?}; let go of in {dropped:?}; 2 s idle cost {idle:?}",
            (full.private.saturating_sub(before.private) << 10) / (DEVICES * DMBS) as u64,
            took / commands,
            (full.busy - before.busy) / commands,
        );
        assert!(full.private - before.private < 64 << 10, "private memory, {full}");
    });
}
