// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The ring behind a buffer element: geometry, positions, pieces.
//!
//! ```text
//!             offset                       offset + len
//! element  |  head  |  ring byte 0 .. ring byte len-1  |
//! cursor             base          ..  base + len - 1       then base again, wrap + 1
//! ```
//!
//! SMC-R (RFC 7609 section 4.7.4) counts cursors from the start of the element, so head and base
//! are the 4 bytes of the eye catcher; SMC-D counts from the ring, behind the 32 bytes of the
//! control block; a peer without eye catcher has neither head nor base. Everything above this file
//! works on [`Position`]s, starting at 0 in all three.

use thiserror::Error;

use crate::wire::Cursor;

/// Bytes of the control block at the start of an SMC-D element (CDC-46).
pub const SMCD_CONTROL_LEN: u32 = 32;
/// Bytes of the eye catcher at the start of an SMC-R element (RMB-6).
pub const EYE_CATCHER_LEN: u32 = 4;
/// The eye catcher at the start of an SMC-R element: "SMCR" in EBCDIC. Any four bytes would do; only
/// the owner of the element reads them (RMB-6).
pub const EYE_CATCHER: [u8; EYE_CATCHER_LEN as usize] = [0xe2, 0xd4, 0xc3, 0xd9];
/// Largest ring, bytes: sums of two ring lengths stay within 32 bits. The largest size code means
/// 512 MiB.
pub const MAX_RING_LEN: u32 = 1 << 30;

/// The error for a buffer element too small for a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum RingError {
    /// The element has no space beyond its head.
    #[error("an element of {len} bytes has no room behind its first {head}")]
    TooSmall {
        /// Length of the element, bytes.
        len: u32,
        /// Bytes in front of the ring.
        head: u32,
    },
    /// The element is larger than any size code allows.
    #[error("an element of {len} bytes is too large")]
    TooLarge {
        /// Length of the element, bytes.
        len: u32,
    },
}

/// A cursor impossible for an honest peer (SEC-11).
///
/// The receiving connection is reset and nothing else is touched.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum CursorError {
    /// The cursor points outside the ring.
    #[error("cursor {cursor:?} is outside the ring, which runs from {first} to {last}")]
    BeyondRing {
        /// The peer's cursor.
        cursor: Cursor,
        /// Smallest legal count.
        first: u32,
        /// Largest legal count.
        last: u32,
    },
    /// The cursor lies before an earlier accepted one.
    #[error("cursor went back from {from:?} to {to:?}")]
    Backwards {
        /// The cursor accepted last.
        from: Cursor,
        /// The peer's cursor.
        to: Cursor,
    },
    /// The wrap sequence number went up by more than one, beyond the capacity of any ring.
    #[error("cursor skipped a wrap from {from:?} to {to:?}")]
    WrapSkipped {
        /// The cursor accepted last.
        from: Cursor,
        /// The peer's cursor.
        to: Cursor,
    },
    /// A consumer cursor acknowledging bytes never written.
    #[error("cursor {cursor:?} acknowledges {claimed} bytes of {in_flight} in flight")]
    BeyondProduced {
        /// The peer's cursor.
        cursor: Cursor,
        /// Bytes acknowledged by the cursor.
        claimed: u32,
        /// Bytes written and not acknowledged.
        in_flight: u32,
    },
    /// A producer cursor announcing more bytes than free space.
    #[error("cursor {cursor:?} announces {claimed} bytes where {space} fit")]
    BeyondWindow {
        /// The peer's cursor.
        cursor: Cursor,
        /// Bytes announced by the cursor.
        claimed: u32,
        /// Free bytes before.
        space: u32,
    },
}

/// A contiguous piece of an element.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Span {
    /// Offset from the start of the element, bytes.
    pub offset: u32,
    /// Length, bytes; 0: nothing.
    pub len: u32,
}

/// A place in a ring, freed of the bases of the different SMC types.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Position {
    /// Offset from ring byte 0; always below the ring's length.
    at: u32,
    /// Wrap sequence number (CDC-13).
    wrap: u16,
}

/// Geometry of one ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ring {
    len: u32,
    offset: u32,
    base: u32,
}

impl Position {
    /// Ring byte 0 in the first round.
    pub(super) const START: Position = Position { at: 0, wrap: 0 };
}

impl Ring {
    /// The ring of an SMC-D element of `element` bytes: behind the control block, cursors from 0.
    ///
    /// # Errors
    /// The element is no longer than the control block, or longer than any size code says.
    pub const fn smcd(element: u32) -> Result<Ring, RingError> {
        Self::behind(SMCD_CONTROL_LEN, 0, element)
    }

    /// The ring of an SMC-R element by RFC 7609: behind the eye catcher, cursors from 4 (RMB-5,
    /// CDC-11, CDC-12).
    ///
    /// # Errors
    /// See [`Ring::smcd`].
    pub const fn smcr(element: u32) -> Result<Ring, RingError> {
        Self::behind(EYE_CATCHER_LEN, EYE_CATCHER_LEN, element)
    }

    /// The ring of an SMC-R element without eye catcher, as in Linux: the whole element, cursors
    /// from 0 (wire erratum D-3).
    ///
    /// # Errors
    /// See [`Ring::smcd`].
    pub const fn smcr_without_eye_catcher(element: u32) -> Result<Ring, RingError> {
        Self::behind(0, 0, element)
    }

    const fn behind(offset: u32, base: u32, element: u32) -> Result<Ring, RingError> {
        if element <= offset {
            return Err(RingError::TooSmall { len: element, head: offset });
        }
        if element > MAX_RING_LEN {
            return Err(RingError::TooLarge { len: element });
        }
        Ok(Ring { len: element - offset, offset, base })
    }

    /// Capacity in bytes: the largest window.
    #[inline]
    #[allow(clippy::len_without_is_empty, reason = "no ring is empty of room")]
    pub const fn len(&self) -> u32 {
        self.len
    }

    /// Where a cursor of this ring starts and wraps to.
    #[inline]
    pub const fn start(&self) -> Cursor {
        self.cursor(Position::START)
    }

    /// The cursor in the form for the peer.
    #[inline]
    pub const fn cursor(&self, position: Position) -> Cursor {
        Cursor { wrap: position.wrap, count: position.at + self.base }
    }

    /// The place of a cursor, if inside the ring.
    #[inline]
    pub(super) const fn position(&self, cursor: Cursor) -> Option<Position> {
        // A count below the base wraps round to a huge offset, so one compare checks both bounds
        // (RMB-27).
        let at = cursor.count.wrapping_sub(self.base);
        if at < self.len { Some(Position { at, wrap: cursor.wrap }) } else { None }
    }

    /// `n` bytes further; `n` is at most the ring's length.
    #[inline]
    pub(super) const fn advance(&self, position: Position, n: u32) -> Position {
        let at = position.at + n;
        if at < self.len {
            Position { at, wrap: position.wrap }
        } else {
            Position { at: at - self.len, wrap: position.wrap.wrapping_add(1) }
        }
    }

    /// The distance from `from` to the peer's cursor, and the new position.
    ///
    /// The distance may exceed the caller's limit, but is below twice the ring's length.
    #[inline]
    pub(super) const fn moved(
        &self,
        from: Position,
        to: Cursor,
    ) -> Result<(u32, Position), CursorError> {
        let Some(position) = self.position(to) else {
            let (first, last) = (self.base, self.base + (self.len - 1));
            return Err(CursorError::BeyondRing { cursor: to, first, last });
        };
        let at = position.at;
        match to.wrap.wrapping_sub(from.wrap) {
            0 if at >= from.at => Ok((at - from.at, position)),
            1 => Ok((self.len - from.at + at, position)),
            0 | 0x8000.. => Err(CursorError::Backwards { from: self.cursor(from), to }),
            _ => Err(CursorError::WrapSkipped { from: self.cursor(from), to }),
        }
    }

    /// The pieces of the element with the `n` bytes from `position` on, in stream order (CDC-17,
    /// CDC-18). `n` is at most the ring's length.
    #[inline]
    pub(super) const fn spans(&self, position: Position, n: u32) -> [Span; 2] {
        let to_end = self.len - position.at;
        let first = if n < to_end { n } else { to_end };
        [
            Span { offset: self.offset + position.at, len: first },
            Span { offset: self.offset, len: n - first },
        ]
    }

    /// Length of the ring's element, bytes.
    pub const fn element_len(&self) -> u32 {
        self.offset + self.len
    }

    /// Whether the ring lies behind an eye catcher (RMB-6).
    pub const fn has_eye_catcher(&self) -> bool {
        self.base == EYE_CATCHER_LEN
    }

    /// The pieces of the element from cursor `from` up to cursor `to`, in stream order. Cursors a
    /// whole ring or more apart give the whole ring.
    ///
    /// Any two cursors give pieces inside the ring. The pieces have a meaning for cursors of this
    /// end, and for checked cursors.
    #[inline]
    pub const fn between(&self, from: Cursor, to: Cursor) -> [Span; 2] {
        let (start, end) = (self.clamp(from.count), self.clamp(to.count));
        let bytes = match to.wrap.wrapping_sub(from.wrap) {
            0 => end.saturating_sub(start),
            1 if end < start => self.len - start + end,
            _ => self.len,
        };
        // `start` may be the end of the ring: no cursor of the ring says so, but a peer may.
        let at = if start < self.len { start } else { 0 };
        self.spans(Position { at, wrap: from.wrap }, bytes)
    }

    /// The place of a count, moved into the ring if outside.
    #[inline]
    const fn clamp(&self, count: u32) -> u32 {
        let at = count.saturating_sub(self.base);
        if at < self.len { at } else { self.len }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // Shows: RMB-5, CDC-11, CDC-12, CDC-46.
    #[test]
    fn capacity_and_first_cursor_follow_the_type() {
        let d = Ring::smcd(16384).unwrap();
        assert_eq!((d.len(), d.start()), (16352, Cursor { wrap: 0, count: 0 }));
        let r = Ring::smcr(16384).unwrap();
        assert_eq!((r.len(), r.start()), (16380, Cursor { wrap: 0, count: 4 }));
        let linux = Ring::smcr_without_eye_catcher(16384).unwrap();
        assert_eq!((linux.len(), linux.start()), (16384, Cursor { wrap: 0, count: 0 }));
    }

    #[test]
    fn refuses_elements_that_hold_no_ring() {
        assert_eq!(Ring::smcd(32), Err(RingError::TooSmall { len: 32, head: 32 }));
        assert_eq!(Ring::smcr_without_eye_catcher(0), Err(RingError::TooSmall { len: 0, head: 0 }));
        assert_eq!(Ring::smcr(u32::MAX), Err(RingError::TooLarge { len: u32::MAX }));
        assert_eq!(Ring::smcd(33).map(|r| r.len()), Ok(1));
    }

    // Shows: RMB-27, CDC-11, CDC-17, CDC-18.
    #[test]
    fn splits_at_the_wrap_and_never_leaves_the_ring() {
        let ring = Ring::smcr(10_000).unwrap();
        let at_1004 = ring.advance(Position::default(), 1000);
        assert_eq!(
            ring.spans(at_1004, 9996),
            [Span { offset: 1004, len: 8996 }, Span { offset: 4, len: 1000 }]
        );
        assert_eq!(
            ring.spans(at_1004, 8996),
            [Span { offset: 1004, len: 8996 }, Span { offset: 4, len: 0 }]
        );
        assert_eq!(ring.cursor(ring.advance(at_1004, 9996)), Cursor { wrap: 1, count: 1004 });
        assert_eq!(ring.cursor(ring.advance(at_1004, 8996)), Cursor { wrap: 1, count: 4 });
    }

    /// The three kinds of rings of 1 to 6 bytes.
    fn small_rings() -> impl Iterator<Item = Ring> {
        let kinds = [(SMCD_CONTROL_LEN, 0), (EYE_CATCHER_LEN, EYE_CATCHER_LEN), (0, 0)];
        let lengths = (1..=6).flat_map(move |len| kinds.map(|(offset, base)| (offset, base, len)));
        lengths.map(|(offset, base, len)| Ring::behind(offset, base, offset + len).unwrap())
    }

    const WRAPS: [u16; 6] = [0, 1, 0x7fff, 0x8000, 0xfffe, 0xffff];

    /// Every wrap but in the middle, and every count around a ring of up to 6 bytes, from `wrap` on.
    fn cursors(wrap: u16) -> impl Iterator<Item = Cursor> {
        let steps = [0, 1, 2, 3, 0x7fff, 0x8000, 0x8001, 0xfffd, 0xfffe, 0xffff];
        let counts = (0..16).chain([u32::MAX - 1, u32::MAX, 1 << 31]);
        let all = counts.flat_map(move |count| steps.map(|step| (step, count)));
        all.map(move |(step, count)| Cursor { wrap: wrap.wrapping_add(step), count })
    }

    // Shows: SEC-11.
    #[test]
    fn every_pair_of_cursors_of_a_small_ring_is_judged_as_by_absolute_positions() {
        for ring in small_rings() {
            for (wrap, at) in WRAPS.iter().flat_map(|wrap| (0..ring.len).map(|at| (*wrap, at))) {
                let from = Position { at, wrap };
                for to in cursors(wrap) {
                    let inside = to.count >= ring.base && to.count - ring.base < ring.len;
                    let rounds = i64::from(to.wrap.wrapping_sub(wrap).cast_signed());
                    // Bytes claimed by the peer, counted without end.
                    let there = i64::from(to.count) - i64::from(ring.base);
                    let moved = rounds * i64::from(ring.len) + there - i64::from(at);
                    match ring.moved(from, to) {
                        Ok((bytes, position)) => {
                            assert!(inside && rounds <= 1, "{ring:?} {from:?} {to:?}");
                            assert_eq!(i64::from(bytes), moved, "{ring:?} {from:?} {to:?}");
                            assert_eq!(ring.cursor(position), to);
                        }
                        Err(CursorError::BeyondRing { .. }) => assert!(!inside),
                        Err(CursorError::Backwards { .. }) => assert!(inside && moved < 0),
                        Err(CursorError::WrapSkipped { .. }) => assert!(inside && rounds > 1),
                        Err(error) => panic!("{error}"),
                    }
                }
            }
        }
    }

    // Shows: RMB-27.
    #[test]
    fn every_piece_of_a_small_ring_lies_in_it() {
        let inside = |ring: &Ring, spans: [Span; 2]| {
            let ends = spans.map(|span| span.offset.checked_add(span.len).unwrap());
            ends.iter().all(|end| *end <= ring.element_len())
                && spans.iter().all(|span| span.offset >= ring.offset)
        };
        for ring in small_rings() {
            for from in WRAPS.iter().flat_map(|wrap| cursors(*wrap)) {
                for to in cursors(from.wrap) {
                    let spans = ring.between(from, to);
                    assert!(inside(&ring, spans), "{ring:?} {from:?} {to:?} {spans:?}");
                    assert!(spans[0].len + spans[1].len <= ring.len);
                }
                let Some(position) = ring.position(from) else { continue };
                for n in 0..=ring.len {
                    let spans = ring.spans(position, n);
                    assert!(inside(&ring, spans) && spans[0].len + spans[1].len == n);
                    let moved = ring.moved(position, ring.cursor(ring.advance(position, n)));
                    assert_eq!(moved.map(|(bytes, _)| bytes), Ok(n));
                }
            }
        }
    }

    // Shows: SEC-11.
    #[test]
    fn judges_every_kind_of_wrong_cursor() {
        let ring = Ring::smcr(104).unwrap();
        let from = ring.advance(Position::default(), 10);
        let cursor = |wrap, count| Cursor { wrap, count };
        let error = |to| ring.moved(from, to).unwrap_err();
        for out in [cursor(0, 3), cursor(0, 104), cursor(1, 0), cursor(0, u32::MAX)] {
            assert_eq!(error(out), CursorError::BeyondRing { cursor: out, first: 4, last: 103 });
        }
        let here = ring.cursor(from);
        for back in [cursor(0, 13), cursor(u16::MAX, 103), cursor(0x8000, 20)] {
            assert_eq!(error(back), CursorError::Backwards { from: here, to: back });
        }
        for skip in [cursor(2, 4), cursor(0x7fff, 50)] {
            assert_eq!(error(skip), CursorError::WrapSkipped { from: here, to: skip });
        }
        assert_eq!(ring.moved(from, here).unwrap().0, 0);
        assert_eq!(ring.moved(from, cursor(1, 14)).unwrap().0, 100);
        assert_eq!(ring.moved(from, cursor(1, 103)).unwrap().0, 189);
    }

    // Shows: CDC-13.
    #[test]
    fn the_wrap_sequence_number_itself_wraps() {
        let ring = Ring::smcd(132).unwrap();
        let from = Position { at: 90, wrap: u16::MAX };
        let to = ring.advance(from, 20);
        assert_eq!(ring.cursor(to), Cursor { wrap: 0, count: 10 });
        assert_eq!(ring.moved(from, ring.cursor(to)).unwrap(), (20, to));
    }

    fn cursor(wrap: u16, count: u32) -> Cursor {
        Cursor::new(wrap, count)
    }

    fn between(ring: Ring, from: Cursor, to: Cursor) -> [(u32, u32); 2] {
        ring.between(from, to).map(|span| (span.offset, span.len))
    }

    #[test]
    fn between_two_cursors_lies_nothing_a_part_or_all_of_the_ring() {
        let ring = Ring::smcr_without_eye_catcher(100).unwrap();
        assert_eq!(between(ring, cursor(3, 40), cursor(3, 40)), [(40, 0), (0, 0)]);
        assert_eq!(between(ring, cursor(3, 40), cursor(3, 90)), [(40, 50), (0, 0)]);
        assert_eq!(between(ring, cursor(3, 40), cursor(4, 10)), [(40, 60), (0, 10)]);
        assert_eq!(between(ring, cursor(3, 40), cursor(4, 40)), [(40, 60), (0, 40)]);
        assert_eq!(between(ring, cursor(3, 0), cursor(4, 0)), [(0, 100), (0, 0)]);
        assert_eq!(between(ring, cursor(u16::MAX, 90), cursor(0, 0)), [(90, 10), (0, 0)]);
    }

    #[test]
    fn between_cursors_further_apart_than_the_ring_lies_all_of_it() {
        let ring = Ring::smcr_without_eye_catcher(100).unwrap();
        assert_eq!(between(ring, cursor(0, 20), cursor(1, 50)), [(20, 80), (0, 20)]);
        // Two wraps: the count alone looks like less than a ring.
        assert_eq!(between(ring, cursor(0, 20), cursor(2, 10)), [(20, 80), (0, 20)]);
    }

    // Shows: RMB-6, CDC-11.
    #[test]
    fn the_eye_catcher_is_never_between_two_cursors() {
        let ring = Ring::smcr(100).unwrap();
        assert!(ring.has_eye_catcher() && ring.element_len() == 100);
        assert_eq!(between(ring, cursor(0, 50), cursor(1, 50)), [(50, 50), (4, 46)]);
        assert_eq!(between(ring, cursor(0, 50), cursor(1, 4)), [(50, 50), (4, 0)]);
    }

    proptest::proptest! {
        // Shows: RMB-5.
        #[test]
        fn what_a_sender_wrote_lies_between_its_cursors(
            eye_catcher: bool,
            steps in proptest::collection::vec((0u32..70, 0u32..70), 1..60),
        ) {
            let ring = match eye_catcher {
                true => Ring::smcr(64 + EYE_CATCHER_LEN).unwrap(),
                false => Ring::smcr_without_eye_catcher(64).unwrap(),
            };
            let mut sender = crate::connection::Sender::new(ring);
            let mut read = sender.cursor();
            let total = |spans: [Span; 2]| spans[0].len + spans[1].len;
            for (write, keep) in steps {
                let from = sender.cursor();
                let spans = sender.spans(write);
                let n = sender.advance(write, false);
                let got = ring.between(from, sender.cursor());
                proptest::prop_assert_eq!(total(got), n);
                for (span, got) in spans.iter().zip(got) {
                    if span.len != 0 || got.len != 0 {
                        proptest::prop_assert_eq!(*span, got);
                    }
                }
                if sender.in_flight() > keep {
                    read = sender.cursor();
                    sender.on_peer_consumer(read).unwrap();
                }
                // The bytes between the two cursors are the unconfirmed ones.
                let unread = total(ring.between(read, sender.cursor()));
                proptest::prop_assert_eq!(unread, sender.in_flight());
            }
        }

        // Shows: RMB-27, SEC-11.
        #[test]
        fn no_cursors_lead_out_of_the_ring(a: u16, b: u32, c: u16, d: u32, eye_catcher: bool) {
            let ring = match eye_catcher {
                true => Ring::smcr(256).unwrap(),
                false => Ring::smcr_without_eye_catcher(256).unwrap(),
            };
            for span in ring.between(cursor(a, b), cursor(c, d)) {
                proptest::prop_assert!(span.offset + span.len <= 256);
                proptest::prop_assert!(span.offset >= ring.start().count);
            }
        }
    }
}
