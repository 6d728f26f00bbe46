// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Keys of a policy file that this release does not know.

use std::fmt;

use toml::{Table, Value};

/// The keys of the file, and those of a rule.
const KEYS: [&str; 2] = ["default", "rule"];
const RULE_KEYS: [&str; 8] =
    ["use", "when", "peers", "ports", "programs", "users", "cgroups", "share"];

/// A key without a meaning in this release.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnknownKey {
    /// The rule, from 1; `None`: beside the rules.
    pub rule: Option<usize>,
    /// The key.
    pub key: String,
}

impl fmt::Display for UnknownKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.rule {
            Some(rule) => write!(
                f,
                "rule {rule}: the key {:?} is unknown, so all connections that fit the rest of the rule are TCP",
                self.key
            ),
            None => write!(f, "the key {:?} is unknown, and without effect", self.key),
        }
    }
}

/// The text of a file without unknown keys, and the unknown keys; `None`: there is none, or the text is no TOML.
pub(super) fn take_unknown(text: &str) -> Option<(String, Vec<UnknownKey>)> {
    let mut file: Table = text.parse().ok()?;
    let mut unknown = Vec::new();
    take(&mut file, &KEYS, None, &mut unknown);
    let rules = file.get_mut("rule").and_then(Value::as_array_mut);
    for (at, rule) in rules.into_iter().flatten().enumerate() {
        if let Some(rule) = rule.as_table_mut() {
            take(rule, &RULE_KEYS, Some(at + 1), &mut unknown);
        }
    }
    (!unknown.is_empty()).then(|| (file.to_string(), unknown))
}

fn take(table: &mut Table, known: &[&str], rule: Option<usize>, unknown: &mut Vec<UnknownKey>) {
    table.retain(|key, _| {
        let is_known = known.contains(&key);
        if !is_known {
            unknown.push(UnknownKey { rule, key: key.to_owned() });
        }
        is_known
    });
}
