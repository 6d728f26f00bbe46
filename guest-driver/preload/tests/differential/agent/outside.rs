// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Calls not bound to the library by the order of the objects, and Linux's own asynchronous I/O:
//! `handle-OP` by a handle of libc, `lio-OP` by `syscall`, `libaio-OP` like libaio.

use std::ffi::{CStr, c_int, c_void};
use std::mem::{transmute, zeroed};

use super::bytes::got;
use super::{around, fd, names, ret};
use crate::script::Words;

/// A function of libc, by a handle of libc.
fn by_handle(name: &CStr) -> *mut c_void {
    unsafe {
        let handle = libc::dlopen(c"libc.so.6".as_ptr(), libc::RTLD_LAZY);
        let found = libc::dlsym(handle, name.as_ptr());
        assert!(!found.is_null());
        found
    }
}

type Transfer = unsafe extern "C" fn(c_int, *mut c_void, usize, c_int) -> isize;

fn transfer(name: &CStr, fd: c_int, room: &mut [u8], flags: c_int) -> isize {
    // A function with fewer arguments ignores the others.
    let function = unsafe { transmute::<*mut c_void, Transfer>(by_handle(name)) };
    unsafe { function(fd, room.as_mut_ptr().cast(), room.len(), flags) }
}

fn handle(op: &str, name: &str, words: &mut Words<'_>) -> Option<String> {
    let op = op.strip_prefix("handle-")?;
    let fd = fd(name);
    let function = match op {
        "recv" => c"recv",
        "read" => c"read",
        "send" => c"send",
        "write" => c"write",
        "poll" => c"poll",
        "shutdown" => c"shutdown",
        _ => return None,
    };
    Some(match op {
        "recv" | "read" => {
            let mut room = vec![0u8; usize::try_from(words.number()).unwrap()];
            let flags = if op == "recv" { names::flags("MSG_", &words.word()) } else { 0 };
            got(transfer(function, fd, &mut room, flags), &room)
        }
        "send" | "write" => {
            let mut data = words.data();
            let flags = if op == "send" { names::flags("MSG_", &words.word()) } else { 0 };
            ret(transfer(function, fd, &mut data, flags))
        }
        "poll" => {
            type Poll = unsafe extern "C" fn(*mut libc::pollfd, libc::nfds_t, c_int) -> c_int;
            let events = names::poll_events(&words.word());
            let mut list = [libc::pollfd { fd, events, revents: 0 }];
            let function = unsafe { transmute::<*mut c_void, Poll>(by_handle(function)) };
            let n = unsafe { function(list.as_mut_ptr(), 1, words.number() as c_int) };
            format!("{} {}", ret(n as isize), names::show_poll(list[0].revents))
        }
        _ => {
            type Shutdown = unsafe extern "C" fn(c_int, c_int) -> c_int;
            let function = unsafe { transmute::<*mut c_void, Shutdown>(by_handle(function)) };
            ret(unsafe { function(fd, words.number() as c_int) } as isize)
        }
    })
}

/// `struct iocb`
#[repr(C)]
struct Request {
    data: u64,
    key: [u32; 2],
    operation: u16,
    priority: i16,
    fd: c_int,
    address: u64,
    len: u64,
    offset: i64,
    rest: [u64; 2],
}

/// `io_submit` of libaio. If libaio is not linked, an earlier object in the order of the objects
/// may have the function.
fn submit_as_libaio(arguments: [usize; 3]) -> isize {
    type Submit = unsafe extern "C" fn(usize, usize, usize) -> c_int;
    let [context, n, list] = arguments;
    let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"io_submit".as_ptr()) };
    if found.is_null() {
        return around::inline(libc::SYS_io_submit, [context, n, list, 0, 0, 0]);
    }
    unsafe { transmute::<*mut c_void, Submit>(found)(context, n, list) as isize }
}

/// One request in a context of its own; returns its result, or a negative error.
fn submit(as_libaio: bool, request: &mut Request) -> isize {
    let mut context = 0usize;
    let at = (&raw mut context) as usize;
    assert_eq!(around::inline(libc::SYS_io_setup, [1, at, 0, 0, 0, 0]), 0);
    let list = [std::ptr::from_mut(request)];
    let arguments = [context, 1, list.as_ptr() as usize];
    let submitted = match as_libaio {
        true => submit_as_libaio(arguments),
        false => {
            let [a, b, c] = arguments;
            around::call(true, libc::SYS_io_submit, [a, b, c, 0, 0, 0])
        }
    };
    // `struct io_event`: data, request, two results.
    let (mut event, limit) = ([0i64; 4], [5i64, 0]);
    let (room, time) = (event.as_mut_ptr() as usize, limit.as_ptr() as usize);
    let result = match submitted {
        1 => match around::inline(libc::SYS_io_getevents, [context, 1, 1, room, time, 0]) {
            1 => event[2] as isize,
            0 => -(libc::ETIMEDOUT as isize),
            error => error,
        },
        error => error,
    };
    around::inline(libc::SYS_io_destroy, [context, 0, 0, 0, 0, 0]);
    result
}

fn linux_aio(op: &str, name: &str, words: &mut Words<'_>) -> Option<String> {
    let (as_libaio, op) = match op.split_once('-')? {
        ("lio", op) => (false, op),
        ("libaio", op) => (true, op),
        _ => return None,
    };
    let mut request: Request = unsafe { zeroed() };
    request.fd = fd(name);
    let mut room = Vec::new();
    request.operation = match op {
        "read" => 0,
        "write" => 1,
        "poll" => 5,
        "readv" => 7,
        "writev" => 8,
        _ => return None,
    };
    match op {
        "read" | "readv" => room = vec![0u8; usize::try_from(words.number()).unwrap()],
        "write" | "writev" => room = words.data(),
        _ => request.address = names::poll_events(&words.word()) as u64,
    }
    let piece = libc::iovec { iov_base: room.as_mut_ptr().cast(), iov_len: room.len() };
    match op {
        "read" | "write" => {
            (request.address, request.len) = (room.as_ptr() as u64, room.len() as u64)
        }
        "readv" | "writev" => (request.address, request.len) = ((&raw const piece) as u64, 1),
        _ => {}
    }
    let result = submit(as_libaio, &mut request);
    Some(match (result, op) {
        (..0, _) => format!("-1 {}", names::error_name(-result as c_int)),
        (_, "read" | "readv") => got(result, &room),
        // After a wait, a poll returns further events along with the awaited one.
        (_, "poll") => {
            let errors = libc::POLLERR | libc::POLLHUP | libc::POLLNVAL;
            names::show_poll(result as i16 & (request.address as i16 | errors))
        }
        _ => result.to_string(),
    })
}

pub(super) fn operate(op: &str, name: &str, words: &mut Words<'_>) -> Option<String> {
    handle(op, name, words).or_else(|| linux_aio(op, name, words))
}
