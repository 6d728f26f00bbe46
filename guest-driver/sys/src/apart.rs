// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A process beside this one that is none of its children.

use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, AsRawFd};
use std::panic::{AssertUnwindSafe, catch_unwind};

use libc::{c_int, c_uint};

/// Calls `work` in a new process, which has a copy of this one's memory and ends when `work` returns.
/// This process makes it through a child that ends at once, and waits for that child only. So whatever
/// this process becomes by exec has no child that it does not know.
///
/// The new process has a process group of its own, for signals of the terminal. Of this process's
/// descriptors it has `kept` and standard error, and `/dev/null` for standard input and output.
///
/// # Errors
/// `InvalidInput`: `kept` is a standard descriptor. `Unsupported`: this process has other threads,
/// whose locks a copy of the memory would find held. Others: there can be no more processes.
pub fn run_apart(kept: impl AsFd, work: impl FnOnce()) -> io::Result<()> {
    if std::fs::read_dir("/proc/self/task")?.count() != 1 {
        return Err(ErrorKind::Unsupported.into());
    }
    let kept = kept.as_fd().as_raw_fd();
    if kept <= libc::STDERR_FILENO {
        return Err(ErrorKind::InvalidInput.into());
    }
    match fork()? {
        0 => match fork() {
            Ok(0) => {
                leave_all_but(kept);
                // What a panic says goes to standard error. It must not go on in this copy.
                let _ = catch_unwind(AssertUnwindSafe(work));
                end(0)
            }
            made => end(c_int::from(made.is_err())),
        },
        child => match wait_for(child)? {
            0 => Ok(()),
            _ => Err(ErrorKind::WouldBlock.into()),
        },
    }
}

fn fork() -> io::Result<libc::pid_t> {
    // SAFETY: the process has one thread, so the child finds its memory as any thread would.
    match unsafe { libc::fork() } {
        -1 => Err(io::Error::last_os_error()),
        child => Ok(child),
    }
}

/// Ends this process, and leaves to the process that it is a copy of what happens at an exit.
fn end(status: c_int) -> ! {
    // SAFETY: a number.
    unsafe { libc::_exit(status) }
}

/// The exit status of a child.
fn wait_for(child: libc::pid_t) -> io::Result<c_int> {
    let mut status = 0;
    loop {
        // SAFETY: the status is valid until the call returns.
        if unsafe { libc::waitpid(child, &raw mut status, 0) } == child {
            return Ok(if libc::WIFEXITED(status) { libc::WEXITSTATUS(status) } else { -1 });
        }
        let error = io::Error::last_os_error();
        match error.raw_os_error() {
            Some(libc::EINTR) => {}
            // SIGCHLD is ignored, so the kernel keeps no status.
            Some(libc::ECHILD) => return Ok(0),
            _ => return Err(error),
        }
    }
}

/// Closes the descriptors of this process but standard error and `kept`. The values that own them are
/// never dropped here.
fn leave_all_but(kept: c_int) {
    let close = |first: c_int, last: c_uint| {
        if c_uint::try_from(first).is_ok_and(|first| first <= last) {
            // SAFETY: numbers only; nothing in this process uses the descriptors any more.
            unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) };
        }
    };
    // SAFETY: numbers, and a path that ends with a zero byte.
    unsafe {
        libc::setpgid(0, 0);
        let null = libc::open(c"/dev/null".as_ptr(), libc::O_RDWR);
        for standard in 0..=1 {
            libc::dup2(null, standard);
        }
    }
    close(3, c_uint::try_from(kept - 1).unwrap_or(0));
    close(kept.max(2) + 1, c_uint::MAX);
}
