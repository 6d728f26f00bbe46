//! What is said of each step.

use guest_driver::statistics::{Connection, Reason};
use serde::Serialize;

use crate::error::CliError;
use crate::output;

/// How a step went.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Mark {
    /// As SMC wants it.
    Ok,
    /// Not so.
    No,
    /// It cannot be known.
    Unknown,
}

impl Mark {
    fn word(self) -> &'static str {
        match self {
            Mark::Ok => "ok",
            Mark::No => "no",
            Mark::Unknown => "?",
        }
    }
}

/// What came of it all.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Outcome {
    /// SMC.
    Smc,
    /// TCP.
    Tcp,
    /// No connection.
    None,
}

impl Outcome {
    /// As an exit status.
    pub(super) fn status(self) -> u8 {
        match self {
            Outcome::Smc => 0,
            Outcome::Tcp => 1,
            Outcome::None => 2,
        }
    }
}

#[derive(Debug, Serialize)]
struct Step {
    name: &'static str,
    verdict: Mark,
    says: String,
}

/// Says things as they happen, or keeps them for later.
#[derive(Debug)]
pub(super) struct Tell {
    quiet: bool,
    steps: Vec<Step>,
    /// The connection, if it was SMC.
    pub(super) connection: Option<Connection>,
    /// Why it was not.
    pub(super) reason: Option<Reason>,
}

#[derive(Serialize)]
struct Whole<'a> {
    host: &'a str,
    port: u16,
    result: Outcome,
    steps: &'a [Step],
    connection: Option<&'a Connection>,
    reason: Option<&'a Reason>,
}

impl Tell {
    /// `quiet`: nothing is printed until the end.
    pub(super) fn new(quiet: bool) -> Tell {
        Tell { quiet, steps: Vec::new(), connection: None, reason: None }
    }

    /// A step is done.
    ///
    /// # Errors
    /// Standard output is gone.
    pub(super) fn step(
        &mut self,
        name: &'static str,
        verdict: Mark,
        says: impl Into<String>,
    ) -> Result<(), CliError> {
        let step = Step { name, verdict, says: says.into() };
        if !self.quiet {
            output::print(&line(&step))?;
        }
        self.steps.push(step);
        Ok(())
    }

    /// Everything as one object.
    ///
    /// # Errors
    /// None that happens.
    pub(super) fn json(&self, host: &str, port: u16, result: Outcome) -> Result<String, CliError> {
        let whole = Whole {
            host,
            port,
            result,
            steps: &self.steps,
            connection: self.connection.as_ref(),
            reason: self.reason.as_ref(),
        };
        let text = serde_json::to_string(&whole)
            .map_err(|error| CliError::Output(std::io::Error::other(error)))?;
        Ok(text + "\n")
    }
}

fn line(step: &Step) -> String {
    // A peer's host name is among the things that are said.
    let says: String =
        step.says.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect();
    format!("{:<3} {:<10} {says}\n", step.verdict.word(), step.name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_is_a_line() {
        let step = Step { name: "option", verdict: Mark::Unknown, says: "not\x1bknown".into() };
        assert_eq!(line(&step), "?   option     not\u{fffd}known\n");
    }

    #[test]
    fn the_outcome_is_the_exit_status() {
        let all = [Outcome::Smc, Outcome::Tcp, Outcome::None];
        assert_eq!(all.map(Outcome::status), [0, 1, 2]);
        let mut tell = Tell::new(true);
        tell.step("tcp", Mark::No, "refused").unwrap();
        let json = tell.json("h", 7, Outcome::None).unwrap();
        let value: serde_json::Value = serde_json::from_str(&json).unwrap();
        assert_eq!(value["result"], "none");
        assert_eq!(value["steps"][0]["verdict"], "no");
    }
}
