// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `smc doctor`: the resources of this machine for SMC, and commands to set up the rest.

use std::ffi::OsString;

use clap::Args;

use crate::error::CliError;
use crate::output;
use finding::Finding;

mod capacity;
mod checks;
mod finding;
mod limits;

pub(crate) use limits::FEW_DESCRIPTORS;

/// Help of `smc doctor`.
pub(crate) const LONG_ABOUT: &str = "\
Checks what SMC can use on this machine and prints, for each thing that is missing, the command that
provides it. It changes nothing, and takes no device from a program that has it.

  ok       works
  no       is not here; the command below it would provide it
  broken   is here but cannot be used; the command below it would repair it

Not all of it is needed: one way to carry bytes (a virtio-ism device, or an RDMA adapter) is enough.
The exit status is 0 if there is at least one, and 1 if every connection would be TCP.";

/// Options of `smc doctor`.
#[derive(Args, Debug)]
pub(crate) struct DoctorArgs {
    /// Print JSON: an object with a list of findings.
    #[arg(long)]
    json: bool,

    /// Check a program as well: by which door "smc run" would reach its connections.
    #[arg(value_hint = clap::ValueHint::CommandName)]
    program: Option<OsString>,
}

/// Runs all checks and prints them; `true` if at least one way to carry bytes works.
///
/// # Errors
/// There is no such program, or standard output cannot be written.
pub(crate) fn run(args: &DoctorArgs) -> Result<bool, CliError> {
    let mut findings = checks::all();
    findings.extend(args.program.as_deref().map(checks::program).transpose()?);
    let able = findings.iter().any(|finding| finding.carries);
    let text = match args.json {
        true => format!("{}\n", serde_json::json!({ "smc": able, "findings": findings })),
        false => as_text(&findings, able),
    };
    output::print(&text)?;
    Ok(able)
}

fn as_text(findings: &[Finding], able: bool) -> String {
    let mut text = String::new();
    let width = findings.iter().map(|finding| finding.name.len()).max().unwrap_or(0);
    for finding in findings {
        let Finding { name, says, .. } = finding;
        let head = format!("{:<6}  {name:<width$}  ", finding.status.word());
        text += &output::hanging(&head, says);
        for line in finding.grant.iter().flat_map(|grant| grant.lines()) {
            text += &format!("{:8}{:width$}  > {line}\n", "", "");
        }
    }
    text += match able {
        true => "\nSMC works here. \"smc check HOST:PORT\" shows whether a server does.\n",
        false => "\nNothing here can carry SMC: every connection would be TCP.\n",
    };
    text
}

#[cfg(test)]
mod tests {
    use super::finding::Status;
    use super::*;

    #[test]
    fn what_is_missing_is_followed_by_the_command_that_grants_it() {
        let findings = [
            Finding::new("rdma", Status::No, "no RDMA device").grant("rdma link add"),
            Finding::new("descriptors", Status::Ok, "1024"),
        ];
        let text = as_text(&findings, false);
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(lines[0], "no      rdma         no RDMA device");
        assert_eq!(lines[1], "                     > rdma link add");
        assert_eq!(lines[2], "ok      descriptors  1024");
        assert!(lines.last().unwrap().contains("would be TCP"));
    }

    #[test]
    fn only_a_carrier_that_works_makes_a_machine_able() {
        assert!(!Finding::new("rdma", Status::Broken, "x").carries_bytes().carries);
        assert!(Finding::new("rdma", Status::Ok, "x").carries_bytes().carries);
        assert!(!Finding::new("option", Status::Ok, "x").carries);
    }
}
