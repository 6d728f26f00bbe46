// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A program ending with its parent process.

use std::ffi::OsString;
use std::io;
use std::os::unix::process::CommandExt;
use std::process::Command;

use rustix::process::{Signal, getppid, set_parent_process_death_signal};

/// Becomes the program `args` (its name first). The kernel kills the program when the parent thread ends,
/// for whatever reason.
///
/// # Errors
/// The reason of a failure; on success the call does not return.
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
