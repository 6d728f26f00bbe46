// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Orders of memory accesses. SeqCst is for a pair of flags, and the comment of the word names the
//! pair. A fence has a comment of its own.

use std::collections::BTreeSet;

use super::refuse;
use super::sources::{Source, Workspace};

/// Lines above a fence with its comment.
const ABOVE: usize = 4;

/// The beginnings of the calls of an atomic word.
const CALLS: [&str; 5] = [".load(", ".store(", ".swap(", ".fetch_", ".compare_exchange"];

fn is_comment(line: &str) -> bool {
    line.trim_start().starts_with("//")
}

fn identifier(text: &str) -> Option<&str> {
    let text = text.trim_end().trim_end_matches([']', '0', '1', '[']);
    let at = text.rfind(|c: char| !c.is_alphanumeric() && c != '_').map_or(0, |at| at + 1);
    Some(&text[at..]).filter(|name| !name.is_empty())
}

/// The words with "SeqCst" in their comments.
fn declared(text: &str) -> BTreeSet<&str> {
    let lines: Vec<&str> = text.lines().collect();
    let is_explained = |at: usize| {
        let above = lines[..at].iter().rev().take_while(|line| is_comment(line));
        above.into_iter().any(|line| line.contains("SeqCst"))
    };
    let words = lines.iter().enumerate().filter(|(_, line)| line.contains("Atomic"));
    let names = words.filter_map(|(at, line)| Some((at, identifier(line.split_once(':')?.0)?)));
    names.filter(|(at, _)| is_explained(*at)).map(|(_, name)| name).collect()
}

/// The word of each access with SeqCst, or `None` for a fence without a comment, with its line.
fn used(text: &str) -> Vec<(usize, Option<&str>)> {
    let mut used = Vec::new();
    for (at, _) in text.match_indices("Ordering::SeqCst") {
        let start = text[..at].rfind('\n').map_or(0, |start| start + 1);
        let number = text[..at].matches('\n').count();
        if is_comment(&text[start..]) {
            continue;
        }
        let dot = CALLS.iter().filter_map(|call| text[..at].rfind(call)).max();
        if text[start..at].contains("fence(") {
            let above: Vec<&str> = text.lines().take(number).collect();
            if !above.iter().rev().take(ABOVE).any(|line| is_comment(line)) {
                used.push((number + 1, None));
            }
        } else if let Some(dot) = dot {
            used.push((number + 1, identifier(&text[..dot])));
        }
    }
    used
}

/// The package of a source.
fn package<'a>(workspace: &'a Workspace, source: &Source) -> Option<&'a str> {
    let package = workspace.packages.iter().find(|package| package.has(&source.path));
    package.map(|package| package.path.as_str())
}

#[test]
fn each_use_of_seq_cst_has_a_reason() {
    let workspace = Workspace::read();
    let mut known = BTreeSet::new();
    for source in &workspace.sources {
        let package = package(&workspace, source);
        known.extend(declared(&source.text).into_iter().map(|word| (package, word)));
    }
    let mut faults = Vec::new();
    for source in &workspace.sources {
        let package = package(&workspace, source);
        for (line, word) in used(&source.text) {
            match word {
                Some(word) if known.contains(&(package, word)) => {}
                Some(word) => faults.push(format!(
                    "{}:{line}: SeqCst without a reason in the comment of `{word}`",
                    source.path
                )),
                None => faults.push(format!("{}:{line}: a fence without a comment", source.path)),
            }
        }
    }
    refuse(&faults);
}

#[test]
fn words_and_fences_without_a_reason_are_found() {
    let source = "
struct Flags {
    /// SeqCst: set before `other` is read.
    lead: AtomicU32,
    plain: AtomicU32,
}
// Orders the two.
fence(Ordering::SeqCst);
self.lead
    .compare_exchange(0, 1, Ordering::SeqCst, Ordering::SeqCst);


other();
self.plain.load(Ordering::SeqCst);
compiler_fence(Ordering::SeqCst);
";
    assert_eq!(declared(source), BTreeSet::from(["lead"]));
    let lead = (10, Some("lead"));
    assert_eq!(used(source), [lead, lead, (14, Some("plain")), (15, None)]);
}
