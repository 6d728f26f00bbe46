// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The patches of `backend/upstream` fit the crate versions of the daemon's build.
#![allow(clippy::unwrap_used, reason = "a test")]

use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

const CRATES: [&str; 2] = ["vhost", "vhost-user-backend"];

/// The published sources of a dependency.
fn sources(metadata: &serde_json::Value, name: &str) -> PathBuf {
    let packages = metadata["packages"].as_array().unwrap();
    let package = packages.iter().find(|package| package["name"] == name).unwrap();
    let manifest = Path::new(package["manifest_path"].as_str().unwrap());
    manifest.parent().unwrap().to_path_buf()
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let target = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            copy(&entry.path(), &target);
        } else {
            // The bytes without the mode: a registry's files may be read-only.
            fs::write(target, fs::read(entry.path()).unwrap()).unwrap();
        }
    }
}

#[test]
fn patches_apply_to_the_crates_of_the_lock_file() {
    if env::var_os("CI").is_none_or(|ci| ci != "true")
        && Command::new("patch").arg("--version").output().is_err()
    {
        eprintln!("NOT TESTED: there is no program patch");
        return;
    }
    let project = Path::new(env!("CARGO_MANIFEST_DIR"));
    let cargo = env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    command.args(["metadata", "--format-version=1", "--locked"]);
    // Crates of other platforms may be missing.
    command.arg(format!("--filter-platform={}-unknown-linux-gnu", env::consts::ARCH));
    let output = command.current_dir(project).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let metadata = serde_json::from_slice(&output.stdout).unwrap();

    let tree = smc_test_support::TestDir::new();
    for name in CRATES {
        copy(&sources(&metadata, name), &tree.join(name));
        // The repository's manifest; cargo rewrites the manifest when publishing.
        let manifest = tree.join(name).join("Cargo.toml");
        fs::rename(manifest.with_extension("toml.orig"), manifest).unwrap();
    }
    let upstream = project.join("upstream");
    let series = fs::read_to_string(upstream.join("series")).unwrap();
    assert!(!series.is_empty());
    for patch in series.lines() {
        let output = Command::new("patch")
            .args(["-p1", "--forward", "--fuzz=0", "--input"])
            .arg(upstream.join(patch))
            .current_dir(&tree)
            .output()
            .unwrap();
        assert!(output.status.success(), "{patch}: {}", String::from_utf8_lossy(&output.stdout));
    }
}
