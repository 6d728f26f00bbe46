// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The `smc` command: demo, netcat, benchmarks, statistics and a decoder for SMC.
#![forbid(unsafe_code)]
// These panic where the stream cannot be written.
#![deny(clippy::print_stdout, clippy::print_stderr)]

mod access;
mod address;
mod capture;
mod cdi;
mod check;
mod cli;
mod conform;
mod debug;
mod decode;
mod demo;
mod devices;
mod doctor;
mod error;
mod fabric;
mod grant;
mod help;
mod helper;
mod kernel;
mod manual;
mod output;
mod paths;
mod perf;
mod pipe;
mod plan;
mod proc_files;
mod run;
mod settings;
mod smc_tools;
mod stack;
mod stat;
mod temporary_fabric;
mod transport;

use std::process::ExitCode;

fn main() -> ExitCode {
    let program = std::env::args_os().next();
    match program.and_then(|program| smc_tools::Tool::named(&program)) {
        Some(tool) => smc_tools::run(tool),
        None => cli::main(),
    }
}
