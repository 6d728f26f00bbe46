// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! TCP option 254 for the program.

use std::ffi::OsString;
use std::os::fd::BorrowedFd;
use std::process::Command;

use ism_sys::WatcherTask;
use smc_rendezvous::{Policy, Rendezvous};

use super::RunArgs;
use crate::error::CliError;
use crate::stack::RendezvousArg;

/// Passes a rendezvous on to the program and its child processes: attached to the cgroup of the
/// program's start, or granted. None of the processes needs capabilities. The result is a task that
/// attaches the rendezvous when a process needs the rendezvous; with `--rendezvous required` the
/// rendezvous is attached at once.
///
/// # Errors
/// The policy file cannot be read or parsed.
pub(super) fn pass_on(
    command: &mut Command,
    args: &RunArgs,
    name: &OsString,
) -> Result<Option<WatcherTask>, CliError> {
    let failed = |why: String| CliError::Run { program: name.to_string_lossy().into_owned(), why };
    let mut options = smc_rendezvous::Options::default();
    command.env_remove("SMC_RUN_POLICY");
    let of_machine = smc_settings::policy_file().filter(|_| args.policy.is_none());
    if let Some(file) = args.policy.as_ref().or(of_machine.as_ref()) {
        match Policy::load(file) {
            Ok(policy) => {
                for key in policy.unknown() {
                    crate::output::note(&format!("{}: {key}", file.display()));
                }
                options.policy = policy;
            }
            // The program looks for the file of the machine, too.
            Err(error) if error.is_missing() && of_machine.is_some() => {}
            Err(error) => return Err(failed(error.in_file(file))),
        }
    }
    if let Some(file) = &args.policy {
        let file = std::path::absolute(file).unwrap_or_else(|_| file.clone());
        command.env("SMC_RUN_POLICY", file);
    }
    let how = match args.rendezvous {
        RendezvousArg::Off => "off",
        RendezvousArg::Auto => "auto",
        RendezvousArg::Required => "required",
    };
    command.env("SMC_RUN_RENDEZVOUS", how);
    command.env_remove("SMC_RUN_OPTION").env_remove("SMC_RUN_NO_OPTION");
    if args.rendezvous == RendezvousArg::Off {
        return Ok(None);
    }
    if args.rendezvous == RendezvousArg::Auto
        && let Ok((passed, asked)) = Rendezvous::offer()
    {
        command.env("SMC_RUN_OPTION", passed.to_string());
        // The descriptor is the program's from now on.
        std::mem::forget(passed);
        let run = Box::new(move |asked: BorrowedFd<'_>| Rendezvous::serve(options.clone(), asked));
        return Ok(Some(WatcherTask { asked, run }));
    }
    let opened = Rendezvous::open(options).map_err(|why| why.to_string());
    match opened.and_then(|rendezvous| rendezvous.pass_on().map_err(|error| error.to_string())) {
        Ok(passed) => {
            command.env("SMC_RUN_OPTION", passed.to_string());
            // Its descriptors are the program's from now on.
            std::mem::forget(passed);
        }
        Err(why) => {
            let name = name.to_string_lossy();
            if args.rendezvous == RendezvousArg::Auto && args.peer.is_empty() {
                crate::output::note(&format!(
                    "smc run: connections that {name} makes are TCP, for no --peer names a server and \
                     there is no TCP option 254: {why} (see \"smc doctor\")"
                ));
            }
            if args.rendezvous == RendezvousArg::Required {
                if args.strict {
                    return Err(failed(format!("no TCP option 254: {why}")));
                }
                crate::output::note(&format!(
                    "smc run: {name} stays on TCP, for there is no TCP option 254: {why}"
                ));
            }
            command.env("SMC_RUN_NO_OPTION", why);
        }
    }
    Ok(None)
}
