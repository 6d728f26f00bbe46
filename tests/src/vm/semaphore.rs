// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A fair semaphore: how many tests have guests at a time. Tests are served in the order of their
//! requests.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// Beds at a time, if `SMC_VM_BEDS` does not say otherwise. A guest keeps a processor busy, but most
/// tests wait for something most of the time.
const BEDS: usize = 2;
static GUESTS: Semaphore = Semaphore::new();

/// The right to have guests.
#[derive(Debug)]
pub(super) struct Permit {
    semaphore: &'static Semaphore,
    permits: usize,
}

impl Permit {
    /// Waits until there is room for one more bed.
    pub(super) fn shared() -> Permit {
        GUESTS.acquire(all(), 1)
    }

    /// Waits until no other test has guests.
    pub(super) fn exclusive() -> Permit {
        GUESTS.acquire(all(), all())
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.semaphore.release(self.permits);
    }
}

/// The number of permits.
fn all() -> usize {
    let wanted = std::env::var("SMC_VM_BEDS").ok();
    let beds = wanted.map_or(BEDS, |n| n.parse().expect("SMC_VM_BEDS is a number"));
    beds.max(1)
}

#[derive(Debug)]
struct Semaphore {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    acquired: usize,
    /// The ticket of the next test to ask.
    next: u64,
    /// The ticket of the first test in the queue. No test overtakes the first, so even a test in need
    /// of every permit gets its turn.
    first: u64,
}

impl Semaphore {
    const fn new() -> Semaphore {
        let state = State { acquired: 0, next: 0, first: 0 };
        Semaphore { state: Mutex::new(state), changed: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn acquire(&'static self, all: usize, permits: usize) -> Permit {
        let mut state = self.lock();
        let ticket = state.next;
        state.next += 1;
        let waits = |state: &mut State| state.first != ticket || state.acquired + permits > all;
        let mut state =
            self.changed.wait_while(state, waits).unwrap_or_else(PoisonError::into_inner);
        state.acquired += permits;
        state.first += 1;
        drop(state);
        self.changed.notify_all();
        Permit { semaphore: self, permits }
    }

    fn release(&self, permits: usize) {
        self.lock().acquired -= permits;
        self.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::thread;
    use std::time::Duration;

    #[test]
    fn no_more_permits_are_acquired_than_there_are() {
        static SEMAPHORE: Semaphore = Semaphore::new();
        static BUSY: AtomicUsize = AtomicUsize::new(0);
        thread::scope(|scope| {
            for n in 0..60 {
                scope.spawn(move || {
                    let (permits, most) = if n % 5 == 0 { (3, 1) } else { (1, 3) };
                    let permit = SEMAPHORE.acquire(3, permits);
                    let busy = BUSY.fetch_add(1, Ordering::SeqCst) + 1;
                    assert!(busy <= most, "{busy} at a time");
                    thread::sleep(Duration::from_millis(1));
                    BUSY.fetch_sub(1, Ordering::SeqCst);
                    drop(permit);
                });
            }
        });
        assert_eq!(SEMAPHORE.lock().acquired, 0);
    }

    #[test]
    fn a_later_test_does_not_overtake_one_that_needs_all_permits() {
        static SEMAPHORE: Semaphore = Semaphore::new();
        static ORDER: Mutex<Vec<&str>> = Mutex::new(Vec::new());
        let note = |who| ORDER.lock().unwrap_or_else(PoisonError::into_inner).push(who);
        let first = SEMAPHORE.acquire(2, 1);
        thread::scope(|scope| {
            scope.spawn(|| {
                let _permit = SEMAPHORE.acquire(2, 2);
                note("alone");
            });
            while SEMAPHORE.lock().next < 2 {
                thread::yield_now();
            }
            scope.spawn(|| {
                let _permit = SEMAPHORE.acquire(2, 1);
                note("later");
            });
            while SEMAPHORE.lock().next < 3 {
                thread::yield_now();
            }
            drop(first);
        });
        let order = ORDER.lock().unwrap_or_else(PoisonError::into_inner);
        assert_eq!(*order, ["alone", "later"]);
    }
}
