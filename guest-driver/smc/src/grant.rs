// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `smc grant`: TCP option 254, or sockets of the kernel's AF_SMC, for the processes of a cgroup.

use std::io::Read;
use std::path::{Path, PathBuf};

use clap::{ArgGroup, Args};
use serde::Deserialize;
use smc_rendezvous::KernelSockets;

use crate::error::CliError;
use crate::output;

/// Help of `smc grant`.
pub(crate) const LONG_ABOUT: &str = "\
Lets the processes of a cgroup find out by TCP option 254 which peers speak SMC (RFC 7609), without
capabilities of their own: those of a container, or of a service. It takes root, or CAP_BPF and
CAP_NET_ADMIN. The grant ends with the cgroup.

\"smc cdi\" writes this command into its specification as a hook, so containers have it from their
start. A process with libsmc_preload.so finds the grant by itself.

With --kernel, new TCP sockets of the processes are sockets of the kernel's AF_SMC instead, whatever
the programs are: neither \"smc run\" nor a library is needed. It takes root, and a kernel that permits
it (\"smc doctor\"). --revoke takes this grant back; existing sockets stay as they are.";

/// End of the help of `smc grant`.
pub(crate) const AFTER: &str = "\
Examples:
  smc grant --cgroup /sys/fs/cgroup/system.slice/redis.service
  smc grant --pid \"$(podman inspect --format '{{.State.Pid}}' web)\"
  smc grant --kernel --cgroup /sys/fs/cgroup/system.slice/etcd.service
  smc grant --kernel --revoke --cgroup /sys/fs/cgroup/system.slice/etcd.service";

/// Limit of the state of a container, in bytes.
const STATE_MAX: u64 = 1 << 20;

/// Options of `smc grant`.
#[derive(Args, Debug)]
#[command(group = ArgGroup::new("whose").required(true).args(["cgroup", "pid", "hook"]))]
pub(crate) struct GrantArgs {
    /// The cgroup: a directory of cgroup v2.
    #[arg(long, value_name = "DIRECTORY")]
    cgroup: Option<PathBuf>,

    /// The cgroup of this process; "self" is that in which this command was started.
    #[arg(long, value_parser = process)]
    pid: Option<u32>,

    /// The cgroup of a container whose runtime runs this as a createRuntime hook (OCI): its state is
    /// on standard input. A failure is printed, and the container starts all the same, on TCP.
    #[arg(long)]
    hook: bool,

    /// Sockets of the kernel's AF_SMC in place of TCP sockets.
    #[arg(long)]
    kernel: bool,

    /// Take the grant of --kernel back.
    #[arg(long, requires = "kernel", conflicts_with = "hook")]
    revoke: bool,
}

/// Grants the option, or the sockets of AF_SMC.
///
/// # Errors
/// There is no such cgroup, or this process may not.
pub(crate) fn run(args: &GrantArgs) -> Result<(), CliError> {
    let cgroup = match (&args.cgroup, args.pid) {
        (Some(cgroup), _) => Ok(cgroup.clone()),
        (None, Some(process)) => of_process(process),
        (None, None) => of_container(std::io::stdin().lock()),
    };
    match cgroup.and_then(|cgroup| change(args, &cgroup)) {
        Err(error) if args.hook => {
            output::note(&format!("smc grant: the container starts without the grant: {error}"));
            Ok(())
        }
        Ok(text) if !args.hook => output::print(&text),
        other => other.map(|_| ()),
    }
}

/// Grants, or takes back. The result is a line about the change.
fn change(args: &GrantArgs, cgroup: &Path) -> Result<String, CliError> {
    let failed = |why: &dyn std::fmt::Display| CliError::Grant(why.to_string());
    let path = cgroup.display();
    if args.revoke {
        return match KernelSockets::revoke(cgroup).map_err(|why| failed(&why))? {
            true => Ok(format!("taken back from {path}\n")),
            false => Ok(format!("{path} had no grant\n")),
        };
    }
    match args.kernel {
        true => KernelSockets::grant(cgroup).map_err(|why| failed(&why))?,
        false => smc_rendezvous::grant(cgroup).map_err(|why| failed(&why))?,
    }
    Ok(format!("granted to {path}\n"))
}

/// Reads a process id, or "self".
fn process(text: &str) -> Result<u32, String> {
    match text {
        "self" => Ok(std::process::id()),
        number => number.parse().map_err(|_| format!("{number:?} is no process id")),
    }
}

fn of_process(process: u32) -> Result<PathBuf, CliError> {
    smc_rendezvous::cgroup_of(process).map_err(|why| CliError::Grant(why.to_string()))
}

/// The needed part of a container's state: OCI runtime specification, "State".
#[derive(Deserialize)]
struct State {
    pid: u32,
}

/// The cgroup of the container with this state.
fn of_container(state: impl Read) -> Result<PathBuf, CliError> {
    let wrong = |why: String| CliError::Grant(format!("the state on standard input: {why}"));
    let mut text = String::new();
    state.take(STATE_MAX).read_to_string(&mut text).map_err(|error| wrong(error.to_string()))?;
    let state: State = serde_json::from_str(&text).map_err(|error| wrong(error.to_string()))?;
    let cgroup = of_process(state.pid)?;
    // A runtime without cgroup v2 leaves the container in the cgroup of its caller.
    if of_process(std::process::id()).is_ok_and(|own| own == cgroup) {
        let path = cgroup.display();
        return Err(CliError::Grant(format!("the container has no cgroup of its own, but {path}")));
    }
    Ok(cgroup)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(state: &str) -> String {
        of_container(state.as_bytes()).unwrap_err().to_string()
    }

    #[test]
    fn a_state_without_a_process_is_refused() {
        for state in ["", "{}", "[]", r#"{"pid": -1}"#, r#"{"pid": "7"}"#] {
            assert!(refused(state).contains("the state on standard input"), "{state}");
        }
        let none = format!(r#"{{"ociVersion": "1.0.2", "pid": {}}}"#, i32::MAX);
        assert!(refused(&none).contains(&format!("/proc/{}/cgroup", i32::MAX)));
    }

    #[test]
    fn a_container_in_the_cgroup_of_its_starter_is_refused() {
        let state = format!(r#"{{"pid": {}}}"#, std::process::id());
        let text = refused(&state);
        let no_cgroup = text.contains("cgroup v2 is not mounted");
        assert!(no_cgroup || text.contains("no cgroup of its own"), "{text}");
    }
}
