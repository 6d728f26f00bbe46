// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `smc run --stack kernel`: the program gets sockets of the kernel's AF_SMC.

use std::ffi::OsString;
use std::process::Command;

use clap::ValueEnum;

use super::RunArgs;
use crate::kernel;

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
    command.env("LD_PRELOAD", preload).env("SMC_RUN_STACK", "kernel");
    // Otherwise the library would do the rest, too: `smc run` may have started this program.
    command.env_remove("SMC_RUN_DEVICES");
}
