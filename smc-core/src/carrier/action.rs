// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The actions of a connection's owner, and the reasons for the end of a connection.

use thiserror::Error;

use crate::wire::cdc::StateFlags;
use crate::wire::record::{Kind, Record};

/// An action, to be carried out in the given order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Action {
    /// Write neither bytes nor words to the peer's ring from now on, and take no bytes from the
    /// program until [`Action::SendTcp`] (see [`Outgoing::may_hold`](super::Outgoing::may_hold)).
    StopRing,
    /// Write this record; none of these has a body.
    Write(Record),
    /// Write the bytes from position `from` to `to` as DATA: the peer has not received them, and
    /// copies of them are here ([`Positions::kept`](super::Positions::kept)).
    Repeat {
        /// First byte.
        from: u64,
        /// One beyond the last.
        to: u64,
    },
    /// Bytes of the program go as DATA from now on, held ones first. Copies of earlier bytes may be
    /// dropped.
    SendTcp,
    /// Bytes and words of the own direction go to the new ring from now on.
    SendRing,
    /// Report [`Input::Arrived`](super::Input::Arrived) when the own ring has got its bytes up to
    /// this position, or [`Input::RingGone`](super::Input::RingGone) if the rest will never arrive.
    Await {
        /// Bytes of the peer's direction.
        to: u64,
    },
    /// The peer's bytes up to this position came by the ring; read them first. If the ring's memory
    /// can vanish with its device, copy the bytes now; after a failed copy report
    /// [`Input::Violated`](super::Input::Violated) instead of going on, because RECEIVED promises
    /// the bytes. Later bytes come as DATA. The words in the ring have no meaning any more.
    ReadTcp {
        /// Position of the next DATA.
        from: u64,
    },
    /// The peer's bytes from this position on are in the new ring, and its words count.
    ReadRing {
        /// Position of the ring's first byte.
        from: u64,
    },
    /// Both directions have left the ring: copy the program's unread bytes, and release the ring.
    /// The device may go.
    ReleaseRing,
    /// The peer's direction has ended with the bytes received: its state flags.
    PeerSaid(StateFlags),
    /// The peer's process has ended, and its direction is complete.
    PeerEnded,
    /// The byte before this position of the peer's direction is urgent.
    Mark(u64),
    /// Send a Proposal for a new ring as CLC record.
    Propose,
    /// Judge the received CLC message and prepare the answer: the Accept of a Proposal, the Confirm
    /// of an Accept, the ring after a Confirm. Report [`Input::Prepared`](super::Input::Prepared).
    Prepare,
    /// Send the prepared Accept.
    Accept,
    /// Send the prepared Confirm.
    Confirm,
    /// Send a Decline.
    Decline,
    /// Release the prepared ring: there will be no new ring this time. The client waits
    /// ([`BackOff`](super::BackOff)).
    DropRing,
    /// Break the TCP connection by RST and report a reset to the program. Nothing follows.
    Reset(Violation),
}

/// Why a connection is reset.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Error)]
#[non_exhaustive]
pub enum Violation {
    /// A record at the wrong time.
    #[error("{} came out of turn", .0.name())]
    OutOfTurn(Kind),
    /// A record at a position other than the present one.
    #[error("{} at position {got}, {expected} was reached", kind.name())]
    Position {
        /// The record.
        kind: Kind,
        /// Position of the record.
        got: u64,
        /// Position reached by the received bytes.
        expected: u64,
    },
    /// The own ring has more bytes than the peer reports as written.
    #[error("the ring has bytes up to {arrived}, LEAVE says {left}")]
    RingBeyondLeave {
        /// Bytes received by the ring.
        arrived: u64,
        /// Position of LEAVE.
        left: u64,
    },
    /// The peer reports more received bytes than were sent.
    #[error("RECEIVED says {got}, {sent} were sent")]
    ReceivedBeyondSent {
        /// Position of RECEIVED.
        got: u64,
        /// Bytes sent.
        sent: u64,
    },
    /// The peer lacks bytes without a copy here.
    #[error("the peer lacks the bytes from {from} on, copies begin at {kept}")]
    NoCopy {
        /// First byte missing at the peer.
        from: u64,
        /// First byte with a copy here.
        kept: u64,
    },
    /// The record comes before the peer has repeated its bytes.
    #[error("{} at position {at}, before the peer has repeated its bytes up to {owed}", kind.name())]
    StillOwed {
        /// The record.
        kind: Kind,
        /// Position of the record.
        at: u64,
        /// Bytes counted as sent by the peer.
        owed: u64,
    },
    /// Bytes behind the end of the direction, or another end.
    #[error("{} at position {at}, behind the end at {end}", kind.name())]
    BehindEnd {
        /// The record.
        kind: Kind,
        /// Position of the record.
        at: u64,
        /// End of the direction.
        end: u64,
    },
    /// An urgent mark before an earlier one, or beyond the next DATA.
    #[error("urgent mark at {got}, {min} to {max} can be marked")]
    Mark {
        /// The mark.
        got: u64,
        /// Lowest allowed mark.
        min: u64,
        /// Highest allowed mark.
        max: u64,
    },
    /// A CLC message other than the awaited one.
    #[error("CLC {} came out of turn", .0.name())]
    Message(crate::wire::clc::Kind),
    /// TCP has ended within a record, or before promised bytes.
    #[error("TCP ended at position {at}, before the bytes that the peer has sent")]
    Cut {
        /// Bytes received.
        at: u64,
    },
    /// TCP has ended without an agreement of the ends on the received bytes.
    #[error("TCP ended while a carrier was being left")]
    EndedInChange,
    /// TCP was reset.
    #[error("TCP was reset")]
    TcpReset,
    /// A violation found by the owner: a bad record, a bad CLC message, bad words.
    #[error("the peer broke the protocol")]
    Protocol,
}
