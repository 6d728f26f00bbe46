//! Chores of this repository that are more than one cargo command.
//!
//! - [`vm`]: `cargo xtask vm`, everything that needs virtual machines.
//! - [`parts`]: what a virtual machine is made of, built once and kept.
//! - [`image`]: the guests' initramfs; [`cpio`] is its format.
//! - [`tool`]: other programs, and why they fail.
//! - [`protocol_map`]: `cargo xtask protocol-map`, which rule is where.
#![forbid(unsafe_code)]

mod cpio;
mod image;
mod parts;
mod programs;
mod protocol_map;
mod tool;
mod vm;

use std::path::Path;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

#[derive(Debug, Parser)]
#[command(name = "cargo xtask", about = "Chores of this repository")]
struct Cli {
    #[command(subcommand)]
    chore: Chore,
}

#[derive(Debug, Subcommand)]
enum Chore {
    /// Run the tests that need virtual machines, after building what they need.
    #[command(long_about = vm::LONG_ABOUT, after_long_help = vm::AFTER)]
    Vm(vm::Args),
    /// Write docs/protocol-map.md: which rule of the specifications is where, and what tests it.
    ProtocolMap,
}

fn main() -> ExitCode {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let done = match Cli::parse().chore {
        Chore::Vm(args) => vm::run(&args).map_err(|error| error.to_string()),
        Chore::ProtocolMap => protocol_map::write(&root)
            .map(|()| ExitCode::SUCCESS)
            .map_err(|error| error.to_string()),
    };
    done.unwrap_or_else(|error| {
        eprintln!("xtask: {error}");
        ExitCode::FAILURE
    })
}
