// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A value set once, without a lock.
//!
//! With `std::sync::OnceLock` one thread makes the value, and the others wait for this thread. The child of
//! a fork has the state and not the thread, so the child would wait for ever; and so would a signal handler
//! interrupting the thread. Here each thread makes a value of its own, and the first stored value stays.

use std::cell::Cell;
use std::fmt;
use std::marker::PhantomData;
use std::ptr;

#[cfg(not(loom))]
use std::sync::atomic::{AtomicPtr, Ordering};

#[cfg(loom)]
use loom::sync::atomic::{AtomicPtr, Ordering};

/// A value set once. No call waits for another thread.
pub struct OnceBox<T> {
    /// Null, or from `Box::into_raw`.
    at: AtomicPtr<T>,
    /// Owns the value. `Cell`: the impl below decides about sharing between threads.
    owns: PhantomData<Cell<Box<T>>>,
}

// SAFETY: a shared reference gives references to the value, and takes a value over from any thread.
unsafe impl<T: Send + Sync> Sync for OnceBox<T> {}

impl<T> OnceBox<T> {
    /// Without a value.
    #[cfg(not(loom))]
    pub const fn new() -> OnceBox<T> {
        OnceBox { at: AtomicPtr::new(ptr::null_mut()), owns: PhantomData }
    }

    /// Without a value.
    #[cfg(loom)]
    pub fn new() -> OnceBox<T> {
        OnceBox { at: AtomicPtr::new(ptr::null_mut()), owns: PhantomData }
    }

    /// The value, if there is one.
    #[inline]
    pub fn get(&self) -> Option<&T> {
        // Acquire: partner of the Release in `offer`.
        let at = self.at.load(Ordering::Acquire);
        // SAFETY: a stored value stays until `take` or drop, with their exclusive borrow.
        unsafe { at.as_ref() }
    }

    /// Sets the value.
    ///
    /// # Errors
    /// There is a value already; the argument comes back.
    pub fn set(&self, value: T) -> Result<(), T> {
        self.offer(value).map(|_| ()).map_err(|(_, value)| value)
    }

    /// The value, made by `make` if there is none. Several threads may make one at the same time; the first
    /// stored value stays, and the others are dropped.
    #[inline]
    pub fn get_or_init(&self, make: impl FnOnce() -> T) -> &T {
        match self.get() {
            Some(value) => value,
            None => self.init(make),
        }
    }

    #[cold]
    fn init(&self, make: impl FnOnce() -> T) -> &T {
        may_delay();
        let made = make();
        may_delay();
        match self.offer(made) {
            Ok(value) => value,
            Err((value, _)) => value,
        }
    }

    /// Stores a value if there is none, and returns the value. Otherwise returns the stored value, and the
    /// argument.
    fn offer(&self, value: T) -> Result<&T, (&T, T)> {
        let new = Box::into_raw(Box::new(value));
        // AcqRel and Acquire: partners of each other, and of the Acquire in `get`.
        let before =
            self.at.compare_exchange(ptr::null_mut(), new, Ordering::AcqRel, Ordering::Acquire);
        // SAFETY: a stored value stays, as in `get`; an unstored value is this call's alone.
        unsafe {
            match before {
                Ok(_) => Ok(&*new),
                Err(stored) => Err((&*stored, *Box::from_raw(new))),
            }
        }
    }

    /// Takes the value out.
    pub fn take(&mut self) -> Option<T> {
        // Relaxed: no other thread has a reference to `self`.
        let at = self.at.swap(ptr::null_mut(), Ordering::Relaxed);
        // SAFETY: from `Box::into_raw`, and no longer stored.
        (!at.is_null()).then(|| unsafe { *Box::from_raw(at) })
    }
}

impl<T> Drop for OnceBox<T> {
    fn drop(&mut self) {
        drop(self.take());
    }
}

impl<T> Default for OnceBox<T> {
    fn default() -> OnceBox<T> {
        OnceBox::new()
    }
}

impl<T: fmt::Debug> fmt::Debug for OnceBox<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("OnceBox").field(&self.get()).finish()
    }
}

#[cfg(not(loom))]
use super::may_delay;

#[cfg(loom)]
fn may_delay() {}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::sync::atomic::AtomicUsize;
    use std::sync::mpsc;
    use std::sync::{Arc, Barrier};

    use super::*;

    #[test]
    fn the_first_value_stays() {
        let mut once = OnceBox::new();
        assert_eq!(once.get(), None);
        assert_eq!(once.set("first".to_owned()), Ok(()));
        assert_eq!(once.set("second".to_owned()), Err("second".to_owned()));
        assert_eq!(once.get_or_init(|| "third".to_owned()), "first");
        assert_eq!(format!("{once:?}"), "OnceBox(Some(\"first\"))");
        assert_eq!(once.take().as_deref(), Some("first"));
        assert_eq!(once.get_or_init(|| "fourth".to_owned()), "fourth");
    }

    #[test]
    fn each_value_is_dropped_once_and_all_threads_have_the_same() {
        static MADE: AtomicUsize = AtomicUsize::new(0);
        static DROPPED: AtomicUsize = AtomicUsize::new(0);
        struct Counted(usize);
        impl Drop for Counted {
            fn drop(&mut self) {
                DROPPED.fetch_add(1, Ordering::Relaxed);
            }
        }
        let (once, start) = (Arc::new(OnceBox::new()), Arc::new(Barrier::new(4)));
        let threads: Vec<_> = (0..4)
            .map(|_| {
                let (once, start) = (once.clone(), start.clone());
                std::thread::spawn(move || {
                    start.wait();
                    once.get_or_init(|| Counted(MADE.fetch_add(1, Ordering::Relaxed))).0
                })
            })
            .collect();
        let seen: Vec<_> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
        assert!(seen.iter().all(|one| *one == seen[0]), "{seen:?}");
        let made = MADE.load(Ordering::Relaxed);
        assert_eq!(DROPPED.load(Ordering::Relaxed), made - 1);
        drop(once);
        assert_eq!(DROPPED.load(Ordering::Relaxed), made);
    }

    /// Unlike `OnceLock`.
    #[test]
    fn a_call_inside_the_making_of_the_value_waits_for_nobody() {
        let once = OnceBox::new();
        let outer = once.get_or_init(|| 1 + once.get_or_init(|| 1));
        assert_eq!(*outer, 1);
    }

    #[test]
    fn the_child_of_a_fork_waits_for_no_thread_that_it_does_not_have() {
        static ONCE: OnceBox<u32> = OnceBox::new();
        let (begun, is_begun) = mpsc::channel();
        let (end, ended) = mpsc::channel::<()>();
        let maker = std::thread::spawn(move || {
            *ONCE.get_or_init(|| {
                begun.send(()).unwrap();
                // Until the process has forked.
                ended.recv().unwrap_or_default();
                7
            })
        });
        is_begun.recv().unwrap();
        // SAFETY: the child calls no function with a lock of another thread: the value is in the child's
        // memory from a word of the parent.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: a wait for another thread ends by the signal, and the process by a number.
            unsafe {
                libc::alarm(20);
                libc::_exit(i32::from(*ONCE.get_or_init(|| 8) != 8));
            }
        }
        let mut status = 0;
        // SAFETY: the status is a word of this function.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0, "the child has made a value of its own");
        drop(end);
        assert_eq!(maker.join().unwrap(), 7);
    }
}

/// `RUSTFLAGS="--cfg loom" cargo test --manifest-path tests/loom/Cargo.toml --release`
#[cfg(all(test, loom))]
mod loom_tests {
    use loom::cell::UnsafeCell;
    use loom::sync::Arc;
    use loom::thread;

    use super::*;

    /// Memory watched by loom: an owner of the value sees the writes of the value's maker.
    struct Watched(UnsafeCell<usize>);

    // SAFETY: written before the store, and read only after; loom checks this.
    unsafe impl Sync for Watched {}

    fn made(value: usize) -> Watched {
        let cell = UnsafeCell::new(0);
        // SAFETY: the cell is unknown to other threads.
        cell.with_mut(|at| unsafe { *at = value });
        Watched(cell)
    }

    impl Watched {
        fn value(&self) -> usize {
            // SAFETY: nothing is written after the store.
            self.0.with(|at| unsafe { *at })
        }
    }

    #[test]
    fn all_threads_have_the_value_that_was_stored_first() {
        loom::model(|| {
            let once = Arc::new(OnceBox::new());
            let others = [1, 2].map(|value| {
                let once = once.clone();
                thread::spawn(move || once.get_or_init(|| made(value)).value())
            });
            let early = once.get().map(Watched::value);
            let [one, two] = others.map(|other| other.join().unwrap());
            assert_eq!(one, two);
            assert!(early.is_none_or(|early| early == one));
        });
    }

    #[test]
    fn one_of_two_threads_sets_the_value() {
        loom::model(|| {
            let once = Arc::new(OnceBox::new());
            let other = {
                let once = once.clone();
                thread::spawn(move || once.set(made(1)).is_ok())
            };
            let own = once.set(made(2)).is_ok();
            let theirs = other.join().unwrap();
            assert!(own != theirs);
            assert_eq!(once.get().map(Watched::value), Some(if own { 2 } else { 1 }));
        });
    }
}
