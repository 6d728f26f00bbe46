// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The sending half of a connection.

use super::places::{cursor_at, distance};
use crate::carrier::{Action, End, Input, Outgoing, Positions, Renewal, Role};
use crate::connection::{Actions, Close, CursorError, Event, Sender, State};
use crate::wire::Cursor;
use crate::wire::cdc::{ConsumerWord, ProducerFlags, StateFlags};
use crate::wire::record::{Reason, Record};

/// Bytes of a long write between two updates of the producer cursor. Updates cost little at this
/// size, and the peer can read one part while this end writes the next.
pub const CHUNK: u32 = 64 << 10;

/// State flags reported by records.
const SAID: StateFlags = StateFlags::SENDING_DONE.union(StateFlags::CLOSED);

/// The way of the program's bytes to the peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SendPath {
    /// Into the peer's ring.
    Ring,
    /// Nowhere: between two carriers.
    Leaving(Leaving),
    /// By DATA records.
    Tcp,
}

/// The end of the pause between two carriers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Leaving {
    /// The carrier has failed. Its owner decides between a reset and TCP.
    Verdict,
    /// The ring was left. The peer's RECEIVED opens TCP.
    Received,
    /// TCP was left. The peer's CHANGE opens the new ring.
    Change,
}

/// The next task with bytes of the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transmit {
    /// Store so many bytes into the peer's ring. `more`: others of the same write follow.
    Ring {
        /// Number of bytes.
        bytes: u32,
        /// Bytes of the write remain.
        more: bool,
    },
    /// Write the bytes to TCP as one record, behind the bytes of the send queue.
    Record,
    /// Nothing goes now: the send queue takes the bytes, or the writer waits.
    Hold,
}

/// Why this end writes no more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WriteError {
    /// TCP was reset, as found by a write.
    Reset,
    /// One of the ends has closed the direction.
    Closed,
}

/// The reason for a change of the carrier: the first end to leave the ring, or a new ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SwitchReason {
    /// Both ends have come back to a ring.
    Back,
    /// This end has left first.
    Own(Reason),
    /// The peer has left first.
    Peer(Reason),
}

impl SwitchReason {
    /// The reason for leaving the ring on an input, if any.
    const fn of(input: &Input) -> Option<SwitchReason> {
        match *input {
            Input::Leave(reason) | Input::RingGone(reason) => Some(SwitchReason::Own(reason)),
            Input::Record(Record::Leave { reason, .. }) => Some(SwitchReason::Peer(reason)),
            _ => None,
        }
    }
}

/// The state of the TCP connection as a carrier of records. The owner has the queued records.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RecordSend {
    /// TCP has no room. The owner awaits an event.
    pub blocked: bool,
    /// TCP takes nothing more. Bytes already received come before its end.
    pub broken: bool,
    /// TCP is closed behind the last record.
    pub closing: bool,
}

/// The owner's part of [`Positions`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OwnerState {
    /// Number of the last bytes of the ring with copies here.
    pub copies: u64,
    /// Deliveries to this carrier may be lost, while copies are kept.
    pub keeps_copies: bool,
    /// Bytes wait in the send queue.
    pub unsent: bool,
    /// Bytes of the peer's direction received by the own ring.
    pub arrived: u64,
}

/// The own direction, and the carrier of both.
#[derive(Clone, Copy, Debug)]
pub struct SendHalf {
    /// Cursors and flags of the peer's ring.
    pub sender: Sender,
    /// The end of the connection.
    pub close: Close,
    /// TCP as a carrier.
    pub records: RecordSend,
    path: SendPath,
    carrier: End,
    published: StateFlags,
    producer: u64,
    seen: u64,
    ends_first: bool,
    total: u64,
    base: u64,
    deliveries: u64,
    /// State flags known to the carrier's machine.
    said: StateFlags,
    /// Bytes reported as sent, and as acknowledged.
    reported: [u64; 2],
    switches: (u32, Option<SwitchReason>),
}

impl SendHalf {
    /// The half of an established connection on a ring. `role`: whether this end has proposed the
    /// connection. `returns`: both ends have agreed to come back to a ring after a leave.
    pub fn new(sender: Sender, role: Role, returns: bool) -> SendHalf {
        let mut close = Close::new();
        close.on(Event::Established, false);
        SendHalf {
            close,
            records: RecordSend::default(),
            path: SendPath::Ring,
            carrier: End::on_ring(role, returns),
            published: StateFlags::empty(),
            producer: sender.producer_word().to_u64(),
            seen: first_word(&sender),
            sender,
            ends_first: false,
            total: 0,
            base: 0,
            deliveries: 0,
            said: StateFlags::empty(),
            reported: [0; 2],
            switches: (0, None),
        }
    }

    /// The way of the program's bytes.
    #[inline]
    pub const fn path(&self) -> SendPath {
        self.path
    }

    /// The machine of both directions.
    pub const fn carrier(&self) -> &End {
        &self.carrier
    }

    /// Whether the carrier's machine has left the ring, and the connection uses no new one yet.
    pub const fn has_left(&self) -> bool {
        !matches!(self.path, SendPath::Ring | SendPath::Leaving(Leaving::Verdict))
    }

    /// Whether the own direction waits for a record of the peer between two carriers.
    pub const fn awaits_record(&self) -> bool {
        matches!(self.path, SendPath::Leaving(Leaving::Received | Leaving::Change))
    }

    /// Whether a record of data may be begun, if TCP has taken all earlier ones.
    pub fn may_send_record(&self) -> bool {
        self.path == SendPath::Tcp && !self.records.blocked && !self.records.broken
    }

    /// Whether an urgent byte may go by TCP. Not when the peer is about to begin a ring: the peer
    /// would begin only after its program has read the byte.
    pub fn may_send_urgent_record(&self) -> bool {
        let is_confirmed = matches!(self.carrier.renewal(), Renewal::Confirmed { .. });
        self.may_send_record() && !is_confirmed
    }

    /// Fails if this end writes no more.
    ///
    /// # Errors
    /// The reason.
    #[inline]
    pub const fn may_write(&self) -> Result<(), WriteError> {
        match (self.records.broken, self.close.can_write()) {
            (true, _) => Err(WriteError::Reset),
            (false, true) => Ok(()),
            (false, false) => Err(WriteError::Closed),
        }
    }

    /// The task with the next of `left` bytes of a write. `has_room`: the queue is empty, and TCP
    /// has taken every record.
    #[inline]
    pub fn next(&self, left: usize, has_room: impl FnOnce() -> bool) -> Transmit {
        match self.path {
            SendPath::Ring => {
                let bytes = self.sender.space().min(chunk(left));
                match bytes {
                    0 => Transmit::Hold,
                    bytes => Transmit::Ring { bytes, more: left > bytes as usize },
                }
            }
            SendPath::Tcp if self.may_send_record() && has_room() => Transmit::Record,
            SendPath::Tcp | SendPath::Leaving(_) => Transmit::Hold,
        }
    }

    /// Whether the ring lacks room for the next part of a write, as far as known here.
    #[inline]
    pub fn is_short_of(&self, left: usize) -> bool {
        self.path == SendPath::Ring && self.sender.space() < chunk(left)
    }

    /// Number of bytes sent.
    #[inline]
    pub const fn total(&self) -> u64 {
        self.total
    }

    /// Number of sends.
    pub const fn deliveries(&self) -> u64 {
        self.deliveries
    }

    /// Bytes were given to the carrier.
    #[inline]
    pub fn count(&mut self, bytes: u32) {
        self.total += u64::from(bytes);
        self.deliveries += 1;
    }

    /// The carrier has not taken these bytes after all.
    pub fn uncount(&mut self, bytes: u64) {
        self.total -= bytes;
    }

    /// The peer's consumer word at the last refresh.
    #[inline]
    pub const fn seen(&self) -> u64 {
        self.seen
    }

    /// Takes the peer's consumer word. `moved`: the peer has changed to another link.
    ///
    /// # Errors
    /// An impossible cursor: a lying peer, or memory that went with its device.
    pub fn take(&mut self, word: ConsumerWord, moved: bool) -> Result<(), CursorError> {
        self.seen = word.to_u64();
        if moved {
            self.sender.peer_moved();
        }
        self.sender.on_peer_consumer(word.cursor).map(|_| ())
    }

    /// The control words to send. `consumed`: the read position of the program.
    #[inline]
    pub fn words(&self, consumed: Cursor, flags: ProducerFlags, state: StateFlags) -> [u64; 2] {
        let consumer = ConsumerWord { cursor: consumed, producer_flags: flags, state_flags: state };
        [self.sender.producer_word().to_u64(), consumer.to_u64()]
    }

    /// The words to send ahead of urgent data: the last producer word, with new flags.
    pub fn words_ahead(&self, consumed: Cursor, flags: ProducerFlags) -> [u64; 2] {
        let [_, consumer] = self.words(consumed, flags, self.published);
        [self.producer, consumer]
    }

    /// These words were sent.
    #[inline]
    pub fn on_published(&mut self, producer: u64) {
        self.sender.on_published();
        self.producer = producer;
        self.published = self.close.flags();
    }

    /// An event of the end. `unsent`: bytes wait in the send queue.
    pub fn end(&mut self, event: Event, unsent: bool) -> Actions {
        self.close.on(event, unsent)
    }

    /// The state flags of the own direction, announced or held back by queued bytes.
    pub fn own_flags(&self) -> StateFlags {
        self.close.flags() | self.close.pending()
    }

    /// Whether the program has closed the connection.
    pub fn is_closed(&self) -> bool {
        self.own_flags().contains(StateFlags::CLOSED) || self.close.state() == State::Closed
    }

    /// The program ends its direction: notes whether this end is the first of the two.
    pub fn note_first(&mut self) {
        let has_said = self.own_flags().intersects(SAID);
        self.ends_first |= !has_said && !self.close.peer_done();
    }

    /// Whether the program has ended its direction before the peer.
    pub const fn ends_first(&self) -> bool {
        self.ends_first
    }

    /// Whether this end was the first to end its direction, with nothing to say on TCP behind its
    /// last record. Then its TCP sends the first FIN, as if TCP had carried the whole stream: the
    /// other end can use its port again at once.
    pub fn ends_tcp_first(&self) -> bool {
        let has_said = self.said.contains(StateFlags::CLOSED);
        let is_settled = self.carrier.renewal() == Renewal::None && self.carrier.is_on_tcp();
        self.ends_first && has_said && is_settled
    }

    /// Nothing goes into the ring until the next carrier is known.
    pub fn stop(&mut self) {
        if self.path == SendPath::Ring {
            self.path = SendPath::Leaving(Leaving::Verdict);
        }
    }

    /// The cursor behind the last byte of the ring, and the number of bytes possibly unread.
    pub fn unread(&self) -> (Cursor, u32) {
        let ring = self.sender.ring();
        let end = cursor_at(self.total - self.base, ring);
        (end, distance(self.sender.consumed(), end, ring).unwrap_or(0))
    }

    /// Whether the input makes this end leave its ring: the owner fetches its copies first.
    pub const fn leaves(&self, input: &Input) -> bool {
        !self.has_left() && SwitchReason::of(input).is_some()
    }

    /// Gives an input to the carrier's machine. The owner carries the actions out; the path has
    /// followed them already.
    pub fn change(&mut self, input: Input, owner: &OwnerState) -> Vec<Action> {
        if let Some(reason) = SwitchReason::of(&input).filter(|_| !self.has_left()) {
            self.switches = (self.switches.0 + 1, Some(reason));
        }
        let positions = Positions {
            sent: self.total,
            kept: self.total.saturating_sub(owner.copies),
            unsent: owner.unsent,
            urgent: self.lost_mark(owner),
            said: self.close.flags() & SAID,
            arrived: owner.arrived,
        };
        let actions = self.carrier.on(input, &positions);
        for action in &actions {
            self.path = match action {
                Action::StopRing => SendPath::Leaving(Leaving::Received),
                Action::SendTcp => SendPath::Tcp,
                Action::SendRing => SendPath::Leaving(Leaving::Change),
                _ => continue,
            };
        }
        actions
    }

    /// The delivered urgent mark, if possibly not arrived (only bytes with copies can be lost).
    /// Nothing was written behind the byte, unless the peer has read it.
    fn lost_mark(&self, owner: &OwnerState) -> Option<u64> {
        let has_copies = owner.keeps_copies || owner.copies > 0;
        let may_be_lost = has_copies && self.sender.urgent_unread();
        // The sender counts the bytes of a failed delivery, too.
        let end = cursor_at(self.total - self.base, self.sender.ring());
        (may_be_lost && self.sender.cursor() == end).then_some(self.total)
    }

    /// Notes the flags of the own direction for a record. `true`: the machine does not know them.
    pub fn note_said(&mut self) -> bool {
        let said = self.close.flags() & SAID;
        std::mem::replace(&mut self.said, said) != said
    }

    /// Begins a new ring, with this sender. `false`: the ring is left at once, and its bytes wait.
    pub fn begin_ring(&mut self, new: Sender) -> bool {
        self.sender = self.sender.renew(new);
        self.seen = first_word(&self.sender);
        self.producer = self.sender.producer_word().to_u64();
        self.published = StateFlags::empty();
        self.said = StateFlags::empty();
        self.base = self.total;
        self.switches = (self.switches.0 + 1, Some(SwitchReason::Back));
        let writes = self.carrier.outgoing() == Outgoing::Ring;
        if writes {
            self.path = SendPath::Ring;
        }
        writes
    }

    /// Number of changes of the carrier, and the reason for the last one.
    pub const fn switches(&self) -> (u32, Option<SwitchReason>) {
        self.switches
    }

    /// The numbers of bytes sent and acknowledged, as reported to programs: neither ever decreases.
    pub fn report(&mut self, sent: u64, acknowledged: u64) -> [u64; 2] {
        let [last_sent, last_acknowledged] = self.reported;
        let acknowledged = acknowledged.max(last_acknowledged);
        self.reported = [sent.max(last_sent).max(acknowledged), acknowledged];
        self.reported
    }
}

/// The peer's consumer word before its first read.
fn first_word(sender: &Sender) -> u64 {
    ConsumerWord { cursor: sender.ring().start(), ..Default::default() }.to_u64()
}

#[inline]
fn chunk(left: usize) -> u32 {
    u32::try_from(left).unwrap_or(u32::MAX).min(CHUNK)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::connection::Ring;
    use crate::wire::clc::Kind::{Accept, Confirm, Proposal};

    fn half(role: Role) -> SendHalf {
        SendHalf::new(Sender::new(Ring::smcr(20).unwrap()), role, true)
    }

    fn write(half: &mut SendHalf, bytes: u32) {
        let taken = half.sender.advance(bytes, false);
        half.count(taken);
    }

    /// A half with three bytes in a ring that it has left.
    fn left(role: Role) -> SendHalf {
        let mut half = half(role);
        write(&mut half, 3);
        half.change(Input::Leave(Reason::DeviceLeaves), &OwnerState::default());
        half
    }

    /// The same after the peer's RECEIVED and LEAVE.
    fn on_tcp(role: Role) -> SendHalf {
        let mut half = left(role);
        let owner = OwnerState::default();
        half.change(Input::Record(Record::Received { at: 3 }), &owner);
        let leave = Record::Leave { at: 0, reason: Reason::Answer, more: false };
        half.change(Input::Record(leave), &owner);
        assert!(half.carrier().is_on_tcp());
        half
    }

    #[test]
    fn each_path_takes_bytes_or_holds_them() {
        let mut half = half(Role::Client);
        let ring = |bytes, more| Transmit::Ring { bytes, more };
        assert_eq!(half.next(5, || false), ring(5, false));
        assert_eq!(half.next(20, || false), ring(16, true));
        assert!(half.is_short_of(20) && !half.is_short_of(16));
        write(&mut half, 16);
        assert_eq!(half.next(1, || true), Transmit::Hold, "the ring is full");
        half.stop();
        assert_eq!(half.path(), SendPath::Leaving(Leaving::Verdict));
        assert!(!half.has_left() && !half.awaits_record() && !half.is_short_of(1));
        assert_eq!(half.next(1, || true), Transmit::Hold);

        let half = left(Role::Client);
        assert_eq!(half.path(), SendPath::Leaving(Leaving::Received));
        assert!(half.has_left() && half.awaits_record());
        assert_eq!(half.next(1, || true), Transmit::Hold);

        let mut half = on_tcp(Role::Client);
        assert_eq!(half.path(), SendPath::Tcp);
        assert_eq!(half.next(1, || true), Transmit::Record);
        assert_eq!(half.next(1, || false), Transmit::Hold, "records wait");
        half.records.blocked = true;
        assert_eq!(half.next(1, || true), Transmit::Hold);
        half.records = RecordSend { broken: true, ..RecordSend::default() };
        assert_eq!(half.may_write(), Err(WriteError::Reset));
        assert_eq!(half.next(1, || true), Transmit::Hold);
    }

    #[test]
    fn a_failed_carrier_is_left_after_the_verdict_and_counted_once() {
        let mut half = half(Role::Server);
        half.stop();
        let gone = Input::RingGone(Reason::DeviceGone);
        assert!(half.leaves(&gone) && !half.leaves(&Input::Arrived));
        half.change(gone, &OwnerState::default());
        assert!(!half.leaves(&gone));
        half.change(gone, &OwnerState::default());
        assert_eq!(half.switches(), (1, Some(SwitchReason::Own(Reason::DeviceGone))));
        half.stop();
        assert_eq!(half.path(), SendPath::Leaving(Leaving::Received), "a stop changes nothing");
    }

    #[test]
    fn a_server_holds_bytes_between_its_change_and_the_clients() {
        let mut half = on_tcp(Role::Server);
        let owner = OwnerState::default();
        half.change(Input::Message(Proposal), &owner);
        half.change(Input::Prepared(true), &owner);
        half.change(Input::Message(Confirm), &owner);
        assert_eq!(half.next(1, || true), Transmit::Record);
        half.change(Input::Prepared(true), &owner);
        assert_eq!(half.path(), SendPath::Leaving(Leaving::Change));
        assert!(half.has_left() && half.awaits_record());
        assert_eq!(half.next(1, || true), Transmit::Hold);
        half.change(Input::Record(Record::Change { at: 0 }), &owner);
        assert!(half.begin_ring(Sender::new(Ring::smcr(36).unwrap())));
        assert_eq!(half.next(99, || false), Transmit::Ring { bytes: 32, more: true });
        assert_eq!(half.switches(), (2, Some(SwitchReason::Back)));
        assert_eq!((half.total(), half.unread().1), (3, 0));
    }

    #[test]
    fn a_client_sends_records_up_to_the_servers_change_and_no_urgent_ones() {
        let mut half = on_tcp(Role::Client);
        let owner = OwnerState::default();
        half.change(Input::Return, &owner);
        half.change(Input::Message(Accept), &owner);
        half.change(Input::Prepared(true), &owner);
        assert_eq!(half.next(1, || true), Transmit::Record);
        assert!(half.may_send_record() && !half.may_send_urgent_record());
        // The device of the new ring goes before the ring begins.
        half.change(Input::RingGone(Reason::DeviceGone), &owner);
        half.change(Input::Record(Record::Change { at: 0 }), &owner);
        assert!(!half.begin_ring(Sender::new(Ring::smcr(20).unwrap())));
        assert_eq!(half.path(), SendPath::Leaving(Leaving::Received));
    }

    #[test]
    fn an_urgent_byte_possibly_lost_is_marked_behind_leave() {
        let marks = |owner: OwnerState| {
            let mut half = half(Role::Client);
            let taken = half.sender.advance_urgent(1);
            half.count(taken);
            let actions = half.change(Input::Leave(Reason::LinksGone), &owner);
            actions.contains(&Action::Write(Record::Urgent { at: 1 }))
        };
        assert!(!marks(OwnerState::default()), "memory of both ends has the mark");
        assert!(marks(OwnerState { keeps_copies: true, ..OwnerState::default() }));
        assert!(marks(OwnerState { copies: 1, ..OwnerState::default() }));
    }

    #[test]
    fn the_first_end_is_noted_and_said_once() {
        let mut half = on_tcp(Role::Client);
        half.note_first();
        half.end(Event::Close { unread: false }, false);
        assert!(half.is_closed() && half.note_said() && !half.note_said());
        assert!(half.ends_first() && half.ends_tcp_first());
        let mut second = on_tcp(Role::Client);
        second.end(Event::Peer { flags: StateFlags::SENDING_DONE }, false);
        second.note_first();
        assert!(!second.ends_first());
        assert_eq!(half.may_write(), Err(WriteError::Closed));
    }

    #[test]
    fn reported_numbers_of_bytes_never_decrease() {
        let mut half = half(Role::Client);
        assert_eq!(half.report(5, 3), [5, 3]);
        assert_eq!(half.report(4, 4), [5, 4]);
        assert_eq!(half.report(2, 9), [9, 9]);
    }
}
