// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The hostile run of `cargo xtask soak`; see `smc_tests::soak`.
//!
//! ```text
//! smc-soak DAEMON SEED OPERATIONS STEPS SECONDS FRONT-ENDS LONGEST-MS [FRONT-END:CONNECTION]
//! ```
#![allow(clippy::unwrap_used, reason = "xtask gives it its arguments")]

use std::process::ExitCode;
use std::time::Duration;

use smc_tests::soak::{Options, run};

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let number = |at: usize| -> u64 { args[at].parse().unwrap() };
    let only = args.get(7).map(|text| {
        let (front_end, connection) = text.split_once(':').unwrap();
        (front_end.parse().unwrap(), connection.parse().unwrap())
    });
    let options = Options {
        daemon: args[0].clone().into(),
        seed: number(1),
        operations: number(2),
        steps: number(3),
        time: Duration::from_secs(number(4)),
        front_ends: number(5) as u32,
        longest: Duration::from_millis(number(6)),
        only,
    };
    match run(&options) {
        Ok(()) => ExitCode::SUCCESS,
        Err(what) => {
            println!("soak: FAILED: {what}");
            ExitCode::FAILURE
        }
    }
}
