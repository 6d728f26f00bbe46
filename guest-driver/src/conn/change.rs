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

use std::collections::VecDeque;
use std::time::Duration;

use smc_core::carrier::{Action, Input, Outgoing, Violation};
use smc_core::connection::{Event, Ring, SMCD_CONTROL_LEN, State};
use smc_core::stream::{OwnerState, RecordRecv, SwitchReason};
use smc_core::wire::cdc::StateFlags;
use smc_core::wire::record::{Reason, Record};

use super::carrier::Carrier;
use super::record_queue::RecordQueue;
use super::send_queue::queues_are_held;
use super::{Conn, Failure, Tx};
use crate::info::{CarrierChanges, CurrentCarrier};
use ism_sys::unacknowledged;

/// The placeholder for a carrier without a valid ring, never used in fact.
const SMALLEST: Ring = match Ring::smcd(SMCD_CONTROL_LEN + 1) {
    Ok(ring) => ring,
    Err(_) => panic!("one byte is a ring"),
};

/// The TCP connection as a carrier: what it has not taken yet, and what it has brought.
pub(super) struct Records {
    /// Records not yet taken by TCP.
    pub(super) out: RecordQueue,
    /// The last deliveries to the former ring, until the peer reports its received bytes.
    pub(super) copies: Vec<u8>,
    /// Bytes from TCP not yet processed.
    pub(super) input: VecDeque<u8>,
    /// The way of these bytes into the own ring.
    pub(super) recv: RecordRecv,
    /// TCP has delivered the peer's FIN, and the machine knows.
    pub(super) ended: bool,
    /// SO_LINGER of the program, while the socket's own value makes the kernel reset the connection at
    /// the end of the process, because bytes are unread.
    pub(super) linger: Option<Option<Duration>>,
}

impl Records {
    /// The state without records. `inheritable`: the child of a fork can take the connection over.
    pub(super) fn new(inheritable: bool) -> Records {
        Records {
            out: RecordQueue::new(inheritable),
            copies: Vec::new(),
            input: VecDeque::new(),
            recv: RecordRecv::default(),
            ended: false,
            linger: None,
        }
    }
}

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
        self.half.awaits_record() || self.way_back.renewal.has_ring()
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
}

impl Conn {
    /// Whether the connection may continue without its carrier.
    pub(super) fn may_outlive(&self) -> bool {
        self.tcp.has_watch()
    }

    /// Whether the ring was left with written bytes not yet taken by TCP, or the connection is
    /// [unfinished](Self::is_unfinished).
    pub(super) fn is_sending_by_tcp(&self) -> bool {
        let tx = self.tx();
        if self.is_unfinished(&tx) {
            return true;
        }
        let has_more = !tx.queue.is_empty() || !tx.records.out.is_empty();
        tx.half.has_left() && has_more && !tx.half.carrier().is_over() && self.tcp.is_open()
    }

    /// Notes whether the process must not end yet although the program has closed the connection.
    pub(super) fn note_unfinished(&self, tx: &mut Tx) {
        let is_unfinished = self.is_unfinished(tx);
        tx.records.out.set_unfinished(is_unfinished);
    }

    /// Whether a connection closed by the program has records left, or sent ones not received by the
    /// peer's kernel. If the process ended now and a record came for it, its kernel would answer by RST
    /// and discard the bytes under way.
    fn is_unfinished(&self, tx: &Tx) -> bool {
        let is_closed = tx.half.close.flags().contains(StateFlags::CLOSED)
            && !tx.half.close.peer_flags().contains(StateFlags::CLOSED);
        is_closed
            && tx.half.has_left()
            && !tx.half.carrier().is_over()
            && !tx.half.records.broken
            && match tx.half.carrier().outgoing() {
                Outgoing::Tcp => self.has_unacknowledged(),
                Outgoing::Ring | Outgoing::Leaving { .. } => self.tcp.is_open(),
            }
    }

    /// Whether the peer's kernel has yet to acknowledge bytes taken by TCP.
    pub(super) fn has_unacknowledged(&self) -> bool {
        self.tcp.with(unacknowledged).is_ok_and(|bytes| bytes > 0)
    }

    /// Leaves the ring of a working device about to go, if the connection may continue without it.
    pub(super) fn leave_in_order(&self) {
        let mut tx = self.tx();
        self.refresh_tx(&mut tx);
        if !tx.half.has_left() && self.must_leave(&tx) && self.tcp.watch_bytes().is_ok() {
            tracing::debug!(peer = %self.carrier(), "connection leaves its device");
            self.change(&mut tx, Input::Leave(Reason::DeviceLeaves), 0);
        }
    }

    /// Whether the connection will continue over TCP without its device, but does not yet, or reads
    /// memory of the device.
    pub(crate) fn must_leave_device(&self) -> bool {
        self.must_leave(&self.tx())
    }

    /// Whether the connection will continue without its device, and reads memory of the device.
    pub(crate) fn needs_device_memory(&self) -> bool {
        self.must_leave(&self.tx()) && !self.carrier().ring_stays()
    }

    /// Continues with a copy of the own ring, because the memory goes with a lost device. Later writes
    /// of the peer do not arrive, and the peer is informed.
    pub(crate) fn keep_memory(&self) {
        self.lost(Carrier::is_device_gone);
        let (_rx, tx) = (self.rx(), self.tx());
        // Otherwise the next access finds the memory gone with the device.
        if tx.carrier.is_device_gone() {
            tx.carrier.keep_ring();
        }
    }

    pub(super) fn must_leave(&self, tx: &Tx) -> bool {
        let carrier = tx.half.carrier();
        let has_left = carrier.is_on_tcp() && self.end.reads_tcp();
        let stays = !has_left && !carrier.is_over();
        let is_over = tx.half.close.state() == State::Closed
            || tx.half.close.peer_flags().contains(StateFlags::CLOSED)
            || self.has_failed();
        stays && !is_over && self.may_outlive() && self.tcp.is_open()
    }

    /// Leaves the lost ring, if the connection may continue without it. `true`: the connection
    /// continues.
    pub(super) fn leave(&self, tx: &mut Tx) -> bool {
        if !self.may_outlive()
            || !self.carrier().can_be_left()
            || self.tcp.watch_bytes().is_err()
            || !self.tcp.is_open()
        {
            return false;
        }
        if !tx.half.has_left() {
            let reason = self.carrier().reason();
            tracing::debug!(peer = %self.carrier(), ?reason, "connection goes on over TCP");
            self.change(tx, Input::Leave(reason), 0);
        }
        true
    }

    /// Gives an input to the machine, and executes its actions, except for the end of the ring for
    /// reads: `Some` is the position at which the caller begins to read from TCP.
    pub(super) fn change(&self, tx: &mut Tx, input: Input, arrived: u64) -> Option<u64> {
        let copies = match tx.half.leaves(&input) {
            true => self.copies(tx),
            false => Some(Vec::new()),
        };
        let Some(copies) = copies else { return self.change(tx, Input::Violated, arrived) };
        let owner = OwnerState {
            copies: copies.len() as u64,
            keeps_copies: self.carrier().keeps_copies(),
            unsent: tx.queue.has_unsent(),
            arrived,
        };
        if !copies.is_empty() {
            tx.records.copies = copies;
        }
        let actions = tx.half.change(input, &owner);
        let mut reads_from = None;
        for action in actions {
            match action {
                Action::ReadTcp { from } => reads_from = Some(from),
                action => self.carry_change_out(tx, action),
            }
        }
        reads_from
    }

    fn carry_change_out(&self, tx: &mut Tx, action: Action) {
        match action {
            Action::StopRing => {
                self.hold_writes(tx);
                self.carrier().fail();
                if let Ok(on) = self.nodelay() {
                    self.options.keep_nodelay(on);
                }
                self.tcp.watch_room();
            }
            Action::Write(record) => {
                tx.records.out.push(&record.header());
                self.pump_out(tx);
                self.tcp.push();
            }
            Action::SendTcp => {
                tx.records.copies = Vec::new();
                // The peer has every byte written to its ring, or reads the bytes from there.
                tx.records.recv.acknowledge(tx.half.sender.producer_word().cursor);
                self.store_words(tx);
                self.refresh_tx(tx);
                self.flush_held(tx);
                self.waiting.note_room_on_tcp();
                self.wake_all();
            }
            Action::Repeat { from, to } => self.repeat(tx, from, to),
            // The next turn sees the arrived bytes. A ring in memory of both processes has the bytes
            // written before LEAVE.
            Action::Await { .. } => self.carrier().give_up(),
            // The ring's memory stays as long as there is no other ring.
            Action::ReleaseRing => {
                tx.way_back.begin_wait();
                self.tcp.want_return();
                if self.reactor.is_leaving() {
                    // The device may go.
                    self.reactor.wake_background();
                }
            }
            Action::Propose | Action::Accept | Action::Confirm | Action::Decline => {
                let message = std::mem::take(&mut tx.way_back.answer);
                tx.records.out.push(&Record::Clc { len: message.len() as u32 }.header());
                tx.records.out.push(&message);
                self.pump_out(tx);
            }
            Action::Prepare => self.tcp.want_return(),
            Action::DropRing => {
                tx.way_back.stay();
                self.tcp.want_return();
                // An urgent byte may have waited for the ring.
                self.flush_held(tx);
            }
            Action::PeerSaid(flags) => {
                tx.records.recv.end(flags);
                self.store_words(tx);
                self.refresh_tx(tx);
            }
            Action::PeerEnded => {
                self.on_peer_flags(tx, StateFlags::CLOSED);
                self.end.fail(Failure::Ended);
            }
            Action::Mark(at) => {
                tx.records.recv.mark(at);
                self.store_words(tx);
            }
            Action::Reset(violation) => self.cut_by_change(tx, violation),
            // The caller begins to read; with the ring it begins to write, too.
            Action::ReadTcp { .. } | Action::ReadRing { .. } | Action::SendRing => {}
        }
    }

    /// The stream of records is over. This is a reset, unless the peer had closed, or had ended its
    /// direction before a broken rule. After an RST behind the end of the peer's direction, writes fail, as
    /// on TCP.
    pub(super) fn cut_by_change(&self, tx: &mut Tx, violation: Violation) {
        self.refresh_tx(tx);
        self.end_awaiting();
        tx.records.out.discard();
        if std::mem::take(&mut tx.half.records.closing) {
            drop(self.tcp.take());
        }
        if tx.half.close.peer_flags().contains(StateFlags::CLOSED) {
            return;
        }
        // A peer may reset its connections: its process ends, for example.
        match violation {
            Violation::TcpReset => tracing::debug!(peer = %self.carrier(), "TCP was reset"),
            _ => tracing::warn!(peer = %self.carrier(), %violation, "connection is reset"),
        }
        self.reset_tcp(tx);
        match violation {
            Violation::TcpReset => self.step_and_keep(tx, Event::TcpReset),
            _ => self.cut(tx),
        }
        // No answer can come.
        self.step(tx, Event::Timeout);
        self.wake_all();
    }

    /// Stores the peer's words into the own ring, as the peer would.
    pub(super) fn store_words(&self, tx: &Tx) {
        if let Some(words) = tx.records.recv.words(&self.own_ring()) {
            self.carrier().store_words(words);
        }
    }

    /// The own ring.
    pub(super) fn own_ring(&self) -> Ring {
        self.carrier().local_ring().unwrap_or(SMALLEST)
    }

    /// Reports the state of the own end by a record, once the ring was left. An abort is a reset of
    /// TCP.
    pub(super) fn tell_by_tcp(&self, tx: &mut Tx) {
        match tx.half.close.flags().contains(StateFlags::ABORT) {
            true => self.reset_tcp(tx),
            false => {
                if tx.half.note_said() {
                    self.change(tx, Input::Said, 0);
                }
            }
        }
    }

    /// Closes TCP, after its last record.
    pub(super) fn close_tcp(&self, tx: &mut Tx) {
        if !tx.records.out.is_empty() && self.tcp.is_open() {
            tx.half.records.closing = true;
        } else {
            drop(self.tcp.take());
        }
    }
}
