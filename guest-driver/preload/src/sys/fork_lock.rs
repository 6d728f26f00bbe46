// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Locks for a process that forks while one of its threads holds them.
//!
//! The child of a fork has a copy of each lock's state, and none of the threads to release the lock.
//! There are two ways out. Either the forking thread takes the lock before the fork, and both processes
//! release the lock afterwards ([`ForkLock::acquire_before_fork`]). Or the child takes the lock away
//! from a missing thread: the lock's word names the process of the owner. The protected value may be
//! half changed then, so the child begins with an empty value.

use std::cell::UnsafeCell;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use rustix::thread::futex;

const FREE: u32 = 0;
const HELD: u32 = 1;
/// Held, and other threads wait.
const CONTENDED: u32 = 2;
/// The bits of a word with the process of the owner.
const PROCESS: u32 = !3;

/// Number of the process among its ancestors, in the locks' words, times four.
static OWN: AtomicU32 = AtomicU32::new(4);

/// Pause between two checks of a lock.
const PAUSE: Duration = Duration::from_micros(100);

/// Lets this child of a fork take away locks held at the time of the fork.
pub(crate) fn in_child() {
    OWN.store(OWN.load(Ordering::Relaxed).wrapping_add(4), Ordering::Relaxed);
}

/// A number of this process, different from each ancestor's.
pub(crate) fn process() -> u32 {
    OWN.load(Ordering::Relaxed)
}

/// The word of a lock.
#[derive(Debug)]
struct Word(AtomicU32);

impl Word {
    const fn new() -> Word {
        Word(AtomicU32::new(FREE))
    }

    /// Takes the lock; waits while another thread has the lock. `true`: taken away from a thread of a
    /// parent.
    #[inline]
    fn acquire(&self) -> bool {
        let own = OWN.load(Ordering::Relaxed);
        let taken = self.0.compare_exchange(FREE, own | HELD, Ordering::Acquire, Ordering::Relaxed);
        taken.is_err() && self.acquire_slowly(own)
    }

    #[cold]
    fn acquire_slowly(&self, own: u32) -> bool {
        let ours = own | CONTENDED;
        loop {
            let now = self.0.load(Ordering::Relaxed);
            let is_foreign = now != FREE && now & PROCESS != own;
            if now == FREE || is_foreign {
                let taken =
                    self.0.compare_exchange(now, ours, Ordering::Acquire, Ordering::Relaxed);
                if taken.is_ok() {
                    return is_foreign;
                }
                continue;
            }
            let marked = now == ours
                || self.0.compare_exchange(now, ours, Ordering::Relaxed, Ordering::Relaxed).is_ok();
            if marked {
                // After any end of the sleep, the loop checks again.
                let _ = futex::wait(&self.0, futex::Flags::PRIVATE, ours, None);
            }
        }
    }

    /// Waits until the lock is free, at most for `limit`. `false`: the lock is still held.
    fn comes_free(&self, limit: Duration) -> bool {
        let begun = Instant::now();
        while self.0.load(Ordering::Relaxed) & !PROCESS != FREE {
            if begun.elapsed() >= limit {
                return false;
            }
            std::thread::sleep(PAUSE);
        }
        true
    }

    fn release(&self) {
        if self.0.swap(FREE, Ordering::Release) & !PROCESS == CONTENDED {
            let _ = futex::wake(&self.0, futex::Flags::PRIVATE, 1);
        }
    }
}

/// A lock without a value.
#[derive(Debug)]
pub(crate) struct ForkLock(Word);

/// Releases the lock when it is dropped.
#[derive(Debug)]
pub(crate) struct ForkLockGuard(&'static ForkLock);

impl ForkLock {
    /// A free lock.
    pub(crate) const fn new() -> ForkLock {
        ForkLock(Word::new())
    }

    /// Takes the lock; waits while another thread has the lock.
    pub(crate) fn lock(&'static self) -> ForkLockGuard {
        self.lock_or_take().0
    }

    /// Variant of [`ForkLock::lock`]. `true`: a thread of the parent had the lock at the fork, and the
    /// protected data may be half changed.
    pub(crate) fn lock_or_take(&'static self) -> (ForkLockGuard, bool) {
        let taken_away = self.0.acquire();
        (ForkLockGuard(self), taken_away)
    }

    /// Whether the lock is free, or comes free within `limit`. A signal handler interrupting the lock's
    /// owner would wait for ever.
    pub(crate) fn comes_free(&self, limit: Duration) -> bool {
        self.0.comes_free(limit)
    }

    /// Takes the lock before a fork. [`ForkLock::release_after_fork`] follows in both processes.
    pub(crate) fn acquire_before_fork(&self) {
        self.0.acquire();
    }

    /// Releases the lock after a fork, in the parent or the child.
    pub(crate) fn release_after_fork(&self) {
        self.0.release();
    }
}

impl Drop for ForkLockGuard {
    fn drop(&mut self) {
        self.0.0.release();
    }
}

/// A mutex for a process that may fork in another thread while the lock is held.
#[derive(Debug)]
pub(crate) struct ForkMutex<T> {
    word: Word,
    value: UnsafeCell<T>,
}

// SAFETY: only the thread that has the lock reaches the value.
unsafe impl<T: Send> Sync for ForkMutex<T> {}

/// Access to the value of a [`ForkMutex`]; releases the lock when dropped.
#[derive(Debug)]
pub(crate) struct ForkMutexGuard<'a, T>(&'a ForkMutex<T>);

impl<T: Default> Default for ForkMutex<T> {
    fn default() -> ForkMutex<T> {
        ForkMutex::new(T::default())
    }
}

impl<T: Default> ForkMutex<T> {
    /// A free mutex.
    pub(crate) const fn new(value: T) -> ForkMutex<T> {
        ForkMutex { word: Word::new(), value: UnsafeCell::new(value) }
    }

    /// Takes the lock; waits while another thread has the lock. A lock held by the parent at the fork
    /// has the default value.
    #[inline]
    pub(crate) fn lock(&self) -> ForkMutexGuard<'_, T> {
        if self.word.acquire() {
            // SAFETY: this thread has the lock. The old value may be half changed, so the value is not
            // dropped.
            unsafe { self.value.get().write(T::default()) };
        }
        ForkMutexGuard(self)
    }

    /// Same meaning as [`ForkLock::comes_free`].
    pub(crate) fn comes_free(&self, limit: Duration) -> bool {
        self.word.comes_free(limit)
    }

    /// Takes the lock before a fork. [`ForkMutex::release_after_fork`] follows in both processes.
    pub(crate) fn acquire_before_fork(&self) {
        std::mem::forget(self.lock());
    }

    /// Releases the lock after a fork, in the parent or the child.
    pub(crate) fn release_after_fork(&self) {
        self.word.release();
    }
}

impl<T> Deref for ForkMutexGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: this thread has the lock.
        unsafe { &*self.0.value.get() }
    }
}

impl<T> DerefMut for ForkMutexGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: this thread has the lock, and borrows the guard.
        unsafe { &mut *self.0.value.get() }
    }
}

impl<T> Drop for ForkMutexGuard<'_, T> {
    fn drop(&mut self) {
        self.0.word.release();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicUsize;

    #[test]
    fn one_thread_at_a_time_holds_it() {
        static LOCK: ForkLock = ForkLock::new();
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        static MUTEX: ForkMutex<usize> = ForkMutex::new(0);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..10_000 {
                        let _held = LOCK.lock();
                        // Two steps: another thread between them would lose an increment.
                        let now = COUNT.load(Ordering::Relaxed);
                        COUNT.store(now + 1, Ordering::Relaxed);
                        drop(_held);
                        *MUTEX.lock() += 1;
                    }
                });
            }
        });
        assert_eq!(COUNT.load(Ordering::Relaxed), 40_000);
        assert_eq!(*MUTEX.lock(), 40_000);
    }

    #[test]
    fn a_lock_of_a_thread_that_the_child_does_not_have_is_taken_away() {
        let mutex = ForkMutex::new(vec![1, 2, 3]);
        assert_eq!(*mutex.lock(), [1, 2, 3]);
        // A state left by another process.
        mutex.word.0.store((OWN.load(Ordering::Relaxed) + 400) | CONTENDED, Ordering::Relaxed);
        assert!(mutex.lock().is_empty());
        mutex.lock().push(7);
        assert_eq!(*mutex.lock(), [7]);
    }
}
