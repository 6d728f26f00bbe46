// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Hooks of the calls by which a process gives up the rights of its user, or its root directory. A
//! worker of nginx or HAProxy could open no report for `smc run --status` afterwards, so the library
//! opens it before.

use std::ffi::{c_char, c_int};

use crate::config;
use crate::hooks::libc_symbols::call_libc;
use crate::hooks::within::within;
use crate::report_file;

/// A user's number that leaves the number as it is.
const SAME: u32 = u32::MAX;

/// Opens the report, if one was asked for. `user`: whose it will be; it may execute a program that
/// goes on with it.
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
