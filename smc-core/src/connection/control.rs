// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Both words of a control block: how to read them, and a connection for callers with one thread.

use super::close::{Actions, Close, Event};
use super::receiver::{ProducerUpdate, Receiver};
use super::ring::{CursorError, Ring};
use super::sender::Sender;
use crate::wire::cdc::{ConsumerWord, ProducerFlags, ProducerWord, StateFlags};

/// Maximum number of rounds of [`read_words`]: an honest peer changes its flags twice in a row at
/// most, another peer harms only its own connection.
const MAX_ROUNDS: u32 = 4;

/// Reads the two words of a control block, with flags belonging to the producer cursor.
///
/// The peer stores the producer word first and the word with consumer cursor and flags second, each
/// by one Release store; the closures load the words, each by one Acquire load. The order is:
///
/// 1. flags, 2. producer cursor, 3. flags again; from 2 on once more if the flags changed.
///
/// Flags before cursor: a reader seeing D or C then sees a producer cursor at least as new, and
/// misses none of the last bytes. The other way round, the peer could write its last bytes and D
/// between the two loads, and the reader would report the end too early (CLOSE-18).
///
/// Flags again: otherwise U of an urgent byte read long ago could be paired with the cursor of
/// later bytes, and P or U of this cursor be missed. See [`super::sender`] for the peer's part.
#[inline]
pub fn read_words(
    mut producer: impl FnMut() -> u64,
    mut consumer: impl FnMut() -> u64,
) -> (ProducerWord, ConsumerWord) {
    let mut before = ConsumerWord::from_u64(consumer());
    for _ in 1..MAX_ROUNDS {
        let cursor = ProducerWord::from_u64(producer());
        let after = ConsumerWord::from_u64(consumer());
        let same = before.producer_flags == after.producer_flags
            && before.state_flags == after.state_flags;
        if same {
            // The cursor of the other direction is best as new as can be.
            return (cursor, after);
        }
        before = after;
    }
    (ProducerWord::from_u64(producer()), before)
}

/// The changes after [`Connection::on_control`].
#[must_use]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Delivery {
    /// The receiving direction.
    pub received: ProducerUpdate,
    /// Freed bytes of the peer's ring.
    pub freed: u32,
    /// The actions required by the peer's state flags.
    pub actions: Actions,
}

/// Both directions and the end of one connection, for users with one thread or one lock. Users with a
/// lock per direction keep `sender`, `receiver` and `close` in separate places.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Connection {
    /// Into the peer's ring, with cursors of its own (CDC-39).
    pub sender: Sender,
    /// Out of the own ring.
    pub receiver: Receiver,
    /// Termination.
    pub close: Close,
}

impl Connection {
    /// An established connection writing into the ring `peer` and reading from the ring `own`.
    pub fn new(peer: Ring, own: Ring) -> Connection {
        let mut close = Close::new();
        close.on(Event::Established, false);
        Connection { sender: Sender::new(peer), receiver: Receiver::new(own), close }
    }

    /// Takes both words of the own control block, or of an SMC-R message neither overtaken
    /// ([`super::Sequence::judge`]) nor a failover validation. `unsent` as for [`Close::step`].
    ///
    /// # Errors
    /// An impossible cursor; the caller reports [`Event::Abort`]. Changes before the error, in the
    /// order producer, consumer, state, are kept.
    pub fn on_control(
        &mut self,
        producer: ProducerWord,
        consumer: ConsumerWord,
        unsent: bool,
    ) -> Result<Delivery, CursorError> {
        let flags = consumer.producer_flags;
        let received = self.receiver.on_peer_producer(producer.cursor, flags)?;
        let freed = self.sender.on_peer_consumer(consumer.cursor)?;
        let flags = consumer.state_flags;
        if !flags.is_empty() {
            self.receiver.on_peer_done();
        }
        let actions = self.close.on(Event::Peer { flags }, unsent);
        Ok(Delivery { received, freed, actions })
    }

    /// The words to publish now, after the bytes. The words state everything anew, so words lost
    /// before do no harm (CDC-8).
    pub fn words(&self) -> (ProducerWord, ConsumerWord) {
        (self.sender.producer_word(), self.consumer_word(self.sender.flags(), self.close.flags()))
    }

    /// The consumer word to store ahead, if any ([`Sender::flags_ahead`]); `state` is the last
    /// published value.
    pub fn word_ahead(&self, state: StateFlags) -> Option<ConsumerWord> {
        self.sender.flags_ahead().map(|flags| self.consumer_word(flags, state))
    }

    /// The words went out.
    pub fn on_published(&mut self) {
        self.sender.on_published();
        self.receiver.on_published(self.receiver.cursor());
    }

    fn consumer_word(
        &self,
        producer_flags: ProducerFlags,
        state_flags: StateFlags,
    ) -> ConsumerWord {
        ConsumerWord { cursor: self.receiver.cursor(), producer_flags, state_flags }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::Cursor;

    fn connection() -> Option<Connection> {
        let ring = Ring::smcd(132).ok()?;
        Some(Connection::new(ring, ring))
    }

    #[test]
    fn the_newest_consumer_cursor_of_an_update_is_used() {
        let mut count = 0;
        let (_, consumer) = read_words(
            || 0,
            || {
                count += 1;
                let cursor = Cursor::new(0, count);
                ConsumerWord { cursor, ..ConsumerWord::default() }.to_u64()
            },
        );
        assert_eq!(consumer.cursor, Cursor::new(0, 2));
    }

    #[test]
    fn the_end_shows_a_byte_that_was_held_back() {
        let mut c = connection().unwrap();
        let producer = ProducerWord { cursor: Cursor::new(0, 10) };
        let producer_flags = ProducerFlags::URGENT_PENDING;
        let mut consumer = ConsumerWord { producer_flags, ..ConsumerWord::default() };
        let _ = c.on_control(producer, consumer, false).unwrap();
        assert_eq!(c.receiver.readable(), 9);
        consumer.state_flags = StateFlags::SENDING_DONE;
        let delivery = c.on_control(producer, consumer, false).unwrap();
        assert!(delivery.actions.contains(Actions::WAKE_READERS));
        assert_eq!(c.receiver.readable(), 10);
    }

    #[test]
    fn a_lie_in_either_word_is_an_error() {
        let good = (ProducerWord::default(), ConsumerWord::default());
        let beyond = Cursor::new(0, 1);
        let mut c = connection().unwrap();
        assert!(c.on_control(good.0, ConsumerWord { cursor: beyond, ..good.1 }, false).is_err());
        let outside = ProducerWord { cursor: Cursor::new(0, 100) };
        assert!(c.on_control(outside, good.1, false).is_err());
        assert!(c.on_control(good.0, good.1, false).is_ok());
    }
}
