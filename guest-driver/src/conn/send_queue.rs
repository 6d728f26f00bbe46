// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The send queue: bytes written by a program, without room in the peer's ring.
//!
//! A write goes into the peer's ring as long as the peer reads. The queue takes a write as the last
//! resort: the ring is full and the peer has stalled, without a read for [`STALL`]; or the peer has not
//! read an urgent byte, behind which the protocol sends nothing; or the connection is between two
//! carriers. So a program may write as much before a read as on TCP. Queued bytes go out first, moved
//! into the ring by the next caller, or by the thread woken by the peer's reading.

use std::io::{self, IoSlice};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use smc_core::connection::Event;
use smc_core::stream::{CHUNK, SendPath};
use smc_core::wire::cdc::ProducerFlags;
use smc_core::wire::cursor::Cursor;

use super::record_queue;
use super::{Conn, Tx};
use crate::byte_queue::{BytePiece, ByteQueue, forget_chunks};
use crate::capture;
use crate::reactor::wait::Deadline;

/// A peer without a read for this long has stalled.
const STALL: Duration = Duration::from_millis(1);
/// Time of a non-waiting call's checks for reads of the peer.
const LOOK: Duration = Duration::from_micros(50);
/// The most bytes of a queue, unless the program has set SO_SNDBUF: the largest size of TCP's buffers.
const LIMIT: usize = 4 << 20;
/// Bytes taken by TCP's receive buffer for a program without reads, unless the ring is smaller.
const UNREAD: usize = 128 << 10;
/// The most turns of one call while the peer signals without end.
const MAX_TURNS: u32 = 64;

/// The flags of an end with queued bytes: blocked, with a request for an update at each read. A writer
/// only waiting is blocked, without the request.
pub(super) const UNSENT: ProducerFlags =
    ProducerFlags::BLOCKED.union(ProducerFlags::UPDATE_REQUESTED);

/// Number of connections of this process with queued bytes: inheritable by the child of a fork, and
/// others.
static HOLDING: [AtomicUsize; 2] = [AtomicUsize::new(0), AtomicUsize::new(0)];

/// Whether send queues of this process have bytes, lost if the process ends: of connections inheritable
/// by the child of a fork, and of others.
pub(crate) fn has_unsent_bytes() -> [bool; 2] {
    let records = record_queue::has_any();
    let queues = HOLDING.each_ref().map(|holding| holding.load(Ordering::SeqCst) > 0);
    [records[0] || queues[0], records[1] || queues[1]]
}

/// Called by the child of a fork: the bytes in queues are its parent's.
pub(crate) fn forget_unsent_bytes() {
    HOLDING.iter().for_each(|holding| holding.store(0, Ordering::SeqCst));
    record_queue::forget_all();
    forget_chunks();
}

/// Nothing leaves the queues of this process: see [`hold_queues`].
static HELD: AtomicBool = AtomicBool::new(false);

/// Whether another process sends the queued bytes of this process. Then this process sends none of
/// them, and takes no bytes for the other from TCP.
#[inline]
pub(super) fn queues_are_held() -> bool {
    HELD.load(Ordering::SeqCst)
}

/// Sets whether another process sends the queued bytes of this process.
pub(crate) fn hold_queues(on: bool) {
    HELD.store(on, Ordering::SeqCst);
}

/// A ring without room.
#[derive(Clone, Copy, Debug)]
struct FullRing {
    /// The peer's read position.
    read: Cursor,
    since: Instant,
    /// The peer has stalled, regardless of the time.
    stalled: bool,
}

/// The queue of a connection, and the conditions for taking a write.
#[derive(Debug)]
pub(super) struct SendQueue {
    bytes: ByteQueue,
    limit: usize,
    /// The most bytes in the queue by TCP_NOTSENT_LOWAT.
    unsent_limit: usize,
    /// The last write without room.
    full: Option<FullRing>,
    /// Bytes taken out by a thread to be sent, and neither sent nor put back yet.
    taken: usize,
}

impl Default for SendQueue {
    fn default() -> SendQueue {
        let bytes = ByteQueue::default();
        SendQueue { bytes, limit: LIMIT, unsent_limit: usize::MAX, full: None, taken: 0 }
    }
}

impl SendQueue {
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    pub(super) fn has_urgent(&self) -> bool {
        self.bytes.has_urgent()
    }

    pub(super) fn len(&self) -> usize {
        self.bytes.len()
    }

    /// Whether bytes are unsent, in the queue or with a sending thread.
    pub(super) fn has_unsent(&self) -> bool {
        !self.is_empty() || self.taken > 0
    }

    /// Notes the sending of bytes taken out before.
    pub(super) fn note_sent(&mut self, bytes: u64) {
        let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
        self.taken = self.taken.saturating_sub(bytes);
    }

    /// A new, empty ring begins.
    pub(super) fn begin_ring(&mut self) {
        self.full = None;
    }

    fn has_room(&self) -> bool {
        self.len() < self.limit.min(self.unsent_limit) && self.bytes.may_grow()
    }
}

impl Tx {
    /// Notes a lack of room at the peer's present read position.
    pub(super) fn note_full(&mut self) {
        let read = self.half.sender.consumed();
        if self.queue.full.is_none_or(|full| full.read != read) {
            let full = FullRing { read, since: Instant::now(), stalled: false };
            self.queue.full = Some(full);
        }
    }

    /// The last [`Tx::note_full`], if the peer has read nothing since.
    fn full(&self) -> Option<&FullRing> {
        self.queue.full.as_ref().filter(|full| full.read == self.half.sender.consumed())
    }

    fn has_stalled(&self) -> bool {
        self.full().is_some_and(|full| full.stalled || full.since.elapsed() >= STALL)
    }

    /// Whether the queue takes a write without room in the ring.
    fn may_queue(&self) -> bool {
        (self.half.sender.urgent_unread() || self.has_stalled()) && self.queue.has_room()
    }

    /// Whether the queue takes a write between two carriers, before the peer's record about its bytes. TCP
    /// would have room.
    fn may_queue_while_changing(&self) -> bool {
        self.awaits_record() && !self.half.records.broken && self.queue.has_room()
    }

    /// Whether poll shows room after the end of the ring.
    pub(super) fn shows_room_on_tcp(&self) -> bool {
        let in_queue = self.queue.len() <= self.queue.limit / 3 * 2;
        self.has_room_on_tcp() || in_queue && self.may_queue_while_changing()
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
    pub(super) fn shows_room(&self) -> bool {
        self.queue.len() <= self.queue.limit / 3 * 2 && self.may_queue()
    }

    /// A call gives up. Its flags for the peer may still be true of queued bytes.
    pub(super) fn wait_no_more(&mut self) {
        if self.queue.is_empty() {
            self.half.sender.unblock();
        }
    }

    /// The time when the queue will take a write refused now; `None`: the peer has to read first.
    fn queues_at(&self) -> Option<Instant> {
        let full = self.full().filter(|_| self.queue.has_room())?;
        Some(full.since + STALL)
    }
}

impl Conn {
    /// Keeps the slices' bytes from `skip` on in the queue, if possible. `urgent`: the last byte is
    /// urgent. Returns the number of bytes kept.
    #[cold]
    pub(super) fn hold(
        &self,
        tx: &mut Tx,
        bufs: &[IoSlice<'_>],
        mut skip: usize,
        urgent: bool,
    ) -> usize {
        let may_queue = match tx.half.path() {
            SendPath::Ring => {
                tx.note_full();
                tx.may_queue()
            }
            SendPath::Leaving(_) | SendPath::Tcp => tx.may_queue_while_changing(),
        };
        if !may_queue {
            return 0;
        }
        let SendQueue { bytes: queue, limit, unsent_limit, .. } = &mut tx.queue;
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
            if tx.half.path() == SendPath::Ring {
                // The peer learns of urgent data although there is no room for the byte (CDC-30).
                tx.half.sender.announce_urgent();
            }
        }
        self.begin_holding(tx);
        held
    }

    /// The queue has bytes: the peer's next read has to wake a thread.
    fn begin_holding(&self, tx: &mut Tx) {
        if tx.queue.is_empty() {
            return;
        }
        if !self.waiting.holding.swap(true, Ordering::SeqCst) {
            self.watch_events();
            self.holding_count().fetch_add(1, Ordering::SeqCst);
        }
        if tx.half.path() != SendPath::Ring {
            return self.note_unannounced(tx);
        }
        tx.half.sender.block();
        tx.tell_unsent();
        if tx.half.sender.publish_due() {
            self.publish(tx);
        }
        self.await_reader(tx);
    }

    fn holding_count(&self) -> &'static AtomicUsize {
        let [inheritable, others] = &HOLDING;
        if self.carrier().must_be_polled() { others } else { inheritable }
    }

    /// Has the reactor call the connection at each event, although no thread waits for it.
    pub(super) fn watch_events(&self) {
        self.waiting.add_waiter();
        self.reactor.add_pollable();
    }

    /// Undoes one [`Conn::watch_events`].
    pub(super) fn ignore_events(&self) {
        self.reactor.remove_pollable();
        self.remove_waiter();
    }

    /// Begins again in the child of a fork, the new owner of the connection.
    pub(super) fn hold_on(&self) {
        if self.has_held() {
            self.watch_events();
        }
        if self.waiting.awaiting.load(Ordering::SeqCst) {
            self.watch_events();
        }
    }

    /// Puts bytes written earlier by the program into the ring, and the rest into the queue.
    pub(crate) fn send_queue(&self, bytes: ByteQueue) {
        if capture::is_on() {
            let pieces: Vec<_> = bytes.pieces().map(IoSlice::new).collect();
            self.capture_sent(&pieces, bytes.len());
        }
        let mut tx = self.tx();
        self.refresh_tx(&mut tx);
        tx.queue.bytes.append_queue(bytes);
        self.flush_held(&mut tx);
        tx.note_full();
        self.begin_holding(&mut tx);
    }

    /// Bytes of the queue.
    pub(crate) fn queued(&self) -> usize {
        self.reactor.poll();
        let mut tx = self.tx();
        self.refresh_tx(&mut tx);
        tx.queue.len()
    }

    /// Bounds the bytes written before the peer reads, as SO_SNDBUF does: `bytes` is the option's value
    /// on a socket, twice the value set by the program.
    pub(crate) fn set_send_buffer(&self, bytes: usize) {
        let mut tx = self.tx();
        let unread = UNREAD.min(tx.half.sender.ring().len() as usize);
        let all = bytes.saturating_add(unread);
        tx.half.sender.limit_to(u32::try_from(all).unwrap_or(u32::MAX));
        tx.queue.limit = all.saturating_sub(tx.half.sender.usable() as usize);
    }

    /// Bounds the queued bytes, as TCP_NOTSENT_LOWAT does; 0: by SO_SNDBUF only.
    pub(crate) fn set_unsent_limit(&self, bytes: usize) {
        self.tx().queue.unsent_limit = if bytes == 0 { usize::MAX } else { bytes };
        // There may be room now.
        self.check_blocked_writer();
    }

    /// Whether bytes wait to be sent.
    pub(crate) fn has_held(&self) -> bool {
        self.waiting.holding.load(Ordering::SeqCst)
    }

    /// Sends waiting bytes, as far as possible now.
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
            if tx.queue.is_empty() || self.arm() && self.words()[1] == tx.half.seen() {
                return;
            }
            self.refresh_tx(tx);
        }
        self.reactor.wake_background();
    }

    /// Sends waiting bytes as far as there is room.
    #[cold]
    pub(super) fn flush_held(&self, tx: &mut Tx) {
        while !tx.queue.is_empty() {
            // A delivery may have found the ring gone.
            if tx.half.path() == SendPath::Ring && tx.half.sender.space() == 0 {
                break;
            }
            // The device may report the loss of the ring at any time, before this thread knows the
            // connection's next carrier. The next delivery finds out.
            let ends = self.carrier().has_failed() && !self.may_outlive();
            if !tx.half.close.may_publish() || ends || tx.half.records.broken {
                return self.discard_held(tx);
            }
            // Not in its place meanwhile: a failing delivery comes back here.
            let mut held = std::mem::take(&mut tx.queue.bytes);
            tx.queue.taken = held.len();
            let sent = self.send_next(tx, &held);
            tx.queue.taken = 0;
            match sent {
                Ok(0) => {
                    tx.queue.bytes = held;
                    break;
                }
                Ok(n) => held.remove(n as usize),
                Err(_) => held = ByteQueue::default(),
            }
            tx.queue.bytes = held;
        }
        if tx.queue.is_empty() {
            self.end_holding();
            self.note_unannounced(tx);
            if !tx.half.close.pending().is_empty() {
                self.step(tx, Event::Flushed);
            }
            self.wake_all();
        }
    }

    fn send_next(&self, tx: &mut Tx, held: &ByteQueue) -> io::Result<u32> {
        match (tx.half.path(), held.next()) {
            (_, BytePiece::None) => Ok(0),
            (SendPath::Leaving(_) | SendPath::Tcp, BytePiece::Ordinary(bytes)) => {
                Ok(self.put_on_tcp(tx, &[IoSlice::new(bytes)], 0, held.len()) as u32)
            }
            (SendPath::Leaving(_) | SendPath::Tcp, BytePiece::Urgent(byte)) => {
                Ok(u32::from(self.put_urgent_on_tcp(tx, byte)))
            }
            (SendPath::Ring, BytePiece::Ordinary(bytes)) => {
                let most = u32::try_from(bytes.len()).unwrap_or(u32::MAX).min(CHUNK);
                let n = tx.half.sender.space().min(most);
                if held.len() > n as usize {
                    // The peer's answer to the last request has ended it.
                    tx.tell_unsent();
                }
                self.put(tx, &[IoSlice::new(bytes)], 0, n, held.len() > n as usize)
            }
            (SendPath::Ring, BytePiece::Urgent(byte)) => {
                let [span, _] = tx.half.sender.spans(1);
                tx.half.sender.advance_urgent(1);
                tx.half.count(1);
                self.deliver(tx, &[(span.offset, &[byte])]).map(u32::from)
            }
        }
    }

    /// Whether the bytes stay in the queue for now. Then the peer's reading must not count either: a
    /// write would find room in the ring, and overtake them.
    pub(super) fn is_held(tx: &Tx) -> bool {
        !tx.queue.is_empty() && queues_are_held()
    }

    /// Discards the waiting bytes of a finished connection.
    pub(super) fn discard_held(&self, tx: &mut Tx) {
        tx.queue.bytes = ByteQueue::default();
        self.end_holding();
    }

    pub(super) fn end_holding(&self) {
        if self.waiting.holding.swap(false, Ordering::SeqCst) {
            let less = |holding: usize| holding.checked_sub(1);
            let count = self.holding_count();
            let _ = count.fetch_update(Ordering::SeqCst, Ordering::SeqCst, less);
            self.ignore_events();
        }
    }

    /// Waits until a write without room at the peer's word `seen` may continue: the peer has read, or
    /// the queue takes the write.
    ///
    /// # Errors
    /// See [`Conn::wait_as`].
    pub(super) fn await_room(
        &self,
        deadline: &Deadline,
        on_word: bool,
        seen: u64,
        mut or: impl FnMut() -> bool,
    ) -> io::Result<()> {
        let write_shut = || self.end.is_write_shut();
        if self.end.has_left_ring() {
            return self.wait_as(deadline, on_word, || {
                let on_tcp = self.end.has_left_ring();
                write_shut() || or() || !on_tcp || self.tx().has_room_on_tcp()
            });
        }
        let look = self.look();
        let left = || self.end.has_left_ring() || look.is_over();
        let changed = || look.words()[1] != seen || write_shut() || left() || or();
        let queues_at = self.tx().queues_at();
        let ends_before = |at: Instant| deadline.left().is_some_and(|(now, left)| now + left < at);
        match queues_at.filter(|at| !ends_before(*at)) {
            Some(at) => match self.wait_as(&Deadline::from(Some(at)), on_word, changed) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(()),
                waited => waited,
            },
            None => self.wait_as(deadline, on_word, changed),
        }
    }

    /// Bytes taken by a write now, in the ring or in the queue. More, if the connection has left its
    /// ring.
    pub(crate) fn room(&self) -> usize {
        let mut tx = self.tx();
        if tx.half.path() != SendPath::Ring {
            return usize::MAX;
        }
        self.refresh_tx(&mut tx);
        let queue = &tx.queue;
        let in_queue = match tx.may_queue() {
            true => queue.limit.min(queue.unsent_limit).saturating_sub(queue.len()),
            false => 0,
        };
        let in_ring = if queue.has_unsent() { 0 } else { tx.half.sender.space() as usize };
        in_ring.saturating_add(in_queue)
    }

    /// After a non-waiting call without room: checks for a moment for reads of the peer. `true`:
    /// another try may find room, in the ring or in the queue.
    pub(crate) fn look_for_room(&self) -> bool {
        let seen = {
            let tx = self.tx();
            if tx.half.path() != SendPath::Ring {
                return tx.has_room_on_tcp();
            }
            match tx.full() {
                Some(_) if !tx.queue.has_room() => return false,
                Some(_) if !tx.has_stalled() => tx.half.seen(),
                _ => return true,
            }
        };
        let (begun, carrier) = (Instant::now(), self.carrier());
        while begun.elapsed() < LOOK {
            self.reactor.poll();
            if carrier.words()[1] != seen || self.has_failed() {
                return true;
            }
            std::thread::yield_now();
        }
        let mut tx = self.tx();
        let read = tx.half.sender.consumed();
        if let Some(full) = tx.queue.full.as_mut().filter(|full| full.read == read) {
            full.stalled = true;
        }
        true
    }

    /// Informs a non-waiting writer of new room, after a report of no room.
    pub(super) fn check_blocked_writer(&self) {
        if !self.waiting.is_write_blocked() {
            return;
        }
        if self.ready().writable {
            self.waiting.set_write_blocked(false);
            self.wake_all();
        }
    }

    /// Has the background thread check again whether the peer has stalled. Nothing to do if stalled
    /// with a queue too full to show room: a read of the peer makes room.
    pub(super) fn await_stall(&self) {
        if self.end.has_left_ring() {
            return;
        }
        let mut tx = self.tx();
        tx.note_full();
        let waits = tx.queue.has_room() && (!tx.has_stalled() || tx.shows_room());
        drop(tx);
        if waits {
            self.schedule_update();
        }
    }
}
