// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Reports of a run: text, JSON, JUnit and a page of HTML.

mod compare;
mod exchange;
mod html;
mod json;
mod junit;
mod ktap;
mod text;

use std::time::{Duration, SystemTime, UNIX_EPOCH};

pub use compare::{Comparison, NoReport, compare};

use crate::case::{Level, Role};
use crate::dialogue::Verdict;
use crate::rules::rule;
use crate::suite::{CaseResult, Results};

/// Data about a run besides the results.
#[derive(Clone, Debug)]
pub struct RunHeader {
    /// Name and version of the program.
    pub program: String,
    /// The command line.
    pub command: String,
    /// The command line to play one case again; the case's id is added, as `'=ID'`.
    pub again: String,
    /// The target, in words.
    pub target: String,
    /// When the run began.
    pub began: SystemTime,
    /// Parts of the protocol without a case played, and why.
    pub not_tried: Vec<(String, String)>,
}

/// A run ready to report.
#[derive(Clone, Copy)]
pub struct Report<'a> {
    /// The results.
    pub results: &'a Results,
    /// Data about the run.
    pub about: &'a RunHeader,
}

/// Each verdict, the worst one first.
const ORDER: [Verdict; 5] = [
    Verdict::Fail,
    Verdict::DeviatesAsLinux,
    Verdict::Pass,
    Verdict::NotApplicable,
    Verdict::NotObservable,
];

impl Report<'_> {
    fn role(&self) -> &'static str {
        match self.results.role {
            Role::Server => "server",
            Role::Client => "client",
        }
    }

    /// Each verdict with its number of cases.
    fn counts(&self) -> [(Verdict, usize); 5] {
        ORDER.map(|verdict| (verdict, self.results.count(verdict)))
    }

    /// One sentence.
    fn headline(&self) -> String {
        match self.results.failed_musts() {
            0 => "No MUST failed.".into(),
            1 => "1 case of a MUST failed.".into(),
            n => format!("{n} cases of a MUST failed."),
        }
    }

    /// The command to play this case again, and no other case.
    fn again(&self, one: &CaseResult) -> String {
        format!("{}'={}'", self.about.again, one.case.id)
    }

    /// The cases of a verdict, those with the same cause together. Groups with a MUST come first,
    /// then large ones.
    fn by_cause(&self, verdict: Verdict) -> Vec<(&str, Vec<&CaseResult>)> {
        let mut groups: Vec<(&str, Vec<&CaseResult>)> = Vec::new();
        for one in self.results.results.iter().filter(|one| one.verdict == verdict) {
            let cause = cause(one);
            match groups.iter_mut().find(|(known, _)| *known == cause) {
                Some((_, cases)) => cases.push(one),
                None => groups.push((cause, vec![one])),
            }
        }
        groups.sort_by_key(|(_, cases)| {
            (!cases.iter().any(|one| one.case.level == Level::Must), usize::MAX - cases.len())
        });
        groups
    }

    fn date(&self) -> String {
        date(self.about.began)
    }
}

/// The arrival in place of an expected one, or the whole finding.
fn cause(one: &CaseResult) -> &str {
    one.says.find(CAME).and_then(|at| one.says.get(at + 2..)).unwrap_or_else(|| says(one))
}

/// In findings, between the expected and the arrived.
const CAME: &str = "; came ";

/// The finding of a case, or "as expected".
fn says(result: &CaseResult) -> &str {
    match result.says.as_str() {
        "" => "as expected",
        says => says,
    }
}

fn seconds(took: Duration) -> String {
    format!("{:.3}", took.as_secs_f64())
}

/// Date and time, UTC, in the format of RFC 3339.
fn date(time: SystemTime) -> String {
    let seconds = time.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let (days, rest) = (seconds / 86400, seconds % 86400);
    // Days since 0000-03-01: a leap day is then the last day of its year.
    let days = days + 719_468;
    let era = days / 146_097;
    let of_era = days % 146_097;
    let year = (of_era - of_era / 1460 + of_era / 36524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year + year / 4 - year / 100);
    let shifted = (5 * of_year + 2) / 153;
    let day = of_year - (153 * shifted + 2) / 5 + 1;
    let month = if shifted < 10 { shifted + 3 } else { shifted - 9 };
    let year = era * 400 + year + u64::from(month <= 2);
    let (hour, minute, second) = (rest / 3600, rest / 60 % 60, rest % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
}

/// Text for XML and HTML. Control characters, possibly sent by a target, are replaced.
fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\n' => out.push('\n'),
            c if c.is_control() => out.push('\u{fffd}'),
            c => out.push(c),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_those_of_the_calendar() {
        for (seconds, expected) in [
            (0, "1970-01-01T00:00:00Z"),
            (951_782_400, "2000-02-29T00:00:00Z"),
            (951_868_799, "2000-02-29T23:59:59Z"),
            (1_735_689_599, "2024-12-31T23:59:59Z"),
            (4_107_542_400, "2100-03-01T00:00:00Z"),
        ] {
            assert_eq!(date(UNIX_EPOCH + Duration::from_secs(seconds)), expected);
        }
    }

    #[test]
    fn text_of_a_target_is_no_markup() {
        assert_eq!(escaped("<b a=\"1\">\u{1b}&"), "&lt;b a=&quot;1&quot;&gt;\u{fffd}&amp;");
    }
}
