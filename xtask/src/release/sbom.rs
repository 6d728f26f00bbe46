// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The libraries in the programs, as a list of CycloneDX 1.5 (SBOM).

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::label::VERSION;
use crate::third_party::{INSTALLED, used};

/// The list, of the packages named by cargo and of the hashes in Cargo.lock. Tests and tools of the build
/// are left out.
pub(super) fn of(metadata: &Value, lock: &toml::Table, date: &str) -> String {
    let hashes = hashes(lock);
    let used = used(metadata);
    let packages = metadata["packages"].as_array().map_or(&[][..], Vec::as_slice);
    let in_programs = |package: &&Value| package["id"].as_str().is_some_and(|id| used.contains(id));
    let mut all: BTreeMap<&str, &Value> = BTreeMap::new();
    for package in packages.iter().filter(in_programs) {
        all.extend(package["id"].as_str().map(|id| (id, package)));
    }
    let mut components: Vec<Value> = all.values().map(|one| component(one, &hashes)).collect();
    components.sort_by_key(|one| one["bom-ref"].as_str().unwrap_or_default().to_owned());
    let nodes = metadata["resolve"]["nodes"].as_array().map_or(&[][..], Vec::as_slice);
    let mut uses: Vec<Value> = nodes
        .iter()
        .filter_map(|node| {
            let own = all.get(node["id"].as_str()?)?;
            let deps = node["deps"].as_array()?.iter();
            let mut deps: Vec<String> = deps
                .filter(|dep| dep["dep_kinds"].as_array().is_some_and(|kinds| is_linked(kinds)))
                .filter_map(|dep| Some(reference(all.get(dep["pkg"].as_str()?)?)))
                .collect();
            deps.sort();
            Some(json!({ "ref": reference(own), "dependsOn": deps }))
        })
        .collect();
    let of_release = |package: &&&Value| INSTALLED.iter().any(|name| package["name"] == *name);
    let own: Vec<String> = all.values().filter(of_release).map(|one| reference(one)).collect();
    uses.push(json!({ "ref": "release", "dependsOn": own }));
    uses.sort_by_key(|one| one["ref"].as_str().unwrap_or_default().to_owned());
    let list = json!({
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {
            "timestamp": date,
            "component": {
                "type": "application",
                "bom-ref": "release",
                "name": "vhost-device-ism",
                "version": VERSION,
            },
        },
        "components": components,
        "dependencies": uses,
    });
    // Strings and numbers always have a form in JSON.
    serde_json::to_string_pretty(&list).unwrap_or_default() + "\n"
}

fn is_linked(kinds: &[Value]) -> bool {
    kinds.iter().any(|kind| kind["kind"].is_null())
}

/// The name of a package for other tools: a package URL.
fn reference(package: &Value) -> String {
    let word = |key: &str| package[key].as_str().unwrap_or_default();
    format!("pkg:cargo/{}@{}", word("name"), word("version"))
}

fn component(package: &Value, hashes: &BTreeMap<(String, String), String>) -> Value {
    let word = |key: &str| package[key].as_str().unwrap_or_default().to_owned();
    let name = reference(package);
    let mut component = json!({
        "type": "library",
        "bom-ref": name,
        "name": word("name"),
        "version": word("version"),
        "purl": name,
        // The older form of an expression has "/".
        "licenses": [{ "expression": word("license").replace('/', " OR ") }],
    });
    if let Some(hash) = hashes.get(&(word("name"), word("version"))) {
        component["hashes"] = json!([{ "alg": "SHA-256", "content": hash }]);
    }
    component
}

/// The hashes of crates from a registry, by name and version.
fn hashes(lock: &toml::Table) -> BTreeMap<(String, String), String> {
    let packages = lock.get("package").and_then(toml::Value::as_array);
    let word = |package: &toml::Value, key: &str| Some(package.get(key)?.as_str()?.to_owned());
    let of = |package| {
        Some(((word(package, "name")?, word(package, "version")?), word(package, "checksum")?))
    };
    packages.into_iter().flatten().filter_map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_has_the_linked_libraries_with_licence_and_hash() {
        let dep = |id: &str, kind: Value| json!({ "pkg": id, "dep_kinds": [{ "kind": kind }] });
        let package = |id: &str, name: &str, license: &str| json!({ "id": id, "name": name, "version": "1.0.0", "source": null, "license": license });
        let metadata = json!({
            "packages": [package("a", "smc-cli", "MIT"), package("b", "bytes", "MIT/Apache-2.0"),
                package("t", "proptest", "MIT")],
            "resolve": { "nodes": [
                { "id": "a", "deps": [dep("b", json!(null)), dep("t", json!("dev"))] },
                { "id": "b", "deps": [] }, { "id": "t", "deps": [] },
            ] },
        });
        let lock = "[[package]]\nname = 'bytes'\nversion = '1.0.0'\nchecksum = 'beef'\n";
        let text = of(&metadata, &lock.parse().unwrap(), "2026-01-01T00:00:00Z");
        let list: Value = serde_json::from_str(&text).unwrap();
        let names: Vec<_> = list["components"].as_array().unwrap().iter().collect();
        assert_eq!(names.len(), 2);
        assert_eq!(names[0]["purl"], "pkg:cargo/bytes@1.0.0");
        assert_eq!(names[0]["hashes"][0]["content"], "beef");
        assert_eq!(names[0]["licenses"][0]["expression"], "MIT OR Apache-2.0");
        let uses = list["dependencies"].as_array().unwrap();
        let of =
            |name: &str| uses.iter().find(|one| one["ref"] == name).unwrap()["dependsOn"].clone();
        assert_eq!(of("release"), json!(["pkg:cargo/smc-cli@1.0.0"]));
        assert_eq!(of("pkg:cargo/smc-cli@1.0.0"), json!(["pkg:cargo/bytes@1.0.0"]));
    }
}
