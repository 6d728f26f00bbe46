// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The send queue: bytes written by a program, without room in the peer's ring.
//!
//! A write goes into the peer's ring as long as the peer reads. The queue takes a write as the last
//! resort: the ring is full and the peer has stalled, without a read for [`STALL`]; or the peer has not
//! read an urgent byte, behind which the protocol sends nothing; or the connection is between two
//! carriers. So a program may write as much before a read as on TCP. Queued bytes go out first, moved
//! into the ring by the next caller, or by the thread woken by the peer's reading.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use smc_core::wire::cdc::ProducerFlags;
use smc_core::wire::cursor::Cursor;

use super::{ByteQueue, forget_chunks, record_queue};

/// A peer without a read for this long has stalled.
pub(crate) const STALL: Duration = Duration::from_millis(1);
/// Time of a non-waiting call's checks for reads of the peer.
pub(crate) const LOOK: Duration = Duration::from_micros(50);
/// The most bytes of a queue, unless the program has set SO_SNDBUF: the largest size of TCP's buffers.
const LIMIT: usize = 4 << 20;
/// Bytes taken by TCP's receive buffer for a program without reads, unless the ring is smaller.
pub(crate) const UNREAD: usize = 128 << 10;
/// The most turns of one call while the peer signals without end.
pub(crate) const MAX_TURNS: u32 = 64;

/// The flags of an end with queued bytes: blocked, with a request for an update at each read. A writer
/// only waiting is blocked, without the request.
pub(crate) const UNSENT: ProducerFlags =
    ProducerFlags::BLOCKED.union(ProducerFlags::UPDATE_REQUESTED);

/// Number of connections of this process with queued bytes: inheritable by the child of a fork, and
/// others. Relaxed: each is a number of its own.
pub(crate) static QUEUEING: [AtomicUsize; 2] = [AtomicUsize::new(0), AtomicUsize::new(0)];

/// Whether send queues of this process have bytes, lost if the process ends: of connections inheritable
/// by the child of a fork, and of others.
pub(crate) fn has_unsent_bytes() -> [bool; 2] {
    let records = record_queue::has_any();
    let queues = QUEUEING.each_ref().map(|holding| holding.load(Ordering::Relaxed) > 0);
    [records[0] || queues[0], records[1] || queues[1]]
}

/// Called by the child of a fork: the bytes in queues are its parent's.
pub(crate) fn forget_unsent_bytes() {
    QUEUEING.iter().for_each(|holding| holding.store(0, Ordering::Relaxed));
    record_queue::forget_all();
    forget_chunks();
}

/// Nothing leaves the queues of this process: see [`hold_queues`]. The locks of the queues, which the
/// holder takes behind the store, order the word.
static HELD: AtomicBool = AtomicBool::new(false);

/// Whether another process sends the queued bytes of this process. Then this process sends none of
/// them, and takes no bytes for the other from TCP.
#[inline]
pub(crate) fn queues_are_held() -> bool {
    HELD.load(Ordering::Acquire)
}

/// Sets whether another process sends the queued bytes of this process.
pub(crate) fn hold_queues(on: bool) {
    HELD.store(on, Ordering::Release);
}

/// A ring without room.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FullRing {
    /// The peer's read position.
    pub(crate) read: Cursor,
    pub(crate) since: Instant,
    /// The peer has stalled, regardless of the time.
    pub(crate) stalled: bool,
}

/// The queue of a connection, and the conditions for taking a write.
#[derive(Debug)]
pub(crate) struct SendQueue {
    pub(crate) bytes: ByteQueue,
    pub(crate) limit: usize,
    /// The most bytes in the queue by TCP_NOTSENT_LOWAT.
    pub(crate) unsent_limit: usize,
    /// The longest time without a read of the peer while a write finds no room (TCP_USER_TIMEOUT);
    /// `None`: as long as the peer lives.
    pub(crate) user_timeout: Option<Duration>,
    /// The last write without room.
    pub(crate) full: Option<FullRing>,
    /// Bytes taken out by a thread to be sent, and neither sent nor put back yet.
    pub(crate) taken: usize,
}

impl Default for SendQueue {
    fn default() -> SendQueue {
        let bytes = ByteQueue::default();
        let (unsent_limit, user_timeout) = (usize::MAX, None);
        SendQueue { bytes, limit: LIMIT, unsent_limit, user_timeout, full: None, taken: 0 }
    }
}

impl SendQueue {
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    pub(crate) fn has_urgent(&self) -> bool {
        self.bytes.has_urgent()
    }

    pub(crate) fn len(&self) -> usize {
        self.bytes.len()
    }

    /// Whether bytes are unsent, in the queue or with a sending thread.
    pub(crate) fn has_unsent(&self) -> bool {
        !self.is_empty() || self.taken > 0
    }

    /// Notes the sending of bytes taken out before.
    pub(crate) fn note_sent(&mut self, bytes: u64) {
        let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
        self.taken = self.taken.saturating_sub(bytes);
    }

    /// A new, empty ring begins.
    pub(crate) fn begin_ring(&mut self) {
        self.full = None;
    }

    pub(crate) fn has_room(&self) -> bool {
        self.len() < self.limit.min(self.unsent_limit) && self.bytes.may_grow()
    }
}
