// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Licences and sources of all packages of the workspace's build, against `deny.toml`.
//!
//! `cargo deny check licenses bans sources` checks the same and more. This test needs nothing but cargo, and
//! runs with all others.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on may stop")]

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

const CRATES_IO: &str = "registry+https://github.com/rust-lang/crates.io-index";

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// The packages of a workspace on every platform, with all features.
fn packages(manifest: &str) -> Vec<Value> {
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["metadata", "--format-version=1", "--locked", "--all-features"]);
    let output = cargo.arg("--manifest-path").arg(root().join(manifest)).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let metadata: Value = serde_json::from_slice(&output.stdout).unwrap();
    metadata["packages"].as_array().unwrap().clone()
}

fn rules() -> toml::Table {
    std::fs::read_to_string(root().join("deny.toml")).unwrap().parse().unwrap()
}

/// Whether a licence expression (SPDX, or the older form with `/`) can be satisfied.
fn is_allowed(expression: &str, allowed: &BTreeSet<String>) -> bool {
    let text = expression.replace('/', " OR ").replace('(', " ( ").replace(')', " ) ");
    let words: Vec<&str> = text.split_whitespace().collect();
    let mut at = 0;
    let result = any(&words, &mut at, allowed);
    result && at == words.len()
}

fn any(words: &[&str], at: &mut usize, allowed: &BTreeSet<String>) -> bool {
    let mut result = all(words, at, allowed);
    while words.get(*at) == Some(&"OR") {
        *at += 1;
        result |= all(words, at, allowed);
    }
    result
}

fn all(words: &[&str], at: &mut usize, allowed: &BTreeSet<String>) -> bool {
    let mut result = one(words, at, allowed);
    while words.get(*at) == Some(&"AND") {
        *at += 1;
        result &= one(words, at, allowed);
    }
    result
}

fn one(words: &[&str], at: &mut usize, allowed: &BTreeSet<String>) -> bool {
    let Some(word) = words.get(*at) else { return false };
    *at += 1;
    if *word == "(" {
        let result = any(words, at, allowed);
        let closed = words.get(*at) == Some(&")");
        *at += 1;
        return result && closed;
    }
    let mut licence = (*word).to_owned();
    if words.get(*at) == Some(&"WITH") {
        licence = words[*at - 1..(*at + 2).min(words.len())].join(" ");
        *at += 2;
    }
    allowed.contains(&licence)
}

fn strings(list: &toml::Value) -> BTreeSet<String> {
    list.as_array().unwrap().iter().map(|value| value.as_str().unwrap().to_owned()).collect()
}

#[test]
fn all_packages_have_an_allowed_licence_and_come_from_crates_io() {
    let rules = rules();
    let allowed = strings(&rules["licenses"]["allow"]);
    let banned: BTreeSet<&str> = rules["bans"]["deny"]
        .as_array()
        .unwrap()
        .iter()
        .map(|ban| ban["crate"].as_str().unwrap())
        .collect();
    let mut wrong = Vec::new();
    for package in packages("Cargo.toml") {
        let name = package["name"].as_str().unwrap();
        let mut check = |holds: bool, what: String| {
            if !holds {
                wrong.push(format!("{name}: {what}"));
            }
        };
        let licence = package["license"].as_str().unwrap_or_default();
        check(is_allowed(licence, &allowed), format!("licence {licence:?}"));
        check(!banned.contains(name), "is banned".into());
        let source = package["source"].as_str();
        check(source.is_none_or(|source| source == CRATES_IO), format!("comes from {source:?}"));
        if source.is_none() {
            for dependency in package["dependencies"].as_array().unwrap() {
                let is_wild = dependency["req"] == "*" && dependency["path"].is_null();
                check(!is_wild, format!("{} in any version", dependency["name"]));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn an_expression_holds_if_an_alternative_of_it_is_allowed() {
    let allowed = ["MIT", "Apache-2.0", "Apache-2.0 WITH LLVM-exception"];
    let allowed: BTreeSet<String> = allowed.map(str::to_owned).into();
    for good in [
        "MIT",
        "MIT OR GPL-3.0",
        "GPL-3.0/MIT",
        "(GPL-3.0 OR MIT) AND Apache-2.0",
        "Apache-2.0 WITH LLVM-exception OR GPL-3.0",
    ] {
        assert!(is_allowed(good, &allowed), "{good}");
    }
    for bad in [
        "",
        "GPL-3.0",
        "MIT AND GPL-3.0",
        "GPL-3.0 OR (MIT AND GPL-2.0)",
        "(MIT",
        "MIT)",
        "MIT WITH LLVM-exception",
        "MIT MIT",
    ] {
        assert!(!is_allowed(bad, &allowed), "{bad}");
    }
}
