// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The built-in cases, and cases of a directory.

use std::path::Path;

use crate::case::Cases;
use crate::suite::SuiteError;

const BASES: &str = include_str!("../cases/bases.toml");
/// Files by name. A file of the same name in a directory of cases replaces the built-in file.
const FILES: &[(&str, &str)] = &[
    ("server-facts.toml", include_str!("../cases/server-facts.toml")),
    ("server-option.toml", include_str!("../cases/server-option.toml")),
    ("cdc.toml", include_str!("../cases/cdc.toml")),
    ("cdc-link.toml", include_str!("../cases/cdc-link.toml")),
    ("client-facts.toml", include_str!("../cases/client-facts.toml")),
    ("server-accept.toml", include_str!("../cases/server-accept.toml")),
    ("server-confirm.toml", include_str!("../cases/server-confirm.toml")),
    ("server-contact.toml", include_str!("../cases/server-contact.toml")),
    ("server-decline.toml", include_str!("../cases/server-decline.toml")),
    ("server-header.toml", include_str!("../cases/server-header.toml")),
    ("server-offsets.toml", include_str!("../cases/server-offsets.toml")),
    ("server-r.toml", include_str!("../cases/server-r.toml")),
    ("server-release.toml", include_str!("../cases/server-release.toml")),
    ("server-reserved.toml", include_str!("../cases/server-reserved.toml")),
    ("server-segments.toml", include_str!("../cases/server-segments.toml")),
    ("server-types.toml", include_str!("../cases/server-types.toml")),
    ("server-v1.toml", include_str!("../cases/server-v1.toml")),
    ("client-proposal.toml", include_str!("../cases/client-proposal.toml")),
    ("client-header.toml", include_str!("../cases/client-header.toml")),
    ("client-accept.toml", include_str!("../cases/client-accept.toml")),
    ("client-decline.toml", include_str!("../cases/client-decline.toml")),
    ("client-r.toml", include_str!("../cases/client-r.toml")),
    ("server-d1.toml", include_str!("../cases/server-d1.toml")),
    ("server-seid.toml", include_str!("../cases/server-seid.toml")),
    ("server-records.toml", include_str!("../cases/server-records.toml")),
    ("server-prefix.toml", include_str!("../cases/server-prefix.toml")),
    ("server-r-confirm.toml", include_str!("../cases/server-r-confirm.toml")),
    ("client-d1.toml", include_str!("../cases/client-d1.toml")),
    ("client-offer.toml", include_str!("../cases/client-offer.toml")),
    ("client-devices.toml", include_str!("../cases/client-devices.toml")),
    ("client-r-accept.toml", include_str!("../cases/client-r-accept.toml")),
    ("llc-terms.toml", include_str!("../cases/llc-terms.toml")),
    ("llc.toml", include_str!("../cases/llc.toml")),
    ("llc-server.toml", include_str!("../cases/llc-server.toml")),
    ("llc-client.toml", include_str!("../cases/llc-client.toml")),
    ("llc-second-server.toml", include_str!("../cases/llc-second-server.toml")),
    ("llc-second-client.toml", include_str!("../cases/llc-second-client.toml")),
];

impl Cases {
    /// The cases of the suite. A file of `directory` replaces the built-in file of the same name; files
    /// of other names are added.
    ///
    /// # Errors
    /// An unreadable or malformed file.
    pub fn load(directory: Option<&Path>) -> Result<Cases, SuiteError> {
        let mut cases = Cases::default();
        let named = |name: &str, why: String| SuiteError::Cases(format!("{name}: {why}"));
        cases.add_bases(BASES).map_err(|why| named("bases.toml", why))?;
        let mut more = directory.map(files_of).transpose()?.unwrap_or_default();
        if let Some((name, text)) = take(&mut more, "bases.toml") {
            cases.add_bases(&text).map_err(|why| named(&name, why))?;
        }
        for (name, text) in FILES {
            let other = take(&mut more, name);
            let text = other.as_ref().map_or(*text, |(_, text)| text);
            cases.add(text).map_err(|why| named(name, why))?;
        }
        for (name, text) in more {
            cases.add(&text).map_err(|why| named(&name, why))?;
        }
        Ok(cases)
    }
}

fn take(files: &mut Vec<(String, String)>, name: &str) -> Option<(String, String)> {
    let at = files.iter().position(|(other, _)| other == name)?;
    Some(files.remove(at))
}

fn files_of(directory: &Path) -> Result<Vec<(String, String)>, SuiteError> {
    let failed = |error| SuiteError::Cases(format!("{}: {error}", directory.display()));
    let mut files = Vec::new();
    for entry in std::fs::read_dir(directory).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        if path.extension().is_some_and(|end| end == "toml") {
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            files.push((name, std::fs::read_to_string(&path).map_err(failed)?));
        }
    }
    files.sort();
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::case::Role;

    #[test]
    fn the_cases_of_the_suite_are_well_formed() {
        let cases = Cases::load(None).unwrap();
        let page = include_str!("../../../docs/conformance.md");
        for (layer, fewest) in [("clc", 300), ("llc", 100), ("cdc", 60), ("option", 20)] {
            let of = |role| {
                cases.cases.iter().filter(|one| one.layer == layer && one.role == role).count()
            };
            let [server, client] = [Role::Server, Role::Client].map(of);
            assert!(server + client >= fewest, "{layer}: {server} and {client}");
            let row = format!("| `{layer}` | {server} | {client} |");
            assert!(page.contains(&row), "docs/conformance.md has no row {row}");
        }
    }

    #[test]
    fn every_rule_that_a_case_names_exists() {
        let listed = crate::rules::LIST;
        let rules: std::collections::BTreeSet<&str> =
            listed.lines().filter_map(|line| line.split('\t').next()).collect();
        for case in Cases::load(None).unwrap().cases {
            assert!(!case.rules.is_empty(), "{}", case.id);
            for rule in &case.rules {
                assert!(rules.contains(rule.as_str()), "{}: {rule}", case.id);
            }
        }
    }
}
