// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Cursor arithmetic against a model counting stream positions in 64 bits.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on may stop")]

use proptest::prelude::*;
use smc_core::connection::{Receiver, Ring, Sender, Span, UpdateDecision};
use smc_core::wire::Cursor;
use smc_core::wire::cdc::ProducerFlags;

const NONE: ProducerFlags = ProducerFlags::empty();

/// A simple and slow model of a ring.
#[derive(Clone, Copy, Debug)]
struct Model {
    ring: Ring,
    base: u64,
    offset: u64,
}

impl Model {
    fn new(kind: u8, len: u32) -> Model {
        let (ring, base, offset) = match kind {
            0 => (Ring::smcd(len + 32), 0, 32),
            1 => (Ring::smcr(len + 4), 4, 4),
            _ => (Ring::smcr_without_eye_catcher(len), 0, 0),
        };
        Model { ring: ring.unwrap(), base, offset }
    }

    fn len(&self) -> u64 {
        u64::from(self.ring.len())
    }

    fn cursor(&self, position: u64) -> Cursor {
        let wrap = (position / self.len()) as u16;
        Cursor { wrap, count: (self.base + position % self.len()) as u32 }
    }

    /// Element offsets of the bytes from `position` on, one by one.
    fn offsets(&self, position: u64, n: u64) -> Vec<u32> {
        let at = |p: u64| (self.offset + p % self.len()) as u32;
        (position..position + n).map(at).collect()
    }
}

fn offsets(spans: [Span; 2]) -> Vec<u32> {
    spans.iter().flat_map(|s| s.offset..s.offset + s.len).collect()
}

#[derive(Clone, Debug)]
enum Op {
    Write(u32),
    Announce,
    Read(u32),
    Tell,
    /// The receiver is notified of a publication: later than the peer.
    Note,
    /// An invented cursor: round and count relative to the true one, or any.
    Claim {
        wrap: i8,
        count: i32,
        wild: Option<(u16, u32)>,
    },
}

fn op() -> impl Strategy<Value = Op> {
    let claim = (-2i8..3, -50i32..50, proptest::option::weighted(0.2, any::<(u16, u32)>()));
    prop_oneof![
        4 => (0u32..60).prop_map(Op::Write),
        4 => Just(Op::Announce),
        4 => (0u32..60).prop_map(Op::Read),
        4 => Just(Op::Tell),
        3 => Just(Op::Note),
        2 => claim.prop_map(|(wrap, count, wild)| Op::Claim { wrap, count, wild }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    // Shows: CDC-9, CDC-10, CDC-15, CDC-16, CDC-18, CDC-21, CDC-39.
    #[test]
    fn both_directions_agree_with_stream_positions(
        kind in 0u8..3,
        len in 1u32..48,
        ops in proptest::collection::vec(op(), 1..80),
    ) {
        let model = Model::new(kind, len);
        let (mut sender, mut receiver) = (Sender::new(model.ring), Receiver::new(model.ring));
        // Stream positions: written, announced to the receiver, read, published to the sender, and
        // the part of the publications known to the receiver.
        let (mut written, mut announced, mut read) = (0u64, 0u64, 0u64);
        let (mut told, mut noted) = (0u64, 0u64);
        for op in ops {
            match op {
                Op::Write(n) => {
                    let n = u64::from(n).min(model.len() - (written - told));
                    prop_assert_eq!(offsets(sender.spans(n as u32)), model.offsets(written, n));
                    prop_assert_eq!(u64::from(sender.advance(n as u32, false)), n);
                    written += n;
                }
                Op::Announce => {
                    let arrival = receiver.on_peer_producer(sender.cursor(), NONE).unwrap();
                    prop_assert_eq!(u64::from(arrival.bytes), written - announced);
                    announced = written;
                    // Use of space proves an earlier announcement to the user.
                    noted = noted.max(announced.saturating_sub(model.len()));
                }
                Op::Read(n) => {
                    let n = u64::from(n).min(announced - read);
                    prop_assert_eq!(offsets(receiver.spans(n as u32)), model.offsets(read, n));
                    let skip = n / 3;
                    prop_assert_eq!(
                        offsets(receiver.peek(skip as u32, (n - skip) as u32)),
                        model.offsets(read + skip, n - skip)
                    );
                    let due = receiver.consume(n as u32);
                    read += n;
                    // RFC 7609 section 4.5.1, word for word.
                    let window = model.len() - (announced - noted);
                    let gain = read - noted;
                    let expected = gain > 0 && 2 * window < model.len() && 10 * gain >= model.len();
                    prop_assert_eq!(due == UpdateDecision::Window, expected);
                }
                Op::Tell => {
                    let freed = sender.on_peer_consumer(receiver.cursor()).unwrap();
                    prop_assert_eq!(u64::from(freed), read - told);
                    told = read;
                }
                Op::Note => {
                    receiver.on_published(model.cursor(told));
                    noted = told;
                }
                Op::Claim { wrap, count, wild } => {
                    let claim = |true_one: Cursor| match wild {
                        Some((wrap, count)) => Cursor { wrap, count },
                        None => Cursor {
                            wrap: true_one.wrap.wrapping_add_signed(wrap.into()),
                            count: true_one.count.wrapping_add_signed(count),
                        },
                    };
                    // Only possible positions of an honest peer are accepted.
                    let cursor = claim(sender.cursor());
                    let possible = (told..=written).find(|p| model.cursor(*p) == cursor);
                    let got = { sender }.on_peer_consumer(cursor).ok();
                    prop_assert_eq!(got.map(u64::from), possible.map(|p| p - told));
                    let cursor = claim(receiver.cursor());
                    let possible =
                        (announced..=read + model.len()).find(|p| model.cursor(*p) == cursor);
                    let got = { receiver }.on_peer_producer(cursor, NONE).ok();
                    prop_assert_eq!(got.map(|a| u64::from(a.bytes)), possible.map(|p| p - announced));
                }
            }
            prop_assert_eq!(sender.cursor(), model.cursor(written));
            prop_assert_eq!(receiver.cursor(), model.cursor(read));
            prop_assert_eq!(u64::from(sender.space()), model.len() - (written - told));
            prop_assert_eq!(u64::from(receiver.readable()), announced - read);
            let window = model.len() - (announced - noted);
            prop_assert_eq!(u64::from(receiver.peer_window()), window);
        }
    }

    #[test]
    fn a_publication_that_is_reported_late_or_twice_changes_nothing(
        reads in proptest::collection::vec(1u32..10, 1..10),
        order in any::<u64>(),
    ) {
        let ring = Ring::smcd(32 + 100).unwrap();
        let mut receiver = Receiver::new(ring);
        let _ = receiver.on_peer_producer(Cursor::new(0, 99), NONE).unwrap();
        let mut cursors = vec![receiver.cursor()];
        for n in reads {
            let _ = receiver.consume(n);
            cursors.push(receiver.cursor());
        }
        let mut newest = 0;
        for i in 0..16 {
            let index = (order >> (4 * i)) as usize % cursors.len();
            receiver.on_published(cursors[index]);
            newest = newest.max(index);
            let expected = 100 - (99 - cursors[newest].count);
            prop_assert_eq!(receiver.peer_window(), expected);
        }
    }
}

// Shows: CDC-13, CDC-14.
#[test]
fn the_wrap_number_goes_round_and_stays_in_step() {
    for kind in 0..3 {
        let model = Model::new(kind, 3);
        let (mut sender, mut receiver) = (Sender::new(model.ring), Receiver::new(model.ring));
        let mut position = 0u64;
        while position < 3 * 70_000 {
            let n = 1 + (position % 3) as u32;
            assert_eq!(sender.advance(n, false), n);
            position += u64::from(n);
            let arrival = receiver.on_peer_producer(sender.cursor(), NONE).unwrap();
            assert_eq!(arrival.bytes, n);
            let _ = receiver.consume(n);
            assert_eq!(receiver.cursor(), model.cursor(position));
            assert_eq!(sender.on_peer_consumer(receiver.cursor()), Ok(n));
        }
    }
}
