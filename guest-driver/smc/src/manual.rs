//! Manual pages and shell completions, made from the command line itself.

use std::io;
use std::path::{Path, PathBuf};

use clap::{Args, Command};
use clap_complete::Shell;

use crate::error::CliError;
use crate::output;

/// Options of `smc completions`.
#[derive(Args, Debug)]
pub(crate) struct CompletionsArgs {
    /// The shell.
    shell: Shell,
}

/// Options of `smc man`.
#[derive(Args, Debug)]
pub(crate) struct ManArgs {
    /// Write a page for each command into this directory, instead of printing that of smc.
    #[arg(value_name = "DIRECTORY")]
    directory: Option<PathBuf>,
}

/// Prints the completions.
///
/// # Errors
/// Standard output is gone.
pub(crate) fn completions(args: &CompletionsArgs, mut command: Command) -> Result<(), CliError> {
    let mut text = Vec::new();
    clap_complete::generate(args.shell, &mut command, "smc", &mut text);
    output::print(&String::from_utf8_lossy(&text))
}

/// Prints a manual page, or writes all of them.
///
/// # Errors
/// The directory cannot be written, or standard output is gone.
pub(crate) fn man(args: &ManArgs, command: Command) -> Result<(), CliError> {
    match &args.directory {
        None => output::print(&String::from_utf8_lossy(&page(command).map_err(CliError::Output)?)),
        Some(directory) => write(directory, command)
            .map_err(CliError::io(format!("cannot write manual pages to {}", directory.display()))),
    }
}

fn page(command: Command) -> io::Result<Vec<u8>> {
    let mut text = Vec::new();
    clap_mangen::Man::new(command).render(&mut text)?;
    Ok(text)
}

fn write(directory: &Path, command: Command) -> io::Result<()> {
    std::fs::create_dir_all(directory)?;
    clap_mangen::generate_to(command.disable_help_subcommand(true), directory)
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
        let dir = std::env::temp_dir().join(format!("smc-man-{}", std::process::id()));
        write(&dir, command()).unwrap();
        let mut names: Vec<_> = std::fs::read_dir(&dir)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        assert_eq!(names, ["smc-stat.1", "smc.1"]);
        let page = std::fs::read_to_string(dir.join("smc-stat.1")).unwrap();
        std::fs::remove_dir_all(&dir).unwrap();
        assert!(page.contains("Show what a daemon counts"), "{page}");
    }
}
