// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `cargo xtask soak`.

use std::path::Path;
use std::process::{Command, ExitCode};

use crate::tool::{self, ToolError};

pub(crate) const LONG_ABOUT: &str = "\
Attack a daemon for a long time, and simulate link groups.

Several hostile front ends attack the daemon's program over vhost-user sockets: commands, moves, \
rings, messages, memory that faults, descriptors that are something else. Two pairs of devices talk \
meanwhile; their bytes must be right, and they must never wait for long. The daemon may not end, \
panic or grow. Link groups of two hosts are simulated at the same time, with faults.

At full length it takes an hour. What hostile front ends do is drawn from the seed, but when they do \
it is not: a failure prints the last operations of each, and the connection that --only repeats.";

/// Options of `cargo xtask soak`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Decides what happens; by default the time does. Decimal, or hexadecimal with 0x.
    #[arg(long, value_name = "N", value_parser = parse_seed)]
    seed: Option<u64>,

    /// End after so many operations on devices.
    #[arg(long, value_name = "N", default_value_t = 10_000_000)]
    operations: u64,

    /// Simulate so many steps of link groups.
    #[arg(long, value_name = "N", default_value_t = 10_000_000)]
    steps: u64,

    /// End after so many seconds, whatever is done.
    #[arg(long, value_name = "N", default_value_t = 3600)]
    seconds: u64,

    /// Hostile front ends at a time.
    #[arg(long, value_name = "N", default_value_t = 4)]
    front_ends: u32,

    /// Longest round trip of the pairs that do nothing wrong, milliseconds.
    #[arg(long, value_name = "MS", default_value_t = 10_000)]
    longest: u64,

    /// Only this connection of this hostile front end.
    #[arg(long, value_name = "FRONT-END:CONNECTION")]
    only: Option<String>,
}

fn parse_seed(text: &str) -> Result<u64, std::num::ParseIntError> {
    match text.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16),
        None => text.parse(),
    }
}

/// Runs the task. The exit code says whether nothing was found.
///
/// # Errors
/// Something does not build or cannot be started.
pub(crate) fn run(args: &Args, root: &Path) -> Result<ExitCode, ToolError> {
    let mut build = Command::new(std::env::var_os("CARGO").unwrap_or("cargo".into()));
    build.current_dir(root).args(["build", "--release", "-p", "smc-tests", "--bin", "smc-soak"]);
    build.args(["-p", "vhost-device-ism", "--bin", "vhost-device-ism"]);
    let status = tool::status(build)?;
    if !status.success() {
        return Err(ToolError::Failed { program: "cargo build".into(), status });
    }
    let target =
        std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), Into::into);
    let programs = target.join("release");
    let now = std::time::UNIX_EPOCH.elapsed().map_or(0, |since| since.as_secs());
    let Args { operations, steps, seconds, front_ends, longest, .. } = args;
    let mut command = Command::new(programs.join("smc-soak"));
    command.arg(programs.join("vhost-device-ism"));
    for number in [args.seed.unwrap_or(now), *operations, *steps, *seconds] {
        command.arg(number.to_string());
    }
    command.arg(front_ends.to_string()).arg(longest.to_string()).args(&args.only);
    let status = tool::status(command)?;
    Ok(if status.success() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

#[cfg(test)]
mod tests {
    use super::parse_seed;

    #[test]
    fn a_seed_is_read_as_it_is_printed() {
        assert_eq!(parse_seed("0x1f"), Ok(31));
        assert_eq!(parse_seed("31"), Ok(31));
        assert!(parse_seed("x").is_err());
    }
}
