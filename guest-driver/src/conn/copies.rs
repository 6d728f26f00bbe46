// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Recovery of a connection from deliveries lost on the way.
//!
//! Deliveries are lost with the last link of SMC-R, or with a device still carrying them out. A
//! restored machine has stored into a former window, until its driver has heard of the lost device. The
//! peer reports its number of received bytes, and this end repeats the rest over TCP. Copies of the
//! bytes are at hand: a send buffer of SMC-R keeps each byte until the peer has read it, a slot of a
//! move queue until the move is completed, and the window until the device is reset.

use smc_core::carrier::Violation;
use smc_core::wire::record::{MAX_DATA, Record};

use super::{Conn, Tx};

impl Conn {
    /// Copies of bytes delivered to the ring and possibly not received by the peer, up to the last
    /// byte. `None`: the ring lacks bytes in the middle, so the connection cannot continue.
    pub(super) fn copies(&self, tx: &Tx) -> Option<Vec<u8>> {
        let (end, unread) = tx.half.unread();
        self.carrier().last_sent(end, unread, tx.half.sender.ring())
    }

    /// Notes the loss of the carrier. The contents of the own ring are final as soon as the peer
    /// reports its sent bytes.
    pub(super) fn note_ring_gone(&self, tx: &mut Tx) {
        if tx.records.recv.lose() {
            // A separate event continues, under the lock of the receive side.
            self.tcp.watch_room();
        }
    }

    /// Sends as DATA the bytes delivered to the ring, but not received.
    pub(super) fn repeat(&self, tx: &mut Tx, from: u64, to: u64) {
        let more = tx.queue.has_unsent();
        let copies = std::mem::take(&mut tx.records.copies);
        let lacking = usize::try_from(to.saturating_sub(from)).unwrap_or(usize::MAX);
        let Some(bytes) = copies.len().checked_sub(lacking).and_then(|at| copies.get(at..)) else {
            return self.cut_by_change(tx, Violation::NoCopy { from, kept: to });
        };
        let mut at = from;
        for chunk in bytes.chunks(MAX_DATA as usize) {
            // These bytes were reported to the program as sent, and so were the bytes of the send
            // queue.
            tx.records.out.push(&Record::Data { at, len: chunk.len() as u32, more }.header());
            tx.records.out.push(chunk);
            at += chunk.len() as u64;
        }
        self.pump_out(tx);
    }
}
