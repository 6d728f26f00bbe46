// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `smc check`: would a connection be SMC?

mod report;
mod steps;

use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, ValueEnum};

use crate::address::ServerArgs;
use crate::error::CliError;
use crate::output;
use crate::stack::StackArgs;
use report::{Outcome, StepReport};

/// Help of `smc check`.
pub(crate) const LONG_ABOUT: &str = "\
Connects to a server as an SMC client does, prints the result of each step, and closes the connection
again.

  name        what the name resolves to
  device      virtio-ism devices that this end can offer, or why it has none
  rnic        RNICs that this end can offer for SMC-R, or why it has none
  tcp         the TCP connection
  option      whether the server answered TCP option 254, by which both ends announce SMC; or, if this
              process may not use the option, how to grant it the rights
  handshake   what both ends agreed on, or who declined and why
  result      SMC or TCP

Without the option only the handshake shows whether a server speaks SMC. A server that does not takes
the handshake for some 200 bytes of data. So a server that did not answer the option is not tried, and
the result is not known for clients that do not ask first: \"smc connect\", and those that --peer names
the server to. With --propose always it is tried. With --rendezvous off this end does not ask.

Exit status: 0 it would be SMC, 1 it would be TCP, 2 there was no connection, 3 it is TCP for clients
that ask, and not known for others.";

/// End of the help of `smc check`.
pub(crate) const AFTER: &str = "\
Examples:
  smc check db.example:5432
  smc check --propose always localhost:5000      a server that is known to speak SMC
  smc check --propose answered www.example:443   never send SMC to a TCP server
  smc check --device none db.example:5432        SMC-R only";

/// Options of `smc check`.
#[derive(Args, Debug)]
pub(crate) struct CheckArgs {
    #[command(flatten)]
    server: ServerArgs,

    /// When to try the handshake.
    #[arg(long, value_enum, value_name = "WHEN", default_value_t = Propose::Auto)]
    propose: Propose,

    /// How long each step may take, seconds.
    #[arg(long, value_name = "SECONDS", default_value_t = 6,
          value_parser = clap::value_parser!(u32).range(1..=600))]
    timeout: u32,

    /// Print one JSON object at the end instead.
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    stack: StackArgs,
}

impl CheckArgs {
    fn step_timeout(&self) -> Duration {
        Duration::from_secs(self.timeout.into())
    }
}

/// When the handshake is tried.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Propose {
    /// If the server answered the option, or if that is not known.
    Auto,
    /// Always, whether the server answered the option or not.
    Always,
    /// Only if the server answered the option.
    Answered,
}

impl Propose {
    /// Whether to try the handshake. `answered`: whether the server answered the option, if known.
    fn tries(self, answered: Option<bool>) -> bool {
        match self {
            Propose::Auto => answered != Some(false),
            Propose::Always => true,
            Propose::Answered => answered == Some(true),
        }
    }
}

/// Checks the server. The exit status is the outcome.
///
/// # Errors
/// Standard output cannot be written.
pub(crate) fn run(args: &CheckArgs) -> Result<ExitCode, CliError> {
    let mut report = StepReport::new(args.json);
    let checked = args
        .server
        .server()
        .and_then(|server| Ok((steps::all(args, &server, &mut report)?, server)));
    let (outcome, server) = match checked {
        Ok(checked) => checked,
        Err(error @ CliError::Output(_)) => return Err(error),
        // An error has the exit status of "no connection".
        Err(error) => {
            error.show();
            return Ok(ExitCode::from(Outcome::None.status()));
        }
    };
    if args.json {
        output::print(&report.json(&server.host, server.port, outcome)?)?;
    }
    Ok(ExitCode::from(outcome.status()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn propose_says_when_the_handshake_is_tried() {
        let answered = [Some(true), Some(false), None];
        assert_eq!(answered.map(|answered| Propose::Auto.tries(answered)), [true, false, true]);
        assert_eq!(answered.map(|answered| Propose::Always.tries(answered)), [true; 3]);
        assert_eq!(
            answered.map(|answered| Propose::Answered.tries(answered)),
            [true, false, false]
        );
    }
}
