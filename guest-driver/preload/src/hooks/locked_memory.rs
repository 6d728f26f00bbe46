// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `mlockall`: the kernel locks the memory of the library with the program's, so from MCL_FUTURE on the
//! process opens no device, and its connections stay on TCP.

use std::ffi::c_int;

use crate::hooks::libc_symbols::call_libc;
use crate::hooks::within::within;
use crate::selection::session;
use crate::sys::raw::{self, Errno};
use crate::sys::user_memory::libc_result;
use crate::{config, fork};

#[unsafe(no_mangle)]
pub(super) unsafe extern "C-unwind" fn mlockall(flags: c_int) -> c_int {
    if config::get().is_none() || fork::shares_memory() || flags & libc::MCL_FUTURE == 0 {
        return call_libc!(mlockall, libc::SYS_mlockall, (flags: c_int) -> c_int);
    }
    libc_result(within(|| {
        // With MCL_CURRENT the kernel compares the limit with the window of the device, and refuses.
        let is_limited = || ism_sys::resource_limit(libc::RLIMIT_MEMLOCK).is_some();
        if flags == libc::MCL_FUTURE && session::opened().is_some() && is_limited() {
            // Later mappings of connections in use would fail.
            return Err(Errno(libc::ENOMEM));
        }
        // SAFETY: a number.
        let locked = unsafe { raw::call(libc::SYS_mlockall, [flags as usize, 0, 0, 0, 0, 0]) };
        if locked.is_ok() {
            session::note_locked_memory();
        }
        locked
    })) as c_int
}
