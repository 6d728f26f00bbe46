// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Writes of the library into a pipe or a file of the program. Without a reader of the pipe, or beyond
//! the program's limit of a file's size, the program gets no signal for a write of the library.

use std::ffi::c_int;

use super::raw::{self, Errno, SysResult};

/// A signal in a set of the kernel's form.
const fn set_of(signal: c_int) -> u64 {
    1 << (signal - 1)
}

/// The signals of a write.
const BOTH: u64 = set_of(libc::SIGPIPE) | set_of(libc::SIGXFSZ);

/// Writes without SIGPIPE and SIGXFSZ.
pub(crate) fn write(fd: c_int, bytes: &[u8]) -> SysResult {
    let (both, mut before, mut pending) = (BOTH, 0u64, 0u64);
    let (set, old) = (&raw const both as usize, &raw mut before as usize);
    let zero = super::timespec(std::time::Duration::ZERO);
    // SAFETY: all words are valid until their calls return.
    unsafe {
        raw::call(libc::SYS_rt_sigprocmask, [libc::SIG_BLOCK as usize, set, old, 8, 0, 0])?;
        let waiting = &raw mut pending as usize;
        let _ = raw::call(libc::SYS_rt_sigpending, [waiting, 8, 0, 0, 0, 0]);
        let done = raw::write(fd, bytes);
        let sent = match done {
            Err(Errno(libc::EPIPE)) => set_of(libc::SIGPIPE),
            Err(Errno(libc::EFBIG)) => set_of(libc::SIGXFSZ),
            _ => 0,
        };
        if sent & !pending != 0 {
            let (only, no_time) = (&raw const sent as usize, &raw const zero as usize);
            let _ = raw::call(libc::SYS_rt_sigtimedwait, [only, 0, no_time, 8, 0, 0]);
        }
        let own = BOTH & !before;
        let (how, own) = (libc::SIG_UNBLOCK as usize, &raw const own as usize);
        let _ = raw::call(libc::SYS_rt_sigprocmask, [how, own, 0, 8, 0, 0]);
        done
    }
}
