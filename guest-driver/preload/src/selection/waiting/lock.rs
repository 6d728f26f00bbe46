// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The lock of the list of waiting handshakes, and their number without the lock.

use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicUsize, Ordering};

use super::{WAITING, WaitingList};
use crate::sys::fork_lock::ForkMutexGuard;

/// Number of handshakes in the list and in calls of the program, when the lock was last released.
static PENDING: AtomicUsize = AtomicUsize::new(0);

/// The locked list.
pub(super) struct ListGuard(ForkMutexGuard<'static, WaitingList>);

pub(super) fn lock_list() -> ListGuard {
    ListGuard(WAITING.lock())
}

/// The number of handshakes that wait for their peers. This takes no lock, because a signal handler may
/// interrupt the caller.
pub(in crate::selection) fn pending() -> usize {
    PENDING.load(Ordering::Relaxed)
}

impl Deref for ListGuard {
    type Target = WaitingList;

    fn deref(&self) -> &WaitingList {
        &self.0
    }
}

impl DerefMut for ListGuard {
    fn deref_mut(&mut self) -> &mut WaitingList {
        &mut self.0
    }
}

impl Drop for ListGuard {
    fn drop(&mut self) {
        PENDING.store(self.0.list.len() + self.0.places, Ordering::Relaxed);
    }
}
