// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A program that ends with the process that started it.

use std::ffi::OsString;
use std::io;
use std::os::unix::process::CommandExt;
use std::process::Command;

use rustix::process::{Signal, getppid, set_parent_process_death_signal};

/// Becomes the program `args` (its name first). It is killed when the thread that started this
/// process ends, whatever it ends of.
///
/// # Errors
/// Why that cannot be; on success it does not come back.
pub fn run(args: &[OsString]) -> io::Result<()> {
    let parent = getppid();
    set_parent_process_death_signal(Some(Signal::KILL))?;
    // The parent may have ended before the request was made.
    if getppid() != parent {
        return Err(io::Error::other("the parent has ended"));
    }
    let (program, args) = args.split_first().ok_or_else(|| io::Error::other("no program"))?;
    Err(Command::new(program).args(args).exec())
}
