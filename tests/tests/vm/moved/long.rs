// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Migrations one after the other, in each way, under lasting streams and requests.
//!
//! `SMC_MIGRATIONS=100` is the number of the long form (50), and `SMC_SEED` chooses the guests and times.

use std::thread;
use std::time::Duration;

use smc_tests::bytes::Rng;
use smc_tests::vm::{Bed, Way};

use super::machine;
use super::parties::Stuck;
use crate::outlive::{Pauses, Streams, serve};

/// The client and the server, in the order of the guests' names.
const SERVER: usize = 0;
const CLIENT: usize = 1;

/// The ways of the migrations, in turn. One more migration, of the same guest, is cancelled before the last.
const WAYS: [(&str, Way); 4] = [
    ("usual", Way { capabilities: &[], paused: false }),
    ("multifd", Way { capabilities: &["multifd"], paused: false }),
    ("paused", Way { capabilities: &[], paused: true }),
    (
        "auto-converge, after a cancelled one",
        Way { capabilities: &["auto-converge"], paused: false },
    ),
];

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |text| text.parse().unwrap())
}

/// Measurements, in their order.
#[derive(Default)]
struct Measured {
    pauses: Vec<Pauses>,
    /// From the end of a migration until every connection is on a device, by the guest migrated last.
    back: [Vec<Duration>; 2],
    downtime: Vec<Duration>,
}

impl Measured {
    fn print(&self, seed: u64) {
        let n = self.pauses.len();
        println!("{n} migrations, seed {seed}; least, median, most:");
        let row = |what: &str, mut all: Vec<i64>| {
            all.sort_unstable();
            let [least, median, most] = [0, all.len() / 2, all.len().saturating_sub(1)]
                .map(|at| all.get(at).map_or("-".to_owned(), ToString::to_string));
            println!("  {what}, ms: {least}, {median}, {most} ({} times)", all.len());
        };
        let of = |value: fn(&Pauses) -> i64| self.pauses.iter().map(value).collect();
        row("longest pause of a stream", of(|all| all.smc as i64));
        row("longest pause of as many TCP connections beside them", of(|all| all.tcp as i64));
        row("the one over the other", of(|all| all.smc as i64 - all.tcp as i64));
        let millis = |all: &[Duration]| all.iter().map(|time| time.as_millis() as i64).collect();
        row("without a running processor", millis(&self.downtime));
        row("back on a device after the server has come", millis(&self.back[SERVER]));
        row("back on a device after the client has come", millis(&self.back[CLIENT]));
    }
}

#[test]
fn streams_live_through_a_migration_in_each_way() {
    streams_live_through_migrations(&Bed::new(), WAYS.len() as u64, 1);
}

#[test]
#[ignore = "long: cargo xtask vm --slow --show-output --only moved::long"]
fn streams_live_through_many_migrations() {
    let (rounds, seed) = (number("SMC_MIGRATIONS", 50), number("SMC_SEED", 1));
    streams_live_through_migrations(&Bed::alone(), rounds, seed);
}

fn streams_live_through_migrations(bed: &Bed, rounds: u64, seed: u64) {
    let there = bed.another_host();
    let hosts = [bed, &there];
    let mut guests = bed.boot([machine("a"), machine("b")]);
    let mut server = serve(&guests[SERVER], "window");
    let mut client = Streams::new(&guests[CLIENT], &guests[SERVER], "window");
    client.flow();
    let (mut random, mut at, mut measured) = (Rng::new(seed), [0, 0], Measured::default());
    for (round, (name, way)) in (0..rounds).zip(WAYS.into_iter().cycle()) {
        thread::sleep(Duration::from_millis(random.below(1000).into()));
        let who = random.below(2) as usize;
        if round % WAYS.len() as u64 == WAYS.len() as u64 - 1 {
            let stuck = Stuck::begin(bed, &guests[who], "stuck");
            client.leave("cancelled");
            stuck.cancel();
            if at[SERVER] == at[CLIENT] {
                client.come_back("cancelled");
            }
        }
        server.pauses();
        client.pauses();
        at[who] = 1 - at[who];
        let what = format!("round {round}, {name}, guest {}", guests[who].name());
        let moved = guests[who].migrate_as(hosts[at[who]], way, || {});
        measured.downtime.push(moved.downtime);
        if at[SERVER] == at[CLIENT] {
            let took = client.come_back(&what);
            measured.back[who].push(took);
            // A ring with a life as long as the way back counts as a good one.
            thread::sleep(took + Duration::from_secs(1));
        } else {
            client.leave(&what);
            // On different hosts connections are TCP.
            assert_eq!(client.command("open"), "open tcp");
            client.assert_on_tcp();
        }
        // A migrating guest's clock stands still in between.
        let pauses = if who == CLIENT { server.pauses() } else { client.pauses() };
        println!("{what}: {pauses:?}, {moved:?}");
        measured.pauses.push(pauses);
    }
    client.finish("at the end");
    server.assert_whole();
    measured.print(seed);
    hosts.into_iter().for_each(Bed::assert_faultless);
}
