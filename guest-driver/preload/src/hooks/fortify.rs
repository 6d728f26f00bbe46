// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Further names of the hooks: functions called by programs built with _FORTIFY_SOURCE, and aliases
//! of libc.

use std::ffi::{c_char, c_int, c_uint, c_ulong, c_void};

use libc::{
    fd_set, mmsghdr, pollfd, sigset_t, size_t, sockaddr, socklen_t, ssize_t, timespec, timeval,
};

use super::{bytes, clone, descriptors, escapes, readiness, sockets};

unsafe extern "C" {
    fn __chk_fail() -> !;
}

/// Ends the program if it asks for more bytes than its buffer has, as libc does.
fn check(asked: usize, room: usize) {
    if asked > room {
        // SAFETY: libc reports the overflow and does not return.
        unsafe { __chk_fail() }
    }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn __read_chk(
    fd: c_int,
    buf: *mut c_void,
    n: size_t,
    room: size_t,
) -> ssize_t {
    check(n, room);
    // SAFETY: the program's arguments.
    unsafe { bytes::read(fd, buf, n) }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn __recv_chk(
    fd: c_int,
    buf: *mut c_void,
    n: size_t,
    room: size_t,
    flags: c_int,
) -> ssize_t {
    check(n, room);
    // SAFETY: the program's arguments.
    unsafe { bytes::recv(fd, buf, n, flags) }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn __recvfrom_chk(
    fd: c_int,
    buf: *mut c_void,
    n: size_t,
    room: size_t,
    flags: c_int,
    addr: *mut sockaddr,
    len: *mut socklen_t,
) -> ssize_t {
    check(n, room);
    // SAFETY: the program's arguments.
    unsafe { bytes::recvfrom(fd, buf, n, flags, addr, len) }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn __poll_chk(
    fds: *mut pollfd,
    n: c_ulong,
    timeout: c_int,
    room: size_t,
) -> c_int {
    check((n as usize).saturating_mul(std::mem::size_of::<pollfd>()), room);
    // SAFETY: the program's arguments.
    unsafe { readiness::poll(fds, n, timeout) }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn __ppoll_chk(
    fds: *mut pollfd,
    n: c_ulong,
    timeout: *const timespec,
    mask: *const sigset_t,
    room: size_t,
) -> c_int {
    check((n as usize).saturating_mul(std::mem::size_of::<pollfd>()), room);
    // SAFETY: the program's arguments.
    unsafe { readiness::ppoll(fds, n, timeout, mask) }
}

/// Defines a further name of a function, with the same arguments.
macro_rules! also {
    ($($name:ident = $room:ident::$other:ident($($arg:ident : $type:ty),*) -> $result:ty;)*) => {
        $(#[unsafe(no_mangle)]
        unsafe extern "C-unwind" fn $name($($arg: $type),*) -> $result {
            // SAFETY: the program's arguments, unchanged.
            unsafe { $room::$other($($arg),*) }
        })*
    };
}

also! {
    __read = bytes::read(fd: c_int, buf: *mut c_void, n: size_t) -> ssize_t;
    __write = bytes::write(fd: c_int, buf: *const c_void, n: size_t) -> ssize_t;
    __send = bytes::send(fd: c_int, buf: *const c_void, n: size_t, flags: c_int) -> ssize_t;
    __close = descriptors::close(fd: c_int) -> c_int;
    __connect = sockets::connect(fd: c_int, addr: *const sockaddr, len: socklen_t) -> c_int;
    __poll = readiness::poll(list: *mut pollfd, n: c_ulong, timeout: c_int) -> c_int;
    __fcntl = descriptors::fcntl(fd: c_int, command: c_int, argument: c_ulong) -> c_int;
    fcntl64 = descriptors::fcntl(fd: c_int, command: c_int, argument: c_ulong) -> c_int;
    __dup2 = descriptors::dup2(old: c_int, new: c_int) -> c_int;
    __socket = sockets::socket(domain: c_int, kind: c_int, protocol: c_int) -> c_int;
    __recv = bytes::recv(fd: c_int, buf: *mut c_void, n: size_t, flags: c_int) -> ssize_t;
    __sendmmsg = bytes::sendmmsg(fd: c_int, list: *mut mmsghdr, n: c_uint, flags: c_int) -> c_int;
    __select = readiness::select(n: c_int, read: *mut fd_set, write: *mut fd_set,
        except: *mut fd_set, timeout: *mut timeval) -> c_int;
    __libc_fcntl64 = descriptors::fcntl(fd: c_int, command: c_int, argument: c_ulong) -> c_int;
    __clone = clone::clone(body: *mut c_void, stack: *mut c_void, flags: c_int,
        argument: *mut c_void, parent: *mut c_void, local: *mut c_void, child: *mut c_void) -> c_int;
    _IO_fdopen = escapes::fdopen(fd: c_int, mode: *const c_char) -> *mut c_void;
    __backtrace_symbols_fd = escapes::backtrace_symbols_fd(list: *const *mut c_void, n: c_int,
        fd: c_int) -> ();
    _IO_fclose = escapes::fclose(stream: *mut c_void) -> c_int;
}
