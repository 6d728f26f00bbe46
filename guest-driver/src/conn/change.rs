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

use smc_core::carrier::{Action, End, Input, Outgoing, Positions, Renewal, Role, Violation};
use smc_core::connection::{Event, Ring, SMCD_CONTROL_LEN, State};
use smc_core::stream::RecordRecv;
use smc_core::wire::cdc::StateFlags;
use smc_core::wire::record::{Reason, Record};

use super::carrier::Carrier;
use super::come_back::WayBack;
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

/// State flags reported by records.
const SAID: StateFlags = StateFlags::SENDING_DONE.union(StateFlags::CLOSED);

/// The part of a connection able to outlive its carrier.
pub(super) struct Change {
    pub(super) end: End,
    /// The reason for the last change of the carrier.
    pub(super) why: Option<ChangeReason>,
    /// Number of changes of the carrier.
    pub(super) count: u32,
    /// Bytes reported as sent, and as acknowledged.
    pub(super) told_moved: [u64; 2],
    /// The return of the connection to a ring.
    pub(super) way_back: WayBack,
    pub(super) sending: Sending,
    pub(super) receiving: Receiving,
    /// SO_LINGER of the program, while the socket's own value makes the kernel reset the connection at
    /// the end of the process, because bytes are unread.
    pub(super) linger: Option<Option<Duration>>,
}

/// The own direction over TCP.
pub(super) struct Sending {
    /// Records not yet taken by TCP.
    pub(super) out: RecordQueue,
    /// TCP has no room. The watch reports new room.
    pub(super) blocked: bool,
    /// TCP takes nothing more. Bytes already received come before its end.
    pub(super) broken: bool,
    /// The TCP connection is closed when `out` is empty.
    pub(super) closing: bool,
    /// The flags of the own direction known to the machine.
    pub(super) told: StateFlags,
    /// The last deliveries to the former ring, until the peer reports its received bytes.
    pub(super) copies: Vec<u8>,
}

/// The peer's direction over TCP.
#[derive(Default)]
pub(super) struct Receiving {
    /// Bytes from TCP not yet processed.
    pub(super) input: VecDeque<u8>,
    /// The way of these bytes into the own ring.
    pub(super) records: RecordRecv,
    /// TCP has delivered the peer's FIN, and the machine knows.
    pub(super) ended: bool,
}

impl Change {
    /// The state at the start, on this carrier.
    pub(super) fn new(carrier: &Carrier, role: Role) -> Change {
        Change {
            end: End::on_ring(role, carrier.may_come_back()),
            why: None,
            count: 0,
            told_moved: [0; 2],
            way_back: WayBack::new(role, carrier.may_come_back()),
            sending: Sending {
                // The child of a fork can take over a connection that need not be polled.
                out: RecordQueue::new(!carrier.must_be_polled()),
                blocked: false,
                broken: false,
                closing: false,
                told: StateFlags::empty(),
                copies: Vec::new(),
            },
            receiving: Receiving::default(),
            linger: None,
        }
    }

    /// The carriers of the connection, for reports.
    pub(super) fn report(&self) -> CarrierChanges {
        CarrierChanges {
            now: match &self.end {
                end if end.is_on_ring() => CurrentCarrier::Device,
                end if end.is_on_tcp() => CurrentCarrier::Tcp,
                _ => CurrentCarrier::Leaving,
            },
            count: self.count,
            why: self.why.map(|why| match why {
                ChangeReason::Back => "a device is there again".to_owned(),
                ChangeReason::Own(reason) => reason.name().to_owned(),
                ChangeReason::Peer(reason) => format!("the peer leaves: {}", reason.name()),
            }),
        }
    }

    /// Whether a record of data may be begun.
    pub(super) fn may_send(&self) -> bool {
        let has_room = self.sending.out.is_empty()
            && !self.sending.blocked
            && !self.sending.broken
            && !queues_are_held();
        self.end.outgoing() == Outgoing::Tcp && has_room
    }
}

impl Change {
    /// Whether the own direction waits for a record: RECEIVED, or the first record of a new ring. Such
    /// a record may come behind bytes which the program reads only after its own write.
    pub(super) fn awaits_record(&self) -> bool {
        self.way_back.has_ring() || matches!(self.end.outgoing(), Outgoing::Leaving { .. })
    }

    /// Whether an urgent byte may be sent by TCP. Not when the peer is about to begin a ring: the peer
    /// would begin only after its program has read the byte.
    pub(super) fn may_send_urgent(&self) -> bool {
        self.may_send() && !matches!(self.end.renewal(), Renewal::Confirmed { .. })
    }
}

/// The reason for a change of the carrier: the first end to leave the ring, or a new ring.
#[derive(Clone, Copy, Debug)]
pub(super) enum ChangeReason {
    /// Both ends have come back to a ring.
    Back,
    Own(Reason),
    Peer(Reason),
}

impl ChangeReason {
    /// The reason for leaving the ring on an input, if any.
    fn of(input: &Input) -> Option<ChangeReason> {
        match *input {
            Input::Leave(reason) | Input::RingGone(reason) => Some(ChangeReason::Own(reason)),
            Input::Record(Record::Leave { reason, .. }) => Some(ChangeReason::Peer(reason)),
            _ => None,
        }
    }
}

impl Tx {
    /// Whether bytes of the program can go as a record now: the ring was left, and TCP has room.
    pub(super) fn has_room_on_tcp(&self) -> bool {
        self.queue.is_empty() && self.change.as_ref().is_some_and(|change| change.may_send())
    }

    /// Whether TCP has taken every record.
    pub(super) fn has_no_records(&self) -> bool {
        self.change.as_ref().is_none_or(|change| change.sending.out.is_empty())
    }

    /// Whether TCP was reset, as found by a write. Earlier arrivals are still to be read.
    pub(super) fn is_broken(&self) -> bool {
        self.change.as_ref().is_some_and(|change| change.sending.broken)
    }

    /// Whether the end of the connection waits for TCP to take the last records.
    pub(super) fn is_flushing(&self) -> bool {
        self.change.as_ref().is_some_and(|change| change.sending.closing)
    }

    /// Whether this end was the first to end its direction, with nothing to say on TCP behind its last
    /// record. Then its TCP sends the first FIN, as if TCP had carried the whole stream: the other end
    /// can use its port again at once.
    pub(super) fn ends_tcp_first(&self) -> bool {
        self.ends_first
            && self.change.as_ref().is_some_and(|change| {
                let has_said = change.sending.told.contains(StateFlags::CLOSED);
                let is_settled = change.end.renewal() == Renewal::None && change.end.is_on_tcp();
                has_said && is_settled
            })
    }

    /// Whether the carrier's machine has left the ring, and the connection uses no new one yet.
    pub(super) fn has_left(&self) -> bool {
        self.change.as_ref().is_some_and(|change| {
            change.end.outgoing() != Outgoing::Ring || change.way_back.has_ring()
        })
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
        let Some(change) = &tx.change else { return false };
        let has_more = !tx.queue.is_empty() || !change.sending.out.is_empty();
        tx.has_left() && has_more && !change.end.is_over() && self.tcp.is_open()
    }

    /// Notes whether the process must not end yet although the program has closed the connection.
    pub(super) fn note_unfinished(&self, tx: &mut Tx) {
        let is_unfinished = self.is_unfinished(tx);
        if let Some(change) = &mut tx.change {
            change.sending.out.set_unfinished(is_unfinished);
        }
    }

    /// Whether a connection closed by the program has records left, or sent ones not received by the
    /// peer's kernel. If the process ended now and a record came for it, its kernel would answer by RST
    /// and discard the bytes under way.
    fn is_unfinished(&self, tx: &Tx) -> bool {
        let Some(change) = &tx.change else { return false };
        let is_closed = tx.close.flags().contains(StateFlags::CLOSED)
            && !tx.close.peer_flags().contains(StateFlags::CLOSED);
        is_closed
            && tx.has_left()
            && !change.end.is_over()
            && !change.sending.broken
            && match change.end.outgoing() {
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
        if !tx.has_left() && self.must_leave(&tx) && self.tcp.watch_bytes().is_ok() {
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
        let has_left = |end: &End| end.is_on_tcp() && self.end.reads_tcp();
        let stays = tx.change.as_ref().is_some_and(|c| !has_left(&c.end) && !c.end.is_over());
        let is_over = tx.close.state() == State::Closed
            || tx.close.peer_flags().contains(StateFlags::CLOSED)
            || self.has_failed();
        stays && !is_over && self.may_outlive() && self.tcp.is_open()
    }

    /// Leaves the lost ring, if the connection may continue without it. `true`: the connection
    /// continues.
    pub(super) fn leave(&self, tx: &mut Tx) -> bool {
        if tx.change.is_none()
            || !self.carrier().can_be_left()
            || self.tcp.watch_bytes().is_err()
            || !self.tcp.is_open()
        {
            return false;
        }
        if !tx.has_left() {
            let reason = self.carrier().reason();
            tracing::debug!(peer = %self.carrier(), ?reason, "connection goes on over TCP");
            self.change(tx, Input::Leave(reason), 0);
        }
        true
    }

    /// Gives an input to the machine, and executes its actions, except for the end of the ring for
    /// reads: `Some` is the position at which the caller begins to read from TCP.
    pub(super) fn change(&self, tx: &mut Tx, input: Input, arrived: u64) -> Option<u64> {
        let mut input = input;
        let leaves = ChangeReason::of(&input).filter(|_| !tx.has_left());
        let copies = match leaves.is_some() {
            true => self.copies(tx).unwrap_or_else(|| {
                input = Input::Violated;
                Vec::new()
            }),
            false => Vec::new(),
        };
        let positions = Positions {
            sent: tx.total,
            kept: tx.total.saturating_sub(copies.len() as u64),
            unsent: tx.queue.has_unsent(),
            urgent: self.lost_mark(tx, &copies),
            said: tx.close.flags() & SAID,
            arrived,
        };
        let Some(change) = &mut tx.change else { return None };
        if leaves.is_some() {
            change.why = leaves;
            change.count += 1;
        }
        if !copies.is_empty() {
            change.sending.copies = copies;
        }
        let actions = change.end.on(input, &positions);
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
        let Some(change) = &mut tx.change else { return };
        match action {
            Action::StopRing => {
                self.hold_writes();
                self.carrier().fail();
                if let Ok(on) = self.nodelay() {
                    self.options.keep_nodelay(on);
                }
                self.tcp.watch_room();
            }
            Action::Write(record) => {
                change.sending.out.push(&record.header());
                self.pump_out(tx);
                self.tcp.push();
            }
            Action::SendTcp => {
                change.sending.copies = Vec::new();
                // The peer has every byte written to its ring, or reads the bytes from there.
                change.receiving.records.acknowledge(tx.sender.producer_word().cursor);
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
                change.way_back.begin_wait();
                self.tcp.want_return();
                if self.reactor.is_leaving() {
                    // The device may go.
                    self.reactor.wake_background();
                }
            }
            Action::Propose | Action::Accept | Action::Confirm | Action::Decline => {
                let message = std::mem::take(&mut change.way_back.answer);
                change.sending.out.push(&Record::Clc { len: message.len() as u32 }.header());
                change.sending.out.push(&message);
                self.pump_out(tx);
            }
            Action::Prepare => self.tcp.want_return(),
            Action::DropRing => {
                change.way_back.stay();
                self.tcp.want_return();
                // An urgent byte may have waited for the ring.
                self.flush_held(tx);
            }
            Action::PeerSaid(flags) => {
                change.receiving.records.end(flags);
                self.store_words(tx);
                self.refresh_tx(tx);
            }
            Action::PeerEnded => {
                self.on_peer_flags(tx, StateFlags::CLOSED);
                self.end.fail(Failure::Ended);
            }
            Action::Mark(at) => {
                change.receiving.records.mark(at);
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
        if let Some(change) = &mut tx.change {
            change.sending.out.discard();
            if std::mem::take(&mut change.sending.closing) {
                drop(self.tcp.take());
            }
        }
        if tx.close.peer_flags().contains(StateFlags::CLOSED) {
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
        let Some(change) = &tx.change else { return };
        if let Some(words) = change.receiving.records.words(&self.own_ring()) {
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
        match tx.close.flags().contains(StateFlags::ABORT) {
            true => self.reset_tcp(tx),
            false => {
                let said = tx.close.flags() & SAID;
                let Some(change) = &mut tx.change else { return };
                if std::mem::replace(&mut change.sending.told, said) != said {
                    self.change(tx, Input::Said, 0);
                }
            }
        }
    }

    /// Closes TCP, after its last record.
    pub(super) fn close_tcp(&self, tx: &mut Tx) {
        match &mut tx.change {
            Some(change) if !change.sending.out.is_empty() && self.tcp.is_open() => {
                change.sending.closing = true
            }
            _ => drop(self.tcp.take()),
        }
    }
}
