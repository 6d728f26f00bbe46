// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The sending direction of a connection: the permitted writes into the peer's ring, and their
//! places.
//!
//! One write is four calls, under the lock of the send side:
//!
//! ```text
//! on_peer_consumer(cursor)   what the peer has read, from its control word
//! spans(n)                   where to copy the next n <= space() bytes
//! advance(n, more)           the bytes are in place
//! producer_word(), flags()   what to publish, after the bytes
//! on_published()             the control word is out
//! ```
//!
//! # Urgent data (RFC 7609 sections 4.7.5 and 4.7.6)
//!
//! [`Sender::advance_urgent`] ends a write with an urgent last byte: P and U go out with the byte,
//! and [`Sender::space`] is 0 until the peer's consumer cursor has passed that byte. If the write
//! does not fit, [`Sender::announce_urgent`] comes first, to send P with the window closed.
//!
//! On SMC-D cursor and flags are two words, and a reader may load between the two stores. Two
//! changes of flags would mislead the reader: U still on next to a later cursor (a mark in the
//! wrong place), and U not on yet next to a cursor already covering the urgent byte (the byte taken
//! for ordinary data). [`Sender::flags_ahead`] names the flags to store ahead of the producer word
//! in these two cases, so neither combination is visible.
//!
//! # A peer moving to another link (RFC 7609 section 4.6)
//!
//! The peer's reports of reading on the failed link may be lost, and the peer does not know of the
//! loss. A ring may look full to this end and be empty, for ever: AF_SMC neither repeats the report
//! by itself nor when asked (R) while there is nothing to read. AF_SMC does answer when reading a
//! byte sent along with R. So a sender may [hold back](Sender::holding_back) some bytes of the
//! ring. [`Sender::peer_moved`] lends one of the bytes, and sets R until the peer reports the
//! reading of a byte written afterwards: such a report comes on the new link.

use super::ring::{CursorError, Position, Ring, Span};
use crate::wire::Cursor;
use crate::wire::cdc::{ProducerFlags, ProducerWord};

/// The sending direction of one connection. Plain data, less than a cache line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sender {
    ring: Ring,
    /// Where the next byte goes (CDC-9).
    produced: Position,
    /// How far the peer has read, as last accepted.
    consumed: Position,
    /// Bytes between the two.
    in_flight: u32,
    flags: ProducerFlags,
    /// The last published flags.
    published: ProducerFlags,
    /// Urgent data was announced and its last byte is not written yet.
    urgent_announced: bool,
    /// Number of bytes held back.
    held: u32,
    /// Initial number of bytes held back.
    reserve: u32,
    /// Bytes to be read by the peer until its reports are certainly new; 0: the reports are new.
    outdated: u32,
}

const _: () = assert!(size_of::<Sender>() < 64);

impl Sender {
    /// A sender at the start of the peer's ring.
    pub const fn new(ring: Ring) -> Sender {
        Sender {
            ring,
            produced: Position::START,
            consumed: Position::START,
            in_flight: 0,
            flags: ProducerFlags::empty(),
            published: ProducerFlags::empty(),
            urgent_announced: false,
            held: 0,
            reserve: 0,
            outdated: 0,
        }
    }

    /// Moves to another ring, with the sender `new`. The limits of use stay.
    #[must_use]
    pub fn renew(&self, mut new: Sender) -> Sender {
        if self.reserve > 0 && self.reserve != new.reserve {
            new.limit_to(self.usable());
        }
        new
    }

    /// Holds back so many bytes of the ring for [`Sender::peer_moved`]. Each call of `peer_moved`
    /// lends one byte until the peer has answered. Rings shorter than four times `bytes` hold back
    /// nothing.
    #[must_use]
    pub const fn holding_back(mut self, bytes: u8) -> Sender {
        if bytes as u32 <= self.ring.len() / 4 {
            (self.held, self.reserve) = (bytes as u32, bytes as u32);
        }
        self
    }

    /// Uses at most so many bytes of the ring from now on, to bound an application's data in flight
    /// (SO_SNDBUF). Independent of the present content. At least a quarter of the ring stays in
    /// use.
    pub fn limit_to(&mut self, bytes: u32) {
        let bytes = bytes.max(self.ring.len() / 4);
        let reserve = self.ring.len().saturating_sub(bytes).max(self.reserve);
        self.held = reserve.saturating_sub(self.reserve - self.held);
        self.reserve = reserve;
    }

    /// Maximum number of bytes in use.
    #[inline]
    pub const fn usable(&self) -> u32 {
        self.ring.len() - self.reserve
    }

    /// The peer's ring.
    pub const fn ring(&self) -> &Ring {
        &self.ring
    }

    /// Bytes that may be written now; 0 while an urgent byte waits to be read (CDC-33).
    #[inline]
    pub const fn space(&self) -> u32 {
        if self.urgent_unread() { 0 } else { self.room() }
    }

    /// Bytes free in the peer's ring (CDC-16), including bytes that may not be written now.
    #[inline]
    pub const fn window(&self) -> u32 {
        self.ring.len() - self.in_flight
    }

    /// The window without the bytes held back.
    #[inline]
    const fn room(&self) -> u32 {
        self.window().saturating_sub(self.held)
    }

    /// Written bytes without a report of their reading by the peer.
    #[inline]
    pub const fn in_flight(&self) -> u32 {
        self.in_flight
    }

    /// Whether a written urgent byte is still unread, stopping all writes.
    ///
    /// Nothing is written behind an urgent byte, so the byte is read exactly when everything is
    /// read.
    #[inline]
    pub const fn urgent_unread(&self) -> bool {
        self.flags.contains(ProducerFlags::URGENT_PRESENT) && self.in_flight != 0
    }

    /// Takes over the consumer cursor of the peer's control word; returns the number of freed
    /// bytes.
    ///
    /// # Errors
    /// The cursor cannot be true (see [`CursorError`]); nothing has changed, and the caller
    /// resets the connection.
    #[inline]
    pub fn on_peer_consumer(&mut self, cursor: Cursor) -> Result<u32, CursorError> {
        let (claimed, position) = self.ring.moved(self.consumed, cursor)?;
        if claimed > self.in_flight {
            let in_flight = self.in_flight;
            return Err(CursorError::BeyondProduced { cursor, claimed, in_flight });
        }
        self.consumed = position;
        self.in_flight -= claimed;
        if claimed != 0 && self.flags.contains(ProducerFlags::UPDATE_REQUESTED) {
            self.on_answer(claimed);
        }
        Ok(claimed)
    }

    /// The peer goes on over another link, so its last report may be lost. R goes on, and one of
    /// the bytes held back may be written, if there is no other room.
    pub const fn peer_moved(&mut self) {
        if self.room() == 0 {
            self.held = self.held.saturating_sub(1);
        }
        self.outdated = self.in_flight + 1;
        self.flags = self.flags.union(ProducerFlags::UPDATE_REQUESTED);
    }

    /// Whether the peer's report of reading may be too small after a [move](Sender::peer_moved):
    /// every byte allowed is worth writing.
    #[inline]
    pub const fn is_outdated(&self) -> bool {
        self.outdated != 0
    }

    /// The places of the next `n` bytes, in order; the second piece is empty unless the ring wraps.
    ///
    /// `n` is cut down to [`Sender::space`]: no piece ever covers a byte unread by the peer, or one
    /// outside the ring (RMB-26, RMB-27).
    #[inline]
    pub fn spans(&self, n: u32) -> [Span; 2] {
        self.ring.spans(self.produced, n.min(self.space()))
    }

    /// The next `n` bytes are in place; returns the number of counted bytes, at most
    /// [`Sender::space`].
    ///
    /// `more`: the application has further bytes without room, and B tells the peer so (CDC-19). A
    /// full ring without `more` sets no flag.
    #[inline]
    pub fn advance(&mut self, n: u32, more: bool) -> u32 {
        let n = n.min(self.space());
        self.produced = self.ring.advance(self.produced, n);
        self.in_flight += n;
        let blocked = more && self.room() == 0;
        if blocked || !self.flags.is_empty() {
            self.update_flags(n, blocked);
        }
        n
    }

    /// Like [`Sender::advance`] for the end of an urgent send: the last of the `n` bytes is the
    /// urgent one, published with P and U (CDC-29).
    ///
    /// Nothing is counted, and 0 returned, unless all `n` bytes fit: announce the urgent data and
    /// write the fitting part by [`Sender::advance`] first.
    pub fn advance_urgent(&mut self, n: u32) -> u32 {
        if n == 0 || n > self.space() {
            return 0;
        }
        self.advance(n, false);
        self.urgent_announced = false;
        self.flags.insert(ProducerFlags::URGENT_PENDING | ProducerFlags::URGENT_PRESENT);
        n
    }

    /// Urgent data exists but cannot be written now: P goes on, and B if the ring is full (CDC-30).
    /// Publish if [`Sender::publish_due`].
    pub fn announce_urgent(&mut self) {
        self.urgent_announced = true;
        self.flags.insert(ProducerFlags::URGENT_PENDING);
        self.block();
    }

    /// Takes an announcement back: the application gave up before the urgent byte was written.
    pub fn cancel_urgent(&mut self) {
        self.urgent_announced = false;
        if !self.flags.contains(ProducerFlags::URGENT_PRESENT) {
            self.flags.remove(ProducerFlags::URGENT_PENDING);
        }
    }

    /// A write found no room. Sets B if the ring is full (except for bytes held back, and not
    /// merely stopped by urgent data). Publish if [`Sender::publish_due`]; otherwise the peer has
    /// no reason to hurry.
    pub fn block(&mut self) {
        self.flags.set(ProducerFlags::BLOCKED, self.room() == 0);
    }

    /// The application no longer waits for room: B goes off with the next control word.
    pub fn unblock(&mut self) {
        self.flags.remove(ProducerFlags::BLOCKED);
    }

    /// Asks the peer for its consumer cursor (R) until the cursor moves. For diagnosis only
    /// (CDC-24).
    pub fn request_update(&mut self) {
        self.flags.insert(ProducerFlags::UPDATE_REQUESTED);
    }

    /// The flags of every control word sent now.
    #[inline]
    pub const fn flags(&self) -> ProducerFlags {
        self.flags
    }

    /// Whether flags have changed that the peer has to learn without new bytes: B, P or R went on.
    #[inline]
    pub const fn publish_due(&self) -> bool {
        !self.published.contains(self.flags)
    }

    /// The producer cursor.
    #[inline]
    pub const fn cursor(&self) -> Cursor {
        self.ring.cursor(self.produced)
    }

    /// The peer's consumer cursor, as last accepted.
    #[inline]
    pub const fn consumed(&self) -> Cursor {
        self.ring.cursor(self.consumed)
    }

    /// The producer word of an SMC-D control block.
    #[inline]
    pub const fn producer_word(&self) -> ProducerWord {
        ProducerWord { cursor: self.cursor() }
    }

    /// SMC-D only: flags to store, in a consumer word of their own and without new state flags,
    /// ahead of the producer word; `None` nearly always. See the head of this file.
    #[inline]
    pub fn flags_ahead(&self) -> Option<ProducerFlags> {
        if self.flags == self.published { None } else { self.torn_flags() }
    }

    /// A control word with [`Sender::flags`] went out.
    #[inline]
    pub fn on_published(&mut self) {
        self.published = self.flags;
    }

    #[cold]
    fn torn_flags(&self) -> Option<ProducerFlags> {
        let present = ProducerFlags::URGENT_PRESENT;
        let pending = ProducerFlags::URGENT_PENDING;
        let mark_ends = self.published.contains(present) && !self.flags.contains(present);
        let mark_unannounced = self.flags.contains(present) && !self.published.contains(pending);
        (mark_ends || mark_unannounced).then(|| self.flags - present)
    }

    /// The peer has read on after the request.
    #[cold]
    fn on_answer(&mut self, claimed: u32) {
        self.outdated = self.outdated.saturating_sub(claimed);
        if self.outdated == 0 {
            self.held = self.reserve;
            self.flags.remove(ProducerFlags::UPDATE_REQUESTED);
        }
    }

    /// Flags after `n` ordinary bytes.
    #[cold]
    fn update_flags(&mut self, n: u32, blocked: bool) {
        self.flags.set(ProducerFlags::BLOCKED, blocked);
        if n != 0 {
            // The next normal data ends the urgent mode begun before (CDC-34).
            self.flags.remove(ProducerFlags::URGENT_PRESENT);
            self.flags.set(ProducerFlags::URGENT_PENDING, self.urgent_announced);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const B: ProducerFlags = ProducerFlags::BLOCKED;
    const P: ProducerFlags = ProducerFlags::URGENT_PENDING;
    const U: ProducerFlags = ProducerFlags::URGENT_PRESENT;
    const R: ProducerFlags = ProducerFlags::UPDATE_REQUESTED;
    const NONE: ProducerFlags = ProducerFlags::empty();

    fn sender() -> Sender {
        Sender::new(Ring::smcd(132).unwrap())
    }

    // Shows: RMB-26, CDC-16.
    #[test]
    fn window_shrinks_by_writes_and_grows_by_reads() {
        let mut s = sender();
        assert_eq!((s.space(), s.cursor()), (100, Cursor::new(0, 0)));
        assert_eq!(s.advance(70, false), 70);
        assert_eq!((s.space(), s.in_flight(), s.cursor()), (30, 70, Cursor::new(0, 70)));
        assert_eq!(s.on_peer_consumer(Cursor::new(0, 50)), Ok(50));
        assert_eq!(s.spans(80), [Span { offset: 102, len: 30 }, Span { offset: 32, len: 50 }]);
        assert_eq!(s.advance(80, false), 80);
        assert_eq!((s.space(), s.cursor()), (0, Cursor::new(1, 50)));
    }

    // Shows: RMB-26.
    #[test]
    fn more_than_the_window_is_cut_down() {
        let mut s = sender();
        assert_eq!(s.spans(u32::MAX), [Span { offset: 32, len: 100 }, Span { offset: 32, len: 0 }]);
        assert_eq!(s.advance(u32::MAX, false), 100);
        assert_eq!(s.advance(1, false), 0);
    }

    #[test]
    fn a_lying_peer_changes_nothing() {
        let mut s = sender();
        s.advance(60, false);
        s.on_peer_consumer(Cursor::new(0, 40)).unwrap();
        let before = s;
        for lie in [
            Cursor::new(0, 61),
            Cursor::new(0, 39),
            Cursor::new(1, 40),
            Cursor::new(0, 100),
            Cursor::new(2, 50),
            Cursor::new(u16::MAX, 50),
        ] {
            assert!(s.on_peer_consumer(lie).is_err(), "{lie:?}");
            assert_eq!(s, before);
        }
        assert_eq!(
            s.on_peer_consumer(Cursor::new(0, 61)),
            Err(CursorError::BeyondProduced {
                cursor: Cursor::new(0, 61),
                claimed: 21,
                in_flight: 20
            })
        );
    }

    // Shows: CDC-19.
    #[test]
    fn b_needs_a_full_ring_and_unsent_bytes() {
        let mut s = sender();
        s.advance(100, false);
        assert_eq!(s.flags(), NONE);
        s.block();
        assert!(s.flags() == B && s.publish_due());
        s.on_published();
        s.on_peer_consumer(Cursor::new(0, 10)).unwrap();
        assert!(s.flags() == B && !s.publish_due());
        s.advance(10, true);
        assert_eq!(s.flags(), B);
        s.on_peer_consumer(Cursor::new(0, 40)).unwrap();
        s.advance(10, false);
        assert_eq!(s.flags(), NONE);
    }

    // Shows: CDC-23, CDC-24.
    #[test]
    fn r_stays_until_the_peer_moves() {
        let mut s = sender();
        s.advance(10, false);
        s.request_update();
        assert_eq!(s.on_peer_consumer(Cursor::new(0, 0)), Ok(0));
        assert_eq!(s.flags(), ProducerFlags::UPDATE_REQUESTED);
        s.on_peer_consumer(Cursor::new(0, 1)).unwrap();
        assert_eq!(s.flags(), NONE);
    }

    #[test]
    fn what_is_held_back_is_no_room() {
        let mut s = sender().holding_back(3);
        assert_eq!((s.space(), s.window()), (97, 100));
        assert_eq!(s.advance(100, true), 97);
        assert_eq!((s.space(), s.flags()), (0, B));
        s.on_peer_consumer(Cursor::new(0, 2)).unwrap();
        assert_eq!(s.space(), 2);
        assert_eq!(sender().holding_back(26).space(), 100);
    }

    #[test]
    fn a_limit_leaves_part_of_the_ring_unused() {
        let mut s = sender().holding_back(2);
        s.advance(98, true);
        s.peer_moved();
        s.limit_to(60);
        assert_eq!((s.space(), s.usable()), (0, 60));
        s.on_peer_consumer(Cursor::new(0, 50)).unwrap();
        assert_eq!(s.space(), 13, "one byte is lent");
        s.limit_to(90);
        assert_eq!(s.usable(), 60, "a limit is not taken back");
        let mut s = sender();
        s.limit_to(1);
        assert_eq!((s.usable(), s.advance(90, true), s.flags()), (25, 25, B));
    }

    // Shows: CDC-24.
    #[test]
    fn a_peer_that_moved_is_asked_by_a_byte_that_was_held_back() {
        let mut s = sender().holding_back(2);
        s.advance(98, true);
        s.on_published();
        s.peer_moved();
        assert_eq!((s.space(), s.flags()), (1, B | R));
        assert!(s.publish_due() && s.is_outdated());
        assert_eq!(s.advance(5, true), 1);
        assert_eq!(s.space(), 0);
        // The peer moves again, before an answer.
        s.peer_moved();
        assert_eq!((s.advance(5, true), s.flags()), (1, B | R));
        s.peer_moved();
        assert_eq!(s.space(), 0, "no more than a ring");
        // Sent before the move, and seen late.
        s.on_peer_consumer(Cursor::new(0, 98)).unwrap();
        assert!(s.is_outdated() && s.flags().contains(R));
        assert_eq!(s.advance(1, false), 1);
        s.on_peer_consumer(Cursor::new(1, 1)).unwrap();
        assert_eq!((s.flags(), s.space(), s.is_outdated()), (NONE, 98, false));
    }

    // Shows: CDC-33, CDC-34.
    #[test]
    fn nothing_follows_an_urgent_byte_until_it_is_read() {
        let mut s = sender();
        assert_eq!(s.advance_urgent(10), 10);
        assert_eq!((s.flags(), s.space(), s.window()), (P | U, 0, 90));
        assert_eq!(s.advance(5, true), 0);
        assert_eq!(s.flags(), P | U);
        s.on_peer_consumer(Cursor::new(0, 9)).unwrap();
        assert_eq!(s.space(), 0);
        s.on_peer_consumer(Cursor::new(0, 10)).unwrap();
        assert_eq!((s.flags(), s.space()), (P | U, 100));
        assert_eq!(s.advance(5, false), 5);
        assert_eq!(s.flags(), NONE);
    }

    // Shows: CDC-30.
    #[test]
    fn a_closed_window_announces_urgent_data_first() {
        let mut s = sender();
        s.advance(100, false);
        s.announce_urgent();
        assert!(s.flags() == P | B && s.publish_due());
        s.on_published();
        s.on_peer_consumer(Cursor::new(0, 3)).unwrap();
        assert_eq!(s.advance_urgent(4), 0);
        s.advance(3, true);
        assert_eq!(s.flags(), P | B);
        s.on_peer_consumer(Cursor::new(1, 3)).unwrap();
        assert_eq!(s.advance_urgent(1), 1);
        assert_eq!(s.flags(), P | U);
    }

    #[test]
    fn an_announcement_can_be_taken_back() {
        let mut s = sender();
        s.announce_urgent();
        s.cancel_urgent();
        assert_eq!(s.flags(), NONE);
        s.advance_urgent(1);
        s.announce_urgent();
        s.cancel_urgent();
        assert_eq!(s.flags(), P | U);
    }

    // Shows: CDC-34.
    #[test]
    fn only_the_edges_of_a_mark_store_flags_ahead() {
        let mut s = sender();
        s.advance(5, false);
        assert_eq!(s.flags_ahead(), None);
        s.advance_urgent(5);
        assert_eq!(s.flags_ahead(), Some(P));
        s.on_published();
        assert_eq!(s.flags_ahead(), None);
        s.on_peer_consumer(Cursor::new(0, 10)).unwrap();
        // A second urgent send right behind the first: U means the new cursor as well.
        s.advance_urgent(5);
        assert_eq!(s.flags_ahead(), None);
        s.on_published();
        s.on_peer_consumer(Cursor::new(0, 15)).unwrap();
        s.advance(5, false);
        assert_eq!(s.flags_ahead(), Some(NONE));
        s.on_published();
        s.advance(80, true);
        s.advance(0, true);
        assert_eq!(s.flags_ahead(), None);
    }
}
