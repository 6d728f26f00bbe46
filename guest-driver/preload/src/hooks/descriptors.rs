// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Hooks of the calls that make, duplicate and close descriptors.

use std::ffi::{c_char, c_int, c_uint, c_ulong};

use super::fork_and_exit::close_connections;
use crate::hooks::escapes::{leave, leave_standard};
use crate::hooks::libc_symbols::call_libc;
use crate::hooks::within::{cancellable, within};
use crate::io::{control, kernel};
use crate::relay::take_back;
use crate::selection::{answering_listeners, option, session, waiting, worthwhile};
use crate::socket::descriptors;
use crate::socket::sleeper::Sleeper;
use crate::socket::table::{DESCRIPTORS, Descriptor};
use crate::sys::fork_lock::ForkLockGuard;
use crate::sys::own_numbers;
use crate::sys::raw::{self, Errno};
use crate::sys::user_memory::{self, libc_result};
use crate::{config, fork, relay};

#[unsafe(no_mangle)]
pub(super) unsafe extern "C-unwind" fn close(fd: c_int) -> c_int {
    if option::is_reserved(fd) || own_numbers::contains(fd) {
        return libc_result(Err(Errno(libc::EBADF))) as c_int;
    }
    if !DESCRIPTORS.has(fd) {
        within(|| {
            worthwhile::note_close(fd);
            answering_listeners::remove(fd);
        });
        let _numbers = ism_sys::numbers_change();
        return call_libc!(close, libc::SYS_close, (fd: c_int) -> c_int);
    }
    cancellable(|| {
        kernel::close(fd, fd, || call_libc!(close, libc::SYS_close, (fd: c_int) -> c_int))
    })
}

#[unsafe(no_mangle)]
pub(super) unsafe extern "C-unwind" fn close_range(
    first: c_uint,
    last: c_uint,
    flags: c_int,
) -> c_int {
    within(|| close_range_here(first, last, flags))
}

fn close_range_here(first: c_uint, last: c_uint, flags: c_int) -> c_int {
    let unshares = flags & libc::CLOSE_RANGE_UNSHARE as c_int != 0;
    let spared = unshares
        && config::get().is_some()
        && !fork::shares_memory()
        && raw::threads_of_program() == 1;
    // The threads of the library would keep descriptors open after the program's close.
    let flags = if spared { flags & !(libc::CLOSE_RANGE_UNSHARE as c_int) } else { flags };
    let end = c_int::try_from(last).unwrap_or(c_int::MAX);
    let native = || match c_int::try_from(first) {
        Ok(first) if first <= end => close_around(first, end, flags),
        _ => raw::close_range(first as c_int, last as c_int, flags),
    };
    let closes = config::get().is_some() && flags & libc::CLOSE_RANGE_CLOEXEC as c_int == 0;
    libc_result(match c_int::try_from(first) {
        Ok(first) if closes => kernel::close(first, end, native),
        _ => native(),
    }) as c_int
}

/// Closes a range, without the descriptors of the rendezvous.
fn close_around(first: c_int, last: c_int, flags: c_int) -> raw::SysResult {
    answering_listeners::remove_range(first, last);
    let own = own_descriptors(first, last);
    let _numbers = ism_sys::numbers_change();
    let parts = option::ranges_without_reserved(&own, first, last).into_iter();
    parts.map(|(first, last)| raw::close_range(first, last, flags)).fold(Ok(0), raw::SysResult::and)
}

/// The library's descriptors in a range. The program does not know these numbers, and its remaining
/// connections still need them.
fn own_descriptors(first: c_int, last: c_int) -> Vec<c_int> {
    let mut own: Vec<_> = own_numbers::entered().collect();
    for fd in 0..=DESCRIPTORS.highest() {
        let Some(found) = DESCRIPTORS.get(fd) else { continue };
        match &*found {
            Descriptor::Stream(socket) => own.extend(socket.own_descriptors()),
            Descriptor::Set(set) => {
                own.extend(set.known_sleeper().into_iter().flat_map(Sleeper::descriptors));
            }
        }
    }
    if config::get().is_some() && !fork::shares_memory() {
        own.extend(session::descriptors());
        own.extend(waiting::descriptors());
        own.extend(relay::list::descriptors());
        own.extend(relay::offers::descriptors());
    }
    // Numbers lent by the program are the program's.
    own.retain(|fd| (first..=last).contains(fd) && !DESCRIPTORS.has(*fd));
    own
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn closefrom(first: c_int) {
    within(|| close_from(first.max(0)));
}

fn close_from(first: c_int) {
    let native = || close_around(first, c_int::MAX, 0);
    let _ = match config::get() {
        Some(_) => kernel::close(first, c_int::MAX, native),
        None => native(),
    };
}

#[unsafe(no_mangle)]
pub(super) unsafe extern "C-unwind" fn dup(old: c_int) -> c_int {
    within(|| {
        let numbers = locked(old);
        let new = call_libc!(dup, libc::SYS_dup, (old: c_int) -> c_int);
        if new >= 0 {
            descriptors::remove_stale(new);
            descriptors::duplicate(old, new);
            drop(numbers);
            leave_standard(new);
        }
        new
    })
}

/// Keeps the meaning of a connection's number until the guard is dropped. A relay ready to be taken
/// back is taken back first.
pub(super) fn locked(fd: c_int) -> Option<ForkLockGuard> {
    if !DESCRIPTORS.has(fd) {
        return None;
    }
    drop(take_back::hold(fd));
    descriptors::lock_numbers(fd, fd)
}

/// Common part of `dup2` and `dup3`; `flags` as for `dup3`.
fn replace(old: c_int, new: c_int, flags: c_int) -> c_int {
    if old != new {
        answering_listeners::remove(new);
        own_numbers::forget(new);
    }
    if old == new || (!DESCRIPTORS.has(old) && !DESCRIPTORS.has(new)) {
        let _numbers = ism_sys::numbers_change();
        return libc_result(raw::dup3(old, new, flags)) as c_int;
    }
    // If `old` is not open, the call fails, and `new` stays as it is.
    if let Err(error) = raw::fcntl(old, libc::F_GETFD, 0) {
        return libc_result(Err(error)) as c_int;
    }
    kernel::before_close(new, new);
    let numbers = locked(old).or_else(|| descriptors::lock_numbers(new, new));
    let closed = descriptors::close(new, new);
    let changing = ism_sys::numbers_change();
    let result = libc_result(raw::dup3(old, new, flags)) as c_int;
    drop(changing);
    if result >= 0 {
        descriptors::duplicate(old, new);
    }
    drop(numbers);
    drop(closed);
    if result >= 0 {
        leave_standard(new);
    }
    result
}

#[unsafe(no_mangle)]
pub(super) unsafe extern "C-unwind" fn dup2(old: c_int, new: c_int) -> c_int {
    if old == new {
        return match raw::fcntl(old, libc::F_GETFD, 0) {
            Ok(_) => new,
            Err(error) => libc_result(Err(error)) as c_int,
        };
    }
    within(|| replace(old, new, 0))
}

#[unsafe(no_mangle)]
pub(super) unsafe extern "C-unwind" fn dup3(old: c_int, new: c_int, flags: c_int) -> c_int {
    within(|| replace(old, new, flags))
}

#[unsafe(no_mangle)]
pub(super) unsafe extern "C-unwind" fn fcntl(
    fd: c_int,
    command: c_int,
    argument: c_ulong,
) -> c_int {
    // Locks of files wait in the kernel, without the library.
    match matches!(command, libc::F_SETLKW | libc::F_OFD_SETLKW) {
        true => call_libc!(fcntl, libc::SYS_fcntl,
            (fd: c_int, command: c_int, argument: c_ulong) -> c_int),
        false => within(|| fcntl_here(fd, command, argument)),
    }
}

fn fcntl_here(fd: c_int, command: c_int, argument: c_ulong) -> c_int {
    if is_owner_command(command) && argument != 0 {
        // The kernel sends the signals.
        leave(fd);
    }
    // Without the lock a relay coming or going meanwhile would keep the old flags.
    let numbers = locked(fd);
    let _making = if command == libc::F_DUPFD_CLOEXEC { ism_sys::making() } else { None };
    let result = call_libc!(fcntl, libc::SYS_fcntl, (fd: c_int, command: c_int, argument: c_ulong)
                       -> c_int);
    match command {
        libc::F_DUPFD_CLOEXEC if result >= 0 && ism_sys::is_driver_thread() => {
            return own_numbers::moved(result);
        }
        libc::F_DUPFD | libc::F_DUPFD_CLOEXEC if result >= 0 => {
            descriptors::remove_stale(result);
            descriptors::duplicate(fd, result);
            drop(numbers);
            leave_standard(result);
        }
        // The kernel sends the signals.
        libc::F_SETFL if result >= 0 && argument & libc::O_ASYNC as c_ulong != 0 => {
            drop(numbers);
            leave(fd);
        }
        libc::F_SETFL if result >= 0 => {
            if DESCRIPTORS.has(fd)
                && let Some(descriptor) = DESCRIPTORS.get(fd)
                && let Some(socket) = descriptor.stream()
            {
                socket.options.set_nonblocking(argument & libc::O_NONBLOCK as c_ulong != 0);
            }
        }
        _ => {}
    }
    result
}

/// Whether a command of `fcntl` sets the receiver or the number of a socket's signal.
fn is_owner_command(command: c_int) -> bool {
    const F_SETSIG: c_int = 10;
    const F_SETOWN_EX: c_int = 15;
    matches!(command, libc::F_SETOWN | F_SETSIG | F_SETOWN_EX)
}

#[unsafe(no_mangle)]
pub(super) unsafe extern "C-unwind" fn ioctl(
    fd: c_int,
    request: c_ulong,
    argument: *mut c_int,
) -> c_int {
    if DESCRIPTORS.has(fd) {
        // SAFETY: the program's arguments.
        return within(|| unsafe { ioctl_here(fd, request, argument) });
    }
    call_libc!(ioctl, libc::SYS_ioctl,
        (fd: c_int, request: c_ulong, argument: *mut c_int) -> c_int)
}

/// # Safety
/// As `ioctl`.
unsafe fn ioctl_here(fd: c_int, request: c_ulong, argument: *mut c_int) -> c_int {
    if matches!(request, FIOSETOWN | SIOCSPGRP) {
        leave(fd);
    }
    let known = take_back::hold(fd);
    if let Some(descriptor) = &known
        && let Some(answer) = control::ioctl(fd, descriptor, request)
    {
        return match answer {
            Ok(_) if user_memory::is_nowhere(argument, 1) => {
                libc_result(Err(Errno(libc::EFAULT))) as c_int
            }
            Ok(number) => {
                // SAFETY: the argument of these requests is the address of a number.
                unsafe { *argument = number };
                0
            }
            Err(error) => libc_result(Err(error)) as c_int,
        };
    }
    let _numbers = descriptors::lock_numbers(fd, fd);
    let result = call_libc!(ioctl, libc::SYS_ioctl,
        (fd: c_int, request: c_ulong, argument: *mut c_int) -> c_int);
    if result >= 0
        && request == libc::FIONBIO
        && let Some(socket) = known.as_ref().and_then(|descriptor| descriptor.stream())
    {
        control::update_nonblocking(fd, socket);
    }
    result
}

/// Requests of `ioctl` with the effect of F_SETOWN.
const FIOSETOWN: c_ulong = 0x8901;
const SIOCSPGRP: c_ulong = 0x8902;

/// Ends the program without its exit handlers. The hook closes the connections first.
#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn _exit(status: c_int) -> ! {
    within(close_connections);
    loop {
        let _ = raw::exit_group(status);
    }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn _Exit(status: c_int) -> ! {
    // SAFETY: the same function.
    unsafe { _exit(status) }
}

/// Defines hooks of calls for a pair of descriptors: the hooks remove stale entries.
macro_rules! makes_pairs {
    ($($name:ident($($arg:ident : $type:ty,)* ; $pair:ident);)*) => {
        $(#[unsafe(no_mangle)]
        unsafe extern "C-unwind" fn $name($($arg: $type,)* $pair: *mut c_int) -> c_int {
            let result = call_libc!($name, -1, ($($arg: $type,)* $pair: *mut c_int) -> c_int);
            if result == 0 {
                within(|| {
                    for at in 0..2 {
                        // SAFETY: the kernel has written two numbers.
                        let fd = unsafe { &mut *$pair.add(at) };
                        descriptors::remove_stale(*fd);
                        *fd = own_numbers::moved(*fd);
                    }
                });
            }
            result
        })*
    };
}

makes_pairs! {
    pipe(; fds);
    __pipe(; fds);
    socketpair(domain: c_int, kind: c_int, protocol: c_int,; fds);
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn pipe2(fds: *mut c_int, flags: c_int) -> c_int {
    let result = call_libc!(pipe2, -1, (fds: *mut c_int, flags: c_int) -> c_int);
    if result == 0 {
        // SAFETY: the kernel has written two numbers.
        let made = unsafe { [*fds, *fds.add(1)] };
        within(|| made.into_iter().for_each(descriptors::remove_stale));
    }
    result
}

/// Defines hooks of calls for a new descriptor: the hooks remove a stale entry of the number.
macro_rules! makes {
    ($($name:ident($($arg:ident : $type:ty),*);)*) => {
        $(#[unsafe(no_mangle)]
        unsafe extern "C-unwind" fn $name($($arg: $type),*) -> c_int {
            let fd = call_libc!($name, -1, ($($arg: $type),*) -> c_int);
            if fd >= 0 {
                within(|| descriptors::remove_stale(fd));
            }
            fd
        })*
    };
}

makes! {
    open(path: *const c_char, flags: c_int, mode: c_uint);
    __open(path: *const c_char, flags: c_int, mode: c_uint);
    __open64(path: *const c_char, flags: c_int, mode: c_uint);
    open64(path: *const c_char, flags: c_int, mode: c_uint);
    openat(dir: c_int, path: *const c_char, flags: c_int, mode: c_uint);
    openat64(dir: c_int, path: *const c_char, flags: c_int, mode: c_uint);
    eventfd(count: c_uint, flags: c_int);
    timerfd_create(clock: c_int, flags: c_int);
    memfd_create(name: *const c_char, flags: c_uint);
    inotify_init1(flags: c_int);
    signalfd(old: c_int, mask: *const libc::sigset_t, flags: c_int);
}
