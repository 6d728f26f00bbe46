// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The receiving half of a connection.

use super::places::{cursor_at, distance, offset_of};
use crate::connection::{CursorError, ProducerUpdate, Receiver, Ring};
use crate::wire::Cursor;
use crate::wire::cdc::{ConsumerWord, ProducerFlags, ProducerWord, StateFlags};

/// The two words of a peer before its first send: the cursors at the start of both rings.
pub fn first_words(own: &Ring, peer: &Ring) -> [u64; 2] {
    let producer = ProducerWord { cursor: own.start() }.to_u64();
    let consumer = ConsumerWord { cursor: peer.start(), ..Default::default() }.to_u64();
    [producer, consumer]
}

/// The part of a peer's two words relevant to readers: everything but the consumer cursor.
#[inline]
pub fn reader_view([producer, consumer]: [u64; 2]) -> [u64; 2] {
    let flags = ConsumerWord::from_u64(consumer);
    let flags = ConsumerWord { cursor: Default::default(), ..flags };
    [producer, flags.to_u64()]
}

/// The peer's direction, as the reader sees it: always a ring, whether the peer fills the ring or
/// [`RecordRecv`] does.
#[derive(Clone, Copy, Debug)]
pub struct RecvHalf {
    /// Cursors and urgent data of the own ring.
    pub receiver: Receiver,
    /// No bytes will follow, and the last ones were readable when this was found.
    pub ended: bool,
    /// A read has reported the failure of the connection, so none returns bytes any more.
    pub failed: bool,
    seen: [u64; 2],
    total: u64,
    arrivals: u64,
}

impl RecvHalf {
    /// The half at the start of the own ring. `seen`: [`first_words`].
    pub const fn new(receiver: Receiver, seen: [u64; 2]) -> RecvHalf {
        RecvHalf { receiver, ended: false, failed: false, seen, total: 0, arrivals: 0 }
    }

    /// The peer's words at the last refresh.
    #[inline]
    pub const fn seen(&self) -> [u64; 2] {
        self.seen
    }

    /// Number of bytes received.
    #[inline]
    pub const fn total(&self) -> u64 {
        self.total
    }

    /// Number of arrivals found.
    pub const fn arrivals(&self) -> u64 {
        self.arrivals
    }

    /// Whether these words say something new to a reader.
    #[inline]
    pub fn is_new(&self, words: [u64; 2]) -> bool {
        reader_view(words) != reader_view(self.seen)
    }

    /// Takes the peer's words, from one read ([`crate::connection::read_words`]).
    ///
    /// # Errors
    /// An impossible cursor: a lying peer, or memory that went with its device.
    #[inline]
    pub fn take(
        &mut self,
        producer: ProducerWord,
        consumer: ConsumerWord,
    ) -> Result<ProducerUpdate, CursorError> {
        self.seen = [producer.to_u64(), consumer.to_u64()];
        // The send half handles failover.
        let flags = consumer.producer_flags - ProducerFlags::FAILOVER;
        let update = self.receiver.on_peer_producer(producer.cursor, flags)?;
        self.total = self.total.saturating_add(u64::from(update.bytes));
        self.arrivals += u64::from(update.bytes > 0);
        Ok(update)
    }

    /// Bytes of the direction up to the producer cursor of `words`; `None`: the cursor cannot be
    /// true.
    pub fn arrived(&self, words: [u64; 2]) -> Option<u64> {
        let [from, to] = [self.seen, words].map(|words| ProducerWord::from_u64(words[0]).cursor);
        Some(self.total + u64::from(distance(from, to, self.receiver.ring())?))
    }

    /// Begins another ring, once all bytes of the last one were read or copied.
    pub fn begin_ring(&mut self, own: Ring, peer: &Ring) {
        self.receiver = self.receiver.renew(own);
        self.seen = first_words(&own, peer);
    }
}

/// The way of the peer's bytes into the own ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RecvPath {
    /// By stores of the peer.
    Ring,
    /// By stores of the peer before the loss of the carrier: missing bytes will never come.
    Lost,
    /// By DATA records, stored by this end.
    Tcp,
}

/// A place for bytes in the element of the own ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Offset in the element.
    pub offset: u32,
    /// Number of bytes, without a turn at the end of the element.
    pub len: usize,
}

/// The peer's direction, as its records bring it. This end stores the bytes of DATA into its own
/// ring and announces them by its own stores of the peer's words. So reads, readiness and the end
/// of the direction are the ring's.
#[derive(Clone, Copy, Debug)]
pub struct RecordRecv {
    path: RecvPath,
    /// Position of the first byte of the own ring.
    base: u64,
    /// Position behind the last byte stored.
    stored: u64,
    /// Bytes of the last DATA record not yet stored.
    body: u32,
    /// Position behind the last urgent byte.
    mark: Option<u64>,
    /// The peer's second word, as stored by this end.
    word: ConsumerWord,
}

/// The flags of an unread urgent byte.
const URGENT: ProducerFlags = ProducerFlags::URGENT_PENDING.union(ProducerFlags::URGENT_PRESENT);

impl Default for RecordRecv {
    fn default() -> RecordRecv {
        let word = ConsumerWord::default();
        RecordRecv { path: RecvPath::Ring, base: 0, stored: 0, body: 0, mark: None, word }
    }
}

impl RecordRecv {
    /// The way of the peer's bytes.
    pub const fn path(&self) -> RecvPath {
        self.path
    }

    /// Position behind the last byte stored; `None`: the peer stores by itself.
    pub const fn stored(&self) -> Option<u64> {
        match self.path {
            RecvPath::Tcp => Some(self.stored),
            RecvPath::Ring | RecvPath::Lost => None,
        }
    }

    /// Notes the loss of the carrier. `true`: the loss matters and is new.
    pub fn lose(&mut self) -> bool {
        let is_new = self.path == RecvPath::Ring;
        if is_new {
            self.path = RecvPath::Lost;
        }
        is_new
    }

    /// Bytes come by records from the position `from` on. `last`: the last word of the peer in the
    /// ring. `sent`: the cursor behind the own bytes, if the peer has reported them as received.
    pub fn begin_tcp(&mut self, from: u64, last: ConsumerWord, sent: Option<Cursor>) {
        self.path = RecvPath::Tcp;
        self.stored = from;
        self.word = ConsumerWord {
            cursor: sent.unwrap_or(last.cursor),
            producer_flags: last.producer_flags & URGENT,
            state_flags: last.state_flags | self.word.state_flags,
        };
        if self.mark.is_some_and(|mark| mark > from) {
            // The byte of an earlier mark was read.
            self.word.producer_flags = ProducerFlags::URGENT_PENDING;
        } else if last.producer_flags.contains(ProducerFlags::URGENT_PRESENT) {
            // Nothing follows an unread urgent byte, as in a ring.
            self.mark = Some(from);
        }
    }

    /// Begins another ring, filled by the peer.
    pub fn begin_ring(&mut self) {
        *self = RecordRecv {
            base: self.stored,
            stored: self.stored,
            body: self.body,
            ..RecordRecv::default()
        };
    }

    /// The header of a DATA record has come.
    pub fn begin_body(&mut self, len: u32) {
        self.body = len;
    }

    /// Whether bytes of a DATA record are still to be stored.
    pub const fn has_body(&self) -> bool {
        self.body > 0
    }

    /// The place for the next bytes of the record, of which `have` are here. The program has read
    /// up to the cursor `consumed`. Nothing has room behind an unread urgent byte.
    pub fn place(&mut self, consumed: Cursor, have: usize, ring: &Ring) -> Place {
        let end = cursor_at(self.stored - self.base, ring);
        let unread = distance(consumed, end, ring).unwrap_or(ring.len());
        let to_mark = match self.mark {
            Some(mark) if mark > self.stored => mark - self.stored,
            // The urgent byte is read first.
            Some(_) if unread > 0 => 0,
            Some(_) => {
                self.mark = None;
                self.word.producer_flags -= URGENT;
                u64::MAX
            }
            None => {
                self.word.producer_flags = ProducerFlags::empty();
                u64::MAX
            }
        };
        let room = u64::from(ring.len() - unread).min(to_mark).min(u64::from(self.body));
        let offset = offset_of(end, ring);
        let to_end = ring.element_len() - offset;
        Place { offset, len: have.min(room as usize).min(to_end as usize) }
    }

    /// Bytes of the record were stored at their place.
    pub fn store(&mut self, bytes: usize) {
        self.stored += bytes as u64;
        self.body = self.body.saturating_sub(bytes as u32);
        if self.mark == Some(self.stored) {
            self.word.producer_flags |= URGENT;
        }
    }

    /// The byte before this position is urgent.
    pub fn mark(&mut self, at: u64) {
        self.mark = Some(at);
        // The cursor leaves an earlier mark behind.
        if at > self.stored {
            self.word.producer_flags -= ProducerFlags::URGENT_PRESENT;
        }
        self.word.producer_flags |= ProducerFlags::URGENT_PENDING;
    }

    /// The peer's direction has ended.
    pub fn end(&mut self, flags: StateFlags) {
        self.word.state_flags |= flags;
    }

    /// The peer has every byte of the own direction before this cursor.
    pub fn acknowledge(&mut self, sent: Cursor) {
        self.word.cursor = sent;
    }

    /// The peer's two words, to be stored into the own ring; `None`: the peer stores its words.
    pub fn words(&self, ring: &Ring) -> Option<[u64; 2]> {
        if self.path != RecvPath::Tcp {
            return None;
        }
        let cursor = cursor_at(self.stored - self.base, ring);
        Some([ProducerWord { cursor }.to_u64(), self.word.to_u64()])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RING: Ring = match Ring::smcr(20) {
        Ok(ring) => ring,
        Err(_) => panic!("a ring of 16 bytes"),
    };

    fn on_tcp(from: u64, flags: ProducerFlags) -> RecordRecv {
        let mut recv = RecordRecv::default();
        let last = ConsumerWord { producer_flags: flags, ..Default::default() };
        recv.begin_tcp(from, last, None);
        recv
    }

    fn flags(recv: &RecordRecv) -> ProducerFlags {
        ConsumerWord::from_u64(recv.words(&RING).unwrap()[1]).producer_flags
    }

    #[test]
    fn bytes_turn_at_the_end_of_the_ring_and_wait_for_room() {
        let mut recv = on_tcp(13, ProducerFlags::empty());
        recv.begin_body(40);
        let read = cursor_at(13, &RING);
        assert_eq!(recv.place(read, 99, &RING), Place { offset: 17, len: 3 });
        recv.store(3);
        assert_eq!(recv.place(read, 99, &RING), Place { offset: 4, len: 13 });
        assert_eq!(recv.place(read, 5, &RING).len, 5);
        recv.store(13);
        assert_eq!((recv.place(read, 99, &RING).len, recv.stored()), (0, Some(29)));
        assert_eq!(recv.place(cursor_at(15, &RING), 99, &RING).len, 2);
        recv.store(2);
        assert!(recv.has_body());
        let produced = ProducerWord::from_u64(recv.words(&RING).unwrap()[0]).cursor;
        assert_eq!(produced, cursor_at(31, &RING));
    }

    #[test]
    fn no_byte_is_stored_behind_an_unread_urgent_byte() {
        let mut recv = on_tcp(0, ProducerFlags::empty());
        recv.mark(2);
        assert_eq!(flags(&recv), ProducerFlags::URGENT_PENDING);
        recv.begin_body(9);
        assert_eq!(recv.place(RING.start(), 9, &RING).len, 2);
        recv.store(2);
        assert_eq!(flags(&recv), URGENT);
        assert_eq!(recv.place(cursor_at(1, &RING), 7, &RING).len, 0);
        assert_eq!(recv.place(cursor_at(2, &RING), 7, &RING).len, 7);
        assert!(flags(&recv).is_empty());
        recv.mark(4);
        recv.store(2);
        recv.mark(9);
        assert_eq!(flags(&recv), ProducerFlags::URGENT_PENDING, "the first mark was passed");
    }

    #[test]
    fn an_urgent_byte_of_the_ring_stays_in_front_of_records() {
        let mut recv = on_tcp(5, ProducerFlags::URGENT_PRESENT | ProducerFlags::BLOCKED);
        assert_eq!(flags(&recv), ProducerFlags::URGENT_PRESENT);
        recv.begin_body(3);
        assert_eq!(recv.place(cursor_at(4, &RING), 3, &RING).len, 0);
        assert_eq!(recv.place(cursor_at(5, &RING), 3, &RING).len, 3);
        // A mark that came before the last bytes of the ring.
        let mut recv = RecordRecv::default();
        recv.mark(7);
        assert_eq!(recv.words(&RING), None, "the words are the peer's");
        let last = ConsumerWord { producer_flags: URGENT, ..Default::default() };
        recv.begin_tcp(5, last, None);
        assert_eq!(flags(&recv), ProducerFlags::URGENT_PENDING);
    }

    #[test]
    fn what_the_peer_has_said_and_read_is_in_its_word() {
        let mut recv = RecordRecv::default();
        assert!(recv.lose() && !recv.lose());
        let done = StateFlags::SENDING_DONE;
        let last = ConsumerWord { state_flags: done, ..Default::default() };
        recv.begin_tcp(0, last, Some(cursor_at(3, &RING)));
        recv.end(StateFlags::CLOSED);
        let word = |recv: &RecordRecv| ConsumerWord::from_u64(recv.words(&RING).unwrap()[1]);
        assert_eq!(word(&recv).state_flags, done | StateFlags::CLOSED);
        assert_eq!(word(&recv).cursor, cursor_at(3, &RING));
        recv.acknowledge(cursor_at(8, &RING));
        assert_eq!(word(&recv).cursor, cursor_at(8, &RING));
        assert!(!recv.lose(), "nothing more comes from the ring");
    }

    #[test]
    fn another_ring_begins_at_the_position_of_its_first_byte() {
        let mut recv = on_tcp(21, ProducerFlags::URGENT_PRESENT);
        recv.begin_ring();
        assert_eq!((recv.path(), recv.words(&RING)), (RecvPath::Ring, None));
        recv.begin_tcp(30, ConsumerWord::default(), None);
        let produced = ProducerWord::from_u64(recv.words(&RING).unwrap()[0]).cursor;
        assert_eq!(produced, cursor_at(9, &RING));
        assert!(flags(&recv).is_empty());
    }

    #[test]
    fn arrivals_count_and_an_impossible_cursor_does_not() {
        let words = first_words(&RING, &RING);
        let mut half = RecvHalf::new(Receiver::new(RING), words);
        let producer = |at| ProducerWord { cursor: cursor_at(at, &RING) };
        assert!(!half.is_new([words[0], 0]), "the consumer cursor is no concern of a reader");
        assert!(half.is_new([producer(3).to_u64(), words[1]]));
        assert_eq!(half.arrived([producer(3).to_u64(), 0]), Some(3));
        assert_eq!(half.take(producer(3), ConsumerWord::default()).unwrap().bytes, 3);
        let again = half.take(producer(3), ConsumerWord::default()).unwrap();
        assert_eq!(again.bytes, 0);
        assert_eq!((half.total(), half.arrivals()), (3, 1));
        assert!(half.take(producer(1), ConsumerWord::default()).is_err());
        assert_eq!((half.total(), half.arrived([words[0], 0])), (3, None));
        half.begin_ring(RING, &RING);
        assert_eq!((half.total(), half.seen()), (3, words));
    }
}
