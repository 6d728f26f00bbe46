// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Tests in need of every processor, for measurements or many guests. `cargo xtask vm` runs them while
//! no other test has guests.

use std::thread;
use std::time::Duration;

use smc_tests::vm::{Bed, Guest, Run, Vm};

use crate::ends::{Client, serve};
use crate::faults::rogue;

#[test]
fn sixteen_guests_talk_in_a_circle() {
    const NAMES: [&str; 16] =
        ["a", "b", "c", "d", "e", "f", "g", "h", "i", "j", "k", "l", "m", "n", "o", "p"];
    let bed = Bed::alone();
    let guests = bed.boot(NAMES.map(|name| Vm::named(name).mem("192M")));
    // A device belongs to one process: every second guest serves its two neighbours.
    let _servers: Vec<_> = guests.iter().step_by(2).map(serve).collect();
    thread::scope(|scope| {
        for n in (1..guests.len()).step_by(2) {
            let guests = &guests;
            scope.spawn(move || {
                for server in [n - 1, (n + 1) % guests.len()] {
                    let mut client = Client::new(&guests[n], &guests[server]);
                    client.connect();
                    client.end();
                }
            });
        }
    });
    let daemon = std::fs::read_to_string(format!("/proc/{}/status", bed.daemon_pid())).unwrap();
    let resident = daemon.lines().filter(|line| line.starts_with("Rss"));
    println!("the daemon of sixteen guests: {}", resident.collect::<Vec<_>>().join(", "));
    bed.assert_faultless();
}

/// How often both are measured, at most.
const ROUNDS: usize = 20;
/// How long a measurement may take on a busy host.
const LIMIT: Duration = Duration::from_secs(300);
const SIGCONT: i32 = 18;
const SIGSTOP: i32 = 19;

/// MiB per second of a transfer between two guests, if carried by SMC.
#[track_caller]
fn throughput(guest: &Guest, server: &Guest) -> Option<f64> {
    let to = format!("{}:7000", server.ip());
    let measured = ["bulk", "--json", "--runs", "1", "--seconds", "1"];
    let words = [&["smc", "perf", "--device", "pci", "--to", &to], &measured[..]].concat();
    let json = guest.ok(Run::from(&words[..]).within(LIMIT));
    let lines = json.lines().filter_map(|line| serde_json::from_str(line).ok());
    lines.filter_map(|line: serde_json::Value| line["smc"].as_f64()).next()
}

// The comparison is about the daemon: the third guest is as busy with itself in the other measurement,
// and there may be fewer processors than guests. Other work of the host may slow one of two
// measurements at any time. So the measurements alternate until one pair is right: a daemon letting
// one guest slow another would spoil every pair.
#[test]
fn a_guest_that_registers_and_drops_at_full_speed_leaves_others_their_throughput() {
    let bed = Bed::alone();
    let [a, b, c] = bed.boot([Vm::named("a"), Vm::named("b"), Vm::named("c").another_ism()]);
    let server = a.spawn(["smc", "perf", "--device", "pci", "--serve", "7000"]);
    server.wait_for("serving");
    let mut churn = rogue(&c, &["churn", "pci", "own", "36000"]);
    println!("{}", churn.line());
    let fits = (0..ROUNDS).any(|_| {
        churn.signal(SIGSTOP);
        let busy = c.spawn("while true; do :; done");
        let quiet = throughput(&b, &a);
        busy.kill();
        churn.signal(SIGCONT);
        let before = bed.counters("c").counts.commands;
        let disturbed = throughput(&b, &a);
        let commands = bed.counters("c").counts.commands - before;
        println!(
            "MiB/s beside a busy guest {quiet:.0?}, beside one that sent the daemon {commands} \
             commands {disturbed:.0?}"
        );
        let (Some(quiet), Some(disturbed)) = (quiet, disturbed) else { return false };
        commands > 1000 && disturbed >= 0.7 * quiet
    });
    assert!(fits, "none of {ROUNDS} pairs of measurements is as it has to be");
}
