// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `cargo xtask uml`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::Instant;

use crate::artifacts;
use crate::guest_tests;
use crate::image::{self, Contents};
use crate::packages;
use crate::tool::{self, ToolError, at};

pub(crate) const LONG_ABOUT: &str = "\
Run the tests of the kernel's driver under user-mode Linux, after building what they need.

The first run builds a kernel (some minutes), kept in ${XDG_CACHE_HOME:-~/.cache}/vhost-device-ism. The \
driver is built with all warnings, and checked by checkpatch, kernel-doc and, if it is installed, sparse. \
Guests are processes of a network namespace of their own: that takes root, or user namespaces.";

/// Options of `cargo xtask uml`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Run only tests whose name contains this; repeat it for more.
    #[arg(long, value_name = "FILTER")]
    only: Vec<String>,

    /// Only build and check the driver.
    #[arg(long)]
    build: bool,

    /// Measure AF_SMC next to TCP instead, with a kernel of its own that looks for no mistakes.
    #[arg(long, conflicts_with_all = ["only", "build"])]
    perf: bool,

    /// Run the tests so often, until one fails. Without it a failed test runs once more, alone.
    #[arg(long, value_name = "N", default_value_t = 1)]
    times: u32,

    /// Show what tests that succeed print, too.
    #[arg(long)]
    show_output: bool,

    /// Keep the logs of tests that succeed, too.
    #[arg(long)]
    keep: bool,

    /// Install missing Debian packages, as root. CI=true says the same.
    #[arg(long)]
    install_deps: bool,
}

/// Runs the task. The exit code says whether the tests passed.
///
/// # Errors
/// Packages are missing, or something does not build or cannot be started.
pub(crate) fn run(args: &Args, root: &Path) -> Result<ExitCode, ToolError> {
    let root = fs::canonicalize(root).map_err(at(root))?;
    let start = Instant::now();
    packages::ensure_uml(&root, args.install_deps || tool::is_true("CI"))?;
    let kernel = kernel(&root, args.perf)?;
    let programs = artifacts::build_uml(&root)?;
    // <target>/release/vhost-device-ism
    let target = programs.daemon.ancestors().nth(2).unwrap_or(&root).to_owned();
    let made_for = if args.perf { "uml-plain" } else { "uml" };
    let module = artifacts::module(&root, &kernel, &target.join(made_for))?;
    if args.build {
        println!("{}", module.display());
        return Ok(ExitCode::SUCCESS);
    }
    let contents = Contents {
        kind: "uml",
        busybox: image::busybox()?,
        init: root.join("tests/uml/init"),
        programs: vec![
            ("smc".to_owned(), programs.smc),
            ("smc-test-peer".to_owned(), programs.peer),
            ("ip".to_owned(), image::program_of("ip", "iproute2")?),
        ],
        files: vec![
            ("lib/modules/virtio_ism.ko".to_owned(), module),
            ("lib/libsmc_preload.so".to_owned(), programs.preload),
        ],
    };
    let initrd = image::write(&contents, &target.join("vm"))?;
    eprintln!("xtask: everything is built, after {} s", start.elapsed().as_secs());
    let tests = |only: &[String]| {
        let mut command = Command::new("unshare");
        // As another user: with a user namespace, as its root.
        command.arg("--net").args((!is_root()).then_some("--map-root-user"));
        command.arg("--").arg(root.join("tests/uml/network.sh")).arg(&programs.tests);
        command.current_dir(root.join("tests")).args(only).arg("--test-threads=4");
        command.env("UML", kernel.join("linux")).env("UML_INITRD", &initrd);
        command.env("DAEMON", &programs.daemon);
        // Guests wait most of the time.
        if std::env::var_os("SMC_VM_BEDS").is_none() {
            command.env("SMC_VM_BEDS", "4");
        }
        if args.perf {
            command.args(["--ignored", "figures::"]);
        }
        if args.show_output || args.perf {
            command.arg("--show-output");
        }
        if args.keep {
            command.env("SMC_VM_KEEP", "1");
        }
        command
    };
    if args.times == 1 && !args.perf {
        let ended = guest_tests::watched(tests(&args.only), guest_tests::print_first)?;
        return guest_tests::report(&[ended], |name| tests(&[name.to_owned()]));
    }
    for nth in 1..=args.times {
        eprintln!("xtask: run {nth} of {}, after {} s", args.times, start.elapsed().as_secs());
        if !tool::status(tests(&args.only))?.success() {
            return Ok(ExitCode::FAILURE);
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn is_root() -> bool {
    let mut id = Command::new("id");
    id.arg("-u");
    tool::output(id).is_ok_and(|uid| uid.trim() == "0")
}

/// The directory of user-mode Linux: `UML_DIR`, or the script's result; `plain`: for measurements.
fn kernel(root: &Path, plain: bool) -> Result<PathBuf, ToolError> {
    if let Some(path) = std::env::var_os("UML_DIR") {
        return Ok(path.into());
    }
    let mut script = Command::new(root.join("tests/uml/kernel.sh"));
    script.args(plain.then_some("--plain"));
    let text = tool::output(script)?;
    Ok(PathBuf::from(text.lines().last().unwrap_or_default()))
}
