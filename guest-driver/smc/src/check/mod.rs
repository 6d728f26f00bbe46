//! `smc check`: would a connection be SMC?

mod steps;
mod tell;

use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, ValueEnum};

use crate::error::CliError;
use crate::output;
use crate::stack::StackArgs;
use tell::{Outcome, Tell};

/// Help of `smc check`.
pub(crate) const LONG_ABOUT: &str = "\
Connects to a server as an SMC client does, says what happens at each step and what stopped it, and
closes the connection again.

  name        what the name resolves to
  device      virtio-ism devices that this end can offer, and why not
  rnic        RNICs that this end can offer for SMC-R, and why there are none
  tcp         the TCP connection
  option      whether the server answered TCP option 254, by which both ends tell that they speak SMC.
              Where this process lacks the rights to see it, that is said, and how to grant them
  handshake   what both ends agreed on, or who declined and why
  result      SMC or TCP

Without the option nobody knows whether a server speaks SMC unless the handshake is tried; a server
that does not takes it for some 200 bytes of data. See --propose.

Exit status: 0 it would be SMC, 1 it would be TCP, 2 there was no connection.";

/// End of the help of `smc check`.
pub(crate) const AFTER: &str = "\
Examples:
  smc check db.example 5432
  smc check --propose always localhost 5000      a server that was told to expect SMC
  smc check --propose answered www.example 443   never disturb a server that may be any
  smc check --device none db.example 5432        SMC-R only";

/// Options of `smc check`.
#[derive(Args, Debug)]
pub(crate) struct CheckArgs {
    /// The server's name or address.
    host: String,

    /// The server's port.
    port: u16,

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
    fn patience(&self) -> Duration {
        Duration::from_secs(self.timeout.into())
    }
}

/// When the handshake is tried.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Propose {
    /// If the server answered the option, or that cannot be known.
    Auto,
    /// Whatever is known of the option: the server was told by its configuration.
    Always,
    /// Only if the server answered the option.
    Answered,
}

impl Propose {
    /// Whether to try. `seen`: whether the server answered the option, if that is known.
    fn tries(self, seen: Option<bool>) -> bool {
        match self {
            Propose::Auto => seen != Some(false),
            Propose::Always => true,
            Propose::Answered => seen == Some(true),
        }
    }
}

/// Tries it. The exit status tells the outcome.
///
/// # Errors
/// Standard output is gone.
pub(crate) fn run(args: &CheckArgs) -> Result<ExitCode, CliError> {
    let mut tell = Tell::new(args.json);
    let outcome = match steps::all(args, &mut tell) {
        Ok(outcome) => outcome,
        Err(error @ CliError::Output(_)) => return Err(error),
        // No other status than "no connection" may stand for it.
        Err(error) => {
            eprintln!("smc: {error}");
            if let Some(hint) = error.hint() {
                eprintln!("     {hint}");
            }
            return Ok(ExitCode::from(Outcome::None.status()));
        }
    };
    if args.json {
        output::print(&tell.json(&args.host, args.port, outcome)?)?;
    }
    Ok(ExitCode::from(outcome.status()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_handshake_is_tried_unless_it_is_known_or_feared_to_be_of_no_use() {
        let seen = [Some(true), Some(false), None];
        assert_eq!(seen.map(|seen| Propose::Auto.tries(seen)), [true, false, true]);
        assert_eq!(seen.map(|seen| Propose::Always.tries(seen)), [true; 3]);
        assert_eq!(seen.map(|seen| Propose::Answered.tries(seen)), [true, false, false]);
    }
}
