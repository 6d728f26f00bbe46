// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The receive side of records: bytes from TCP are stored into the own ring.

use std::collections::VecDeque;
use std::io;
use std::sync::atomic::Ordering;

use rustix::buffer::spare_capacity;
use rustix::net::{RecvFlags, recv};
use smc_core::carrier::{Input, Outgoing, Reading};
use smc_core::stream::{Place, RecvPath, RingRenewal};
use smc_core::wire::cdc::{ConsumerWord, StateFlags};
use smc_core::wire::record::{HEADER_LEN, Record};

use super::send_queue::queues_are_held;
use super::{Conn, Rx, Tx};
use ism_sys::{has_error, has_fin};

/// The most bytes taken from TCP by one call.
const TAKEN_AT_ONCE: usize = 64 << 10;
/// The most rounds of one call while the peer sends without end.
const MAX_ROUNDS: u32 = 32;

/// The result of a round.
enum Round {
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

/// The result of a read from TCP.
enum Brought {
    Bytes,
    Nothing,
    End,
    Reset,
}

impl Conn {
    /// Takes bytes from TCP, sends as far as TCP has room, and wakes the waiters concerned.
    pub(super) fn serve_tcp(&self, rx: &mut Rx) {
        {
            let mut tx = self.tx();
            if queues_are_held() {
                return;
            }
            if std::mem::take(&mut tx.half.records.blocked) {
                self.waiting.note_room_on_tcp();
            }
            self.pump_out(&mut tx);
            if tx.half.has_left() {
                self.flush_held(&mut tx);
            }
        }
        let mut rounds = 0..MAX_ROUNDS;
        loop {
            if rounds.next().is_none() {
                // A separate event continues, so this caller has its turn.
                self.tcp.watch_room();
                break;
            }
            let mut tx = self.tx();
            match self.serve_round(rx, &mut tx) {
                Round::Done => break,
                Round::Again => {}
                Round::Reads(from) => {
                    drop(tx);
                    // A failure shows in the connection's state.
                    let _ = self.refresh_rx(rx);
                    self.begin_reading(&mut self.tx(), from);
                }
                Round::Full => {
                    drop(tx);
                    if !self.make_room(rx) {
                        break;
                    }
                }
                Round::Ring => {
                    drop(tx);
                    if !self.begin_ring(rx) {
                        break;
                    }
                }
            }
        }
        self.note_unread(rx, &mut self.tx());
        self.wake_all();
    }

    fn serve_round(&self, rx: &Rx, tx: &mut Tx) -> Round {
        let mut arrived = self.arrived(rx, tx);
        if matches!(tx.half.carrier().incoming().reading(), Reading::Until(_)) {
            // This end may have heard of the loss before it left the ring.
            let gone = tx.records.recv.path() == RecvPath::Lost || self.carrier().brings_no_more();
            if gone {
                arrived = if self.carrier().keep_ring() { self.arrived(rx, tx) } else { None };
            }
            let (input, up_to) = match arrived {
                Some(arrived) if gone => (Input::RingGone(self.carrier().reason()), arrived),
                Some(arrived) => (Input::Arrived, arrived),
                None => (Input::Violated, 0),
            };
            if let Some(from) = self.change(tx, input, up_to) {
                return Round::Reads(from);
            }
            if !tx.half.carrier().is_over() {
                self.await_ring();
                if self.arrived(rx, tx) != arrived {
                    return Round::Again;
                }
            }
        }
        if tx.half.carrier().is_over() {
            return Round::Done;
        }
        if tx.records.recv.has_body() {
            return self.store_body(tx);
        }
        if tx.way_back.message.missing() > 0 {
            return self.take_message(tx);
        }
        if let Some(header) = first_chunk(&tx.records.input) {
            let begins_ring = matches!(Record::parse(&header), Ok(Record::Change { .. }));
            if begins_ring && tx.way_back.renewal.has_ring() {
                return Round::Ring;
            }
            if begins_ring && tx.way_back.is_linking() {
                return Round::Done;
            }
            let is_late = begins_ring && matches!(tx.way_back.renewal, RingRenewal::Failed);
            tx.records.input.drain(..HEADER_LEN);
            let input = match Record::parse(&header) {
                // The link used by the peer was not brought up here.
                Ok(_) if is_late => Input::Violated,
                Ok(record) => {
                    match record {
                        Record::Data { len, .. } => tx.records.recv.begin_body(len),
                        Record::Clc { len } => tx.way_back.message.begin(len),
                        _ => {}
                    }
                    Input::Record(record)
                }
                Err(error) => {
                    tracing::warn!(peer = %self.carrier(), %error, "no record");
                    Input::Violated
                }
            };
            return match self.change(tx, input, arrived.unwrap_or(0)) {
                Some(from) => Round::Reads(from),
                None => Round::Again,
            };
        }
        self.fill(tx)
    }

    /// Bytes of the ring left by the peer are still missing. The device's next event continues the
    /// work.
    fn await_ring(&self) {
        if !self.waiting.awaiting.swap(true, Ordering::SeqCst) {
            self.watch_events();
        }
        // Without an armed line, arrivals are seen at the next recheck.
        for _ in 0..MAX_ROUNDS {
            if self.arm() {
                return;
            }
        }
    }

    /// Undoes [`Conn::await_ring`].
    pub(super) fn end_awaiting(&self) {
        if self.waiting.awaiting.swap(false, Ordering::SeqCst) {
            self.ignore_events();
        }
    }

    /// Continues after a wait for the last bytes of a ring.
    pub(super) fn serve_awaited(&self) {
        if self.waiting.awaiting.load(Ordering::SeqCst) {
            self.serve_tcp(&mut self.rx());
        }
    }

    /// Reads continue at this position, from TCP.
    fn begin_reading(&self, tx: &mut Tx, from: u64) {
        if !self.carrier().keep_ring() {
            self.change(tx, Input::Violated, 0);
            return;
        }
        let last = ConsumerWord::from_u64(self.words()[1]);
        let sent = tx.half.sender.producer_word().cursor;
        let has_sent = tx.half.carrier().outgoing() == Outgoing::Tcp;
        tx.records.recv.begin_tcp(from, last, has_sent.then_some(sent));
        self.end.read_tcp();
        self.end_awaiting();
        self.store_words(tx);
        if self.reactor.is_leaving() {
            self.reactor.wake_background();
        }
    }

    /// Bytes received by the own ring, if its words can be true.
    fn arrived(&self, rx: &Rx, tx: &Tx) -> Option<u64> {
        tx.records.recv.stored().or_else(|| rx.half.arrived(self.words()))
    }

    /// Stores bytes of a DATA record into the own ring, as far as there is room.
    fn store_body(&self, tx: &mut Tx) -> Round {
        let ring = self.own_ring();
        if tx.records.input.is_empty() {
            return self.fill(tx);
        }
        let consumed = ConsumerWord::from_u64(self.cursors.consumed()).cursor;
        let (first, _) = tx.records.input.as_slices();
        let Place { offset, len } = tx.records.recv.place(consumed, first.len(), &ring);
        if len == 0 {
            return if tx.awaits_record() { Round::Full } else { Round::Done };
        }
        self.carrier().store(offset, first.get(..len).unwrap_or_default());
        tx.records.input.drain(..len);
        tx.records.recv.store(len);
        self.store_words(tx);
        Round::Again
    }

    /// The program has read bytes from TCP: input waiting for room has its turn.
    pub(super) fn go_on_from_tcp(&self, rx: &mut Rx) {
        let mut tx = self.tx();
        let awaits_room = !tx.records.input.is_empty();
        if !awaits_room {
            return self.note_unread(rx, &mut tx);
        }
        drop(tx);
        self.serve_tcp(rx);
    }

    /// Takes bytes of a CLC message, and informs the machine after the last byte.
    fn take_message(&self, tx: &mut Tx) -> Round {
        if tx.records.input.is_empty() {
            return self.fill(tx);
        }
        if let Some(input) = tx.way_back.take_bytes(&mut tx.records.input) {
            self.change(tx, input, 0);
        }
        Round::Again
    }

    /// Takes bytes from TCP.
    fn fill(&self, tx: &mut Tx) -> Round {
        if tx.records.ended {
            self.look_for_reset(tx);
            return Round::Done;
        }
        if !self.expect_unread(tx) {
            return Round::Done;
        }
        // Not on the stack of the program's thread, which may be smaller; and without zeroing room not
        // filled by the kernel. Neither conversion allocates.
        let mut bytes = Vec::from(std::mem::take(&mut tx.records.input));
        bytes.reserve(TAKEN_AT_ONCE);
        let brought = self.read_tcp(&mut bytes);
        // An idle connection keeps no room.
        tx.records.input = if bytes.is_empty() { VecDeque::new() } else { bytes.into() };
        let input = match brought {
            Brought::Bytes => return Round::Again,
            Brought::Nothing => return Round::Done,
            Brought::End => {
                tx.records.ended = true;
                let in_record = tx.records.recv.has_body() || tx.way_back.message.missing() > 0;
                Input::TcpEnded { whole: !in_record && tx.records.input.is_empty() }
            }
            Brought::Reset => {
                tx.records.ended = true;
                Input::TcpReset
            }
        };
        match input {
            Input::TcpReset => self.note_reset(tx),
            // A FIN means nothing as long as the ring is there (CLOSE-44), but is known afterwards.
            _ => {
                self.change(tx, input, 0);
            }
        }
        Round::Done
    }

    /// TCP was reset.
    fn note_reset(&self, tx: &mut Tx) {
        let is_on_ring = tx.half.carrier().is_on_ring();
        if is_on_ring {
            self.refresh_tx(tx);
            if tx.half.close.peer_flags().contains(StateFlags::CLOSED) {
                return;
            }
        }
        self.change(tx, Input::TcpReset, 0);
    }

    /// Looks for an RST behind the peer's FIN: TCP then has an error, and reads return the end of data.
    fn look_for_reset(&self, tx: &mut Tx) {
        let is_reset = self.tcp.stream().as_ref().is_some_and(has_error);
        if is_reset && self.end.failure().is_none() {
            self.note_reset(tx);
        }
    }

    /// Appends bytes from TCP, as many as there is room for.
    fn read_tcp(&self, bytes: &mut Vec<u8>) -> Brought {
        let guard = self.tcp.stream();
        let Some(tcp) = &*guard else { return Brought::Nothing };
        loop {
            return match recv(tcp, spare_capacity(bytes), RecvFlags::DONTWAIT) {
                // The kernel also returns 0 on a reset connection, once the error was taken.
                Ok((0, _)) => match has_fin(tcp) {
                    true => Brought::End,
                    false => Brought::Reset,
                },
                Ok(_) => Brought::Bytes,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => Brought::Nothing,
                Err(_) => Brought::Reset,
            };
        }
    }
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
