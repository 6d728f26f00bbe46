// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! CLC messages out of TCP segments.
//!
//! A handshake is at the start of a stream and short. Reassembly of a direction follows sequence
//! numbers from the SYN (or from a segment starting like CLC), keeps a few early segments, and
//! stops at the first bytes of anything but a CLC message. The constants below bound the memory,
//! whatever a file contains.

use std::collections::BTreeMap;
use std::net::IpAddr;

use super::packet::Segment;

/// Limit of the directions followed at a time.
const MAX_DIRECTIONS: usize = 1 << 14;
/// Bytes held for all directions together.
const MAX_HELD: usize = 32 << 20;
/// Limit of the early segments of one direction.
const MAX_EARLY: usize = 32;
/// How far ahead, in bytes, a segment may be: the longest CLC message.
const MAX_AHEAD: u32 = 1 << 16;
/// ExID of SMC in option 254: "SMCR" in EBCDIC (OPT-1).
const SMC_EXID: [u8; 4] = [0xe2, 0xd4, 0xc3, 0xd9];
/// Bytes of the header with type and length.
const CLC_HEADER: usize = 7;

/// One end of a TCP connection.
pub(super) type End = (IpAddr, u16);

/// A finding in a segment.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum StreamItem {
    /// SMC was announced on a SYN or SYN-ACK.
    Announced {
        /// On the SYN-ACK.
        reply: bool,
        /// The option has more bytes than its ExID (OPT-2).
        extra: usize,
    },
    /// An experimental option of another protocol on a SYN (OPT-3).
    OtherExperiment {
        /// Option kind, 253 or 254.
        kind: u8,
        /// Data of the option.
        data: Vec<u8>,
    },
    /// A whole CLC message, by its own length.
    Clc(Vec<u8>),
    /// A CLC message with a length shorter than its header.
    Broken(Vec<u8>),
    /// Both ends announced SMC, and these are the first bytes of a stream.
    NoClc(Vec<u8>),
}

/// A CLC message with only its start in the capture.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Unfinished {
    /// Sender and receiver.
    pub(super) ends: (End, End),
    /// Frame with the last accepted byte.
    pub(super) frame: u64,
    /// Bytes present.
    pub(super) bytes: Vec<u8>,
}

/// Parts given up to stay within bounds.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Dropped {
    /// Directions not followed.
    pub(super) directions: u64,
    /// Segments of followed directions.
    pub(super) segments: u64,
}

#[derive(Default)]
struct Direction {
    announced: bool,
    /// Sequence number of the next byte.
    next: Option<u32>,
    /// Contiguous bytes, part of no message yet.
    bytes: Vec<u8>,
    /// Early segments by sequence number.
    early: BTreeMap<u32, Vec<u8>>,
    messages: u32,
    /// Nothing more is of interest.
    done: bool,
    last_frame: u64,
}

/// Directions of a capture.
#[derive(Default)]
pub(super) struct Streams {
    directions: BTreeMap<(End, End), Direction>,
    held: usize,
    /// Parts given up so far.
    pub(super) dropped: Dropped,
}

impl Streams {
    /// Takes a segment, and returns the completed items.
    pub(super) fn segment(&mut self, frame: u64, segment: &Segment<'_>) -> Vec<StreamItem> {
        let mut found = Vec::new();
        let key = (segment.from, segment.to);
        if segment.syn {
            let announced = announcement(segment, &mut found);
            self.forget(key);
            self.make_room();
            let next = Some(segment.seq.wrapping_add(1));
            let direction = Direction { announced, next, ..Direction::default() };
            self.directions.insert(key, direction);
        }
        if segment.rst {
            self.forget(key);
            return found;
        }
        if segment.payload.is_empty() {
            return found;
        }
        if !self.directions.contains_key(&key) {
            // The capture began later: only the start of a CLC message is worth following.
            if !starts_like_clc(segment.payload) {
                return found;
            }
            self.make_room();
            let direction = Direction { next: Some(segment.seq), ..Direction::default() };
            self.directions.insert(key, direction);
        }
        let both = self.announced(key) && self.announced((segment.to, segment.from));
        let Some(direction) = self.directions.get_mut(&key) else { return found };
        if direction.done {
            return found;
        }
        let before = direction.held();
        // Payload of a SYN (TCP fast open) counts from behind the SYN.
        let seq = segment.seq.wrapping_add(segment.syn.into());
        if direction.add(frame, seq, segment.payload) {
            direction.messages(both, &mut found);
        } else {
            self.dropped.segments += 1;
        }
        self.held = self.held + direction.held() - before;
        if self.held > MAX_HELD {
            // Drops the bytes of this direction only.
            self.held -= direction.held();
            direction.finish();
            self.dropped.directions += 1;
        }
        found
    }

    /// The messages left incomplete.
    pub(super) fn unfinished(&self) -> impl Iterator<Item = Unfinished> + '_ {
        let with_bytes = |(_, direction): &(&(End, End), &Direction)| !direction.bytes.is_empty();
        self.directions.iter().filter(with_bytes).map(|(ends, direction)| Unfinished {
            ends: *ends,
            frame: direction.last_frame,
            bytes: direction.bytes.clone(),
        })
    }

    fn announced(&self, key: (End, End)) -> bool {
        self.directions.get(&key).is_some_and(|direction| direction.announced)
    }

    fn forget(&mut self, key: (End, End)) {
        if let Some(direction) = self.directions.remove(&key) {
            self.held -= direction.held();
        }
    }

    /// Makes room for one more direction: drops finished directions, or every direction if more
    /// than half of the limit remain. Searching for a single victim at each SYN would make a flood
    /// of SYNs slow.
    fn make_room(&mut self) {
        if self.directions.len() < MAX_DIRECTIONS {
            return;
        }
        self.directions.retain(|_, direction| !direction.done);
        if self.directions.len() > MAX_DIRECTIONS / 2 {
            self.dropped.directions += self.directions.len() as u64;
            self.directions.clear();
            self.held = 0;
        }
    }
}

impl Direction {
    fn held(&self) -> usize {
        self.bytes.len() + self.early.values().map(Vec::len).sum::<usize>()
    }

    fn finish(&mut self) {
        self.done = true;
        self.bytes = Vec::new();
        self.early = BTreeMap::new();
    }

    /// Adds a segment. `false`: there is no place for the segment.
    fn add(&mut self, frame: u64, seq: u32, payload: &[u8]) -> bool {
        let next = *self.next.get_or_insert(seq);
        let ahead = seq.wrapping_sub(next);
        if ahead != 0 && ahead < MAX_AHEAD {
            let full = self.early.len() >= MAX_EARLY && !self.early.contains_key(&seq);
            if !full && payload.len() <= MAX_AHEAD as usize {
                self.early.insert(seq, payload.to_vec());
            }
            return !full;
        }
        if !self.append(seq, payload) {
            // Far ahead of the next byte: dropped. Behind: every byte is known.
            return ahead >= 1 << 31;
        }
        self.last_frame = frame;
        loop {
            let next = self.next.unwrap_or(seq);
            // The first early segment starting at or before the next byte, if any.
            let due = self.early.keys().copied().find(|seq| seq.wrapping_sub(next) as i32 <= 0);
            let Some((seq, payload)) = due.and_then(|seq| self.early.remove_entry(&seq)) else {
                return true;
            };
            self.append(seq, &payload);
        }
    }

    /// Appends the new bytes of a segment starting at or before the next byte.
    fn append(&mut self, seq: u32, payload: &[u8]) -> bool {
        let next = self.next.unwrap_or(seq);
        let known = next.wrapping_sub(seq);
        let new = usize::try_from(known).ok().and_then(|known| payload.get(known..));
        let Some(new) = new.filter(|new| !new.is_empty()) else { return false };
        self.bytes.extend_from_slice(new);
        // A payload is shorter than 2^32.
        self.next = Some(next.wrapping_add(new.len() as u32));
        true
    }

    fn messages(&mut self, both_announced: bool, found: &mut Vec<StreamItem>) {
        loop {
            if self.bytes.is_empty() {
                return;
            }
            if !starts_like_clc(&self.bytes) {
                if both_announced && self.messages == 0 {
                    self.bytes.truncate(64);
                    found.push(StreamItem::NoClc(std::mem::take(&mut self.bytes)));
                }
                return self.finish();
            }
            let Some(&[_, _, _, _, _, l0, l1]) = self.bytes.first_chunk::<CLC_HEADER>() else {
                return;
            };
            let length = usize::from(u16::from_be_bytes([l0, l1]));
            if length <= CLC_HEADER {
                self.bytes.truncate(64);
                found.push(StreamItem::Broken(std::mem::take(&mut self.bytes)));
                return self.finish();
            }
            if self.bytes.len() < length {
                return;
            }
            let rest = self.bytes.split_off(length);
            found.push(StreamItem::Clc(std::mem::replace(&mut self.bytes, rest)));
            self.messages += 1;
        }
    }
}

/// Whether these bytes are, or may become, the start of a CLC message.
fn starts_like_clc(bytes: &[u8]) -> bool {
    let common = bytes.len().min(3);
    bytes.get(..common) == SMC_EXID.get(..common)
        && bytes.get(3).is_none_or(|last| matches!(last, 0xd9 | 0xc4))
}

fn announcement(segment: &Segment<'_>, found: &mut Vec<StreamItem>) -> bool {
    let mut announced = false;
    for (kind, data) in &segment.experiments {
        match data.strip_prefix(&SMC_EXID) {
            Some(extra) if *kind == 254 => {
                announced = true;
                found.push(StreamItem::Announced { reply: segment.ack, extra: extra.len() });
            }
            _ => found.push(StreamItem::OtherExperiment { kind: *kind, data: data.to_vec() }),
        }
    }
    announced
}

#[cfg(test)]
mod tests {
    use super::*;

    const CLIENT: End = (IpAddr::V4(std::net::Ipv4Addr::new(10, 9, 0, 1)), 40000);
    const SERVER: End = (IpAddr::V4(std::net::Ipv4Addr::new(10, 9, 0, 2)), 5000);

    fn data(seq: u32, payload: &[u8]) -> Segment<'_> {
        Segment {
            from: CLIENT,
            to: SERVER,
            seq,
            syn: false,
            ack: true,
            rst: false,
            experiments: Vec::new(),
            payload,
        }
    }

    fn syn(seq: u32) -> Segment<'static> {
        Segment { syn: true, ack: false, experiments: vec![(254, &SMC_EXID)], ..data(seq, &[]) }
    }

    fn decline() -> Vec<u8> {
        let mut bytes = vec![0xe2, 0xd4, 0xc3, 0xd9, 4, 0, 28, 0x10];
        bytes.resize(24, 0);
        bytes.extend(SMC_EXID);
        bytes
    }

    #[test]
    fn a_message_in_pieces_out_of_order_and_twice_is_found_once() {
        let message = decline();
        // Sequence numbers wrap in the middle.
        let start = u32::MAX - 9;
        for order in [[0, 1, 2], [2, 1, 0], [1, 0, 2], [1, 2, 0]] {
            let mut streams = Streams::default();
            let mut found = streams.segment(1, &syn(start.wrapping_sub(1)));
            assert_eq!(found.pop(), Some(StreamItem::Announced { reply: false, extra: 0 }));
            for (frame, piece) in order.into_iter().enumerate() {
                let range = [0..10, 10..20, 20..28][piece].clone();
                let segment = data(start.wrapping_add(range.start as u32), &message[range]);
                found.extend(streams.segment(frame as u64, &segment));
                found.extend(streams.segment(frame as u64, &segment));
            }
            assert_eq!(found, [StreamItem::Clc(message.clone())]);
            assert_eq!(streams.held, 0);
        }
    }

    #[test]
    fn messages_end_where_data_begins() {
        let mut streams = Streams::default();
        let bytes = [&decline()[..], &decline(), b"GET / HTTP/1.0"].concat();
        let found = streams.segment(1, &data(5, &bytes));
        assert_eq!(found, [StreamItem::Clc(decline()), StreamItem::Clc(decline())]);
        assert!(streams.segment(2, &data(5 + bytes.len() as u32, &decline())).is_empty());
        assert_eq!(streams.held, 0);
    }

    #[test]
    fn a_plain_connection_is_nothing() {
        let mut streams = Streams::default();
        assert!(streams.segment(1, &data(5, b"GET / HTTP/1.0")).is_empty());
        assert!(streams.directions.is_empty());
    }

    #[test]
    fn announced_by_both_and_then_something_else_is_reported() {
        let mut streams = Streams::default();
        streams.segment(1, &syn(0));
        let reply = Segment { from: SERVER, to: CLIENT, ack: true, ..syn(0) };
        assert_eq!(streams.segment(2, &reply), [StreamItem::Announced { reply: true, extra: 0 }]);
        assert_eq!(streams.segment(3, &data(1, b"hello")), [StreamItem::NoClc(b"hello".to_vec())]);
    }

    // Shows: OPT-3.
    #[test]
    fn another_experiment_is_no_announcement() {
        let mut streams = Streams::default();
        let mut segment = syn(0);
        segment.experiments = vec![(254, &[0xf9, 0x89]), (253, &SMC_EXID)];
        let found = streams.segment(1, &segment);
        assert!(matches!(
            found[..],
            [StreamItem::OtherExperiment { .. }, StreamItem::OtherExperiment { .. }]
        ));
        assert!(!streams.announced((CLIENT, SERVER)));
    }

    #[test]
    fn a_length_shorter_than_the_header_ends_the_stream() {
        let mut streams = Streams::default();
        let mut bytes = decline();
        bytes[6] = 3;
        assert!(matches!(streams.segment(1, &data(5, &bytes))[..], [StreamItem::Broken(_)]));
        assert_eq!(streams.held, 0);
    }

    #[test]
    fn what_is_missing_at_the_end_is_reported() {
        let mut streams = Streams::default();
        assert!(streams.segment(7, &data(5, &decline()[..20])).is_empty());
        let unfinished: Vec<_> = streams.unfinished().collect();
        assert_eq!(unfinished.len(), 1);
        assert_eq!((unfinished[0].frame, unfinished[0].bytes.len()), (7, 20));
    }

    #[test]
    fn early_segments_and_directions_are_bounded() {
        let mut streams = Streams::default();
        streams.segment(1, &syn(0));
        for i in 0..1000 {
            streams.segment(2, &data(10 + 20 * i, &[0; 19]));
        }
        let direction = &streams.directions[&(CLIENT, SERVER)];
        assert_eq!(direction.early.len(), MAX_EARLY);
        assert!(streams.dropped.segments > 900);

        let mut streams = Streams::default();
        for port in 0..=MAX_DIRECTIONS as u16 {
            streams.segment(3, &Segment { from: (CLIENT.0, port), ..syn(0) });
        }
        assert!(streams.directions.len() <= MAX_DIRECTIONS);
        assert_eq!(streams.dropped.directions, MAX_DIRECTIONS as u64);
    }

    #[test]
    fn held_bytes_are_bounded_over_all_directions() {
        let mut streams = Streams::default();
        let mut start = vec![0xe2, 0xd4, 0xc3, 0xd9, 1, 0xff, 0xff];
        start.resize(60_000, 0);
        for port in 0..2000 {
            streams.segment(1, &Segment { from: (CLIENT.0, port), ..data(0, &start) });
        }
        assert!(streams.held <= MAX_HELD, "{}", streams.held);
    }
}
