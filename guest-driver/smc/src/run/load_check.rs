// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Whether the program has loaded the library: the dynamic linker may ignore it without a message.
//!
//! The program inherits the writing end of a pipe, into which the library writes when it begins. The
//! reading end belongs to a watcher process. Its parent ends at once, so that the program, which
//! replaces this process by exec, has no child that it does not know.

use std::io::Read;
use std::os::fd::AsRawFd;
use std::process::{Command, ExitCode, Stdio};
use std::sync::mpsc::channel;
use std::time::Duration;

use rustix::io::{FdFlags, fcntl_setfd};
use rustix::process::{Pid, Signal};
use serde::{Deserialize, Serialize};

use crate::error::CliError;

/// How long a program may take until its libraries are loaded.
const TIMEOUT: Duration = Duration::from_secs(10);

/// The task of a watcher.
#[derive(Debug, Serialize, Deserialize)]
struct Task {
    /// For messages.
    name: String,
    pid: i32,
    /// End the program if the library was not loaded.
    strict: bool,
    /// The parent of this process has ended, as it should.
    detached: bool,
}

/// Starts a watcher, and gives the program the pipe to it.
///
/// # Errors
/// No descriptors or processes are left.
pub(super) fn request(command: &mut Command, name: &str, strict: bool) -> Result<(), CliError> {
    let failed = CliError::io("cannot watch the program's start".to_owned());
    let (reader, writer) = match std::io::pipe() {
        Ok(pipe) => pipe,
        Err(error) => return Err(failed(error)),
    };
    let pid = rustix::process::getpid().as_raw_nonzero().get();
    let task = Task { name: name.into(), pid, strict, detached: false };
    let started = start(&task, Stdio::from(reader)).and_then(|mut first| first.wait());
    if let Err(error) = started {
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

fn start(task: &Task, stdin: Stdio) -> std::io::Result<std::process::Child> {
    use std::os::unix::process::CommandExt;
    let task = serde_json::to_string(task).unwrap_or_default();
    Command::new("/proc/self/exe")
        .arg0("smc")
        .args(["__load_check", &task])
        .stdin(stdin)
        .stdout(Stdio::null())
        .process_group(0)
        .spawn()
}

/// Runs the watcher process.
pub(crate) fn check(task: &str) -> ExitCode {
    let Ok(task) = serde_json::from_str::<Task>(task) else { return ExitCode::FAILURE };
    if !task.detached {
        let started = start(&Task { detached: true, ..task }, Stdio::inherit());
        return if started.is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE };
    }
    let (sender, receiver) = channel();
    std::thread::spawn(move || {
        let mut word = [0u8; 6];
        let _ = sender.send(std::io::stdin().read_exact(&mut word).is_ok());
    });
    if receiver.recv_timeout(TIMEOUT) != Ok(true) {
        let ends = if task.strict { ", so it is ended (--strict)" } else { "" };
        eprintln!("smc run: {} did not load the library: its connections are TCP{ends}", task.name);
        if task.strict
            && let Some(pid) = Pid::from_raw(task.pid)
        {
            let _ = rustix::process::kill_process(pid, Signal::TERM);
        }
    }
    ExitCode::SUCCESS
}
