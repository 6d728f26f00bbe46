// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Promises of documents about themselves: paths and links lead somewhere, lines and pages stay short,
//! and the words of public names are explained or known.

#![allow(clippy::unwrap_used, reason = "a source that cannot be read fails the test")]

mod heads;
mod packages;
mod prose;
mod text;
mod words;

use std::path::Path;

use smc_core::handshake::DeclineCode;

use text::{Document, documents, root};

/// Folders of the repository with paths named in documents.
const FOLDERS: [&str; 9] = [
    ".ci/",
    "backend/",
    "docs/",
    "guest-driver/",
    "packaging/",
    "qemu/",
    "smc-core/",
    "tests/",
    "xtask/",
];

/// Longest line, in characters.
const WIDTH: usize = 100;
/// Tests of smc-core write these pages.
const GENERATED: &str = "smc-core/src/";
/// Words in names still to be replaced by better ones. A word without a name left is removed here.
const NOT_YET: &[&str] = &["look", "plain"];

fn fail_with(faults: &[String], what: &str) {
    assert!(faults.is_empty(), "{what}:\n{}", faults.join("\n"));
}

/// Whether a document at `from` may name `path` so: from the root of the repository, or from its own
/// folder.
fn exists(from: &Document, path: &str) -> bool {
    let folder = root().join(&from.name).parent().map(Path::to_owned).unwrap_or_default();
    root().join(path).exists() || folder.join(path).exists()
}

#[test]
fn paths_in_documents_exist() {
    let mut faults = Vec::new();
    for document in documents() {
        for (line, code) in document.code_spans() {
            let is_path = FOLDERS.iter().any(|folder| code.starts_with(folder));
            let is_pattern = code.contains(['*', '<', '$', ' ', '{', '(', ';']);
            let path = code.trim_end_matches('/');
            if is_path && !is_pattern && !exists(&document, path) {
                faults.push(format!("{}:{line}: {code}", document.name));
            }
        }
    }
    fail_with(&faults, "paths that do not exist");
}

#[test]
fn links_of_documents_lead_somewhere() {
    let mut faults = Vec::new();
    for document in documents() {
        for (line, target) in document.links() {
            if target.contains("://") || target.starts_with("mailto:") {
                continue;
            }
            let (path, anchor) = target.split_once('#').unwrap_or((target.as_str(), ""));
            let folder = Path::new(&document.name).parent().unwrap_or(Path::new(""));
            let found = if path.is_empty() {
                Some(document.clone())
            } else {
                let full = root().join(folder).join(path);
                match full.extension().is_some_and(|end| end == "md") {
                    true => Document::read(&full),
                    false => full.exists().then(|| document.clone()),
                }
            };
            let good =
                found.is_some_and(|found| anchor.is_empty() || found.anchors().contains(anchor));
            if !good {
                faults.push(format!("{}:{line}: {target}", document.name));
            }
        }
    }
    fail_with(&faults, "links that lead nowhere");
}

#[test]
fn lines_of_documents_are_short() {
    let mut faults = Vec::new();
    for document in documents() {
        if document.name.starts_with(GENERATED) {
            continue;
        }
        for (line, text) in document.prose() {
            let is_table = text.starts_with('|');
            let is_link = text.trim_start_matches(['-', ' ', '>']).starts_with('[')
                && text.split_whitespace().count() <= 2;
            let length = text.chars().count();
            if length > WIDTH && !is_table && !is_link {
                faults.push(format!("{}:{line}: {length} characters", document.name));
            }
        }
    }
    fail_with(&faults, "lines of more than 100 characters");
}

/// The site of the documents (`mdbook build`) lists every page in its table of contents, and the index
/// of decisions every record.
#[test]
fn tables_of_contents_have_each_page() {
    let mut missing = Vec::new();
    for (folder, contents) in [("docs", "SUMMARY.md"), ("docs/decisions", "README.md")] {
        let text = Document::read(&root().join(folder).join(contents)).unwrap().text;
        let pages = std::fs::read_dir(root().join(folder)).unwrap().flatten();
        let names = pages.filter_map(|page| page.file_name().into_string().ok());
        let lacks = |name: &String| !text.contains(&format!("]({name})"));
        let pages = names.filter(|name| name.ends_with(".md") && name != contents);
        missing.extend(pages.filter(lacks).map(|name| format!("{folder}/{contents}: {name}")));
    }
    fail_with(&missing, "pages without a line in the table of contents");
}

/// Each record of a decision has a status below its title, and the date of its name.
#[test]
fn decisions_have_a_date_and_a_status() {
    let mut faults = Vec::new();
    for document in documents() {
        let Some(name) = document.name.strip_prefix("docs/decisions/2") else { continue };
        let date = format!("2{}", name.get(..9).unwrap_or_default());
        let status = document.text.lines().nth(2).unwrap_or_default();
        if !["Accepted", "Proposed"]
            .iter()
            .any(|word| status.starts_with(&format!("{word} {date}")))
        {
            faults.push(format!("{}: {status}", document.name));
        }
    }
    fail_with(&faults, "decisions without `Accepted DATE` or `Proposed DATE` in the third line");
}

#[test]
fn the_first_pages_are_short() {
    for (name, most) in [("README.md", 120), ("docs/architecture.md", 160)] {
        let lines = Document::read(&root().join(name)).unwrap().text.lines().count();
        assert!(lines <= most, "{name} has {lines} lines, more than {most}");
    }
}

#[test]
fn words_of_public_names_are_in_the_glossary_or_standard() {
    let glossary = words::glossary();
    let standard = words::standard();
    let (mut unknown, mut used) = (Vec::new(), Vec::new());
    for (word, name, file) in words::of_public_types() {
        let is_known = glossary.contains(&word) || standard.contains(&word);
        match NOT_YET.iter().find(|not_yet| **not_yet == word) {
            Some(not_yet) => used.push(*not_yet),
            None if !is_known => unknown.push(format!("{word}: {name} in {file}")),
            None => {}
        }
    }
    let unused: Vec<_> = NOT_YET.iter().filter(|word| !used.contains(word)).collect();
    assert!(unused.is_empty(), "NOT_YET names words that no type has: {unused:?}");
    fail_with(
        &unknown,
        "words that are neither in docs/glossary.md nor in tests/tests/documents/standard.txt",
    );
}

#[test]
fn packages_that_are_published_say_what_a_registry_shows() {
    fail_with(&packages::incomplete(), "packages that a registry cannot show");
}

#[test]
fn each_source_begins_with_its_licence() {
    fail_with(&heads::without_licence(), "sources without `// SPDX-License-Identifier: ...`");
}

#[test]
fn threads_of_the_daemon_are_in_the_table() {
    let page = Document::read(&root().join("docs/concurrency.md")).unwrap();
    let names = packages::threads_of_the_daemon();
    assert!(names.contains(&"bus-errors".to_owned()), "{names:?}");
    let missing: Vec<String> =
        names.into_iter().filter(|name| !page.text.contains(&format!("\n| `{name}` |"))).collect();
    fail_with(&missing, "threads that the table of docs/concurrency.md does not have");
}

#[test]
fn reasons_of_tcp_are_in_the_table() {
    let page = Document::read(&root().join("docs/when-it-is-tcp.md")).unwrap();
    let named = |code: &DeclineCode| format!("`{}` 0x{:08x}", code.name(), code.value());
    let rows = || page.text.lines().filter(|line| line.starts_with('|'));
    let missing: Vec<String> = DeclineCode::ALL
        .iter()
        .map(named)
        .filter(|name| !rows().any(|row| row.contains(name)))
        .collect();
    fail_with(&missing, "reasons that the table of docs/when-it-is-tcp.md does not have");
}

#[test]
fn the_list_of_standard_words_is_sorted() {
    let listed = words::standard_lines();
    let mut sorted = listed.clone();
    sorted.sort();
    sorted.dedup();
    assert_eq!(listed, sorted, "tests/tests/documents/standard.txt is not sorted");
}

#[test]
fn comments_name_their_subjects() {
    let comments: Vec<_> = words::sources().iter().map(prose::Comments::of).collect();
    let words: usize = comments.iter().map(|file| file.words).sum();
    let pronouns: usize = comments.iter().map(|file| file.pronouns).sum();
    println!("{:.2} pronouns in 100 words of comments", pronouns as f64 * 100.0 / words as f64);
    let faults: Vec<String> = comments.iter().flat_map(prose::Comments::faults).collect();
    fail_with(&faults, "comments that name their subjects by pronouns (see CONTRIBUTING.md)");
}
