// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Metadata of packages, and the daemon's names of threads.

use std::fs;
use std::path::PathBuf;

use toml::Table;

use super::text::{files, root};

fn manifests() -> Vec<(PathBuf, Table)> {
    let path = root().join("Cargo.toml");
    let workspace: Table = fs::read_to_string(path).unwrap().parse().unwrap();
    let members = workspace["workspace"]["members"].as_array().unwrap().iter();
    members
        .map(|member| {
            let folder = root().join(member.as_str().unwrap());
            let manifest = fs::read_to_string(folder.join("Cargo.toml")).unwrap();
            (folder, manifest.parse().unwrap())
        })
        .collect()
}

/// Missing metadata of published packages.
pub(crate) fn incomplete() -> Vec<String> {
    let mut faults = Vec::new();
    for (folder, manifest) in manifests() {
        let package = manifest["package"].as_table().unwrap();
        if package.get("publish").is_some_and(|publish| publish.as_bool() == Some(false)) {
            continue;
        }
        let mut lack = |what: &str| faults.push(format!("{}: {what}", package["name"]));
        for key in ["description", "license", "rust-version", "readme", "keywords", "categories"] {
            if !package.contains_key(key) {
                lack(key);
            }
        }
        // crates.io refuses more than five of either, and longer keywords.
        let words = |key: &str| package.get(key).and_then(|words| words.as_array()).cloned();
        let keywords = words("keywords").unwrap_or_default();
        let are_short = keywords.iter().all(|word| word.as_str().is_some_and(|w| w.len() <= 20));
        if keywords.len() > 5 || !are_short || words("categories").unwrap_or_default().len() > 5 {
            lack("at most five keywords of 20 characters, and five categories");
        }
        let docs = package.get("metadata").and_then(|metadata| metadata.get("docs"));
        if docs.and_then(|docs| docs.get("rs")).is_none() {
            lack("metadata.docs.rs");
        }
        if !folder.join("README.md").exists() {
            lack("README.md");
        }
    }
    faults
}

/// Names given to threads in sources of the daemon and the device, apart from tests.
pub(crate) fn threads_of_the_daemon() -> Vec<String> {
    let mut paths = Vec::new();
    for folder in ["backend/src", "backend/device/src"] {
        files(&root().join(folder), "rs", &mut paths);
    }
    let mut names = Vec::new();
    for path in paths {
        let text = fs::read_to_string(path).unwrap();
        let code = text.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default();
        for call in [".spawn(\"", ".name(\""] {
            let found = code.split(call).skip(1).filter_map(|rest| rest.split('"').next());
            names.extend(found.map(String::from));
        }
    }
    names.sort();
    names.dedup();
    names
}
