//! `cargo xtask vm`.

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, ExitStatus};
use std::time::Instant;

use clap::Subcommand;

use crate::artifacts::{self, Artifacts};
use crate::packages::Programs;
use crate::tool::{self, ToolError};

pub(crate) const LONG_ABOUT: &str = "\
Run the tests that need virtual machines, after building what they need.

The first run builds a kernel, QEMU and this repository's programs, all at once (a quarter of an hour
on two processors); kernel and QEMU are kept in ${XDG_CACHE_HOME:-~/.cache}/vhost-device-ism.
Nothing needs root or KVM; ACCEL=kvm uses KVM.";

pub(crate) const AFTER: &str = "\
What a failed test leaves (consoles, logs, transcripts) is in target/vm/<test>/.

To run the tests by hand:
  export $(cargo xtask vm build)
  cargo test --release -p smc-tests --features vm --test vm -- boots::";

/// Options of `cargo xtask vm`.
#[derive(Debug, clap::Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct Args {
    #[command(subcommand)]
    what: Option<What>,

    /// Run only tests whose name contains this; repeat it for more.
    #[arg(long, value_name = "FILTER")]
    only: Vec<String>,

    /// Run tests that failed again, at most so often, and say aloud which passed only then.
    ///
    /// Emulated guests on a busy host miss deadlines of seconds; a mistake fails again.
    #[arg(long, value_name = "TIMES", default_value_t = 0)]
    again: u32,

    /// Show what tests that succeed print, too: durations, rates, what a peer answered.
    #[arg(long)]
    show_output: bool,

    /// Keep the logs of tests that succeed, too.
    #[arg(long)]
    keep: bool,

    /// Install missing Debian packages, as root. CI=true says the same.
    #[arg(long, global = true)]
    install_deps: bool,
}

#[derive(Clone, Debug, Subcommand)]
enum What {
    /// Only build, and print where everything is.
    Build,
    /// Run the tests with all programs of the distribution: also PostgreSQL, Node.js and Go, whose packages
    /// are large.
    Programs,
    /// Show two virtual machines that meet over shared memory.
    Demo,
    /// Measure SMC next to TCP, and virtio sockets if possible, between two virtual machines.
    Perf {
        /// SMC-R next to the kernel's AF_SMC over the same soft-RoCE, instead of SMC-D. The argument, if
        /// there is one, is the number of runs.
        #[arg(long)]
        rdma: bool,
        /// Programs of the distribution as they are, on SMC-D next to TCP. The argument, if there is one, is
        /// the number of runs.
        #[arg(long, conflicts_with = "rdma")]
        programs: bool,
        /// Further arguments of "smc perf --to", such as "bulk --runs 3 --json".
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<String>,
    },
}

/// Runs the task. The exit code says whether the tests passed.
///
/// # Errors
/// Packages are missing, or something does not build or cannot be started.
pub(crate) fn run(args: &Args) -> Result<ExitCode, ToolError> {
    let root = root()?;
    let start = Instant::now();
    let which =
        if matches!(args.what, Some(What::Programs)) { Programs::All } else { Programs::Small };
    let artifacts = artifacts::build(&root, args.install_deps || tool::is_true("CI"), which)?;
    eprintln!("xtask: everything is built, after {} s", start.elapsed().as_secs());
    let status = match &args.what {
        Some(What::Build) => {
            for (name, path) in artifacts.variables() {
                println!("{name}={}", path.display());
            }
            return Ok(ExitCode::SUCCESS);
        }
        Some(What::Demo) => tool::status(with(&artifacts, &artifacts::example(&root, "vm-demo")?))?,
        Some(What::Perf { rdma: false, programs: false, args }) => {
            let mut command = with(&artifacts, &artifacts::example(&root, "vm-perf")?);
            command.envs(artifacts::vsock()?.map(|path| ("VSOCK_DAEMON", path))).args(args);
            tool::status(command)?
        }
        Some(What::Perf { rdma, args, .. }) => {
            let example = if *rdma { "vm-perf-rdma" } else { "vm-perf-programs" };
            let mut command = with(&artifacts, &artifacts::example(&root, example)?);
            command.args(args);
            tool::status(command)?
        }
        Some(What::Programs) => {
            let only = vec!["programs::".to_owned(), "--include-ignored".to_owned()];
            let args = Args { what: None, only, show_output: true, ..*args };
            // Their figures are compared, so nobody else has guests meanwhile.
            return tests(&root, &artifacts, &args, Some("1"));
        }
        None => return tests(&root, &artifacts, args, None),
    };
    Ok(if status.success() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Exit code of a test program that has run all its tests, and some failed.
const TESTS_FAILED: i32 = 101;

/// Runs the tests, with so many beds at a time as is said, and those that failed again.
fn tests(
    root: &Path,
    artifacts: &Artifacts,
    args: &Args,
    beds: Option<&str>,
) -> Result<ExitCode, ToolError> {
    let run = |filters: &[String], beds: Option<&str>| {
        let mut command = with(artifacts, &artifacts.tests);
        // Where cargo runs the tests of this package.
        command.current_dir(root.join("tests"));
        // Tests take turns where guests are, two or three at a time. One more thread is already
        // waiting then.
        command.args(filters).arg("--test-threads=4");
        if args.show_output {
            command.arg("--show-output");
        }
        command.envs(beds.map(|beds| ("SMC_VM_BEDS", beds)));
        if args.keep {
            command.env("SMC_VM_KEEP", "1");
        }
        command
    };
    let (mut status, mut failed) = watched(run(&args.only, beds))?;
    let mut flaky = Vec::new();
    for _ in 0..args.again {
        // A test program that was killed has not said which tests it never came to.
        if status.code() != Some(TESTS_FAILED) || failed.is_empty() {
            break;
        }
        eprintln!("xtask: runs again what failed: {}", failed.join(", "));
        let mut command = run(&failed, Some("1"));
        command.arg("--exact");
        let (again, still) = watched(command)?;
        flaky.extend(failed.iter().filter(|name| !still.contains(name)).cloned());
        (status, failed) = (again, still);
    }
    for name in flaky {
        eprintln!("xtask: FLAKY: {name} passed only when it was run again");
    }
    if !status.success() {
        eprintln!("xtask: FAILED ({status}): {}", failed.join(", "));
    }
    Ok(if status.success() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Runs a test program, shows what it prints, and tells which tests it said had failed.
fn watched(command: Command) -> Result<(ExitStatus, Vec<String>), ToolError> {
    let mut failed = Vec::new();
    // What follows these lines is what tests printed, some of which run others in guests.
    let mut over = false;
    let status = tool::lines(command, |line| {
        println!("{line}");
        over |= matches!(line, "successes:" | "failures:");
        if !over {
            failed.extend(failed_test(line).map(str::to_owned));
        }
    })?;
    Ok((status, failed))
}

/// The test that a line says has failed.
fn failed_test(line: &str) -> Option<&str> {
    line.strip_prefix("test ")?.strip_suffix(" ... FAILED")
}

fn root() -> Result<PathBuf, ToolError> {
    let xtask = std::env::var_os("CARGO_MANIFEST_DIR").map(PathBuf::from);
    let root = xtask.as_deref().and_then(Path::parent).map(Path::to_owned);
    root.ok_or(ToolError::NoVariable("CARGO_MANIFEST_DIR"))
}

fn with(artifacts: &Artifacts, program: &Path) -> Command {
    let mut command = Command::new(program);
    command.envs(artifacts.variables());
    command
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_of_a_failed_test_names_it() {
        assert_eq!(failed_test("test a::b ... FAILED"), Some("a::b"));
        for line in ["test a::b ... ok", "test a::b ... ignored, slow", "failures:", "FAILED", ""] {
            assert_eq!(failed_test(line), None, "{line}");
        }
    }
}
