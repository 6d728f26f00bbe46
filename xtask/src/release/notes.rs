// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The release notes: the changes, and how to check the files.

/// The section of a version in a changelog, without its heading.
pub(super) fn section(changelog: &str, version: &str) -> Option<String> {
    let depth = |line: &str| line.starts_with('#').then(|| line.find(' ').unwrap_or(line.len()));
    let mut lines = changelog.lines();
    let names = |line: &str| {
        line.split([' ', ',', '[', ']']).any(|word| word == version) && depth(line).is_some()
    };
    let own = depth(lines.find(|line| names(line))?)?;
    let of_section = lines.take_while(|line| depth(line).is_none_or(|depth| depth > own));
    let text = of_section.collect::<Vec<_>>().join("\n");
    (!text.trim().is_empty()).then(|| format!("{}\n", text.trim()))
}

/// The notes of a version, with the commands to check its files.
pub(super) fn page(changes: &str, version: &str, key: Option<&str>) -> String {
    let mut check = String::from("sha256sum --check SHA256SUMS");
    match key.map(super::sums::is_file) {
        Some(true) => check.push_str(
            "\n    ssh-keygen -Y verify -f KEYS -I SIGNER -n file -s SHA256SUMS.sig <SHA256SUMS",
        ),
        Some(false) => check.push_str("\n    gpg --verify SHA256SUMS.asc SHA256SUMS"),
        None => {}
    }
    format!("# vhost-device-ism {version}\n\n{changes}\n## Check the files\n\n    {check}\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOG: &str = "# Changelog\n\nFor 0.1.0 and others.\n\n## [Unreleased]\n\n### 0.2.0, in preparation\n\n\
                       New.\n\n#### Detail\n\nMore.\n\n## [0.1.0] - 2026-01-01\n\nFirst.\n";

    #[test]
    fn a_section_ends_at_the_next_heading_of_its_depth() {
        assert_eq!(section(LOG, "0.2.0").unwrap(), "New.\n\n#### Detail\n\nMore.\n");
        assert_eq!(section(LOG, "0.1.0").unwrap(), "First.\n");
    }

    #[test]
    fn a_version_without_changes_has_no_notes() {
        assert_eq!(section(LOG, "0.1"), None);
        assert_eq!(section("## [0.1.0]\n\n## [0.0.9]\n\nOld.\n", "0.1.0"), None);
    }

    #[test]
    fn the_changelog_of_the_project_has_the_version_of_the_project() {
        let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../CHANGELOG.md");
        let text = std::fs::read_to_string(root).unwrap();
        let section = section(&text, env!("CARGO_PKG_VERSION")).unwrap();
        let page = page(&section, "0.1.0", None);
        assert!(page.contains("smc run") && page.ends_with("sha256sum --check SHA256SUMS\n"));
    }
}
