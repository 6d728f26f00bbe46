// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The receive side of records: bytes from TCP are stored into the own ring.

use std::collections::VecDeque;

use smc_core::carrier::{Input, Outgoing, Reading};
use smc_core::stream::{Place, RecvPath, RingRenewal};
use smc_core::wire::cdc::{ConsumerWord, StateFlags};
use smc_core::wire::record::{HEADER_LEN, Record};

use super::parts::{Rx, Shared, Tx};
use super::tcp_io::TcpInput;
use ism_sys::has_error;

/// The most bytes taken from TCP by one call.
const TAKEN_AT_ONCE: usize = 64 << 10;

/// The result of a round.
pub(super) enum RecordStep {
    /// TCP has nothing more for now, or the ring has no room.
    Done,
    /// A record was handled.
    Again,
    /// The peer has left the ring: the last words in the ring come first, then reads continue at this
    /// position.
    Reads(u64),
    /// The ring has no room, and the records behind the bytes have to be checked.
    Full,
    /// The next record begins a new ring.
    Ring,
}

/// The header of the next record, if complete.
pub(super) fn first_chunk(input: &VecDeque<u8>) -> Option<[u8; HEADER_LEN]> {
    let mut header = [0; HEADER_LEN];
    if input.len() < HEADER_LEN {
        return None;
    }
    for (to, from) in header.iter_mut().zip(input) {
        *to = *from;
    }
    Some(header)
}

impl Tx {
    pub(super) fn serve_round(&mut self, shared: &Shared, rx: &Rx) -> RecordStep {
        let mut arrived = self.arrived(shared, rx);
        if matches!(self.half.carrier().incoming().reading(), Reading::Until(_)) {
            // This end may have heard of the loss before it left the ring.
            let gone =
                self.records.recv.path() == RecvPath::Lost || shared.carrier().brings_no_more();
            if gone {
                arrived =
                    if shared.carrier().keep_ring() { self.arrived(shared, rx) } else { None };
            }
            let (input, up_to) = match arrived {
                Some(arrived) if gone => (Input::RingGone(shared.carrier().reason()), arrived),
                Some(arrived) => (Input::Arrived, arrived),
                None => (Input::Violated, 0),
            };
            if let Some(from) = self.switch(shared, input, up_to) {
                return RecordStep::Reads(from);
            }
            if !self.half.carrier().is_over() {
                shared.await_ring();
                if self.arrived(shared, rx) != arrived {
                    return RecordStep::Again;
                }
            }
        }
        if self.half.carrier().is_over() {
            return RecordStep::Done;
        }
        if self.records.recv.has_body() {
            return self.store_body(shared);
        }
        if self.ring_return.message.missing() > 0 {
            return self.take_message(shared);
        }
        if let Some(header) = first_chunk(&self.records.input) {
            let begins_ring = matches!(Record::parse(&header), Ok(Record::Change { .. }));
            if begins_ring && self.ring_return.renewal.has_ring() {
                return RecordStep::Ring;
            }
            if begins_ring && self.ring_return.is_linking() {
                return RecordStep::Done;
            }
            let is_late = begins_ring && matches!(self.ring_return.renewal, RingRenewal::Failed);
            self.records.input.drain(..HEADER_LEN);
            let input = match Record::parse(&header) {
                // The link used by the peer was not brought up here.
                Ok(_) if is_late => Input::Violated,
                Ok(record) => {
                    match record {
                        Record::Data { len, .. } => self.records.recv.begin_body(len),
                        Record::Clc { len } => self.ring_return.message.begin(len),
                        _ => {}
                    }
                    Input::Record(record)
                }
                Err(error) => {
                    tracing::warn!(peer = %shared.carrier(), %error, "no record");
                    Input::Violated
                }
            };
            return match self.switch(shared, input, arrived.unwrap_or(0)) {
                Some(from) => RecordStep::Reads(from),
                None => RecordStep::Again,
            };
        }
        self.fill(shared)
    }

    /// Reads continue at this position, from TCP.
    pub(super) fn begin_reading(&mut self, shared: &Shared, from: u64) {
        if !shared.carrier().keep_ring() {
            self.switch(shared, Input::Violated, 0);
            return;
        }
        let last = ConsumerWord::from_u64(shared.words()[1]);
        let sent = self.half.sender.producer_word().cursor;
        let has_sent = self.half.carrier().outgoing() == Outgoing::Tcp;
        self.records.recv.begin_tcp(from, last, has_sent.then_some(sent));
        shared.end.read_tcp();
        shared.end_awaiting();
        self.store_words(shared);
        if shared.reactor.is_leaving() {
            shared.reactor.wake_background();
        }
    }

    /// Bytes received by the own ring, if its words can be true.
    pub(super) fn arrived(&self, shared: &Shared, rx: &Rx) -> Option<u64> {
        self.records.recv.stored().or_else(|| rx.half.arrived(shared.words()))
    }

    /// Stores bytes of a DATA record into the own ring, as far as there is room.
    fn store_body(&mut self, shared: &Shared) -> RecordStep {
        let ring = shared.own_ring();
        if self.records.input.is_empty() {
            return self.fill(shared);
        }
        let consumed = ConsumerWord::from_u64(shared.cursors.consumed()).cursor;
        let (first, _) = self.records.input.as_slices();
        let Place { offset, len } = self.records.recv.place(consumed, first.len(), &ring);
        if len == 0 {
            return if self.awaits_record() { RecordStep::Full } else { RecordStep::Done };
        }
        shared.carrier().store(offset, first.get(..len).unwrap_or_default());
        self.records.input.drain(..len);
        self.records.recv.store(len);
        self.store_words(shared);
        RecordStep::Again
    }

    /// Takes bytes of a CLC message, and informs the machine after the last byte.
    fn take_message(&mut self, shared: &Shared) -> RecordStep {
        if self.records.input.is_empty() {
            return self.fill(shared);
        }
        if let Some(input) = self.ring_return.take_bytes(&mut self.records.input) {
            self.switch(shared, input, 0);
        }
        RecordStep::Again
    }

    /// Takes bytes from TCP.
    pub(super) fn fill(&mut self, shared: &Shared) -> RecordStep {
        if self.records.ended {
            self.look_for_reset(shared);
            return RecordStep::Done;
        }
        if !self.expect_unread(shared) {
            return RecordStep::Done;
        }
        // Not on the stack of the program's thread, which may be smaller; and without zeroing room not
        // filled by the kernel. Neither conversion allocates.
        let mut bytes = Vec::from(std::mem::take(&mut self.records.input));
        bytes.reserve(TAKEN_AT_ONCE);
        let brought = shared.read_tcp(&mut bytes);
        // An idle connection keeps no room.
        self.records.input = if bytes.is_empty() { VecDeque::new() } else { bytes.into() };
        let input = match brought {
            TcpInput::Bytes => return RecordStep::Again,
            TcpInput::Nothing => return RecordStep::Done,
            TcpInput::End => {
                self.records.ended = true;
                let in_record =
                    self.records.recv.has_body() || self.ring_return.message.missing() > 0;
                Input::TcpEnded { whole: !in_record && self.records.input.is_empty() }
            }
            TcpInput::Reset => {
                self.records.ended = true;
                Input::TcpReset
            }
        };
        match input {
            Input::TcpReset => self.note_reset(shared),
            // A FIN means nothing as long as the ring is there (CLOSE-44), but is known afterwards.
            _ => {
                self.switch(shared, input, 0);
            }
        }
        RecordStep::Done
    }

    /// TCP was reset.
    fn note_reset(&mut self, shared: &Shared) {
        let is_on_ring = self.half.carrier().is_on_ring();
        if is_on_ring {
            self.refresh(shared);
            if self.half.close.peer_flags().contains(StateFlags::CLOSED) {
                return;
            }
        }
        self.switch(shared, Input::TcpReset, 0);
    }

    /// Looks for an RST behind the peer's FIN: TCP then has an error, and reads return the end of data.
    fn look_for_reset(&mut self, shared: &Shared) {
        let is_reset = shared.tcp.stream().as_ref().is_some_and(has_error);
        if is_reset && shared.end.failure().is_none() {
            self.note_reset(shared);
        }
    }
}
