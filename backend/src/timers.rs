//! Deadlines: one thread that sleeps until the nearest, made when the first is set.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread;
use std::time::Instant;

use crate::device::sync::lock;

/// Something that wants to be called at a time.
pub(crate) trait Timed: Send + Sync {
    /// The time has come, or had come before and is over: look what is due. Must not block.
    fn expired(&self);
}

/// The deadlines of a daemon.
#[derive(Clone, Default)]
pub(crate) struct Timers {
    inner: Arc<Inner>,
}

#[derive(Default)]
struct Inner {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    entries: BinaryHeap<Reverse<Entry>>,
    running: bool,
    closed: bool,
}

struct Entry {
    at: Instant,
    target: Weak<dyn Timed>,
}

impl PartialEq for Entry {
    fn eq(&self, other: &Self) -> bool {
        self.at == other.at
    }
}
impl Eq for Entry {}
impl PartialOrd for Entry {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Entry {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.at.cmp(&other.at)
    }
}

impl Timers {
    /// Calls `target` at `at`, if it still exists then. Callers keep the number of their deadlines
    /// small themselves.
    pub(crate) fn at(&self, at: Instant, target: Weak<dyn Timed>) {
        let mut state = self.inner.lock();
        if state.closed {
            return;
        }
        let nearest = state.entries.peek().is_none_or(|Reverse(entry)| at < entry.at);
        state.entries.push(Reverse(Entry { at, target }));
        if !state.running {
            let inner = self.inner.clone();
            let thread = thread::Builder::new().name("timers".into()).stack_size(256 << 10);
            state.running = thread.spawn(move || inner.run()).is_ok();
        } else if nearest {
            self.inner.changed.notify_one();
        }
    }

    /// Ends the thread; later deadlines are ignored.
    pub(crate) fn close(&self) {
        let mut state = self.inner.lock();
        state.closed = true;
        state.entries.clear();
        self.inner.changed.notify_one();
    }
}

impl Inner {
    fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    fn run(&self) {
        let mut state = self.lock();
        while !state.closed {
            let now = Instant::now();
            let wait = state.entries.peek().map(|Reverse(entry)| entry.at.duration_since(now));
            state = match wait {
                Some(wait) if wait.is_zero() => {
                    let due = state.entries.pop();
                    drop(state);
                    if let Some(target) = due.and_then(|Reverse(entry)| entry.target.upgrade()) {
                        target.expired();
                    }
                    self.lock()
                }
                Some(wait) => match self.changed.wait_timeout(state, wait) {
                    Ok((state, _)) => state,
                    Err(poisoned) => poisoned.into_inner().0,
                },
                None => self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;
    use std::time::Duration;

    struct Note(u8, mpsc::Sender<u8>);
    impl Timed for Note {
        fn expired(&self) {
            self.1.send(self.0).unwrap();
        }
    }

    #[test]
    fn calls_in_the_order_of_time_and_forgets_what_is_gone() {
        let (sender, receiver) = mpsc::channel();
        let timers = Timers::default();
        let notes: Vec<Arc<dyn Timed>> =
            (0..3).map(|i| Arc::new(Note(i, sender.clone())) as Arc<dyn Timed>).collect();
        let now = Instant::now();
        for (i, delay) in [(0, 60), (1, 5), (2, 20)] {
            timers.at(now + Duration::from_millis(delay), Arc::downgrade(&notes[i]));
        }
        let gone: Arc<dyn Timed> = Arc::new(Note(9, sender));
        timers.at(now, Arc::downgrade(&gone));
        drop(gone);
        let order: Vec<u8> = (0..3).map(|_| receiver.recv().unwrap()).collect();
        assert_eq!(order.iter().filter(|n| **n != 9).count(), 3);
        assert_eq!(order, [1, 2, 0]);
        timers.close();
    }
}
