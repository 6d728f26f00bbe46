// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `cargo xtask release`: all files of a release, in one directory.
//!
//! - [`oci`]: the container image, without a registry.
//! - [`sbom`]: the libraries in the programs, as CycloneDX.
//! - [`notes`]: the notes, of CHANGELOG.md.
//! - [`sums`]: the checksums, and their signature.

mod label;
mod notes;
mod oci;
mod sbom;
mod sums;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use crate::machine::Machine;
use crate::tool::{self, ToolError, at, wrong};
use crate::{package, third_party};
use label::{VERSION, date};

pub(crate) const LONG_ABOUT: &str = "\
Build all files of a release, in target/published: the packages for Debian and RPM, the tarball, the \
command smc as one static program, the crates, a container image as an archive of OCI, a list of the \
libraries (SBOM, CycloneDX), the release notes, and the checksums of all these (SHA256SUMS).

With --key the checksums are signed. The programs have no path of this machine, and files have the time of \
the commit: two builds of one commit, by the same toolchain, are equal bit for bit. The checkout has to be \
without changes. The static program takes the target of rustup for musl.";

/// Paths in the programs, in the place of this machine's.
const SOURCES: &str = "/usr/src/vhost-device-ism";
const REGISTRY: &str = "/usr/src/cargo";

/// Members of the workspace that are never published.
const UNPUBLISHED: [&str; 3] = ["smc-tests", "xtask", "smc-test-support"];

/// Options of `cargo xtask release`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Sign the checksums: a file with a private key of SSH, or the id of a key of GnuPG.
    #[arg(long)]
    key: Option<String>,

    /// Root file system of the container image, a tar archive as mmdebstrap writes it. Without it there is
    /// no image.
    #[arg(long, value_name = "FILE")]
    base: Option<PathBuf>,

    /// A trial, in a minute: with the packages of the last "cargo xtask package" as they are, without
    /// compiling the crates, and without the static program. The checkout may have changes.
    #[arg(long)]
    trial: bool,

    /// Install missing Debian packages, as root. CI=true says the same.
    #[arg(long)]
    install_deps: bool,
}

/// Runs the task, and prints the paths of its results.
///
/// # Errors
/// The checkout has changes, tools are missing, a build fails, or the key cannot sign.
pub(crate) fn run(args: &Args, root: &Path) -> Result<ExitCode, ToolError> {
    let root = &fs::canonicalize(root).map_err(at(root))?;
    let target = package::target(root);
    // A release without notes is noticed before anything is built.
    let changes = read(&root.join("CHANGELOG.md"))?;
    let changes = notes::section(&changes, VERSION)
        .ok_or_else(|| wrong("CHANGELOG.md", format!("has nothing about {VERSION}")))?;
    if let Some(key) = &args.key {
        sums::check_key(key)?;
    }
    let (place, published) = (target.join("published.new"), target.join("published"));
    package::remove(&place)?;
    fs::create_dir_all(&place).map_err(at(&place))?;
    let packed =
        if args.trial { target.join("package") } else { build(args, root, &target, &place)? };
    copy_packages(&packed, &place)?;
    eprintln!("packing the crates");
    crates(root, &target.join("release-build/crates"), args.trial, &place.join("crates"))?;
    if let Some(base) = &args.base {
        eprintln!("packing the image");
        oci::write(base, &packed.join("build/tree"), &place)?;
    }
    let metadata = third_party::metadata(root)?;
    let lock = read(&root.join("Cargo.lock"))?.parse();
    let lock = lock.map_err(|error: toml::de::Error| wrong("Cargo.lock", error.to_string()))?;
    let list = sbom::of(&metadata, &lock, &date()?);
    package::write(&place.join(format!("vhost-device-ism-{VERSION}.cdx.json")), &list)?;
    package::write(
        &place.join("release-notes.md"),
        &notes::page(&changes, VERSION, args.key.as_deref()),
    )?;
    sums::write(&place, args.key.as_deref())?;
    package::remove(&published)?;
    fs::rename(&place, &published).map_err(at(&published))?;
    package::print(&sums::files(&published)?)
}

fn read(path: &Path) -> Result<String, ToolError> {
    fs::read_to_string(path).map_err(at(path))
}

/// Builds packages and static program anew, from a commit. Returns the directory of the packages.
fn build(args: &Args, root: &Path, target: &Path, place: &Path) -> Result<PathBuf, ToolError> {
    let mut git = Command::new("git");
    git.current_dir(root).args(["status", "--porcelain"]);
    if !tool::output(git)?.trim().is_empty() {
        return Err(wrong("git", "the checkout has changes, and a release is of a commit"));
    }
    // A directory of its own: the flags would make cargo build everything in the usual one again.
    let build = target.join("release-build");
    let flags = flags(root)?;
    let musl = format!("{}-unknown-linux-musl", std::env::consts::ARCH);
    let mut cargo = package::cargo_build(root, &build, Some(&flags), Machine::own());
    tool::succeed(cargo.args(["--package", "smc-cli", "--bin", "smc", "--target", &musl]))?;
    let program = place.join(format!("smc-{VERSION}-{}-static", std::env::consts::ARCH));
    fs::copy(build.join(musl).join("release/smc"), &program).map_err(at(&program))?;
    tool::succeed(Command::new("strip").arg(&program))?;
    let (tarball, rpm, machine) = (false, true, None);
    let kinds = package::Args { tarball, rpm, machine, install_deps: args.install_deps };
    package::make(&kinds, root, &build, Some(&flags))?;
    let packed = build.join("package");
    let programs = package::PROGRAMS.map(|name| packed.join("build/tree").join(name));
    for path in programs.iter().chain([&program]) {
        no_machine_paths(path, &[root, &cargo_home()?])?;
    }
    Ok(packed)
}

/// cargo's directory, with the sources of libraries.
fn cargo_home() -> Result<PathBuf, ToolError> {
    let home = || std::env::var_os("HOME").map(|home| Path::new(&home).join(".cargo"));
    std::env::var_os("CARGO_HOME")
        .map(PathBuf::from)
        .or_else(home)
        .ok_or(ToolError::NoVariable("CARGO_HOME"))
}

/// Flags for rustc, in the form of CARGO_ENCODED_RUSTFLAGS: paths of this machine are renamed.
fn flags(root: &Path) -> Result<String, ToolError> {
    let rustc = |option: &str, word: &str| {
        let mut rustc = Command::new(std::env::var_os("RUSTC").unwrap_or("rustc".into()));
        rustc.args([option, word]);
        tool::output(rustc)
    };
    let version = rustc("--verbose", "--version")?;
    let commit = version.lines().find_map(|line| line.strip_prefix("commit-hash: "));
    // The sources of the standard library, where they are installed.
    let library = format!("{}/lib/rustlib/src/rust", rustc("--print", "sysroot")?.trim());
    let renamed = [
        (root.display().to_string(), SOURCES.to_owned()),
        (cargo_home()?.display().to_string(), REGISTRY.to_owned()),
        (library, format!("/rustc/{}", commit.unwrap_or_default())),
    ];
    let flags = renamed.map(|(from, to)| format!("--remap-path-prefix={from}={to}"));
    Ok(flags.join("\x1f"))
}

/// Checks a program for paths of this machine.
fn no_machine_paths(program: &Path, paths: &[&Path]) -> Result<(), ToolError> {
    let bytes = fs::read(program).map_err(at(program))?;
    for path in paths {
        let word = format!("{}/", path.display());
        if bytes.windows(word.len()).any(|window| window == word.as_bytes()) {
            return Err(wrong(
                &program.display().to_string(),
                format!("has a path of this machine: {word}"),
            ));
        }
    }
    Ok(())
}

fn copy_packages(packed: &Path, place: &Path) -> Result<(), ToolError> {
    let mut found = false;
    for end in ["deb", "rpm", "gz"] {
        for path in package::files_of(packed, end)? {
            let to = place.join(path.file_name().unwrap_or_default());
            fs::copy(&path, &to).map_err(at(&path))?;
            found |= end == "gz";
        }
    }
    let missing = || wrong("cargo xtask package", format!("no tarball in {}", packed.display()));
    found.then_some(()).ok_or_else(missing)
}

/// Packs the crates. cargo packs a crate behind its dependencies, and compiles each from its package
/// unless this is a trial.
fn crates(root: &Path, target: &Path, trial: bool, to: &Path) -> Result<(), ToolError> {
    let made = target.join("package");
    package::remove(&made)?;
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or("cargo".into()));
    cargo.current_dir(root).args(["package", "--workspace", "--quiet", "--offline"]);
    for member in UNPUBLISHED {
        cargo.args(["--exclude", member]);
    }
    if trial {
        cargo.args(["--no-verify", "--allow-dirty"]);
    }
    tool::succeed(cargo.env("CARGO_TARGET_DIR", target))?;
    fs::create_dir_all(to).map_err(at(to))?;
    for path in package::files_of(&made, "crate")? {
        fs::copy(&path, to.join(path.file_name().unwrap_or_default())).map_err(at(&path))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_with_a_path_of_this_machine_is_refused() {
        let place = smc_test_support::TestDir::new();
        let program = place.path("program");
        fs::write(&program, b"\x7fELF /home/me/work/src/lib.rs \0").unwrap();
        no_machine_paths(&program, &[Path::new("/home/me/wor"), Path::new("/root")]).unwrap();
        let refused = no_machine_paths(&program, &[Path::new("/root"), Path::new("/home/me/work")]);
        assert!(refused.unwrap_err().to_string().ends_with("/home/me/work/"));
    }

    #[test]
    fn paths_of_sources_are_renamed() {
        let flags = flags(Path::new("/a/checkout")).unwrap();
        let first = format!("--remap-path-prefix=/a/checkout={SOURCES}");
        assert_eq!(flags.split('\x1f').next(), Some(first.as_str()));
        assert_eq!(flags.split('\x1f').count(), 3);
    }
}
