// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Bytes of records that TCP has not taken.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Number of queues of this process with bytes: those of connections that the child of a fork can take
/// over, and others.
static FULL: [AtomicUsize; 2] = [AtomicUsize::new(0), AtomicUsize::new(0)];

/// Whether records of this process wait for TCP, and are lost if the process ends; of connections
/// that the child of a fork can take over, and of others.
pub(super) fn has_any() -> [bool; 2] {
    FULL.each_ref().map(|full| full.load(Ordering::SeqCst) > 0)
}

/// The child of a fork calls this: the records that wait are its parent's.
pub(super) fn forget_all() {
    FULL.iter().for_each(|full| full.store(0, Ordering::SeqCst));
}

/// The bytes of one connection that TCP has not taken.
#[derive(Debug)]
pub(super) struct RecordQueue {
    bytes: VecDeque<u8>,
    full: &'static AtomicUsize,
}

impl RecordQueue {
    /// An empty queue. `inheritable`: the child of a fork can take the connection over.
    pub(super) fn new(inheritable: bool) -> RecordQueue {
        let [inherited, others] = &FULL;
        RecordQueue { bytes: VecDeque::new(), full: if inheritable { inherited } else { others } }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    pub(super) fn len(&self) -> usize {
        self.bytes.len()
    }

    pub(super) fn push(&mut self, bytes: &[u8]) {
        if self.bytes.is_empty() && !bytes.is_empty() {
            self.full.fetch_add(1, Ordering::SeqCst);
        }
        self.bytes.extend(bytes);
    }

    /// The bytes, first to last.
    pub(super) fn slices(&self) -> (&[u8], &[u8]) {
        self.bytes.as_slices()
    }

    /// TCP has taken the first `n` bytes.
    pub(super) fn take(&mut self, n: usize) {
        let was_empty = self.bytes.is_empty();
        self.bytes.drain(..n.min(self.bytes.len()));
        if !was_empty && self.bytes.is_empty() {
            // A child that has forgotten them counts none.
            let less = |full: usize| full.checked_sub(1);
            let _ = self.full.fetch_update(Ordering::SeqCst, Ordering::SeqCst, less);
        }
    }

    /// Nothing of it will be sent.
    pub(super) fn discard(&mut self) {
        self.take(usize::MAX);
    }
}

impl Drop for RecordQueue {
    fn drop(&mut self) {
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
    }
}
