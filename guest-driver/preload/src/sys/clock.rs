// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The clock of this library. A program may have another clock: libfaketime replaces libc's functions,
//! and its clock may stand still. So the library has private functions of these names for `std`,
//! invisible to other objects. The functions call libc's function by its address in libc, past any
//! replacement in other libraries. Until the address is known, the functions call the kernel.

use std::ffi::c_int;
use std::sync::atomic::{AtomicPtr, Ordering};

use libc::{c_void, clockid_t, timespec};

use super::elf::{LoadedObject, SymbolResult};
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

/// Defines functions invisible to other libraries.
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

/// libc's own `clock_gettime`, without a system call; null until the address is known.
static OF_LIBC: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());

/// Finds libc's own clock among the objects behind this library.
pub(crate) fn find<'a>(mut behind: impl Iterator<Item = &'a LoadedObject>) {
    let libc = behind.find(|object| object.soname() == Some(c"libc.so.6"));
    if let Some(SymbolResult::Function(found)) = libc.map(|libc| libc.find(c"clock_gettime")) {
        OF_LIBC.store(found as *mut c_void, Ordering::Release);
    }
}

/// `clock_gettime`.
unsafe extern "C" fn read_clock(clock: clockid_t, time: *mut timespec) -> c_int {
    type Function = unsafe extern "C" fn(clockid_t, *mut timespec) -> c_int;
    let found = OF_LIBC.load(Ordering::Acquire);
    if found.is_null() {
        let args = [clock as usize, time as usize, 0, 0, 0, 0];
        // SAFETY: the caller's time.
        return libc_result(unsafe { raw::call(libc::SYS_clock_gettime, args) }) as c_int;
    }
    // SAFETY: libc's function of this name has this type.
    let function = unsafe { std::mem::transmute::<*mut c_void, Function>(found) };
    // SAFETY: the caller's time.
    unsafe { function(clock, time) }
}

/// `clock_nanosleep`. Returns the error.
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
