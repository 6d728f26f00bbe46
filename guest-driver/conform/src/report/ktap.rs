// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The report as KTAP, version 1, as tests of the Linux kernel print their results.

use std::fmt::Write as _;

use super::Report;
use crate::dialogue::Verdict;

impl Report<'_> {
    /// The report as KTAP. Each failed case is "not ok", with finding, rules and command before its
    /// line.
    pub fn ktap(&self) -> String {
        let results = &self.results.results;
        let mut text = format!("KTAP version 1\n1..{}\n", results.len());
        for (n, one) in results.iter().enumerate() {
            let line =
                |words: &str| words.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
            let says: String = line(&one.says);
            if one.verdict == Verdict::Fail {
                let _ = writeln!(text, "# {}: {}", one.case.title, says);
                for rule in one.case.rules.iter().filter_map(|id| super::rule(id)) {
                    let _ = writeln!(
                        text,
                        "# {} ({}; {}): {}",
                        rule.id, rule.level, rule.source, rule.text
                    );
                }
                let _ = writeln!(text, "# {}", self.again(one));
            }
            let state = if one.verdict == Verdict::Fail { "not ok" } else { "ok" };
            let _ = write!(text, "{state} {} {}", n + 1, one.case.id);
            let _ = match one.verdict {
                Verdict::Pass | Verdict::Fail => writeln!(text),
                Verdict::DeviatesAsLinux => writeln!(text, " # XFAIL as Linux: {says}"),
                Verdict::NotApplicable | Verdict::NotObservable => writeln!(text, " # SKIP {says}"),
            };
        }
        text
    }
}
