// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A watcher: a process to watch the start of another program, and no child of any process here.
//!
//! The watcher is made in the way of posix_spawn(3), with the memory of this process and no copy: a copy
//! would take longer than all other work of "smc run". So the watcher makes system calls only, and uses no
//! memory changed by this process: no memory of libc, not even `errno`, and a stack of its own. After the
//! exec of this process, the memory is the watcher's alone, and the watcher can do a task of any kind.

use std::ffi::{c_int, c_void};
use std::fmt;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
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
    /// The task of the watcher after a good start.
    pub task: Option<WatcherTask>,
}

/// A task to be done when a program asks for the task, and not at all if none does.
pub struct WatcherTask {
    /// A socket. The programs have the other end, this process does not keep any, and a byte asks for the
    /// task. The end of all programs, or of this process instead of exec, ends the watcher.
    pub asked: OwnedFd,
    /// The task, with the socket. This process has ended by exec before.
    pub run: Box<dyn Fn(BorrowedFd<'_>)>,
}

impl fmt::Debug for WatcherTask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WatcherTask").field("asked", &self.asked).finish_non_exhaustive()
    }
}

/// Data of a watcher, in the memory of its maker.
struct Watcher {
    watch: ProgramWatch,
    /// The reading end.
    pipe: c_int,
    stack: *mut c_void,
}

/// Size of a stack: the watcher, and the process between it and its maker. Untouched pages cost nothing.
const STACK: usize = 512 << 10;

/// Starts a process to read from `pipe` the start-up message of a program. This process makes the watcher
/// through a child with an immediate end, and waits for the child only. So after exec this process has no
/// unknown child.
///
/// The watcher has a process group of its own, for signals of the terminal. Of this process's descriptors
/// the watcher has `pipe`, the socket of its task, and standard error until the start is over; and
/// `/dev/null` for standard input and output. The caller ends by exec or by exit.
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
    let asked = watch.task.as_ref().map(|task| task.asked.as_raw_fd());
    leave_all_but([*pipe, asked.unwrap_or(*pipe)]);
    if !has_begun(*pipe, watch) {
        let (at, len) = (watch.says.as_ptr() as usize, watch.says.len());
        // SAFETY: the text lives for as long as this process. A failed write is ignored.
        unsafe { call(libc::SYS_write, &[libc::STDERR_FILENO as usize, at, len, 0, 0, 0]) };
        if let Some(program) = watch.ends {
            let program = program.as_raw_nonzero().get() as usize;
            // SAFETY: numbers.
            unsafe { call(libc::SYS_kill, &[program, libc::SIGTERM as usize, 0, 0, 0, 0]) };
        }
    } else if let Some(task) = &watch.task
        && is_asked(task.asked.as_raw_fd(), *pipe)
    {
        // Only a program has the other end, or had the other end at the time of the byte. So the maker has
        // ended, and the memory is this process's.
        (task.run)(task.asked.as_fd());
    }
    0
}

/// Waits for a byte of a program. `false`: all programs have ended.
fn is_asked(asked: c_int, pipe: c_int) -> bool {
    let mut byte = 0u8;
    // SAFETY: numbers, a path that ends with a zero byte, and room for the byte.
    unsafe {
        // The program's directory and output are not to be held.
        call(libc::SYS_dup3, &[0, libc::STDERR_FILENO as usize, 0, 0, 0, 0]);
        call(libc::SYS_close, &[pipe as usize, 0, 0, 0, 0, 0]);
        call(libc::SYS_chdir, &[c"/".as_ptr() as usize, 0, 0, 0, 0, 0]);
        let at = &raw mut byte as usize;
        loop {
            match call(libc::SYS_read, &[asked as usize, at, 1, 0, 0, 0]) {
                interrupted if interrupted == -(libc::EINTR as isize) => {}
                read => return read == 1,
            }
        }
    }
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
fn leave_all_but(kept: [c_int; 2]) {
    let [first, second] = [kept[0].min(kept[1]) as usize, kept[0].max(kept[1]) as usize];
    let null = (libc::AT_FDCWD as usize, c"/dev/null".as_ptr() as usize, libc::O_RDWR as usize);
    // SAFETY: numbers, and a path that ends with a zero byte.
    unsafe {
        call(libc::SYS_setpgid, &[0; 6]);
        let opened = call(libc::SYS_openat, &[null.0, null.1, null.2, 0, 0, 0]);
        for standard in 0..=1 {
            call(libc::SYS_dup3, &[opened as usize, standard, 0, 0, 0, 0]);
        }
        // The kernel refuses empty ranges.
        for (from, to) in
            [(3, first - 1), (first + 1, second.max(1) - 1), (second + 1, c_int::MAX as usize)]
        {
            call(libc::SYS_close_range, &[from, to, 0, 0, 0, 0]);
        }
    }
}
