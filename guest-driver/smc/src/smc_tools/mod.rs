// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `smcss`, `smcd` and `smcr`: commands with the names, options and columns of smc-tools, for the
//! sockets of this stack and of AF_SMC. The name of the started program selects the command.

mod objects;
mod smcss;
pub(crate) mod tcp_table;
mod tool;

use std::ffi::OsString;
use std::process::ExitCode;

use clap::{Command, CommandFactory, FromArgMatches};

use crate::{cli, help, output};

pub(crate) use tool::Tool;

/// Runs a command with the arguments of this process, prints errors, and returns the exit status.
pub(crate) fn run(tool: Tool) -> ExitCode {
    let args = std::env::args_os();
    let text = match tool {
        Tool::Smcss => smcss::text(&parsed(smcss::Args::command(), args)),
        Tool::Smcd | Tool::Smcr => {
            let args = args.map(objects::long_option);
            objects::text(tool, &parsed(objects::Args::command().name(tool.name()), args))
        }
    };
    match text.and_then(|text| output::print(&text)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) if error.is_closed_output() => ExitCode::SUCCESS,
        Err(error) => {
            output::note(&format!("{}: {error}", tool.name()));
            ExitCode::FAILURE
        }
    }
}

/// The options in the arguments of this process.
fn parsed<A: FromArgMatches>(command: Command, args: impl Iterator<Item = OsString>) -> A {
    let matches = help::wrapped(command).try_get_matches_from(args);
    let options = matches.and_then(|matches| A::from_arg_matches(&matches));
    options.unwrap_or_else(|wrong| cli::end(&wrong))
}

/// The three commands, for their manual pages.
pub(crate) fn commands() -> [Command; 3] {
    let objects = |tool: Tool| objects::Args::command().name(tool.name());
    [smcss::Args::command(), objects(Tool::Smcd), objects(Tool::Smcr)]
}
