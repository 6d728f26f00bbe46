// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Records of one connection: bytes for TCP, and bytes from TCP.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use smc_core::stream::RecordRecv;

/// Number of queues of this process with bytes: of connections inheritable by the child of a fork, and
/// of others.
static FULL: [AtomicUsize; 2] = [AtomicUsize::new(0), AtomicUsize::new(0)];

/// Whether records of this process wait for TCP, and are lost if the process ends: of connections
/// inheritable by the child of a fork, and of others.
pub(super) fn has_any() -> [bool; 2] {
    FULL.each_ref().map(|full| full.load(Ordering::SeqCst) > 0)
}

/// Called by the child of a fork: the waiting records are its parent's.
pub(super) fn forget_all() {
    FULL.iter().for_each(|full| full.store(0, Ordering::SeqCst));
}

/// The bytes of one connection not yet taken by TCP.
#[derive(Debug)]
pub(super) struct RecordQueue {
    bytes: VecDeque<u8>,
    /// Even without bytes, the connection needs the process.
    is_unfinished: bool,
    is_counted: bool,
    full: &'static AtomicUsize,
}

impl RecordQueue {
    /// An empty queue. `inheritable`: the child of a fork can take the connection over.
    pub(super) fn new(inheritable: bool) -> RecordQueue {
        let [inherited, others] = &FULL;
        let full = if inheritable { inherited } else { others };
        RecordQueue { bytes: VecDeque::new(), is_unfinished: false, is_counted: false, full }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    pub(super) fn len(&self) -> usize {
        self.bytes.len()
    }

    pub(super) fn push(&mut self, bytes: &[u8]) {
        self.bytes.extend(bytes);
        self.count();
    }

    /// Sets whether the connection needs the process although TCP has taken every record.
    pub(super) fn set_unfinished(&mut self, is_unfinished: bool) {
        self.is_unfinished = is_unfinished;
        self.count();
    }

    pub(super) fn count(&mut self) {
        let is_counted = self.is_unfinished || !self.bytes.is_empty();
        match (std::mem::replace(&mut self.is_counted, is_counted), is_counted) {
            (false, true) => {
                self.full.fetch_add(1, Ordering::SeqCst);
            }
            (true, false) => {
                // A child has forgotten its parent's queues and counts none.
                let less = |full: usize| full.checked_sub(1);
                let _ = self.full.fetch_update(Ordering::SeqCst, Ordering::SeqCst, less);
            }
            _ => {}
        }
    }

    /// The bytes, first to last.
    pub(super) fn slices(&self) -> (&[u8], &[u8]) {
        self.bytes.as_slices()
    }

    /// TCP has taken the first `n` bytes.
    pub(super) fn take(&mut self, n: usize) {
        self.bytes.drain(..n.min(self.bytes.len()));
        self.count();
    }

    /// Discards the bytes unsent.
    pub(super) fn discard(&mut self) {
        self.take(usize::MAX);
    }
}

impl Drop for RecordQueue {
    fn drop(&mut self) {
        self.is_unfinished = false;
        self.discard();
    }
}

/// The TCP connection as a carrier: what it has not taken yet, and what it has brought.
pub(super) struct Records {
    /// Records not yet taken by TCP.
    pub(super) out: RecordQueue,
    /// The last deliveries to the former ring, until the peer reports its received bytes.
    pub(super) copies: Vec<u8>,
    /// Bytes from TCP not yet processed.
    pub(super) input: VecDeque<u8>,
    /// The way of these bytes into the own ring.
    pub(super) recv: RecordRecv,
    /// TCP has delivered the peer's FIN, and the machine knows.
    pub(super) ended: bool,
    /// SO_LINGER of the program, while the socket's own value makes the kernel reset the connection at
    /// the end of the process, because bytes are unread.
    pub(super) linger: Option<Option<Duration>>,
}

impl Records {
    /// The state without records. `inheritable`: the child of a fork can take the connection over.
    pub(super) fn new(inheritable: bool) -> Records {
        Records {
            out: RecordQueue::new(inheritable),
            copies: Vec::new(),
            input: VecDeque::new(),
            recv: RecordRecv::default(),
            ended: false,
            linger: None,
        }
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
