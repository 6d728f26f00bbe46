//! Chores of this repository that are more than one cargo command.
//!
//! - [`vm`]: `cargo xtask vm`, everything that needs virtual machines.
//! - [`parts`]: what a virtual machine is made of, built once and kept.
//! - [`image`]: the guests' initramfs; [`cpio`] is its format.
//! - [`tool`]: other programs, and why they fail.
#![forbid(unsafe_code)]

mod cpio;
mod image;
mod parts;
mod programs;
mod tool;
mod vm;

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
}

fn main() -> ExitCode {
    let Chore::Vm(args) = Cli::parse().chore;
    match vm::run(&args) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("xtask: {error}");
            ExitCode::FAILURE
        }
    }
}
