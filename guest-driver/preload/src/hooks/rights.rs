// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Hooks of the calls to give up the rights of the user, or the root directory. Afterwards a worker
//! of nginx or HAProxy could not open a report for `smc run --status`, so the library opens the
//! report before the call.

use std::ffi::{c_char, c_int};

use crate::config;
use crate::hooks::libc_symbols::call_libc;
use crate::hooks::within::within;
use crate::report_file;

/// A user's number in a call to keep the current number.
const SAME: u32 = u32::MAX;

/// Opens the report, if the configuration asks for one. `user`: the later owner. The user may
/// execute a program and go on with the report.
fn before(user: Option<u32>) {
    if let Some(directory) = config::get().and_then(|config| config.status.as_ref()) {
        within(|| report_file::open_early(directory, user.filter(|user| *user != SAME)));
    }
}

#[unsafe(no_mangle)]
pub(super) unsafe extern "C-unwind" fn setuid(user: u32) -> c_int {
    before(Some(user));
    call_libc!(setuid, libc::SYS_setuid, (user: u32) -> c_int)
}

#[unsafe(no_mangle)]
pub(super) unsafe extern "C-unwind" fn seteuid(user: u32) -> c_int {
    before(Some(user));
    call_libc!(seteuid, -1, (user: u32) -> c_int)
}

#[unsafe(no_mangle)]
pub(super) unsafe extern "C-unwind" fn setreuid(real: u32, effective: u32) -> c_int {
    before(Some(effective));
    call_libc!(setreuid, libc::SYS_setreuid, (real: u32, effective: u32) -> c_int)
}

#[unsafe(no_mangle)]
pub(super) unsafe extern "C-unwind" fn setresuid(real: u32, effective: u32, saved: u32) -> c_int {
    before(Some(effective));
    call_libc!(setresuid, libc::SYS_setresuid, (real: u32, effective: u32, saved: u32) -> c_int)
}

#[unsafe(no_mangle)]
pub(super) unsafe extern "C-unwind" fn chroot(path: *const c_char) -> c_int {
    before(None);
    call_libc!(chroot, libc::SYS_chroot, (path: *const c_char) -> c_int)
}
