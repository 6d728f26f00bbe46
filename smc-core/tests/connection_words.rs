// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Reading the control block during stores of the peer: every position of the loads of one look
//! between the stores, for histories with a wrong result under a careless order of loads or stores.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on may stop")]

use smc_core::connection::close::Event;
use smc_core::connection::{Connection, ProducerUpdate, Ring, UrgentEvent, read_words};
use smc_core::wire::cdc::{ConsumerWord, ProducerWord, StateFlags};

#[derive(Clone, Copy, Debug)]
enum Store {
    Producer(u64),
    Consumer(u64),
}

/// A sender whose stores are written down.
struct Writer {
    connection: Connection,
    state: StateFlags,
    stores: Vec<Store>,
}

fn ring() -> Ring {
    Ring::smcd(132).unwrap()
}

impl Writer {
    fn new() -> Writer {
        let connection = Connection::new(ring(), ring());
        Writer { connection, state: StateFlags::empty(), stores: Vec::new() }
    }

    fn publish(&mut self) {
        if let Some(word) = self.connection.word_ahead(self.state) {
            self.stores.push(Store::Consumer(word.to_u64()));
        }
        let (producer, consumer) = self.connection.words();
        self.stores.push(Store::Producer(producer.to_u64()));
        self.stores.push(Store::Consumer(consumer.to_u64()));
        self.connection.on_published();
        self.state = consumer.state_flags;
    }

    fn write(&mut self, n: u32) {
        assert_eq!(self.connection.sender.advance(n, false), n);
        self.publish();
    }

    fn write_urgent(&mut self, n: u32) {
        assert_eq!(self.connection.sender.advance_urgent(n), n);
        self.publish();
    }

    fn done(&mut self) {
        self.connection.close.on(Event::ShutdownWrite, false);
        self.publish();
    }

    /// The peer has read everything.
    fn all_read(&mut self) {
        let cursor = self.connection.sender.cursor();
        self.connection.sender.on_peer_consumer(cursor).unwrap();
    }
}

/// Looks at a block into which `stores` go, `pauses[i]` of them before load `i` of the look.
fn look(
    block: &mut [u64; 2],
    stores: &mut std::slice::Iter<Store>,
    pauses: [usize; 3],
) -> (ProducerWord, ConsumerWord) {
    let shared = std::cell::RefCell::new((block, stores, pauses.into_iter()));
    let load = |index: usize| {
        let (block, stores, pauses) = &mut *shared.borrow_mut();
        for _ in 0..pauses.next().unwrap_or(0) {
            match stores.next() {
                Some(Store::Producer(word)) => block[0] = *word,
                Some(Store::Consumer(word)) => block[1] = *word,
                None => {}
            }
        }
        block[index]
    };
    read_words(|| load(0), || load(1))
}

/// Every distribution of at most `n` stores over three loads.
fn all_pauses(n: usize) -> impl Iterator<Item = [usize; 3]> {
    let to = n + 1;
    (0..to * to * to)
        .map(move |i| [i % to, i / to % to, i / to / to])
        .filter(move |p| p.iter().sum::<usize>() <= n)
}

/// Plays `stores` against a reader in the state `reader`; `check` gets the reader and the results
/// of three looks. The last look comes after the last store.
fn play(
    reader: Connection,
    block: [u64; 2],
    stores: &[Store],
    mut check: impl FnMut(&mut Connection, ProducerUpdate),
) {
    for first in all_pauses(stores.len()) {
        let left = stores.len() - first.iter().sum::<usize>();
        for second in all_pauses(left) {
            let (mut block, mut stores, mut reader) = (block, stores.iter(), reader);
            for pauses in [first, second, [stores.len(), 0, 0]] {
                let (producer, consumer) = look(&mut block, &mut stores, pauses);
                let delivery = reader.on_control(producer, consumer, false).unwrap();
                check(&mut reader, delivery.received);
            }
        }
    }
}

// Shows: CLOSE-18.
#[test]
fn the_end_is_never_seen_before_the_last_bytes() {
    let mut writer = Writer::new();
    writer.write(10);
    writer.write(20);
    writer.done();
    let mut looks = 0;
    play(Connection::new(ring(), ring()), [0; 2], &writer.stores, |reader, _| {
        if reader.close.peer_done() {
            assert_eq!(reader.receiver.available(), 30);
            looks += 1;
        }
    });
    assert!(looks > 100);
}

// Shows: CLOSE-18.
#[test]
fn the_last_bytes_and_the_end_in_one_publication() {
    let mut writer = Writer::new();
    writer.connection.sender.advance(10, false);
    writer.connection.close.on(Event::Close { unread: false }, false);
    writer.publish();
    play(Connection::new(ring(), ring()), [0; 2], &writer.stores, |reader, _| {
        assert!(!reader.close.peer_done() || reader.receiver.available() == 10);
    });
}

// Shows: CDC-28.
#[test]
fn an_urgent_byte_never_slips_into_the_stream() {
    let mut writer = Writer::new();
    writer.write(5);
    writer.write_urgent(10);
    let mut marks = 0;
    play(Connection::new(ring(), ring()), [0; 2], &writer.stores, |reader, arrival| {
        // Bytes 0 to 13 are ordinary ones, byte 14 is not.
        assert!(reader.receiver.readable() <= 14);
        if let UrgentEvent::Present { offset } = arrival.urgent {
            assert_eq!(offset, 32 + 14);
            marks += 1;
        }
    });
    assert!(marks > 100);
}

#[test]
fn the_data_behind_a_mark_is_not_taken_for_another_mark() {
    let mut writer = Writer::new();
    writer.write_urgent(10);
    let mut reader = Connection::new(ring(), ring());
    let mut block = [0; 2];
    let (producer, consumer) = look(&mut block, &mut writer.stores.iter(), [3, 0, 0]);
    let delivery = reader.on_control(producer, consumer, false).unwrap();
    assert!(matches!(delivery.received.urgent, UrgentEvent::Present { .. }));
    assert!(reader.receiver.consume(9).is_due());
    reader.receiver.on_published(reader.receiver.cursor());

    writer.all_read();
    writer.stores.clear();
    writer.write(7);
    writer.write(8);
    play(reader, block, &writer.stores, |reader, arrival| {
        assert_eq!(arrival.urgent, UrgentEvent::None);
        assert_eq!(reader.receiver.readable(), reader.receiver.available());
    });
}

#[test]
fn a_second_urgent_byte_right_behind_the_first_is_a_mark_of_its_own() {
    let mut writer = Writer::new();
    writer.write_urgent(10);
    let mut reader = Connection::new(ring(), ring());
    let mut block = [0; 2];
    let (producer, consumer) = look(&mut block, &mut writer.stores.iter(), [3, 0, 0]);
    let _ = reader.on_control(producer, consumer, false).unwrap();
    assert!(reader.receiver.consume(9).is_due());
    reader.receiver.on_published(reader.receiver.cursor());

    writer.all_read();
    writer.stores.clear();
    writer.write_urgent(4);
    let mut plays = 0;
    let mut marks = 0;
    play(reader, block, &writer.stores, |reader, arrival| {
        plays += 1;
        assert!(reader.receiver.readable() <= 3);
        if let UrgentEvent::Present { offset } = arrival.urgent {
            assert_eq!(offset, 32 + 13);
            marks += 1;
        }
    });
    assert_eq!(marks * 3, plays, "one mark in each play of three looks");
}

#[test]
fn a_peer_that_never_rests_cannot_keep_a_reader() {
    let mut word = 0u64;
    let mut loads = 0;
    let (_, _) = read_words(
        || 0,
        || {
            loads += 1;
            word = !word;
            word
        },
    );
    assert!(loads < 10);
}
