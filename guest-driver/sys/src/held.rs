// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Locks around a fork.
//!
//! The child of a fork has a copy of each lock as it was, and none of the threads that might release
//! it. So a process that hands its devices to a child holds the locks of their queues while it
//! forks, and the child checks that nobody has held any other lock.

use std::sync::{Mutex, MutexGuard, TryLockError};

/// A lock that is held, whatever it protects.
pub trait LockGuard {}

impl<T: ?Sized> LockGuard for MutexGuard<'_, T> {}

/// Locks that are held until the list is dropped.
pub type LockGuardList<'a> = Vec<Box<dyn LockGuard + 'a>>;

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
