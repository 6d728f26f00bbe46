// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `smc run` alone, as packages install the command `smc`.
#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    smc_cli::start()
}
