// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The command line of `smc run`, and the executable `smc-start` with this command only.
//!
//! The complete executable has code and tables for all commands: the dynamic linker changes 23,000
//! addresses, in a hundred pages, before `main` begins. This file and the files below must not name
//! other commands, or the linker adds the other commands to `smc-start`.

use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use smc_settings::Settings;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::LevelFilter;

use crate::error::CliError;
use crate::smc_tools::Tool;
use crate::{help, output, run, settings};

/// The version; a package has told the commit, too.
pub(crate) const VERSION: &str = match option_env!("SMC_VERSION") {
    Some(version) => version,
    None => env!("CARGO_PKG_VERSION"),
};

/// The complete executable, from the directory of `smc-start`: in a package, and in a build by
/// cargo.
const COMPLETE: [&str; 2] = ["../lib/smc/smc", "smc"];

/// The command that starts programs, for which it must not take long.
#[derive(Debug, Subcommand)]
pub(crate) enum RunCommand {
    /// Run a program with its TCP connections on SMC.
    #[command(long_about = run::LONG_ABOUT, after_long_help = run::AFTER)]
    Run(Box<run::RunArgs>),
}

/// The command line of [`RunCommand`], without all the options of the other commands.
#[derive(Debug, Parser)]
#[command(name = "smc", version = VERSION, subcommand_required = true)]
struct StartCli {
    #[command(subcommand)]
    command: RunCommand,
}

/// Whether the command line of this process begins with `run`.
pub(crate) fn is_asked() -> bool {
    std::env::args_os().nth(1).is_some_and(|first| first == "run")
}

/// Parses the command line of the process with the settings as defaults, or ends the process.
pub(crate) fn parsed<C: FromArgMatches>(command: clap::Command, settings: Option<&Settings>) -> C {
    let command = match settings {
        Some(settings) => settings::applied(command, settings),
        None => command,
    };
    let matches = help::wrapped(command).try_get_matches();
    let parsed = matches.and_then(|matches| C::from_arg_matches(&matches));
    parsed.unwrap_or_else(|wrong| help::end(&wrong))
}

/// Runs `smc run` by the command line of this process.
pub(crate) fn run() -> ExitCode {
    let settings = settings::load();
    let RunCommand::Run(args) =
        parsed::<StartCli>(StartCli::command(), settings.as_ref().ok()).command;
    log();
    status(settings.and_then(|_| run::run(&args)))
}

/// Begins the log of a command, by SMC_LOG or RUST_LOG, on standard error.
pub(crate) fn log() {
    let log = tracing_subscriber::fmt().with_writer(std::io::stderr);
    // Without internal errors: the report of an unwritable line would go to the same place, by a
    // panic.
    let log = log.with_ansi(output::colours_of_errors()).log_internal_errors(false);
    let mut filters = ["SMC_LOG", EnvFilter::DEFAULT_ENV].into_iter();
    match filters.find_map(|name| EnvFilter::try_from_env(name).ok()) {
        Some(filter) => log.with_env_filter(filter).init(),
        None => log.with_max_level(LevelFilter::WARN).init(),
    }
}

/// The exit status of a command; an error is shown.
pub(crate) fn status(result: Result<ExitCode, CliError>) -> ExitCode {
    result.unwrap_or_else(|error| {
        // The reader of the pipe ("head", say) has closed the pipe: no failure.
        if error.is_closed_output() {
            return ExitCode::SUCCESS;
        }
        error.show();
        ExitCode::from(error.status())
    })
}

/// The main function of `smc-start`, the command `smc` of packages: runs `smc run`, and executes the
/// complete `smc` for the other commands.
pub fn start() -> ExitCode {
    let mut args = std::env::args_os();
    let name = args.next().unwrap_or_default();
    if is_asked() && Tool::named(&name).is_none() {
        return run();
    }
    let failed = complete().map_or_else(
        |why| CliError::Run { program: "the complete smc".into(), why },
        |program| {
            let source = Command::new(&program).arg0(name).args(args).exec();
            CliError::Exec { program: program.display().to_string(), source }
        },
    );
    status(Err(failed))
}

/// The complete executable. The error is a sentence.
fn complete() -> Result<PathBuf, String> {
    let this = std::env::current_exe().map_err(|error| format!("/proc/self/exe: {error}"))?;
    let directory = this.parent().unwrap_or(Path::new("/"));
    let places = COMPLETE.map(|place| directory.join(place));
    match places.iter().find(|place| place.is_file() && **place != this) {
        Some(found) => Ok(found.clone()),
        None => {
            let places = places.map(|place| place.display().to_string());
            Err(format!("it is none of {}", places.join(", ")))
        }
    }
}
