// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A watcher: a process to watch the start of another program, and no child of any process here.
//!
//! The watcher is made in the way of posix_spawn(3), with the memory of this process and no copy: a copy
//! would take longer than all other work of "smc run". So the watcher makes system calls only, and uses no
//! memory changed by this process: no memory of libc, not even `errno`, and a stack of its own. After the
//! exec of this process, the memory is the watcher's alone.

use std::ffi::{c_int, c_void};
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::time::Duration;

use libc::pollfd;
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};

use super::interrupt::call;
use super::timespec;

/// Expected start-up message, time limit, and action on time-out.
#[derive(Debug)]
pub struct ProgramWatch {
    /// Number of bytes written by the program after a good start.
    pub bytes: usize,
    /// Time limit for these bytes.
    pub within: Duration,
    /// Text for standard error after the time limit.
    pub says: Box<[u8]>,
    /// The process to get SIGTERM after the time limit.
    pub ends: Option<rustix::process::Pid>,
}

/// Data of a watcher, in the memory of its maker.
struct Watcher {
    watch: ProgramWatch,
    /// The reading end.
    pipe: c_int,
    stack: *mut c_void,
}

/// Size of a stack: the watcher, and the process between it and its maker.
const STACK: usize = 32 << 10;

/// Starts a process to read from `pipe` the start-up message of a program. This process makes the watcher
/// through a child with an immediate end, and waits for the child only. So after exec this process has no
/// unknown child.
///
/// The watcher has a process group of its own, for signals of the terminal. Of this process's descriptors
/// the watcher has `pipe` and standard error, and `/dev/null` for standard input and output.
///
/// # Errors
/// `InvalidInput`: `pipe` is a standard descriptor. Others: there can be no more processes.
pub fn watch_program(pipe: impl AsFd, watch: ProgramWatch) -> io::Result<()> {
    let pipe = pipe.as_fd().as_raw_fd();
    if pipe <= libc::STDERR_FILENO {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let (protection, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
    // SAFETY: new memory, never to be unmapped.
    let stacks = unsafe { mmap_anonymous(std::ptr::null_mut(), 2 * STACK, protection, flags)? };
    // SAFETY: the end of the first stack, which is within the mapping.
    let stack = unsafe { stacks.byte_add(STACK) };
    // The watcher uses the value for as long as the watcher lives.
    let watcher: *mut Watcher = Box::leak(Box::new(Watcher { watch, pipe, stack }));
    // SAFETY: the end of the second stack.
    let stack = unsafe { stacks.byte_add(2 * STACK) };
    let flags = libc::CLONE_VM | libc::CLONE_VFORK | libc::SIGCHLD;
    // SAFETY: the new process has a stack of its own, and this process waits for its end.
    match unsafe { libc::clone(make_watcher, stack, flags, watcher.cast()) } {
        -1 => Err(io::Error::last_os_error()),
        child => match wait_for(child)? {
            0 => Ok(()),
            _ => Err(io::ErrorKind::WouldBlock.into()),
        },
    }
}

/// Makes the watcher, and ends.
extern "C" fn make_watcher(watcher: *mut c_void) -> c_int {
    // SAFETY: the argument of `watch_program`.
    let stack = unsafe { (*watcher.cast::<Watcher>()).stack };
    let flags = libc::CLONE_VM | libc::SIGCHLD;
    // SAFETY: the stack is for the watcher alone. The maker sleeps, so errno is free.
    let made = unsafe { libc::clone(run_watcher, stack, flags, watcher) };
    c_int::from(made == -1)
}

/// The main function of the watcher.
extern "C" fn run_watcher(watcher: *mut c_void) -> c_int {
    // SAFETY: the argument of `make_watcher`, never written to.
    let Watcher { watch, pipe, .. } = unsafe { &*watcher.cast::<Watcher>() };
    leave_all_but(*pipe);
    if !has_begun(*pipe, watch) {
        let (at, len) = (watch.says.as_ptr() as usize, watch.says.len());
        // SAFETY: the text lives for as long as this process. A failed write is ignored.
        unsafe { call(libc::SYS_write, &[libc::STDERR_FILENO as usize, at, len, 0, 0, 0]) };
        if let Some(program) = watch.ends {
            let program = program.as_raw_nonzero().get() as usize;
            // SAFETY: numbers.
            unsafe { call(libc::SYS_kill, &[program, libc::SIGTERM as usize, 0, 0, 0, 0]) };
        }
    }
    0
}

/// Whether the program writes all bytes in time.
fn has_begun(pipe: c_int, watch: &ProgramWatch) -> bool {
    // The kernel stores the remaining time here.
    let mut left = timespec(watch.within);
    let mut got = 0;
    while got < watch.bytes {
        let mut readable = pollfd { fd: pipe, events: libc::POLLIN, revents: 0 };
        let (at, limit) = (&raw mut readable as usize, &raw mut left as usize);
        // SAFETY: both are valid until the call returns.
        match unsafe { call(libc::SYS_ppoll, &[at, 1, limit, 0, 0, 0]) } {
            1 => {}
            interrupted if interrupted == -(libc::EINTR as isize) => continue,
            _ => return false,
        }
        let mut room = [0u8; 64];
        let most = room.len().min(watch.bytes - got);
        // SAFETY: the kernel writes at most `most` bytes.
        let n = unsafe {
            call(libc::SYS_read, &[pipe as usize, room.as_mut_ptr() as usize, most, 0, 0, 0])
        };
        match usize::try_from(n) {
            Ok(0) | Err(_) => return false,
            Ok(n) => got += n,
        }
    }
    true
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

/// Closes the descriptors of the watcher except standard error and `kept`. The watcher's table is a copy.
fn leave_all_but(kept: c_int) {
    let kept = kept as usize;
    let null = (libc::AT_FDCWD as usize, c"/dev/null".as_ptr() as usize, libc::O_RDWR as usize);
    // SAFETY: numbers, and a path that ends with a zero byte.
    unsafe {
        call(libc::SYS_setpgid, &[0; 6]);
        let opened = call(libc::SYS_openat, &[null.0, null.1, null.2, 0, 0, 0]);
        for standard in 0..=1 {
            call(libc::SYS_dup3, &[opened as usize, standard, 0, 0, 0, 0]);
        }
        call(libc::SYS_close_range, &[3, kept - 1, 0, 0, 0, 0]);
        call(libc::SYS_close_range, &[kept + 1, c_int::MAX as usize, 0, 0, 0, 0]);
    }
}
