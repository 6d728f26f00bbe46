// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Hooks of the calls to move bytes between a connection and a file or a pipe.

use std::ffi::{c_int, c_uint};
use std::io::IoSlice;

use libc::{off64_t, size_t, ssize_t};

use crate::hooks::libc_symbols::call_libc;
use crate::hooks::temporary_relays::by_kernel;
use crate::hooks::within::{restartable, restartable_within};
use crate::io::transfer::{self, Dispatch};
use crate::socket::table::DESCRIPTORS;
use crate::sys::raw::{self, Errno, SysResult};
use crate::sys::user_memory::{self, libc_result};

/// `sendfile` into an SMC connection. `None`: the kernel carries out the call.
///
/// # Safety
/// `offset` is null or leads to an offset.
unsafe fn sendfile_here(
    to: c_int,
    from: c_int,
    offset: *mut off64_t,
    n: usize,
) -> Option<SysResult> {
    let descriptor = DESCRIPTORS.get(to)?;
    if !offset.is_null() && user_memory::is_nowhere(offset, 1) {
        return Some(Err(Errno(libc::EFAULT)));
    }
    let n = n.min(0x7fff_f000);
    loop {
        // SAFETY: the caller's promise.
        let offset = unsafe { offset.as_mut() };
        return Some(match transfer::dispatch_write(&descriptor, to, false) {
            Dispatch::Kernel => return None,
            Dispatch::Fail(error) => Err(error),
            Dispatch::Keep(socket) => {
                let mut is_decided = false;
                let keep = |bufs: &[IoSlice<'_>]| {
                    let kept = transfer::keep(&descriptor, socket, to, bufs, 0);
                    is_decided = kept.is_none();
                    kept.unwrap_or(Err(Errno(libc::EAGAIN)))
                };
                match transfer::sendfile(keep, from, offset, n) {
                    Err(_) if is_decided => continue,
                    result => result,
                }
            }
            Dispatch::Smc(socket, stream) => {
                let send = |bufs: &[IoSlice<'_>]| transfer::send((socket, stream), bufs, 0);
                transfer::sendfile(send, from, offset, n)
            }
        });
    }
}

#[unsafe(no_mangle)]
pub(super) unsafe extern "C-unwind" fn sendfile(
    to: c_int,
    from: c_int,
    offset: *mut off64_t,
    n: size_t,
) -> ssize_t {
    let native = || {
        call_libc!(sendfile, libc::SYS_sendfile,
            (to: c_int, from: c_int, offset: *mut off64_t, n: size_t) -> ssize_t)
    };
    if DESCRIPTORS.has(to) {
        // SAFETY: the program's offset.
        if let Some(result) = restartable_within(|| unsafe { sendfile_here(to, from, offset, n) }) {
            return libc_result(result);
        }
        // SAFETY: the same call.
        return by_kernel(to, || unsafe { sendfile(to, from, offset, n) }, native);
    }
    native()
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn sendfile64(
    to: c_int,
    from: c_int,
    offset: *mut off64_t,
    n: size_t,
) -> ssize_t {
    // SAFETY: the same call.
    unsafe { sendfile(to, from, offset, n) }
}

/// `splice` from or into an SMC connection. Each end is a descriptor, with `true` if the program passes
/// no position. `None`: the kernel carries out the call.
fn splice_here(
    ((from, no_from), (to, no_to)): ((c_int, bool), (c_int, bool)),
    n: usize,
    flags: c_uint,
) -> Option<SysResult> {
    let dont_wait = flags & libc::SPLICE_F_NONBLOCK != 0;
    for (fd, out) in [(from, true), (to, false)] {
        let Some(descriptor) = DESCRIPTORS.get(fd) else { continue };
        let dispatch = if out { transfer::dispatch_read } else { transfer::dispatch_transfer };
        return Some(match dispatch(&descriptor, fd, dont_wait) {
            Dispatch::Kernel => continue,
            Dispatch::Keep(_) => Err(Errno(libc::EAGAIN)),
            Dispatch::Fail(error) => Err(error),
            Dispatch::Smc(..) if !no_from || !no_to => {
                // Neither end supports a position, but the kernel looks for a pipe first.
                let (other, is_free) = if out { (to, no_to) } else { (from, no_from) };
                let is_einval = is_free || raw::pipe_size(other).is_err();
                Err(Errno(if is_einval { libc::EINVAL } else { libc::ESPIPE }))
            }
            Dispatch::Smc(socket, stream) if out => {
                transfer::splice_out((socket, stream), to, n, dont_wait)
            }
            Dispatch::Smc(socket, stream) => {
                transfer::splice_in((socket, stream), from, n, dont_wait)
            }
        });
    }
    None
}

#[unsafe(no_mangle)]
pub(super) unsafe extern "C-unwind" fn splice(
    from: c_int,
    from_at: *mut off64_t,
    to: c_int,
    to_at: *mut off64_t,
    n: size_t,
    flags: c_uint,
) -> ssize_t {
    let native = || {
        call_libc!(splice, libc::SYS_splice, (from: c_int, from_at: *mut off64_t, to: c_int,
              to_at: *mut off64_t, n: size_t, flags: c_uint) -> ssize_t)
    };
    let ends = ((from, from_at.is_null()), (to, to_at.is_null()));
    if DESCRIPTORS.has(from) || DESCRIPTORS.has(to) {
        if let Some(result) = restartable(|| splice_here(ends, n, flags)) {
            return libc_result(result);
        }
        // SAFETY: the same call.
        let again = || unsafe { splice(from, from_at, to, to_at, n, flags) };
        return by_kernel(from, again, || by_kernel(to, again, native));
    }
    native()
}
