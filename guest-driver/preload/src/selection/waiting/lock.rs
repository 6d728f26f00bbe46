// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The lock of the list of waiting handshakes, and their number without the lock.

use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::sys::fork_lock::{ForkMutex, ForkMutexGuard};

/// Number of handshakes in the list and in calls of the program, when the lock was last released.
static PENDING: AtomicUsize = AtomicUsize::new(0);

/// A list of handshakes.
pub(super) trait Counted: Default {
    /// Number of handshakes in the list and in calls of the program.
    fn count(&self) -> usize;
}

/// The locked list.
pub(super) struct ListGuard<T: Counted + 'static>(ForkMutexGuard<'static, T>);

pub(super) fn lock<T: Counted>(list: &'static ForkMutex<T>) -> ListGuard<T> {
    ListGuard(list.lock())
}

/// The number of handshakes that wait for their peers. This takes no lock, because a signal handler may
/// interrupt the caller.
pub(in crate::selection) fn pending() -> usize {
    PENDING.load(Ordering::Relaxed)
}

impl<T: Counted> Deref for ListGuard<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}

impl<T: Counted> DerefMut for ListGuard<T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.0
    }
}

impl<T: Counted> Drop for ListGuard<T> {
    fn drop(&mut self) {
        PENDING.store(self.0.count(), Ordering::Relaxed);
    }
}
