// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The connections of a poller with a possible change of readiness.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use super::wait::Waiter;
use ism_sys::lock;

/// The connections of a poller that may be ready, each at most once, by the poller's numbers.
#[derive(Debug)]
pub(crate) struct PollQueue {
    waiter: Arc<Waiter>,
    numbers: Mutex<Vec<u32>>,
    /// The list has an entry.
    some: AtomicBool,
}

impl PollQueue {
    /// An empty queue of the poller that sleeps with this waiter.
    pub(crate) fn new(waiter: Arc<Waiter>) -> Arc<PollQueue> {
        Arc::new(PollQueue { waiter, numbers: Mutex::default(), some: AtomicBool::new(false) })
    }

    /// The waiter, to be woken after an entry is added.
    pub(crate) fn waiter(&self) -> &Arc<Waiter> {
        &self.waiter
    }

    /// Whether there is an entry.
    #[inline]
    pub(crate) fn has_changes(&self) -> bool {
        self.some.load(Ordering::Acquire)
    }

    /// Takes all entries. The caller calls [`PollEntry::begin`] for each before it looks at the
    /// connection.
    pub(crate) fn take(&self) -> Vec<u32> {
        if !self.has_changes() {
            return Vec::new();
        }
        let mut numbers = lock(&self.numbers);
        self.some.store(false, Ordering::Release);
        std::mem::take(&mut *numbers)
    }
}

/// A connection's entry of a [`PollQueue`].
#[derive(Debug)]
pub(crate) struct PollEntry {
    queue: Arc<PollQueue>,
    number: u32,
    queued: AtomicBool,
}

impl PollEntry {
    /// The entry with the poller's number for the connection.
    pub(crate) fn new(queue: &Arc<PollQueue>, number: u32) -> Arc<PollEntry> {
        Arc::new(PollEntry { queue: queue.clone(), number, queued: AtomicBool::new(false) })
    }

    /// The connection may be ready. Returns the waiter to wake, unless the poller has yet to take an
    /// earlier entry.
    pub(crate) fn queue(&self) -> Option<&Waiter> {
        // AcqRel, as in `begin`: the poller sees this thread's view, or the entry once more.
        if self.queued.swap(true, Ordering::AcqRel) {
            return None;
        }
        let mut numbers = lock(&self.queue.numbers);
        numbers.push(self.number);
        self.queue.some.store(true, Ordering::Release);
        Some(&self.queue.waiter)
    }

    /// The poller looks at the connection after this.
    pub(crate) fn begin(&self) {
        self.queued.swap(false, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_connection_is_in_the_queue_once_until_the_poller_looks_at_it() {
        let queue = PollQueue::new(Arc::default());
        let entries = [3, 4].map(|number| PollEntry::new(&queue, number));
        assert!(!queue.has_changes() && queue.take().is_empty());
        for _ in 0..1000 {
            assert!(entries.iter().filter(|entry| entry.queue().is_some()).count() % 2 == 0);
        }
        assert!(queue.has_changes());
        assert_eq!(queue.take(), [3, 4]);
        assert!(entries[0].queue().is_none(), "the poller has not begun");
        entries[0].begin();
        assert!(entries[0].queue().is_some());
        assert_eq!(queue.take(), [3]);
    }
}
