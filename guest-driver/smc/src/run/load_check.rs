// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Checks that the program has loaded the library: the dynamic linker may ignore the library
//! without a message.
//!
//! The program inherits the writing end of a pipe, and the library writes into the pipe at start. A
//! watcher process has the reading end. The watcher is no child of this process: exec replaces this
//! process by the program, and the program must not get an unknown child.

use std::io::{PipeWriter, Write};
use std::os::fd::AsRawFd;
use std::process::Command;
use std::time::Duration;

use ism_sys::{ProgramWatch, WatcherTask};
use rustix::io::{FdFlags, fcntl_setfd};

use crate::error::CliError;

/// The bytes written by the library. The watcher counts the bytes.
const WORD: &[u8] = b"loaded";

/// How long a program may take until its libraries are loaded.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Starts a watcher, and passes the pipe to the program. `strict`: the watcher ends the program if
/// the library was not loaded. `task`: the watcher's task after the start. [`WatchedProgram::withdraw`] silences the watcher.
///
/// # Errors
/// No descriptors or processes are left.
pub(super) fn request(
    command: &mut Command,
    name: &str,
    strict: bool,
    task: Option<WatcherTask>,
) -> Result<WatchedProgram, CliError> {
    let failed = CliError::io("cannot watch the program's start".to_owned());
    let (reader, writer) = match std::io::pipe() {
        Ok(pipe) => pipe,
        Err(error) => return Err(failed(error)),
    };
    let name = crate::output::printable(name);
    let ends = if strict { ", so it is ended (--strict)" } else { "" };
    let says = format!("smc run: {name} did not load the library: its connections are TCP{ends}\n");
    let watch = ProgramWatch {
        bytes: WORD.len(),
        within: TIMEOUT,
        says: says.into_bytes().into(),
        ends: strict.then(rustix::process::getpid),
        task,
    };
    if let Err(error) = ism_sys::watch_program(&reader, watch) {
        return Err(failed(error));
    }
    // Kept open across exec; the library closes the pipe.
    if let Err(error) = fcntl_setfd(&writer, FdFlags::empty()) {
        return Err(failed(error.into()));
    }
    command.env("SMC_RUN_PROOF", writer.as_raw_fd().to_string());
    Ok(WatchedProgram(writer))
}

/// A program about to begin: the inherited pipe to its watcher.
#[derive(Debug)]
pub(super) struct WatchedProgram(PipeWriter);

impl WatchedProgram {
    /// Silences the watcher: the program could not be started, and the caller reports the error.
    pub(super) fn withdraw(mut self) {
        // Otherwise there is a line too many.
        let _ = self.0.write_all(WORD);
    }
}
