// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Continues a connection over its TCP connection after the loss of its ring.
//!
//! `smc_core::carrier` decides; this module carries out. Bytes from TCP are stored into the own ring,
//! as the peer would have stored them, and the words in the ring announce them. So reads, readiness and
//! the end of the peer's direction are the ring's, and the hot path has no extra check. The own
//! direction does not use the peer's ring any more: its path has failed, as each delivery checks
//! anyway.
//!
//! Every function runs under the lock of the send side, under which records are written.

use smc_core::carrier::{Action, Input, Outgoing, Violation};
use smc_core::connection::{Event, Ring, SMCD_CONTROL_LEN, State};
use smc_core::stream::{OwnerState, SwitchReason};
use smc_core::wire::cdc::StateFlags;
use smc_core::wire::record::{MAX_DATA, Record};

use super::end_word::Failure;
use super::parts::{Shared, Tx};
use crate::byte_queue::send_queue::queues_are_held;
use smc_info::{CarrierChanges, CurrentCarrier};

/// The placeholder for a carrier without a valid ring, never used in fact.
pub(super) const SMALLEST: Ring = match Ring::smcd(SMCD_CONTROL_LEN + 1) {
    Ok(ring) => ring,
    Err(_) => panic!("one byte is a ring"),
};

impl Tx {
    /// Whether a record of data may be begun.
    pub(super) fn may_send_record(&self) -> bool {
        self.half.may_send_record() && self.records.out.is_empty() && !queues_are_held()
    }

    /// Whether an urgent byte may be sent by TCP.
    pub(super) fn may_send_urgent_record(&self) -> bool {
        self.half.may_send_urgent_record() && self.may_send_record()
    }

    /// Whether bytes of the program can go as a record now: the ring was left, and TCP has room.
    pub(super) fn has_room_on_tcp(&self) -> bool {
        self.queue.is_empty() && self.may_send_record()
    }

    /// Whether a record of the peer decides about the next bytes. It may come behind bytes which the
    /// program reads only after its own write.
    pub(super) fn awaits_record(&self) -> bool {
        self.half.awaits_record() || self.ring_return.renewal.has_ring()
    }

    /// The carriers of the connection, for reports.
    pub(super) fn report(&self) -> CarrierChanges {
        let (count, why) = self.half.switches();
        CarrierChanges {
            now: match self.half.carrier() {
                end if end.is_on_ring() => CurrentCarrier::Device,
                end if end.is_on_tcp() => CurrentCarrier::Tcp,
                _ => CurrentCarrier::Leaving,
            },
            count,
            why: why.map(|why| match why {
                SwitchReason::Back => "a device is there again".to_owned(),
                SwitchReason::Own(reason) => reason.name().to_owned(),
                SwitchReason::Peer(reason) => format!("the peer leaves: {}", reason.name()),
            }),
        }
    }

    /// Notes whether the process must not end yet although the program has closed the connection.
    pub(super) fn note_unfinished(&mut self, shared: &Shared) {
        let is_unfinished = self.is_unfinished(shared);
        self.records.out.set_unfinished(is_unfinished);
    }

    /// Whether a connection closed by the program has records left, or sent ones not received by the
    /// peer's kernel. If the process ended now and a record came for it, its kernel would answer by RST
    /// and discard the bytes under way.
    pub(super) fn is_unfinished(&self, shared: &Shared) -> bool {
        let is_closed = self.half.close.flags().contains(StateFlags::CLOSED)
            && !self.half.close.peer_flags().contains(StateFlags::CLOSED);
        is_closed
            && self.half.has_left()
            && !self.half.carrier().is_over()
            && !self.half.records.broken
            && match self.half.carrier().outgoing() {
                Outgoing::Tcp => shared.has_unacknowledged(),
                Outgoing::Ring | Outgoing::Leaving { .. } => shared.tcp.is_open(),
            }
    }

    pub(super) fn must_leave(&self, shared: &Shared) -> bool {
        let carrier = self.half.carrier();
        let has_left = carrier.is_on_tcp() && shared.end.reads_tcp();
        let stays = !has_left && !carrier.is_over();
        let is_over = self.half.close.state() == State::Closed
            || self.half.close.peer_flags().contains(StateFlags::CLOSED)
            || shared.has_failed();
        stays && !is_over && shared.may_outlive() && shared.tcp.is_open()
    }

    /// Leaves the lost ring, if the connection may continue without it. `true`: the connection
    /// continues.
    pub(super) fn leave(&mut self, shared: &Shared) -> bool {
        if !shared.may_outlive()
            || !shared.carrier().can_be_left()
            || shared.tcp.watch_bytes().is_err()
            || !shared.tcp.is_open()
        {
            return false;
        }
        if !self.half.has_left() {
            let reason = shared.carrier().reason();
            tracing::debug!(peer = %shared.carrier(), ?reason, "connection goes on over TCP");
            self.switch(shared, Input::Leave(reason), 0);
        }
        true
    }

    /// Gives an input to the machine, and executes its actions, except for the end of the ring for
    /// reads: `Some` is the position at which the caller begins to read from TCP.
    pub(super) fn switch(&mut self, shared: &Shared, input: Input, arrived: u64) -> Option<u64> {
        let copies = match self.half.leaves(&input) {
            true => self.copies(shared),
            false => Some(Vec::new()),
        };
        let Some(copies) = copies else { return self.switch(shared, Input::Violated, arrived) };
        let owner = OwnerState {
            copies: copies.len() as u64,
            keeps_copies: shared.carrier().keeps_copies(),
            unsent: self.queue.has_unsent(),
            arrived,
        };
        if !copies.is_empty() {
            self.records.copies = copies;
        }
        let actions = self.half.change(input, &owner);
        let mut reads_from = None;
        for action in actions {
            match action {
                Action::ReadTcp { from } => reads_from = Some(from),
                action => self.perform_switch(shared, action),
            }
        }
        reads_from
    }

    fn perform_switch(&mut self, shared: &Shared, action: Action) {
        match action {
            Action::StopRing => {
                self.stop_sending(shared);
                shared.carrier().fail();
                if let Ok(on) = shared.nodelay() {
                    shared.options.keep_nodelay(on);
                }
                shared.tcp.watch_room();
            }
            Action::Write(record) => {
                self.records.out.push(&record.header());
                self.flush_records(shared);
                shared.tcp.push();
            }
            Action::SendTcp => {
                self.records.copies = Vec::new();
                // The peer has every byte written to its ring, or reads the bytes from there.
                self.records.recv.acknowledge(self.half.sender.producer_word().cursor);
                self.store_words(shared);
                self.refresh(shared);
                self.flush_queue(shared);
                shared.waiting.note_room_on_tcp();
                shared.wake_all();
            }
            Action::Repeat { from, to } => self.repeat(shared, from, to),
            // The next turn sees the arrived bytes. A ring in memory of both processes has the bytes
            // written before LEAVE.
            Action::Await { .. } => shared.carrier().give_up(),
            // The ring's memory stays as long as there is no other ring.
            Action::ReleaseRing => {
                self.ring_return.begin_wait();
                shared.tcp.want_return();
                if shared.reactor.is_leaving() {
                    // The device may go.
                    shared.reactor.wake_background();
                }
            }
            Action::Propose | Action::Accept | Action::Confirm | Action::Decline => {
                let message = std::mem::take(&mut self.ring_return.answer);
                self.records.out.push(&Record::Clc { len: message.len() as u32 }.header());
                self.records.out.push(&message);
                self.flush_records(shared);
            }
            Action::Prepare => shared.tcp.want_return(),
            Action::DropRing => {
                self.ring_return.stay();
                shared.tcp.want_return();
                // An urgent byte may have waited for the ring.
                self.flush_queue(shared);
            }
            Action::PeerSaid(flags) => {
                self.records.recv.end(flags);
                self.store_words(shared);
                self.refresh(shared);
            }
            Action::PeerEnded => {
                self.on_peer_flags(shared, StateFlags::CLOSED);
                shared.end.fail(Failure::Ended);
            }
            Action::Mark(at) => {
                self.records.recv.mark(at);
                self.store_words(shared);
            }
            Action::Reset(violation) => self.cut_by_switch(shared, violation),
            // The caller begins to read; with the ring it begins to write, too.
            Action::ReadTcp { .. } | Action::ReadRing { .. } | Action::SendRing => {}
        }
    }

    /// The stream of records is over. This is a reset, unless the peer had closed, or had ended its
    /// direction before a broken rule. After an RST behind the end of the peer's direction, writes fail, as
    /// on TCP.
    fn cut_by_switch(&mut self, shared: &Shared, violation: Violation) {
        self.refresh(shared);
        shared.end_awaiting();
        self.records.out.discard();
        if std::mem::take(&mut self.half.records.closing) {
            drop(shared.tcp.take());
        }
        if self.half.close.peer_flags().contains(StateFlags::CLOSED) {
            return;
        }
        // A peer may reset its connections: its process ends, for example.
        match violation {
            Violation::TcpReset => tracing::debug!(peer = %shared.carrier(), "TCP was reset"),
            _ => tracing::warn!(peer = %shared.carrier(), %violation, "connection is reset"),
        }
        self.reset_tcp(shared);
        match violation {
            Violation::TcpReset => self.step_and_keep(shared, Event::TcpReset),
            _ => self.cut(shared),
        }
        // No answer can come.
        self.step(shared, Event::Timeout);
        shared.wake_all();
    }

    /// Stores the peer's words into the own ring, as the peer would.
    pub(super) fn store_words(&self, shared: &Shared) {
        if let Some(words) = self.records.recv.words(&shared.own_ring()) {
            shared.carrier().store_words(words);
        }
    }

    /// Reports the state of the own end by a record, once the ring was left. An abort is a reset of
    /// TCP.
    pub(super) fn send_state_record(&mut self, shared: &Shared) {
        match self.half.close.flags().contains(StateFlags::ABORT) {
            true => self.reset_tcp(shared),
            false => {
                if self.half.note_said() {
                    self.switch(shared, Input::Said, 0);
                }
            }
        }
    }

    /// Closes TCP, after its last record.
    pub(super) fn close_tcp(&mut self, shared: &Shared) {
        if !self.records.out.is_empty() && shared.tcp.is_open() {
            self.half.records.closing = true;
        } else {
            drop(shared.tcp.take());
        }
    }

    /// Copies of bytes delivered to the ring and possibly not received by the peer, up to the last
    /// byte. `None`: the ring lacks bytes in the middle, so the connection cannot continue.
    pub(super) fn copies(&self, shared: &Shared) -> Option<Vec<u8>> {
        let (end, unread) = self.half.unread();
        shared.carrier().last_sent(end, unread, self.half.sender.ring())
    }

    /// Notes the loss of the carrier. The contents of the own ring are final as soon as the peer
    /// reports its sent bytes.
    pub(super) fn note_ring_gone(&mut self, shared: &Shared) {
        if self.records.recv.lose() {
            // A separate event continues, under the lock of the receive side.
            shared.tcp.watch_room();
        }
    }

    /// Sends as DATA the bytes delivered to the ring, but not received.
    pub(super) fn repeat(&mut self, shared: &Shared, from: u64, to: u64) {
        let more = self.queue.has_unsent();
        let copies = std::mem::take(&mut self.records.copies);
        let lacking = usize::try_from(to.saturating_sub(from)).unwrap_or(usize::MAX);
        let Some(bytes) = copies.len().checked_sub(lacking).and_then(|at| copies.get(at..)) else {
            return self.cut_by_switch(shared, Violation::NoCopy { from, kept: to });
        };
        let mut at = from;
        for chunk in bytes.chunks(MAX_DATA as usize) {
            // These bytes were reported to the program as sent, and so were the bytes of the send
            // queue.
            self.records.out.push(&Record::Data { at, len: chunk.len() as u32, more }.header());
            self.records.out.push(chunk);
            at += chunk.len() as u64;
        }
        self.flush_records(shared);
    }
}
