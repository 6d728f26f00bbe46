// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Linux's own asynchronous I/O, by libaio or by `syscall`: the kernel reads, writes and polls after
//! the call. So `io_submit` leaves the descriptors of its requests to the kernel first.

use std::ffi::{c_int, c_long, c_void};
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::hooks::escapes::leave;
use crate::socket::registrations;
use crate::socket::stream::SocketState;
use crate::socket::table::DESCRIPTORS;
use crate::sys::elf::LoadedObject;
use crate::sys::raw::{self, Errno, SysResult};
use crate::sys::user_memory::is_nowhere;

/// The beginning of `struct iocb`.
#[repr(C)]
pub(super) struct Request {
    data: u64,
    key: [u32; 2],
    operation: u16,
    priority: i16,
    fd: c_int,
    rest: [u64; 5],
}

/// More requests than a context can have; the kernel ignores further ones.
const MOST: usize = 1 << 16;

/// `io_submit`, as the kernel has it.
///
/// # Safety
/// `list` leads to `n` addresses, each of a request or of no memory, or nowhere.
pub(super) unsafe fn submit(context: usize, n: c_long, list: *const *const Request) -> SysResult {
    let mut most = usize::try_from(n).unwrap_or(0);
    if is_nowhere(list, most) {
        most = 0;
    }
    let mut submitted = n;
    for at in 0..most.min(MOST) {
        // SAFETY: the caller's promise.
        let request = unsafe { list.add(at).read() };
        if is_nowhere(request, 1) {
            // The kernel stops at this address.
            break;
        }
        // SAFETY: the caller's promise.
        let fd = unsafe { (&raw const (*request).fd).read_unaligned() };
        if DESCRIPTORS.has(fd) && !is_left(fd) {
            if at == 0 {
                return Err(Errno(libc::EAGAIN));
            }
            submitted = at as c_long;
            break;
        }
    }
    let arguments = [context, submitted as usize, list as usize, 0, 0, 0];
    // SAFETY: the program's arguments.
    unsafe { raw::call(libc::SYS_io_submit, arguments) }
}

/// Leaves a known descriptor to the kernel. `false`: no number is free for a relay, and the kernel's
/// calls would bypass the connection.
fn is_left(fd: c_int) -> bool {
    leave(fd);
    let Some(descriptor) = DESCRIPTORS.get(fd) else { return true };
    match descriptor.stream() {
        Some(socket) => socket.state() != SocketState::Smc,
        None => {
            registrations::hand_to_kernel(fd);
            true
        }
    }
}

/// The next function of this name outside of libaio. 0: not looked for yet, 1: there is none.
static OTHER: AtomicUsize = AtomicUsize::new(0);
const NONE: usize = 1;

/// A function of this name in a library of the program other than libaio.
fn other() -> Option<usize> {
    let known = OTHER.load(Ordering::Relaxed);
    if known != 0 {
        return (known != NONE).then_some(known);
    }
    // SAFETY: the name ends with a zero byte.
    let found = unsafe { libc::dlsym(libc::RTLD_NEXT, c"io_submit".as_ptr()) };
    let is_libaio = |object: LoadedObject| {
        object.soname().is_some_and(|name| name.to_bytes().starts_with(b"libaio.so."))
    };
    let is_other = !found.is_null() && !LoadedObject::containing(found).is_some_and(is_libaio);
    OTHER.store(if is_other { found as usize } else { NONE }, Ordering::Relaxed);
    is_other.then_some(found as usize)
}

/// libaio's function, with its own system call. Returns the negative number of an error.
#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn io_submit(
    context: *mut c_void,
    n: c_long,
    list: *const *const Request,
) -> c_int {
    if let Some(other) = other() {
        type Function = unsafe extern "C" fn(*mut c_void, c_long, *const *const Request) -> c_int;
        // SAFETY: the program has called its function with these arguments.
        return unsafe { std::mem::transmute::<usize, Function>(other)(context, n, list) };
    }
    // SAFETY: the program's arguments.
    match unsafe { submit(context as usize, n, list) } {
        Ok(submitted) => submitted as c_int,
        Err(Errno(error)) => -error,
    }
}
