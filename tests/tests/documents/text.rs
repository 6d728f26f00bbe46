// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Markdown, as far as needed by the tests.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

pub(crate) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned()
}

/// Files below `folder` with the extension `end`, without build results.
pub(crate) fn files(folder: &Path, end: &str, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap().flatten() {
        let path = entry.path();
        let name = entry.file_name();
        if path.is_dir() && name != "target" && name != ".git" {
            files(&path, end, found);
        } else if path.extension().is_some_and(|e| e == end) {
            found.push(path);
        }
    }
}

/// A page of documentation.
#[derive(Clone)]
pub(crate) struct Document {
    /// Path from the root of the repository.
    pub(crate) name: String,
    pub(crate) text: String,
}

/// Every page of the repository.
pub(crate) fn documents() -> Vec<Document> {
    let mut paths = Vec::new();
    files(&root(), "md", &mut paths);
    let found: Vec<Document> = paths.iter().filter_map(|path| Document::read(path)).collect();
    assert!(found.iter().any(|document| document.name == "README.md"));
    found
}

impl Document {
    pub(crate) fn read(path: &Path) -> Option<Document> {
        let text = fs::read_to_string(path).ok()?;
        let name = path.strip_prefix(root()).unwrap_or(path).display().to_string();
        Some(Document { name, text })
    }

    /// Lines outside of blocks of code, with their numbers.
    pub(crate) fn prose(&self) -> impl Iterator<Item = (usize, &str)> {
        let mut fenced = false;
        self.text.lines().enumerate().filter_map(move |(at, line)| {
            if line.trim_start().starts_with("```") {
                fenced = !fenced;
                return None;
            }
            let is_code = fenced || line.starts_with("    ") && !line.trim_start().starts_with('-');
            (!is_code).then_some((at + 1, line))
        })
    }

    /// Text in single backticks.
    pub(crate) fn code_spans(&self) -> Vec<(usize, String)> {
        let spans = self.prose().flat_map(|(at, line)| {
            line.split('`').skip(1).step_by(2).map(move |span| (at, span.to_owned()))
        });
        spans.collect()
    }

    /// Targets of links.
    pub(crate) fn links(&self) -> Vec<(usize, String)> {
        let links = self.prose().flat_map(|(at, line)| {
            let targets = line.split("](").skip(1).filter_map(|rest| rest.split_once(')'));
            targets.map(move |(target, _)| (at, target.to_owned()))
        });
        links.collect()
    }

    /// Anchors of headings for links from other pages, by GitHub's rule.
    pub(crate) fn anchors(&self) -> BTreeSet<String> {
        let headings = self.prose().filter(|(_, line)| line.starts_with('#'));
        headings
            .map(|(_, line)| {
                let title = line.trim_start_matches('#').trim().to_lowercase();
                let kept = title.chars().filter(|c| c.is_alphanumeric() || " -_".contains(*c));
                kept.collect::<String>().replace(' ', "-")
            })
            .collect()
    }
}
