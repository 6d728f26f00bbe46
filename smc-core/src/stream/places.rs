// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Positions of a direction, as cursors of its ring and as places in the element of the ring.

use crate::connection::Ring;
use crate::wire::Cursor;

/// The cursor of a position in a ring.
pub fn cursor_at(position: u64, ring: &Ring) -> Cursor {
    let (len, start) = (u64::from(ring.len()), ring.start().count);
    Cursor { wrap: (position / len) as u16, count: (position % len) as u32 + start }
}

/// The bytes from one cursor of a ring to another; `None`: the second lies before the first, or
/// further away than the length of the ring, or outside of the ring.
pub fn distance(from: Cursor, to: Cursor, ring: &Ring) -> Option<u32> {
    let at = |cursor: Cursor| cursor.count.checked_sub(ring.start().count);
    let (start, end) = (at(from)?, at(to).filter(|at| *at < ring.len())?);
    let wraps = u64::from(to.wrap.wrapping_sub(from.wrap)) * u64::from(ring.len());
    let bytes = (wraps + u64::from(end)).checked_sub(u64::from(start))?;
    u32::try_from(bytes).ok().filter(|bytes| *bytes <= ring.len())
}

/// Offset in the element of the byte at a cursor of its ring.
pub fn offset_of(cursor: Cursor, ring: &Ring) -> u32 {
    let head = ring.element_len() - ring.len();
    head + cursor.count.saturating_sub(ring.start().count)
}

/// The pieces of the element (offset, length) with the last `bytes` bytes before a cursor.
pub fn pieces_before(end: Cursor, bytes: u32, ring: &Ring) -> [(u32, u32); 2] {
    let head = ring.element_len() - ring.len();
    let bytes = bytes.min(ring.len());
    let end = offset_of(end, ring);
    let second = bytes.min(end - head);
    let first = bytes - second;
    [(ring.element_len() - first, first), (end - second, second)]
}

/// Of the last `most` bytes before a cursor of a ring, the part held by pieces (offset in the
/// element, bytes) without a gap up to the end. Later pieces replace earlier ones.
pub fn last_of(pieces: &[(u32, Vec<u8>)], end: Cursor, most: u32, ring: &Ring) -> Vec<u8> {
    let (head, len) = (ring.element_len() - ring.len(), ring.len());
    let most = most.min(len);
    let first = (offset_of(end, ring) - head + len - most) % len;
    let mut bytes: Vec<Option<u8>> = vec![None; most as usize];
    for (offset, piece) in pieces {
        for (at, byte) in (*offset..).zip(piece).filter(|(at, _)| *at >= head) {
            let place = ((at - head) % len + len - first) % len;
            if let Some(place) = bytes.get_mut(place as usize) {
                *place = Some(*byte);
            }
        }
    }
    let gap = bytes.iter().rposition(Option::is_none).map_or(0, |at| at + 1);
    bytes.into_iter().skip(gap).flatten().collect()
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

    #[test]
    fn the_last_bytes_are_put_together_from_what_was_not_completed() {
        for ring in rings() {
            let head = ring.element_len() - ring.len();
            // Positions 10 to 20 of a ring of 16 bytes.
            let piece = |from: u64, to: u64| {
                let bytes = (from..to).map(|at| at as u8).collect::<Vec<_>>();
                (head + (from % 16) as u32, bytes)
            };
            let all = [piece(10, 13), piece(13, 16), piece(16, 18), piece(18, 20)];
            let end = cursor_at(20, &ring);
            let last = |pieces: &[_], most| last_of(pieces, end, most, &ring);
            assert_eq!(last(&all, 10), (10..20).collect::<Vec<_>>());
            assert_eq!(last(&all, 4), [16, 17, 18, 19]);
            assert_eq!(last(&all[2..], 10), [16, 17, 18, 19]);
            // Nothing before a gap counts.
            assert_eq!(last(&[piece(10, 16), piece(18, 20)], 10), [18, 19]);
            assert!(last(&all[..3], 10).is_empty());
            // Control words are in front of the ring.
            if head > 0 {
                assert!(last(&[(0, vec![9; head as usize])], 10).is_empty());
            }
            let again = [(head + 3, vec![77]), piece(16, 20)];
            assert_eq!(last(&again, 10), [16, 17, 18, 19]);
        }
    }
}
