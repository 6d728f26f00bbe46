// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The background thread's work, and its wake-ups.
//!
//! Two words. `pending` has one bit for each kind of [`Work`] to be done. `wake_mask` has the kinds for
//! which to wake the thread; the mask is empty while the thread runs.
//!
//! A poster of work sets its bit and then reads the mask. Before the thread sleeps, it stores the mask
//! and then reads the bits. These four accesses are sequentially consistent, so either the thread sees
//! the work before it sleeps, or the poster sees the mask and wakes the thread. The same holds for a
//! condition in another word, changed before [`PendingWork::wakes`] and checked by the thread after
//! [`PendingWork::prepare_sleep`]. `loom_tests` check this.

#[cfg(not(loom))]
use std::sync::atomic::{AtomicU32, Ordering};

#[cfg(loom)]
use loom::sync::atomic::{AtomicU32, Ordering, fence};

use bitflags::bitflags;

bitflags! {
    /// Kinds of work of the background thread.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub(super) struct Work: u32 {
        /// To end.
        const STOP = 1;
        /// The maintenance of the source.
        const MAINTENANCE = 1 << 1;
        /// To ask the source for its next timer.
        const TIMERS = 1 << 2;
        /// Connections have delayed updates not yet seen by the thread.
        const UPDATES = 1 << 3;
        /// A caller asks for the lead.
        const LEAD_WANTED = 1 << 4;
        /// No caller leads any more.
        const LEAD_FREE = 1 << 5;
        /// There may be more to watch for than before: peers, sleepers, descriptors of the kernel.
        const WATCH = 1 << 6;
    }
}

/// The work of one background thread.
#[derive(Debug)]
pub(super) struct PendingWork {
    /// SeqCst: the poster sets a bit, then reads `wake_mask`.
    pending: AtomicU32,
    /// SeqCst: the thread stores the mask, then reads `pending`, or the lead.
    wake_mask: AtomicU32,
}

/// The background thread sleeps, or is about to. After the drop no poster wakes the thread any more.
pub(super) struct WakeMask<'a>(&'a PendingWork);

impl PendingWork {
    /// A new record with this work pending.
    pub(super) fn new(work: Work) -> PendingWork {
        let (pending, wake_mask) = (AtomicU32::new(work.bits()), AtomicU32::new(0));
        PendingWork { pending, wake_mask }
    }

    /// Forgets the thread and its pending work, and begins with this work.
    pub(super) fn reset(&self, work: Work) {
        self.wake_mask.store(0, Ordering::SeqCst);
        self.pending.store(work.bits(), Ordering::SeqCst);
    }

    /// Adds work. `true`: the caller must wake the thread.
    #[must_use = "true means: wake the thread"]
    pub(super) fn post(&self, work: Work) -> bool {
        self.pending.fetch_or(work.bits(), Ordering::SeqCst);
        self.wakes(work)
    }

    /// Whether the caller must wake the thread, asleep with interest in this work. The caller has
    /// changed a condition checked by the thread after [`PendingWork::prepare_sleep`]. Only one caller
    /// gets `true` for each sleep.
    #[must_use = "true means: wake the thread"]
    pub(super) fn wakes(&self, work: Work) -> bool {
        in_loom();
        // The removed mask may belong to a later sleep than the mask read. The thread is then woken for
        // any work, since the mask is gone.
        self.wake_mask.load(Ordering::SeqCst) & work.bits() != 0
            && self.wake_mask.swap(0, Ordering::SeqCst) != 0
    }

    /// Whether the thread sleeps and wants to be woken for this.
    #[cfg(test)]
    pub(super) fn would_wake(&self, work: Work) -> bool {
        self.wake_mask.load(Ordering::SeqCst) & work.bits() != 0
    }

    /// Whether any of this work is to be done.
    pub(super) fn is_pending(&self, work: Work) -> bool {
        self.pending.load(Ordering::SeqCst) & work.bits() != 0
    }

    /// Takes this work over. `true`: some of it is to be done.
    pub(super) fn take(&self, work: Work) -> bool {
        // Mostly no such work is pending, and a load is cheap.
        self.is_pending(work)
            && self.pending.fetch_and(!work.bits(), Ordering::SeqCst) & work.bits() != 0
    }

    /// Has posters wake the thread for this work until the result is dropped. The thread checks
    /// [`PendingWork::is_pending`] before it sleeps.
    pub(super) fn prepare_sleep(&self, wanted: Work) -> WakeMask<'_> {
        // A swap, as in every change of the mask: loom does not order a store after the swap it
        // overwrites.
        self.wake_mask.swap(wanted.bits(), Ordering::SeqCst);
        in_loom();
        WakeMask(self)
    }
}

/// loom takes SeqCst for AcqRel, except in fences. So there, fences stand between a thread's store
/// to one word and its load of the other.
fn in_loom() {
    #[cfg(loom)]
    fence(Ordering::SeqCst);
}

impl Drop for WakeMask<'_> {
    fn drop(&mut self) {
        self.0.wake_mask.swap(0, Ordering::SeqCst);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn work_is_pending_until_it_is_taken() {
        let work = PendingWork::new(Work::MAINTENANCE);
        assert!(work.take(Work::MAINTENANCE | Work::TIMERS));
        assert!(!work.take(Work::MAINTENANCE));
        assert!(!work.post(Work::TIMERS), "the thread runs");
        assert!(work.is_pending(Work::TIMERS) && !work.is_pending(Work::UPDATES));
        assert!(!work.take(Work::UPDATES) && work.take(Work::TIMERS));
        let _ = work.post(Work::STOP);
        work.reset(Work::TIMERS);
        assert!(!work.is_pending(Work::STOP) && work.is_pending(Work::TIMERS));
    }

    #[test]
    fn one_poster_wakes_the_thread_and_only_for_what_it_wants() {
        let work = PendingWork::new(Work::empty());
        let asleep = work.prepare_sleep(Work::STOP | Work::TIMERS);
        assert!(!work.post(Work::UPDATES));
        assert!(work.post(Work::TIMERS));
        assert!(!work.post(Work::STOP), "it is being woken");
        drop(asleep);
        let asleep = work.prepare_sleep(Work::LEAD_FREE);
        assert!(!work.wakes(Work::STOP) && work.wakes(Work::LEAD_FREE));
        drop(asleep);
        assert!(!work.wakes(Work::LEAD_FREE));
    }
}

/// `RUSTFLAGS="--cfg loom" cargo test --manifest-path tests/loom/Cargo.toml --release`
#[cfg(all(test, loom))]
mod loom_tests {
    use loom::sync::{Arc, Condvar, Mutex};
    use loom::thread;

    use super::*;

    /// The state shared by the threads. `woken` stands for the count on which the thread sleeps.
    struct Shared {
        work: PendingWork,
        led: AtomicU32,
        woken: Mutex<u32>,
        changed: Condvar,
    }

    impl Shared {
        fn new() -> Arc<Shared> {
            Arc::new(Shared {
                work: PendingWork::new(Work::empty()),
                led: AtomicU32::new(1),
                woken: Mutex::new(0),
                changed: Condvar::new(),
            })
        }

        fn wake(&self) {
            *self.woken.lock().unwrap() += 1;
            self.changed.notify_one();
        }

        fn post(&self, work: Work) {
            if self.work.post(work) {
                self.wake();
            }
        }

        /// Sleeps like the background thread: until woken, without a time limit.
        fn sleep(&self, before: u32, wanted: Work, stay: impl Fn() -> bool) {
            let _asleep = self.work.prepare_sleep(wanted);
            if self.work.is_pending(wanted) || !stay() {
                return;
            }
            let mut woken = self.woken.lock().unwrap();
            while *woken == before {
                woken = self.changed.wait(woken).unwrap();
            }
        }
    }

    #[test]
    fn no_work_is_overlooked() {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(3);
        model.check(|| {
            let shared = Shared::new();
            let posters = [Work::TIMERS, Work::UPDATES].map(|work| {
                let shared = shared.clone();
                thread::spawn(move || shared.post(work))
            });
            let mut done = Work::empty();
            // A sleep with fewer wishes comes first: it must not remove the mask of the next one.
            for wanted in [Work::TIMERS, Work::UPDATES] {
                while !done.contains(wanted) {
                    let before = *shared.woken.lock().unwrap();
                    for work in [Work::TIMERS, Work::UPDATES] {
                        if shared.work.take(work) {
                            done |= work;
                        }
                    }
                    if !done.contains(wanted) {
                        shared.sleep(before, wanted, || true);
                    }
                }
            }
            for poster in posters {
                poster.join().unwrap();
            }
        });
    }

    #[test]
    fn a_leader_that_stops_is_noticed() {
        loom::model(|| {
            let shared = Shared::new();
            let leader = {
                let shared = shared.clone();
                thread::spawn(move || {
                    shared.led.store(0, Ordering::SeqCst);
                    if shared.work.wakes(Work::LEAD_FREE) {
                        shared.wake();
                    }
                })
            };
            let led = || shared.led.load(Ordering::SeqCst) == 1;
            while led() {
                let before = *shared.woken.lock().unwrap();
                shared.sleep(before, Work::LEAD_FREE, led);
            }
            leader.join().unwrap();
        });
    }
}
