// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Tests that need all processors: they measure, or have many guests. `cargo xtask vm` runs them when
//! no other test has guests.

use std::thread;

use smc_tests::vm::{Bed, Guest, Vm};

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

/// Bytes per second of a transfer between two guests.
#[track_caller]
fn throughput(guest: &Guest, server: &Guest) -> f64 {
    let to = format!("{}:7000", server.ip());
    let json = guest.ok([
        "smc",
        "perf",
        "--device",
        "pci",
        "--to",
        &to,
        "bulk",
        "--json",
        "--runs",
        "3",
        "--seconds",
        "1",
    ]);
    let lines = json.lines().filter_map(|line| serde_json::from_str(line).ok());
    let rate = lines.filter_map(|line: serde_json::Value| line["smc"].as_f64()).next();
    rate.unwrap_or_else(|| panic!("no rate in {json}"))
}

#[test]
fn a_guest_that_registers_and_drops_at_full_speed_leaves_others_their_throughput() {
    let bed = Bed::alone();
    let [a, b, c] = bed.boot([Vm::named("a"), Vm::named("b"), Vm::named("c").another_ism()]);
    let server = a.spawn(["smc", "perf", "--device", "pci", "--serve", "7000"]);
    server.wait_for("serving");
    // What is compared is the daemon's doing: the third guest is as busy with itself meanwhile, and
    // there may be fewer processors than guests.
    let busy = c.spawn("while true; do :; done");
    let quiet = throughput(&b, &a);
    busy.kill();
    let mut churn = rogue(&c, &["churn", "pci", "own", "3600"]);
    println!("{}", churn.line());
    let before = bed.counters("c").counts.commands;
    let disturbed = throughput(&b, &a);
    let commands = bed.counters("c").counts.commands - before;
    let again = c.spawn("true");
    drop((churn, again));
    println!(
        "{quiet:.0} MiB/s beside a busy guest, {disturbed:.0} MiB/s beside one that sent the \
         daemon {commands} commands: {:.2}",
        disturbed / quiet
    );
    assert!(commands > 1000, "{commands}");
    assert!(disturbed >= 0.7 * quiet, "{disturbed} of {quiet}");
}
