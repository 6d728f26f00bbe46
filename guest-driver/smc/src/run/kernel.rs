// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `smc run --stack kernel`: the program gets sockets of the kernel's AF_SMC, by the library or, where no
//! library can be loaded, by a program of the kernel for a cgroup of its own.
//!
//! The cgroup is kept by a process apart, no child of the program: `smc run` starts a process that only
//! starts the holder. The holder ends with the last process of the cgroup.

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, ExitCode, Stdio};
use std::time::Duration;

use clap::ValueEnum;
use rustix::net::{AddressFamily, SocketType, sockopt};
use serde::{Deserialize, Serialize};
use smc_rendezvous::KernelSockets;

use super::RunArgs;
use crate::error::CliError;
use crate::helper::{self, Helper};
use crate::kernel;

/// IPPROTO_SMC
const PROTOCOL: u32 = 256;
/// The hidden subcommand of [`keep`].
const ROLE: &str = "__cgroup";
/// How long the holder may take to make the cgroup, on a busy machine.
const LIMIT: Duration = Duration::from_secs(60);

/// Task of the holder, and of the process that starts the holder.
#[derive(Debug, Serialize, Deserialize)]
struct Task {
    /// Name of the cgroup.
    name: String,
    /// Whether the process is no child of the program.
    apart: bool,
}

/// Whose SMC sockets a program gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum StackArg {
    /// This project's, in the program itself.
    User,
    /// The kernel's AF_SMC.
    Kernel,
    /// The kernel's if it has an ISM device and an enterprise id, or else this project's.
    Auto,
}

/// Whether the program gets the kernel's sockets.
///
/// # Errors
/// The kernel's sockets are demanded, together with an option unknown to AF_SMC.
pub(super) fn is_chosen(args: &RunArgs) -> Result<bool, String> {
    let rules = [
        ("--peer", !args.peer.is_empty()),
        ("--accept", !args.accept.is_empty()),
        ("--port", !args.port.is_empty()),
        ("--always", !args.always.is_empty()),
        ("--policy", args.policy.is_some()),
        ("--status", args.status.is_some()),
    ];
    let unknown = rules.into_iter().find(|(_, given)| *given).map(|(name, _)| name);
    match (args.stack, unknown) {
        (StackArg::User, _) | (StackArg::Auto, Some(_)) => Ok(false),
        (StackArg::Kernel, Some(name)) => Err(format!("AF_SMC of the kernel knows no {name}")),
        (StackArg::Kernel, None) => Ok(true),
        (StackArg::Auto, None) => Ok(kernel::obstacle().is_none()),
    }
}

/// Makes the program load the library, and the library make sockets of AF_SMC only.
pub(super) fn prepare(command: &mut Command, preload: OsString) {
    command.env("LD_PRELOAD", preload);
    withhold_devices(command);
}

/// Otherwise a loaded library would do the rest, too: `smc run` may have started this program.
pub(super) fn withhold_devices(command: &mut Command) {
    command.env("SMC_RUN_STACK", "kernel").env_remove("SMC_RUN_DEVICES");
}

/// Puts this process, and so the program after exec, into a cgroup whose TCP sockets are sockets of AF_SMC.
///
/// # Errors
/// The missing precondition.
pub(super) fn enter_cgroup() -> Result<(), String> {
    KernelSockets::check().map_err(|why| why.to_string())?;
    enter().map_err(|error| error.to_string())
}

fn enter() -> Result<(), CliError> {
    let task = Task { name: format!("smc-run-{}", std::process::id()), apart: false };
    let holder = Helper::start("cgroup", ROLE, &task)?;
    let cgroup: PathBuf = holder.receive(LIMIT)?;
    let cannot = || CliError::io(format!("cannot enter {}", cgroup.display()));
    std::fs::write(cgroup.join("cgroup.procs"), "0").map_err(cannot())?;
    if !is_in_cgroup() {
        return Err(cannot()(std::io::Error::other("its sockets are TCP")));
    }
    holder.leave();
    Ok(())
}

/// Whether this process is in a cgroup whose TCP sockets are sockets of AF_SMC.
pub(super) fn is_in_cgroup() -> bool {
    let socket = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None);
    let protocol = socket.and_then(sockopt::socket_protocol).ok().flatten();
    protocol.is_some_and(|protocol| protocol.as_raw().get() == PROTOCOL)
}

/// Makes a cgroup, and keeps the cgroup while a process is in there.
pub(crate) fn keep(task: &str) -> ExitCode {
    helper::run_unwatched(task, |task: Task| {
        if !task.apart {
            return start_holder(Task { apart: true, ..task });
        }
        let failed = |why: &dyn std::fmt::Display| CliError::Usage(why.to_string());
        let sockets = KernelSockets::make(&task.name).map_err(|why| failed(&why))?;
        let written = helper::send(&sockets.cgroup());
        written.map_err(CliError::io("cannot answer".to_owned()))?;
        // The other process is in the cgroup now, or has ended.
        helper::wait_for_parent_end();
        sockets.wait_until_empty().map_err(CliError::io("cannot watch the cgroup".to_owned()))
    })
}

/// Starts the holder with the pipes of this process. The holder holds no directory.
fn start_holder(task: Task) -> Result<(), CliError> {
    let failed = |error: std::io::Error| CliError::io("cannot start a process".to_owned())(error);
    let task = serde_json::to_string(&task).map_err(|error| failed(error.into()))?;
    let mut holder = Command::new("/proc/self/exe");
    holder.arg0("smc").args([ROLE, &task]).current_dir("/").stderr(Stdio::null());
    holder.process_group(0).spawn().map(|_| ()).map_err(failed)
}
