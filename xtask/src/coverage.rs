// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `cargo xtask coverage`: how many lines of the device and of the protocol their own tests run.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use clap::Args as Options;
use serde_json::Value;

use crate::tool::{self, ToolError, at};

/// Directories whose lines are counted.
const SOURCES: [&str; 3] = ["backend/src", "backend/device/src", "smc-core/src"];
/// The packages whose tests run.
const PACKAGES: [&str; 3] = ["vhost-device-ism", "ism-device", "smc-core"];
/// Fewer lines in a hundred are a failure.
const WANTED: f64 = 90.0;

/// Help of the task.
pub(crate) const LONG_ABOUT: &str = "\
Builds the tests of backend, backend/device and smc-core with instrumentation, runs them, and prints \
how many lines of their src folders they reach, by file and in sum. Fails below 90 % of one.

It needs llvm-profdata and llvm-cov of the LLVM that rustc has: rustup's component llvm-tools, or \
Debian's package llvm-N. Counters are in a mapped file, so that what a daemon runs in its \
sandbox, or before a test ends it, counts as well.";

/// Options of the task.
#[derive(Debug, Options)]
pub(crate) struct Args {
    /// Also print each file.
    #[arg(long)]
    files: bool,
}

/// Lines, and those of them that ran.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Lines {
    all: u64,
    run: u64,
}

impl Lines {
    fn percent(self) -> f64 {
        if self.all == 0 { 100.0 } else { self.run as f64 * 100.0 / self.all as f64 }
    }
}

/// Runs the task in `root`.
///
/// # Errors
/// A tool is missing, or a test fails.
pub(crate) fn run(args: &Args, root: &Path) -> Result<ExitCode, ToolError> {
    let root = fs::canonicalize(root).map_err(at(root))?;
    let (merge, report) = (find("llvm-profdata")?, find("llvm-cov")?);
    let programs = test(&root)?;
    let profiles = take_profiles(&root)?;
    let merged = root.join("target/coverage/merged.profdata");
    let mut command = Command::new(merge);
    command.args(["merge", "--sparse", "--failure-mode=all", "-o"]).arg(&merged).args(&profiles);
    tool::output(command)?;
    for profile in profiles {
        fs::remove_file(&profile).map_err(at(&profile))?;
    }
    let mut command = Command::new(report);
    command.args(["export", "--summary-only", "--instr-profile"]).arg(&merged);
    for program in &programs {
        command.arg("--object").arg(program);
    }
    let json = tool::output(command)?;
    Ok(print(&json, &root, args.files))
}

/// A tool of the LLVM that rustc has.
fn find(tool: &str) -> Result<PathBuf, ToolError> {
    let ask = |option: &[&str]| {
        let mut command = Command::new("rustc");
        command.args(option);
        tool::output(command)
    };
    let version = ask(&["-vV"])?;
    let llvm = version.lines().find_map(|line| line.strip_prefix("LLVM version: ")).unwrap_or("");
    let major = llvm.split('.').next().unwrap_or_default();
    let host = version.lines().find_map(|line| line.strip_prefix("host: ")).unwrap_or_default();
    let sysroot = ask(&["--print", "sysroot"])?;
    let places = [
        Path::new(sysroot.trim()).join("lib/rustlib").join(host).join("bin").join(tool),
        PathBuf::from(format!("/usr/bin/{tool}-{major}")),
        PathBuf::from(format!("/usr/lib/llvm-{major}/bin/{tool}")),
    ];
    places.into_iter().find(|place| place.exists()).ok_or_else(|| ToolError::Answer {
        program: tool.into(),
        what: format!(
            "not found for LLVM {major}; `rustup component add llvm-tools`, or on Debian: \
             apt-get install llvm-{major}"
        ),
    })
}

/// Builds and runs the tests; the programs that they are made of.
fn test(root: &Path) -> Result<BTreeSet<PathBuf>, ToolError> {
    let mut programs = BTreeSet::new();
    let profiles = profiles(root);
    let cargo = |last: &[&str]| {
        let mut command = Command::new(std::env::var_os("CARGO").unwrap_or("cargo".into()));
        command.current_dir(root).args(["test"]).args(PACKAGES.map(|name| format!("-p{name}")));
        command.args(["--lib", "--bins", "--tests"]).args(last);
        command.env("CARGO_TARGET_DIR", root.join("target/coverage"));
        command.env("RUSTFLAGS", flags());
        // Mapped at the start (%c), since a daemon in its sandbox can write no file when it ends.
        command.env("LLVM_PROFILE_FILE", profiles.join("%c%p-%m.profraw"));
        command
    };
    let built = tool::lines(cargo(&["--no-run", "--message-format=json"]), |line| {
        let program = serde_json::from_str::<Value>(line).ok();
        let program = program.as_ref().and_then(|message| message["executable"].as_str());
        programs.extend(program.map(PathBuf::from));
    })?;
    // Build scripts have left some, too.
    if profiles.exists() {
        fs::remove_dir_all(&profiles).map_err(at(&profiles))?;
    }
    fs::create_dir_all(&profiles).map_err(at(&profiles))?;
    let status = if built.success() { tool::status(cargo(&[]))? } else { built };
    if !status.success() {
        return Err(ToolError::Failed { program: "cargo test".into(), status });
    }
    Ok(programs)
}

fn flags() -> OsString {
    let mut flags = std::env::var_os("RUSTFLAGS").unwrap_or_default();
    flags.push(" -C instrument-coverage -C llvm-args=-runtime-counter-relocation");
    flags
}

/// The directory of the profiles.
fn profiles(root: &Path) -> PathBuf {
    root.join("target/coverage/profiles")
}

/// What the runs have left.
fn take_profiles(root: &Path) -> Result<Vec<PathBuf>, ToolError> {
    let directory = profiles(root);
    let entries = fs::read_dir(&directory).map_err(at(&directory))?;
    entries.map(|entry| Ok(entry.map_err(at(&directory))?.path())).collect()
}

/// A directory, its lines, and those of each of its files.
type Counted = (&'static str, Lines, Vec<(String, Lines)>);

/// Lines of each directory of [`SOURCES`] and of its files, from what llvm-cov exports.
fn count(json: &str, root: &Path) -> Vec<Counted> {
    let export: Value = serde_json::from_str(json).unwrap_or_default();
    let files = export["data"][0]["files"].as_array().cloned().unwrap_or_default();
    let count = |source: &'static str| {
        let directory = root.join(source);
        let mut sum = Lines::default();
        let mut of_files = Vec::new();
        for file in &files {
            let name = Path::new(file["filename"].as_str().unwrap_or_default());
            let Ok(name) = name.strip_prefix(&directory) else { continue };
            let number = |what: &str| file["summary"]["lines"][what].as_u64().unwrap_or(0);
            let lines = Lines { all: number("count"), run: number("covered") };
            sum = Lines { all: sum.all + lines.all, run: sum.run + lines.run };
            of_files.push((name.display().to_string(), lines));
        }
        (source, sum, of_files)
    };
    SOURCES.into_iter().map(count).collect()
}

fn print(json: &str, root: &Path, files: bool) -> ExitCode {
    let mut enough = true;
    for (source, sum, mut of_files) in count(json, root) {
        of_files.sort_by(|a, b| a.1.percent().total_cmp(&b.1.percent()));
        for (name, lines) in of_files.iter().filter(|_| files) {
            println!("{:6.2} % of {:5} lines  {source}/{name}", lines.percent(), lines.all);
        }
        println!("{:6.2} % of {:5} lines  {source}", sum.percent(), sum.all);
        enough &= sum.all > 0 && sum.percent() >= WANTED;
    }
    if enough { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_summed_by_directory() {
        let json = r#"{"data":[{"files":[
            {"filename":"/r/backend/src/a.rs","summary":{"lines":{"count":10,"covered":9}}},
            {"filename":"/r/backend/src/x/b.rs","summary":{"lines":{"count":30,"covered":11}}},
            {"filename":"/r/backend/tests/c.rs","summary":{"lines":{"count":7,"covered":7}}},
            {"filename":"/other/smc-core/src/d.rs","summary":{"lines":{"count":7,"covered":7}}}
        ]}]}"#;
        let counted = count(json, Path::new("/r"));
        assert_eq!(counted[0].1, Lines { all: 40, run: 20 });
        assert_eq!(counted[0].2.len(), 2);
        assert_eq!(counted[0].1.percent(), 50.0);
        assert_eq!([counted[1].1, counted[2].1], [Lines::default(); 2]);
    }
}
