//! Which bytes of an element lie between two producer cursors.
//!
//! Rules kept here: RMB-5, RMB-6, RMB-27, CDC-11.

use smc_core::connection::{EYE_CATCHER_LEN, Span};
use smc_core::wire::Cursor;

/// A receive element as the ring in it: full, or behind an eye catcher.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RingLayout {
    /// Length of the element, bytes.
    len: u32,
    /// Offset of the ring's first byte; cursors count from the start of the element.
    head: u32,
}

impl RingLayout {
    /// An element of `len` bytes.
    pub(crate) fn new(len: u32, eye_catcher: bool) -> RingLayout {
        RingLayout { len, head: if eye_catcher { EYE_CATCHER_LEN } else { 0 } }
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

    /// The bytes from `from` up to `to`, at most one ring. The second span is empty unless the ring
    /// wraps in between. Both cursors are this side's own or were checked. Other cursors give spans
    /// that still lie in the element.
    #[inline]
    pub(crate) fn between(&self, from: Cursor, to: Cursor) -> [Span; 2] {
        let inside = |count: u32| count.clamp(self.head, self.len);
        let (start, end) = (inside(from.count), inside(to.count));
        if from.wrap == to.wrap {
            return [span(start, end.saturating_sub(start)), span(self.head, 0)];
        }
        [span(start, self.len - start), span(self.head, end.min(start) - self.head)]
    }
}

fn span(offset: u32, len: u32) -> Span {
    Span { offset, len }
}

/// The length of both spans, bytes.
#[cfg(test)]
pub(crate) fn total(spans: [Span; 2]) -> u64 {
    spans.iter().map(|span| u64::from(span.len)).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use smc_core::connection::{Ring, Sender};

    fn between(layout: RingLayout, from: Cursor, to: Cursor) -> [(u32, u32); 2] {
        layout.between(from, to).map(|span| (span.offset, span.len))
    }

    fn cursor(wrap: u16, count: u32) -> Cursor {
        Cursor::new(wrap, count)
    }

    #[test]
    fn nothing_part_and_all_of_a_ring() {
        let layout = RingLayout::new(100, false);
        assert_eq!(between(layout, cursor(3, 40), cursor(3, 40)), [(40, 0), (0, 0)]);
        assert_eq!(between(layout, cursor(3, 40), cursor(3, 90)), [(40, 50), (0, 0)]);
        assert_eq!(between(layout, cursor(3, 40), cursor(4, 10)), [(40, 60), (0, 10)]);
        assert_eq!(between(layout, cursor(3, 40), cursor(4, 40)), [(40, 60), (0, 40)]);
        assert_eq!(between(layout, cursor(3, 0), cursor(4, 0)), [(0, 100), (0, 0)]);
        assert_eq!(between(layout, cursor(u16::MAX, 90), cursor(0, 0)), [(90, 10), (0, 0)]);
    }

    // Shows: RMB-6, CDC-11.
    #[test]
    fn the_eye_catcher_is_never_part_of_it() {
        let layout = RingLayout::new(100, true);
        assert_eq!(layout.start(), cursor(0, 4));
        assert_eq!(between(layout, cursor(0, 50), cursor(1, 50)), [(50, 50), (4, 46)]);
        assert_eq!(between(layout, cursor(0, 50), cursor(1, 4)), [(50, 50), (4, 0)]);
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
            let layout = RingLayout::new(64 + if eye_catcher { EYE_CATCHER_LEN } else { 0 }, eye_catcher);
            let mut sender = Sender::new(ring);
            let mut read = sender.cursor();
            for (write, keep) in steps {
                let from = sender.cursor();
                let spans = sender.spans(write);
                let n = sender.advance(write, false);
                let got = layout.between(from, sender.cursor());
                proptest::prop_assert_eq!(total(got), u64::from(n));
                for (span, got) in spans.iter().zip(got) {
                    if span.len != 0 || got.len != 0 {
                        proptest::prop_assert_eq!(*span, got);
                    }
                }
                if sender.in_flight() > keep {
                    read = sender.cursor();
                    sender.on_peer_consumer(read).unwrap();
                }
                // What the peer has not confirmed is all that lies between the two.
                let unread = total(layout.between(read, sender.cursor()));
                proptest::prop_assert_eq!(unread, u64::from(sender.in_flight()));
            }
        }

        // Shows: RMB-27, SEC-11.
        #[test]
        fn never_leaves_the_element(a: u16, b: u32, c: u16, d: u32, eye_catcher: bool) {
            let layout = RingLayout::new(256, eye_catcher);
            for Span { offset, len } in layout.between(cursor(a, b), cursor(c, d)) {
                proptest::prop_assert!(offset + len <= 256);
            }
        }
    }
}
