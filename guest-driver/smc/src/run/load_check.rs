// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Whether the program has loaded the library: the dynamic linker may ignore it without a message.
//!
//! The program inherits the writing end of a pipe, into which the library writes when it begins. A
//! watcher process has the reading end. It is no child of this process, so that the program, which
//! replaces this process by exec, has no child that it does not know.

use std::io::PipeReader;
use std::os::fd::AsRawFd;
use std::process::Command;
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{FdFlags, fcntl_setfd};
use rustix::process::{Pid, Signal};

use crate::error::CliError;

/// How long a program may take until its libraries are loaded.
const TIMEOUT: std::time::Duration = std::time::Duration::from_secs(10);

/// Starts a watcher, and gives the program the pipe to it. `strict`: the watcher ends the program if
/// the library was not loaded.
///
/// # Errors
/// No descriptors or processes are left.
pub(super) fn request(command: &mut Command, name: &str, strict: bool) -> Result<(), CliError> {
    let failed = CliError::io("cannot watch the program's start".to_owned());
    let (reader, writer) = match std::io::pipe() {
        Ok(pipe) => pipe,
        Err(error) => return Err(failed(error)),
    };
    let program = rustix::process::getpid();
    let watched = ism_sys::run_apart(&reader, || watch(&reader, program, name, strict));
    if let Err(error) = watched {
        return Err(failed(error));
    }
    // Kept open across exec; the library closes it.
    if let Err(error) = fcntl_setfd(&writer, FdFlags::empty()) {
        return Err(failed(error.into()));
    }
    command.env("SMC_RUN_PROOF", writer.as_raw_fd().to_string());
    std::mem::forget(writer);
    Ok(())
}

/// What the watcher process does.
fn watch(reader: &PipeReader, program: Pid, name: &str, strict: bool) {
    if is_loaded(reader) {
        return;
    }
    let name = crate::output::printable(name);
    let ends = if strict { ", so it is ended (--strict)" } else { "" };
    crate::output::note(&format!(
        "smc run: {name} did not load the library: its connections are TCP{ends}"
    ));
    if strict {
        let _ = rustix::process::kill_process(program, Signal::TERM);
    }
}

/// Whether the library has written its word in time.
fn is_loaded(reader: &PipeReader) -> bool {
    let until = Instant::now() + TIMEOUT;
    let mut word = [0u8; 6];
    let mut got = 0;
    while let Some(room) = word.get_mut(got..).filter(|room| !room.is_empty()) {
        let left = until.saturating_duration_since(Instant::now());
        let limit = Timespec::try_from(left).unwrap_or_default();
        match poll(&mut [PollFd::new(reader, PollFlags::IN)], Some(&limit)) {
            Err(rustix::io::Errno::INTR) => continue,
            Ok(1) => {}
            _ => return false,
        }
        match rustix::io::read(reader, room) {
            Ok(0) | Err(_) => return false,
            Ok(n) => got += n,
        }
    }
    true
}
