// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The posts of an SMC-R end for one connection: RDMA writes, followed by the control message.
//!
//! [`Outbound`] keeps the newest control words and no queue. A message without a place now (the
//! send queue is full, or the connection is between two links) is made later, from the words valid
//! then. The announced bytes wait in the send element, kept until the peer has consumed them.
//!
//! # Failover
//!
//! A failed reliable queue pair leaves writes of unknown fate behind. The connection goes on over
//! another link of its group (RFC 7609 section 4.6), in this order:
//!
//! 1. A failover validation: a control message with F and the number of the last message
//!    acknowledged by the peer's adapter ([`Outbound::fail_over`]). A peer without this message has
//!    lost data confirmed by its adapter, and resets the connection
//!    ([`judge`](super::failover::judge); LG-37, SEC-15). No answer is awaited (LG-34).
//! 2. Every byte not consumed by the peer, once more, to the same place (LG-35).
//! 3. One control message with a number of its own, in place of all lost ones (LG-36).

use super::failover::oldest_unacknowledged;
use super::{Ring, Sequence, Span};
use crate::wire::Cursor;
use crate::wire::cdc::{CDC_LEN, Cdc, ConsumerWord, ProducerFlags, ProducerWord, StateFlags};

/// One post: RDMA WRITEs of pieces of the send element, then the message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Post {
    /// Pieces of the send element, to the same offsets of the peer's element. Either may be empty.
    pub spans: [Span; 2],
    /// The control message.
    pub cdc: [u8; CDC_LEN],
    /// Sequence number of the message.
    pub sequence: u16,
    content: Content,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Content {
    Validation,
    Words([u64; 2]),
}

/// The state of sending of one connection: pending words and posted ones.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outbound {
    /// The peer's ring.
    ring: Ring,
    /// The peer's alert token.
    token: u32,
    sequence: Sequence,
    /// The newest control words.
    words: [u64; 2],
    /// Producer cursor of the last message: all earlier bytes were written.
    written: Cursor,
    /// Whether `words` has a change not yet posted.
    pending: bool,
    /// The message number for a failover validation, due before any other post.
    validation: Option<u16>,
}

impl Outbound {
    /// A connection before its first write into the peer's ring. `token` is the peer's alert token
    /// for the connection.
    pub const fn new(ring: Ring, token: u32) -> Outbound {
        let written = ring.start();
        // Both ends' elements have the same form, and nothing was read from the own one either.
        let consumer = ConsumerWord {
            cursor: written,
            producer_flags: ProducerFlags::empty(),
            state_flags: StateFlags::empty(),
        };
        let words = [ProducerWord { cursor: written }.to_u64(), consumer.to_u64()];
        let sequence = Sequence::new();
        Outbound { ring, token, sequence, words, written, pending: false, validation: None }
    }

    /// Sets the words of the next message. The announced bytes are in the send element.
    #[inline]
    pub const fn set_words(&mut self, words: [u64; 2]) {
        self.words = words;
        self.pending = true;
    }

    /// Sends the newest words once more, with R: the peer answers with its consumer cursor (CDC-24).
    #[cold]
    pub fn request_update(&mut self) {
        let mut consumer = ConsumerWord::from_u64(self.words[1]);
        consumer.producer_flags.insert(ProducerFlags::UPDATE_REQUESTED);
        self.set_words([self.words[0], consumer.to_u64()]);
    }

    /// The next post, or `None` if the peer is up to date. The caller reports a completed post by
    /// [`Outbound::on_posted`].
    #[inline]
    pub fn next_post(&self) -> Option<Post> {
        if let Some(sequence) = self.validation {
            return Some(self.validation_post(sequence));
        }
        if !self.pending {
            return None;
        }
        let mut sequence = self.sequence;
        let sequence = sequence.next();
        let to = ProducerWord::from_u64(self.words[0]).cursor;
        Some(Post {
            spans: self.ring.between(self.written, to),
            cdc: Cdc::from_words(self.words, sequence, self.token).emit(),
            sequence,
            content: Content::Words(self.words),
        })
    }

    /// The first message on another link (CDC-35, RFC 7609 section 4.6.1). The message has the
    /// number of the last message certainly known to the peer, and takes no number of its own
    /// (CDC-6). Only the number and the token count; the other fields repeat the last ones sent.
    #[cold]
    fn validation_post(&self, sequence: u16) -> Post {
        let words = [ProducerWord { cursor: self.written }.to_u64(), self.words[1]];
        let mut cdc = Cdc::from_words(words, sequence, self.token);
        cdc.producer_flags.insert(ProducerFlags::FAILOVER);
        let spans = [Span::default(); 2];
        Post { spans, cdc: cdc.emit(), sequence, content: Content::Validation }
    }

    /// The caller has made the post returned by [`Outbound::next_post`].
    #[inline]
    pub fn on_posted(&mut self, post: &Post) {
        match post.content {
            Content::Validation => self.validation = None,
            Content::Words(words) => {
                self.sequence.next();
                self.written = ProducerWord::from_u64(words[0]).cursor;
                self.pending = words != self.words;
            }
        }
    }

    /// Whether there is something to post.
    pub const fn has_pending(&self) -> bool {
        self.pending || self.validation.is_some()
    }

    /// Number of the last posted message.
    pub const fn last_sequence(&self) -> u16 {
        self.sequence.last()
    }

    /// Makes the connection ready for another link, after the caller has stopped posting to the
    /// present one.
    ///
    /// - `unacknowledged`: the numbers of messages on the present link without an acknowledgement
    ///   of the peer's adapter, in any order.
    /// - `peer`: the newest consumer word of the peer. [`Outbound::next_post`] writes the bytes
    ///   behind its cursor again. A peer after a close consumes nothing any more, nor does a peer
    ///   told of an abort by this end: then nothing is written again, and the message alone is
    ///   repeated.
    /// - `said_all`: whether this end has posted its last word, so the peer may have given the
    ///   element to another connection.
    ///
    /// Returns false if the connection has no use for another link, and must not post to any: the
    /// last word was acknowledged, or the peer has aborted the connection.
    ///
    /// May be called again before the new link has acknowledged anything (LG-38).
    #[must_use]
    pub fn fail_over(
        &mut self,
        unacknowledged: impl IntoIterator<Item = u16>,
        peer: ConsumerWord,
        said_all: bool,
    ) -> bool {
        let last = self.last_sequence();
        let oldest = oldest_unacknowledged(unacknowledged, last);
        if said_all && oldest.is_none() && !self.has_pending() {
            return false;
        }
        if peer.state_flags.contains(StateFlags::ABORT) {
            return false;
        }
        self.validation = Some(oldest.map_or(last, |oldest| oldest.wrapping_sub(1)));
        let aborted = ConsumerWord::from_u64(self.words[1]).state_flags.contains(StateFlags::ABORT);
        let unread = !aborted && !peer.state_flags.contains(StateFlags::CLOSED);
        self.written = match unread {
            // The bytes behind the peer's cursor are still in the send element: there was no room
            // to put others in their place.
            true => peer.cursor,
            false => ProducerWord::from_u64(self.words[0]).cursor,
        };
        self.pending = true;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outbound() -> Outbound {
        Outbound::new(Ring::smcr_without_eye_catcher(100).unwrap(), 0xaabb)
    }

    fn words(wrap: u16, count: u32) -> [u64; 2] {
        let consumer = ConsumerWord {
            cursor: Cursor::new(9, 5),
            producer_flags: ProducerFlags::BLOCKED,
            state_flags: StateFlags::SENDING_DONE,
        };
        [ProducerWord { cursor: Cursor::new(wrap, count) }.to_u64(), consumer.to_u64()]
    }

    fn peer(wrap: u16, count: u32, state_flags: StateFlags) -> ConsumerWord {
        let producer_flags = ProducerFlags::empty();
        ConsumerWord { cursor: Cursor::new(wrap, count), producer_flags, state_flags }
    }

    /// A live peer with its reading up to this cursor.
    fn read(wrap: u16, count: u32) -> ConsumerWord {
        peer(wrap, count, StateFlags::empty())
    }

    fn post(out: &mut Outbound) -> Option<(Post, Cdc)> {
        let post = out.next_post()?;
        out.on_posted(&post);
        Some((post, Cdc::parse(&post.cdc).unwrap()))
    }

    fn spans(post: &Post) -> [(u32, u32); 2] {
        post.spans.map(|span| (span.offset, span.len))
    }

    fn total(post: &Post) -> u32 {
        post.spans[0].len + post.spans[1].len
    }

    // Shows: CDC-2, CDC-5.
    #[test]
    fn a_message_announces_what_was_written_since_the_last_one() {
        let mut out = outbound();
        assert_eq!(out.next_post(), None);
        out.set_words(words(0, 60));
        let (sent, cdc) = post(&mut out).unwrap();
        assert_eq!(spans(&sent), [(0, 60), (0, 0)]);
        assert_eq!((cdc.sequence, cdc.token, cdc.producer), (1, 0xaabb, Cursor::new(0, 60)));
        assert_eq!((cdc.consumer, cdc.state_flags), (Cursor::new(9, 5), StateFlags::SENDING_DONE));
        out.set_words(words(1, 20));
        let (sent, cdc) = post(&mut out).unwrap();
        assert_eq!((spans(&sent), cdc.sequence), ([(60, 40), (0, 20)], 2));
        assert_eq!(out.next_post(), None);
    }

    #[test]
    fn what_could_not_be_posted_goes_with_the_next_message() {
        let mut out = outbound();
        out.set_words(words(0, 10));
        assert!(out.next_post().is_some());
        out.set_words(words(0, 30));
        let (sent, cdc) = post(&mut out).unwrap();
        assert_eq!((spans(&sent)[0], cdc.sequence), ((0, 30), 1));
    }

    #[test]
    fn words_set_while_a_message_was_posted_are_still_pending() {
        let mut out = outbound();
        out.set_words(words(0, 10));
        let first = out.next_post().unwrap();
        out.set_words(words(0, 30));
        out.on_posted(&first);
        assert_eq!(spans(&post(&mut out).unwrap().0)[0], (10, 20));
    }

    // Shows: LG-33, LG-34, LG-35, LG-36, LG-39, CDC-6.
    #[test]
    fn another_link_begins_with_a_validation_and_what_the_peer_has_not_read() {
        let mut out = outbound();
        for count in [10, 40, 90] {
            out.set_words(words(0, count));
            post(&mut out).unwrap();
        }
        assert!(out.fail_over([3], read(0, 20), false));
        let (sent, cdc) = post(&mut out).unwrap();
        assert_eq!((total(&sent), cdc.sequence, cdc.token), (0, 2, 0xaabb));
        assert!(cdc.producer_flags.contains(ProducerFlags::FAILOVER));
        let (sent, cdc) = post(&mut out).unwrap();
        assert_eq!((spans(&sent)[0], cdc.sequence), ((20, 70), 4));
        assert!(!cdc.producer_flags.contains(ProducerFlags::FAILOVER));
        assert_eq!(out.next_post(), None);
    }

    // Shows: LG-33.
    #[test]
    fn the_validation_names_the_message_before_the_oldest_unacknowledged_one() {
        for (unacknowledged, named) in
            [(&[][..], 5), (&[5], 4), (&[4, 5], 3), (&[5, 2, 4, 3], 1), (&[3, 1, 2, 5, 4], 0)]
        {
            let mut out = outbound();
            for count in 1..=5 {
                out.set_words(words(0, count));
                post(&mut out).unwrap();
            }
            assert!(out.fail_over(unacknowledged.iter().copied(), read(0, 0), false));
            assert_eq!(post(&mut out).unwrap().1.sequence, named, "{unacknowledged:?}");
        }
    }

    #[test]
    fn a_connection_that_moves_before_it_said_anything_has_read_nothing() {
        let ring = Ring::smcr(100).unwrap();
        let mut out = Outbound::new(ring, 0xaabb);
        assert!(out.fail_over([], read(0, 4), false));
        post(&mut out).unwrap();
        let (sent, cdc) = post(&mut out).unwrap();
        assert_eq!((total(&sent), cdc.sequence), (0, 1));
        assert_eq!((cdc.producer, cdc.consumer), (ring.start(), ring.start()));
    }

    // Shows: CDC-24.
    #[test]
    fn a_request_for_an_update_repeats_the_words_and_the_next_words_request_nothing() {
        let mut out = outbound();
        out.set_words(words(0, 40));
        post(&mut out).unwrap();
        out.request_update();
        let (sent, cdc) = post(&mut out).unwrap();
        assert_eq!((total(&sent), cdc.sequence, cdc.producer.count), (0, 2, 40));
        let flags = ProducerFlags::BLOCKED | ProducerFlags::UPDATE_REQUESTED;
        assert_eq!((cdc.producer_flags, cdc.consumer), (flags, Cursor::new(9, 5)));
        out.set_words(words(0, 50));
        assert_eq!(post(&mut out).unwrap().1.producer_flags, ProducerFlags::BLOCKED);
        assert_eq!(out.next_post(), None);
    }

    #[test]
    fn to_a_peer_that_has_closed_only_words_are_repeated() {
        let mut out = outbound();
        out.set_words(words(0, 40));
        post(&mut out).unwrap();
        out.set_words(words(0, 90));
        assert!(out.fail_over([], peer(0, 0, StateFlags::CLOSED), false));
        let (sent, cdc) = post(&mut out).unwrap();
        assert!(cdc.producer_flags.contains(ProducerFlags::FAILOVER));
        assert_eq!((total(&sent), cdc.sequence), (0, 1));
        let (sent, cdc) = post(&mut out).unwrap();
        assert_eq!((total(&sent), cdc.producer), (0, Cursor::new(0, 90)));
        assert_eq!(out.next_post(), None);
    }

    #[test]
    fn a_connection_that_is_over_has_no_use_for_another_link() {
        let mut out = outbound();
        out.set_words(words(0, 40));
        assert!(out.clone().fail_over([], read(0, 0), true), "the last word was not posted");
        post(&mut out).unwrap();
        assert!(out.clone().fail_over([1], read(0, 0), true), "the last word may be lost");
        assert!(!out.clone().fail_over([], read(0, 0), true));
        assert!(!out.clone().fail_over([1], peer(0, 0, StateFlags::ABORT), false));
        assert!(!out.fail_over([], peer(0, 0, StateFlags::ABORT | StateFlags::CLOSED), true));
        assert_eq!(out.next_post(), None);
    }

    // Shows: LG-38.
    #[test]
    fn a_second_failure_before_the_first_validation_validates_once() {
        let mut out = outbound();
        out.set_words(words(0, 10));
        post(&mut out).unwrap();
        assert!(out.fail_over([1], read(0, 0), false));
        assert!(out.fail_over([], read(0, 0), false));
        assert_eq!(post(&mut out).unwrap().1.sequence, 1);
        assert_eq!(spans(&post(&mut out).unwrap().0)[0], (0, 10));
        assert_eq!(out.next_post(), None);
    }

    /// Between two links the peer may read arrived bytes, and the application may put new bytes in
    /// their place: more than a ring lies between the cursor known when the link was left and the
    /// newest words.
    // Shows: LG-35.
    #[test]
    fn bytes_that_follow_between_two_links_are_written_too() {
        let mut out = outbound();
        out.set_words(words(1, 15));
        post(&mut out).unwrap();
        assert!(out.fail_over([1], read(0, 20), false));
        // The peer has read up to (1, 10); the ring is full again.
        out.set_words(words(2, 10));
        post(&mut out).unwrap();
        assert_eq!(spans(&post(&mut out).unwrap().0), [(20, 80), (0, 20)]);
    }
}
