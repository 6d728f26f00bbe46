//! Which bytes of an element lie between two producer cursors.
//!
//! Rules kept here: RMB-5, RMB-6, RMB-27, CDC-11.

use smc_core::connection::EYE_CATCHER_LEN;
use smc_core::wire::Cursor;

/// A receive element as the ring in it: full, or behind an eye catcher.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shape {
    /// Length of the element, bytes.
    len: u32,
    /// Offset of the ring's first byte; cursors count from the start of the element.
    head: u32,
}

/// A stretch of an element: offset and length, bytes.
pub(crate) type Stretch = (u32, u32);

impl Shape {
    /// An element of `len` bytes.
    pub(crate) fn new(len: u32, eye_catcher: bool) -> Shape {
        Shape { len, head: if eye_catcher { EYE_CATCHER_LEN } else { 0 } }
    }

    /// Length of the element, bytes.
    pub(crate) fn len(&self) -> u32 {
        self.len
    }

    /// Whether the ring begins behind an eye catcher.
    pub(crate) fn has_eye_catcher(&self) -> bool {
        self.head != 0
    }

    /// Where a cursor starts.
    pub(crate) fn start(&self) -> Cursor {
        Cursor::new(0, self.head)
    }

    /// The bytes from `from` up to `to`, at most one ring: the second stretch is empty unless the
    /// ring wraps in between. Both cursors are this side's own or were judged; others yield
    /// something that lies in the element.
    #[inline]
    pub(crate) fn between(&self, from: Cursor, to: Cursor) -> [Stretch; 2] {
        let inside = |count: u32| count.clamp(self.head, self.len);
        let (start, end) = (inside(from.count), inside(to.count));
        if from.wrap == to.wrap {
            return [(start, end.saturating_sub(start)), (self.head, 0)];
        }
        [(start, self.len - start), (self.head, end.min(start) - self.head)]
    }
}

/// How many bytes two stretches have.
#[cfg(test)]
pub(crate) fn total(stretches: [Stretch; 2]) -> u64 {
    stretches.iter().map(|(_, len)| u64::from(*len)).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use smc_core::connection::{Ring, Sender};

    fn cursor(wrap: u16, count: u32) -> Cursor {
        Cursor::new(wrap, count)
    }

    #[test]
    fn nothing_part_and_all_of_a_ring() {
        let shape = Shape::new(100, false);
        assert_eq!(shape.between(cursor(3, 40), cursor(3, 40)), [(40, 0), (0, 0)]);
        assert_eq!(shape.between(cursor(3, 40), cursor(3, 90)), [(40, 50), (0, 0)]);
        assert_eq!(shape.between(cursor(3, 40), cursor(4, 10)), [(40, 60), (0, 10)]);
        assert_eq!(shape.between(cursor(3, 40), cursor(4, 40)), [(40, 60), (0, 40)]);
        assert_eq!(shape.between(cursor(3, 0), cursor(4, 0)), [(0, 100), (0, 0)]);
        assert_eq!(shape.between(cursor(u16::MAX, 90), cursor(0, 0)), [(90, 10), (0, 0)]);
    }

    // Shows: RMB-6, CDC-11.
    #[test]
    fn the_eye_catcher_is_never_part_of_it() {
        let shape = Shape::new(100, true);
        assert_eq!(shape.start(), cursor(0, 4));
        assert_eq!(shape.between(cursor(0, 50), cursor(1, 50)), [(50, 50), (4, 46)]);
        assert_eq!(shape.between(cursor(0, 50), cursor(1, 4)), [(50, 50), (4, 0)]);
    }

    proptest::proptest! {
        // Shows: RMB-5.
        #[test]
        fn is_what_a_sender_wrote(
            eye_catcher: bool,
            steps in proptest::collection::vec((0u32..70, 0u32..70), 1..60),
        ) {
            let ring = match eye_catcher {
                true => Ring::smcr(64 + EYE_CATCHER_LEN).unwrap(),
                false => Ring::smcr_without_eye_catcher(64).unwrap(),
            };
            let shape = Shape::new(64 + if eye_catcher { EYE_CATCHER_LEN } else { 0 }, eye_catcher);
            let mut sender = Sender::new(ring);
            let mut read = sender.cursor();
            for (write, keep) in steps {
                let from = sender.cursor();
                let spans = sender.spans(write);
                let n = sender.advance(write, false);
                let got = shape.between(from, sender.cursor());
                proptest::prop_assert_eq!(total(got), u64::from(n));
                for (span, stretch) in spans.iter().zip(got) {
                    if span.len != 0 || stretch.1 != 0 {
                        proptest::prop_assert_eq!((span.offset, span.len), stretch);
                    }
                }
                if sender.in_flight() > keep {
                    read = sender.cursor();
                    sender.on_peer_consumer(read).unwrap();
                }
                // What the peer has not confirmed is all that lies between the two.
                let unread = total(shape.between(read, sender.cursor()));
                proptest::prop_assert_eq!(unread, u64::from(sender.in_flight()));
            }
        }

        // Shows: RMB-27, SEC-11.
        #[test]
        fn never_leaves_the_element(a: u16, b: u32, c: u16, d: u32, eye_catcher: bool) {
            let shape = Shape::new(256, eye_catcher);
            for (offset, len) in shape.between(cursor(a, b), cursor(c, d)) {
                proptest::prop_assert!(offset + len <= 256);
            }
        }
    }
}
