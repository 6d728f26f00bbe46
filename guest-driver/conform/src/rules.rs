// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The rules of the specifications, for reports: docs/requirements.tsv.

use std::collections::BTreeMap;
use std::sync::OnceLock;

/// The list of rules. In the repository the file is a link; in a package of the crate, a copy.
pub(crate) const LIST: &str = include_str!("../requirements.tsv");

/// A rule of RFC 7609 or SMCv2.1.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rule {
    pub(crate) id: &'static str,
    /// The obligation in words.
    pub(crate) level: &'static str,
    /// The sections of the specifications.
    pub(crate) source: &'static str,
    pub(crate) text: &'static str,
}

/// The rule with this id.
pub(crate) fn rule(id: &str) -> Option<Rule> {
    static RULES: OnceLock<BTreeMap<&str, Rule>> = OnceLock::new();
    let rules = RULES.get_or_init(|| LIST.lines().filter_map(of_line).collect());
    rules.get(id).copied()
}

fn of_line(line: &'static str) -> Option<(&'static str, Rule)> {
    let mut fields = line.split('\t');
    let (id, level) = (fields.next()?, fields.next()?);
    let level = match level {
        "M" => "must",
        "S" => "should",
        "O" => "may",
        "I" => "implied",
        _ => return None,
    };
    Some((id, Rule { id, level, source: fields.next()?, text: fields.next()? }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_line_of_the_list_is_a_rule() {
        let ids = LIST.lines().filter(|line| !line.starts_with('#')).skip(1);
        let ids: Vec<&str> = ids.filter_map(|line| line.split('\t').next()).collect();
        assert!(ids.len() > 600);
        for id in ids {
            let found = rule(id).unwrap_or_else(|| panic!("{id}"));
            assert!(found.id == id && !found.text.is_empty() && !found.source.is_empty(), "{id}");
        }
        assert_eq!(rule("OPT-5").unwrap().level, "should");
        assert!(rule("id").is_none() && rule("CLC-0").is_none());
    }
}
