// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `cargo xtask vm perf --rdma`: this project's SMC-R between two guests, next to AF_SMC over the same
//! soft-RoCE and next to TCP. The same program measures each, in turn, several times, every other time
//! in reverse order. The output is medians, and for comparisons the median of the ratios within the
//! rounds. The argument is how often.
#![allow(clippy::unwrap_used, reason = "it ends at its first surprise")]

use std::time::Duration;

use smc_tests::interop::Report;
use smc_tests::vm::{Bed, Guest, Job, Run, Vm};

/// The measured ends, each on a separate port.
const ENDS: [(&str, &str); 3] = [("SMC-R", "rust"), ("AF_SMC", "linux"), ("TCP", "tcp")];
/// The measurements: the cell, its number, its unit, and whether more is better.
const MEASURES: [(&str, &str, usize, &str, bool); 3] = [
    ("bulk", "stream", 32 << 20, "MB/s", true),
    ("64 B there and back", "rounds", 2000, "us, median", false),
    ("connections", "connects", 100, "per second", true),
];

fn main() {
    let runs: usize = std::env::args().nth(1).map_or(5, |text| text.parse().unwrap());
    let bed = Bed::new();
    let [a, b] = bed.boot(["a", "b"].map(|name| Vm::named(name).no_ism().rnics(1).mtu(9000)));
    for guest in [&a, &b] {
        guest.ok(["smc-test-peer", "linux", "ueid", "VIRTIO-ISM"]);
    }
    let mut ends: Vec<[Job; 2]> =
        (5000..).zip(ENDS).map(|(port, (_, who))| pair(&a, &b, who, port)).collect();
    let mut values = vec![vec![Vec::new(); ENDS.len()]; MEASURES.len()];
    // One uncounted run makes the link groups.
    for run in 0..=runs {
        for (measure, (_, cell, number, ..)) in MEASURES.iter().enumerate() {
            let mut order: Vec<_> = ends.iter_mut().enumerate().collect();
            if run % 2 == 1 {
                order.reverse();
            }
            for (end, [server, client]) in order {
                client.feed(&format!("{cell} {number} 1\n"));
                let report = report(client);
                let count = if *cell == "connects" { *number } else { 1 };
                (0..count).for_each(|_| drop(self::report(server)));
                let kind = if ENDS[end].1 == "tcp" { "tcp" } else { "smc-r" };
                assert_eq!(report.carrier.kind, kind, "{}: {report:?}", ENDS[end].0);
                let value = report.note.split(' ').next().unwrap().parse::<f64>().unwrap();
                if run > 0 {
                    values[measure][end].push(value);
                }
            }
        }
        eprintln!("vm-perf-rdma: run {run} of {runs}");
    }
    println!("Medians of {runs} runs; in brackets the least and the most");
    for ((name, _, _, unit, more), values) in MEASURES.iter().zip(&mut values) {
        println!("{name}, {unit}");
        let mut ratios: Vec<f64> = values[0].iter().zip(&values[1]).map(|(a, b)| a / b).collect();
        for ((end, _), values) in ENDS.iter().zip(values) {
            let median = median(values);
            let (least, most) = (values[0], values[values.len() - 1]);
            println!("  {end:<7} {median:9.1}  [{least:.1} .. {most:.1}]");
        }
        let times = median(&mut ratios);
        let good = if *more { times >= 1.0 } else { times <= 1.0 };
        println!("  {times:.2} times AF_SMC{}", if good { "" } else { ", which is worse" });
    }
}

fn pair(a: &Guest, b: &Guest, who: &str, port: u16) -> [Job; 2] {
    let limit = Duration::from_secs(1200);
    let address = format!("0.0.0.0:{port}");
    let server = ["smc-test-peer", "interop", "serve", who, &address];
    let mut server = a.spawn(Run::from(server).within(limit));
    assert_eq!(server.line(), "ready");
    let address = format!("{}:{port}", a.ip());
    let client = ["smc-test-peer", "interop", "talk", who, &address];
    [server, b.spawn(Run::from(client).open_stdin().within(limit))]
}

fn report(job: &mut Job) -> Report {
    let line = job.line();
    let report: Report = serde_json::from_str(&line).unwrap_or_else(|e| panic!("{e}: {line}"));
    assert_eq!(report.error, "", "{report:?}");
    report
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
