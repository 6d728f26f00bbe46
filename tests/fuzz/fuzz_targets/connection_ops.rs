// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Two ends of a connection act in any order, and now and then an end finds arbitrary words in its
//! control block. Every span read or written lies in the ring. As long as no end lied, the bytes read
//! are the bytes written.
#![no_main]

use libfuzzer_sys::arbitrary::{self, Arbitrary};
use libfuzzer_sys::fuzz_target;
use smc_core::connection::{Actions, Connection, Event, Ring, Span, UrgentEvent, read_words};
use smc_core::wire::cdc::{ConsumerWord, ProducerWord, StateFlags};

#[derive(Arbitrary, Debug)]
struct Input {
    smcr: bool,
    rings: [u8; 2],
    operations: Vec<(bool, Operation)>,
}

#[derive(Arbitrary, Debug)]
enum Operation {
    Write {
        n: u8,
        more: bool,
    },
    WriteUrgent {
        n: u8,
    },
    Block,
    RequestUpdate,
    Publish,
    Look,
    Read {
        n: u8,
    },
    Peek {
        skip: u8,
        n: u8,
    },
    TakeUrgent {
        peek: bool,
    },
    Inline(bool),
    ShutdownWrite,
    Close,
    Abort,
    TcpReset,
    Timeout,
    /// The words of the own control block become these.
    Lie {
        producer: u64,
        consumer: u64,
    },
    /// The same, next to the truth.
    SmallLie {
        producer: i8,
        consumer: i8,
        wrap: i8,
        flags: u8,
        state: u8,
    },
}

struct End {
    connection: Connection,
    element: Vec<u8>,
    /// Own control block, written by the peer.
    words: (u64, u64),
    state_out: StateFlags,
    written: u64,
    read: u64,
    failed: bool,
}

/// Byte `at` of the stream that end `id` sends.
fn stream(id: usize, at: u64) -> u8 {
    (at.wrapping_mul(31) >> 3) as u8 ^ at as u8 ^ id as u8
}

fn check(ring: &Ring, element: &[u8], spans: [Span; 2]) {
    let head = element.len() - ring.len() as usize;
    for Span { offset, len } in spans {
        if len != 0 {
            assert!(offset as usize >= head, "{offset} is in the head");
            assert!(u64::from(offset) + u64::from(len) <= element.len() as u64);
        }
    }
    assert!(spans[0].len + spans[1].len <= ring.len());
}

fn publish(end: &mut End, peer: &mut End) {
    if let Some(ahead) = end.connection.word_ahead(end.state_out) {
        peer.words.1 = ahead.to_u64();
    }
    let (producer, consumer) = end.connection.words();
    peer.words = (producer.to_u64(), consumer.to_u64());
    end.state_out = end.connection.close.flags();
    end.connection.on_published();
}

fn event(end: &mut End, peer: &mut End, event: Event) {
    let actions = end.connection.close.on(event, false);
    obey(end, peer, actions);
}

fn obey(end: &mut End, peer: &mut End, actions: Actions) {
    if actions.contains(Actions::PURGE) {
        end.connection.receiver.purge();
        end.failed = true;
    }
    let says = Actions::SEND_DONE | Actions::SEND_CLOSED | Actions::SEND_ABORT;
    if actions.intersects(says) {
        publish(end, peer);
    }
    if actions.contains(Actions::SEND_ABORT) {
        let actions = end.connection.close.on(Event::AbortDelivered, false);
        assert!(!actions.intersects(says));
    }
}

fuzz_target!(|input: Input| {
    let Input { smcr, rings, operations } = input;
    let head = if smcr { 4 } else { 32 };
    let lens = rings.map(|len| head + 1 + u32::from(len));
    let make = |len| if smcr { Ring::smcr(len) } else { Ring::smcd(len) };
    let Ok(rings) = make(lens[0]).and_then(|a| Ok([a, make(lens[1])?])) else { return };
    let start = |own: usize| {
        let connection = Connection::new(rings[1 - own], rings[own]);
        let words = Connection::new(rings[own], rings[1 - own]).words();
        End {
            connection,
            element: vec![0; lens[own] as usize],
            words: (words.0.to_u64(), words.1.to_u64()),
            state_out: StateFlags::empty(),
            written: 0,
            read: 0,
            failed: false,
        }
    };
    let [mut first, mut second] = [start(0), start(1)];
    let (mut honest, mut urgent) = (true, false);
    for (which, operation) in operations.into_iter().take(4096) {
        let id = usize::from(which);
        let (end, peer) = if which { (&mut second, &mut first) } else { (&mut first, &mut second) };
        match operation {
            Operation::Write { n, more } if end.connection.close.can_write() => {
                let spans = end.connection.sender.spans(n.into());
                check(&rings[1 - id], &peer.element, spans);
                for Span { offset, len } in spans {
                    for at in offset..offset + len {
                        peer.element[at as usize] = stream(id, end.written);
                        end.written += 1;
                    }
                }
                let n = spans[0].len + spans[1].len;
                assert_eq!(end.connection.sender.advance(n, more), n);
            }
            Operation::WriteUrgent { n } if end.connection.close.can_write() => {
                urgent = true;
                let sender = &mut end.connection.sender;
                sender.announce_urgent();
                check(&rings[1 - id], &peer.element, sender.spans(n.into()));
                sender.advance_urgent(n.into());
            }
            Operation::Block if end.connection.close.can_write() => end.connection.sender.block(),
            Operation::RequestUpdate => end.connection.sender.request_update(),
            Operation::Publish if end.connection.close.may_publish() => publish(end, peer),
            Operation::Look => {
                let (producer, consumer) = read_words(|| end.words.0, || end.words.1);
                match end.connection.on_control(producer, consumer, false) {
                    Ok(delivery) => {
                        assert!(delivery.received.bytes <= rings[id].len());
                        assert!(delivery.freed <= rings[1 - id].len());
                        if let UrgentEvent::Present { offset } = delivery.received.urgent {
                            let span = Span { offset, len: 1 };
                            check(&rings[id], &end.element, [span, Span::default()]);
                            let byte = end.element[offset as usize];
                            end.connection.receiver.remember_urgent(byte);
                        }
                        obey(end, peer, delivery.actions);
                    }
                    Err(error) => {
                        assert!(!honest, "{error}");
                        event(end, peer, Event::Abort);
                    }
                }
            }
            Operation::Read { n } => {
                let spans = end.connection.receiver.spans(n.into());
                check(&rings[id], &end.element, spans);
                let stream_is_known = honest && !urgent && !end.failed && !peer.failed;
                for Span { offset, len } in spans {
                    for at in offset..offset + len {
                        if stream_is_known {
                            assert_eq!(end.element[at as usize], stream(1 - id, end.read));
                            assert!(end.read < peer.written);
                        }
                        end.read += 1;
                    }
                }
                let _ = end.connection.receiver.consume(n.into());
            }
            Operation::Peek { skip, n } => {
                let spans = end.connection.receiver.peek(skip.into(), n.into());
                check(&rings[id], &end.element, spans);
            }
            Operation::TakeUrgent { peek } => {
                let _ = end.connection.receiver.take_urgent(peek);
            }
            Operation::Inline(inline) => {
                let _ = end.connection.receiver.set_oob_inline(inline);
            }
            Operation::ShutdownWrite => event(end, peer, Event::ShutdownWrite),
            Operation::Close => {
                let unread = end.connection.receiver.available() != 0;
                event(end, peer, Event::Close { unread });
            }
            Operation::Abort => event(end, peer, Event::Abort),
            Operation::TcpReset => event(end, peer, Event::TcpReset),
            Operation::Timeout => event(end, peer, Event::Timeout),
            Operation::Lie { producer, consumer } => {
                honest = false;
                end.words = (producer, consumer);
            }
            Operation::SmallLie { producer, consumer, wrap, flags, state } => {
                honest = false;
                let mut p = ProducerWord::from_u64(end.words.0);
                let mut c = ConsumerWord::from_u64(end.words.1);
                p.cursor.count = p.cursor.count.wrapping_add_signed(producer.into());
                p.cursor.wrap = p.cursor.wrap.wrapping_add_signed(wrap.into());
                c.cursor.count = c.cursor.count.wrapping_add_signed(consumer.into());
                c.producer_flags = smc_core::wire::cdc::ProducerFlags::from_bits_truncate(flags);
                c.state_flags = StateFlags::from_bits_truncate(state);
                end.words = (p.to_u64(), c.to_u64());
            }
            _ => {}
        }
        for (id, end) in [&first, &second].into_iter().enumerate() {
            assert!(end.connection.sender.in_flight() <= rings[1 - id].len());
            assert!(end.connection.sender.space() <= rings[1 - id].len());
            assert!(end.connection.receiver.available() <= rings[id].len());
            assert!(end.connection.receiver.peer_window() <= rings[id].len());
        }
    }
});
