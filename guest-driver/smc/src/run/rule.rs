// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The rules of the command line, as checked texts.

use std::str::FromStr;

use smc_rendezvous::{PeerRule, PeerRuleError};

/// The text of a [`PeerRule`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Rule(String);

impl Rule {
    /// The rule for some ports of the program.
    ///
    /// # Errors
    /// The text is no port and no range of ports.
    pub(crate) fn of_ports(ports: &str) -> Result<Rule, PeerRuleError> {
        PeerRule::of_ports(ports).map(|_| Rule(format!("*:{ports}")))
    }

    /// The text, for the library in the program.
    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for Rule {
    type Err = PeerRuleError;

    fn from_str(text: &str) -> Result<Rule, PeerRuleError> {
        text.parse::<PeerRule>().map(|_| Rule(text.into()))
    }
}
