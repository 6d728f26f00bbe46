// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Writes of the library into a pipe that the program has. If nobody reads it, the program gets no
//! SIGPIPE for a write that is not its own.

use std::ffi::c_int;

use super::raw::{self, Errno, SysResult};

/// SIGPIPE in a set of the kernel's form.
const PIPE: u64 = 1 << (libc::SIGPIPE - 1);

/// Writes without SIGPIPE.
pub(crate) fn write(fd: c_int, bytes: &[u8]) -> SysResult {
    let (only, mut before, mut pending) = (PIPE, 0u64, 0u64);
    let (set, old) = (&raw const only as usize, &raw mut before as usize);
    let zero = super::timespec(std::time::Duration::ZERO);
    // SAFETY: all words are valid until their calls return.
    unsafe {
        raw::call(libc::SYS_rt_sigprocmask, [libc::SIG_BLOCK as usize, set, old, 8, 0, 0])?;
        let waiting = &raw mut pending as usize;
        let _ = raw::call(libc::SYS_rt_sigpending, [waiting, 8, 0, 0, 0, 0]);
        let done = raw::write(fd, bytes);
        if done == Err(Errno(libc::EPIPE)) && pending & PIPE == 0 {
            let no_time = &raw const zero as usize;
            let _ = raw::call(libc::SYS_rt_sigtimedwait, [set, 0, no_time, 8, 0, 0]);
        }
        if before & PIPE == 0 {
            let how = libc::SIG_UNBLOCK as usize;
            let _ = raw::call(libc::SYS_rt_sigprocmask, [how, set, 0, 8, 0, 0]);
        }
        done
    }
}
