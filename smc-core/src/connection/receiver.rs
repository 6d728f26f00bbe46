// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The receiving direction of a connection: the arrived bytes in the own ring, and the time to
//! announce their reading to the peer.
//!
//! One read is, under the lock of the receive side:
//!
//! ```text
//! on_peer_producer(cursor, flags)   what has arrived, from the own control block
//! spans(n)                          where the next n <= readable() bytes lie
//! consume(n)                        they were copied out: whether to announce that now
//! on_published(cursor)              a control word with this consumer cursor went out
//! ```
//!
//! A control word may also leave for another reason and from another thread. Report the word's
//! cursor by [`Receiver::on_published`] at any time: late or in the wrong order is harmless here.
//! The control words themselves must go out in order, or the peer sees a cursor moving back.

use super::ring::{CursorError, Position, Ring, Span};
use super::urgent::{OobError, UrgentEvent, UrgentMark};
use crate::wire::Cursor;
use crate::wire::cdc::ProducerFlags;

/// Whether the consumer cursor has to be announced by a control word of its own (RFC 7609
/// section 4.5.1), and why.
#[must_use]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UpdateDecision {
    /// The next control word leaving for another reason carries the cursor (CDC-22).
    NotDue,
    /// The peer sees less than half of the ring free and would gain at least a tenth (CDC-21).
    Window,
    /// The peer reported a blocked writer (B): every consumption counts (CDC-20).
    WriterBlocked,
    /// The peer asked (R) and its view is out of date (CDC-23).
    Requested,
    /// Urgent data was processed; the peer writes nothing until told so (CDC-32).
    Urgent,
}

impl UpdateDecision {
    /// Whether a control word has to go out now.
    #[inline]
    pub const fn is_due(self) -> bool {
        !matches!(self, UpdateDecision::NotDue)
    }
}

/// The changes from the peer's producer cursor and flags.
#[must_use]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProducerUpdate {
    /// Bytes that have arrived since the last update.
    pub bytes: u32,
    /// Whether the peer waits for the consumer cursor.
    pub update: UpdateDecision,
    /// Change of the urgent mark.
    pub urgent: UrgentEvent,
}

/// The receiving direction of one connection. Plain data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Receiver {
    ring: Ring,
    /// Where the peer writes next, as last accepted.
    produced: Position,
    /// Where the application reads next.
    consumed: Position,
    /// Bytes from `consumed` to `produced`.
    available: u32,
    /// Bytes before `consumed` not known to be announced by a published control word. At most the
    /// ring, together with `available`.
    unpublished: u32,
    /// Half of the ring, bytes.
    half: u32,
    /// A tenth of the ring, bytes, rounded up.
    tenth: u32,
    /// The peer's flags of the last update.
    flags: ProducerFlags,
    urgent: UrgentMark,
}

impl Receiver {
    /// A receiver at the start of the own ring.
    pub const fn new(ring: Ring) -> Receiver {
        Receiver {
            ring,
            produced: Position::START,
            consumed: Position::START,
            available: 0,
            unpublished: 0,
            half: ring.len() / 2,
            tenth: ring.len().div_ceil(10),
            flags: ProducerFlags::empty(),
            urgent: UrgentMark::NONE,
        }
    }

    /// A receiver at the start of another ring, used by the peer once all bytes of this one were
    /// read. The program's choice about urgent bytes, and an urgent byte not taken yet, stay.
    #[must_use]
    pub const fn renew(&self, ring: Ring) -> Receiver {
        let mut new = Receiver::new(ring);
        new.urgent = self.urgent;
        new
    }

    /// The own ring.
    pub const fn ring(&self) -> &Ring {
        &self.ring
    }

    /// Takes over the peer's producer cursor and flags, from one read (see
    /// [`super::control::read_words`]).
    ///
    /// The peer may know a newer consumer cursor than the last one given to
    /// [`Receiver::on_published`]. So the producer cursor is checked against the bytes read, and
    /// not against the published cursor.
    ///
    /// # Errors
    /// An impossible cursor (see [`CursorError`]); nothing has changed, and the caller resets the
    /// connection.
    #[inline]
    pub fn on_peer_producer(
        &mut self,
        cursor: Cursor,
        flags: ProducerFlags,
    ) -> Result<ProducerUpdate, CursorError> {
        let (bytes, position) = self.ring.moved(self.produced, cursor)?;
        let space = self.ring.len() - self.available;
        if bytes > space {
            return Err(CursorError::BeyondWindow { cursor, claimed: bytes, space });
        }
        self.produced = position;
        self.available += bytes;
        if self.unpublished > space - bytes {
            self.on_early_use();
        }
        if self.flags.union(flags).is_empty() {
            let (update, urgent) = (UpdateDecision::NotDue, UrgentEvent::None);
            return Ok(ProducerUpdate { bytes, update, urgent });
        }
        Ok(self.on_flags(bytes, flags))
    }

    /// The peer has declared its end (D or C): nothing is held back any more.
    pub fn on_peer_done(&mut self) {
        self.urgent.on_end();
    }

    /// Bytes available to one read: up to the urgent mark if one lies ahead, as for TCP.
    ///
    /// A read ends at the mark ([`Receiver::at_mark`]) after taking bytes, even if more is readable
    /// behind the mark.
    #[inline]
    pub const fn readable(&self) -> u32 {
        self.urgent.limit(self.available)
    }

    /// Bytes waiting to be read, urgent ones included. A number above 0 at close means an abort
    /// (CLOSE-4).
    #[inline]
    pub const fn available(&self) -> u32 {
        self.available
    }

    /// The window in the peer's view, bytes, as far as this receiver knows.
    #[inline]
    pub const fn peer_window(&self) -> u32 {
        self.ring.len() - self.available - self.unpublished
    }

    /// The places of the next `n` bytes, in order; the second piece is empty unless the ring wraps.
    /// `n` is cut down to [`Receiver::readable`].
    #[inline]
    pub fn spans(&self, n: u32) -> [Span; 2] {
        self.ring.spans(self.consumed, n.min(self.readable()))
    }

    /// Like [`Receiver::spans`] behind the next `skip` bytes: for the continuation of a peek.
    #[inline]
    pub fn peek(&self, skip: u32, n: u32) -> [Span; 2] {
        let readable = self.readable();
        let skip = skip.min(readable);
        self.ring.spans(self.ring.advance(self.consumed, skip), n.min(readable - skip))
    }

    /// The application has the next `n` bytes (cut down to [`Receiver::readable`]).
    #[inline]
    pub fn consume(&mut self, n: u32) -> UpdateDecision {
        let n = n.min(self.readable());
        self.take(n);
        if self.urgent.is_live() && n != 0 {
            self.on_urgent_read(n);
        }
        self.update_due()
    }

    /// The consumer cursor, present in every control word (CDC-10, CDC-14, CDC-22).
    #[inline]
    pub const fn cursor(&self) -> Cursor {
        self.ring.cursor(self.consumed)
    }

    /// A control word with this consumer cursor went out. A cursor older than the newest published
    /// one is ignored.
    #[inline]
    pub fn on_published(&mut self, cursor: Cursor) {
        // Counted back from the newest one, so a missed cursor leaves no trace.
        if let Some(position) = self.ring.position(cursor)
            && let Ok((behind, _)) = self.ring.moved(position, self.cursor())
            && behind < self.unpublished
        {
            self.set_unpublished(behind);
        }
    }

    /// Whether the consumer cursor has to be announced now.
    #[inline]
    pub fn update_due(&self) -> UpdateDecision {
        if self.unpublished == 0 {
            return UpdateDecision::NotDue;
        }
        if self.urgent.acknowledge {
            return UpdateDecision::Urgent;
        }
        if self.flags.contains(ProducerFlags::BLOCKED) {
            return UpdateDecision::WriterBlocked;
        }
        if self.flags.contains(ProducerFlags::UPDATE_REQUESTED) {
            return UpdateDecision::Requested;
        }
        // The peer's window is below half exactly if more than half is out of its hands. A tenth
        // is one of the buffer, not of the window (wire erratum B-19).
        if self.available + self.unpublished > self.half && self.unpublished >= self.tenth {
            return UpdateDecision::Window;
        }
        UpdateDecision::NotDue
    }

    /// Discards unread bytes: the connection is aborted (CLOSE-26).
    pub fn purge(&mut self) {
        self.take(self.available);
        self.urgent = UrgentMark::NONE;
    }

    /// Whether the next byte to read is the urgent one or, out of line, was just skipped
    /// (SIOCATMARK).
    pub const fn at_mark(&self) -> bool {
        self.urgent.at_mark
    }

    /// Whether the socket has an exceptional condition (POLLPRI): urgent data is announced or
    /// there, and neither taken nor read past (CDC-31).
    pub const fn exception(&self) -> bool {
        self.urgent.exception()
    }

    /// Hands over the urgent byte at the offset of [`UrgentEvent::Present`]. Copy the byte out of
    /// the ring before publishing the consumer cursor, because the peer may then overwrite the
    /// byte.
    pub fn remember_urgent(&mut self, byte: u8) {
        self.urgent.remember(byte);
    }

    /// The urgent byte out of line (MSG_OOB); `peek` leaves the byte.
    ///
    /// # Errors
    /// No urgent byte, not yet arrived, or in line.
    pub fn take_urgent(&mut self, peek: bool) -> Result<u8, OobError> {
        self.urgent.take(peek)
    }

    /// Whether the urgent byte stays in the stream (SO_OOBINLINE).
    pub fn set_oob_inline(&mut self, inline: bool) -> UpdateDecision {
        if self.urgent.set_inline(inline) {
            self.take(1);
        }
        self.update_due()
    }

    /// Moves the read position; `n` is at most `available`.
    #[inline]
    fn take(&mut self, n: u32) {
        self.consumed = self.ring.advance(self.consumed, n);
        self.available -= n;
        self.unpublished += n;
    }

    #[inline]
    fn set_unpublished(&mut self, n: u32) {
        self.unpublished = n;
        if n == 0 {
            self.urgent.on_acknowledged();
        }
    }

    /// The peer uses space without a reported announcement ([`Receiver::on_published`]): a control
    /// word with the announcement must have gone out.
    #[cold]
    fn on_early_use(&mut self) {
        self.set_unpublished(self.ring.len() - self.available);
    }

    #[cold]
    fn on_urgent_read(&mut self, n: u32) {
        if self.urgent.on_read(n) {
            self.take(1);
        }
    }

    #[cold]
    fn on_flags(&mut self, bytes: u32, flags: ProducerFlags) -> ProducerUpdate {
        self.flags = flags;
        let (mut urgent, skip) =
            self.urgent.on_flags(flags, self.ring.cursor(self.produced), bytes, self.available);
        if let UrgentEvent::Present { offset } = &mut urgent {
            // The byte before the producer cursor (wire erratum B-10).
            let byte = self.ring.advance(self.consumed, self.available - 1);
            *offset = self.ring.spans(byte, 1)[0].offset;
        }
        if skip {
            self.take(1);
        }
        // The window alone is no reason to write when data arrives: the next read checks the
        // window.
        let update = match self.update_due() {
            UpdateDecision::Window => UpdateDecision::NotDue,
            due => due,
        };
        ProducerUpdate { bytes, update, urgent }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NONE: ProducerFlags = ProducerFlags::empty();
    const B: ProducerFlags = ProducerFlags::BLOCKED;
    const R: ProducerFlags = ProducerFlags::UPDATE_REQUESTED;

    /// A ring of `len` bytes with `arrived` bytes in the ring.
    fn receiver(len: u32, arrived: u32, flags: ProducerFlags) -> Receiver {
        let mut r = Receiver::new(Ring::smcd(len + 32).unwrap());
        let cursor = Cursor::new((arrived / len) as u16, arrived % len);
        assert_eq!(r.on_peer_producer(cursor, flags).unwrap().bytes, arrived);
        r
    }

    // Shows: CDC-21.
    #[test]
    fn the_window_rule_follows_the_examples_of_the_rfc() {
        // 64K buffer, 50K free for the sender: no need.
        assert_eq!(receiver(65536, 14336, NONE).consume(14336), UpdateDecision::NotDue);
        // 30K free, and 31K after the update: too little gain.
        assert_eq!(receiver(65536, 34816, NONE).consume(1024), UpdateDecision::NotDue);
        // 30K free, and 64K after the update.
        assert_eq!(receiver(65536, 34816, NONE).consume(34816), UpdateDecision::Window);
        // Just below half, and just a tenth.
        assert_eq!(receiver(100, 51, NONE).consume(10), UpdateDecision::Window);
        assert_eq!(receiver(100, 51, NONE).consume(9), UpdateDecision::NotDue);
        assert_eq!(receiver(100, 50, NONE).consume(50), UpdateDecision::NotDue);
    }

    // Shows: CDC-20.
    #[test]
    fn a_blocked_writer_hears_of_every_byte_until_b_goes_off() {
        let mut r = receiver(100, 100, B);
        for _ in 0..3 {
            assert_eq!(r.consume(1), UpdateDecision::WriterBlocked);
            r.on_published(r.cursor());
        }
        let _ = r.on_peer_producer(Cursor::new(1, 0), NONE).unwrap();
        assert_eq!(r.consume(1), UpdateDecision::NotDue);
        // B again, with the byte unknown to the peer.
        let arrival = r.on_peer_producer(Cursor::new(1, 3), B).unwrap();
        assert_eq!(arrival.update, UpdateDecision::WriterBlocked);
        // The same words again, and nothing read: nothing to announce.
        r.on_published(r.cursor());
        let arrival = r.on_peer_producer(Cursor::new(1, 3), B).unwrap();
        assert_eq!(arrival.update, UpdateDecision::NotDue);
    }

    // Shows: CDC-23.
    #[test]
    fn a_request_is_answered_at_once_if_the_peer_is_out_of_date() {
        let mut r = receiver(100, 20, NONE);
        let arrival = r.on_peer_producer(Cursor::new(0, 20), R).unwrap();
        assert_eq!(arrival.update, UpdateDecision::NotDue);
        assert_eq!(r.consume(1), UpdateDecision::Requested);
        r.on_published(r.cursor());
        let _ = r.on_peer_producer(Cursor::new(0, 20), NONE).unwrap();
        assert_eq!(r.consume(1), UpdateDecision::NotDue);
        let arrival = r.on_peer_producer(Cursor::new(0, 20), R).unwrap();
        assert_eq!(arrival.update, UpdateDecision::Requested);
    }

    // Shows: CDC-21.
    #[test]
    fn arrival_alone_is_no_reason_to_write() {
        let mut r = receiver(100, 30, NONE);
        assert_eq!(r.consume(30), UpdateDecision::NotDue);
        let arrival = r.on_peer_producer(Cursor::new(0, 90), NONE).unwrap();
        assert_eq!(arrival.update, UpdateDecision::NotDue);
        assert_eq!(r.consume(1), UpdateDecision::Window);
    }

    // Shows: CDC-22.
    #[test]
    fn a_cursor_that_went_out_for_another_reason_counts() {
        let mut r = receiver(100, 60, NONE);
        assert_eq!(r.consume(9), UpdateDecision::NotDue);
        r.on_published(r.cursor());
        assert_eq!(r.peer_window(), 49);
        assert_eq!(r.consume(9), UpdateDecision::NotDue);
        assert_eq!(r.consume(1), UpdateDecision::Window);
    }

    #[test]
    fn a_peer_that_uses_freed_space_early_has_no_window_left() {
        let mut r = receiver(100, 60, NONE);
        let _ = r.consume(60);
        let _ = r.on_peer_producer(Cursor::new(1, 20), NONE).unwrap();
        assert_eq!((r.available(), r.peer_window()), (60, 0));
    }

    #[test]
    fn a_receiver_without_reports_of_publishing_keeps_step_with_a_peer_that_writes_on() {
        let mut r = Receiver::new(Ring::smcd(100 + 32).unwrap());
        for round in 1..5 {
            let _ = r.on_peer_producer(Cursor::new(round, 0), NONE).unwrap();
            assert_eq!((r.available(), r.peer_window()), (100, 0));
            assert_eq!(r.consume(100), UpdateDecision::Window);
        }
        r.on_published(r.cursor());
        assert_eq!((r.peer_window(), r.update_due()), (100, UpdateDecision::NotDue));
    }

    #[test]
    fn a_cursor_that_cannot_have_gone_out_is_ignored() {
        let mut r = receiver(100, 60, NONE);
        let _ = r.consume(20);
        let before = r;
        for never in [Cursor::new(0, 21), Cursor::new(1, 0), Cursor::new(0, 100)] {
            r.on_published(never);
            assert_eq!(r, before);
        }
    }

    #[test]
    fn a_lying_peer_changes_nothing() {
        let mut r = receiver(100, 60, NONE);
        let _ = r.consume(20);
        let before = r;
        for lie in [
            Cursor::new(0, 59),
            Cursor::new(0, 100),
            Cursor::new(1, 21),
            Cursor::new(2, 60),
            Cursor::new(u16::MAX, 60),
        ] {
            assert!(r.on_peer_producer(lie, B | R).is_err(), "{lie:?}");
            assert_eq!(r, before);
        }
        assert_eq!(
            r.on_peer_producer(Cursor::new(1, 21), NONE),
            Err(CursorError::BeyondWindow { cursor: Cursor::new(1, 21), claimed: 61, space: 60 })
        );
        assert_eq!(r.on_peer_producer(Cursor::new(1, 20), NONE).unwrap().bytes, 60);
    }

    #[test]
    fn reads_and_peeks_are_cut_down_to_what_is_there() {
        let mut r = receiver(100, 60, NONE);
        assert_eq!(r.spans(u32::MAX)[0], Span { offset: 32, len: 60 });
        assert_eq!(r.peek(50, 50)[0], Span { offset: 82, len: 10 });
        assert_eq!(r.peek(u32::MAX, u32::MAX)[0].len, 0);
        assert_eq!(r.available(), 60);
        let _ = r.consume(u32::MAX);
        assert_eq!((r.available(), r.cursor()), (0, Cursor::new(0, 60)));
    }

    // Shows: CLOSE-26.
    #[test]
    fn a_purge_leaves_nothing_to_read_and_a_legal_cursor() {
        let mut r = receiver(100, 60, NONE);
        r.purge();
        assert_eq!((r.readable(), r.cursor()), (0, Cursor::new(0, 60)));
    }
}
