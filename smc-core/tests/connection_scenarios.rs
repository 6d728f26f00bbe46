// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The six data flows of RFC 7609 section 4.7, with the numbers of its figures as wire erratum B-7
//! corrects them, for SMC-R elements of 10000 bytes and for an SMC-D ring of the same capacity.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on may stop")]

use smc_core::connection::{
    Connection, Delivery, ProducerUpdate, Ring, SMCD_CONTROL_LEN, Span, UpdateDecision, UrgentEvent,
};
use smc_core::wire::Cursor;
use smc_core::wire::cdc::{ConsumerWord, ProducerFlags, ProducerWord, StateFlags};

const NONE: ProducerFlags = ProducerFlags::empty();
const B: ProducerFlags = ProducerFlags::BLOCKED;
const P: ProducerFlags = ProducerFlags::URGENT_PENDING;
const U: ProducerFlags = ProducerFlags::URGENT_PRESENT;

/// Hosts A and B of the figures, and the numbers depending on the type of SMC.
struct Figure {
    a: Connection,
    b: Connection,
    /// Cursor of the first ring byte; 4 in the figures.
    base: u32,
    /// Offset of the first ring byte; 4 in the figures.
    offset: u32,
}

impl Figure {
    fn smcr() -> Figure {
        let ring = Ring::smcr(10_000).unwrap();
        Figure {
            a: Connection::new(ring, ring),
            b: Connection::new(ring, ring),
            base: 4,
            offset: 4,
        }
    }

    fn smcd() -> Figure {
        let ring = Ring::smcd(SMCD_CONTROL_LEN + 9996).unwrap();
        let (a, b) = (Connection::new(ring, ring), Connection::new(ring, ring));
        Figure { a, b, base: 0, offset: 32 }
    }

    /// A cursor in the figures' notation.
    fn cursor(&self, wrap: u16, count: u32) -> Cursor {
        Cursor { wrap, count: count - 4 + self.base }
    }

    /// Bytes `first..=last` of the element as the figures print them.
    fn bytes(&self, first: u32, last: u32) -> Span {
        Span { offset: first - 4 + self.offset, len: last + 1 - first }
    }

    fn nothing(&self) -> Span {
        Span { offset: self.offset, len: 0 }
    }

    /// Host A writes `n` bytes and says whether there were more; returns the pieces.
    fn a_writes(&mut self, n: u32, more: bool) -> [Span; 2] {
        let spans = self.a.sender.spans(n);
        assert_eq!(self.a.sender.advance(n, more), n);
        spans
    }

    fn a_to_b(&mut self) -> (Cursor, Cursor, ProducerFlags, Delivery) {
        send(&mut self.a, &mut self.b)
    }

    fn b_to_a(&mut self) -> (Cursor, Cursor, ProducerFlags, Delivery) {
        send(&mut self.b, &mut self.a)
    }

    /// Both directions idle, all read and told, with A's cursors at `count` in round 1.
    fn advanced_to(mut self, count: u32) -> Figure {
        for n in [9996, count - 4] {
            self.a_writes(n, false);
            let _ = self.a_to_b();
            let _ = self.b.receiver.consume(n);
            let _ = self.b_to_a();
        }
        assert_eq!(self.a.sender.cursor(), self.cursor(1, count));
        assert_eq!(self.a.sender.space(), 9996);
        self
    }
}

/// Sends a control word or message; returns producer cursor, consumer cursor, flags, and the
/// result.
fn send(from: &mut Connection, to: &mut Connection) -> (Cursor, Cursor, ProducerFlags, Delivery) {
    let (producer, consumer) = from.words();
    // The words travel as bits.
    let producer = ProducerWord::from_u64(producer.to_u64());
    let consumer = ConsumerWord::from_u64(consumer.to_u64());
    assert_eq!(consumer.state_flags, StateFlags::empty());
    from.on_published();
    let delivery = to.on_control(producer, consumer, false).unwrap();
    (producer.cursor, consumer.cursor, consumer.producer_flags, delivery)
}

fn quiet(bytes: u32) -> ProducerUpdate {
    ProducerUpdate { bytes, update: UpdateDecision::NotDue, urgent: UrgentEvent::None }
}

fn both(replay: impl Fn(Figure)) {
    replay(Figure::smcr());
    replay(Figure::smcd());
}

// Shows: CDC-9, CDC-25, CDC-40.
#[test]
fn scenario_1_send_with_an_open_window() {
    both(|mut f| {
        assert_eq!(f.a_writes(1000, false), [f.bytes(4, 1003), f.nothing()]);
        let (producer, consumer, flags, delivery) = f.a_to_b();
        assert_eq!((producer, consumer), (f.cursor(0, 1004), f.cursor(0, 4)));
        assert_eq!((flags, delivery.received), (NONE, quiet(1000)));
        assert_eq!(f.b.receiver.consume(1000), UpdateDecision::NotDue);
        assert_eq!(f.b.receiver.peer_window(), 8996);
    });
}

// Shows: CDC-10, CDC-22, CDC-41.
#[test]
fn scenario_2_request_and_response() {
    both(|mut f| {
        f.a_writes(1000, false);
        let _ = f.a_to_b();
        let _ = f.b.receiver.consume(1000);
        assert_eq!(f.b.sender.spans(500), [f.bytes(4, 503), f.nothing()]);
        f.b.sender.advance(500, false);
        let (producer, consumer, flags, delivery) = f.b_to_a();
        assert_eq!((producer, consumer), (f.cursor(0, 504), f.cursor(0, 1004)));
        assert_eq!((flags, delivery.received, delivery.freed), (NONE, quiet(500), 1000));
        assert_eq!(f.a.sender.space(), 9996);
        assert_eq!(f.b.receiver.peer_window(), 9996);
    });
}

// Shows: CDC-42.
#[test]
fn scenario_3_send_with_a_constrained_window() {
    both(|mut f| {
        assert_eq!(f.a_writes(3000, false), [f.bytes(4, 3003), f.nothing()]);
        assert_eq!(f.a_to_b().0, f.cursor(0, 3004));
        assert_eq!(f.b.receiver.consume(3000), UpdateDecision::NotDue);
        assert_eq!(f.b.receiver.peer_window(), 6996);
        assert_eq!(f.a_writes(4000, false), [f.bytes(3004, 7003), f.nothing()]);
        assert_eq!(f.a_to_b().0, f.cursor(0, 7004));
        assert_eq!(f.b.receiver.peer_window(), 2996);
        assert_eq!(f.b.receiver.consume(4000), UpdateDecision::Window);
        let (_, consumer, _, delivery) = f.b_to_a();
        assert_eq!((consumer, delivery.freed), (f.cursor(0, 7004), 7000));
        assert_eq!(f.b.receiver.update_due(), UpdateDecision::NotDue);
    });
}

// Shows: CDC-12, CDC-15, CDC-17, CDC-18, CDC-43.
#[test]
fn scenario_4_a_send_of_twice_the_ring() {
    both(|f| {
        let mut f = f.advanced_to(1004);
        for round in [2, 3] {
            assert_eq!(f.a_writes(9996, true), [f.bytes(1004, 9999), f.bytes(4, 1003)]);
            let (producer, _, flags, delivery) = f.a_to_b();
            assert_eq!((producer, flags), (f.cursor(round, 1004), B));
            assert_eq!(delivery.received, quiet(9996));
            assert_eq!(f.a.sender.space(), 0);
            let read = f.b.receiver.spans(9996);
            assert_eq!(read, [f.bytes(1004, 9999), f.bytes(4, 1003)]);
            assert_eq!(f.b.receiver.consume(9996), UpdateDecision::WriterBlocked);
            let (_, consumer, _, delivery) = f.b_to_a();
            assert_eq!((consumer, delivery.freed), (f.cursor(round, 1004), 9996));
        }
        assert_eq!(f.a_writes(8, false), [f.bytes(1004, 1011), f.nothing()]);
        let (producer, _, flags, _) = f.a_to_b();
        assert_eq!((producer, flags), (f.cursor(3, 1012), NONE));
        assert_eq!(f.b.receiver.consume(8), UpdateDecision::NotDue);
    });
}

// Shows: CDC-28, CDC-29, CDC-34, CDC-44.
#[test]
fn scenario_5_urgent_data_with_an_open_window() {
    both(|f| {
        let mut f = f.advanced_to(1000);
        assert_eq!(f.a.sender.spans(500), [f.bytes(1000, 1499), f.nothing()]);
        assert_eq!(f.a.sender.advance_urgent(500), 500);
        let (producer, _, flags, delivery) = f.a_to_b();
        assert_eq!((producer, flags), (f.cursor(1, 1500), P | U));
        let offset = f.bytes(1499, 1499).offset;
        assert_eq!(delivery.received.urgent, UrgentEvent::Present { offset });
        assert!(f.b.receiver.exception());
        f.b.receiver.remember_urgent(b'!');
        // The normal data behind has to wait.
        assert_eq!((f.a.sender.space(), f.a.sender.window()), (0, 9496));
        assert_eq!(f.b.receiver.readable(), 499);
        assert_eq!(f.b.receiver.consume(499), UpdateDecision::Urgent);
        assert_eq!(f.b.receiver.take_urgent(false), Ok(b'!'));
        let (_, consumer, _, _) = f.b_to_a();
        assert_eq!(consumer, f.cursor(1, 1500));
        assert_eq!(f.a_writes(1000, false), [f.bytes(1500, 2499), f.nothing()]);
        let (producer, _, flags, delivery) = f.a_to_b();
        assert_eq!((producer, flags), (f.cursor(1, 2500), NONE));
        assert_eq!(delivery.received, quiet(1000));
        assert_eq!(f.b.receiver.consume(1000), UpdateDecision::NotDue);
    });
}

// Shows: CDC-30, CDC-45.
#[test]
fn scenario_6_urgent_data_with_a_closed_window() {
    both(|f| {
        let mut f = f.advanced_to(1000);
        f.a_writes(9996, true);
        assert_eq!(f.a_to_b().2, B);
        // 1: the window is closed, so P goes alone.
        f.a.sender.announce_urgent();
        assert!(f.a.sender.publish_due());
        let (producer, _, flags, delivery) = f.a_to_b();
        assert_eq!((producer, flags), (f.cursor(2, 1000), P | B));
        assert_eq!(delivery.received.urgent, UrgentEvent::Pending);
        assert!(f.b.receiver.exception());
        // 2: the application reads all there is.
        assert_eq!(f.b.receiver.readable(), 9996);
        assert!(f.b.receiver.consume(9996).is_due());
        let (_, consumer, _, _) = f.b_to_a();
        assert_eq!(consumer, f.cursor(2, 1000));
        // 3 and 4: now the urgent data itself.
        assert_eq!(f.a.sender.spans(500), [f.bytes(1000, 1499), f.nothing()]);
        assert_eq!(f.a.sender.advance_urgent(500), 500);
        let (producer, _, flags, delivery) = f.a_to_b();
        assert_eq!((producer, flags), (f.cursor(2, 1500), P | U));
        let offset = f.bytes(1499, 1499).offset;
        assert_eq!(delivery.received.urgent, UrgentEvent::Present { offset });
        // 5: read and acknowledged.
        assert_eq!(f.b.receiver.consume(499), UpdateDecision::Urgent);
        let (_, consumer, _, _) = f.b_to_a();
        assert_eq!(consumer, f.cursor(2, 1500));
        // 6 and 7: the following normal data ends the urgent mode.
        assert_eq!(f.a_writes(1000, false), [f.bytes(1500, 2499), f.nothing()]);
        let (producer, _, flags, _) = f.a_to_b();
        assert_eq!((producer, flags), (f.cursor(2, 2500), NONE));
        assert_eq!(f.b.receiver.consume(1000), UpdateDecision::NotDue);
    });
}
