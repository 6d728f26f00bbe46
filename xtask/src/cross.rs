// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `cargo xtask cross`.

mod exceptions;
mod system;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::Instant;

use serde_json::Value;

use crate::machine::Machine;
use crate::tool::{self, ToolError, wrong};
use exceptions::{CRATES, EXCEPTIONS, Exception, NOT_RUN};

pub(crate) const LONG_ABOUT: &str = "\
Build tests for another machine, and run them under the user-mode emulation of QEMU.

The unit tests of each crate run that the emulation can run. It lacks some system calls and files of \
/proc: tests that need those are named with the reason, and so are the crates left out. An exception \
for a test that does not exist is a failure.

The compiler's standard library for the machine comes from rustup.";

/// Options of `cargo xtask cross`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    machine: Machine,

    /// Only this crate; repeat it for more.
    #[arg(long, value_name = "CRATE")]
    only: Vec<String>,

    /// Run the exceptions, too: shows which of them are none any more.
    #[arg(long)]
    all: bool,

    /// Run `smc demo`, and redis and nginx by `smc run`, in emulated guests with Debian's kernels and libcs instead.
    #[arg(long, conflicts_with_all = ["only", "all"])]
    system: bool,

    /// Only the guest of this distribution.
    #[arg(long, requires = "system")]
    distribution: Option<system::Distribution>,

    /// Install missing Debian packages, as root. CI=true says the same.
    #[arg(long)]
    install_deps: bool,
}

/// How long the tests of a crate may take, seconds.
const LIMIT: &str = "600";

/// The unit tests of one crate, built.
struct Suite {
    name: String,
    program: PathBuf,
    directory: PathBuf,
}

/// Runs the task. The exit code says whether the tests passed.
///
/// # Errors
/// Packages or the standard library are missing, or something does not build.
pub(crate) fn run(args: &Args, root: &Path) -> Result<ExitCode, ToolError> {
    let machine = args.machine;
    let install = args.install_deps || tool::is_true("CI");
    machine.ensure(install)?;
    if args.system {
        return system::run(machine, root, install, args.distribution);
    }
    if machine == Machine::X86 {
        return Err(wrong(
            "cargo xtask cross",
            "the tests of this machine are those of cargo test",
        ));
    }
    let begin = Instant::now();
    let suites = build(machine, &args.only, root)?;
    println!("{}: built in {} s", machine.name(), begin.elapsed().as_secs());
    let mut is_ok = true;
    for suite in &suites {
        let exceptions: Vec<_> =
            EXCEPTIONS.iter().filter(|e| e.is_of(machine, &suite.name)).collect();
        is_ok &= run_suite(machine, suite, &exceptions, args.all)?;
    }
    for (name, reason) in NOT_RUN {
        println!("not run: {name}: {reason}");
    }
    println!("{}: {} s", machine.name(), begin.elapsed().as_secs());
    Ok(if is_ok { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Builds the unit tests of the crates.
fn build(machine: Machine, only: &[String], root: &Path) -> Result<Vec<Suite>, ToolError> {
    let is_wanted = |name: &&str| only.is_empty() || only.iter().any(|wanted| wanted == name);
    let mut cargo = machine.cargo(root)?;
    cargo.args(["test", "--no-run", "--lib", "--message-format=json-render-diagnostics"]);
    for name in CRATES.iter().copied().filter(is_wanted) {
        cargo.args(["-p", name]);
    }
    let text = tool::output(cargo)?;
    let suites = text.lines().filter_map(|line| suite(&serde_json::from_str(line).ok()?));
    Ok(suites.collect())
}

/// The suite in a message of cargo.
fn suite(message: &Value) -> Option<Suite> {
    let program = message["executable"].as_str()?;
    let manifest = Path::new(message["manifest_path"].as_str()?);
    let directory = manifest.parent()?.to_owned();
    // `path+file:///place/of/crate#name@version`, or without the name if the directory has it.
    let id = message["package_id"].as_str()?.rsplit(['#', '/']).next()?;
    let name = match id.split_once('@') {
        Some((name, _)) => name.to_owned(),
        None => directory.file_name()?.to_string_lossy().into_owned(),
    };
    Some(Suite { name, program: program.into(), directory })
}

/// Runs one suite without its exceptions. Returns whether its tests passed.
fn run_suite(
    machine: Machine,
    suite: &Suite,
    exceptions: &[&Exception],
    all: bool,
) -> Result<bool, ToolError> {
    let emulated = |limit: &str| {
        let mut command = Command::new("timeout");
        command.args(["--kill-after=5", limit, &machine.emulator(), "-L", &machine.libraries()]);
        command.arg(&suite.program).current_dir(&suite.directory);
        command
    };
    println!("\n{} on {}", suite.name, machine.name());
    let mut list = emulated("60");
    list.args(["--list", "--format=terse"]);
    let list = tool::output(list)?;
    let tests: BTreeSet<&str> =
        list.lines().filter_map(|line| line.strip_suffix(": test")).collect();
    let mut is_ok = true;
    for exception in exceptions {
        println!("  not run: {}: {}", exception.test, exception.reason);
        if !tests.contains(exception.test) {
            println!("  there is no test {}", exception.test);
            is_ok = false;
        }
    }
    let tested = |threads: &[&str]| {
        let mut command = emulated(LIMIT);
        command.args(["--exact", "--quiet"]).args(threads);
        if !all {
            command.args(exceptions.iter().flat_map(|exception| ["--skip", exception.test]));
        }
        tool::status(command).map(|status| status.success())
    };
    if !tested(&[])? {
        println!("  once more, one test at a time");
        is_ok &= tested(&["--test-threads=1"])?;
    }
    Ok(is_ok)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_of_cargo_names_a_suite() {
        let message = |id: &str| {
            serde_json::json!({
                "executable": "/t/a-1", "manifest_path": "/p/backend/Cargo.toml", "package_id": id,
            })
        };
        let name = |id: &str| suite(&message(id)).unwrap().name;
        assert_eq!(name("path+file:///p/backend#vhost-device-ism@0.1.0"), "vhost-device-ism");
        assert_eq!(name("path+file:///p/backend#0.1.0"), "backend");
        assert!(suite(&serde_json::json!({ "executable": null })).is_none());
    }

    #[test]
    fn each_crate_of_the_workspace_is_run_or_named_with_the_reason() {
        let manifest = include_str!("../../Cargo.toml").parse::<toml::Table>().unwrap();
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let mut expected = BTreeSet::new();
        for member in manifest["workspace"]["members"].as_array().unwrap() {
            let file = root.join(member.as_str().unwrap()).join("Cargo.toml");
            let manifest = std::fs::read_to_string(file).unwrap().parse::<toml::Table>().unwrap();
            expected.insert(manifest["package"]["name"].as_str().unwrap().to_owned());
        }
        let named = CRATES.iter().chain(NOT_RUN.iter().map(|(name, _)| name));
        assert_eq!(named.map(ToString::to_string).collect::<BTreeSet<_>>(), expected);
    }
}
