// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Standard output of the commands other than the daemon.

use std::io::{self, ErrorKind, Write};
use std::process::ExitCode;

use super::logging;

/// Prints text. A closed pipe is no failure.
///
/// # Errors
/// Standard output cannot be written.
pub(crate) fn print(text: &str) -> io::Result<()> {
    accepted(io::stdout().write_all(text.as_bytes()))
}

/// Ends a command line answered by clap: help, a version, or an error.
pub(crate) fn answer(by_clap: &clap::Error) -> ExitCode {
    match accepted(by_clap.print()) {
        Err(error) if !by_clap.use_stderr() => failed(&error),
        _ => ExitCode::from(u8::try_from(by_clap.exit_code()).unwrap_or(2)),
    }
}

/// Prints text and returns the process's exit code.
pub(crate) fn print_last(text: &str) -> ExitCode {
    print(text).map_or_else(|error| failed(&error), |()| ExitCode::SUCCESS)
}

fn accepted(written: io::Result<()>) -> io::Result<()> {
    match written.and_then(|()| io::stdout().flush()) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
        other => other,
    }
}

fn failed(error: &io::Error) -> ExitCode {
    logging::print_error(&format_args!("standard output: {error}"));
    ExitCode::FAILURE
}
