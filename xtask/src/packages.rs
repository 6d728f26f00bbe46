// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Debian packages: needed packages, missing packages, and their installation.
//!
//! One message names all missing packages before any build. The needs of the scripts `tests/vm/kernel.sh`,
//! `qemu/build.sh` and of the scripts of `tests/uml` are read from their `need` lines.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use crate::cache::Build;
use crate::tool::{self, ToolError, at};
use crate::{image, programs};

/// Packages of the libraries linked with QEMU.
const QEMU_LIBRARIES: [&str; 3] = ["libglib2.0-dev", "libpixman-1-dev", "libfdt-dev"];

/// How often packages are installed until none is missing, at most.
const INSTALLATIONS: usize = 3;

/// Programs of the distribution for the guests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Programs {
    /// Quickly installed programs. Without the programs, their tests are skipped with a message.
    Small,
    /// Also programs with packages of hundreds of megabytes.
    All,
}

/// Checks for all packages. Returns whether the programs of the distribution are present.
///
/// Missing packages are installed if `install` is true.
///
/// # Errors
/// Packages are missing, and are not to be installed or cannot be; the error names all of them.
pub(crate) fn ensure(root: &Path, programs: Programs, install: bool) -> Result<bool, ToolError> {
    let (mut required, mut optional) = missing(root, programs, install)?;
    // The lack of a package may show only after another package is installed.
    for _ in 0..INSTALLATIONS {
        if !install || required.is_empty() && optional.is_empty() {
            break;
        }
        apt_install(&[&required[..], &optional[..]].concat())?;
        (required, optional) = missing(root, programs, install)?;
    }
    let must_have_all = install || programs == Programs::All;
    if !required.is_empty() || must_have_all && !optional.is_empty() {
        required.extend(optional);
        return Err(ToolError::Packages(required));
    }
    if !optional.is_empty() {
        let names = optional.join(" ");
        eprintln!("xtask: unmodified programs are NOT TESTED; on Debian: apt-get install {names}");
    }
    Ok(optional.is_empty())
}

/// Checks for the packages of the tests under user-mode Linux. Missing packages are installed if `install` is
/// true.
///
/// # Errors
/// Packages are missing, and are not to be installed or cannot be; the error names all of them.
pub(crate) fn ensure_uml(root: &Path, install: bool) -> Result<(), ToolError> {
    let mut missing = missing_for_uml(root, install)?;
    if install && !missing.is_empty() {
        apt_install(&missing)?;
        missing = missing_for_uml(root, install)?;
    }
    if missing.is_empty() { Ok(()) } else { Err(ToolError::Packages(missing)) }
}

/// Names of missing packages for the tests under user-mode Linux.
fn missing_for_uml(root: &Path, all: bool) -> Result<Vec<String>, ToolError> {
    let mut missing = Vec::new();
    add(&mut missing, image::busybox().is_ok(), "busybox-static");
    add(&mut missing, has_program("ip"), "iproute2");
    add(&mut missing, has_program("unshare"), "util-linux");
    let script = root.join("tests/uml/kernel.sh");
    let text = fs::read_to_string(&script).map_err(at(&script))?;
    lines(&text).for_each(|(check, package)| add(&mut missing, is_there(check), package));
    for (there, package) in module_needs(root, all)? {
        add(&mut missing, there, &package);
    }
    Ok(missing)
}

/// Needs of the kernel's driver's build, and whether each is present.
fn module_needs(root: &Path, all: bool) -> Result<Vec<(bool, String)>, ToolError> {
    let script = root.join("tests/uml/module.sh");
    let text = fs::read_to_string(&script).map_err(at(&script))?;
    let needs = lines(&text).map(|(check, package)| (is_there(check), package.to_owned()));
    // Optional: without sparse, the script skips this check and says so.
    let sparse = (!all || has_program("sparse"), "sparse".to_owned());
    Ok(needs.chain([sparse]).collect())
}

/// Names of missing packages: required packages, and packages of the programs of the distribution.
fn missing(
    root: &Path,
    which: Programs,
    all: bool,
) -> Result<(Vec<String>, Vec<String>), ToolError> {
    let mut required = Vec::new();
    let mut need = |there: bool, package: &str| add(&mut required, there, package);
    need(image::busybox().is_ok(), "busybox-static");
    if let Err(ToolError::Packages(names)) = image::verbs() {
        names.iter().for_each(|package| need(false, package));
    }
    for name in ["ip", "tc"] {
        need(has_program(name), "iproute2");
    }
    let firmware = firmware(root);
    need(firmware, "seabios");
    need(firmware, "qemu-system-data");
    for build in Build::ALL {
        if build.variables().into_iter().all(|name| std::env::var_os(name).is_some()) {
            continue;
        }
        let results = build.results(root)?;
        if !results.iter().all(|path| path.is_file()) {
            for (there, package) in script_needs(build, root)? {
                need(there, &package);
            }
        } else if build == Build::Qemu && !starts(&results[0]) {
            // The cache has outlived the libraries linked with QEMU.
            QEMU_LIBRARIES.into_iter().for_each(|package| need(false, package));
        }
    }
    for (there, package) in module_needs(root, all)? {
        need(there, &package);
    }
    let mut optional = Vec::new();
    for (name, package) in programs::packages(which == Programs::All) {
        add(&mut optional, has_program(name), package);
    }
    if which == Programs::All {
        add(&mut optional, programs::newest_postgresql().is_some(), "postgresql");
    }
    Ok((required, optional))
}

fn add(missing: &mut Vec<String>, there: bool, package: &str) {
    if !there && !missing.iter().any(|known| known == package) {
        missing.push(package.to_owned());
    }
}

/// Needs of a script, and whether each is present.
fn script_needs(build: Build, root: &Path) -> Result<Vec<(bool, String)>, ToolError> {
    let script = build.script(root);
    let text = fs::read_to_string(&script).map_err(at(&script))?;
    let mut needs: Vec<_> =
        lines(&text).map(|(check, package)| (is_there(check), package.to_owned())).collect();
    if build.downloads(root)? {
        needs.push((has_program("curl"), "curl".into()));
    }
    if build == Build::Qemu {
        needs.push((has_header("libfdt.h"), "libfdt-dev".into()));
        let python = ["python3", "/usr/bin/python3"].into_iter().any(can_run_qemu_configure);
        needs.extend(["python3-venv", "python3-tomli"].map(|package| (python, package.into())));
    }
    Ok(needs)
}

/// How a script finds out whether a package is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Check<'a> {
    Program(&'a str),
    Header(&'a str),
    Library(&'a str),
}

/// The lines `need PROGRAM PACKAGE`, `need_header FILE PACKAGE`, `need_library NAME PACKAGE`.
fn lines(script: &str) -> impl Iterator<Item = (Check<'_>, &str)> {
    script.lines().filter_map(|line| {
        let mut words = line.split_whitespace();
        let (command, name, package) = (words.next()?, words.next()?, words.next()?);
        let check = match (command, words.next()) {
            ("need", None) => Check::Program(name),
            ("need_header", None) => Check::Header(name),
            ("need_library", None) => Check::Library(name),
            _ => return None,
        };
        Some((check, package))
    })
}

fn is_there(check: Check<'_>) -> bool {
    match check {
        Check::Program(name) => has_program(name),
        Check::Header(name) => has_header(name),
        Check::Library(name) => has_library(name),
    }
}

/// Whether a program is in `PATH`, or where administrators have theirs.
pub(crate) fn has_program(name: &str) -> bool {
    image::program(name).is_some()
}

fn has_library(name: &str) -> bool {
    let mut pkg_config = Command::new("pkg-config");
    pkg_config.args(["--exists", name]);
    succeeds(pkg_config)
}

fn has_header(name: &str) -> bool {
    let mut shell = Command::new("sh");
    shell.args(["-c", "echo \"#include <$1>\" | cc -E -", "-", name]);
    succeeds(shell)
}

/// QEMU's configure wants the modules venv and tomllib (Python 3.11), or tomli.
fn can_run_qemu_configure(python: &str) -> bool {
    let mut command = Command::new(python);
    command
        .arg("-c")
        .arg("import sys, venv, ensurepip\ntry: import tomllib\nexcept ImportError: import tomli");
    succeeds(command)
}

/// Whether the firmware for QEMU's guests is present.
fn firmware(root: &Path) -> bool {
    let mut script = Command::new(root.join("qemu/firmware.sh"));
    script.env("CI", "false");
    succeeds(script)
}

/// Whether a program finds its libraries.
fn starts(program: &Path) -> bool {
    let mut command = Command::new(program);
    command.arg("--version");
    succeeds(command)
}

fn succeeds(mut command: Command) -> bool {
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command.status().is_ok_and(|status| status.success())
}

/// Installs Debian packages, as root.
///
/// # Errors
/// apt-get fails.
pub(crate) fn apt_install(packages: &[String]) -> Result<(), ToolError> {
    eprintln!("xtask: installs {}", packages.join(" "));
    let mut install = vec!["install", "-y", "-q", "--no-install-recommends"];
    install.extend(packages.iter().map(String::as_str));
    for args in [&["update", "-q"][..], &install] {
        let mut apt = Command::new("apt-get");
        // No service is to be started: only the programs are wanted.
        apt.args(args).env("DEBIAN_FRONTEND", "noninteractive").env("RUNLEVEL", "1");
        apt.stdin(Stdio::null()).stdout(Stdio::null());
        if !tool::status(apt).is_ok_and(|status| status.success()) {
            return Err(ToolError::Packages(packages.to_vec()));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn packages_of(build: Build) -> Vec<String> {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        script_needs(build, &root).unwrap().into_iter().map(|(_, package)| package).collect()
    }

    #[test]
    fn needs_of_the_scripts_are_read_from_them() {
        let kernel = packages_of(Build::Kernel);
        for package in ["gcc", "flex", "bison", "bc", "libelf-dev", "libssl-dev"] {
            assert!(kernel.iter().any(|known| known == package), "{package}: {kernel:?}");
        }
        let qemu = packages_of(Build::Qemu);
        for package in ["ninja-build", "device-tree-compiler", "libglib2.0-dev", "libfdt-dev"] {
            assert!(qemu.iter().any(|known| known == package), "{package}: {qemu:?}");
        }
    }

    #[test]
    fn every_way_to_miss_a_package_in_a_script_is_known() {
        for build in Build::ALL {
            let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
            let text = fs::read_to_string(build.script(&root)).unwrap();
            let known = ["need() {", "need_header() {", "need_library() {", "find_python ||"];
            for line in text.lines().filter(|line| line.contains("missing+=(")) {
                let is_known = known.iter().any(|start| line.starts_with(start));
                assert!(is_known || line.contains("libfdt.h"), "{build:?}: {line}");
            }
        }
    }

    #[test]
    fn a_need_is_a_line_of_three_words() {
        let script = "need cc gcc\nneed_header gelf.h libelf-dev\nneed_library a b # not this\n\
                      need_library glib-2.0 libglib2.0-dev\nneed() { command -v \"$1\"; }\n";
        let found: Vec<_> = lines(script).collect();
        let expected = [
            (Check::Program("cc"), "gcc"),
            (Check::Header("gelf.h"), "libelf-dev"),
            (Check::Library("glib-2.0"), "libglib2.0-dev"),
        ];
        assert_eq!(found, expected);
    }

    #[test]
    fn a_package_is_named_once() {
        let mut missing = Vec::new();
        add(&mut missing, false, "iproute2");
        add(&mut missing, true, "gcc");
        add(&mut missing, false, "iproute2");
        assert_eq!(missing, ["iproute2"]);
    }
}
