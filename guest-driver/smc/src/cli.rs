// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The command line: parses and runs the subcommand, and shows its error.

use std::ffi::OsString;
use std::io::Write;
use std::process::ExitCode;

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use smc_settings::Settings;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::LevelFilter;

use crate::error::CliError;
use crate::{
    capture, cdi, check, conform, debug, decode, demo, devices, doctor, fabric, grant, help,
    manual, output, perf, pipe, plan, run, settings, stat, temporary_fabric,
};

const LONG_ABOUT: &str = "\
Sockets over shared memory (SMC-D over virtio-ism) between the processes, containers and virtual
machines of one host.

A connection starts as TCP. If both ends speak SMC and have a device on the same fabric, they
exchange three messages. From then on each end writes into a buffer (DMB) of its peer.

Start with \"smc demo\", which needs nothing else.";

const AFTER: &str = "\
An example in three terminals:
  smc fabric                                  a daemon with its devices
  smc listen -v 5000 < /dev/null > copy       a server
  smc connect -v localhost:5000 < /bin/ls     a client
  smc stat                                    counters of the daemon, and SMC connections
  cmp copy /bin/ls

SMC_LOG=debug prints the log of the library, in programs of \"smc run\" as well.
\"smc COMMAND --help\" describes a command.";

/// The version; a package has told the commit, too.
pub(crate) const VERSION: &str = match option_env!("SMC_VERSION") {
    Some(version) => version,
    None => env!("CARGO_PKG_VERSION"),
};

#[derive(Debug, Parser)]
#[command(name = "smc", version = VERSION, about = "Sockets over shared memory: SMC-D over virtio-ism",
          long_about = LONG_ABOUT, after_help = AFTER, subcommand_required = true,
          arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Demonstrate SMC-D: a fabric, a handshake, data both ways, and the speed next to TCP.
    #[command(long_about = demo::LONG_ABOUT)]
    Demo(demo::DemoArgs),
    /// Listen, and connect standard input and output with the client.
    #[command(long_about = pipe::LISTEN, after_long_help = pipe::LISTEN_AFTER)]
    Listen(pipe::ListenArgs),
    /// Connect to a server, and connect standard input and output with it.
    #[command(long_about = pipe::CONNECT, after_long_help = pipe::CONNECT_AFTER)]
    Connect(pipe::ConnectArgs),
    /// Measure SMC next to TCP, Unix sockets and raw shared memory.
    #[command(long_about = perf::LONG_ABOUT, after_long_help = perf::AFTER)]
    Perf(perf::PerfArgs),
    #[command(flatten)]
    Start(StartCommand),
    #[command(after_long_help = decode::AFTER)]
    Decode(decode::DecodeArgs),
    /// Show which connections use SMC and why others do not, link groups, RNICs, a daemon's counters.
    #[command(long_about = stat::LONG_ABOUT, after_long_help = stat::AFTER)]
    Stat(stat::StatArgs),
    /// Write the bytes of connections on SMC into a capture for Wireshark, as those of TCP.
    #[command(long_about = capture::LONG_ABOUT, after_long_help = capture::AFTER)]
    Capture(capture::CaptureArgs),
    /// Find out whether a connection to a server would be SMC, and why not.
    #[command(long_about = check::LONG_ABOUT, after_long_help = check::AFTER)]
    Check(check::CheckArgs),
    /// Test an implementation of SMC against RFC 7609 and SMCv2.1.
    #[command(long_about = conform::LONG_ABOUT, after_long_help = conform::AFTER)]
    Conform(Box<conform::ConformArgs>),
    /// List the virtio-ism PCI devices and RNICs of this machine, or hand devices to programs.
    #[command(long_about = devices::LONG_ABOUT)]
    Devices(devices::DevicesArgs),
    /// List what SMC can use on this machine, and the commands that set up the rest.
    #[command(long_about = doctor::LONG_ABOUT)]
    Doctor(doctor::DoctorArgs),
    /// Show which running services would gain by SMC, before it is set up.
    #[command(long_about = plan::LONG_ABOUT, after_long_help = plan::AFTER)]
    Plan(plan::PlanArgs),
    /// Show which settings are in force, and where programs look for a fabric.
    #[command(long_about = settings::LONG_ABOUT, after_long_help = settings::AFTER)]
    Config(settings::ConfigArgs),
    /// Print a CDI specification, by which containers get a device and the library.
    #[command(long_about = cdi::LONG_ABOUT, after_long_help = cdi::AFTER)]
    Cdi(cdi::CdiArgs),
    /// Let the processes of a cgroup, as of a container, find peers by TCP option 254.
    #[command(long_about = grant::LONG_ABOUT, after_long_help = grant::AFTER)]
    Grant(grant::GrantArgs),
    /// Write an archive for a bug report: versions, settings, reports, logs.
    #[command(long_about = debug::LONG_ABOUT, after_long_help = debug::AFTER)]
    Debug(debug::DebugArgs),
    /// Print completions of a program for a shell: `source <(smc completions bash)`.
    Completions(manual::CompletionsArgs),
    /// Print the manual page, or write those of all commands into a directory.
    Man(manual::ManArgs),
    /// Run the daemon that emulates virtio-ism devices.
    #[command(about = "Run the daemon that emulates virtio-ism devices",
              long_about = fabric::LONG_ABOUT, after_long_help = "")]
    Fabric(Box<fabric::FabricArgs>),
    #[command(name = "__supervisor", hide = true)]
    Supervisor { task: String },
    #[command(name = "__daemon", hide = true, disable_help_flag = true)]
    Daemon {
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<OsString>,
    },
    #[command(name = "__serve", hide = true)]
    Serve { task: String },
    #[command(name = "__drive", hide = true)]
    Drive { task: String },
    #[command(name = "__demo", hide = true)]
    DemoPeer { task: String },
    #[command(name = "__idle", hide = true)]
    Idle { task: String },
    #[command(name = "__cgroup", hide = true)]
    Cgroup { task: String },
}

/// The command that starts programs, for which it must not take long.
#[derive(Debug, Subcommand)]
enum StartCommand {
    /// Run a program with its TCP connections on SMC.
    #[command(long_about = run::LONG_ABOUT, after_long_help = run::AFTER)]
    Run(Box<run::RunArgs>),
}

/// The command line of [`StartCommand`], without all the options of the other commands.
#[derive(Debug, Parser)]
#[command(name = "smc", version = VERSION, subcommand_required = true)]
struct StartCli {
    #[command(subcommand)]
    command: StartCommand,
}

impl Command {
    /// Whether the settings of the machine are defaults of its options.
    fn has_settings(&self) -> bool {
        matches!(
            self,
            Command::Listen(_)
                | Command::Connect(_)
                | Command::Check(_)
                | Command::Start(_)
                | Command::Stat(_)
                | Command::Cdi(_)
        )
    }
}

/// Parses the command line of the process.
fn parsed(settings: Option<&Settings>) -> Command {
    let variables = std::env::vars_os().map(|(name, _)| name);
    if let Some(program) = program_without_options(std::env::args_os(), variables, settings) {
        return Command::Start(StartCommand::Run(Box::new(run::RunArgs::by_default(program))));
    }
    let command = |build: fn() -> clap::Command| match settings {
        Some(settings) => settings::applied(build(), settings),
        None => build(),
    };
    // Only help and errors show the texts, so only these pay for the wrapping.
    let matches = |build: fn() -> clap::Command| {
        let parsed = command(build).try_get_matches();
        parsed.or_else(|_| help::wrapped(command(build)).try_get_matches())
    };
    let is_start = std::env::args_os().nth(1).is_some_and(|first| first == "run");
    let parsed = match is_start {
        true => matches(StartCli::command)
            .and_then(|matches| StartCli::from_arg_matches(&matches))
            .map(|cli| Command::Start(cli.command)),
        false => matches(Cli::command)
            .and_then(|matches| Cli::from_arg_matches(&matches))
            .map(|cli| cli.command),
    };
    parsed.unwrap_or_else(|wrong| end(&wrong))
}

/// The program and its arguments, for a command line `smc run PROGRAM` without options, and without
/// settings or variables of options: a parser is a third of the work of `smc run` in this process. All
/// variables of options have names with the same beginning.
fn program_without_options(
    mut line: impl Iterator<Item = OsString>,
    mut variables: impl Iterator<Item = OsString>,
    settings: Option<&Settings>,
) -> Option<Vec<OsString>> {
    let is_option = |word: &OsString| word.is_empty() || word.as_encoded_bytes().starts_with(b"-");
    let is_variable = |name: &OsString| name.as_encoded_bytes().starts_with(b"SMC_");
    let runs = line.nth(1).is_some_and(|first| first == "run");
    let program: Vec<_> = if runs { line.collect() } else { Vec::new() };
    let is_plain = program.first().is_some_and(|first| !is_option(first))
        && settings.is_some_and(|settings| *settings == Settings::default())
        && !variables.any(|name| is_variable(&name));
    is_plain.then_some(program)
}

/// Runs the command of the command line.
pub(crate) fn main() -> ExitCode {
    let settings = settings::load();
    let command = parsed(settings.as_ref().ok());
    // The daemon has a log of its own, with other defaults.
    if !matches!(command, Command::Fabric(_) | Command::Daemon { .. }) {
        begin_log(matches!(command, Command::Start(_)));
    }
    if let Err(error) = settings
        && command.has_settings()
    {
        error.show();
        return ExitCode::from(error.status());
    }
    let result = match command {
        Command::Perf(args) => perf::run(&args).map(|()| ExitCode::SUCCESS),
        Command::Demo(args) => demo::run(&args).map(|()| ExitCode::SUCCESS),
        Command::Listen(args) => pipe::listen(&args).map(|()| ExitCode::SUCCESS),
        Command::Connect(args) => pipe::connect(&args).map(|()| ExitCode::SUCCESS),
        Command::Decode(args) => {
            decode::run(args).map(|good| ExitCode::from(u8::from(!good))).map_err(CliError::from)
        }
        Command::Start(StartCommand::Run(args)) => run::run(&args),
        Command::Stat(args) => stat::run(&args).map(|()| ExitCode::SUCCESS),
        Command::Capture(args) => capture::run(&args).map(|()| ExitCode::SUCCESS),
        Command::Check(args) => check::run(&args),
        Command::Conform(args) => conform::run(&args),
        Command::Devices(args) => devices::run(&args).map(|()| ExitCode::SUCCESS),
        Command::Doctor(args) => doctor::run(&args).map(|able| ExitCode::from(u8::from(!able))),
        Command::Plan(args) => plan::run(&args).map(|()| ExitCode::SUCCESS),
        Command::Config(args) => settings::run(&args).map(|()| ExitCode::SUCCESS),
        Command::Cdi(args) => cdi::run(&args).map(|()| ExitCode::SUCCESS),
        Command::Debug(args) => debug::run(&args).map(|()| ExitCode::SUCCESS),
        Command::Grant(args) => grant::run(&args).map(|()| ExitCode::SUCCESS),
        Command::Completions(args) => {
            manual::completions(&args, Cli::command()).map(|()| ExitCode::SUCCESS)
        }
        Command::Man(args) => manual::man(&args, Cli::command()).map(|()| ExitCode::SUCCESS),
        Command::Fabric(args) => fabric::run(&args),
        Command::Supervisor { task } => return temporary_fabric::supervise(&task),
        Command::Daemon { args } => return temporary_fabric::daemon(args),
        Command::Serve { task } => return perf::serve(&task),
        Command::Drive { task } => return perf::drive(&task),
        Command::DemoPeer { task } => return demo::peer(&task),
        Command::Idle { task } => return perf::idle(&task),
        Command::Cgroup { task } => return run::keep(&task),
    };
    result.unwrap_or_else(|error| {
        // The reader of the pipe ("head", say) has closed the pipe: no failure.
        if error.is_closed_output() {
            return ExitCode::SUCCESS;
        }
        error.show();
        ExitCode::from(error.status())
    })
}

/// Begins the log of a command on standard error. `is_start`: the command starts a program, and has
/// no log unless a variable asks for a log: it gives no warnings, and the log's memory takes long.
fn begin_log(is_start: bool) {
    let log = tracing_subscriber::fmt().with_writer(std::io::stderr);
    // Without internal errors: the report of an unwritable line would go to the same place, by a
    // panic.
    let log = || log.with_ansi(output::colours_of_errors()).log_internal_errors(false);
    let mut filters = ["SMC_LOG", EnvFilter::DEFAULT_ENV].into_iter();
    match filters.find_map(|name| EnvFilter::try_from_env(name).ok()) {
        Some(filter) => log().with_env_filter(filter).init(),
        None if is_start => {}
        None => log().with_max_level(LevelFilter::WARN).init(),
    }
}

/// Ends the process where the command line is wrong, or help or a version was asked for.
pub(crate) fn end(wrong: &clap::Error) -> ! {
    let printed = wrong.print().and_then(|()| std::io::stdout().flush());
    match printed.map_err(CliError::Output) {
        Err(error) if !wrong.use_stderr() && !error.is_closed_output() => {
            error.show();
            std::process::exit(error.status().into())
        }
        _ => std::process::exit(wrong.exit_code()),
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;

    use super::*;

    #[test]
    fn the_command_line_is_well_formed() {
        Cli::command().debug_assert();
        StartCli::command().debug_assert();
    }

    #[test]
    fn a_program_without_options_is_run_as_if_its_line_had_been_parsed() {
        let settings = Settings::default();
        let none = std::iter::empty::<OsString>;
        for line in [
            &["true"][..],
            &["echo", "--peer", "a", "-h"],
            &["help", "--", "-x", ""],
            &["./run", "run", "--strict"],
        ] {
            let line = ["smc", "run"].iter().chain(line);
            let matches = StartCli::command().try_get_matches_from(line.clone()).unwrap();
            let parsed = StartCli::from_arg_matches(&matches).unwrap().command;
            let line = line.map(OsString::from);
            let program = program_without_options(line, none(), Some(&settings)).unwrap();
            let known = StartCommand::Run(Box::new(run::RunArgs::by_default(program)));
            assert_eq!(format!("{known:?}"), format!("{parsed:?}"));
        }
        let changed = Settings { spin_us: Some(7), ..Settings::default() };
        for (line, settings) in [
            (&["run", "true"][..], None),
            (&["run", "true"], Some(&changed)),
            (&["run", "--strict", "true"], Some(&settings)),
            (&["run", "-h"], Some(&settings)),
            (&["run", ""], Some(&settings)),
            (&["run"], Some(&settings)),
            (&["stat", "true"], Some(&settings)),
            (&[], Some(&settings)),
        ] {
            let words = ["smc"].iter().chain(line).map(OsString::from);
            assert_eq!(program_without_options(words, none(), settings), None, "{line:?}");
        }
        let command = StartCli::command();
        let run = command.find_subcommand("run").unwrap();
        for variable in run.get_arguments().filter_map(clap::Arg::get_env) {
            let line = ["smc", "run", "true"].map(OsString::from).into_iter();
            let variables = [OsStr::new("HOME"), variable].map(OsStr::to_owned).into_iter();
            let found = program_without_options(line, variables, Some(&settings));
            assert_eq!(found, None, "{variable:?}");
        }
    }

    /// fish could not read its script: such a mark would end the string of the values.
    #[test]
    fn no_help_of_a_value_has_a_quotation_mark() {
        fn check(command: &clap::Command) {
            for arg in command.get_arguments() {
                for value in arg.get_possible_values() {
                    let help = value.get_help().map(ToString::to_string).unwrap_or_default();
                    assert!(!help.contains('"'), "{}: {help}", command.get_name());
                }
            }
            command.get_subcommands().for_each(check);
        }
        check(&Cli::command());
    }
}
