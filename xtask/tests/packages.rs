// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `cargo xtask vm` on a machine without the needed packages.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on may stop")]

use std::path::Path;
use std::process::{Command, Output};

use smc_test_support::TestDir;
/// Runs `cargo xtask vm build` without any program in `PATH` and with an empty cache.
fn without_programs(dir: &TestDir, variables: &[(&str, &str)]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_xtask"));
    command.args(["vm", "build"]).env_clear().env("PATH", dir).env("HOME", dir);
    // As set by cargo. A build would end here at once.
    command.env("CARGO_MANIFEST_DIR", env!("CARGO_MANIFEST_DIR")).env("CARGO", "/bin/false");
    command.envs(variables.iter().copied());
    command.output().unwrap()
}

#[test]
fn all_missing_packages_are_named_in_one_message_before_anything_is_built() {
    let dir = TestDir::new();
    let output = without_programs(&dir, &[]);
    assert!(!output.status.success());
    let text = String::from_utf8(output.stderr).unwrap();
    let lines: Vec<_> = text.lines().filter(|line| line.contains("apt-get install")).collect();
    let [line] = lines[..] else { panic!("{text}") };
    for package in [
        // guests, kernel, QEMU
        "busybox-static",
        "flex",
        "libelf-dev",
        "ninja-build",
        "libglib2.0-dev",
        "libfdt-dev",
    ] {
        let times = line.split_whitespace().filter(|word| *word == package).count();
        assert_eq!(times, 1, "{package}: {text}");
    }
    assert!(!text.contains("builds"), "{text}");
    assert_eq!(std::fs::read_dir(dir).unwrap().count(), 0, "something was built");
}

#[test]
fn a_build_that_is_not_needed_needs_no_packages() {
    let dir = TestDir::new();
    let given = Path::new(env!("CARGO_BIN_EXE_xtask")).to_str().unwrap();
    let output = without_programs(
        &dir,
        &[("KERNEL", given), ("KERNEL_V1", given), ("QEMU", given), ("QEMU_STOCK", given)],
    );
    let text = String::from_utf8(output.stderr).unwrap();
    assert!(text.contains("busybox-static"), "{text}");
    for package in ["flex", "ninja-build", "libelf-dev", "libglib2.0-dev"] {
        assert!(!text.contains(package), "{text}");
    }
}

#[test]
fn packages_that_cannot_be_installed_are_named_as_well() {
    let dir = TestDir::new();
    let output = without_programs(&dir, &[("CI", "true")]);
    assert!(!output.status.success());
    let text = String::from_utf8(output.stderr).unwrap();
    assert!(text.contains("xtask: installs "), "{text}");
    let line = text.lines().find(|line| line.contains("apt-get install")).unwrap();
    // Also the programs of the distribution: without them nothing is tested with them.
    for package in ["busybox-static", "ninja-build", "redis-server", "iperf3"] {
        assert!(line.split_whitespace().any(|word| word == package), "{package}: {text}");
    }
}
