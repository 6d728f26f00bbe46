// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The report of each step.

use guest_driver::statistics::{Connection, Reason};
use serde::Serialize;

use crate::error::CliError;
use crate::output;

/// The result of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum StepStatus {
    /// SMC is possible as far as this step shows.
    Ok,
    /// The step rules SMC out.
    No,
    /// The step has no result.
    Unknown,
}

impl StepStatus {
    fn word(self) -> &'static str {
        match self {
            StepStatus::Ok => "ok",
            StepStatus::No => "no",
            StepStatus::Unknown => "?",
        }
    }
}

/// The outcome of all steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Outcome {
    /// SMC.
    Smc,
    /// TCP.
    Tcp,
    /// No connection.
    None,
    /// The check could not try SMC with the server. If the server did not answer the option,
    /// clients asking by the option use TCP.
    Unknown,
}

impl Outcome {
    /// The exit status.
    pub(super) fn status(self) -> u8 {
        match self {
            Outcome::Smc => 0,
            Outcome::Tcp => 1,
            Outcome::None => 2,
            Outcome::Unknown => 3,
        }
    }
}

#[derive(Debug, Serialize)]
struct Step {
    name: &'static str,
    status: StepStatus,
    says: String,
}

/// Prints steps immediately, and keeps the steps for the JSON report.
#[derive(Debug)]
pub(super) struct StepReport {
    quiet: bool,
    steps: Vec<Step>,
    /// The connection, if on SMC.
    pub(super) connection: Option<Connection>,
    /// The reason for TCP.
    pub(super) reason: Option<Reason>,
}

#[derive(Serialize)]
struct CheckReport<'a> {
    host: &'a str,
    port: u16,
    result: Outcome,
    steps: &'a [Step],
    connection: Option<&'a Connection>,
    reason: Option<&'a Reason>,
}

impl StepReport {
    /// `quiet`: nothing is printed until the end.
    pub(super) fn new(quiet: bool) -> StepReport {
        StepReport { quiet, steps: Vec::new(), connection: None, reason: None }
    }

    /// Adds a step.
    ///
    /// # Errors
    /// Standard output cannot be written.
    pub(super) fn step(
        &mut self,
        name: &'static str,
        status: StepStatus,
        says: impl Into<String>,
    ) -> Result<(), CliError> {
        let step = Step { name, status, says: says.into() };
        if !self.quiet {
            output::print(&line(&step))?;
        }
        self.steps.push(step);
        Ok(())
    }

    /// Every step as one JSON object.
    ///
    /// # Errors
    /// A value JSON cannot represent; there is none.
    pub(super) fn json(&self, host: &str, port: u16, result: Outcome) -> Result<String, CliError> {
        output::json(&CheckReport {
            host,
            port,
            result,
            steps: &self.steps,
            connection: self.connection.as_ref(),
            reason: self.reason.as_ref(),
        })
    }
}

fn line(step: &Step) -> String {
    // The text may contain the peer's untrusted host name.
    let says: String =
        step.says.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect();
    output::hanging(&format!("{:<3} {:<10} ", step.status.word(), step.name), &says)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_is_a_line() {
        let step =
            Step { name: "option", status: StepStatus::Unknown, says: "not\x1bknown".into() };
        assert_eq!(line(&step), "?   option     not\u{fffd}known\n");
    }

    #[test]
    fn the_outcome_is_the_exit_status() {
        let all = [Outcome::Smc, Outcome::Tcp, Outcome::None, Outcome::Unknown];
        assert_eq!(all.map(Outcome::status), [0, 1, 2, 3]);
        let mut report = StepReport::new(true);
        report.step("tcp", StepStatus::No, "refused").unwrap();
        let json = report.json("h", 7, Outcome::None).unwrap();
        let value: serde_json::Value = serde_json::from_str(&json).unwrap();
        assert_eq!(value["result"], "none");
        assert_eq!(value["steps"][0]["status"], "no");
    }
}
