// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The report as JUnit XML, for servers of continuous integration.

use std::fmt::Write as _;

use super::exchange::of_case;
use super::{Report, escaped, seconds};
use crate::case::Level;
use crate::dialogue::Verdict;
use crate::suite::CaseResult;

impl Report<'_> {
    /// A failed case in lines: its title, its rules, the bytes, and the command to play the case again.
    fn failure(&self, one: &CaseResult) -> String {
        let mut text = format!("{}\n", one.case.title);
        for rule in one.case.rules.iter().filter_map(|id| super::rule(id)) {
            let _ = writeln!(text, "{} ({}; {}): {}", rule.id, rule.level, rule.source, rule.text);
        }
        for exchange in of_case(&one.passed) {
            let bytes = format!("{} {}", exchange.hex, exchange.event);
            let _ = writeln!(text, "{} ms, {}: {}", exchange.ms, exchange.from, bytes.trim());
        }
        text + &self.again(one)
    }

    /// The report as JUnit XML. Failed MUSTs are failures; cases neither failed nor passed are
    /// skipped, with the reason.
    pub fn junit(&self) -> String {
        let results = &self.results.results;
        let skipped = results
            .iter()
            .filter(|one| !one.is_failed_must() && one.verdict != Verdict::Pass)
            .count();
        let mut text = String::from("<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n");
        let _ = writeln!(
            text,
            "<testsuite name=\"{}\" hostname=\"{}\" tests=\"{}\" failures=\"{}\" errors=\"0\" \
             skipped=\"{skipped}\" time=\"{}\" timestamp=\"{}\">",
            escaped(&self.about.program),
            escaped(&self.about.target),
            results.len(),
            self.results.failed_musts(),
            seconds(self.results.took),
            self.date().trim_end_matches('Z'),
        );
        for one in results {
            let _ = write!(
                text,
                "  <testcase classname=\"{}.{}\" name=\"{}\" time=\"{}\"",
                escaped(&one.case.layer),
                self.role(),
                escaped(&one.case.id),
                seconds(one.took),
            );
            let says = escaped(&format!("{}: {}", one.verdict.name(), one.says));
            let _ = match (one.verdict, one.case.level) {
                (Verdict::Pass, _) => writeln!(text, "/>"),
                (Verdict::Fail, Level::Must) => writeln!(
                    text,
                    ">\n    <failure message=\"{says}\">{}</failure>\n  </testcase>",
                    escaped(&self.failure(one)),
                ),
                _ => writeln!(text, ">\n    <skipped message=\"{says}\"/>\n  </testcase>"),
            };
        }
        text + "</testsuite>\n"
    }
}
