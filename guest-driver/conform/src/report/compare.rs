// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The difference of two reports in JSON.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use serde::Deserialize;
use thiserror::Error;

/// A text that is no report.
#[derive(Debug, Error)]
pub enum NoReport {
    /// The text has another form.
    #[error("no report of smc conform in JSON: {0}")]
    Form(#[from] serde_json::Error),
    /// The report is of another release.
    #[error("the report has the format {0}; this release reads the format 1")]
    Format(u32),
    /// The roles differ.
    #[error("the target was a {0}, and a {1} in the other report")]
    Roles(String, String),
}

/// The members of a report that matter to a comparison.
#[derive(Deserialize)]
struct Known {
    format: u32,
    target: String,
    role: String,
    began: String,
    cases: Vec<KnownCase>,
}

#[derive(Deserialize)]
struct KnownCase {
    id: String,
    level: String,
    verdict: String,
    says: String,
    again: String,
}

impl KnownCase {
    fn fails(&self) -> bool {
        self.verdict == "FAIL"
    }
}

/// The difference of two reports.
#[derive(Debug)]
pub struct Comparison {
    /// In words, for a terminal.
    pub text: String,
    /// MUSTs that fail in the later report, and not in the earlier one.
    pub new_failures: usize,
}

/// Compares an earlier report with a later one of the same or another target. Cases with another
/// verdict are listed: first failures, then ends of failures, then the rest.
///
/// # Errors
/// [`NoReport`].
pub fn compare(earlier: &str, later: &str) -> Result<Comparison, NoReport> {
    let (earlier, later) = (read(earlier)?, read(later)?);
    if earlier.role != later.role {
        return Err(NoReport::Roles(earlier.role, later.role));
    }
    let before: BTreeMap<&str, &KnownCase> =
        earlier.cases.iter().map(|case| (case.id.as_str(), case)).collect();
    let mut groups: [(&str, Vec<String>); 3] =
        [("Fails now", vec![]), ("Fails no more", vec![]), ("Another verdict", vec![])];
    let (mut new_failures, mut only_later) = (0, 0);
    for case in &later.cases {
        let Some(old) = before.get(case.id.as_str()) else {
            only_later += 1;
            if case.fails() {
                groups[0].1.push(line(case, "not played"));
                new_failures += usize::from(case.level == "must");
            }
            continue;
        };
        let group = match (old.fails(), case.fails()) {
            (false, true) => 0,
            (true, false) => 1,
            _ if old.verdict != case.verdict => 2,
            _ => continue,
        };
        new_failures += usize::from(group == 0 && case.level == "must");
        groups[group].1.push(line(case, &old.verdict));
    }
    let after: BTreeSet<&str> = later.cases.iter().map(|case| case.id.as_str()).collect();
    let gone = before.keys().filter(|id| !after.contains(*id)).count();
    let mut text = String::new();
    for (name, report) in [("Earlier", &earlier), ("Later", &later)] {
        let _ = writeln!(
            text,
            "{name}: {}, {}, {} cases",
            report.target,
            report.began,
            report.cases.len()
        );
    }
    for (name, lines) in groups.iter().filter(|(_, lines)| !lines.is_empty()) {
        let _ = writeln!(text, "\n{name}: {}\n{}", lines.len(), lines.join("\n"));
    }
    if groups.iter().all(|(_, lines)| lines.is_empty()) {
        let _ = writeln!(text, "\nNo case has another verdict.");
    }
    if only_later + gone > 0 {
        let _ = writeln!(
            text,
            "\nOnly in the later report: {only_later}; only in the earlier one: {gone}"
        );
    }
    // A report may be from anywhere.
    let text = text.chars().map(|c| if c.is_control() && c != '\n' { '\u{fffd}' } else { c });
    Ok(Comparison { text: text.collect(), new_failures })
}

fn read(text: &str) -> Result<Known, NoReport> {
    let known: Known = serde_json::from_str(text)?;
    if known.format == 1 { Ok(known) } else { Err(NoReport::Format(known.format)) }
}

fn line(case: &KnownCase, before: &str) -> String {
    let mut line = format!("  {} [{}]: {before} -> {}", case.id, case.level, case.verdict);
    if !case.says.is_empty() && case.verdict != "PASS" {
        let _ = write!(line, "\n    {}", case.says);
    }
    if case.fails() {
        let _ = write!(line, "\n    Again: {}", case.again);
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(role: &str, cases: &[(&str, &str, &str)]) -> String {
        let case = |(id, level, verdict): &(&str, &str, &str)| {
            serde_json::json!({"id": id, "level": level, "verdict": verdict, "says": "came\u{1b}x",
                "again": format!("smc '={id}'"), "title": "more"})
        };
        let cases: Vec<_> = cases.iter().map(case).collect();
        serde_json::json!({"format": 1, "target": "a:1", "role": role, "began": "now", "cases": cases})
            .to_string()
    }

    #[test]
    fn changed_verdicts_are_listed_and_new_failures_of_a_must_counted() {
        let earlier = [
            ("a", "must", "PASS"),
            ("b", "must", "FAIL"),
            ("c", "may", "PASS"),
            ("gone", "may", "PASS"),
        ];
        let later = [
            ("a", "must", "FAIL"),
            ("b", "must", "PASS"),
            ("c", "may", "NOT-APPLICABLE"),
            ("new", "should", "FAIL"),
        ];
        let found = compare(&report("server", &earlier), &report("server", &later)).unwrap();
        assert_eq!(found.new_failures, 1);
        for part in [
            "Fails now: 2\n  a [must]: PASS -> FAIL\n    came\u{fffd}x\n    Again: smc '=a'\n  new [should]: not played",
            "Fails no more: 1\n  b [must]: FAIL -> PASS",
            "Another verdict: 1\n  c [may]: PASS -> NOT-APPLICABLE",
            "Only in the later report: 1; only in the earlier one: 1",
        ] {
            assert!(found.text.contains(part), "{part}\n{}", found.text);
        }
        let same = compare(&report("server", &later), &report("server", &later)).unwrap();
        assert!(same.text.contains("No case has another verdict.") && same.new_failures == 0);
    }

    #[test]
    fn other_files_are_no_reports() {
        let server = report("server", &[]);
        let later = server.replace("\"format\":1", "\"format\":2");
        assert!(matches!(compare(&server, &later), Err(NoReport::Format(2))));
        assert!(matches!(compare("{}", &server), Err(NoReport::Form(_))));
        assert!(matches!(compare(&server, &report("client", &[])), Err(NoReport::Roles(..))));
    }
}
