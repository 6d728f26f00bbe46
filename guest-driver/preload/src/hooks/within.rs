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
    enter();
    let result = work();
    if interrupt::leave() {
        deliver();
    }
    result
}

/// Variant of [`cancellable`] for an interruptible call. After a handler with SA_RESTART the call
/// begins again.
#[inline(always)]
pub(super) fn restartable(mut work: impl FnMut() -> Option<SysResult>) -> Option<SysResult> {
    loop {
        enter();
        let result = work();
        let restarts = if interrupt::leave() { deliver() } else { true };
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
fn enter() {
    if interrupt::is_cancelled() && !interrupt::is_inside() {
        cancellation::test();
    }
    interrupt::enter();
}

/// Delivers deferred signals and cancellations. `true`: an interrupted call begins again.
#[cold]
#[inline(never)]
fn deliver() -> bool {
    let Deferred { signal, cancelled } = interrupt::take_deferred();
    let mut restarts = true;
    if let Some((signal, mask)) = signal {
        restarts = signals::restarts(signal);
        allow(signal, mask);
    }
    if cancelled {
        cancellation::act();
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
