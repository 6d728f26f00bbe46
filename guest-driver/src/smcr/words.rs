// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The two control words of a connection's peer.
//!
//! On SMC-D the peer stores the words into the DMB. Here they are in this process's own memory, stored
//! by the thread taking a CDC message from the completion queue: producer word first, as a peer on
//! SMC-D does. A reader never sees two words of different messages, so urgent marks stay with their
//! cursors even if messages were left out in between.
//!
//! A failover validation is no message with words of its own. It leaves a mark in the words (F), until
//! the sender has [taken the mark](Words::take_failover_flag) and knows of the peer's move to another link.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard};

use ism_sys::lock;
use smc_core::connection::failover::{Validation, judge};
use smc_core::connection::{Order, Sequence};
use smc_core::wire::Cursor;
use smc_core::wire::cdc::{Cdc, ConsumerWord, ProducerFlags, ProducerWord};

/// The effect of a CDC message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Received {
    /// The words are now the message's.
    Stored,
    /// Older than a processed message: discarded (CDC-7).
    Overtaken,
    /// A failover validation (CDC-35): the last message acknowledged to the peer has arrived.
    Validated,
    /// Like `Validated`, but the message with this number has not arrived: unless unseen in the queue
    /// of another adapter, data was lost (LG-37, SEC-15), and the connection must be reset.
    Missing(u16),
}

/// The words of a message, and its sequence number.
#[derive(Debug, Default)]
pub(crate) struct Words {
    /// Odd while the words are being stored.
    version: AtomicU32,
    words: [AtomicU64; 2],
    taken: Mutex<Taken>,
}

/// The state after the messages so far.
#[derive(Debug, Default)]
struct Taken {
    sequence: Sequence,
    /// The peer has moved since the sender looked.
    moved: bool,
    /// The peer has moved at any time.
    has_moved: bool,
    /// No message counts any more.
    closed: bool,
}

impl Words {
    /// The words of a peer before its first message: both cursors at their start.
    pub(crate) fn starting_at(start: Cursor) -> Words {
        let words = Words::default();
        let consumer = ConsumerWord { cursor: start, ..ConsumerWord::default() };
        words.words[0].store(ProducerWord { cursor: start }.to_u64(), Ordering::Relaxed);
        words.words[1].store(consumer.to_u64(), Ordering::Relaxed);
        words
    }

    /// Both words, of one message.
    #[inline]
    pub(crate) fn load(&self) -> [u64; 2] {
        loop {
            let before = self.version.load(Ordering::Acquire);
            // Acquire: partners of the Release stores in `store`. A thread seeing a word sees the
            // announced bytes, written by the adapter before the completion (RMB-29).
            let words =
                [self.words[0].load(Ordering::Acquire), self.words[1].load(Ordering::Acquire)];
            if before & 1 == 0 && self.version.load(Ordering::Relaxed) == before {
                return words;
            }
            std::hint::spin_loop();
        }
    }

    /// Takes a message. Several threads may take messages of one connection, over two links: the
    /// sequence numbers decide.
    pub(crate) fn take(&self, cdc: &Cdc) -> Received {
        let mut taken = self.taken();
        if taken.closed {
            return Received::Overtaken;
        }
        if cdc.producer_flags.contains(ProducerFlags::FAILOVER) {
            (taken.moved, taken.has_moved) = (true, true);
            self.store(self.load(), true);
            return match judge(&taken.sequence, cdc.sequence) {
                Validation::Intact => Received::Validated,
                Validation::Lost { sent, .. } => Received::Missing(sent),
            };
        }
        // A repeated message changes nothing, so it may as well be processed (wire erratum B-9).
        if taken.sequence.judge(cdc.sequence) == Order::Old {
            return Received::Overtaken;
        }
        self.store(words_of(cdc), taken.moved);
        Received::Stored
    }

    /// The sender knows of the peer's move: clears the mark. `true`: the mark was set.
    #[cold]
    pub(crate) fn take_failover_flag(&self) -> bool {
        let mut taken = self.taken();
        let moved = std::mem::take(&mut taken.moved);
        self.store(self.load(), false);
        moved
    }

    /// Ends the words of messages: from now on only [`Words::put`] changes them.
    pub(crate) fn close(&self) {
        self.taken().closed = true;
    }

    /// Stores words received on another way. No message counts any more: the last ones of the link, with
    /// no more bytes than the peer has named on the other way, may still be under way.
    pub(crate) fn put(&self, words: [u64; 2]) {
        let mut taken = self.taken();
        taken.closed = true;
        self.store(words, false);
    }

    /// Whether the peer has ever moved to another link.
    pub(crate) fn has_moved(&self) -> bool {
        self.taken().has_moved
    }

    fn taken(&self) -> MutexGuard<'_, Taken> {
        lock(&self.taken)
    }

    /// Number of the newest message taken.
    pub(crate) fn last(&self) -> u16 {
        self.taken().sequence.last()
    }

    /// Whether a message with this number, or a later one, was taken.
    pub(crate) fn has_seen(&self, number: u16) -> bool {
        judge(&self.taken().sequence, number) == Validation::Intact
    }

    /// Called only with `taken` locked.
    fn store(&self, [producer, consumer]: [u64; 2], moved: bool) {
        let mut consumer = ConsumerWord::from_u64(consumer);
        consumer.producer_flags.set(ProducerFlags::FAILOVER, moved);
        let consumer = consumer.to_u64();
        let version = self.version.load(Ordering::Relaxed);
        self.version.store(version.wrapping_add(1), Ordering::Relaxed);
        self.words[0].store(producer, Ordering::Release);
        self.words[1].store(consumer, Ordering::Release);
        self.version.store(version.wrapping_add(2), Ordering::Release);
    }
}

/// The message as the two words of a control block.
fn words_of(cdc: &Cdc) -> [u64; 2] {
    let producer = ProducerWord { cursor: cdc.producer };
    let consumer = ConsumerWord {
        cursor: cdc.consumer,
        producer_flags: cdc.producer_flags,
        state_flags: cdc.state_flags,
    };
    [producer.to_u64(), consumer.to_u64()]
}

#[cfg(test)]
mod tests {
    use super::*;
    use smc_core::wire::cdc::StateFlags;

    fn message(sequence: u16, count: u32) -> Cdc {
        Cdc {
            sequence,
            token: 1,
            producer: Cursor::new(0, count),
            consumer: Cursor::new(2, count + 1),
            producer_flags: ProducerFlags::BLOCKED,
            state_flags: StateFlags::SENDING_DONE,
        }
    }

    #[test]
    fn a_message_and_its_words_are_the_same() {
        let words = Words::default();
        assert_eq!(words.take(&message(1, 7)), Received::Stored);
        assert_eq!(Cdc::from_words(words.load(), 1, 1), message(1, 7));
    }

    // Shows: LG-63, CDC-7.
    #[test]
    fn an_overtaken_message_is_discarded_and_a_repeated_one_is_taken() {
        let words = Words::default();
        assert_eq!(words.take(&message(5, 50)), Received::Stored);
        assert_eq!(words.take(&message(4, 40)), Received::Overtaken);
        assert_eq!(words.take(&message(5, 50)), Received::Stored);
        assert_eq!(Cdc::from_words(words.load(), 5, 1), message(5, 50));
    }

    // Shows: LG-37, CDC-35, SEC-15.
    #[test]
    fn a_failover_validation_moves_no_cursor() {
        let words = Words::default();
        assert_eq!(words.take(&message(5, 50)), Received::Stored);
        let validation =
            |sequence| Cdc { producer_flags: ProducerFlags::FAILOVER, ..message(sequence, 99) };
        assert_eq!(words.take(&validation(5)), Received::Validated);
        assert_eq!(words.take(&validation(6)), Received::Missing(6));
        assert!(words.take_failover_flag());
        assert_eq!(Cdc::from_words(words.load(), 5, 1), message(5, 50));
        assert!(!words.has_seen(6));
        assert_eq!(words.take(&message(6, 60)), Received::Stored);
        assert!(words.has_seen(6) && !words.has_seen(7));
    }

    // Shows: CDC-35.
    #[test]
    fn a_validation_leaves_a_mark_until_it_is_taken() {
        let words = Words::default();
        let mark = |words: &Words| {
            ConsumerWord::from_u64(words.load()[1]).producer_flags.contains(ProducerFlags::FAILOVER)
        };
        words.take(&message(1, 7));
        assert!(!mark(&words) && !words.has_moved());
        words.take(&Cdc { producer_flags: ProducerFlags::FAILOVER, ..message(1, 7) });
        words.take(&message(2, 8));
        assert!(mark(&words));
        assert!(words.take_failover_flag());
        assert!(!mark(&words) && !words.take_failover_flag());
        assert!(words.has_moved());
        assert_eq!(Cdc::from_words(words.load(), 2, 1), message(2, 8));
    }

    #[test]
    fn no_message_changes_the_words_of_a_peer_that_has_left() {
        // The first byte of a word has no flags.
        let put = [7, 8].map(u64::to_le);
        let words = Words::default();
        assert_eq!(words.take(&message(5, 50)), Received::Stored);
        words.close();
        assert_eq!(words.take(&message(6, 60)), Received::Overtaken);
        let failover = Cdc { producer_flags: ProducerFlags::FAILOVER, ..message(6, 60) };
        assert_eq!(words.take(&failover), Received::Overtaken);
        assert_eq!(Cdc::from_words(words.load(), 5, 1), message(5, 50));
        words.put(put);
        assert_eq!(words.load(), put);
        let words = Words::default();
        assert_eq!(words.take(&message(5, 50)), Received::Stored);
        words.put(put);
        assert_eq!(words.take(&message(6, 60)), Received::Overtaken);
        assert_eq!(words.load(), put);
    }

    // Shows: RMB-29.
    #[test]
    fn no_reader_sees_the_words_of_two_messages() {
        let words = Words::default();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for i in 1..20_000u16 {
                    words.take(&message(i, u32::from(i)));
                }
            });
            let mut last = 0;
            while last < 19_999 {
                let cdc = Cdc::from_words(words.load(), 0, 0);
                if cdc.consumer.count != 0 {
                    assert_eq!(cdc.producer.count + 1, cdc.consumer.count);
                }
                last = cdc.producer.count;
            }
        });
    }
}
