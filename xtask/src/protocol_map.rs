// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The map of the protocol: the place of each rule of the specifications, and its tests.
//!
//! The map is made of `docs/requirements.tsv`, the list of the rules, and of citations in the sources.
//! Outside of tests, an id in a comment stands at the line keeping the rule. A comment
//! `// Shows: CLC-54, CLC-55.` above a test cites the rules shown by the test.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use thiserror::Error;

const RULES: &str = "docs/requirements.tsv";
const SOURCES: [&str; 4] = ["backend", "guest-driver", "smc-core", "tests"];
const SHOWS: &str = "// Shows: ";
const HEAD: &str = "//! Rules kept here";

/// Areas of ids, in the order of the map.
const AREAS: [(&str, &str); 14] = [
    ("OPT", "TCP option"),
    ("CLC", "CLC messages, version 1 and common rules"),
    ("CLCV2", "CLC messages, version 2"),
    ("EID", "Enterprise IDs"),
    ("EISM", "Emulated ISM devices"),
    ("LLC", "LLC messages, version 1"),
    ("LLCV2", "LLC messages, version 2"),
    ("LG", "Link groups and links"),
    ("RMB", "RMBs and DMBs"),
    ("CDC", "Cursors and data flow"),
    ("CLOSE", "Termination"),
    ("SOCK", "Sockets"),
    ("ERR", "Errors and timeouts"),
    ("SEC", "Security"),
];

const PREFACE: &str = "\
# Protocol map

`cargo xtask protocol-map` prints this page, made of the sources.

The map says where each rule of RFC 7609 and of the SMC Version 2 specification (release 2.1) is
kept, and which tests show it. The rules and their notes are in
[requirements.tsv](requirements.tsv), with the clause that each comes from. An id is this
project's number of a rule. \"Where\" lists the files whose comments cite the id. \"Tests\" lists
the functions that a comment `// Shows:` connects with it; `git grep -w \"fn NAME\"` finds them. A
note says what the code does differently, or why there is no test. Where the specifications are
silent, [conformance.md](conformance.md#readings-of-the-specifications) says how they were read.

Levels: M mandatory, S recommended, O optional, I implied by the specifications.

The stack speaks SMC-Dv2 and SMC-Rv2 (releases 2.0 and 2.1), and SMC-Rv1. The handshake knows
SMC-Dv1 as well, but no socket uses it, because emulated devices do not serve it. Cursor rules
are written for SMC-R and hold for SMC-D by CDC-46.

SMC-R is in two halves. `smc-core/src/link_group` decides: it is a state machine that is tested
by itself, pair against pair, and by a simulation of two hosts with faults. `guest-driver`
carries out what it decides. Tests of that half use a software RNIC or virtual machines; the
tests `version_1`, `version_2_0`, `version_2_1_with_one_link` and `version_2_1_with_two_links`
are the matrix with AF_SMC.

A version 2 peer of SMC-R names its operating system in its first contact extension; that of
version 1 peers is an option (`SmcrOptions::v1_peer_os`, Linux by default). Towards Linux, which
is taken for a little-endian one (`PeerProfile::LINUX`), the driver departs from the
specifications where the note of a rule says so, and towards others (`PeerProfile::SPEC`) not.
";

/// Why there is no map.
#[derive(Debug, Error)]
pub(crate) enum MapError {
    /// A file cannot be read.
    #[error("{path}: {source}")]
    File { path: PathBuf, source: std::io::Error },
    /// A line of the list of rules is not of the form id, level, source, what, note.
    #[error("{RULES}:{line}: not id, level, source, what and a note, separated by tabs")]
    Rule { line: usize },
    /// A comment cites a rule missing from the list.
    #[error("{place}: the rule {id} is not in {RULES}")]
    Unknown { place: String, id: String },
    /// A comment `// Shows:` has no function behind it.
    #[error("{place}: no function follows this comment")]
    NoTest { place: String },
    /// No line keeps a mandatory rule, and no note says why.
    #[error("{id} is mandatory, but no line of code cites it, and it has no note")]
    Nowhere { id: String },
    /// The head of a file lists rules, without a reference to any line.
    #[error("{place}: rules are cited at the lines that keep them, not in the head of a file")]
    Head { place: String },
}

/// Area and number of a rule; areas are ordered as in [`AREAS`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Id {
    area: usize,
    number: u32,
}

impl std::fmt::Display for Id {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let area = AREAS.get(self.area).map_or("?", |(name, _)| name);
        write!(f, "{area}-{}", self.number)
    }
}

/// The id at the start of `text`, and the remaining text.
fn id(text: &str) -> Option<(Id, &str)> {
    let (area, rest) = AREAS.iter().enumerate().find_map(|(area, (name, _))| {
        text.strip_prefix(name)?.strip_prefix('-').map(|rest| (area, rest))
    })?;
    let end = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
    let (number, rest) = rest.split_at_checked(end)?;
    Some((Id { area, number: number.parse().ok()? }, rest))
}

/// The ids of a comment; `LLC-27 to LLC-32` stands for six.
fn ids(comment: &str) -> Vec<Id> {
    let mut found: Vec<Id> = Vec::new();
    let mut before = ' ';
    let mut range_from: Option<Id> = None;
    let mut rest = comment;
    while let Some(c) = rest.chars().next() {
        let is_start = !before.is_ascii_alphanumeric() && before != '-';
        match id(rest).filter(|_| is_start) {
            Some((id, after)) => {
                match range_from.take().filter(|from| from.area == id.area) {
                    Some(from) => found
                        .extend((from.number + 1..=id.number).map(|number| Id { number, ..id })),
                    None => found.push(id),
                }
                before = '0';
                rest = after;
                if let Some(after) = rest.strip_prefix(" to ") {
                    range_from = Some(id);
                    before = ' ';
                    rest = after;
                }
            }
            None => {
                range_from = None;
                before = c;
                rest = rest.get(c.len_utf8()..).unwrap_or_default();
            }
        }
    }
    found
}

/// One line of the list.
struct Rule {
    id: Id,
    level: String,
    what: String,
    note: String,
}

fn rules(root: &Path) -> Result<Vec<Rule>, MapError> {
    let text = read(&root.join(RULES))?;
    let mut rules = Vec::new();
    for (at, line) in text.lines().enumerate() {
        if line.starts_with('#') || line.starts_with("id\t") || line.is_empty() {
            continue;
        }
        let bad = MapError::Rule { line: at + 1 };
        let fields: Vec<&str> = line.split('\t').collect();
        let (name, level, what, note) = match fields[..] {
            [name, level, _, what] => (name, level, what, ""),
            [name, level, _, what, note] => (name, level, what, note),
            _ => return Err(bad),
        };
        let Some((id, "")) = id(name) else { return Err(bad) };
        let [level, what, note] = [level, what, note].map(String::from);
        rules.push(Rule { id, level, what, note });
    }
    Ok(rules)
}

/// The sources' citations of the rules.
#[derive(Default)]
struct Citations {
    files: BTreeMap<Id, BTreeSet<String>>,
    tests: BTreeMap<Id, BTreeSet<String>>,
}

/// Whether all of a file is tests, or support of tests.
fn is_test_file(name: &str) -> bool {
    name.split('/').any(|part| part == "tests" || part == "testing")
        || name.ends_with("/tests.rs")
        || name.ends_with("_tests.rs")
}

/// Name of the function declared in a line.
fn function(line: &str) -> Option<&str> {
    let (before, after) = line.split_once("fn ")?;
    let words = before.split_whitespace().all(|w| w.starts_with("pub") || w == "async");
    let end = after.find(|c: char| !c.is_alphanumeric() && c != '_')?;
    after.get(..end).filter(|_| words)
}

impl Citations {
    fn read(&mut self, name: &str, text: &str) -> Result<(), MapError> {
        let mut in_tests = is_test_file(name);
        // The last line of an inline module of tests.
        let mut ends: Option<String> = None;
        let mut is_for_tests = false;
        let mut shown: Vec<Id> = Vec::new();
        for (at, line) in text.lines().enumerate() {
            let trimmed = line.trim_start();
            if ends.as_deref() == Some(line) {
                ends = None;
                in_tests = false;
            }
            if is_for_tests && trimmed.starts_with("mod ") && line.ends_with('{') {
                let indent = line.len() - trimmed.len();
                ends = Some(format!("{}}}", " ".repeat(indent)));
                in_tests = true;
            }
            is_for_tests = trimmed == "#[cfg(test)]" || is_for_tests && trimmed.starts_with("#[");
            if trimmed.starts_with(HEAD) {
                return Err(MapError::Head { place: format!("{name}:{}", at + 1) });
            } else if let Some(list) = trimmed.strip_prefix(SHOWS) {
                shown.extend(ids(list));
            } else if let Some(function) = function(line) {
                for id in shown.drain(..) {
                    self.tests.entry(id).or_default().insert(function.into());
                }
            } else if !shown.is_empty() && trimmed.is_empty() {
                return Err(MapError::NoTest { place: format!("{name}:{at}") });
            } else if let Some((_, comment)) = line.split_once("//").filter(|_| !in_tests) {
                for id in ids(comment) {
                    self.files.entry(id).or_default().insert(name.into());
                }
            }
        }
        Ok(())
    }
}

fn read(path: &Path) -> Result<String, MapError> {
    fs::read_to_string(path).map_err(|source| MapError::File { path: path.to_owned(), source })
}

/// Rust sources below a folder, without build results.
fn sources(folder: &Path, found: &mut Vec<PathBuf>) -> Result<(), MapError> {
    let at = |source| MapError::File { path: folder.to_owned(), source };
    for entry in fs::read_dir(folder).map_err(at)? {
        let path = entry.map_err(at)?.path();
        if path.is_dir() && !path.ends_with("target") {
            sources(&path, found)?;
        } else if path.extension().is_some_and(|end| end == "rs") {
            found.push(path);
        }
    }
    Ok(())
}

/// The text of the map.
///
/// # Errors
/// A file cannot be read, a citation names no rule, or a mandatory rule has nothing to show.
pub(crate) fn generate(root: &Path) -> Result<String, MapError> {
    let rules = rules(root)?;
    let mut citations = Citations::default();
    let mut files = Vec::new();
    for folder in SOURCES {
        sources(&root.join(folder), &mut files)?;
    }
    for file in &files {
        let name = file.strip_prefix(root).unwrap_or(file).display().to_string();
        citations.read(&name, &read(file)?)?;
    }
    let known: BTreeSet<Id> = rules.iter().map(|rule| rule.id).collect();
    for (id, places) in citations.files.iter().chain(&citations.tests) {
        if !known.contains(id) {
            let place = places.first().cloned().unwrap_or_default();
            return Err(MapError::Unknown { place, id: id.to_string() });
        }
    }
    for rule in &rules {
        let is_kept = citations.files.contains_key(&rule.id);
        if rule.level == "M" && !is_kept && rule.note.is_empty() {
            return Err(MapError::Nowhere { id: rule.id.to_string() });
        }
    }
    Ok(render(&rules, &citations))
}

fn render(rules: &[Rule], citations: &Citations) -> String {
    let mut map = String::from(PREFACE);
    map.push_str("\n| area | rules | with a test | without |\n|---|---|---|---|\n");
    for (area, (name, _)) in AREAS.iter().enumerate() {
        let all: Vec<&Rule> = rules.iter().filter(|rule| rule.id.area == area).collect();
        let tested = all.iter().filter(|rule| citations.tests.contains_key(&rule.id)).count();
        let _ = writeln!(map, "| {name} | {} | {tested} | {} |", all.len(), all.len() - tested);
    }
    let code = |names: Option<&BTreeSet<String>>| {
        let names = names.into_iter().flatten().map(|name| format!("`{name}`"));
        names.collect::<Vec<_>>().join(", ")
    };
    for (area, (name, title)) in AREAS.iter().enumerate() {
        let _ = writeln!(map, "\n## {name} - {title}\n");
        map.push_str("| id | level | what | where | tests | note |\n|---|---|---|---|---|---|\n");
        for rule in rules.iter().filter(|rule| rule.id.area == area) {
            let (id, level, what, note) = (rule.id, &rule.level, &rule.what, &rule.note);
            let files = code(citations.files.get(&id));
            let tests = code(citations.tests.get(&id));
            let _ = writeln!(map, "| {id} | {level} | {what} | {files} | {tests} | {note} |");
        }
    }
    map
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_citation_is_of_a_rule() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        let map = generate(root).unwrap_or_else(|why| panic!("{why}"));
        assert!(map.lines().filter(|line| line.starts_with("| CLC-")).count() > 50);
    }

    fn cited(name: &str, text: &str) -> (Vec<String>, Vec<String>) {
        let mut citations = Citations::default();
        citations.read(name, text).unwrap();
        let names = |of: &BTreeMap<Id, BTreeSet<String>>| of.keys().map(Id::to_string).collect();
        (names(&citations.files), names(&citations.tests))
    }

    #[test]
    fn comments_of_code_say_where_and_those_of_tests_do_not() {
        let text = "/// As told (CLC-3, LLC-27 to LLC-29).\nfn a() {}\n\n#[cfg(test)]\nmod tests {\n    \
                    // CLC-4 is not here.\n    // Shows: LLCV2-4, OPT-1.\n    #[test]\n    \
                    fn b() {}\n}\n";
        let (files, tests) = cited("smc-core/src/a.rs", text);
        assert_eq!(files, ["CLC-3", "LLC-27", "LLC-28", "LLC-29"]);
        assert_eq!(tests, ["OPT-1", "LLCV2-4"]);
        assert!(cited("smc-core/tests/a.rs", text).0.is_empty());
    }

    #[test]
    fn a_word_that_looks_like_an_id_is_none() {
        assert_eq!(ids("XCLC-3, A-CLC-4, CLC-x, CLC-7."), [Id { area: 1, number: 7 }]);
    }

    #[test]
    fn a_list_of_rules_in_a_head_is_an_error() {
        let text = "//! A file.\n//!\n//! Rules kept here: CLC-1.\n";
        let refused = Citations::default().read("a.rs", text);
        assert!(matches!(refused, Err(MapError::Head { place }) if place == "a.rs:3"));
    }

    #[test]
    fn a_comment_about_no_test_is_an_error() {
        let mut citations = Citations::default();
        let text = "// Shows: CLC-1.\n\nfn a() {}\n";
        assert!(matches!(citations.read("a.rs", text), Err(MapError::NoTest { .. })));
    }
}
