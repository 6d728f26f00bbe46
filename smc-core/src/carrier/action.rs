// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What the owner of a connection has to do, and why a connection ends.

use thiserror::Error;

use crate::wire::cdc::StateFlags;
use crate::wire::record::{Kind, Record};

/// What has to be done, in the order in which the actions come.
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
    /// Bytes of the program go as DATA from now on, those first that are held. Copies of what went
    /// before may be dropped.
    SendTcp,
    /// Bytes and words of the own direction go to the new ring from now on.
    SendRing,
    /// Report [`Input::Arrived`](super::Input::Arrived) when the own ring has got its bytes up to
    /// this position, or [`Input::RingGone`](super::Input::RingGone) if it never will.
    Await {
        /// Bytes of the peer's direction.
        to: u64,
    },
    /// The peer's bytes up to this position came by the ring; read them first. If the ring's memory
    /// can go with its device, copy them now, and report
    /// [`Input::Violated`](super::Input::Violated) instead of going on if that fails, because
    /// RECEIVED promises them. What follows comes as DATA. The words in the ring mean nothing any
    /// more.
    ReadTcp {
        /// Position of the next DATA.
        from: u64,
    },
    /// The peer's bytes from this position on are in the new ring, and its words count.
    ReadRing {
        /// Position of the ring's first byte.
        from: u64,
    },
    /// Both directions have left the ring: copy what the program has not read, and let go of it. The
    /// device may go.
    ReleaseRing,
    /// The peer's direction has ended with what has been received: its state flags.
    PeerSaid(StateFlags),
    /// The peer's process has ended, and its direction is complete.
    PeerEnded,
    /// The byte before this position of the peer's direction is urgent.
    Mark(u64),
    /// Send a Proposal for a new ring as CLC record.
    Propose,
    /// Judge the CLC message that has arrived and prepare what it asks for: the Accept of a
    /// Proposal, the Confirm of an Accept, the ring after a Confirm. Report
    /// [`Input::Prepared`](super::Input::Prepared).
    Prepare,
    /// Send the Accept that was prepared.
    Accept,
    /// Send the Confirm that was prepared.
    Confirm,
    /// Send a Decline.
    Decline,
    /// Let go of what was prepared: there will be no new ring this time. The client waits
    /// ([`BackOff`](super::BackOff)).
    DropRing,
    /// Break the TCP connection by RST and report a reset to the program. Nothing follows.
    Reset(Violation),
}

/// Why a connection is reset.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Error)]
#[non_exhaustive]
pub enum Violation {
    /// A record that may not come now.
    #[error("{} came out of turn", .0.name())]
    OutOfTurn(Kind),
    /// A record at a position other than the one that was reached.
    #[error("{} at position {got}, {expected} was reached", kind.name())]
    Position {
        /// The record.
        kind: Kind,
        /// Its position.
        got: u64,
        /// What has been received.
        expected: u64,
    },
    /// The own ring has more bytes than the peer says it has written.
    #[error("the ring has bytes up to {arrived}, LEAVE says {left}")]
    RingBeyondLeave {
        /// Bytes received by the ring.
        arrived: u64,
        /// Position of LEAVE.
        left: u64,
    },
    /// The peer says that it has received more than was sent.
    #[error("RECEIVED says {got}, {sent} were sent")]
    ReceivedBeyondSent {
        /// Position of RECEIVED.
        got: u64,
        /// Bytes sent.
        sent: u64,
    },
    /// The peer has not received bytes of which no copy is here.
    #[error("the peer lacks the bytes from {from} on, copies begin at {kept}")]
    NoCopy {
        /// First byte that the peer lacks.
        from: u64,
        /// First byte of which a copy is here.
        kept: u64,
    },
    /// The record comes before bytes that the peer has to repeat.
    #[error("{} at position {at}, before the peer has repeated its bytes up to {owed}", kind.name())]
    StillOwed {
        /// The record.
        kind: Kind,
        /// Its position.
        at: u64,
        /// Bytes that the peer has counted as sent.
        owed: u64,
    },
    /// Bytes behind the end of the direction, or another end.
    #[error("{} at position {at}, behind the end at {end}", kind.name())]
    BehindEnd {
        /// The record.
        kind: Kind,
        /// Its position.
        at: u64,
        /// Where the direction ended.
        end: u64,
    },
    /// An urgent mark that lies before an earlier one, or beyond the next DATA.
    #[error("urgent mark at {got}, {min} to {max} can be marked")]
    Mark {
        /// The mark.
        got: u64,
        /// Lowest that is allowed.
        min: u64,
        /// Highest that is allowed.
        max: u64,
    },
    /// A CLC message that is not the awaited one.
    #[error("CLC {} came out of turn", .0.name())]
    Message(crate::wire::clc::Kind),
    /// TCP has ended in the middle of a record, or before bytes that were promised.
    #[error("TCP ended at position {at}, before the bytes that the peer has sent")]
    Cut {
        /// Bytes received.
        at: u64,
    },
    /// TCP has ended while the ends had not agreed on what was received.
    #[error("TCP ended while a carrier was being left")]
    EndedInChange,
    /// TCP was reset.
    #[error("TCP was reset")]
    TcpReset,
    /// The owner found that the peer breaks a rule: a bad record, a bad CLC message, bad words.
    #[error("the peer broke the protocol")]
    Protocol,
}
