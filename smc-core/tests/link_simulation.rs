// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Two hosts, their link groups and connections, and faults: see `smc_core::testing::links`.
//!
//! A failing run prints the command for its repetition. `SMC_SIM_SEED=0x1234` runs this seed alone,
//! `SMC_SIM_STEPS=5000` sets the duration of its faults, `SMC_SIM_RUNS=100000` runs so many seeds
//! from `SMC_SIM_FROM` on, `SMC_SIM_TRACE=1` prints the events.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on may stop")]

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use smc_core::testing::links::{Report, Simulation};

const RUNS: u64 = 600;
const STEPS: u64 = 4000;

fn number(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    let digits = text.strip_prefix("0x");
    Some(digits.map_or_else(|| text.parse(), |hex| u64::from_str_radix(hex, 16)).unwrap())
}

fn simulate(seed: u64, steps: u64) -> Report {
    let run = || Simulation::new(seed).run(steps);
    let result = catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|panic| {
        eprintln!(
            "panicked: SMC_SIM_SEED={seed:#x} SMC_SIM_STEPS={steps} \
             cargo test -p smc-core --test link_simulation"
        );
        resume_unwind(panic)
    });
    result.unwrap_or_else(|failure| panic!("{failure}"))
}

/// Runs that found mistakes, each named by its mistake.
mod regressions {
    use super::simulate;

    #[test]
    fn both_ends_delete_a_link_at_the_same_moment() {
        simulate(0x1, 4000);
    }

    #[test]
    fn a_server_with_an_asymmetric_link_asks_with_a_valid_mtu() {
        simulate(0x221, 4000);
    }

    #[test]
    fn a_peer_reads_faster_than_completions_are_seen() {
        simulate(0x50e, 4000);
    }

    #[test]
    fn both_ends_call_the_same_link_asymmetric() {
        simulate(0x404, 4000);
    }

    #[test]
    fn a_request_for_a_link_overtakes_confirm_link() {
        simulate(0x12a, 4000);
    }
}

// Shows: LLC-57, LG-2, LG-7, LG-9, LG-13, LG-27, LG-30, LG-35, RMB-26, RMB-30.
#[test]
fn links_come_and_go_and_no_byte_is_lost() {
    let steps = number("SMC_SIM_STEPS").unwrap_or(STEPS);
    let seeds = match number("SMC_SIM_SEED") {
        Some(seed) => seed..seed + 1,
        None => {
            let first = number("SMC_SIM_FROM").unwrap_or(0);
            first..first + number("SMC_SIM_RUNS").unwrap_or(RUNS)
        }
    };
    let begin = std::time::Instant::now();
    let mut all = Report::default();
    for seed in seeds {
        let report = simulate(seed, steps);
        all.steps += report.steps;
        all.time += report.time;
        all.groups += report.groups;
        all.links += report.links;
        all.connections += report.connections;
        all.completed += report.completed;
        all.reset += report.reset;
        all.failovers += report.failovers;
        all.bytes += report.bytes;
        all.messages += report.messages;
        all.anomalies += report.anomalies;
    }
    let enough = std::env::var_os("SMC_SIM_SEED").is_some() || all.steps < 1_000_000;
    assert!(enough || (all.failovers > 500 && all.completed > 1000), "{all:?} tries little");
    println!("{all:?} in {:?}", begin.elapsed());
}
