// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Counts of a connection's bytes, and the times of the last moves.
//!
//! Bytes are counted under the locks in any case. A time of each message would cost more than the rest
//! of the counting: the coarse clock alone takes 7 ns. So before the first query of the process, only
//! the background thread checks, once a second, for changed counts. From the first query on, each
//! message stores its time. A time is never too early: a program closing connections idle for too long
//! must not close one in use.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, TryLockError};
use std::time::Duration;

use rustix::time::ClockId;
use smc_core::wire::cdc::StateFlags;

use super::{Conn, Tx};
use crate::info::MovedCounts;
use ism_sys::{read_clock, unacknowledged, unsent};

/// Whether messages store their times, after the first query in this process.
static STORED: AtomicBool = AtomicBool::new(false);

/// Whether messages store their times.
#[inline]
pub(super) fn times_are_stored() -> bool {
    STORED.load(Ordering::Relaxed)
}

/// Milliseconds of the clock used by the kernel for the times of TCP_INFO, too.
fn now() -> u64 {
    let time = read_clock(ClockId::MonotonicCoarse);
    time.tv_sec as u64 * 1000 + time.tv_nsec as u64 / 1_000_000
}

/// The time of a direction's last move, as far as checked: after the last different position.
#[derive(Clone, Copy, Debug)]
pub(super) struct MovedTime {
    position: u64,
    at: u64,
}

impl MovedTime {
    /// The position is this one now.
    pub(super) fn new(position: u64) -> MovedTime {
        MovedTime { position, at: now() }
    }

    /// Checks the position.
    #[inline]
    pub(super) fn note(&mut self, position: u64) {
        if self.position != position {
            *self = MovedTime::new(position);
        }
    }

    fn elapsed(&self) -> Duration {
        Duration::from_millis(now().saturating_sub(self.at))
    }
}

/// The progress of a direction.
pub(super) struct SentCounts {
    pub(super) sent: u64,
    pub(super) acknowledged: u64,
    pub(super) unsent: u64,
}

fn if_free<T>(mutex: &Mutex<T>) -> Option<MutexGuard<'_, T>> {
    match mutex.try_lock() {
        Ok(guard) => Some(guard),
        Err(TryLockError::Poisoned(error)) => Some(error.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    }
}

impl Conn {
    /// Checks for moved bytes. The next check finds the bytes of a direction in use now.
    pub(super) fn note_moves(&self) {
        if let Some(mut tx) = if_free(&self.tx) {
            let total = tx.half.total();
            tx.last_move.note(total);
        }
        if let Some(mut rx) = if_free(&self.rx) {
            // The words, because the program may not have received the bytes yet.
            let [producer, _] = rx.carrier.words();
            rx.last_move.note(producer);
        }
    }

    /// Bytes of the program neither in the peer's memory nor in its TCP.
    pub(crate) fn undelivered(&self) -> u64 {
        let mut tx = self.tx();
        let counts = self.progress(&mut tx);
        tx.half.total().saturating_sub(counts.acknowledged) + counts.unsent
    }

    /// Sent and unsent bytes. In a ring, sent bytes are in the peer's memory, and so acknowledged in
    /// the sense of TCP. For records, the kernel knows more.
    pub(super) fn progress(&self, tx: &mut Tx) -> SentCounts {
        let queued = tx.queue.len() as u64;
        let total = tx.half.total();
        let (mut sent, mut acknowledged) = (total, total);
        if !tx.half.carrier().is_on_ring() {
            let waiting = tx.records.out.len() as u64;
            let of_tcp = |bytes: std::io::Result<usize>| waiting + bytes.unwrap_or(0) as u64;
            // With the headers of the records, which are few bytes.
            sent = total.saturating_sub(of_tcp(self.tcp.with(unsent)));
            acknowledged = total.saturating_sub(of_tcp(self.tcp.with(unacknowledged)));
        }
        let [sent, acknowledged] = tx.half.report(sent, acknowledged);
        SentCounts { sent, acknowledged, unsent: queued + total.saturating_sub(sent) }
    }

    /// Number of written bytes not yet received by the peer, and the number of unsent bytes among them.
    pub(crate) fn outstanding(&self) -> [usize; 2] {
        self.reactor.poll();
        let mut tx = self.tx();
        self.refresh_tx(&mut tx);
        let SentCounts { sent, acknowledged, unsent } = self.progress(&mut tx);
        let all = unsent.saturating_add(sent.saturating_sub(acknowledged));
        [all, unsent].map(|bytes| usize::try_from(bytes).unwrap_or(usize::MAX))
    }

    /// The connection's counts of moved bytes. From now on every connection of the process stores the
    /// times of its messages.
    pub(crate) fn moved_counts(&self) -> MovedCounts {
        if !times_are_stored() {
            STORED.store(true, Ordering::Relaxed);
        }
        self.reactor.poll();
        let mut rx = self.rx();
        // A failure shows in other calls.
        let _ = self.refresh_rx(&mut rx);
        let [producer, _] = rx.half.seen();
        rx.last_move.note(producer);
        let mut tx = self.tx();
        self.refresh_tx(&mut tx);
        let total = tx.half.total();
        tx.last_move.note(total);
        let SentCounts { sent, acknowledged, unsent } = self.progress(&mut tx);
        let is_on_tcp = tx.half.carrier().is_on_tcp() && self.end.reads_tcp();
        let since = |last: &MovedTime| (!is_on_tcp).then(|| last.elapsed());
        let ring = *rx.half.receiver.ring();
        MovedCounts {
            sent,
            acknowledged,
            unsent,
            received: rx.half.total(),
            deliveries: tx.half.deliveries(),
            arrivals: rx.half.arrivals(),
            since_sent: since(&tx.last_move),
            since_received: since(&rx.last_move),
            send_window: tx.half.sender.window(),
            receive_window: ring.len().saturating_sub(rx.half.receiver.available()),
            receive_buffer: ring.len(),
            carrier_changes: tx.half.switches().0,
            ended: tx.half.close.flags().intersects(StateFlags::SENDING_DONE | StateFlags::CLOSED),
            ended_by_peer: rx.half.ended,
        }
    }
}
