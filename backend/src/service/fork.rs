// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The daemon's other processes, and namespaces of its own.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use rustix::process::{WaitOptions, WaitStatus, waitpid};
use rustix::thread::UnshareFlags;

/// Pause before replacing a process that ended soon after its start.
const PAUSE: Duration = Duration::from_secs(1);

/// Runs `child` in a new process ending with `child`. To be called while this process has one thread.
///
/// # Errors
/// There are more threads, or the kernel makes no process.
pub(crate) fn in_child(child: impl FnOnce()) -> io::Result<()> {
    if std::fs::read_dir("/proc/self/task")?.count() != 1 {
        return Err(io::Error::other("the process has several threads"));
    }
    // SAFETY: this process has one thread, so the child is a whole copy: no lock is held by a thread missing
    // in the child.
    match unsafe { libc::fork() } {
        -1 => Err(io::Error::last_os_error()),
        0 => {
            let _ = catch_unwind(AssertUnwindSafe(child));
            // SAFETY: ends this process, without the parent's exit handlers.
            unsafe { libc::_exit(0) }
        }
        _ => Ok(()),
    }
}

/// Runs `work` in a child process until `work` returns. If the child is killed or panics, this process calls
/// `lost` and makes another child. To be called in a process with one thread.
pub(crate) fn until_it_returns(work: impl Fn(), lost: impl Fn(&str)) {
    loop {
        let started = Instant::now();
        // SAFETY: by the caller's promise, this process has one thread; see `in_child`.
        match unsafe { libc::fork() } {
            -1 => lost(&format!("cannot be made: {}", io::Error::last_os_error())),
            0 => {
                let panicked = catch_unwind(AssertUnwindSafe(&work)).is_err();
                // SAFETY: ends this process, without the exit handlers of other processes.
                unsafe { libc::_exit(i32::from(panicked)) }
            }
            child => match status_of(child) {
                Ok(status) if status.exit_status() == Some(0) => return,
                Ok(status) => match status.terminating_signal() {
                    Some(signal) => lost(&format!("was killed by signal {signal}")),
                    None => lost("has panicked"),
                },
                Err(error) => {
                    tracing::error!(%error, "cannot wait for a process");
                    return;
                }
            },
        }
        // Not in a tight loop if the child ends at once each time.
        if started.elapsed() < PAUSE {
            std::thread::sleep(PAUSE);
        }
    }
}

/// Waits for the end of a child.
fn status_of(child: i32) -> io::Result<WaitStatus> {
    let pid = rustix::process::Pid::from_raw(child);
    let ended = rustix::io::retry_on_intr(|| waitpid(pid, WaitOptions::empty()))?;
    ended.map(|(_, status)| status).ok_or_else(|| io::Error::other("no such child"))
}

/// Leaves the host's network and its System V objects for empty namespaces, shared with threads started
/// later. Open sockets and sockets with a path go on working. `false`: missing permission, or the kernel has
/// no namespaces.
pub(crate) fn enter_empty_namespaces() -> bool {
    let flags = UnshareFlags::NEWNET | UnshareFlags::NEWIPC | UnshareFlags::NEWUTS;
    // SAFETY: CLONE_FILES is not among the flags, so all threads keep their descriptors in common.
    unsafe { rustix::thread::unshare_unsafe(flags) }.is_ok()
}

/// fcntl(2) with a number, for commands missing in the crates.
#[cfg(test)]
pub(crate) fn fcntl(
    fd: &impl std::os::fd::AsRawFd,
    command: i32,
    argument: i32,
) -> rustix::io::Result<()> {
    // SAFETY: the callers' commands take a number, and touch no memory.
    match unsafe { libc::fcntl(fd.as_raw_fd(), command, argument) } {
        -1 => Err(io::Error::last_os_error()
            .raw_os_error()
            .map_or(rustix::io::Errno::IO, rustix::io::Errno::from_raw_os_error)),
        _ => Ok(()),
    }
}
