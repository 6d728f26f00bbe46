// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Manual pages and shell completions, made from the command line itself.

mod completions;
mod page;

use std::io;
use std::path::{Path, PathBuf};

use clap::{Args, Command, CommandFactory};
use clap_complete::Shell;

use crate::error::CliError;
use crate::{output, smc_tools};

/// Options of `smc completions`.
#[derive(Args, Debug)]
pub(crate) struct CompletionsArgs {
    /// The shell.
    shell: Shell,

    /// The program that is completed.
    #[arg(value_enum, default_value_t)]
    program: Program,
}

/// Programs of the project that have a command line.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
enum Program {
    #[default]
    Smc,
    VhostDeviceIsm,
    Smcss,
    Smcd,
    Smcr,
}

impl Program {
    /// The command line of the program. `smc`: the command line of this program.
    fn command(self, smc: Command) -> Command {
        let [smcss, smcd, smcr] = smc_tools::commands();
        match self {
            Program::Smc => smc,
            Program::VhostDeviceIsm => daemon(),
            Program::Smcss => smcss,
            Program::Smcd => smcd,
            Program::Smcr => smcr,
        }
    }
}

/// Options of `smc man`.
#[derive(Args, Debug)]
pub(crate) struct ManArgs {
    /// Write a page for each command, and those of vhost-device-ism, smcss, smcd, smcr and of files,
    /// into this directory, instead of printing that of smc.
    #[arg(value_name = "DIRECTORY")]
    directory: Option<PathBuf>,
}

/// Prints the completions.
///
/// # Errors
/// Standard output is gone.
pub(crate) fn completions(args: &CompletionsArgs, command: Command) -> Result<(), CliError> {
    output::print(&completions::script(args.shell, &args.program.command(command)))
}

/// Prints a manual page, or writes the pages of every command.
///
/// # Errors
/// The directory cannot be written, or standard output is gone.
pub(crate) fn man(args: &ManArgs, command: Command) -> Result<(), CliError> {
    match &args.directory {
        None => output::print(&page::page(command, "1", None).map_err(CliError::Output)?),
        Some(directory) => write(directory, command)
            .and_then(|()| std::fs::write(directory.join("vhost-device-ism.8"), daemon_page()?))
            .and_then(|()| smc_tools_pages(directory))
            .and_then(|()| other_pages(directory))
            .map_err(CliError::io(format!("cannot write manual pages to {}", directory.display()))),
    }
}

/// Writes the page of a command, and the pages of its subcommands.
fn write(directory: &Path, command: Command) -> io::Result<()> {
    std::fs::create_dir_all(directory)?;
    let mut command = command.disable_help_subcommand(true);
    command.build();
    write_each(directory, &command)
}

fn write_each(directory: &Path, command: &Command) -> io::Result<()> {
    let name = command.get_display_name().unwrap_or(command.get_name());
    let path = directory.join(format!("{name}.1"));
    std::fs::write(path, page::page(command.clone(), "1", None)?)?;
    let mut shown = command.get_subcommands().filter(|sub| !sub.is_hide_set());
    shown.try_for_each(|sub| write_each(directory, sub))
}

/// The pages of the commands shared with smc-tools.
fn smc_tools_pages(directory: &Path) -> io::Result<()> {
    for command in smc_tools::commands() {
        let path = directory.join(format!("{}.8", command.get_name()));
        std::fs::write(path, page::page(command, "8", None)?)?;
    }
    Ok(())
}

/// Pages of files, and the overview.
const OTHERS: [(&str, &str); 3] = [
    ("smc.toml.5", include_str!("../../man/smc.toml.5")),
    ("smc-policy.5", include_str!("../../man/smc-policy.5")),
    ("smc.7", include_str!("../../man/smc.7")),
];

fn other_pages(directory: &Path) -> io::Result<()> {
    OTHERS.iter().try_for_each(|(name, text)| std::fs::write(directory.join(name), text))
}

/// The daemon's page besides its options.
const DAEMON: &str = r#".SH SIGNALS
SIGTERM and SIGINT end the daemon. Its sockets are removed, and front ends lose their devices.
SIGHUP reads the file of
.B \-\-config
again: guests are added and removed, and others notice nothing. If the file is wrong, nothing changes,
and the log says why. Without a file, SIGHUP ends the daemon.
.SH EXIT STATUS
.TP
0
The daemon ended by a signal, or printed what was asked for.
.TP
1
The configuration is wrong, or a socket cannot be made; or the daemon refuses what
.B ctl
asks for.
.TP
2
There is no such option.
.SH FILES
.TP
/etc/vhost\-device\-ism.toml
The configuration of the service.
.TP
/run/vhost\-device\-ism
The sockets of the service, for the group kvm.
.SH ENVIRONMENT
.TP
NOTIFY_SOCKET, WATCHDOG_USEC
The service manager, as
.BR sd_notify (3)
has it.
.TP
VHOST_DEVICE_ISM_MANAGEMENT
The management socket for
.BR ctl .
.TP
RUST_LOG
What to log, in detail.
.TP
NO_COLOR
The log has no colours on a terminal either.
.SH SEE ALSO
.BR smc (1),
.BR smc\-stat (1),
.BR smc\-cdi (1)
"#;

/// The command line of the daemon.
fn daemon() -> Command {
    vhost_device_ism::args::Args::command().name("vhost-device-ism")
}

/// The page of the daemon.
fn daemon_page() -> io::Result<String> {
    page::page(daemon(), "8", Some(DAEMON))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn command() -> Command {
        Command::new("smc")
            .subcommand(Command::new("stat").about("Show what a daemon counts"))
            .subcommand(Command::new("__inner").hide(true))
    }

    #[test]
    fn every_command_that_is_shown_has_a_page() {
        let dir = smc_test_support::TestDir::new();
        write(&dir, command()).unwrap();
        let mut names: Vec<_> = std::fs::read_dir(&dir)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        assert_eq!(names, ["smc-stat.1", "smc.1"]);
        let page = std::fs::read_to_string(dir.join("smc-stat.1")).unwrap();
        assert!(page.contains("Show what a daemon counts"), "{page}");
    }

    #[test]
    fn the_daemon_has_a_page_in_the_section_of_administrators() {
        let page = daemon_page().unwrap();
        for part in [".TH vhost-device-ism 8", "socket\\-path", ".SH SIGNALS", ".SH FILES"] {
            assert!(page.contains(part), "{part} is missing in {page}");
        }
    }
}
