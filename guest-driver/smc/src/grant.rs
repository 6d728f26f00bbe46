// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `smc grant`: TCP option 254 for the processes of a cgroup.

use std::io::Read;
use std::path::{Path, PathBuf};

use clap::Args;
use serde::Deserialize;

use crate::error::CliError;
use crate::output;

/// Help of `smc grant`.
pub(crate) const LONG_ABOUT: &str = "\
Lets the processes of a cgroup find out by TCP option 254 which peers speak SMC (RFC 7609), without
capabilities of their own: those of a container, or of a service. It takes root, or CAP_BPF and
CAP_NET_ADMIN. The grant ends with the cgroup.

\"smc cdi\" writes this command into its specification as a hook, so containers have it from their
start. A process with libsmc_preload.so finds the grant by itself.";

/// End of the help of `smc grant`.
pub(crate) const AFTER: &str = "\
Examples:
  smc grant --cgroup /sys/fs/cgroup/system.slice/redis.service
  smc grant --pid \"$(podman inspect --format '{{.State.Pid}}' web)\"";

/// Limit of the state of a container, in bytes.
const STATE_MAX: u64 = 1 << 20;

/// Options of `smc grant`.
#[derive(Args, Debug)]
#[group(required = true, multiple = false)]
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
}

/// Grants the option.
///
/// # Errors
/// There is no such cgroup, or this process may not.
pub(crate) fn run(args: &GrantArgs) -> Result<(), CliError> {
    let result = match (&args.cgroup, args.pid) {
        (Some(cgroup), _) => grant(cgroup),
        (None, Some(process)) => of_process(process).and_then(|cgroup| grant(&cgroup)),
        (None, None) => of_container(std::io::stdin().lock()).and_then(|cgroup| grant(&cgroup)),
    };
    match result {
        Err(error) if args.hook => {
            output::note(&format!(
                "smc grant: the container finds no peers by TCP option 254: {error}"
            ));
            Ok(())
        }
        Ok(cgroup) if !args.hook => output::print(&format!("granted to {}\n", cgroup.display())),
        other => other.map(|_| ()),
    }
}

/// Reads a process id, or "self".
fn process(text: &str) -> Result<u32, String> {
    match text {
        "self" => Ok(std::process::id()),
        number => number.parse().map_err(|_| format!("{number:?} is no process id")),
    }
}

fn grant(cgroup: &Path) -> Result<PathBuf, CliError> {
    smc_rendezvous::grant(cgroup).map_err(|why| CliError::Grant(why.to_string()))?;
    Ok(cgroup.to_owned())
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
