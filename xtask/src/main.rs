// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Tasks of this repository beyond one cargo command.
//!
//! - [`vm`]: `cargo xtask vm`, everything with virtual machines.
//! - [`nested`]: `cargo xtask vm --nested`, the core of the tests under KVM inside an emulated guest.
//! - [`artifacts`]: parts of the virtual machines; [`cache`] keeps them.
//! - [`packages`]: the needed Debian packages; [`programs`] names the programs of guests.
//! - [`package`]: `cargo xtask package`, packages of the programs; [`third_party`] lists licences.
//! - [`release`]: `cargo xtask release`, all files of a release, with their checksums and a signature.
//! - [`image`]: the guests' initramfs; [`cpio`] is its format.
//! - [`tool`]: runs other programs, and reports the reasons of failures.
//! - [`uml`]: `cargo xtask uml`, the kernel's driver under user-mode Linux.
//! - [`cross`]: `cargo xtask cross`, tests of another machine under emulation.
//! - [`machine`]: the compiler and the emulator of another machine.
//! - [`soak`]: `cargo xtask soak`, a long attack on a daemon, and simulated link groups.
//! - [`site`]: `cargo xtask site`, the documents as a site; [`dependencies`]: `cargo xtask
//!   dependencies`, rules for crates. Both use programs of [`wheel`].
//! - [`protocol_map`]: `cargo xtask protocol-map`, the places of each rule.
#![forbid(unsafe_code)]

mod artifacts;
mod cache;
mod cpio;
mod cross;
mod dependencies;
mod guest_tests;
mod image;
mod library_page;
mod machine;
mod nested;
mod package;
mod packages;
mod pages;
mod programs;
mod protocol_map;
mod release;
mod site;
mod soak;
mod third_party;
mod tool;
mod uml;
mod vm;
mod wheel;

use std::io::Write as _;
use std::path::Path;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

#[derive(Debug, Parser)]
#[command(name = "cargo xtask", about = "Tasks of this repository")]
struct Cli {
    #[command(subcommand)]
    task: Task,
}

#[derive(Debug, Subcommand)]
enum Task {
    /// Run the tests that need virtual machines, after building what they need.
    #[command(long_about = vm::LONG_ABOUT, after_long_help = vm::AFTER)]
    Vm(vm::Args),
    /// Run the tests of the kernel's driver under user-mode Linux, after building what they need.
    #[command(long_about = uml::LONG_ABOUT)]
    Uml(uml::Args),
    /// Run tests of another machine under emulation.
    #[command(long_about = cross::LONG_ABOUT)]
    Cross(cross::Args),
    /// Attack a daemon for a long time, and simulate link groups.
    #[command(long_about = soak::LONG_ABOUT)]
    Soak(soak::Args),
    /// Build Debian packages and a tarball.
    #[command(long_about = package::LONG_ABOUT)]
    Package(package::Args),
    /// Build all files of a release, with checksums and a signature.
    #[command(long_about = release::LONG_ABOUT)]
    Release(release::Args),
    /// Build the documents as a site, and look at its links.
    #[command(long_about = site::LONG_ABOUT)]
    Site,
    /// Look at the crates that are used: licences, sources, advisories.
    #[command(long_about = dependencies::LONG_ABOUT)]
    Dependencies,
    /// Print the places of each rule of the specifications, and the tests of the rule.
    ProtocolMap,
}

fn main() -> ExitCode {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let done = match Cli::parse().task {
        Task::Vm(args) => vm::run(&args).map_err(|error| error.to_string()),
        Task::Uml(args) => uml::run(&args, &root).map_err(|error| error.to_string()),
        Task::Cross(args) => cross::run(&args, &root).map_err(|error| error.to_string()),
        Task::Soak(args) => soak::run(&args, &root).map_err(|error| error.to_string()),
        Task::Package(args) => package::run(&args, &root).map_err(|error| error.to_string()),
        Task::Release(args) => release::run(&args, &root).map_err(|error| error.to_string()),
        Task::Site => site::run(&root).map_err(|error| error.to_string()),
        Task::Dependencies => dependencies::run(&root).map_err(|error| error.to_string()),
        Task::ProtocolMap => protocol_map::generate(&root)
            .map(|map| {
                // The reader may have read enough.
                let _ = std::io::stdout().write_all(map.as_bytes());
                ExitCode::SUCCESS
            })
            .map_err(|error| error.to_string()),
    };
    done.unwrap_or_else(|error| {
        eprintln!("xtask: {error}");
        ExitCode::FAILURE
    })
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn sentences_of_the_help_are_broken_by_the_terminal_only() {
        for task in Cli::command().get_subcommands() {
            let text = task.get_long_about().map(ToString::to_string).unwrap_or_default();
            assert!(!text.replace("\n\n", "").contains('\n'), "{}: {text}", task.get_name());
        }
    }
}
