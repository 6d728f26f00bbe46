// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The way of bytes through the send queue: conditions for a write, and the sending later.

use std::io::{self, IoSlice};
use std::sync::atomic::Ordering;
use std::time::Instant;

use smc_core::connection::{Event, Sender};
use smc_core::stream::{CHUNK, SendPath};

use super::end_word::Failure;
use super::parts::{Shared, Tx};
use crate::byte_queue::send_queue::{FullRing, MAX_TURNS, STALL, SendQueue, queues_are_held};
use crate::byte_queue::{BytePiece, ByteQueue};

impl Tx {
    /// Whether poll shows room.
    pub(super) fn shows_room(&self) -> bool {
        match self.half.path() {
            SendPath::Ring => has_room(&self.half.sender) || self.shows_room_in_queue(),
            SendPath::Leaving(_) | SendPath::Tcp => self.shows_room_on_tcp(),
        }
    }

    /// Whether the bytes stay in the queue for now. Then the peer's reading must not count either: a
    /// write would find room in the ring, and overtake them.
    pub(super) fn is_paused(&self) -> bool {
        !self.queue.is_empty() && queues_are_held()
    }

    /// Notes a lack of room at the peer's present read position.
    pub(super) fn note_full(&mut self) {
        let read = self.half.sender.consumed();
        if self.queue.full.is_none_or(|full| full.read != read) {
            let full = FullRing { read, since: Instant::now(), stalled: false };
            self.queue.full = Some(full);
        }
    }

    /// The last [`Tx::note_full`], if the peer has read nothing since.
    pub(super) fn full(&self) -> Option<&FullRing> {
        self.queue.full.as_ref().filter(|full| full.read == self.half.sender.consumed())
    }

    pub(super) fn has_stalled(&self) -> bool {
        self.full().is_some_and(|full| full.stalled || full.since.elapsed() >= STALL)
    }

    /// Whether the queue takes a write without room in the ring.
    pub(super) fn may_queue(&self) -> bool {
        (self.half.sender.urgent_unread() || self.has_stalled()) && self.queue.has_room()
    }

    /// Whether the queue takes a write between two carriers, before the peer's record about its bytes. TCP
    /// would have room.
    fn may_queue_between_carriers(&self) -> bool {
        self.awaits_record() && !self.half.records.broken && self.queue.has_room()
    }

    /// Whether poll shows room after the end of the ring.
    fn shows_room_on_tcp(&self) -> bool {
        let in_queue = self.queue.len() <= self.queue.limit / 3 * 2;
        self.has_room_on_tcp() || in_queue && self.may_queue_between_carriers()
    }

    /// Sets the second flag of [`UNSENT`]. Not behind an urgent byte: AF_SMC would take each control
    /// word for a new urgent byte.
    fn tell_unsent(&mut self) {
        if !self.half.sender.urgent_unread() {
            self.half.sender.request_update();
        }
    }

    /// Whether poll shows room although the ring has none. As on TCP, a third of the queue has to be
    /// free, so a writer is not woken for every byte.
    pub(super) fn shows_room_in_queue(&self) -> bool {
        self.queue.len() <= self.queue.limit / 3 * 2 && self.may_queue()
    }

    /// Ends a connection past the user timeout of its queue: calls fail with `TimedOut`, and the peer finds
    /// the connection reset.
    pub(super) fn check_user_timeout(&mut self, shared: &Shared) {
        let Some(limit) = self.queue.user_timeout else { return };
        if self.half.path() != SendPath::Ring || self.is_paused() {
            return;
        }
        self.refresh(shared);
        if !self.queue.is_empty() {
            self.note_full();
        }
        if self.full().is_some_and(|full| full.since.elapsed() >= limit) {
            shared.end.fail(Failure::TimedOut);
            self.step(shared, Event::Abort);
        }
    }

    /// A call gives up. Its flags for the peer may still be true of queued bytes.
    pub(super) fn wait_no_more(&mut self) {
        if self.queue.is_empty() {
            self.half.sender.unblock();
        }
    }

    /// The time when the queue will take a write refused now; `None`: the peer has to read first.
    pub(super) fn queues_at(&self) -> Option<Instant> {
        let full = self.full().filter(|_| self.queue.has_room())?;
        Some(full.since + STALL)
    }

    /// Keeps the slices' bytes from `skip` on in the queue, if possible. `urgent`: the last byte is
    /// urgent. Returns the number of bytes kept.
    #[cold]
    pub(super) fn enqueue(
        &mut self,
        shared: &Shared,
        bufs: &[IoSlice<'_>],
        mut skip: usize,
        urgent: bool,
    ) -> usize {
        let may_queue = match self.half.path() {
            SendPath::Ring => {
                self.note_full();
                self.may_queue()
            }
            SendPath::Leaving(_) | SendPath::Tcp => self.may_queue_between_carriers(),
        };
        if !may_queue {
            return 0;
        }
        let SendQueue { bytes: queue, limit, unsent_limit, .. } = &mut self.queue;
        let limit = (*limit).min(*unsent_limit);
        let before = queue.len();
        for buf in bufs {
            let bytes = buf.get(skip.min(buf.len())..).unwrap_or_default();
            skip -= skip.min(buf.len());
            if queue.append(bytes, limit) < bytes.len() {
                break;
            }
        }
        let held = queue.len() - before;
        if urgent && held > 0 {
            queue.mark_last_urgent();
            if self.half.path() == SendPath::Ring {
                // The peer learns of urgent data although there is no room for the byte (CDC-30).
                self.half.sender.announce_urgent();
            }
        }
        self.begin_queueing(shared);
        held
    }

    /// The queue has bytes: the peer's next read has to wake a thread.
    pub(super) fn begin_queueing(&mut self, shared: &Shared) {
        if self.queue.is_empty() {
            return;
        }
        if !shared.waiting.queueing.swap(true, Ordering::SeqCst) {
            shared.watch_events();
            shared.queueing_count().fetch_add(1, Ordering::Relaxed);
        }
        if self.half.path() != SendPath::Ring {
            return self.note_unannounced(shared);
        }
        self.half.sender.block();
        self.tell_unsent();
        if self.half.sender.publish_due() {
            self.publish(shared);
        }
        self.await_reader(shared);
    }

    /// Arms the line for the peer's next read, as long as bytes wait.
    pub(super) fn await_reader(&mut self, shared: &Shared) {
        for _ in 0..MAX_TURNS {
            if self.queue.is_empty() || shared.arm() && shared.words()[1] == self.half.seen() {
                return;
            }
            self.refresh(shared);
        }
        shared.reactor.wake_background();
    }

    /// Sends waiting bytes as far as there is room.
    #[cold]
    pub(super) fn flush_queue(&mut self, shared: &Shared) {
        while !self.queue.is_empty() {
            // A delivery may have found the ring gone.
            if self.half.path() == SendPath::Ring && self.half.sender.space() == 0 {
                break;
            }
            // The device may report the loss of the ring at any time, before this thread knows the
            // connection's next carrier. The next delivery finds out.
            let ends = shared.carrier().has_failed() && !shared.may_outlive();
            if !self.half.close.may_publish() || ends || self.half.records.broken {
                return self.discard_queue(shared);
            }
            // Not in its place meanwhile: a failing delivery comes back here.
            let mut held = std::mem::take(&mut self.queue.bytes);
            self.queue.taken = held.len();
            let sent = self.send_next(shared, &held);
            self.queue.taken = 0;
            match sent {
                Ok(0) => {
                    self.queue.bytes = held;
                    break;
                }
                Ok(n) => held.remove(n as usize),
                Err(_) => held = ByteQueue::default(),
            }
            self.queue.bytes = held;
        }
        if self.queue.is_empty() {
            shared.end_queueing();
            self.note_unannounced(shared);
            if !self.half.close.pending().is_empty() {
                self.step(shared, Event::Flushed);
            }
            shared.wake_all();
        }
    }

    fn send_next(&mut self, shared: &Shared, held: &ByteQueue) -> io::Result<u32> {
        match (self.half.path(), held.next()) {
            (_, BytePiece::None) => Ok(0),
            (SendPath::Leaving(_) | SendPath::Tcp, BytePiece::Ordinary(bytes)) => {
                Ok(self.send_record(shared, &[IoSlice::new(bytes)], 0, held.len()) as u32)
            }
            (SendPath::Leaving(_) | SendPath::Tcp, BytePiece::Urgent(byte)) => {
                Ok(u32::from(self.send_urgent_record(shared, byte)))
            }
            (SendPath::Ring, BytePiece::Ordinary(bytes)) => {
                let most = u32::try_from(bytes.len()).unwrap_or(u32::MAX).min(CHUNK);
                let n = self.half.sender.space().min(most);
                if held.len() > n as usize {
                    // The peer's answer to the last request has ended it.
                    self.tell_unsent();
                }
                self.put(shared, &[IoSlice::new(bytes)], 0, n, held.len() > n as usize)
            }
            (SendPath::Ring, BytePiece::Urgent(byte)) => {
                let [span, _] = self.half.sender.spans(1);
                self.half.sender.advance_urgent(1);
                self.half.count(1);
                self.deliver(shared, &[(span.offset, &[byte])]).map(u32::from)
            }
        }
    }

    /// Discards the waiting bytes of a finished connection.
    pub(super) fn discard_queue(&mut self, shared: &Shared) {
        self.queue.bytes = ByteQueue::default();
        shared.end_queueing();
    }
}

/// Whether the ring has room enough to wake a writer: a quarter of the ring, so the writer is not woken
/// for every byte read. A single byte is enough if the peer then reports its read position.
fn has_room(sender: &Sender) -> bool {
    let enough = if sender.is_outdated() { 1 } else { sender.usable() / 4 };
    sender.space() >= enough
}
