// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A time limit for a process of the library: the kernel ends the process if its only thread does not
//! go on. The process has its memory from a program with other threads, so a lock of the program, of
//! libc or of another library may be held for ever.

use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicU64, Ordering};
use std::time::Duration;

use super::raw;

/// Called before the process ends.
static SAYS: AtomicPtr<fn()> = AtomicPtr::new(std::ptr::null_mut());

/// The highest number of a descriptor to be reset at the end; -1: none.
static HIGHEST: AtomicI32 = AtomicI32::new(-1);

/// Half of the time limit of [`restart`], in microseconds.
static HALF: AtomicU64 = AtomicU64::new(0);
/// Whether the first half is over.
static IS_LATE: AtomicBool = AtomicBool::new(false);
/// Whether both halves are over.
static IS_ENDING: AtomicBool = AtomicBool::new(false);
/// Limit of the work at the end: the output may be full.
const LAST: Duration = Duration::from_secs(2);

// x86-64: the kernel runs no handler without a function to return from the handler.
#[cfg(target_arch = "x86_64")]
std::arch::global_asm!(
    ".hidden smc_return_from_alarm",
    "smc_return_from_alarm:",
    "mov eax, 15", // rt_sigreturn
    "syscall",
);

#[cfg(target_arch = "x86_64")]
fn restorer() -> [usize; 2] {
    unsafe extern "C" {
        fn smc_return_from_alarm();
    }
    const SA_RESTORER: usize = 0x0400_0000;
    [SA_RESTORER, smc_return_from_alarm as unsafe extern "C" fn() as usize]
}

#[cfg(not(target_arch = "x86_64"))]
fn restorer() -> [usize; 2] {
    [0, 0]
}

/// Ends the process from now on when a time limit of [`restart`] is over. `says`: called before the
/// end. Must not take memory or a lock.
pub(crate) fn begin(says: &'static fn()) {
    SAYS.store(std::ptr::from_ref(says).cast_mut(), Ordering::Relaxed);
    let handler = on_alarm as extern "C" fn(c_int) as usize;
    let [flags, restorer] = restorer();
    // The kernel's struct: handler, flags, restorer, mask.
    let action = [handler, flags | libc::SA_NODEFER as usize, restorer, 0];
    let signals = 1u64 << (libc::SIGALRM - 1);
    let (at, only) = (&raw const action as usize, &raw const signals as usize);
    // SAFETY: action and set are valid until the calls return.
    unsafe {
        let _ = raw::call(libc::SYS_rt_sigaction, [libc::SIGALRM as usize, at, 0, 8, 0, 0]);
        let how = libc::SIG_UNBLOCK as usize;
        let _ = raw::call(libc::SYS_rt_sigprocmask, [how, only, 0, 8, 0, 0]);
    }
}

/// Makes the process reset its connections at such an end. `highest`: the highest number of a
/// descriptor.
pub(crate) fn reset_at_end(highest: c_int) {
    HIGHEST.store(highest, Ordering::Relaxed);
}

/// Sets the time limit of the process. Zero: no limit.
pub(crate) fn restart(limit: Duration) {
    let half = limit / 2;
    HALF.store(half.as_micros() as u64, Ordering::Relaxed);
    IS_LATE.store(false, Ordering::Relaxed);
    set_timer(half);
}

fn set_timer(limit: Duration) {
    let none = libc::timeval { tv_sec: 0, tv_usec: 0 };
    let seconds = i64::try_from(limit.as_secs()).unwrap_or(i64::MAX);
    let after = libc::timeval { tv_sec: seconds, tv_usec: i64::from(limit.subsec_micros()) };
    let timer = libc::itimerval { it_interval: none, it_value: after };
    let (which, new) = (libc::ITIMER_REAL as usize, &raw const timer as usize);
    // SAFETY: the value is valid until the call returns.
    let _ = unsafe { raw::call(libc::SYS_setitimer, [which, new, 0, 0, 0, 0]) };
}

/// Ends the process in the second half. A stopped process finds the time over when resumed. So the time
/// has two halves, and the thread can begin anew in the second.
extern "C" fn on_alarm(_: c_int) {
    if !IS_LATE.swap(true, Ordering::Relaxed) {
        set_timer(Duration::from_micros(HALF.load(Ordering::Relaxed)));
        return;
    }
    // The last limit also holds if the handler's output is full.
    if !IS_ENDING.swap(true, Ordering::Relaxed) {
        set_timer(LAST);
        reset_all();
        if let Some(says) = super::leaked(SAYS.load(Ordering::Relaxed)) {
            says();
        }
    }
    loop {
        let _ = raw::exit_group(1);
    }
}

/// Resets all sockets: the process's bytes are lost, and an end of data would hide the loss. The option
/// has no effect on descriptors other than TCP sockets.
fn reset_all() {
    let linger: [c_int; 2] = [1, 0];
    let at = &raw const linger as usize;
    for fd in 0..=HIGHEST.load(Ordering::Relaxed) {
        let (level, name) = (libc::SOL_SOCKET as usize, libc::SO_LINGER as usize);
        // SAFETY: the option is valid until the call returns.
        let _ = unsafe { raw::call(libc::SYS_setsockopt, [fd as usize, level, name, at, 8, 0]) };
    }
}
