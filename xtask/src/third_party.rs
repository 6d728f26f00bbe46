// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The licences of the libraries in the programs.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::fs;
use std::path::Path;
use std::process::Command;

use serde_json::Value;

use crate::tool::{self, ToolError};

/// The packages of the programs and libraries to install.
pub(crate) const INSTALLED: [&str; 5] =
    ["smc-c", "smc-cli", "smc-device-plugin", "smc-preload", "vhost-device-ism"];

/// A text with each library, its licence, and the files passed on as demanded by its licence. A file of
/// several libraries is listed once.
///
/// # Errors
/// cargo does not list the libraries.
pub(crate) fn licences(root: &Path) -> Result<String, ToolError> {
    let metadata = metadata(root)?;
    let packages = metadata["packages"].as_array().ok_or_else(|| wrong("names no packages"))?;
    let by_id: BTreeMap<&str, &Value> =
        packages.iter().filter_map(|package| Some((package["id"].as_str()?, package))).collect();
    let used = used(&metadata);
    let mut text = String::from("The programs contain these libraries. Their licences follow.\n\n");
    let mut files: BTreeMap<String, Vec<String>> = BTreeMap::new();
    // Packages without a source are this project's.
    for package in used.iter().filter_map(|id| by_id.get(id)).filter(|p| !p["source"].is_null()) {
        let word = |key: &str| package[key].as_str().unwrap_or_default().to_owned();
        let name = format!("{} {}", word("name"), word("version"));
        let _ = writeln!(text, "{name}: {}", word("license"));
        let manifest = word("manifest_path");
        let directory = Path::new(&manifest).parent().unwrap_or(root);
        for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
            let file = entry.file_name().to_string_lossy().to_uppercase();
            let is_licence = ["LICENSE", "LICENCE", "COPYING", "COPYRIGHT", "NOTICE"]
                .iter()
                .any(|word| file.starts_with(word));
            if is_licence && let Ok(text) = fs::read_to_string(entry.path()) {
                files.entry(text).or_default().push(name.clone());
            }
        }
    }
    for (licence, names) in files {
        let _ = write!(text, "\n{}\n\n{}\n{}\n", "=".repeat(80), names.join(", "), licence.trim());
    }
    Ok(text)
}

fn wrong(what: &str) -> ToolError {
    ToolError::Answer { program: "cargo metadata".into(), what: what.into() }
}

/// The packages of the workspace's build for this machine, as cargo lists them.
///
/// # Errors
/// cargo does not list the packages.
pub(crate) fn metadata(root: &Path) -> Result<Value, ToolError> {
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or("cargo".into()));
    cargo.current_dir(root).args(["metadata", "--format-version=1", "--locked"]);
    // Otherwise libraries for other systems would have to be present, too.
    cargo.arg(format!("--filter-platform={}-unknown-linux-gnu", std::env::consts::ARCH));
    serde_json::from_str(&tool::output(cargo)?).map_err(|error| wrong(&error.to_string()))
}

/// The ids of the packages in the programs.
pub(crate) fn used(metadata: &Value) -> BTreeSet<&str> {
    let nodes = metadata["resolve"]["nodes"].as_array().map_or(&[][..], Vec::as_slice);
    let by_id: BTreeMap<&str, &Value> =
        nodes.iter().filter_map(|node| Some((node["id"].as_str()?, node))).collect();
    let packages = metadata["packages"].as_array().map_or(&[][..], Vec::as_slice);
    let members = packages.iter().filter(|package| {
        package["source"].is_null() && INSTALLED.iter().any(|name| package["name"] == *name)
    });
    let mut left: Vec<&str> = members.filter_map(|package| package["id"].as_str()).collect();
    let mut used = BTreeSet::new();
    while let Some(id) = left.pop() {
        if !used.insert(id) {
            continue;
        }
        let deps = by_id.get(id).and_then(|node| node["deps"].as_array());
        for dep in deps.into_iter().flatten() {
            // Neither for tests nor for builds.
            let kinds = dep["dep_kinds"].as_array().map_or(&[][..], Vec::as_slice);
            if kinds.iter().any(|kind| kind["kind"].is_null()) {
                left.extend(dep["pkg"].as_str());
            }
        }
    }
    used
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn libraries_of_tests_and_builds_are_left_out() {
        let dep = |id: &str, kind: Value| json!({ "pkg": id, "dep_kinds": [{ "kind": kind }] });
        let metadata = json!({
            "packages": [{ "id": "a", "name": "smc-cli", "source": null }],
            "resolve": { "nodes": [
                { "id": "a", "deps": [dep("b", json!(null)), dep("t", json!("dev"))] },
                { "id": "b", "deps": [dep("c", json!(null)), dep("m", json!("build"))] },
            ] },
        });
        let used: Vec<&str> = used(&metadata).into_iter().collect();
        assert_eq!(used, ["a", "b", "c"]);
    }
}
