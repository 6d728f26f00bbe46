// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! One of three guests attacks the others in every way at once, for a given time.

use std::env;
use std::fs;
use std::thread;
use std::time::{Duration, Instant};

use smc_tests::TIMEOUT;
use smc_tests::vm::{Bed, Guest, Job, Run, Vm};

use crate::ends::{Client, PORT, serve};

/// Default duration of the attacks, in seconds, without `SMC_VM_HOSTILE_SECONDS`.
const SECONDS: u64 = 10;

/// Tolerated growth of the daemon's descriptors, threads and mappings. A device starts a thread, with
/// its stack in a mapping, at its first need. A leak with each of thousands of DMBs, wakes and clients
/// would be far more.
const SPARE: [usize; 3] = [16, 12, 64];

/// The daemon's descriptors, threads and mappings.
fn held(bed: &Bed) -> [usize; 3] {
    let proc = format!("/proc/{}", bed.daemon_pid());
    let entries = |name: &str| fs::read_dir(format!("{proc}/{name}")).unwrap().count();
    let maps = fs::read_to_string(format!("{proc}/maps")).unwrap();
    [entries("fd"), entries("task"), maps.lines().count()]
}

fn rogue(guest: &Guest, words: &[&str], seconds: u64) -> Job {
    let words = ["smc-test-peer", "rogue"].iter().chain(words).map(ToString::to_string);
    guest.spawn(Run::new(words).within(Duration::from_secs(seconds + 120)))
}

/// Echoes of 10,000 bytes, each compared, and each tenth on a new connection. Returns the times taken.
fn transfer(client: &mut Client, mut goes_on: impl FnMut(usize) -> bool) -> Vec<Duration> {
    let mut times = Vec::new();
    while goes_on(times.len()) {
        if times.len() % 10 == 9 {
            client.connect();
        }
        let start = Instant::now();
        client.ping();
        times.push(start.elapsed());
    }
    times.sort();
    times
}

fn print(name: &str, times: &[Duration]) {
    let at = |percent: usize| times[(times.len() - 1) * percent / 100];
    println!(
        "{name}: {} echoes, p50 {:.1?}, p99 {:.1?}, slowest {:.1?}",
        times.len(),
        at(50),
        at(99),
        at(100)
    );
}

/// Runs a program of `smc_tests::rogue` again and again until the time is over, and tells how often.
fn again_and_again(guest: &Guest, what: &str, seconds: u64) -> Job {
    let script = format!(
        "end=$(($(date +%s) + {seconds})); n=0
         while [ $(date +%s) -lt $end ]; do
             smc-test-peer rogue {what} > /dev/null 2>&1; n=$((n + 1))
         done
         echo {what}: $n times"
    );
    guest.spawn(Run::from(script).within(Duration::from_secs(seconds + 120)))
}

/// Every attack at once in the guest `c`, beside a transfer of `client`.
fn worst(c: &Guest, [a, b]: [&Guest; 2], client: &mut Client, seconds: u64) -> Vec<Duration> {
    let [listening, victim] = [a, b].map(|guest| format!("{}:{PORT}", guest.ip()));
    let words = seconds.to_string();
    let mut jobs = [
        rogue(c, &["churn", "pci", "own", &words], seconds),
        rogue(c, &["storm", "pci", "pci", &words], seconds),
        rogue(c, &["loiter", &listening, &words], seconds),
        again_and_again(c, "scribble pci 1", seconds),
        // To another server: a source with loitering clients only waits for its own clients.
        again_and_again(c, &format!("smear pci {victim}"), seconds),
    ];
    thread::scope(|scope| {
        let all = scope.spawn(|| {
            // Two tell their names first.
            jobs.iter_mut().take(2).for_each(|job| drop(job.line()));
            jobs.iter_mut().for_each(|job| println!("{}", job.line()));
        });
        transfer(client, |_| !all.is_finished())
    })
}

#[test]
fn a_guest_that_does_its_worst_all_at_once_stops_nobody() {
    let seconds = env::var("SMC_VM_HOSTILE_SECONDS").map_or(SECONDS, |n| n.parse().unwrap());
    let bed = Bed::with(&["--window-size", "64M"]);
    let hostile = (0..5).fold(Vm::named("c").mem("1G"), |vm, _| vm.another_ism());
    let [a, b, c] = bed.boot([
        Vm::named("a").mem("256M"),
        Vm::named("b").mem("384M").another_ism().append("ism.hugepages=64"),
        hostile.append("ism.hugepages=192"),
    ]);
    let _servers = [serve(&a), serve(&b)];
    let mut client = Client::new(&b, &a);
    client.connect();
    print("before", &transfer(&mut client, |n| n < 50));
    // The daemon's lasting resources of used devices exist after the first time.
    print("beside it", &worst(&c, [&a, &b], &mut client, 5));
    let before = held(&bed);
    print("beside it", &worst(&c, [&a, &b], &mut client, seconds));

    for port in bed.list() {
        println!("faults of {}: {:?}", port.name, port.faults);
        assert!(port.name.starts_with('c') || port.faults.is_empty(), "{port:?}");
    }
    print("after", &transfer(&mut client, |n| n < 50));
    let begun = Instant::now();
    let mut now = held(&bed);
    let most: Vec<usize> = before.iter().zip(SPARE).map(|(before, spare)| before + spare).collect();
    while now.iter().zip(&most).any(|(now, most)| now > most) {
        assert!(
            begun.elapsed() < TIMEOUT,
            "descriptors, threads, mappings: {before:?}, now {now:?}"
        );
        thread::sleep(Duration::from_millis(50));
        now = held(&bed);
    }
    println!("descriptors, threads, mappings: {before:?}, then {now:?}");
    Client::new(&c, &a).connect();
}
