// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! One end of a connection: the state machines, an application, and a model of both streams as the
//! reference.

use std::cell::RefCell;
use std::collections::VecDeque;

use super::memory::{Element, Lane, Store, stream_byte};
use super::rng::Rng;
use super::{Kind, Options};
use crate::connection::close::{Actions, Event, State};
use crate::connection::{Connection, Order, Ring, Sequence, Span, UrgentEvent, read_words};
use crate::wire::cdc::{Cdc, ConsumerWord, ProducerFlags, ProducerWord, StateFlags};

/// Ticks after which a closed connection stops waiting.
const CLOSE_TICKS: u64 = 4000;
/// Ticks after which an abort stops waiting.
const ABORT_TICKS: u64 = 1000;

/// Bytes handed over by the application but not yet in the peer's ring.
#[derive(Clone, Copy, Debug)]
struct Chunk {
    len: u32,
    urgent: bool,
}

/// The fate of the own element.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Released {
    No,
    Reuse,
    Withdrawn,
}

#[derive(Debug)]
pub(super) struct End {
    /// 0 or 1.
    id: usize,
    kind: Kind,
    pub(super) connection: Connection,
    pub(super) element: Element,
    timer: Option<u64>,
    pub(super) released: Released,
    /// The last published state flags.
    state_out: StateFlags,
    sequence_out: Sequence,
    sequence_in: Sequence,
    /// Nothing may be stored any more.
    silent: bool,
    /// This end has stopped for ever, like a killed process.
    pub(super) dead: bool,
    inline: bool,
    /// TCP was reset here, and the peer will learn of the reset.
    pub(super) tcp_reset: bool,

    outbox: VecDeque<Chunk>,
    announced: bool,
    /// Stream bytes stored into the peer's ring.
    pub(super) placed: u64,
    /// Stream positions of the urgent bytes among them.
    pub(super) marks: Vec<u64>,
    /// Stream bytes known to have arrived here.
    arrived: u64,
    oob: Option<u64>,
    /// The application saw an error, or threw bytes away.
    pub(super) failed: bool,
    /// The application saw the end of data.
    pub(super) saw_end: bool,
    shut: bool,
    pub(super) closed: bool,
    /// Bytes the application still wants to send.
    pub(super) budget: u32,
    hasty: bool,
}

/// One end's view of the other: the truth, for checks only.
pub(super) struct Truth<'a> {
    pub(super) id: usize,
    pub(super) placed: u64,
    pub(super) marks: &'a [u64],
    /// False once a word was falsified: from then on only memory safety and the end count.
    pub(super) honest: bool,
}

impl End {
    pub(super) fn new(id: usize, options: &Options, own: Ring, peer: Ring, head: u32) -> End {
        End {
            id,
            kind: options.kind,
            connection: Connection::new(peer, own),
            element: Element::new(&own, head),
            timer: None,
            released: Released::No,
            state_out: StateFlags::empty(),
            sequence_out: Sequence::new(),
            sequence_in: Sequence::new(),
            silent: false,
            dead: false,
            inline: false,
            tcp_reset: false,
            outbox: VecDeque::new(),
            announced: false,
            placed: 0,
            marks: Vec::new(),
            arrived: 0,
            oob: None,
            failed: false,
            saw_end: false,
            shut: false,
            closed: false,
            budget: options.bytes[id],
            hasty: options.hasty && id == 0,
        }
    }

    pub(super) fn state(&self) -> State {
        self.connection.close.state()
    }

    /// Stream position of the next byte to read; anything if the peer lied.
    pub(super) fn position(&self) -> u64 {
        self.arrived.saturating_sub(u64::from(self.connection.receiver.available()))
    }

    fn unsent(&self) -> bool {
        !self.outbox.is_empty()
    }

    // ---- actions of the application

    pub(super) fn write(&mut self, lane: &mut Lane, len: u32, urgent: bool) -> Result<(), String> {
        let len = len.min(self.budget);
        if len == 0 || self.unsent() || self.failed || !self.connection.close.can_write() {
            return Ok(());
        }
        self.budget -= len;
        self.outbox.push_back(Chunk { len, urgent });
        self.flush(lane)
    }

    pub(super) fn shutdown_write(&mut self, lane: &mut Lane, now: u64) -> Result<(), String> {
        self.shut = true;
        self.event(lane, Event::ShutdownWrite, now)
    }

    pub(super) fn close(&mut self, lane: &mut Lane, now: u64) -> Result<(), String> {
        self.closed = true;
        let unread = self.connection.receiver.available() != 0;
        self.event(lane, Event::Close { unread }, now)
    }

    pub(super) fn set_inline(&mut self, lane: &mut Lane, inline: bool) -> Result<(), String> {
        self.inline = inline;
        let due = self.connection.receiver.set_oob_inline(inline).is_due();
        self.free_read_bytes();
        if due { self.publish(lane) } else { Ok(()) }
    }

    /// Reads up to `n` bytes as one call would and checks each.
    pub(super) fn read(&mut self, lane: &mut Lane, n: u32, truth: &Truth) -> Result<(), String> {
        if self.failed || self.closed {
            return Ok(());
        }
        let receiver = &mut self.connection.receiver;
        let n = n.min(receiver.readable());
        if n == 0 {
            return Ok(());
        }
        let spans = receiver.spans(n);
        let half = n / 2;
        let [a, b] = receiver.peek(half, n - half);
        if truth.honest {
            let start = self.position();
            self.compare(start, &spans, n, truth)?;
            self.compare(start + u64::from(half), &[a, b], n - half, truth)?;
        }
        let before = self.position();
        let update = self.connection.receiver.consume(n);
        self.free_read_bytes();
        let skipped = self.position().saturating_sub(before + u64::from(n));
        if truth.honest {
            let mark_here = truth.marks.contains(&(before + u64::from(n)));
            if skipped > 1 || (skipped == 1 && (self.inline || !mark_here)) {
                return Err(format!("{skipped} bytes skipped behind {before}+{n}"));
            }
            let mark = if self.inline { self.position() } else { self.position() - skipped };
            if self.connection.receiver.at_mark() && !truth.marks.contains(&mark) {
                return Err(format!("at_mark at {mark}, marks {:?}", truth.marks));
            }
        }
        if update.is_due() { self.publish(lane) } else { Ok(()) }
    }

    fn compare(&self, start: u64, spans: &[Span; 2], n: u32, truth: &Truth) -> Result<(), String> {
        if spans[0].len + spans[1].len != n {
            return Err(format!("{spans:?} are not {n} bytes"));
        }
        let mut position = start;
        for span in spans {
            for byte in self.element.read(*span)? {
                if *byte != stream_byte(truth.id, position) {
                    return Err(format!("end {}: wrong byte at position {position}", self.id));
                }
                if !self.inline && truth.marks.contains(&position) {
                    return Err(format!("urgent byte {position} was read in line"));
                }
                position += 1;
            }
        }
        Ok(())
    }

    pub(super) fn take_urgent(&mut self, truth: &Truth) -> Result<(), String> {
        let expected = self.oob.map(|position| stream_byte(truth.id, position));
        match self.connection.receiver.take_urgent(false) {
            Ok(byte) if truth.honest && Some(byte) != expected => {
                Err(format!("urgent byte {byte} is not the one at {:?}", self.oob))
            }
            _ => Ok(()),
        }
    }

    /// A blocked `recv()` after the peer's end: one more read, then the report of the end.
    pub(super) fn end_of_data(
        &mut self,
        out: &mut Lane,
        inward: &mut Lane,
        rng: &mut Rng,
        truth: &Truth,
        now: u64,
    ) -> Result<(), String> {
        if self.failed || self.closed || !self.connection.close.peer_done() {
            return Ok(());
        }
        self.poll(out, inward, rng, truth, now)?;
        if self.failed || self.connection.receiver.readable() != 0 || self.saw_end {
            return Ok(());
        }
        self.saw_end = true;
        if truth.honest && self.position() != truth.placed {
            let (at, all) = (self.position(), truth.placed);
            return Err(format!("end of data at {at}, but {all} bytes were written"));
        }
        Ok(())
    }

    // ---- actions of the stack

    /// The receive side reads the control block. Stores may arrive between its loads.
    pub(super) fn poll(
        &mut self,
        out: &mut Lane,
        inward: &mut Lane,
        rng: &mut Rng,
        truth: &Truth,
        now: u64,
    ) -> Result<(), String> {
        self.element.signalled = false;
        if self.kind != Kind::SmcD {
            while let Some(message) = self.element.inbox.pop_front() {
                if self.sequence_in.judge(message.sequence) == Order::Old {
                    continue;
                }
                let Cdc { producer_flags, state_flags, .. } = message;
                let cursor = message.consumer;
                let consumer = ConsumerWord { cursor, producer_flags, state_flags };
                let producer = ProducerWord { cursor: message.producer };
                self.control(out, producer, consumer, truth, now)?;
            }
            return Ok(());
        }
        let shared = RefCell::new((&mut self.element, inward, rng, Ok(())));
        let load = |word: fn(&Element) -> u64| {
            let (element, lane, rng, result) = &mut *shared.borrow_mut();
            while rng.one_in(3)
                && let Some(store) = lane.pop(rng)
            {
                if let Err(error) = element.take(store, truth.id) {
                    *result = Err(error);
                }
            }
            word(element)
        };
        let (producer, consumer) = read_words(|| load(|e| e.producer), || load(|e| e.consumer));
        shared.into_inner().3?;
        self.control(out, producer, consumer, truth, now)
    }

    /// The send side reads the consumer word alone, as a writer in another thread does.
    pub(super) fn poll_for_space(&mut self, out: &mut Lane, now: u64) -> Result<(), String> {
        if self.kind != Kind::SmcD {
            return Ok(());
        }
        let word = ConsumerWord::from_u64(self.element.consumer);
        if self.connection.sender.on_peer_consumer(word.cursor).is_err() {
            return self.event(out, Event::Abort, now);
        }
        let event = Event::Peer { flags: word.state_flags };
        self.event(out, event, now)?;
        self.flush(out)?;
        self.flush_pending_close(out, now)
    }

    fn control(
        &mut self,
        out: &mut Lane,
        producer: ProducerWord,
        consumer: ConsumerWord,
        truth: &Truth,
        now: u64,
    ) -> Result<(), String> {
        if self.state() == State::Closed {
            return Ok(());
        }
        let unsent = self.unsent();
        let delivery = match self.connection.on_control(producer, consumer, unsent) {
            Ok(delivery) => delivery,
            Err(_) if !truth.honest => return self.event(out, Event::Abort, now),
            Err(error) => return Err(format!("end {}: honest peer refused: {error}", self.id)),
        };
        self.arrived += u64::from(delivery.received.bytes);
        if truth.honest && self.arrived > truth.placed {
            return Err(format!("{} arrived of {} written", self.arrived, truth.placed));
        }
        if let UrgentEvent::Present { offset } = delivery.received.urgent {
            let byte = self.element.read(Span { offset, len: 1 })?[0];
            let mark = self.arrived.wrapping_sub(1);
            if truth.honest && !truth.marks.contains(&mark) {
                return Err(format!("mark at {mark}, but urgent are {:?}", truth.marks));
            }
            self.oob = Some(mark);
            self.connection.receiver.remember_urgent(byte);
        }
        self.free_read_bytes();
        if delivery.received.update.is_due() {
            self.publish(out)?;
        }
        self.act(out, delivery.actions, now)?;
        self.flush(out)?;
        self.flush_pending_close(out, now)
    }

    pub(super) fn event(&mut self, lane: &mut Lane, event: Event, now: u64) -> Result<(), String> {
        let actions = self.connection.close.on(event, self.unsent());
        self.act(lane, actions, now)
    }

    /// A pending close goes on when everything is written.
    fn flush_pending_close(&mut self, lane: &mut Lane, now: u64) -> Result<(), String> {
        if self.unsent() || self.connection.close.pending().is_empty() {
            return Ok(());
        }
        self.event(lane, Event::Flushed, now)
    }

    pub(super) fn tick(&mut self, lane: &mut Lane, now: u64) -> Result<(), String> {
        if !self.dead && self.timer.is_some_and(|deadline| now >= deadline) {
            self.timer = None;
            self.event(lane, Event::Timeout, now)?;
        }
        Ok(())
    }

    fn act(&mut self, lane: &mut Lane, actions: Actions, now: u64) -> Result<(), String> {
        for action in actions.each() {
            match action {
                Actions::PURGE => {
                    self.connection.receiver.purge();
                    self.outbox.clear();
                    self.failed = true;
                }
                Actions::SEND_DONE | Actions::SEND_CLOSED => self.publish_state(lane)?,
                Actions::SEND_ABORT => {
                    self.publish_state(lane)?;
                    self.event(lane, Event::AbortDelivered, now)?;
                }
                Actions::RESET_TCP => self.tcp_reset = true,
                Actions::STOP_TIMER => self.timer = None,
                Actions::START_CLOSE_TIMER => self.timer = Some(now + CLOSE_TICKS),
                Actions::START_ABORT_TIMER => self.timer = Some(now + ABORT_TICKS),
                Actions::REUSE_BUFFER => self.released = Released::Reuse,
                Actions::WITHDRAW_BUFFER => self.released = Released::Withdrawn,
                _ => {}
            }
        }
        Ok(())
    }

    /// Stores the outbox into the peer's ring, as far as bytes fit.
    fn flush(&mut self, lane: &mut Lane) -> Result<(), String> {
        if !self.connection.close.may_publish() {
            return Ok(());
        }
        let mut wrote = false;
        while let Some(chunk) = self.outbox.front_mut() {
            let sender = &mut self.connection.sender;
            let space = sender.space();
            let whole = chunk.len <= space;
            if chunk.urgent && !whole && !self.announced {
                sender.announce_urgent();
                self.announced = true;
            }
            let n = chunk.len.min(space);
            if n == 0 {
                sender.block();
                break;
            }
            let mut position = self.placed;
            for span in sender.spans(n) {
                lane.push(Store::Bytes { span, position });
                position += u64::from(span.len);
            }
            chunk.len -= n;
            self.placed = position;
            let counted = if chunk.urgent && whole {
                self.marks.push(position - 1);
                self.announced = false;
                sender.advance_urgent(n)
            } else {
                sender.advance(n, chunk.len != 0)
            };
            if counted != n {
                return Err(format!("{counted} of {n} bytes counted"));
            }
            if chunk.len == 0 {
                self.outbox.pop_front();
            }
            wrote = true;
        }
        if wrote || self.connection.sender.publish_due() { self.publish(lane) } else { Ok(()) }
    }

    fn publish(&mut self, lane: &mut Lane) -> Result<(), String> {
        if self.connection.close.may_publish() { self.publish_state(lane) } else { Ok(()) }
    }

    fn publish_state(&mut self, lane: &mut Lane) -> Result<(), String> {
        if self.silent {
            return Err(format!("end {} speaks after its C or A", self.id));
        }
        if self.dead {
            return Ok(());
        }
        let (producer, consumer) = self.connection.words();
        if self.kind == Kind::SmcD {
            if let Some(word) = self.connection.word_ahead(self.state_out) {
                lane.push(Store::Consumer(word.to_u64()));
            }
            lane.push(Store::Producer(producer.to_u64()));
            lane.push(Store::Consumer(consumer.to_u64()));
            lane.push(Store::Signal);
        } else {
            lane.push(self.message(producer, consumer));
        }
        self.connection.on_published();
        self.state_out = consumer.state_flags;
        self.silent = self.state_out.intersects(StateFlags::CLOSED | StateFlags::ABORT);
        Ok(())
    }

    /// The words as SMC-R sends them.
    fn message(&mut self, producer: ProducerWord, consumer: ConsumerWord) -> Store {
        Store::Message(Cdc {
            sequence: self.sequence_out.next(),
            token: 0,
            producer: producer.cursor,
            consumer: consumer.cursor,
            producer_flags: consumer.producer_flags,
            state_flags: consumer.state_flags,
        })
    }

    /// Puts a falsified word on the lane, as a lying peer.
    pub(super) fn lie(&mut self, lane: &mut Lane, rng: &mut Rng) {
        let (mut producer, mut consumer) = self.connection.words();
        let bits = rng.bits();
        match rng.below(6) {
            0 => producer = ProducerWord::from_u64(bits),
            1 => consumer = ConsumerWord::from_u64(bits),
            2 => producer.cursor.count = producer.cursor.count.wrapping_add(rng.below(9)),
            3 => consumer.cursor.count = consumer.cursor.count.wrapping_sub(rng.below(9)),
            4 => producer.cursor.wrap = producer.cursor.wrap.wrapping_add(1),
            _ => consumer.producer_flags = ProducerFlags::from_bits_truncate(bits as u8),
        }
        if self.kind == Kind::SmcD {
            lane.push(Store::Producer(producer.to_u64()));
            lane.push(Store::Consumer(consumer.to_u64()));
            lane.push(Store::Signal);
        } else {
            lane.push(self.message(producer, consumer));
        }
    }

    /// Allows overwriting of bytes up to the reading position plus the ring.
    fn free_read_bytes(&mut self) {
        let limit = self.position() + u64::from(self.connection.receiver.ring().len());
        let watched = self.element.limit.is_some() && !self.failed;
        self.element.limit = watched.then_some(limit);
    }

    pub(super) fn wants_close(&self) -> bool {
        match self.hasty {
            true => self.budget == 0,
            false => self.saw_end && self.shut && !self.unsent(),
        }
    }

    pub(super) fn wants_shutdown(&self) -> bool {
        self.budget == 0 && !self.unsent() && !self.shut && !self.hasty
    }
}
