// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The clock of this library. A program may have another one: libfaketime replaces libc's functions,
//! and its clock may stand still. So the library has functions of these names for itself, which
//! nobody else can link: `std` calls them, and asks the kernel.

use std::ffi::c_int;

use libc::{clockid_t, timespec};
use rustix::time::ClockId;

use super::raw;
use super::user_memory::libc_result;

#[cfg(target_arch = "x86_64")]
macro_rules! jump {
    () => {
        "jmp {function}"
    };
}

#[cfg(target_arch = "aarch64")]
macro_rules! jump {
    () => {
        "b {function}"
    };
}

/// Defines functions that other libraries do not see.
macro_rules! hidden {
    ($($name:literal is $function:ident;)*) => {
        $(std::arch::global_asm!(
            concat!(".pushsection .text.smc_", $name, ",\"ax\",@progbits"),
            concat!(".globl ", $name),
            concat!(".hidden ", $name),
            concat!(".type ", $name, ",@function"),
            concat!($name, ":"),
            jump!(),
            concat!(".size ", $name, ", . - ", $name),
            ".popsection",
            function = sym $function,
        );)*
    };
}

hidden! {
    "clock_gettime" is read_clock;
    "clock_nanosleep" is sleep_on_clock;
}

/// `clock_gettime`.
unsafe extern "C" fn read_clock(clock: clockid_t, time: *mut timespec) -> c_int {
    let known = match clock {
        libc::CLOCK_MONOTONIC => ClockId::Monotonic,
        libc::CLOCK_REALTIME => ClockId::Realtime,
        _ => {
            let args = [clock as usize, time as usize, 0, 0, 0, 0];
            // SAFETY: the caller's time.
            return libc_result(unsafe { raw::call(libc::SYS_clock_gettime, args) }) as c_int;
        }
    };
    let now = rustix::time::clock_gettime(known);
    // SAFETY: the caller's time.
    unsafe { time.write(timespec { tv_sec: now.tv_sec, tv_nsec: now.tv_nsec }) };
    0
}

/// `clock_nanosleep`, which returns its error.
unsafe extern "C" fn sleep_on_clock(
    clock: clockid_t,
    flags: c_int,
    time: *const timespec,
    left: *mut timespec,
) -> c_int {
    let args = [clock as usize, flags as usize, time as usize, left as usize, 0, 0];
    // SAFETY: the caller's times.
    match unsafe { raw::call(libc::SYS_clock_nanosleep, args) } {
        Ok(_) => 0,
        Err(raw::Errno(error)) => error,
    }
}
