// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Programs in a filter of system calls (seccomp), such as `SystemCallFilter=` of systemd. A call
//! made only by the library may end such a program. The library does nothing there.

use std::sync::atomic::{AtomicBool, Ordering};

use guest_driver::Fallback;

use crate::sys::fork_lock::ForkLock;
use crate::{config, fork, status, tcp_notes};

/// Whether this process, or its parent before the fork, has looked.
static LOOKED: AtomicBool = AtomicBool::new(false);
static LOOKING: ForkLock = ForkLock::new();

/// Looks for a filter before the first socket gets an entry.
#[inline]
pub(crate) fn look() {
    if !LOOKED.load(Ordering::Acquire) && !fork::shares_memory() {
        first_look();
    }
}

#[cold]
fn first_look() {
    // Other threads wait for the result.
    let _one_at_a_time = LOOKING.lock();
    if !LOOKED.load(Ordering::Relaxed) {
        forbid_devices();
        LOOKED.store(true, Ordering::Release);
    }
}

/// Whether a filter forbids devices. The program may have installed one since the last look.
#[cold]
pub(super) fn forbid_devices() -> bool {
    if config::get().is_none() {
        return true;
    }
    let Some(call) = ism_sys::forbidden_call() else { return false };
    status::stays_out(call);
    tcp_notes::note_all(Fallback::Filtered(call.into()), true);
    config::switch_off();
    true
}
