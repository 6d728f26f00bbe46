// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Pages of the packages. They lie in one directory, so their links differ from links of the sources.

use std::path::Path;

use crate::site::normal;

/// The pages for users of the programs: their paths, and their names in packages.
pub(crate) const PAGES: [(&str, &str); 14] = [
    ("docs/start.md", "start.md"),
    ("docs/preload.md", "preload.md"),
    ("docs/preload-contract.md", "preload-contract.md"),
    ("docs/containers.md", "containers.md"),
    ("docs/virtual-machines.md", "virtual-machines.md"),
    ("docs/embedding.md", "embedding.md"),
    ("docs/ends.md", "ends.md"),
    ("docs/when-it-is-tcp.md", "when-it-is-tcp.md"),
    ("docs/operating.md", "operating.md"),
    ("backend/README.md", "vhost-device-ism.md"),
    ("docs/rollout.md", "rollout.md"),
    ("docs/performance.md", "performance.md"),
    ("docs/threat-model.md", "threat-model.md"),
    ("docs/linux.md", "linux.md"),
];

/// The text of a page of the sources for packages: links lead to pages of packages, and other links become
/// their text.
pub(crate) fn packaged(page: &str, text: &str) -> String {
    let mut out = String::new();
    let mut rest = text;
    while let Some(middle) = rest.find("](") {
        let end = rest[middle..].find(')').map_or(rest.len(), |length| middle + length);
        let (before, target) = (&rest[..middle], &rest[middle + 2..end]);
        let after = rest.get(end + 1..).unwrap_or_default();
        let begin = before.rfind('[').unwrap_or(0);
        match new_target(page, target) {
            Some(target) => out += &format!("{before}]({target})"),
            None => {
                // A picture has a mark before its text.
                out += before[..begin].strip_suffix('!').unwrap_or(&before[..begin]);
                out += before.get(begin + 1..).unwrap_or_default();
            }
        }
        rest = after;
    }
    out + rest
}

/// The new target of a link, if a reader of a package can reach the target.
fn new_target(page: &str, target: &str) -> Option<String> {
    let (path, anchor) = match target.find('#') {
        Some(at) => target.split_at(at),
        None => (target, ""),
    };
    if path.is_empty() || path.contains("://") || path.starts_with("mailto:") {
        return Some(target.to_owned());
    }
    let to = normal(&Path::new(page).parent()?.join(path));
    let (_, name) = PAGES.iter().find(|(from, _)| Path::new(from) == to)?;
    Some(format!("{name}{anchor}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::site::links;

    #[test]
    fn links_lead_to_pages_of_packages_or_are_text() {
        let text = "[a](../backend/README.md#b) and [c\nd](ends.md), [e](#f), [g](https://h/i.md), \
                    [`j`](../src/k.rs) ![l](m.svg) n";
        let expected = "[a](vhost-device-ism.md#b) and [c\nd](ends.md), [e](#f), [g](https://h/i.md), \
                        `j` l n";
        assert_eq!(packaged("docs/operating.md", text), expected);
        let text = "[a](../docs/operating.md) [b](abi/src/pool.rs)";
        assert_eq!(packaged("backend/README.md", text), "[a](operating.md) b");
    }

    #[test]
    fn no_link_of_a_packaged_page_leads_nowhere() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let mut found = 0;
        for (page, _) in PAGES {
            let text = packaged(page, &std::fs::read_to_string(root.join(page)).unwrap());
            for link in links(&text) {
                assert!(PAGES.iter().any(|(_, name)| Path::new(name) == link), "{page}: {link:?}");
                found += 1;
            }
        }
        assert!(found >= 50, "{found}");
    }
}
