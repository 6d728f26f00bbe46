//! Failover of a connection to another link: validation, and what is written again (RFC 7609 section
//! 4.6).
//!
//! A reliable queue pair that fails leaves behind writes of which nobody knows whether they arrived.
//! The sender moves to another link of the group and sends there, in this order:
//!
//! 1. [`Resume::validation`]: a control message with F and the number of the last one whose send
//!    completed. Who has received nothing that new has lost data that its adapter confirmed, and
//!    resets the connection ([`judge`]; LG-37, SEC-15). No answer is awaited (LG-34).
//! 2. [`Resume::spans`]: every byte written behind that message, once more to the same place. The
//!    bytes are still there: a send element keeps each byte until the peer has consumed it.
//! 3. One control message with a number of its own, which stands for all that were lost (LG-36).
//!
//! [`Log`] keeps what this takes; it costs a few stores per message. Completions of the link that
//! was left may still come in; [`Log::completed`] does not know their numbers and ignores them.
//!
//! Rules kept here: LG-35, LG-39.

use super::{CursorError, Ring, Sequence, Span};
use crate::wire::Cursor;
use crate::wire::cdc::{Cdc, ProducerFlags};

/// Most control messages that are told apart while they are on their way. Further ones are taken
/// together with the newest: more is written again then, never less.
pub const MAX_POSTED: usize = 64;

/// What was sent on the present link and has not completed, for one connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Log {
    ring: Ring,
    sequence: Sequence,
    /// Last message whose send completed (SS of RFC 7609 4.6.1), and its producer cursor.
    done: (u16, Cursor),
    posted: [(u16, Cursor); MAX_POSTED],
    first: usize,
    len: usize,
}

/// How to go on over another link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Resume {
    /// Number of the last message that completed (LG-33).
    pub sequence: u16,
    /// Pieces of the element to be written again, in order; either may be empty.
    pub spans: [Span; 2],
    /// Whether any message has to be sent again, even if no byte has.
    pub lost: bool,
}

/// What a failover validation leads to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// All that the sender believes to have arrived has. Nothing to do.
    Intact,
    /// Data is lost: reset the connection.
    Lost {
        /// Number in the validation.
        sent: u16,
        /// Number seen last.
        seen: u16,
    },
}

/// Judges a control message with F by the numbers seen on the connection (LG-37). Its other fields
/// mean nothing, and it is not to be given to [`Sequence::judge`] (CDC-35).
pub const fn judge(seen: &Sequence, validation: u16) -> Verdict {
    if seen.has_seen(validation) {
        Verdict::Intact
    } else {
        Verdict::Lost { sent: validation, seen: seen.last() }
    }
}

impl Log {
    /// Of a connection that writes into a ring of the peer.
    pub const fn new(ring: Ring) -> Log {
        let start = ring.start();
        Log {
            ring,
            sequence: Sequence::new(),
            done: (0, start),
            posted: [(0, start); MAX_POSTED],
            first: 0,
            len: 0,
        }
    }

    /// A control message with this producer cursor is posted; its number (CDC-5).
    #[inline]
    pub const fn post(&mut self, producer: Cursor) -> u16 {
        let number = self.sequence.next();
        if self.len == MAX_POSTED {
            self.len -= 1;
        }
        self.posted[(self.first + self.len) % MAX_POSTED] = (number, producer);
        self.len += 1;
        number
    }

    /// The send of a message has completed, and with it all that were posted before it on the same
    /// queue pair. Returns whether the message was known as being on its way.
    #[inline]
    pub const fn completed(&mut self, number: u16) -> bool {
        let mut n = 0;
        while n < self.len {
            let entry = self.posted[(self.first + n) % MAX_POSTED];
            if entry.0 == number {
                self.done = entry;
                self.first = (self.first + n + 1) % MAX_POSTED;
                self.len -= n + 1;
                return true;
            }
            n += 1;
        }
        false
    }

    /// Messages on their way.
    pub const fn on_the_way(&self) -> usize {
        self.len
    }

    /// The number of the message posted last.
    pub const fn last(&self) -> u16 {
        self.sequence.last()
    }

    /// Leaves the present link. `producer` is the connection's producer cursor; everything between
    /// it and the last message that completed is to be written again, except what the peer has
    /// read: `consumed` is its consumer cursor ([`super::Sender::consumed`]). A completion may be
    /// seen long after the peer has read the bytes and others have taken their place. May be called
    /// again before the new link has confirmed anything.
    ///
    /// # Errors
    /// [`CursorError`] if the cursors are not of this ring, or more than a ring apart: a mistake of
    /// the caller.
    pub fn fail_over(&mut self, producer: Cursor, consumed: Cursor) -> Result<Resume, CursorError> {
        let (sequence, cursor) = self.done;
        let Some(read) = self.ring.position(consumed) else {
            let (first, last) =
                (self.ring.start().count, self.ring.start().count + (self.ring.len() - 1));
            return Err(CursorError::BeyondRing { cursor: consumed, first, last });
        };
        let (unread, _) = self.ring.moved(read, producer)?;
        if unread > self.ring.len() {
            let space = self.ring.len();
            return Err(CursorError::BeyondWindow { cursor: producer, claimed: unread, space });
        }
        let done = self.ring.position(cursor).unwrap_or(read);
        // More than that, or even more than a round: the peer was faster than the completions.
        let (from, bytes) = match self.ring.moved(done, producer) {
            Ok((bytes, _)) if bytes <= unread => (done, bytes),
            _ => (read, unread),
        };
        let lost = self.len > 0;
        (self.first, self.len) = (0, 0);
        Ok(Resume { sequence, spans: self.ring.spans(from, bytes), lost })
    }
}

impl Resume {
    /// The message that goes first over the new link. Nothing in it counts but the number, F and
    /// the token, which is the one that the peer gave the connection (CDC-35).
    pub fn validation(&self, token: u32) -> Cdc {
        Cdc {
            sequence: self.sequence,
            token,
            producer_flags: ProducerFlags::FAILOVER,
            ..Cdc::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn ring() -> Ring {
        Ring::smcr_without_eye_catcher(100).unwrap()
    }

    fn at(wrap: u16, count: u32) -> Cursor {
        Cursor::new(wrap, count)
    }

    // Shows: LG-33, LG-39.
    #[test]
    fn validation_carries_the_number_of_the_last_completed_message() {
        let mut log = Log::new(ring());
        assert_eq!((log.post(at(0, 10)), log.post(at(0, 20)), log.post(at(0, 30))), (1, 2, 3));
        assert!(log.completed(2));
        let resume = log.fail_over(at(0, 30), at(0, 0)).unwrap();
        assert_eq!(resume.sequence, 2);
        assert_eq!(resume.spans, [Span { offset: 20, len: 10 }, Span::default()]);
        let cdc = resume.validation(7);
        assert_eq!((cdc.sequence, cdc.token, cdc.producer_flags), (2, 7, ProducerFlags::FAILOVER));
        assert_eq!(log.post(at(0, 30)), 4, "validation takes no number of its own");
    }

    #[test]
    fn before_any_completion_all_is_written_again_and_the_number_is_zero() {
        let mut log = Log::new(ring());
        log.post(at(0, 90));
        let resume = log.fail_over(at(0, 95), at(0, 0)).unwrap();
        assert_eq!((resume.sequence, resume.lost), (0, true));
        assert_eq!(resume.spans[0], Span { offset: 0, len: 95 });
        assert_eq!(judge(&Sequence::new(), 0), Verdict::Intact);
    }

    // Shows: LG-39.
    #[test]
    fn a_second_failure_starts_from_the_same_place_and_late_completions_do_not_count() {
        let mut log = Log::new(ring());
        log.post(at(0, 40));
        log.completed(1);
        log.post(at(0, 60));
        let first = log.fail_over(at(0, 60), at(0, 0)).unwrap();
        assert!(!log.completed(2), "a completion of the old link");
        log.post(at(0, 60));
        assert_eq!(log.fail_over(at(0, 60), at(0, 0)).unwrap().spans, first.spans);
    }

    #[test]
    fn what_wraps_is_written_again_in_two_pieces() {
        let mut log = Log::new(ring());
        log.post(at(0, 80));
        log.completed(1);
        let resume = log.fail_over(at(1, 30), at(0, 40)).unwrap();
        assert_eq!(resume.spans, [Span { offset: 80, len: 20 }, Span { offset: 0, len: 30 }]);
        assert!(!resume.lost);
    }

    #[test]
    fn more_than_a_ring_is_a_mistake_of_the_caller() {
        let mut log = Log::new(ring());
        assert!(log.fail_over(at(1, 1), at(0, 0)).is_err());
        assert!(log.fail_over(at(0, 100), at(0, 0)).is_err());
        assert_eq!(
            log.fail_over(at(1, 0), at(0, 0)).unwrap().spans[0],
            Span { offset: 0, len: 100 }
        );
    }

    #[test]
    fn what_the_peer_has_read_is_not_written_again() {
        let mut log = Log::new(ring());
        log.post(at(0, 90));
        let again = |log: &Log, producer, consumed| {
            let mut log = *log;
            log.fail_over(producer, consumed).unwrap().spans
        };
        assert_eq!(again(&log, at(0, 90), at(0, 30))[0], Span { offset: 30, len: 60 });
        // The completion is still to be seen, and the ring has been round twice.
        log.post(at(2, 20));
        assert_eq!(again(&log, at(2, 20), at(2, 10))[0], Span { offset: 10, len: 10 });
        assert_eq!(again(&log, at(2, 20), at(2, 20))[0].len, 0);
        assert!(log.fail_over(at(2, 20), at(0, 90)).is_err());
        assert!(log.fail_over(at(2, 20), at(2, 100)).is_err());
    }

    // Shows: LG-37, SEC-15.
    #[test]
    fn receiver_resets_if_the_number_is_newer_than_what_it_saw() {
        let mut seen = Sequence::new();
        seen.judge(5);
        assert_eq!(judge(&seen, 4), Verdict::Intact);
        assert_eq!(judge(&seen, 5), Verdict::Intact);
        assert_eq!(judge(&seen, 6), Verdict::Lost { sent: 6, seen: 5 });
        let mut wrapped = Sequence::new();
        for number in [20000, 40000, 65535] {
            wrapped.judge(number);
        }
        assert_eq!(judge(&wrapped, 0), Verdict::Lost { sent: 0, seen: 65535 });
        wrapped.judge(0);
        assert_eq!(judge(&wrapped, 65535), Verdict::Intact);
    }

    // Shows: LG-36.
    #[test]
    fn too_many_on_the_way_cost_repetition_and_not_bytes() {
        let mut log = Log::new(Ring::smcr_without_eye_catcher(1000).unwrap());
        for n in 1..=200 {
            log.post(at(0, n));
        }
        assert_eq!(log.on_the_way(), MAX_POSTED);
        assert!(!log.completed(100), "taken together with a later one");
        assert_eq!(
            log.fail_over(at(0, 200), at(0, 0)).unwrap().spans[0],
            Span { offset: 0, len: 200 }
        );
    }

    proptest! {
        /// Whatever completes, the bytes written again are those behind the last completion.
        // Shows: LG-35.
        #[test]
        fn exactly_the_unconfirmed_bytes_are_written_again(
            steps in proptest::collection::vec((0_u32..20, any::<bool>()), 0..200)
        ) {
            let ring = Ring::smcr(104).unwrap();
            let mut log = Log::new(ring);
            let (mut position, mut confirmed) = (super::super::Position::START, 0_u32);
            let (mut total, mut read) = (0_u32, ring.start());
            let mut sent = Vec::new();
            for (bytes, complete) in steps {
                let bytes = bytes.min(100 - (total - confirmed));
                position = ring.advance(position, bytes);
                total += bytes;
                sent.push((log.post(ring.cursor(position)), total, ring.cursor(position)));
                if complete && sent.len() > 1 {
                    let (number, upto, cursor) = sent.remove(sent.len() / 2);
                    if log.completed(number) {
                        (confirmed, read) = (upto, cursor);
                    }
                    sent.retain(|(_, end, _)| *end > upto);
                }
            }
            let resume = log.fail_over(ring.cursor(position), read).unwrap();
            let again: u32 = resume.spans.iter().map(|span| span.len).sum();
            prop_assert_eq!(again, total - confirmed);
        }
    }
}
