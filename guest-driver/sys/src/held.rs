// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Locks around a fork.
//!
//! The child of a fork has a copy of each lock's state, and none of the threads to release the lock. So a
//! process about to hand its devices to a child holds the locks of their queues during the fork, and the
//! child checks every other lock for a holder.

use std::os::fd::RawFd;
use std::sync::{Mutex, MutexGuard, TryLockError};

/// A held lock with any value.
pub trait LockGuard {}

impl<T: ?Sized> LockGuard for MutexGuard<'_, T> {}

/// Locks held until the list is dropped.
pub type LockGuardList<'a> = Vec<Box<dyn LockGuard + 'a>>;

/// An owner of locks, in a process that may hand the owner to the child of a fork. Each lock of the owner
/// is in one of the first two methods.
pub trait ForkLocks {
    /// Holds the locks needed by any thread to use the owner. `false`: a thread has one of the locks, or no
    /// child can take the owner over.
    #[must_use = "false means: the owner is in use"]
    fn try_hold<'a>(&'a self, held: &mut LockGuardList<'a>) -> bool {
        let _ = held;
        true
    }

    /// Whether the owner's other locks, outside of [`ForkLocks::try_hold`], are free. In the child the
    /// answer tells whether the parent's threads have left all of them in order.
    fn is_unlocked(&self) -> bool;

    /// Forgets the threads of the parent, in the child.
    fn forget_threads(&self) {}

    /// The descriptors for the child.
    fn descriptors(&self) -> Vec<RawFd> {
        Vec::new()
    }
}

/// Takes a lock if it is free, and adds it to the list. `false`: another thread has it.
#[must_use = "false means: another thread has the lock"]
pub fn try_hold<'a, T: ?Sized + 'a>(mutex: &'a Mutex<T>, held: &mut LockGuardList<'a>) -> bool {
    match mutex.try_lock() {
        Ok(guard) => held.push(Box::new(guard)),
        Err(TryLockError::Poisoned(error)) => held.push(Box::new(error.into_inner())),
        Err(TryLockError::WouldBlock) => return false,
    }
    true
}

/// Whether no thread holds a lock.
pub fn is_free<T: ?Sized>(mutex: &Mutex<T>) -> bool {
    !matches!(mutex.try_lock(), Err(TryLockError::WouldBlock))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_holds_its_locks_until_it_is_dropped() {
        let (a, b) = (Mutex::new(1), Mutex::new("two"));
        let mut held = LockGuardList::new();
        assert!(try_hold(&a, &mut held) && try_hold(&b, &mut held));
        assert!(!is_free(&a) && !is_free(&b));
        assert!(!try_hold(&a, &mut held));
        drop(held);
        assert!(is_free(&a) && is_free(&b));
    }
}
