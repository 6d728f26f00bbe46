// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The boundary between the program and the library. A hook does its work within the boundary. A
//! handler of the program or a cancellation must not run there. Both are deferred (see
//! `ism_sys::interrupt`) and delivered here, when the hook holds no lock any more: a handler may call
//! the library again, and need not return.

use std::ffi::c_int;

use ism_sys::interrupt::{self, Deferred};

use super::{cancellation, signals};
use crate::sys::raw::{Errno, RESTART, SysResult};

/// Does the work of a hook. The result has no destructor. The call is no cancellation point: a
/// cancelled thread ends in its next one, as with libc's function.
#[inline(always)]
pub(super) fn within<T: Copy>(work: impl FnOnce() -> T) -> T {
    at_no_point(work).0
}

/// Variant of [`within`] for a cancellation point.
#[inline(always)]
pub(super) fn cancellable<T: Copy>(work: impl FnOnce() -> T) -> T {
    at_point(work).0
}

/// Variant of [`cancellable`] for an interruptible call. After a handler with SA_RESTART the call
/// begins again.
#[inline(always)]
pub(super) fn restartable(mut work: impl FnMut() -> Option<SysResult>) -> Option<SysResult> {
    restart(|| at_point(&mut work))
}

/// Variant of [`restartable`] for a call without a cancellation point.
#[inline(always)]
pub(super) fn restartable_within(mut work: impl FnMut() -> Option<SysResult>) -> Option<SysResult> {
    restart(|| at_no_point(&mut work))
}

#[inline(always)]
fn restart(mut call: impl FnMut() -> (Option<SysResult>, bool)) -> Option<SysResult> {
    loop {
        let (result, restarts) = call();
        if result != Some(Err(RESTART)) {
            return result;
        }
        if !restarts {
            return Some(Err(Errno(libc::EINTR)));
        }
    }
}

/// The result, and whether an interrupted call begins again.
#[inline(always)]
fn at_point<T: Copy>(work: impl FnOnce() -> T) -> (T, bool) {
    if is_cancelled_outside() {
        cancellation::test();
    }
    interrupt::enter();
    let result = work();
    let restarts = if interrupt::leave() { deliver(true) } else { true };
    (result, restarts)
}

/// Same result as [`at_point`].
#[inline(always)]
fn at_no_point<T: Copy>(work: impl FnOnce() -> T) -> (T, bool) {
    // Calls of the library may be libc's cancellation points.
    let is_held = is_cancelled_outside() && cancellation::hold();
    interrupt::enter();
    let result = work();
    let any_deferred = interrupt::leave();
    if is_held {
        cancellation::release();
    }
    let restarts = if any_deferred { deliver(false) } else { true };
    (result, restarts)
}

#[inline(always)]
fn is_cancelled_outside() -> bool {
    interrupt::is_cancelled() && !interrupt::is_inside()
}

/// Delivers deferred signals and cancellations. `true`: an interrupted call begins again.
#[cold]
#[inline(never)]
fn deliver(is_point: bool) -> bool {
    let Deferred { signal, cancelled } = interrupt::take_deferred();
    let mut restarts = true;
    if let Some((signal, mask)) = signal {
        restarts = signals::restarts(signal);
        allow(signal, mask);
    }
    if cancelled {
        cancellation::act(is_point);
    }
    restarts
}

/// Sets the signal mask of the thread. Until then all signals are blocked. The handlers run before the
/// return.
fn allow(signal: c_int, mask: u64) {
    let own = 1u64 << (signal - 1);
    if mask & own != 0 {
        // The signal came in a call with a mask of its own.
        signals::set_mask(mask & !own);
    }
    signals::set_mask(mask);
}
