//! Deadlines: one thread sleeps until the nearest. The first deadline starts it.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Instant;

use crate::device::sync::lock;

/// What a timer calls when its deadline has passed. It must not block.
type OnExpiry = Box<dyn FnOnce() + Send>;

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
    on_expiry: OnExpiry,
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
    /// Calls `on_expiry` once `at` has passed. It must not block, since it runs in the thread of all
    /// timers. A deadline cannot be cancelled, so the caller keeps the number of its deadlines small.
    pub(crate) fn call_at(&self, at: Instant, on_expiry: impl FnOnce() + Send + 'static) {
        let mut state = self.inner.lock();
        if state.closed {
            return;
        }
        let nearest = state.entries.peek().is_none_or(|Reverse(entry)| at < entry.at);
        state.entries.push(Reverse(Entry { at, on_expiry: Box::new(on_expiry) }));
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
                    if let Some(Reverse(entry)) = due {
                        (entry.on_expiry)();
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

    #[test]
    fn calls_in_the_order_of_the_deadlines() {
        let (sender, receiver) = mpsc::channel();
        let timers = Timers::default();
        let now = Instant::now();
        for (number, delay) in [(0, 60), (1, 5), (2, 20)] {
            let sender = sender.clone();
            let send = move || sender.send(number).unwrap();
            timers.call_at(now + Duration::from_millis(delay), send);
        }
        let order: Vec<u8> = (0..3).map(|_| receiver.recv().unwrap()).collect();
        assert_eq!(order, [1, 2, 0]);
        timers.close();
    }

    #[test]
    fn closing_drops_the_deadlines_that_are_left() {
        let (sender, receiver) = mpsc::channel();
        let timers = Timers::default();
        timers.call_at(Instant::now() + Duration::from_secs(60), move || sender.send(()).unwrap());
        timers.close();
        assert!(receiver.recv().is_err());
    }
}
