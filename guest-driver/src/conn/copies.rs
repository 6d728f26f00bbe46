// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What a connection needs to go on when bytes that it has delivered may never arrive.
//!
//! That is so when the last link of SMC-R is gone: writes and messages that were under way are lost.
//! The peer says how much it has received, and this end repeats the rest over TCP. It has the bytes:
//! a send buffer keeps each until the peer has read it.

use smc_core::carrier::Violation;
use smc_core::connection::Ring;
use smc_core::wire::cursor::Cursor;
use smc_core::wire::record::{MAX_DATA, Record};

use super::{Conn, Tx};

/// The cursor of a position in a ring.
pub(super) fn cursor_at(position: u64, ring: &Ring) -> Cursor {
    let (len, start) = (u64::from(ring.len()), ring.start().count);
    Cursor { wrap: (position / len) as u16, count: (position % len) as u32 + start }
}

/// The bytes from one cursor of a ring to another; `None`: the second lies before it, or further
/// away than the ring is long, or is none of the ring.
pub(super) fn distance(from: Cursor, to: Cursor, ring: &Ring) -> Option<u32> {
    let at = |cursor: Cursor| cursor.count.checked_sub(ring.start().count);
    let (start, end) = (at(from)?, at(to).filter(|at| *at < ring.len())?);
    let wraps = u64::from(to.wrap.wrapping_sub(from.wrap)) * u64::from(ring.len());
    let bytes = (wraps + u64::from(end)).checked_sub(u64::from(start))?;
    u32::try_from(bytes).ok().filter(|bytes| *bytes <= ring.len())
}

/// Offset in the element of the byte at a cursor of its ring.
pub(super) fn offset_of(cursor: Cursor, ring: &Ring) -> u32 {
    let head = ring.element_len() - ring.len();
    head + cursor.count.saturating_sub(ring.start().count)
}

/// The pieces of the element (offset, length) that have the last `bytes` bytes before a cursor.
fn pieces_before(end: Cursor, bytes: u32, ring: &Ring) -> [(u32, u32); 2] {
    let head = ring.element_len() - ring.len();
    let bytes = bytes.min(ring.len());
    let end = offset_of(end, ring);
    let second = bytes.min(end - head);
    let first = bytes - second;
    [(ring.element_len() - first, first), (end - second, second)]
}

impl Conn {
    /// Position from which on this end has copies of what it has delivered to the ring.
    pub(super) fn kept(&self, tx: &Tx) -> u64 {
        if tx.has_left() || !self.carrier().keeps_copies() {
            return tx.total;
        }
        let ring = tx.sender.ring();
        let unread = distance(tx.sender.consumed(), cursor_at(tx.total, ring), ring).unwrap_or(0);
        tx.total.saturating_sub(u64::from(self.carrier().copies(unread)))
    }

    /// The urgent mark that was delivered, if it may not have arrived. Nothing was written behind the
    /// byte, unless the peer has read it.
    pub(super) fn lost_mark(&self, tx: &Tx) -> Option<u64> {
        let may_be_lost = self.carrier().keeps_copies() && tx.sender.urgent_unread();
        // The sender counts the bytes of a delivery that has failed, too.
        let delivered = tx.sender.cursor() == cursor_at(tx.total, tx.sender.ring());
        (may_be_lost && delivered).then_some(tx.total)
    }

    /// The carrier is lost. What the own ring has is known as soon as the peer says how much it has
    /// sent.
    pub(super) fn note_ring_gone(&self, tx: &mut Tx) {
        if let Some(change) = &mut tx.change
            && !std::mem::replace(&mut change.gone, true)
        {
            // An event of its own goes on, under the lock of the receive side.
            self.tcp.watch_room();
        }
    }

    /// Sends bytes as DATA that were delivered to the ring, and have not arrived.
    pub(super) fn repeat(&self, tx: &mut Tx, from: u64, to: u64) {
        let ring = *tx.sender.ring();
        let more = tx.queue.has_unsent();
        let Some(change) = &mut tx.change else { return };
        let lacking = u32::try_from(to.saturating_sub(from)).unwrap_or(u32::MAX);
        let mut bytes = vec![0; lacking.min(ring.len()) as usize];
        let mut into = bytes.as_mut_slice();
        let mut copied = lacking <= ring.len();
        for (offset, len) in pieces_before(cursor_at(to, &ring), lacking, &ring) {
            let (now, later) = into.split_at_mut(len as usize);
            copied &= self.carrier().copy_sent(offset, now);
            into = later;
        }
        if !copied {
            return self.cut_by_change(tx, Violation::NoCopy { from, kept: to });
        }
        let mut at = from;
        for chunk in bytes.chunks(MAX_DATA as usize) {
            // The program has been told that they are sent, and that those of the send queue are.
            change.out.push(&Record::Data { at, len: chunk.len() as u32, more }.header());
            change.out.push(chunk);
            at += chunk.len() as u64;
        }
        self.pump_out(tx);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rings() -> [Ring; 3] {
        [Ring::smcd(48), Ring::smcr(20), Ring::smcr_without_eye_catcher(16)].map(Result::unwrap)
    }

    #[test]
    fn positions_are_cursors_of_every_ring() {
        for ring in rings() {
            assert_eq!(cursor_at(0, &ring), ring.start());
            for from in 0..40 {
                for to in from..=from + 17 {
                    let cursors = [from, to].map(|at| cursor_at(at, &ring));
                    let bytes = (to - from <= 16).then_some((to - from) as u32);
                    assert_eq!(distance(cursors[0], cursors[1], &ring), bytes, "{from} {to}");
                }
                let back = distance(cursor_at(from + 1, &ring), cursor_at(from, &ring), &ring);
                assert_eq!(back, None);
            }
            let beyond = Cursor { wrap: 0, count: ring.start().count + ring.len() };
            assert_eq!(distance(ring.start(), beyond, &ring), None);
        }
    }

    #[test]
    fn the_last_bytes_lie_before_the_cursor_and_at_the_end_of_the_element() {
        for ring in rings() {
            let head = ring.element_len() - ring.len();
            for end in 0..40u64 {
                for bytes in 0..=end.min(16) {
                    let pieces = pieces_before(cursor_at(end, &ring), bytes as u32, &ring);
                    let places = pieces.iter().flat_map(|(at, len)| *at..*at + *len);
                    let wanted = (end - bytes..end).map(|at| head + (at % 16) as u32);
                    assert!(places.eq(wanted), "{end} {bytes} {pieces:?}");
                }
            }
        }
    }
}
