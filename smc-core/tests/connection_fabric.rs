// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Random connections in memory, many seeds: see `smc_core::testing`.
//!
//! `SMC_SEED=0x1234 cargo test -p smc-core --test connection_fabric` runs one seed everywhere;
//! `SMC_RUNS=10000` runs 10000 seeds instead of a handful.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on may stop")]

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use smc_core::testing::{Fabric, Faults, Kind, Options, Report, Rng};

const KINDS: [Kind; 3] = [Kind::SmcD, Kind::SmcR, Kind::SmcRWithoutEyeCatcher];

fn number(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    let digits = text.strip_prefix("0x");
    Some(digits.map_or_else(|| text.parse(), |hex| u64::from_str_radix(hex, 16)).unwrap())
}

/// Runs seed after seed with `options` and random rings; a failing one prints itself.
fn run(runs: u64, options: Options) -> Vec<Report> {
    let seeds = match number("SMC_SEED") {
        Some(seed) => seed..seed + 1,
        None => 0..number("SMC_RUNS").unwrap_or(runs),
    };
    let mut reports = Vec::new();
    for seed in seeds {
        let mut rng = Rng::new(!seed);
        let kind = KINDS[(seed % 3) as usize];
        let mut ring = || if rng.one_in(3) { 2 + rng.below(6) } else { 8 + rng.below(200) };
        let options = Options { kind, rings: [ring(), ring()], ..options };
        let fabric = Fabric::new(seed, options).unwrap();
        let result = catch_unwind(AssertUnwindSafe(|| fabric.run())).unwrap_or_else(|panic| {
            eprintln!("seed {seed:#x} panicked; {options:?}");
            resume_unwind(panic)
        });
        reports.push(result.unwrap_or_else(|failure| panic!("{failure}")));
    }
    reports
}

fn options(bytes: u32, steps: u32, urgent: u32, faults: Faults) -> Options {
    Options {
        kind: Kind::SmcD,
        rings: [64, 64],
        bytes: [bytes, bytes],
        hasty: false,
        steps,
        urgent,
        faults,
    }
}

// Shows: CDC-8, CDC-39, CLOSE-10, CLOSE-15.
#[test]
fn polite_applications_get_every_byte_and_both_ends() {
    for report in run(60, options(2000, u32::MAX, 0, Faults::default())) {
        assert_eq!(report.read, [2000, 2000]);
        assert_eq!(report.failed, [false, false]);
    }
}

// Shows: CLOSE-5.
#[test]
fn a_close_right_behind_the_last_write_loses_nothing() {
    let polite = options(0, u32::MAX, 0, Faults::default());
    for report in run(60, Options { bytes: [2000, 0], hasty: true, ..polite }) {
        assert_eq!(report.read, [0, 2000]);
        assert_eq!(report.failed, [false, false]);
    }
}

// Shows: CDC-8, SOCK-8.
#[test]
fn urgent_bytes_stay_where_they_were_sent() {
    for report in run(60, options(1000, u32::MAX, 4, Faults::default())) {
        assert_eq!(report.read, [1000, 1000]);
        assert_eq!(report.failed, [false, false]);
    }
}

#[test]
fn applications_may_close_at_any_time() {
    run(300, options(2000, 3000, 0, Faults { close: 300, ..Faults::default() }));
    run(100, options(2000, 3000, 5, Faults { close: 300, ..Faults::default() }));
}

// Shows: CLOSE-28, CLOSE-30, CLOSE-31.
#[test]
fn aborts_and_resets_end_both_sides() {
    let faults = Faults { abort: 800, tcp_reset: 800, close: 500, ..Faults::default() };
    run(300, options(2000, 3000, 10, faults));
}

// Shows: CLOSE-20, CLOSE-25.
#[test]
fn a_peer_that_falls_silent_is_given_up() {
    run(200, options(2000, 1000, 10, Faults { stall: 600, close: 1000, ..Faults::default() }));
}

#[test]
fn a_peer_that_lies_harms_only_its_own_connection() {
    let faults = Faults { lie: 100, close: 1000, ..Faults::default() };
    run(300, options(5000, 2000, 10, faults));
}
