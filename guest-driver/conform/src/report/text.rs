// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The report as text: failures, and the amount of tests.

use std::fmt::Write as _;

use super::{Report, says};
use crate::dialogue::Verdict;

impl Report<'_> {
    /// The report as text. With `all`, the list includes passed cases.
    pub fn text(&self, all: bool) -> String {
        let mut text = String::new();
        let about = self.about;
        let _ = writeln!(text, "{} against {}, {}", about.program, about.target, self.date());
        let facts: Vec<&str> = self.results.facts.iter().collect();
        let _ =
            writeln!(text, "The target is a {}; known of it: {}", self.role(), facts.join(", "));
        let _ = writeln!(text);
        for (verdict, count) in self.counts() {
            let _ = writeln!(text, "{count:>6}  {}", verdict.name());
        }
        let _ = writeln!(
            text,
            "{:>6}  in {} s",
            self.results.results.len(),
            self.results.took.as_secs()
        );
        self.played_again(&mut text);
        for verdict in super::ORDER {
            match verdict {
                Verdict::Fail | Verdict::DeviatesAsLinux => self.causes(&mut text, verdict),
                _ if all => self.list(&mut text, verdict),
                _ => {}
            }
        }
        let _ = writeln!(text, "\nNot tried");
        for (what, why) in self.not_tried() {
            let _ = writeln!(text, "  {what}: {why}");
        }
        let _ = writeln!(text, "\n{}", self.headline());
        // The target's text may hold anything.
        text.chars().map(|c| if c.is_control() && c != '\n' { '\u{fffd}' } else { c }).collect()
    }

    /// The cases of a verdict, grouped by finding, and the rules of all of them.
    fn causes(&self, text: &mut String, verdict: Verdict) {
        let groups = self.by_cause(verdict);
        if groups.is_empty() {
            return;
        }
        let _ = writeln!(text, "\n{}", verdict.name());
        let mut rules: Vec<&str> = Vec::new();
        for (cause, cases) in groups {
            let count =
                if cases.len() == 1 { "1 case".into() } else { format!("{} cases", cases.len()) };
            let _ = writeln!(text, "  {count}: {cause}");
            for one in &cases {
                let _ = writeln!(
                    text,
                    "    {} [{}; {}] {}",
                    one.case.id,
                    one.case.level.name(),
                    one.case.rules.join(" "),
                    one.case.title
                );
                if let Some((expected, _)) = one.says.split_once(super::CAME) {
                    let _ = writeln!(text, "      {expected}");
                }
                if let Some(note) = &one.case.note {
                    let _ = writeln!(text, "      Note: {note}");
                }
                rules.extend(one.case.rules.iter().map(String::as_str));
            }
            if let Some(first) = cases.first() {
                let _ = writeln!(text, "    Again: {}", self.again(first));
            }
        }
        rules.sort_unstable();
        rules.dedup();
        let _ = writeln!(text, "  Their rules");
        for rule in rules.into_iter().filter_map(super::rule) {
            let _ =
                writeln!(text, "    {} ({}; {}): {}", rule.id, rule.level, rule.source, rule.text);
        }
    }

    fn list(&self, text: &mut String, verdict: Verdict) {
        let mut of = self.results.results.iter().filter(|one| one.verdict == verdict).peekable();
        if of.peek().is_some() {
            let _ = writeln!(text, "\n{}", verdict.name());
        }
        for one in of {
            let rules = one.case.rules.join(" ");
            let _ = writeln!(text, "  {} [{}; {rules}]", one.case.id, one.case.level.name());
            let _ = writeln!(text, "    {}", one.case.title);
            let _ = writeln!(text, "    {}", says(one));
            if let Some(note) = one.case.note.as_ref().filter(|_| verdict != Verdict::Pass) {
                let _ = writeln!(text, "    Note: {note}");
            }
        }
    }

    /// Cases played a second time, with their first failures.
    fn played_again(&self, text: &mut String) {
        let again = self.results.results.iter().filter_map(|one| one.first.as_ref().zip(Some(one)));
        for (i, (first, one)) in again.enumerate() {
            if i == 0 {
                let _ = writeln!(text, "\nPlayed again, alone, with more time for each answer");
            }
            let _ = writeln!(text, "  {}, at first: {first}", one.case.id);
        }
    }

    /// Untried parts with reasons: parts of the protocol, and cases grouped by reason.
    pub(super) fn not_tried(&self) -> Vec<(String, String)> {
        let mut all = self.about.not_tried.clone();
        let mut reasons: Vec<(&str, usize)> = Vec::new();
        for one in &self.results.results {
            if matches!(one.verdict, Verdict::NotApplicable | Verdict::NotObservable) {
                match reasons.iter_mut().find(|(why, _)| *why == one.says) {
                    Some((_, count)) => *count += 1,
                    None => reasons.push((&one.says, 1)),
                }
            }
        }
        all.extend(reasons.into_iter().map(|(why, count)| {
            (if count == 1 { "1 case".into() } else { format!("{count} cases") }, why.to_owned())
        }));
        all
    }
}
