// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Checks the claims of `docs/linux.md`: the named programs compile, and the named files exist.
#![allow(clippy::unwrap_used, reason = "a test")]

use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Whether a program is there. Continuous integration has all of them.
fn has(program: &str) -> bool {
    let found = Command::new(program).arg("--version").output().is_ok();
    assert!(found || env::var_os("CI").is_none_or(|ci| ci != "true"), "there is no {program}");
    if !found {
        eprintln!("NOT TESTED: there is no program {program}");
    }
    found
}

#[test]
fn programs_that_show_mistakes_compile() {
    if !has("cc") {
        return;
    }
    let page = fs::read_to_string(root().join("docs/linux.md")).unwrap();
    let directory = root().join("tests/linux-bugs");
    let mut built = 0;
    for entry in fs::read_dir(&directory).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|end| end != "c") {
            continue;
        }
        let name = path.file_name().unwrap().to_str().unwrap();
        assert!(page.contains(name), "docs/linux.md does not name {name}");
        let own = smc_test_support::TestDir::new();
        let program = own.path("linux-bugs");
        let output = Command::new("cc")
            .args(["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-O1", "-o"])
            .args([&program, &path])
            .output()
            .unwrap();
        assert!(output.status.success(), "{name}:\n{}", String::from_utf8_lossy(&output.stderr));
        built += 1;
    }
    assert!(built > 0, "there is no program");
}

/// The entries of a series are files with a subject. None has a signature: signing is up to the
/// sender.
#[test]
fn series_are_whole() {
    for directory in ["qemu/patches", "backend/upstream"] {
        let directory = root().join(directory);
        let series = fs::read_to_string(directory.join("series")).unwrap();
        let names: Vec<&str> = series.lines().filter(|line| !line.starts_with('#')).collect();
        assert!(!names.is_empty());
        for name in names {
            let patch = fs::read_to_string(directory.join(name)).unwrap();
            assert!(patch.contains("\nSubject: [PATCH"), "{name} has no subject");
            assert!(!patch.contains("\nSigned-off-by:"), "{name}: who sends it signs it");
        }
    }
}
