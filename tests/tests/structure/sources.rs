// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The packages of the workspace and their sources.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// The root of the repository under test by cargo.
pub(crate) fn root() -> PathBuf {
    // A program run by hand uses its own sources.
    let package = std::env::var_os("CARGO_MANIFEST_DIR");
    package.map_or(env!("CARGO_MANIFEST_DIR").into(), PathBuf::from).join("..")
}

pub(crate) struct Package {
    /// The package's folder.
    pub(crate) path: String,
    /// Packages of the workspace in `[dependencies]`.
    pub(crate) uses: BTreeSet<String>,
}

/// A source file, and its text; in `Workspace::sources` without its tests.
pub(crate) struct Source {
    pub(crate) path: String,
    pub(crate) text: String,
}

pub(crate) struct Workspace {
    pub(crate) packages: Vec<Package>,
    /// Sources built into programs and libraries.
    pub(crate) sources: Vec<Source>,
    /// These, tests, examples and the like.
    pub(crate) all: Vec<Source>,
}

fn manifest(path: &Path) -> toml::Table {
    fs::read_to_string(path.join("Cargo.toml")).unwrap().parse().unwrap()
}

impl Workspace {
    pub(crate) fn read() -> Workspace {
        let root = root();
        let members = manifest(&root)["workspace"]["members"].clone();
        let members: Vec<String> = members.try_into().unwrap();
        let manifests: Vec<_> = members.iter().map(|path| manifest(&root.join(path))).collect();
        let names: BTreeSet<&str> = manifests
            .iter()
            .map(|manifest| manifest["package"]["name"].as_str().unwrap())
            .collect();
        let uses = |manifest: &toml::Table| {
            let dependencies = manifest.get("dependencies").and_then(toml::Value::as_table);
            let all = dependencies.into_iter().flat_map(toml::Table::keys);
            all.filter(|name| names.contains(name.as_str())).cloned().collect()
        };
        let mut workspace =
            Workspace { packages: Vec::new(), sources: Vec::new(), all: Vec::new() };
        for (path, manifest) in members.iter().zip(&manifests) {
            let in_members = |dir: &str| members.iter().any(|member| member == dir);
            read(&root, path, &in_members, &mut workspace.all);
            workspace.packages.push(Package { path: path.clone(), uses: uses(manifest) });
        }
        let is_built = |path: &str| {
            let is_test = path
                .split('/')
                .any(|part| part == "tests" || part == "tests.rs" || part.ends_with("_tests.rs"));
            path.contains("/src/") && !is_test
        };
        let built = workspace.all.iter().filter(|source| is_built(&source.path));
        workspace.sources = built.map(Source::without_tests).collect();
        workspace
    }

    pub(crate) fn exists(&self, path: &str) -> bool {
        root().join(path).exists()
    }

    pub(crate) fn text(&self, path: &str) -> &str {
        &self.sources.iter().find(|source| source.path == path).unwrap().text
    }
}

impl Package {
    pub(crate) fn root(&self) -> String {
        format!("{}/src/lib.rs", self.path)
    }

    /// Whether the source is built into the package.
    pub(crate) fn has(&self, source: &str) -> bool {
        source.strip_prefix(&self.path).is_some_and(|rest| rest.starts_with("/src/"))
    }

    pub(crate) fn has_library(&self) -> bool {
        root().join(self.root()).exists() && !self.path.starts_with("tests")
    }
}

/// Adds the Rust sources of `dir`, without other packages below.
fn read(root: &Path, dir: &str, is_package: &dyn Fn(&str) -> bool, out: &mut Vec<Source>) {
    let Ok(entries) = fs::read_dir(root.join(dir)) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let path = format!("{dir}/{name}");
        if entry.path().is_dir() {
            if name != "target" && !is_package(&path) {
                read(root, &path, is_package, out);
            }
        } else if name.ends_with(".rs")
            && let Ok(text) = fs::read_to_string(entry.path())
        {
            out.push(Source { path, text });
        }
    }
}

impl Source {
    fn without_tests(&self) -> Source {
        let is_module = |rest: &str| {
            let mut items = rest.lines().filter(|line| !line.starts_with("#["));
            let item = items.next().unwrap_or_default();
            let item = item.strip_prefix("pub(super) ").unwrap_or(item);
            item.starts_with("mod ") && item.ends_with('{')
        };
        let of_tests = ["\n#[cfg(test)]\n", "\n#[cfg(all(test, "];
        let tests = of_tests.iter().flat_map(|start| self.text.match_indices(start));
        let starts = tests.map(|(at, _)| at).filter(|at| is_module(&self.text[at + 1..]));
        let end = starts.min().unwrap_or(self.text.len());
        Source { path: self.path.clone(), text: self.text[..end].to_owned() }
    }

    /// Lines of code, without comments, by number.
    fn code(&self) -> impl Iterator<Item = (usize, &str)> {
        let lines = self.text.lines().enumerate().map(|(index, line)| (index + 1, line));
        lines.map(|(number, line)| (number, line.split("//").next().unwrap_or_default()))
    }

    /// The first names behind `crate::`, with their lines.
    pub(crate) fn uses_of_crate(&self) -> Vec<(usize, String)> {
        let mut uses = Vec::new();
        let lines: Vec<(usize, &str)> = self.code().collect();
        for (index, (number, line)) in lines.iter().enumerate() {
            for rest in line.split("crate::").skip(1) {
                if let Some(group) = rest.strip_prefix('{') {
                    let more = lines[index + 1..].iter().flat_map(|(_, line)| line.chars());
                    let names = names_of_group(group.chars().chain(more));
                    uses.extend(names.into_iter().map(|name| (*number, name)));
                } else {
                    uses.push((*number, rest.chars().take_while(is_of_name).collect()));
                }
            }
        }
        uses
    }

    /// How many modules up each `super::` leads, with its line.
    pub(crate) fn supers(&self) -> Vec<(usize, usize)> {
        let mut found = Vec::new();
        for (number, line) in self.code() {
            let most = (1..6).rev().find(|n| line.contains(&"super::".repeat(*n)));
            found.extend(most.map(|supers| (number, supers)));
        }
        found
    }

    /// How many modules this one lies below the room at `path`.
    pub(crate) fn depth_below(&self, path: &str) -> usize {
        let rest = self.path.strip_prefix(path).unwrap_or_default().trim_start_matches('/');
        let parts = rest.split('/').filter(|part| !part.is_empty());
        parts.filter(|part| !["mod.rs", "lib.rs", "main.rs"].contains(part)).count()
    }

    /// The numbers of the lines with one of `names`.
    pub(crate) fn lines_with(&self, names: &[&str]) -> Vec<usize> {
        let has = |line: &str| names.iter().any(|name| line.contains(name));
        self.code().filter(|(_, line)| has(line)).map(|(number, _)| number).collect()
    }
}

fn is_of_name(c: &char) -> bool {
    c.is_alphanumeric() || *c == '_'
}

/// The first names of the paths in `a::b, c::{d, e}}`, a group up to its brace.
fn names_of_group(text: impl Iterator<Item = char>) -> Vec<String> {
    let mut depth = 0;
    let mut paths = vec![String::new()];
    for c in text {
        match c {
            '{' => depth += 1,
            '}' if depth == 0 => break,
            '}' => depth -= 1,
            ',' if depth == 0 => paths.push(String::new()),
            _ => {}
        }
        if depth == 0
            && let Some(path) = paths.last_mut()
        {
            path.push(c);
        }
    }
    let name = |path: String| {
        path.chars().skip_while(|c| !is_of_name(c)).take_while(is_of_name).collect::<String>()
    };
    paths.into_iter().map(name).filter(|name| !name.is_empty()).collect()
}

#[test]
fn groups_of_uses_are_read_by_their_first_names() {
    let group = " sys::{lock, raw},\n    relay, socket::states::{self, State}};";
    assert_eq!(names_of_group(group.chars()), ["sys", "relay", "socket"]);
}
