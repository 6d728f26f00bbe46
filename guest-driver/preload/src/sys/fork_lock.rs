//! A lock that a process may hold while it forks.
//!
//! The child of a fork has a copy of the lock as it was, and none of the threads that might release
//! it. So the thread that forks takes the lock before, and both processes release it after.

use std::sync::atomic::{AtomicU32, Ordering};

use rustix::thread::futex;

const FREE: u32 = 0;
const HELD: u32 = 1;
/// Held, and other threads wait.
const CONTENDED: u32 = 2;

/// A lock without a value.
#[derive(Debug)]
pub(crate) struct ForkLock(AtomicU32);

/// Releases the lock when it is dropped.
#[derive(Debug)]
pub(crate) struct ForkLockGuard(&'static ForkLock);

impl ForkLock {
    /// A free lock.
    pub(crate) const fn new() -> ForkLock {
        ForkLock(AtomicU32::new(FREE))
    }

    /// Takes the lock; waits for it if another thread has it.
    pub(crate) fn lock(&'static self) -> ForkLockGuard {
        self.acquire();
        ForkLockGuard(self)
    }

    /// Takes the lock before a fork. [`ForkLock::release_after_fork`] follows in both processes.
    pub(crate) fn acquire_before_fork(&self) {
        self.acquire();
    }

    /// Releases the lock after a fork, in the parent or the child.
    pub(crate) fn release_after_fork(&self) {
        self.release();
    }

    fn acquire(&self) {
        let swapped =
            self.0.compare_exchange(FREE, HELD, Ordering::Acquire, Ordering::Relaxed).is_ok();
        if swapped {
            return;
        }
        while self.0.swap(CONTENDED, Ordering::Acquire) != FREE {
            // Whatever ends the sleep, the loop looks again.
            let _ = futex::wait(&self.0, futex::Flags::PRIVATE, CONTENDED, None);
        }
    }

    fn release(&self) {
        if self.0.swap(FREE, Ordering::Release) == CONTENDED {
            let _ = futex::wake(&self.0, futex::Flags::PRIVATE, 1);
        }
    }
}

impl Drop for ForkLockGuard {
    fn drop(&mut self) {
        self.0.release();
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
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..10_000 {
                        let _held = LOCK.lock();
                        // Two steps: another thread between them would lose an increment.
                        let now = COUNT.load(Ordering::Relaxed);
                        COUNT.store(now + 1, Ordering::Relaxed);
                    }
                });
            }
        });
        assert_eq!(COUNT.load(Ordering::Relaxed), 40_000);
    }
}
