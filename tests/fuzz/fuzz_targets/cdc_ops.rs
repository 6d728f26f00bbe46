// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Feeds one connection with control messages, honest, damaged or made up, and with completions in any
//! order. Every span lies in its ring, a switch of links repeats only bytes possibly lost, and the
//! sequence numbers alone decide a validation.
#![no_main]

use libfuzzer_sys::arbitrary::{self, Arbitrary};
use libfuzzer_sys::fuzz_target;
use smc_core::connection::failover::{Validation, judge};
use smc_core::connection::{Connection, Event, Order, Outbound, Post, Ring, Sequence, Span};
use smc_core::wire::Cursor;
use smc_core::wire::cdc::{CDC_LEN, Cdc, ConsumerWord, ProducerFlags, ProducerWord, StateFlags};

#[derive(Arbitrary, Debug)]
struct Input {
    eye_catcher: bool,
    rings: [u8; 2],
    operations: Vec<Operation>,
}

#[derive(Arbitrary, Debug)]
enum Operation {
    /// Any bytes.
    Raw([u8; CDC_LEN]),
    /// The next message of an honest peer, with these amounts written and read since the last one.
    Honest {
        wrote: u8,
        read: u8,
        flags: u8,
        state: u8,
        skip: u8,
    },
    /// The same with one bit flipped.
    Damaged {
        wrote: u8,
        read: u8,
        bit: u16,
    },
    Validation {
        number: u16,
    },
    Write {
        n: u8,
    },
    Read {
        n: u8,
    },
    /// The peer's adapter acknowledges so many of the oldest messages.
    Acknowledged {
        n: u8,
    },
    FailOver,
    /// With cursors of whatever kind.
    FailOverAt {
        producer: (u16, u32),
        consumed: (u16, u32),
    },
}

struct Peer {
    number: Sequence,
    /// Bytes written by the peer so far.
    wrote: u64,
    read: u64,
}

fn cursor(ring: &Ring, bytes: u64) -> Cursor {
    let len = u64::from(ring.len());
    Cursor::new((bytes / len) as u16, (bytes % len) as u32 + ring.start().count)
}

fn check(ring: &Ring, spans: [Span; 2]) {
    let head = ring.start().count;
    for Span { offset, len } in spans {
        assert!(len == 0 || (offset >= head && offset - head + len <= ring.len()), "{spans:?}");
    }
    assert!(spans[0].len + spans[1].len <= ring.len());
}

fuzz_target!(|input: Input| {
    let make = |len: u8| match input.eye_catcher {
        true => Ring::smcr(5 + u32::from(len)),
        false => Ring::smcr_without_eye_catcher(1 + u32::from(len)),
    };
    let (Ok(own), Ok(theirs)) = (make(input.rings[0]), make(input.rings[1])) else { return };
    let mut connection = Connection::new(theirs, own);
    let mut outbound = Outbound::new(theirs, 7);
    // Sequence numbers of unacknowledged messages on the present link.
    let mut in_flight: Vec<u16> = Vec::new();
    let mut seen = Sequence::new();
    let mut peer = Peer { number: Sequence::new(), wrote: 0, read: 0 };
    let (mut honest, mut written, mut read) = (true, 0_u64, 0_u64);
    for operation in input.operations.into_iter().take(4096) {
        match operation {
            Operation::Raw(bytes) => {
                honest = false;
                take(&mut connection, &mut seen, &bytes);
            }
            Operation::Honest { wrote, read: reads, flags, state, skip } => {
                // After a lie its books may say anything.
                let unread = peer.wrote.saturating_sub(read);
                let room = u64::from(own.len()).saturating_sub(unread);
                peer.wrote += u64::from(wrote).min(room);
                peer.read += u64::from(reads).min(written - peer.read.min(written));
                for _ in 0..=skip % 4 {
                    peer.number.next();
                }
                let state = StateFlags::from_bits_truncate(state);
                let flags = ProducerFlags::from_bits_truncate(flags) - ProducerFlags::FAILOVER;
                let ok = take(&mut connection, &mut seen, &say(&peer, &own, &theirs, flags, state));
                assert!(ok || !honest, "an honest peer was refused");
            }
            Operation::Damaged { wrote, read: reads, bit } => {
                honest = false;
                peer.wrote += u64::from(wrote);
                peer.read += u64::from(reads);
                peer.number.next();
                let none = (ProducerFlags::empty(), StateFlags::empty());
                let mut bytes = say(&peer, &own, &theirs, none.0, none.1);
                bytes[usize::from(bit / 8) % CDC_LEN] ^= 1 << (bit % 8);
                take(&mut connection, &mut seen, &bytes);
            }
            Operation::Validation { number } => {
                let cdc = Cdc {
                    sequence: number,
                    producer_flags: ProducerFlags::FAILOVER,
                    ..Cdc::default()
                };
                let before = (connection, seen);
                take(&mut connection, &mut seen, &cdc.emit());
                assert_eq!((connection, seen), before, "a validation moves nothing");
            }
            Operation::Write { n } => {
                let sender = &mut connection.sender;
                let spans = sender.spans(n.into());
                check(&theirs, spans);
                let n = spans[0].len + spans[1].len;
                assert_eq!(sender.advance(n, false), n);
                written += u64::from(n);
                publish(&mut connection, &mut outbound, &mut in_flight);
            }
            Operation::Read { n } => {
                let spans = connection.receiver.spans(n.into());
                check(&own, spans);
                read += u64::from(spans[0].len + spans[1].len);
                let _ = connection.receiver.consume(n.into());
                publish(&mut connection, &mut outbound, &mut in_flight);
            }
            Operation::Acknowledged { n } => {
                // A reliable queue pair delivers in order.
                in_flight.drain(..usize::from(n).min(in_flight.len()));
            }
            Operation::FailOver => {
                let before = outbound.last_sequence();
                let acknowledged = in_flight.first().map_or(before, |first| first.wrapping_sub(1));
                let peer = peer_word(&connection);
                let aborted = peer.state_flags.contains(StateFlags::ABORT);
                let goes_on = outbound.fail_over(in_flight.drain(..), peer, false);
                assert_eq!(goes_on, !aborted);
                if !goes_on {
                    continue;
                }
                let validation =
                    post(&theirs, &mut outbound, &mut in_flight).expect("a validation");
                assert_eq!(validation.sequence, acknowledged);
                assert_eq!(validation.spans, [Span::default(); 2]);
                assert_eq!(outbound.last_sequence(), before, "a validation takes no number");
                let again = post(&theirs, &mut outbound, &mut in_flight).expect("the words");
                let bytes = again.spans[0].len + again.spans[1].len;
                assert!(bytes == 0 || bytes == connection.sender.in_flight());
            }
            Operation::FailOverAt { producer, consumed } => {
                let mut outbound = outbound.clone();
                let of = |(wrap, count)| Cursor { wrap, count };
                let words = [
                    ProducerWord { cursor: of(producer) }.to_u64(),
                    ConsumerWord::default().to_u64(),
                ];
                outbound.set_words(words);
                let peer = ConsumerWord { cursor: of(consumed), ..ConsumerWord::default() };
                assert!(outbound.fail_over([], peer, false));
                while post(&theirs, &mut outbound, &mut Vec::new()).is_some() {}
            }
        }
        assert!(connection.sender.in_flight() <= theirs.len());
        assert!(connection.receiver.available() <= own.len());
        assert!(connection.receiver.peer_window() <= own.len());
    }
});

/// Publishes the connection's current words and posts every message due.
fn publish(connection: &mut Connection, outbound: &mut Outbound, in_flight: &mut Vec<u16>) {
    let (producer, consumer) = connection.words();
    outbound.set_words([producer.to_u64(), consumer.to_u64()]);
    connection.on_published();
    let ring = *connection.sender.ring();
    while post(&ring, outbound, in_flight).is_some() {}
}

/// Posts the next message, if there is one.
fn post(ring: &Ring, outbound: &mut Outbound, in_flight: &mut Vec<u16>) -> Option<Post> {
    let post = outbound.next_post()?;
    check(ring, post.spans);
    outbound.on_posted(&post);
    in_flight.push(post.sequence);
    Some(post)
}

/// Rebuilds the last word of the peer from the connection's state.
fn peer_word(connection: &Connection) -> ConsumerWord {
    ConsumerWord {
        cursor: connection.sender.consumed(),
        producer_flags: ProducerFlags::empty(),
        state_flags: connection.close.peer_flags(),
    }
}

fn say(
    peer: &Peer,
    own: &Ring,
    theirs: &Ring,
    producer_flags: ProducerFlags,
    state_flags: StateFlags,
) -> [u8; CDC_LEN] {
    Cdc {
        sequence: peer.number.last(),
        token: 7,
        producer: cursor(own, peer.wrote),
        consumer: cursor(theirs, peer.read),
        producer_flags,
        state_flags,
    }
    .emit()
}

/// Handles a message like an adapter; false if the connection has to be reset.
fn take(connection: &mut Connection, seen: &mut Sequence, bytes: &[u8]) -> bool {
    let Ok(cdc) = Cdc::parse(bytes) else { return true };
    if cdc.producer_flags.contains(ProducerFlags::FAILOVER) {
        match judge(seen, cdc.sequence) {
            Validation::Intact => assert!(seen.has_seen(cdc.sequence)),
            Validation::Lost { sent, seen: last } => {
                assert!(sent == cdc.sequence && last == seen.last() && sent != last);
            }
        }
        return true;
    }
    if seen.judge(cdc.sequence) == Order::Old {
        return true;
    }
    let producer = ProducerWord { cursor: cdc.producer };
    let (cursor, producer_flags, state_flags) = (cdc.consumer, cdc.producer_flags, cdc.state_flags);
    let consumer = ConsumerWord { cursor, producer_flags, state_flags };
    match connection.on_control(producer, consumer, false) {
        Ok(delivery) => {
            assert!(delivery.received.bytes <= connection.receiver.ring().len());
            true
        }
        Err(_) => {
            connection.close.on(Event::Abort, false);
            false
        }
    }
}
