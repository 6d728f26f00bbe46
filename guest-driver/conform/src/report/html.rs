// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The report as one self-contained page of HTML.

use std::fmt::Write as _;

use super::exchange::of_case;
use super::{Report, escaped, says, seconds};
use crate::dialogue::Verdict;
use crate::suite::CaseResult;

const STYLE: &str = include_str!("page.css");
const SCRIPT: &str = include_str!("page.js");

/// Verdicts whose cases come before all others.
const FIRST: [Verdict; 2] = [Verdict::Fail, Verdict::DeviatesAsLinux];

fn class(verdict: Verdict) -> &'static str {
    match verdict {
        Verdict::Pass => "pass",
        Verdict::Fail => "fail",
        Verdict::DeviatesAsLinux => "linux",
        Verdict::NotApplicable => "na",
        Verdict::NotObservable => "no",
    }
}

impl Report<'_> {
    /// The report as a page.
    pub fn html(&self) -> String {
        let mut page = String::new();
        let about = self.about;
        let title = format!("SMC conformance: {}", about.target);
        let _ = write!(
            page,
            "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
             <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\
             <title>{}</title>\n<style>\n{STYLE}</style></head><body>\n",
            escaped(&title)
        );
        self.head(&mut page);
        self.filters(&mut page);
        // The worst ones first, those with the same finding together.
        for verdict in FIRST {
            for (cause, cases) in self.by_cause(verdict) {
                let _ = writeln!(page, "<section><h2>{}: {}</h2>", verdict.name(), escaped(cause));
                for one in cases {
                    self.case(&mut page, one);
                }
                page.push_str("</section>\n");
            }
        }
        let mut group = "";
        for one in self.results.results.iter().filter(|one| !FIRST.contains(&one.verdict)) {
            let own = group_of(one);
            if own != group {
                if !group.is_empty() {
                    page.push_str("</section>\n");
                }
                group = own;
                let _ = writeln!(page, "<section><h2>{}</h2>", escaped(own));
            }
            self.case(&mut page, one);
        }
        if !group.is_empty() {
            page.push_str("</section>\n");
        }
        page.push_str("<p id=\"none\" hidden>No case is as chosen.</p>\n");
        page.push_str("<section class=\"rest\"><h2>Not tried, and why</h2><table>\n");
        for (what, why) in self.not_tried() {
            let _ = writeln!(page, "<tr><td>{}<td>{}", escaped(&what), escaped(&why));
        }
        let _ = write!(page, "</table></section>\n<script>\n{SCRIPT}</script>\n</body></html>\n");
        page
    }

    fn head(&self, page: &mut String) {
        let about = self.about;
        let failed = self.results.failed_musts();
        let _ = write!(
            page,
            "<header><h1>SMC conformance</h1><p class=\"headline {}\">{}</p><dl>",
            if failed == 0 { "good" } else { "bad" },
            self.headline()
        );
        let facts: Vec<&str> = self.results.facts.iter().collect();
        for (name, value) in [
            ("Target", about.target.clone()),
            ("Role", self.role().into()),
            ("Known of it", facts.join(", ")),
            ("Date", self.date()),
            ("Duration", format!("{} s", self.results.took.as_secs())),
            ("Program", about.program.clone()),
            ("Command", about.command.clone()),
        ] {
            let _ = write!(page, "<dt>{name}<dd>{}", escaped(&value));
        }
        page.push_str("</dl>\n<div class=\"bar\">");
        let total = self.results.results.len().max(1);
        for (verdict, count) in self.counts() {
            let share = 100.0 * count as f64 / total as f64;
            if count > 0 {
                let name = class(verdict);
                let _ = write!(page, "<i class=\"{name}\" style=\"width:{share:.2}%\"></i>");
            }
        }
        page.push_str("</div></header>\n");
    }

    fn filters(&self, page: &mut String) {
        page.push_str("<nav><div class=\"chips\">");
        for (verdict, count) in self.counts() {
            let _ = write!(
                page,
                "<button class=\"chip {0} {1}\" data-verdict=\"{0}\"{2}>{3} <b>{count}</b></button>",
                class(verdict),
                if count == 0 { "" } else { "on" },
                if count == 0 { " disabled" } else { "" },
                verdict.name(),
            );
        }
        page.push_str(
            "</div><label>Level <select id=\"level\"><option value=\"\">all<option>must\
             <option>should<option>may</select></label>\
             <input id=\"search\" type=\"search\" placeholder=\"id, rule or words\" \
             aria-label=\"Search\"><button id=\"open\">Open all shown</button>\
             <span id=\"shown\"></span></nav>\n",
        );
    }
}

/// The ids of a file of cases begin in the same way.
fn group_of(one: &CaseResult) -> &str {
    let end = one.case.id.match_indices('-').nth(1).map_or(one.case.id.len(), |(at, _)| at);
    one.case.id.get(..end).unwrap_or_default()
}

impl Report<'_> {
    fn case(&self, page: &mut String, one: &CaseResult) {
        let name = class(one.verdict);
        let _ = write!(
            page,
            "<details class=\"case {name}\" data-verdict=\"{name}\" data-level=\"{0}\"><summary>\
         <span class=\"verdict\">{1}</span><span class=\"level\">{0}</span>\
         <code>{2}</code><span class=\"title\">{3}</span></summary>",
            one.case.level.name(),
            one.verdict.name(),
            escaped(&one.case.id),
            escaped(&one.case.title),
        );
        let _ = write!(page, "<p class=\"says\">{}</p><p class=\"rules\">", escaped(says(one)));
        for rule in &one.case.rules {
            let text = super::rule(rule)
                .map_or(String::new(), |rule| format!("{} ({})", rule.text, rule.source));
            let _ = write!(page, "<span title=\"{1}\">{0}</span> ", escaped(rule), escaped(&text));
        }
        let _ = write!(page, "<em>{} s</em></p>", seconds(one.took));
        if FIRST.contains(&one.verdict) {
            page.push_str("<dl>");
            for rule in one.case.rules.iter().filter_map(|id| super::rule(id)) {
                let [of, text] = [rule.source, rule.text].map(escaped);
                let _ = write!(page, "<dt>{} ({})<dd>{text} <em>{of}</em>", rule.id, rule.level);
            }
            let _ = write!(page, "<dt>Again<dd><code>{}</code></dl>", escaped(&self.again(one)));
        }
        if let Some(note) = &one.case.note {
            let _ = write!(page, "<p class=\"note\">{}</p>", escaped(note));
        }
        if let Some(first) = &one.first {
            let again = "Played again, alone, with more time for each answer; at first: ";
            let _ = write!(page, "<p class=\"note\">{again}{}</p>", escaped(first));
        }
        exchanges(page, one);
        page.push_str("</details>\n");
    }
}

fn exchanges(page: &mut String, one: &CaseResult) {
    let exchanges = of_case(&one.passed);
    let several = exchanges.iter().any(|exchange| exchange.connection > 1);
    for exchange in exchanges {
        let connection =
            if several { format!("connection {}, ", exchange.connection) } else { String::new() };
        let _ = write!(
            page,
            "<div class=\"exchange {0}\"><h3>{1} <small>{connection}{2} ms{3}</small></h3>",
            exchange.from,
            match (exchange.from, exchange.path) {
                ("suite", "llc") => "Suite → link",
                ("suite", _) => "Suite →",
                (_, "llc") => "link ← Target",
                _ => "← Target",
            },
            exchange.ms,
            match exchange.hex.len() / 2 {
                0 => String::new(),
                n => format!(", {n} bytes"),
            },
        );
        if !exchange.segments.is_empty() {
            let lengths: Vec<String> =
                exchange.segments.iter().take(40).map(ToString::to_string).collect();
            let _ = write!(page, "<p class=\"segments\">in segments of {}</p>", lengths.join(", "));
        }
        if !exchange.event.is_empty() {
            let _ = write!(page, "<p class=\"event\">{}</p>", escaped(&exchange.event));
        }
        if !exchange.hex.is_empty() {
            let _ = write!(
                page,
                "<pre class=\"hex\">{}</pre><pre class=\"fields\">{}</pre>",
                rows(&exchange.hex),
                escaped(&exchange.explained)
            );
        }
        page.push_str("</div>");
    }
}

/// 16 bytes a row, with their offset.
fn rows(hex: &str) -> String {
    let mut out = String::new();
    let bytes: Vec<&str> = (0..hex.len()).step_by(2).filter_map(|at| hex.get(at..at + 2)).collect();
    for (i, row) in bytes.chunks(16).enumerate() {
        let (first, second) = row.split_at_checked(8).unwrap_or((row, &[]));
        let _ = writeln!(out, "{:04x}  {}  {}", 16 * i, first.join(" "), second.join(" "));
    }
    out
}
