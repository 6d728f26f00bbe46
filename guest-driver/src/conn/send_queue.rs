//! Bytes that a program writes behind an urgent byte. The protocol sends nothing until the peer has
//! read that byte, while TCP queues what follows. So the connection keeps the bytes, and sends them
//! when the peer says that it has read. The background thread does so if no call does.

use std::io::IoSlice;
use std::sync::atomic::{AtomicUsize, Ordering};

use smc_core::connection::Event;

use super::{CHUNK, Conn, Tx};

/// Bytes that are kept at most. Further writes wait, as for a full send buffer.
const MAX_HELD: usize = 64 << 10;
/// How often a thread goes on at once when the peer signals without end.
const MAX_TURNS: u32 = 64;

/// Number of connections of this process with bytes that wait.
static HOLDING: AtomicUsize = AtomicUsize::new(0);

/// Whether bytes of any connection of this process wait until its peer has read an urgent byte
/// (MSG_OOB). They are lost if the process ends.
pub(crate) fn has_unsent_bytes() -> bool {
    HOLDING.load(Ordering::SeqCst) > 0
}

/// The child of a fork calls this: the bytes that wait are its parent's.
pub(crate) fn forget_unsent_bytes() {
    HOLDING.store(0, Ordering::SeqCst);
}

/// The bytes that wait.
#[derive(Debug, Default)]
pub(super) struct SendQueue {
    bytes: Vec<u8>,
    /// The position of one that is urgent itself.
    urgent: Option<usize>,
}

impl SendQueue {
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    pub(super) fn len(&self) -> usize {
        self.bytes.len()
    }

    /// The first `n` bytes are sent.
    fn remove(&mut self, n: usize) {
        self.bytes.drain(..n.min(self.bytes.len()));
        self.urgent = self.urgent.and_then(|at| at.checked_sub(n));
    }
}

impl Tx {
    /// Whether a write finds room although the ring has none.
    pub(super) fn holds_more(&self) -> bool {
        (self.sender.urgent_unread() || !self.queue.is_empty()) && self.queue.len() < MAX_HELD
    }
}

impl Conn {
    /// Keeps the slices' bytes from `skip` on, if they have to wait for the peer to read an urgent
    /// byte. `urgent`: the last of them is urgent, too. Returns how many there was room for.
    #[cold]
    pub(super) fn hold(
        &self,
        tx: &mut Tx,
        bufs: &[IoSlice<'_>],
        mut skip: usize,
        urgent: bool,
    ) -> usize {
        if !tx.holds_more() {
            return 0;
        }
        let before = tx.queue.len();
        for buf in bufs {
            let bytes = buf.get(skip.min(buf.len())..).unwrap_or_default();
            skip -= skip.min(buf.len());
            let room = MAX_HELD - tx.queue.len();
            tx.queue
                .bytes
                .extend_from_slice(bytes.get(..bytes.len().min(room)).unwrap_or_default());
        }
        if urgent {
            // One before it becomes an ordinary byte, as on TCP.
            tx.queue.urgent = tx.queue.len().checked_sub(1);
        }
        let held = tx.queue.len() - before;
        if !self.holding.swap(true, Ordering::SeqCst) {
            self.add_waiter();
            HOLDING.fetch_add(1, Ordering::SeqCst);
            self.reactor.add_pollable();
        }
        self.await_reader(tx);
        held
    }

    /// Whether bytes wait to be sent.
    pub(crate) fn has_held(&self) -> bool {
        self.holding.load(Ordering::SeqCst)
    }

    /// Sends what may be sent by now of the bytes that wait.
    pub(super) fn send_held(&self) {
        if self.has_held() {
            let mut tx = self.tx();
            self.refresh_tx(&mut tx);
            self.await_reader(&mut tx);
        }
    }

    /// Arms the line for the peer's next read, as long as bytes wait.
    fn await_reader(&self, tx: &mut Tx) {
        for _ in 0..MAX_TURNS {
            if tx.queue.is_empty() || self.arm() && self.words()[1] == tx.seen {
                return;
            }
            self.refresh_tx(tx);
        }
        self.reactor.wake_background();
    }

    /// Sends as much of what waits as there is room for.
    #[cold]
    pub(super) fn flush_held(&self, tx: &mut Tx) {
        while !tx.queue.is_empty() && tx.sender.space() > 0 {
            if !tx.close.may_publish() || self.carrier.has_failed() {
                return self.discard_held(tx);
            }
            // Not in its place meanwhile: a delivery that fails comes back here.
            let mut held = std::mem::take(&mut tx.queue);
            let ordinary = held.urgent.unwrap_or(held.len()).min(CHUNK as usize);
            let sent = if ordinary > 0 {
                let bytes = held.bytes.get(..ordinary).unwrap_or_default();
                let n = tx.sender.space().min(ordinary as u32);
                self.put(tx, &[IoSlice::new(bytes)], 0, n, held.len() > n as usize)
            } else {
                let [span, _] = tx.sender.spans(1);
                tx.sender.advance_urgent(1);
                tx.total += 1;
                let byte = held.bytes.get(..1).unwrap_or_default();
                self.deliver(tx, &[(span.offset, byte)]).map(|()| 1)
            };
            match sent {
                Ok(n) => held.remove(n as usize),
                Err(_) => held = SendQueue::default(),
            }
            tx.queue = held;
        }
        if tx.queue.is_empty() {
            self.end_holding();
            if !tx.close.pending().is_empty() {
                self.step(tx, Event::Flushed);
            }
            self.wake_all();
        }
    }

    /// Throws away what waits: the connection is over.
    pub(super) fn discard_held(&self, tx: &mut Tx) {
        tx.queue = SendQueue::default();
        self.end_holding();
    }

    pub(super) fn end_holding(&self) {
        if self.holding.swap(false, Ordering::SeqCst) {
            let less = |holding: usize| holding.checked_sub(1);
            let _ = HOLDING.fetch_update(Ordering::SeqCst, Ordering::SeqCst, less);
            self.reactor.remove_pollable();
            self.remove_waiter();
        }
    }
}
