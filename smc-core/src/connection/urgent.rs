// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The urgent mark of the receiving direction (RFC 7609 sections 4.7.5 and 4.7.6; SOCK-8).
//!
//! The urgent byte is the one before the producer cursor published with U. Out of line the byte is
//! copied away on arrival and skipped when the reader gets there, so a peer waiting for the byte to
//! be processed goes on even if the application never asks for the byte ("processed or remembered",
//! section 4.7.5). In line the byte is an ordinary one, and reads stop there once.

use thiserror::Error;

use crate::wire::Cursor;
use crate::wire::cdc::ProducerFlags;

/// Change of the urgent mark caused by a control word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UrgentEvent {
    /// No change.
    None,
    /// Urgent data is on its way: notify the application now (CDC-31).
    Pending,
    /// The urgent byte is in the element at `offset`: notify the application, copy the byte out and
    /// hand it to [`super::Receiver::remember_urgent`].
    Present {
        /// Offset from the start of the element, bytes.
        offset: u32,
    },
}

/// Why MSG_OOB yields no byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum OobError {
    /// No urgent data (EINVAL), or the byte was taken before.
    #[error("no urgent data")]
    NoUrgent,
    /// Announced, not here yet (EAGAIN).
    #[error("urgent data has not arrived yet")]
    NotYet,
    /// SO_OOBINLINE is on: the byte is in the stream (EINVAL).
    #[error("urgent data is in line")]
    Inline,
}

/// The urgent byte itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Byte {
    /// None, taken, or read past.
    None,
    /// In the ring, not copied out.
    Arrived,
    /// Copied out.
    Stored(u8),
}

/// The position of the mark, and the pending notifications.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct UrgentMark {
    inline: bool,
    /// P without U.
    pending: bool,
    /// The cursor published with U: the same cursor again is the same mark (CDC-47).
    last: Option<Cursor>,
    /// Bytes before the urgent one; `NO_LIMIT`: no mark ahead.
    ahead: u32,
    /// Bytes at the end hidden from the reader, 0 or 1.
    hold: u32,
    /// The reader stands at the mark.
    pub(super) at_mark: bool,
    /// In line, the urgent byte is the next one.
    inline_next: bool,
    byte: Byte,
    /// The processing of the urgent byte has to be announced (CDC-32).
    pub(super) acknowledge: bool,
}

/// No mark ahead of the reader.
const NO_LIMIT: u32 = u32::MAX;

impl UrgentMark {
    pub(super) const NONE: UrgentMark = UrgentMark {
        inline: false,
        pending: false,
        last: None,
        ahead: NO_LIMIT,
        hold: 0,
        at_mark: false,
        inline_next: false,
        byte: Byte::None,
        acknowledge: false,
    };

    /// How many of `available` bytes a reader may see at once.
    #[inline]
    pub(super) const fn limit(&self, available: u32) -> u32 {
        let shown = available.saturating_sub(self.hold);
        if shown < self.ahead { shown } else { self.ahead }
    }

    /// Whether a read has to be reported to [`UrgentMark::on_read`].
    #[inline]
    pub(super) const fn is_live(&self) -> bool {
        self.at_mark || self.ahead != NO_LIMIT
    }

    /// New flags: `arrived` bytes came with them, up to `cursor`; `available` wait in total.
    /// Returns the change, with an offset for the caller to fill in, and whether the urgent byte is
    /// the next one and to be skipped.
    pub(super) fn on_flags(
        &mut self,
        flags: ProducerFlags,
        cursor: Cursor,
        arrived: u32,
        available: u32,
    ) -> (UrgentEvent, bool) {
        if flags.contains(ProducerFlags::URGENT_PRESENT) {
            (self.pending, self.hold) = (false, 0);
            if self.last == Some(cursor) {
                return (UrgentEvent::None, false);
            }
            self.last = Some(cursor);
            let Some(ahead) = available.checked_sub(1) else {
                // A peer without announcement let the reader take the byte for ordinary data.
                (self.byte, self.acknowledge) = (Byte::None, true);
                return (UrgentEvent::None, false);
            };
            (self.byte, self.at_mark, self.inline_next) = (Byte::Arrived, false, false);
            self.ahead = ahead;
            return (UrgentEvent::Present { offset: 0 }, self.arrive());
        }
        if !flags.contains(ProducerFlags::URGENT_PENDING) {
            (self.pending, self.hold) = (false, 0);
            return (UrgentEvent::None, false);
        }
        // P without U. The peer may have stored the cursor covering the urgent byte and be about to
        // store U: keep back the last byte, perhaps the urgent one. More follows for certain.
        if arrived != 0 {
            self.hold = 1;
        }
        let event = if self.pending { UrgentEvent::None } else { UrgentEvent::Pending };
        self.pending = true;
        (event, false)
    }

    /// `n > 0` bytes were read; returns whether the urgent byte is next and to be skipped.
    pub(super) fn on_read(&mut self, n: u32) -> bool {
        if self.at_mark {
            self.at_mark = false;
            self.byte = Byte::None;
            self.acknowledge |= self.inline_next;
            self.inline_next = false;
        }
        if self.ahead == NO_LIMIT {
            return false;
        }
        self.ahead -= n.min(self.ahead);
        self.arrive()
    }

    /// If the reader has reached the mark: stop here once, and skip an out-of-line byte.
    fn arrive(&mut self) -> bool {
        if self.ahead != 0 {
            return false;
        }
        self.ahead = NO_LIMIT;
        self.at_mark = true;
        self.inline_next = self.inline;
        self.acknowledge |= !self.inline;
        !self.inline
    }

    /// Switches SO_OOBINLINE; returns whether the urgent byte is next and to be skipped.
    pub(super) fn set_inline(&mut self, inline: bool) -> bool {
        self.inline = inline;
        let skip = self.inline_next && !inline;
        if skip {
            (self.inline_next, self.acknowledge) = (false, true);
        }
        skip
    }

    pub(super) fn on_acknowledged(&mut self) {
        self.acknowledge = false;
    }

    pub(super) fn on_end(&mut self) {
        (self.pending, self.hold) = (false, 0);
    }

    pub(super) const fn exception(&self) -> bool {
        self.pending || !matches!(self.byte, Byte::None)
    }

    pub(super) fn remember(&mut self, byte: u8) {
        if self.byte == Byte::Arrived {
            self.byte = Byte::Stored(byte);
        }
    }

    pub(super) fn take(&mut self, peek: bool) -> Result<u8, OobError> {
        if self.inline {
            return Err(OobError::Inline);
        }
        match self.byte {
            Byte::Stored(byte) => {
                if !peek {
                    self.byte = Byte::None;
                }
                Ok(byte)
            }
            Byte::Arrived => Err(OobError::NotYet),
            Byte::None if self.pending => Err(OobError::NotYet),
            Byte::None => Err(OobError::NoUrgent),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::connection::{Receiver, Ring, UpdateDecision};

    const NONE: ProducerFlags = ProducerFlags::empty();
    const P: ProducerFlags = ProducerFlags::URGENT_PENDING;
    const PU: ProducerFlags = ProducerFlags::URGENT_PENDING.union(ProducerFlags::URGENT_PRESENT);

    fn receiver() -> Receiver {
        Receiver::new(Ring::smcd(132).unwrap())
    }

    fn arrive(r: &mut Receiver, count: u32, flags: ProducerFlags) -> UrgentEvent {
        r.on_peer_producer(Cursor::new(0, count), flags).unwrap().urgent
    }

    // Shows: CDC-32, SOCK-8.
    #[test]
    fn out_of_line_a_read_stops_at_the_mark_and_the_next_goes_on_behind_it() {
        let mut r = receiver();
        assert_eq!(arrive(&mut r, 10, PU), UrgentEvent::Present { offset: 32 + 9 });
        r.remember_urgent(b'!');
        assert_eq!((r.readable(), r.available(), r.at_mark()), (9, 10, false));
        assert_eq!(r.consume(4), UpdateDecision::NotDue);
        assert_eq!(r.consume(5), UpdateDecision::Urgent);
        assert!(r.at_mark() && r.exception());
        assert_eq!((r.readable(), r.available(), r.cursor()), (0, 0, Cursor::new(0, 10)));
        r.on_published(r.cursor());
        assert_eq!(r.take_urgent(true), Ok(b'!'));
        assert_eq!(r.take_urgent(false), Ok(b'!'));
        assert_eq!(r.take_urgent(false), Err(OobError::NoUrgent));
        assert!(r.at_mark() && !r.exception());
        assert_eq!(arrive(&mut r, 20, NONE), UrgentEvent::None);
        assert_eq!(r.consume(1), UpdateDecision::NotDue);
        assert!(!r.at_mark());
    }

    // Shows: CDC-32.
    #[test]
    fn an_urgent_byte_alone_is_processed_at_once() {
        let mut r = receiver();
        let arrival = r.on_peer_producer(Cursor::new(0, 1), PU).unwrap();
        assert_eq!(arrival.update, UpdateDecision::Urgent);
        assert_eq!(arrival.urgent, UrgentEvent::Present { offset: 32 });
        assert!(r.at_mark() && r.readable() == 0);
    }

    // Shows: CDC-32, SOCK-8.
    #[test]
    fn in_line_the_byte_is_read_but_reads_stop_before_it() {
        let mut r = receiver();
        let _ = r.set_oob_inline(true);
        arrive(&mut r, 10, PU);
        assert_eq!(r.consume(u32::MAX), UpdateDecision::NotDue);
        assert!(r.at_mark() && r.exception());
        assert_eq!((r.readable(), r.cursor()), (1, Cursor::new(0, 9)));
        assert_eq!(r.take_urgent(false), Err(OobError::Inline));
        assert_eq!(r.consume(1), UpdateDecision::Urgent);
        assert!(!r.at_mark() && !r.exception());
    }

    // Shows: SOCK-8.
    #[test]
    fn switching_inline_off_at_the_mark_skips_the_byte() {
        let mut r = receiver();
        let _ = r.set_oob_inline(true);
        arrive(&mut r, 10, PU);
        let _ = r.consume(9);
        assert_eq!(r.set_oob_inline(false), UpdateDecision::Urgent);
        assert_eq!((r.readable(), r.cursor()), (0, Cursor::new(0, 10)));
        assert!(r.at_mark());
    }

    // Shows: CDC-28, CDC-31.
    #[test]
    fn p_alone_is_reported_once_and_is_an_exception() {
        let mut r = receiver();
        arrive(&mut r, 10, NONE);
        assert_eq!(r.take_urgent(false), Err(OobError::NoUrgent));
        assert_eq!(arrive(&mut r, 10, P), UrgentEvent::Pending);
        assert_eq!(arrive(&mut r, 10, P), UrgentEvent::None);
        assert_eq!(r.take_urgent(false), Err(OobError::NotYet));
        assert!(r.exception());
        assert_eq!(r.readable(), 10);
        assert_eq!(arrive(&mut r, 10, NONE), UrgentEvent::None);
        assert!(!r.exception());
    }

    #[test]
    fn bytes_that_come_with_p_keep_back_the_one_that_may_be_urgent() {
        let mut r = receiver();
        assert_eq!(arrive(&mut r, 10, P), UrgentEvent::Pending);
        assert_eq!((r.readable(), r.available()), (9, 10));
        let _ = r.consume(9);
        assert_eq!(arrive(&mut r, 10, PU), UrgentEvent::Present { offset: 32 + 9 });
        assert_eq!((r.readable(), r.at_mark()), (0, true));
        // The other way: the byte was an ordinary one.
        let mut r = receiver();
        arrive(&mut r, 10, P);
        arrive(&mut r, 12, PU);
        assert_eq!(r.readable(), 11);
    }

    #[test]
    fn a_peer_that_ends_with_p_on_loses_no_byte() {
        let mut r = receiver();
        arrive(&mut r, 10, P);
        r.on_peer_done();
        assert_eq!(r.readable(), 10);
        assert!(!r.exception());
    }

    // Shows: CDC-47.
    #[test]
    fn the_same_mark_again_is_no_event() {
        let mut r = receiver();
        arrive(&mut r, 10, PU);
        r.remember_urgent(1);
        assert_eq!(r.take_urgent(false), Ok(1));
        assert_eq!(arrive(&mut r, 10, PU), UrgentEvent::None);
        assert_eq!(r.take_urgent(false), Err(OobError::NoUrgent));
        let _ = r.consume(9);
        r.on_published(r.cursor());
        assert_eq!(arrive(&mut r, 10, PU), UrgentEvent::None);
        assert_eq!(r.update_due(), UpdateDecision::NotDue);
    }

    // Shows: SOCK-8.
    #[test]
    fn a_second_urgent_byte_replaces_one_that_was_not_taken() {
        let mut r = receiver();
        arrive(&mut r, 1, PU);
        r.remember_urgent(1);
        r.on_published(r.cursor());
        assert_eq!(arrive(&mut r, 2, PU), UrgentEvent::Present { offset: 33 });
        r.remember_urgent(2);
        assert_eq!(r.take_urgent(false), Ok(2));
    }

    // Shows: CDC-32.
    #[test]
    fn a_mark_that_comes_after_its_byte_was_read_is_acknowledged() {
        let mut r = receiver();
        arrive(&mut r, 10, NONE);
        let _ = r.consume(10);
        let arrival = r.on_peer_producer(Cursor::new(0, 10), PU).unwrap();
        assert_eq!(arrival.update, UpdateDecision::Urgent);
        assert_eq!(arrival.urgent, UrgentEvent::None);
        assert_eq!(r.take_urgent(false), Err(OobError::NoUrgent));
    }
}
