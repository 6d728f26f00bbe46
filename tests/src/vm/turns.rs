//! Who may have guests: a few tests at a time, in the order in which they asked.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// Beds at a time, if `SMC_VM_BEDS` does not say otherwise. A guest keeps a processor busy, but most
/// tests wait for something most of the time.
const BEDS: usize = 2;
/// What a bed takes of the place that there is. Those that wait more than others take less, so that
/// three of them are where two others would be.
const PLACES: usize = 3;
const PLACES_OF_PATIENT: usize = 2;

static TURNS: Turns = Turns::new();

/// The right to have guests.
#[derive(Debug)]
pub(super) struct Turn {
    turns: &'static Turns,
    places: usize,
}

impl Turn {
    /// Waits for a place among others.
    pub(super) fn among_others() -> Turn {
        TURNS.take(all(), PLACES)
    }

    /// As [`Turn::among_others`] for one that mostly waits.
    pub(super) fn patient() -> Turn {
        TURNS.take(all(), PLACES_OF_PATIENT)
    }

    /// Waits until nobody else has guests.
    pub(super) fn alone() -> Turn {
        TURNS.take(all(), all())
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.turns.give_back(self.places);
    }
}

/// The place that there is.
fn all() -> usize {
    let wanted = std::env::var("SMC_VM_BEDS").ok();
    let beds = wanted.map_or(BEDS, |n| n.parse().expect("SMC_VM_BEDS is a number"));
    PLACES * beds.max(1)
}

#[derive(Debug)]
struct Turns {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    taken: usize,
    /// The ticket for who comes next.
    next: u64,
    /// The ticket of who is first in the queue: who wants all places gets them in the end.
    first: u64,
}

impl Turns {
    const fn new() -> Turns {
        let state = State { taken: 0, next: 0, first: 0 };
        Turns { state: Mutex::new(state), changed: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take(&'static self, all: usize, places: usize) -> Turn {
        let mut state = self.lock();
        let ticket = state.next;
        state.next += 1;
        let waits = |state: &mut State| state.first != ticket || state.taken + places > all;
        let mut state =
            self.changed.wait_while(state, waits).unwrap_or_else(PoisonError::into_inner);
        state.taken += places;
        state.first += 1;
        drop(state);
        self.changed.notify_all();
        Turn { turns: self, places }
    }

    fn give_back(&self, places: usize) {
        self.lock().taken -= places;
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
    fn so_many_at_a_time_and_who_wants_to_be_alone_is() {
        static TURNS: Turns = Turns::new();
        static BUSY: AtomicUsize = AtomicUsize::new(0);
        thread::scope(|scope| {
            for n in 0..60 {
                scope.spawn(move || {
                    let (places, most) = if n % 5 == 0 { (3, 1) } else { (1, 3) };
                    let turn = TURNS.take(3, places);
                    let busy = BUSY.fetch_add(1, Ordering::SeqCst) + 1;
                    assert!(busy <= most, "{busy} at a time");
                    thread::sleep(Duration::from_millis(1));
                    BUSY.fetch_sub(1, Ordering::SeqCst);
                    drop(turn);
                });
            }
        });
        assert_eq!(TURNS.lock().taken, 0);
    }

    #[test]
    fn who_came_later_does_not_overtake_one_who_wants_to_be_alone() {
        static TURNS: Turns = Turns::new();
        static ORDER: Mutex<Vec<&str>> = Mutex::new(Vec::new());
        let note = |who| ORDER.lock().unwrap_or_else(PoisonError::into_inner).push(who);
        let first = TURNS.take(2, 1);
        thread::scope(|scope| {
            scope.spawn(|| {
                let _turn = TURNS.take(2, 2);
                note("alone");
            });
            while TURNS.lock().next < 2 {
                thread::yield_now();
            }
            scope.spawn(|| {
                let _turn = TURNS.take(2, 1);
                note("later");
            });
            while TURNS.lock().next < 3 {
                thread::yield_now();
            }
            drop(first);
        });
        let order = ORDER.lock().unwrap_or_else(PoisonError::into_inner);
        assert_eq!(*order, ["alone", "later"]);
    }
}
