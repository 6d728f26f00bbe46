// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Link groups in simulated time, seed after seed.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use smc_core::testing::links::{Report, Simulation};

/// Steps of one simulation before its faults stop.
const STEPS: u64 = 4_000;

/// Simulates for `steps` in sum, or until `limit` has passed.
///
/// # Errors
/// If a simulation broke a rule or panicked: how to repeat the run.
pub(super) fn run(seed: u64, steps: u64, limit: Duration) -> Result<(u64, Report), String> {
    let start = Instant::now();
    let mut all = Report::default();
    let mut runs = 0;
    while all.steps < steps && start.elapsed() < limit {
        let seed = seed.wrapping_add(runs);
        let one = catch_unwind(AssertUnwindSafe(|| Simulation::new(seed).run(STEPS)));
        let report = match one {
            Ok(Ok(report)) => report,
            Ok(Err(failure)) => return Err(failure.to_string()),
            Err(_) => {
                return Err(format!(
                    "panicked: SMC_SIM_SEED={seed:#x} SMC_SIM_STEPS={STEPS} \
                     cargo test -p smc-core --test link_simulation"
                ));
            }
        };
        runs += 1;
        all.steps += report.steps;
        all.time += report.time;
        all.links += report.links;
        all.connections += report.connections;
        all.completed += report.completed;
        all.failovers += report.failovers;
        all.bytes += report.bytes;
        all.anomalies += report.anomalies;
    }
    Ok((runs, all))
}
