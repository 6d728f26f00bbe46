// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The `smc` command.
#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    smc_cli::main()
}
