//! The messages that a connection still has to send.
//!
//! Messages are not queued. [`Outbound`] keeps the newest control words, and the bytes are in the
//! send buffer. If a message cannot be posted now, because the send queue is full or the connection
//! is between two links, [`Outbound::plan`] makes it later from the newest words.
//!
//! Rules kept here: LG-33, LG-34, LG-35, LG-36, LG-38, CDC-2, CDC-5, CDC-6.

use smc_core::connection::{Sequence, Span};
use smc_core::wire::Cursor;
use smc_core::wire::cdc::{CDC_LEN, Cdc, ConsumerWord, ProducerFlags, ProducerWord};

use super::spans::RingLayout;
use super::words::cdc_of;

/// One post: RDMA WRITEs of these spans of the send buffer, then the message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Plan {
    /// Spans of the send buffer, to the same offsets of the peer's element.
    pub(crate) spans: [Span; 2],
    /// The message.
    pub(crate) cdc: [u8; CDC_LEN],
    /// Its sequence number.
    pub(crate) sequence: u16,
    kind: Kind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Failover,
    Words([u64; 2]),
}

/// The control words of a connection, and how far the peer has them.
#[derive(Debug)]
pub(crate) struct Outbound {
    layout: RingLayout,
    /// The peer's alert token.
    token: u32,
    sequence: Sequence,
    /// The newest control words.
    words: [u64; 2],
    /// Producer cursor of the last message: all bytes before it were written.
    written: Cursor,
    /// No message has carried `words` yet.
    due: bool,
    /// The sequence number that a failover validation has to name before the next message.
    validation: Option<u16>,
}

impl Outbound {
    /// Nothing was sent yet into the peer's element.
    pub(crate) fn new(layout: RingLayout, token: u32) -> Outbound {
        let written = layout.start();
        // Both ends' elements have the same form: nothing was read of the own one either.
        let consumer = ConsumerWord { cursor: written, ..ConsumerWord::default() };
        let words = [ProducerWord { cursor: written }.to_u64(), consumer.to_u64()];
        let (sequence, validation) = (Sequence::new(), None);
        Outbound { layout, token, sequence, words, written, due: false, validation }
    }

    /// Sets the words of the next message. The bytes that they announce are in the send buffer.
    #[inline]
    pub(crate) fn set_words(&mut self, words: [u64; 2]) {
        self.words = words;
        self.due = true;
    }

    /// Has the next message repeat the newest words, and ask for the peer's cursor (R, CDC-24).
    #[cold]
    pub(crate) fn request_update(&mut self) {
        let mut consumer = ConsumerWord::from_u64(self.words[1]);
        consumer.producer_flags.insert(ProducerFlags::UPDATE_REQUESTED);
        self.set_words([self.words[0], consumer.to_u64()]);
    }

    /// The next post. `None`: the peer has the newest words. The caller calls [`Outbound::posted`]
    /// once it has posted the plan.
    #[inline]
    pub(crate) fn plan(&self) -> Option<Plan> {
        if let Some(sequence) = self.validation {
            return Some(self.validate(sequence));
        }
        if !self.due {
            return None;
        }
        let mut sequence = self.sequence;
        let sequence = sequence.next();
        let to = ProducerWord::from_u64(self.words[0]).cursor;
        Some(Plan {
            spans: self.layout.between(self.written, to),
            cdc: cdc_of(self.words, sequence, self.token).emit(),
            sequence,
            kind: Kind::Words(self.words),
        })
    }

    /// The first message on another link (CDC-35, RFC 7609 section 4.6.1): the number of the last
    /// message that the peer is known to have. Only the number and the token count; the rest is as
    /// it was last sent.
    #[cold]
    fn validate(&self, sequence: u16) -> Plan {
        let flags = ConsumerWord::from_u64(self.words[1]);
        let words = [ProducerWord { cursor: self.written }.to_u64(), self.words[1]];
        let cdc = Cdc {
            producer_flags: flags.producer_flags | ProducerFlags::FAILOVER,
            ..cdc_of(words, sequence, self.token)
        };
        let (spans, cdc) = ([Span::default(); 2], cdc.emit());
        Plan { spans, cdc, sequence, kind: Kind::Failover }
    }

    /// A plan was posted.
    #[inline]
    pub(crate) fn posted(&mut self, plan: &Plan) {
        match plan.kind {
            Kind::Failover => self.validation = None,
            Kind::Words(words) => {
                self.sequence.next();
                self.written = ProducerWord::from_u64(words[0]).cursor;
                self.due = words != self.words;
            }
        }
    }

    /// Whether a message has to be sent.
    pub(crate) fn is_due(&self) -> bool {
        self.due || self.validation.is_some()
    }

    /// Number of the last message.
    pub(crate) fn last(&self) -> u16 {
        self.sequence.last()
    }

    /// Producer cursor of the newest words.
    pub(crate) fn produced(&self) -> Cursor {
        ProducerWord::from_u64(self.words[0]).cursor
    }

    /// The connection goes on over another link. `arrived`: number of the last message that the
    /// peer's adapter acknowledged. `confirmed`: what the peer says it has read. Whatever lies
    /// behind that is written once more.
    pub(crate) fn move_on(&mut self, arrived: u16, confirmed: Cursor) {
        self.validation = Some(arrived);
        // Bytes in front of the peer's cursor are still in the send buffer: nothing was written
        // over them, because there was no room.
        self.written = confirmed;
        self.due = true;
    }
}

#[cfg(test)]
mod tests {
    use super::super::spans::total;
    use super::*;
    use smc_core::wire::cdc::StateFlags;

    fn span(offset: u32, len: u32) -> Span {
        Span { offset, len }
    }

    fn outbound() -> Outbound {
        Outbound::new(RingLayout::new(100, false), 0xaabb)
    }

    fn words(wrap: u16, count: u32) -> [u64; 2] {
        let consumer = ConsumerWord {
            cursor: Cursor::new(9, 5),
            producer_flags: ProducerFlags::BLOCKED,
            state_flags: StateFlags::SENDING_DONE,
        };
        [ProducerWord { cursor: Cursor::new(wrap, count) }.to_u64(), consumer.to_u64()]
    }

    fn post(out: &mut Outbound) -> Option<(Plan, Cdc)> {
        let plan = out.plan()?;
        out.posted(&plan);
        Some((plan, Cdc::parse(&plan.cdc).unwrap()))
    }

    // Shows: CDC-2, CDC-5.
    #[test]
    fn a_message_announces_what_was_written_since_the_last_one() {
        let mut out = outbound();
        assert_eq!(out.plan(), None);
        out.set_words(words(0, 60));
        let (plan, cdc) = post(&mut out).unwrap();
        assert_eq!(plan.spans, [span(0, 60), span(0, 0)]);
        assert_eq!((cdc.sequence, cdc.token, cdc.producer), (1, 0xaabb, Cursor::new(0, 60)));
        assert_eq!((cdc.consumer, cdc.state_flags), (Cursor::new(9, 5), StateFlags::SENDING_DONE));
        out.set_words(words(1, 20));
        let (plan, cdc) = post(&mut out).unwrap();
        assert_eq!((plan.spans, cdc.sequence), ([span(60, 40), span(0, 20)], 2));
        assert_eq!(out.plan(), None);
    }

    #[test]
    fn what_could_not_be_posted_goes_with_the_next_message() {
        let mut out = outbound();
        out.set_words(words(0, 10));
        assert!(out.plan().is_some());
        out.set_words(words(0, 30));
        let (plan, cdc) = post(&mut out).unwrap();
        assert_eq!((plan.spans[0], cdc.sequence), (span(0, 30), 1));
    }

    #[test]
    fn words_set_while_a_message_was_posted_are_still_due() {
        let mut out = outbound();
        out.set_words(words(0, 10));
        let plan = out.plan().unwrap();
        out.set_words(words(0, 30));
        out.posted(&plan);
        assert_eq!(post(&mut out).unwrap().0.spans[0], span(10, 20));
    }

    // Shows: LG-33, LG-34, LG-35, LG-36, CDC-6.
    #[test]
    fn another_link_begins_with_a_validation_and_what_the_peer_has_not_read() {
        let mut out = outbound();
        for count in [10, 40, 90] {
            out.set_words(words(0, count));
            post(&mut out).unwrap();
        }
        out.move_on(2, Cursor::new(0, 20));
        let (plan, cdc) = post(&mut out).unwrap();
        assert_eq!((total(plan.spans), cdc.sequence, cdc.token), (0, 2, 0xaabb));
        assert!(cdc.producer_flags.contains(ProducerFlags::FAILOVER));
        let (plan, cdc) = post(&mut out).unwrap();
        assert_eq!((plan.spans[0], cdc.sequence), (span(20, 70), 4));
        assert!(!cdc.producer_flags.contains(ProducerFlags::FAILOVER));
        assert_eq!(out.plan(), None);
    }

    #[test]
    fn a_connection_that_moves_before_it_said_anything_has_read_nothing() {
        let layout = RingLayout::new(100, true);
        let mut out = Outbound::new(layout, 0xaabb);
        out.move_on(0, layout.start());
        post(&mut out).unwrap();
        let (plan, cdc) = post(&mut out).unwrap();
        assert_eq!((total(plan.spans), cdc.sequence), (0, 1));
        assert_eq!((cdc.producer, cdc.consumer), (layout.start(), layout.start()));
    }

    // Shows: CDC-24.
    #[test]
    fn a_request_repeats_the_words_and_the_next_ones_do_not_request() {
        let mut out = outbound();
        out.set_words(words(0, 40));
        post(&mut out).unwrap();
        out.request_update();
        let (plan, cdc) = post(&mut out).unwrap();
        assert_eq!((total(plan.spans), cdc.sequence, cdc.producer.count), (0, 2, 40));
        let flags = ProducerFlags::BLOCKED | ProducerFlags::UPDATE_REQUESTED;
        assert_eq!((cdc.producer_flags, cdc.consumer), (flags, Cursor::new(9, 5)));
        out.set_words(words(0, 50));
        assert_eq!(post(&mut out).unwrap().1.producer_flags, ProducerFlags::BLOCKED);
        assert_eq!(out.plan(), None);
    }

    #[test]
    fn to_a_peer_that_has_closed_only_words_are_repeated() {
        let mut out = outbound();
        out.set_words(words(0, 40));
        post(&mut out).unwrap();
        out.set_words(words(0, 90));
        out.move_on(1, out.produced());
        let (plan, cdc) = post(&mut out).unwrap();
        assert!(cdc.producer_flags.contains(ProducerFlags::FAILOVER));
        assert_eq!((total(plan.spans), cdc.sequence), (0, 1));
        let (plan, cdc) = post(&mut out).unwrap();
        assert_eq!((total(plan.spans), cdc.producer), (0, Cursor::new(0, 90)));
        assert_eq!(out.plan(), None);
    }

    // Shows: LG-38.
    #[test]
    fn a_second_failure_before_the_first_validation_validates_once() {
        let mut out = outbound();
        out.set_words(words(0, 10));
        post(&mut out).unwrap();
        out.move_on(0, Cursor::new(0, 0));
        out.move_on(1, Cursor::new(0, 0));
        assert_eq!(post(&mut out).unwrap().1.sequence, 1);
        assert_eq!(post(&mut out).unwrap().0.spans[0], span(0, 10));
        assert_eq!(out.plan(), None);
    }
}
