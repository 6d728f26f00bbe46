// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The functions of `include/smc.h`, in its order.
//!
//! The header documents each function and the caller's promises: pointers lead to values of their types for
//! the time of the call, or are NULL.
#![allow(
    clippy::missing_safety_doc,
    reason = "the promise is that of the header, for all functions"
)]

use std::ffi::{c_char, c_int, c_void};
use std::io::{IoSlice, IoSliceMut};

use libc::{iovec, size_t, sockaddr, socklen_t, ssize_t};

use crate::error::{self, Error};
use crate::memory;
use crate::socket::Socket;
use crate::stack::{Options, Stack, StackConfig};
use crate::{info, options, transfer};

/// A number for the caller; -1 and errno for an error.
fn number<T: TryInto<U>, U: From<i8>>(result: Result<T, Error>) -> U {
    result.map_or_else(
        |error| {
            error::set(error);
            U::from(-1)
        },
        // Lengths are not longer than SSIZE_MAX, and descriptors are small.
        |value| value.try_into().unwrap_or_else(|_| U::from(-1)),
    )
}

/// An object for the caller; NULL and errno for an error.
fn pointer<T>(result: Result<T, Error>) -> *mut T {
    match result {
        Ok(object) => Box::into_raw(Box::new(object)),
        Err(error) => {
            error::set(error);
            std::ptr::null_mut()
        }
    }
}

/// The caller's stack.
///
/// # Safety
/// The stack is open, or NULL.
unsafe fn stack_at<'a>(stack: *const Stack) -> Result<&'a Stack, Error> {
    // SAFETY: the caller's promise.
    let stack = unsafe { memory::object(stack, "the stack is NULL") }?;
    stack.generation.check().map(|()| stack)
}

/// The caller's socket.
///
/// # Safety
/// The socket is open, or NULL.
unsafe fn socket_at<'a>(socket: *const Socket) -> Result<&'a Socket, Error> {
    // SAFETY: the caller's promise.
    let socket = unsafe { memory::object(socket, "the socket is NULL") }?;
    socket.generation.check().map(|()| socket)
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn smc_last_error() -> *const c_char {
    let code = error::errno();
    let text = error::last();
    error::restore_errno(code);
    text
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn smc_version() -> *const c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn smc_stack_open(
    device: *const c_char,
    options: *const Options,
) -> *mut Stack {
    let open = || {
        // SAFETY: the caller's promise.
        let device = unsafe { memory::text(device, "the device is NULL") }?;
        // SAFETY: the caller's promise.
        Stack::open(device, unsafe { StackConfig::read(options) }?)
    };
    pointer(open())
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn smc_stack_close(stack: *mut Stack) {
    if stack.is_null() {
        return;
    }
    // SAFETY: `smc_stack_open` made the stack, and the caller uses the stack no more.
    let stack = unsafe { Box::from_raw(stack) };
    if !stack.generation.is_current() {
        std::mem::forget(stack);
    }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn smc_connect(
    stack: *mut Stack,
    host: *const c_char,
    port: u16,
    timeout_ms: c_int,
) -> *mut Socket {
    // SAFETY: the caller's promise.
    unsafe { connect(stack, (host, port), timeout_ms, false) }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn smc_connect_tcp(
    stack: *mut Stack,
    host: *const c_char,
    port: u16,
    timeout_ms: c_int,
) -> *mut Socket {
    // SAFETY: the caller's promise.
    unsafe { connect(stack, (host, port), timeout_ms, true) }
}

unsafe fn connect(
    stack: *const Stack,
    (host, port): (*const c_char, u16),
    timeout_ms: c_int,
    tcp_only: bool,
) -> *mut Socket {
    let connect = || {
        // SAFETY: the caller's promise.
        let stack = unsafe { stack_at(stack) }?;
        // SAFETY: the caller's promise.
        let host = unsafe { memory::text(host, "the host is NULL") }?;
        Socket::connect(stack, (host, port), timeout_ms, tcp_only)
    };
    pointer(connect())
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn smc_listen(
    stack: *mut Stack,
    host: *const c_char,
    port: u16,
) -> *mut Socket {
    let listen = || {
        // SAFETY: the caller's promise.
        let stack = unsafe { stack_at(stack) }?;
        // SAFETY: the caller's promise.
        let host = unsafe { memory::text(host, "the host is NULL") }?;
        Socket::listen(stack, (host, port))
    };
    pointer(listen())
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn smc_accept(listener: *mut Socket) -> *mut Socket {
    // SAFETY: the caller's promise.
    pointer(unsafe { socket_at(listener) }.and_then(Socket::accept))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn smc_close(socket: *mut Socket) {
    if socket.is_null() {
        return;
    }
    // SAFETY: this library made the socket, and the caller uses the socket no more.
    let socket = unsafe { Box::from_raw(socket) };
    if !socket.generation.is_current() {
        std::mem::forget(socket);
    }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn smc_shutdown(socket: *mut Socket, how: c_int) -> c_int {
    // SAFETY: the caller's promise.
    let result = unsafe { socket_at(socket) }.and_then(|socket| socket.shutdown(how));
    number(result.map(|()| 0))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn smc_send(
    socket: *mut Socket,
    buf: *const c_void,
    len: size_t,
    flags: c_int,
) -> ssize_t {
    let send = || {
        // SAFETY: the caller's promise.
        let socket = unsafe { socket_at(socket) }?;
        // SAFETY: the caller's promise.
        let bytes = unsafe { memory::bytes(buf, len) }?;
        transfer::send(socket, &[IoSlice::new(bytes)], flags)
    };
    number(send())
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn smc_recv(
    socket: *mut Socket,
    buf: *mut c_void,
    len: size_t,
    flags: c_int,
) -> ssize_t {
    let recv = || {
        // SAFETY: the caller's promise.
        let socket = unsafe { socket_at(socket) }?;
        // SAFETY: the caller's promise.
        let room = unsafe { memory::room(buf, len) }?;
        transfer::recv(socket, &mut [IoSliceMut::new(room)], flags)
    };
    number(recv())
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn smc_sendv(
    socket: *mut Socket,
    iov: *const iovec,
    count: c_int,
    flags: c_int,
) -> ssize_t {
    let send = || {
        // SAFETY: the caller's promise.
        let socket = unsafe { socket_at(socket) }?;
        // SAFETY: the caller's promise.
        let bytes = unsafe { memory::bytes_of(iov, count) }?;
        transfer::send(socket, &bytes, flags)
    };
    number(send())
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn smc_recvv(
    socket: *mut Socket,
    iov: *const iovec,
    count: c_int,
    flags: c_int,
) -> ssize_t {
    let recv = || {
        // SAFETY: the caller's promise.
        let socket = unsafe { socket_at(socket) }?;
        // SAFETY: the caller's promise.
        let mut room = unsafe { memory::room_of(iov, count) }?;
        transfer::recv(socket, &mut room, flags)
    };
    number(recv())
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn smc_set_nonblocking(
    socket: *mut Socket,
    nonblocking: c_int,
) -> c_int {
    // SAFETY: the caller's promise.
    let socket = unsafe { socket_at(socket) };
    number(socket.and_then(|socket| socket.set_nonblocking(nonblocking != 0)).map(|()| 0))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn smc_get_nonblocking(socket: *mut Socket) -> c_int {
    // SAFETY: the caller's promise.
    number(unsafe { socket_at(socket) }.map(|socket| i32::from(socket.is_nonblocking())))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn smc_fd(socket: *mut Socket) -> c_int {
    // SAFETY: the caller's promise.
    number(unsafe { socket_at(socket) }.and_then(Socket::pollable))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn smc_getsockname(
    socket: *mut Socket,
    addr: *mut sockaddr,
    len: *mut socklen_t,
) -> c_int {
    let name = || {
        // SAFETY: the caller's promise.
        let address = unsafe { socket_at(socket) }?.local_addr()?;
        // SAFETY: the caller's promise.
        unsafe { memory::write_value(&options::sockaddr(address), addr.cast(), len, true) }
    };
    number(name().map(|()| 0))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn smc_getpeername(
    socket: *mut Socket,
    addr: *mut sockaddr,
    len: *mut socklen_t,
) -> c_int {
    let name = || {
        // SAFETY: the caller's promise.
        let address = unsafe { socket_at(socket) }?.stream()?.peer_addr()?;
        // SAFETY: the caller's promise.
        unsafe { memory::write_value(&options::sockaddr(address), addr.cast(), len, true) }
    };
    number(name().map(|()| 0))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn smc_setsockopt(
    socket: *mut Socket,
    level: c_int,
    name: c_int,
    value: *const c_void,
    len: socklen_t,
) -> c_int {
    let set = || {
        // SAFETY: the caller's promise.
        let socket = unsafe { socket_at(socket) }?;
        // SAFETY: the caller's promise.
        options::set(socket, level, name, unsafe { memory::bytes(value, len as usize) }?)
    };
    number(set().map(|()| 0))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn smc_getsockopt(
    socket: *mut Socket,
    level: c_int,
    name: c_int,
    value: *mut c_void,
    len: *mut socklen_t,
) -> c_int {
    let get = || {
        // SAFETY: the caller's promise.
        let socket = unsafe { socket_at(socket) }?;
        let got = options::get(socket, level, name)?;
        // SAFETY: the caller's promise.
        unsafe { memory::write_value(&got, value, len, false) }
    };
    number(get().map(|()| 0))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn smc_get_info(
    socket: *mut Socket,
    info: *mut c_void,
    size: size_t,
) -> c_int {
    let get = || {
        // SAFETY: the caller's promise.
        let socket = unsafe { socket_at(socket) }?;
        if info.is_null() {
            return Err(Error::new(libc::EINVAL, "the info is NULL"));
        }
        // SAFETY: the caller's promise.
        info::write(socket, unsafe { memory::room(info, size) }?)
    };
    number(get().map(|()| 0))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn smc_info_text(
    socket: *mut Socket,
    buf: *mut c_char,
    size: size_t,
) -> c_int {
    let get = || {
        // SAFETY: the caller's promise.
        let socket = unsafe { socket_at(socket) }?;
        // SAFETY: the caller's promise.
        info::write_text(socket, unsafe { memory::room(buf.cast(), size) }?)
    };
    number(get())
}
