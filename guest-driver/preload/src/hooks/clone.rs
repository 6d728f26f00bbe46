// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `clone`, whose child may be like a child of `fork`: libc then calls no handlers.

use std::ffi::{c_int, c_void};
use std::time::Duration;

use super::fork_and_exit;
use crate::config;
use crate::fork;
use crate::hooks::libc_symbols::call_libc;
use crate::selection::session;
use crate::sys::raw;
use crate::sys::user_memory::{errno, set_errno};

/// The function of a child.
type Body = unsafe extern "C" fn(*mut c_void) -> c_int;

/// Function and argument of a child.
struct Start {
    body: Body,
    argument: *mut c_void,
}

/// Whether a child has a copy of this process's memory and descriptors.
pub(super) fn is_fork(flags: u64) -> bool {
    flags & (libc::CLONE_VM | libc::CLONE_THREAD | libc::CLONE_FILES) as u64 == 0
}

/// Takes note of a child process with the memory or the descriptors of this process.
pub(super) fn note(flags: u64) {
    if flags & (libc::CLONE_VM | libc::CLONE_THREAD) as u64 == libc::CLONE_VM as u64 {
        fork::note_sharing_child();
    }
    if flags & (libc::CLONE_VM | libc::CLONE_FILES) as u64 == libc::CLONE_FILES as u64 {
        fork::note_sharing_descriptors();
    }
}

/// A fork without handlers called by libc. `make` makes the child and returns in both processes.
pub(super) fn fork_by<T>(make: impl FnOnce() -> T, is_child: impl FnOnce(&T) -> bool) -> T {
    // SAFETY: the handlers that libc would call around a fork.
    unsafe { fork_and_exit::before_fork() };
    let made = make();
    let error = errno();
    // SAFETY: as above.
    unsafe {
        match is_child(&made) {
            true => fork_and_exit::in_child(),
            false => fork_and_exit::in_parent(),
        }
    }
    set_errno(error);
    made
}

/// libc's fork without handlers (glibc 2.34).
#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn _Fork() -> c_int {
    let native = || call_libc!(_Fork, -1, () -> c_int);
    match config::get() {
        Some(_) => fork_by(native, |pid| *pid == 0),
        None => native(),
    }
}

/// Moves the program to the background. libc's function ends the parent by an internal `_exit`, so
/// this function repeats libc's steps.
#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn daemon(no_directory: c_int, no_close: c_int) -> c_int {
    if config::get().is_none() {
        return call_libc!(daemon, -1, (no_directory: c_int, no_close: c_int) -> c_int);
    }
    // SAFETY: paths are of this function; the child goes on with a copy of this stack.
    unsafe {
        match libc::fork() {
            -1 => return -1,
            0 => {}
            _ => libc::_exit(0),
        }
        if libc::setsid() < 0 {
            return -1;
        }
        if no_directory == 0 {
            libc::chdir(c"/".as_ptr());
        }
    }
    if no_close == 0 { standard_to_null() } else { 0 }
}

/// Opens `/dev/null` as the standard descriptors, as `daemon` does.
fn standard_to_null() -> c_int {
    /// The device 1:3.
    const NULL: u64 = 0x103;
    // SAFETY: the path and the room are of this function.
    unsafe {
        let null = libc::open(c"/dev/null".as_ptr(), libc::O_RDWR);
        if null < 0 {
            return -1;
        }
        let mut stat: libc::stat = std::mem::zeroed();
        let known = libc::fstat(null, &raw mut stat) == 0;
        if !known || stat.st_mode & libc::S_IFMT != libc::S_IFCHR || stat.st_rdev != NULL {
            let error = if known { libc::ENODEV } else { errno() };
            libc::close(null);
            set_errno(error);
            return -1;
        }
        for fd in 0..=2 {
            libc::dup2(null, fd);
        }
        if null > 2 {
            libc::close(null);
        }
    }
    0
}

/// Resources of a process with one thread are unshared already. The threads of the library go on
/// with the same table of descriptors.
const OF_ONE_THREAD: c_int =
    libc::CLONE_FILES | libc::CLONE_SIGHAND | libc::CLONE_THREAD | libc::CLONE_VM;

/// Number of counts of the threads, and the pause between two counts: a new thread of the library
/// has no name until the thread runs.
const LOOKS: usize = 10;
const PAUSE: Duration = Duration::from_millis(5);

/// Whether the program has one thread, and must not notice the library's threads.
fn has_one_thread() -> bool {
    let looks = || {
        let is_one = raw::threads_of_program() == 1;
        if !is_one {
            std::thread::sleep(PAUSE);
        }
        is_one
    };
    config::get().is_some()
        && !fork::shares_memory()
        && std::iter::repeat_with(looks).take(LOOKS).any(|is_one| is_one)
}

/// The children of the calling thread may be in another PID namespace from now on. The kernel then
/// lets the thread start no thread, and the library needs one for each child with connections in
/// use.
fn before_namespaces(kinds: c_int) {
    if kinds & libc::CLONE_NEWPID != 0 && kinds & FOR_ONE_THREAD == 0 && session::opened().is_some()
    {
        // Without such a thread the child finds the connections ended.
        let _ = raw::without_signals(ism_sys::start_threads_elsewhere);
    }
}

/// Unshares resources of the calling thread.
#[unsafe(no_mangle)]
pub(super) unsafe extern "C-unwind" fn unshare(flags: c_int) -> c_int {
    let spared = flags & OF_ONE_THREAD != 0 && has_one_thread();
    let flags = if spared { flags & !OF_ONE_THREAD } else { flags };
    before_namespaces(flags);
    let result = call_libc!(unshare, libc::SYS_unshare, (flags: c_int) -> c_int);
    let error = errno();
    if result == 0 || error != libc::EINVAL || flags & FOR_ONE_THREAD == 0 || !has_one_thread() {
        set_errno(error);
        return result;
    }
    // The library's threads may not be the only objection of the kernel: a copy of this process has none.
    // SAFETY: a number.
    let again = || unsafe { raw::call(libc::SYS_unshare, [flags as usize, 0, 0, 0, 0, 0]) };
    set_errno(raw::error_in_copy(again).map_or(error, |error| error.0));
    result
}

/// Namespaces to join or to make only by a process with one thread.
const FOR_ONE_THREAD: c_int = libc::CLONE_NEWUSER | CLONE_NEWTIME;
const CLONE_NEWTIME: c_int = 0x80;

/// The kinds of namespaces for a `setns`.
fn kinds_of(fd: c_int, kind: c_int) -> c_int {
    const NS_GET_NSTYPE: usize = 0xb703;
    // SAFETY: numbers only.
    let known = || unsafe { raw::call(libc::SYS_ioctl, [fd as usize, NS_GET_NSTYPE, 0, 0, 0, 0]) };
    if kind != 0 { kind } else { known().map_or(0, |kind| kind as c_int) }
}

/// Joins a namespace. For mount namespaces the kernel refuses a thread with a shared root and
/// working directory, as the program has with the library's threads. The library's threads keep
/// theirs.
#[unsafe(no_mangle)]
pub(super) unsafe extern "C-unwind" fn setns(fd: c_int, kind: c_int) -> c_int {
    let native = || call_libc!(setns, libc::SYS_setns, (fd: c_int, kind: c_int) -> c_int);
    before_namespaces(kinds_of(fd, kind));
    let result = native();
    let error = errno();
    let is_for_one_thread = || kinds_of(fd, kind) & FOR_ONE_THREAD != 0;
    if result == 0 || error != libc::EINVAL || is_for_one_thread() || !has_one_thread() {
        set_errno(error);
        return result;
    }
    let own = libc::CLONE_FS;
    call_libc!(unshare, libc::SYS_unshare, (own: c_int) -> c_int);
    native()
}

/// The child's first function.
unsafe extern "C" fn begin(start: *mut c_void) -> c_int {
    // SAFETY: the handler of libc's fork; the address comes from `clone`, and the child has a copy
    // of the memory there.
    unsafe {
        fork_and_exit::in_child();
        let Start { body, argument } = *Box::from_raw(start.cast::<Start>());
        body(argument)
    }
}

#[unsafe(no_mangle)]
pub(super) unsafe extern "C-unwind" fn clone(
    body: *mut c_void,
    stack: *mut c_void,
    flags: c_int,
    argument: *mut c_void,
    parent: *mut c_void,
    local: *mut c_void,
    child: *mut c_void,
) -> c_int {
    let native = |body: *mut c_void, argument: *mut c_void| {
        call_libc!(clone, -1, (body: *mut c_void, stack: *mut c_void, flags: c_int,
            argument: *mut c_void, parent: *mut c_void, local: *mut c_void, child: *mut c_void)
            -> c_int)
    };
    if body.is_null() || config::get().is_none() || !is_fork(flags as u64) {
        note(flags as u64);
        return native(body, argument);
    }
    // SAFETY: the program's function of this type.
    let theirs = unsafe { std::mem::transmute::<*mut c_void, Body>(body) };
    let start = Box::into_raw(Box::new(Start { body: theirs, argument }));
    // SAFETY: the handlers that libc would call around a fork.
    unsafe { fork_and_exit::before_fork() };
    let result = native(begin as Body as *mut c_void, start.cast::<c_void>());
    let error = errno();
    // SAFETY: as above; the child has its own copy of the box.
    unsafe {
        fork_and_exit::in_parent();
        drop(Box::from_raw(start));
    }
    set_errno(error);
    result
}
