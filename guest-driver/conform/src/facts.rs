// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Facts about the target, and the names for use in cases.

use std::collections::BTreeSet;

/// Names defined in every scope, with their lengths.
pub(crate) const NAMES: &[(&str, usize)] = &[
    ("eid", 32),
    ("foreign_eid", 32),
    ("seid", 32),
    ("chid", 2),
    ("gid1", 8),
    ("gid2", 8),
    ("foreign1", 8),
    ("foreign2", 8),
    ("peer_id", 8),
    ("mac", 6),
    ("roce_gid", 16),
    ("other_gid", 16),
    ("other_family", 16),
    ("prefix", 16),
    ("prefix_bits", 1),
    ("network", 4),
    ("mask_bits", 1),
    ("token", 8),
    ("link_id", 4),
    ("size", 1),
    ("qpn", 3),
    ("psn", 3),
    ("rkey", 4),
    ("address", 8),
    ("second_mac", 6),
    ("second_gid", 16),
    ("second_qpn", 3),
    ("second_psn", 3),
    ("second_rkey", 4),
    ("second_address", 8),
    ("fresh_peer_id", 8),
];

/// Facts without which the suite cannot observe a case. Other facts describe the target.
const OF_THE_SUITE: &[&str] =
    &["data", "device", "echo", "option", "prefix", "rnic", "second-rnic", "seid"];

/// The known facts.
#[derive(Clone, Debug, Default)]
pub struct Facts {
    known: BTreeSet<String>,
}

impl Facts {
    /// Records a fact.
    pub(crate) fn add(&mut self, fact: &str) {
        self.known.insert(fact.to_owned());
    }

    /// Whether a fact holds; `!name`: whether the fact `name` does not hold.
    pub(crate) fn has(&self, fact: &str) -> bool {
        match fact.strip_prefix('!') {
            Some(fact) => !self.known.contains(fact),
            None => self.known.contains(fact),
        }
    }

    /// Every known fact, for the report.
    pub fn iter(&self) -> impl Iterator<Item = &str> {
        self.known.iter().map(String::as_str)
    }

    /// A fact of `needs` not known, and whether the fact is about the suite. A fact of the suite
    /// has precedence: the case then says nothing about the target.
    pub(crate) fn missing<'a>(&self, needs: &'a [String]) -> Option<(&'a str, bool)> {
        let is_of_suite = |fact: &str| OF_THE_SUITE.contains(&fact);
        let mut missing = needs.iter().map(String::as_str).filter(|fact| !self.has(fact));
        let first = missing.next()?;
        let of_suite =
            is_of_suite(first).then_some(first).or_else(|| missing.find(|f| is_of_suite(f)));
        Some((of_suite.unwrap_or(first), of_suite.is_some()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_suite_lacks_is_told_before_what_is_not_known_of_the_target() {
        let mut facts = Facts::default();
        let needs = ["link-r2", "rnic"].map(str::to_owned);
        assert_eq!(facts.missing(&needs), Some(("rnic", true)));
        facts.add("rnic");
        assert_eq!(facts.missing(&needs), Some(("link-r2", false)));
        facts.add("link-r2");
        assert_eq!(facts.missing(&needs), None);
    }
}
