// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The report as JSON. docs/conformance.md describes the fields.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;

use super::Report;
use super::exchange::{Exchange, of_case};

#[derive(Serialize)]
struct JsonReport<'a> {
    /// Counts up when a field changes its meaning.
    format: u32,
    program: &'a str,
    command: &'a str,
    target: &'a str,
    role: &'a str,
    began: String,
    seconds: f64,
    facts: Vec<&'a str>,
    failed_musts: usize,
    summary: BTreeMap<&'static str, usize>,
    requirements: Vec<JsonRule>,
    cases: Vec<JsonCase<'a>>,
    not_tried: Vec<JsonNotTried>,
}

#[derive(Serialize)]
struct JsonRule {
    id: &'static str,
    level: &'static str,
    source: &'static str,
    text: &'static str,
}

#[derive(Serialize)]
struct JsonCase<'a> {
    id: &'a str,
    layer: &'a str,
    title: &'a str,
    level: &'static str,
    rules: &'a [String],
    verdict: &'static str,
    says: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    first: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    note: Option<&'a str>,
    seconds: f64,
    again: String,
    exchanges: Vec<Exchange>,
}

#[derive(Serialize)]
struct JsonNotTried {
    what: String,
    why: String,
}

impl Report<'_> {
    /// The report as one JSON object.
    pub fn json(&self) -> String {
        let cases = self.results.results.iter().map(|one| JsonCase {
            id: &one.case.id,
            layer: &one.case.layer,
            title: &one.case.title,
            level: one.case.level.name(),
            rules: &one.case.rules,
            verdict: one.verdict.name(),
            says: &one.says,
            first: one.first.as_deref(),
            note: one.case.note.as_deref(),
            seconds: one.took.as_secs_f64(),
            again: self.again(one),
            exchanges: of_case(&one.passed),
        });
        let named = self.results.results.iter().flat_map(|one| &one.case.rules);
        let named: BTreeSet<&str> = named.map(String::as_str).collect();
        let requirements = named.into_iter().filter_map(super::rule).map(|rule| JsonRule {
            id: rule.id,
            level: rule.level,
            source: rule.source,
            text: rule.text,
        });
        let report = JsonReport {
            format: 1,
            program: &self.about.program,
            command: &self.about.command,
            target: &self.about.target,
            role: self.role(),
            began: self.date(),
            seconds: self.results.took.as_secs_f64(),
            facts: self.results.facts.iter().collect(),
            failed_musts: self.results.failed_musts(),
            summary: self.counts().into_iter().map(|(verdict, n)| (verdict.name(), n)).collect(),
            requirements: requirements.collect(),
            cases: cases.collect(),
            not_tried: self
                .not_tried()
                .into_iter()
                .map(|(what, why)| JsonNotTried { what, why })
                .collect(),
        };
        // Strings and numbers always have a form in JSON.
        serde_json::to_string_pretty(&report).unwrap_or_default() + "\n"
    }
}
