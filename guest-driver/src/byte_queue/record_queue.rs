// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Bytes of records not yet taken by TCP.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Number of queues of this process with bytes: of connections inheritable by the child of a fork, and
/// of others. Relaxed: each is a number of its own.
static FULL: [AtomicUsize; 2] = [AtomicUsize::new(0), AtomicUsize::new(0)];

/// Whether records of this process wait for TCP, and are lost if the process ends: of connections
/// inheritable by the child of a fork, and of others.
pub(crate) fn has_any() -> [bool; 2] {
    FULL.each_ref().map(|full| full.load(Ordering::Relaxed) > 0)
}

/// Called by the child of a fork: the waiting records are its parent's.
pub(crate) fn forget_all() {
    FULL.iter().for_each(|full| full.store(0, Ordering::Relaxed));
}

/// The bytes of one connection not yet taken by TCP.
#[derive(Debug)]
pub(crate) struct RecordQueue {
    bytes: VecDeque<u8>,
    /// Even without bytes, the connection needs the process.
    is_unfinished: bool,
    is_counted: bool,
    full: &'static AtomicUsize,
}

impl RecordQueue {
    /// An empty queue. `inheritable`: the child of a fork can take the connection over.
    pub(crate) fn new(inheritable: bool) -> RecordQueue {
        let [inherited, others] = &FULL;
        let full = if inheritable { inherited } else { others };
        RecordQueue { bytes: VecDeque::new(), is_unfinished: false, is_counted: false, full }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    pub(crate) fn len(&self) -> usize {
        self.bytes.len()
    }

    pub(crate) fn push(&mut self, bytes: &[u8]) {
        self.bytes.extend(bytes);
        self.count();
    }

    /// Sets whether the connection needs the process although TCP has taken every record.
    pub(crate) fn set_unfinished(&mut self, is_unfinished: bool) {
        self.is_unfinished = is_unfinished;
        self.count();
    }

    pub(crate) fn count(&mut self) {
        let is_counted = self.is_unfinished || !self.bytes.is_empty();
        match (std::mem::replace(&mut self.is_counted, is_counted), is_counted) {
            (false, true) => {
                self.full.fetch_add(1, Ordering::Relaxed);
            }
            (true, false) => {
                // A child has forgotten its parent's queues and counts none.
                let less = |full: usize| full.checked_sub(1);
                let _ = self.full.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
            }
            _ => {}
        }
    }

    /// The bytes, first to last.
    pub(crate) fn slices(&self) -> (&[u8], &[u8]) {
        self.bytes.as_slices()
    }

    /// TCP has taken the first `n` bytes.
    pub(crate) fn take(&mut self, n: usize) {
        self.bytes.drain(..n.min(self.bytes.len()));
        self.count();
    }

    /// Discards the bytes unsent.
    pub(crate) fn discard(&mut self) {
        self.take(usize::MAX);
    }
}

impl Drop for RecordQueue {
    fn drop(&mut self) {
        self.is_unfinished = false;
        self.discard();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_queue_gives_its_bytes_in_order_and_is_counted_while_it_has_some() {
        let mut out = RecordQueue::new(true);
        out.push(b"");
        out.push(b"abc");
        out.push(b"de");
        assert!(has_any()[0] && out.len() == 5);
        out.take(2);
        let (first, second) = out.slices();
        assert_eq!([first, second].concat(), b"cde");
        out.discard();
        assert!(out.is_empty() && !has_any()[0]);
        out.set_unfinished(true);
        out.push(b"f");
        out.discard();
        assert!(out.is_empty() && has_any()[0]);
        drop(out);
        assert!(!has_any()[0]);
    }
}
