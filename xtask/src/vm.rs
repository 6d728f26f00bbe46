// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `cargo xtask vm`.

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::Instant;

use clap::Subcommand;

use crate::artifacts::{self, Artifacts};
use crate::guest_tests::{self, Ended, print_first, watched};
use crate::nested;
use crate::packages::Programs;
use crate::tool::{self, ToolError};

pub(crate) const LONG_ABOUT: &str = "\
Run the tests that need virtual machines, after building what they need.

The first run builds a kernel, QEMU and this repository's programs, all at once (a quarter of an hour \
on two processors); kernel and QEMU are kept in ${XDG_CACHE_HOME:-~/.cache}/vhost-device-ism. \
Nothing needs root or KVM; ACCEL=kvm uses KVM.";

pub(crate) const AFTER: &str = "\
A test that fails runs once more, alone, and both results are shown: emulated guests may miss a time \
on a busy machine.

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

    /// Run the slow tests, too: the conformance suite over every kind of soft-RoCE, and all programs
    /// of the distribution, whose packages are large.
    #[arg(long)]
    slow: bool,

    /// Show what tests that succeed print, too: durations, rates, what a peer answered.
    #[arg(long)]
    show_output: bool,

    /// Keep the logs of tests that succeed, too.
    #[arg(long)]
    keep: bool,

    /// Run the core of the tests, or "perf", with guests under KVM, which runs in an emulated guest.
    /// This needs no KVM. The kernel of that guest is a Debian package, which is downloaded once.
    #[arg(long, global = true)]
    nested: bool,

    /// Measure between two guests under the KVM of this host instead: one table with streams, round
    /// trips, connections and messages on SMC, TCP and, if possible, virtio sockets.
    #[arg(long, conflicts_with_all = ["nested", "slow", "only"])]
    kvm: bool,

    /// Install missing Debian packages, as root. CI=true says the same.
    #[arg(long, global = true)]
    install_deps: bool,
}

/// Arguments of "smc perf --to" for the table of `--kvm`.
const TABLE: [&str; 9] = [
    "bulk",
    "rtt_sleep",
    "rtt_spin",
    "short_conn",
    "short_conn_1",
    "rate_100b",
    "echo_200",
    "--runs",
    "9",
];
/// The file through which QEMU uses KVM.
const KVM: &str = "/dev/kvm";
/// Within this many seconds a guest has booted, or KVM runs no guests here: the file may be there all the
/// same.
const KVM_BOOT_SECONDS: &str = "60";

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
        /// Programs of the distribution as they are, on SMC-D next to TCP. Arguments, if there are any: the
        /// number of runs, and "kernel" for the kernel's AF_SMC.
        #[arg(long, conflicts_with = "rdma")]
        programs: bool,
        /// The devices by vfio-user. With a QEMU without patches in the variable QEMU, they have no window.
        #[arg(long, conflicts_with_all = ["rdma", "programs", "nested"])]
        vfio_user: bool,
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
    let all_programs = args.slow || matches!(args.what, Some(What::Programs));
    let which = if all_programs { Programs::All } else { Programs::Small };
    let install = args.install_deps || tool::is_true("CI");
    if args.kvm {
        let usable = std::fs::File::options().read(true).write(true).open(KVM);
        usable.map_err(tool::at(Path::new(KVM)))?;
    }
    let artifacts = artifacts::build(&root, install, which)?;
    eprintln!("xtask: everything is built, after {} s", start.elapsed().as_secs());
    let status = match &args.what {
        None if args.kvm => {
            let mut command = with(&artifacts, &artifacts::example(&root, "vm-perf")?);
            command.envs(artifacts::vsock()?.map(|path| ("VSOCK_DAEMON", path)));
            command.env("ACCEL", "kvm").env("SMC_VM_BOOT_SECONDS", KVM_BOOT_SECONDS).args(TABLE);
            tool::status(command)?
        }
        None if args.nested => {
            return nested::tests(&root, &artifacts, &args.only, args.show_output);
        }
        Some(What::Perf { rdma: false, programs: false, args: words, .. }) if args.nested => {
            return nested::perf(&root, &artifacts, words);
        }
        Some(_) if args.nested => return Err(ToolError::NotNested),
        Some(What::Build) => {
            for (name, path) in artifacts.variables() {
                println!("{name}={}", path.display());
            }
            return Ok(ExitCode::SUCCESS);
        }
        Some(What::Demo) => tool::status(with(&artifacts, &artifacts::example(&root, "vm-demo")?))?,
        Some(What::Perf { rdma: false, programs: false, vfio_user, args }) => {
            let mut command = with(&artifacts, &artifacts::example(&root, "vm-perf")?);
            command.envs(vfio_user.then_some(("VFIO_USER", "1")));
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
            let only = vec!["programs::".to_owned()];
            let args = Args { what: None, only, slow: true, show_output: true, ..*args };
            // Their figures are compared, so no other test has guests meanwhile.
            return tests(&root, &artifacts, &args, Some(1));
        }
        None if args.only.is_empty() => return all_tests(&root, &artifacts, args),
        None => return tests(&root, &artifacts, args, None),
    };
    Ok(if status.success() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Tests with long waits for time-outs of AF_SMC. They run beside all others, to use the idle processors of
/// their guests.
const WAITING: &str = "interop::";
/// Tests to run after all others: with measurements, or with many guests.
const LAST: [&str; 2] = ["alone::", "stock::"];

/// A run of the test program.
struct Run<'a> {
    /// Tests whose name contains one of these; all if there are none.
    only: Vec<&'a str>,
    /// Tests whose name contains one of these are left out.
    skip: Vec<&'a str>,
    /// How many beds have guests at a time, if not as many as usual.
    beds: Option<u32>,
}

impl Run<'_> {
    fn command(&self, root: &Path, artifacts: &Artifacts, args: &Args) -> Command {
        let mut command = with(artifacts, &artifacts.tests);
        // Cargo, too, runs the tests of a package in the package's directory.
        command.current_dir(root.join("tests")).args(&self.only);
        command.args(self.skip.iter().flat_map(|filter| ["--skip", filter]));
        // A test waits until there is room for its guests: two or three tests have guests at a time.
        // With one more thread, the next test waits already.
        command.arg("--test-threads=4");
        if args.slow {
            command.arg("--include-ignored");
        }
        if args.show_output {
            command.arg("--show-output");
        }
        command.envs(self.beds.map(|beds| ("SMC_VM_BEDS", beds.to_string())));
        if args.keep {
            command.env("SMC_VM_KEEP", "1");
        }
        command
    }
}

/// Runs all tests: the fast and broad tests first.
fn all_tests(root: &Path, artifacts: &Artifacts, args: &Args) -> Result<ExitCode, ToolError> {
    let skip = [&LAST[..], &[WAITING]].concat();
    let most = Run { only: Vec::new(), skip, beds: None }.command(root, artifacts, args);
    let waiting = Run { only: vec![WAITING], skip: Vec::new(), beds: Some(1) };
    let waiting = waiting.command(root, artifacts, args);
    let last = Run { only: LAST.to_vec(), skip: Vec::new(), beds: None };
    let last = last.command(root, artifacts, args);
    let (most, (waiting, text)) = std::thread::scope(|scope| {
        let waiting = scope.spawn(|| {
            let mut text = Vec::new();
            let result = watched(waiting, |line| text.push(line.to_owned()));
            (result, text)
        });
        let most = watched(most, print_first);
        let waiting = waiting.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        (most, waiting)
    });
    text.iter().for_each(|line| print_first(line));
    let last = watched(last, print_first)?;
    played_again(&[most?, waiting?, last], root, artifacts, args)
}

/// Runs the tests whose name contains one of some filters.
fn tests(
    root: &Path,
    artifacts: &Artifacts,
    args: &Args,
    beds: Option<u32>,
) -> Result<ExitCode, ToolError> {
    let only = args.only.iter().map(String::as_str).collect();
    let run = Run { only, skip: Vec::new(), beds };
    let ended = watched(run.command(root, artifacts, args), print_first)?;
    played_again(&[ended], root, artifacts, args)
}

fn played_again(
    runs: &[Ended],
    root: &Path,
    artifacts: &Artifacts,
    args: &Args,
) -> Result<ExitCode, ToolError> {
    guest_tests::report(runs, |name| {
        let only = Run { only: vec![name], skip: Vec::new(), beds: Some(1) };
        only.command(root, artifacts, args)
    })
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
