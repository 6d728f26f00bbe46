// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The sending direction of an end.

use super::action::{Action, Violation};
use super::positions::Positions;
use crate::wire::record::{Reason, Record};

/// Where the bytes of the own direction go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Outgoing {
    /// Into the peer's ring.
    Ring,
    /// Nowhere: the ring was left, and the peer has not reported its received bytes.
    Leaving {
        /// Bytes before LEAVE.
        at: u64,
        /// Start of the copies here; `at` if there are none.
        kept: u64,
        /// LEAVE announced further bytes.
        more: bool,
    },
    /// On TCP, as DATA.
    Tcp,
}

impl Outgoing {
    /// Whether bytes may be taken from the program and held: only after an announcement of more
    /// bytes to the peer. Otherwise the end of this process would look like the end of the stream,
    /// although the stream was cut.
    pub const fn may_hold(self) -> bool {
        matches!(self, Outgoing::Leaving { more: true, .. })
    }

    /// Leaves the ring; no effect if already left.
    pub(super) fn leave(
        self,
        reason: Reason,
        positions: &Positions,
        actions: &mut Vec<Action>,
    ) -> Outgoing {
        if self != Outgoing::Ring {
            return self;
        }
        let Positions { sent: at, kept, unsent: more, urgent, .. } = *positions;
        actions.extend([Action::StopRing, Action::Write(Record::Leave { at, reason, more })]);
        actions.extend(urgent.map(|at| Action::Write(Record::Urgent { at })));
        Outgoing::Leaving { at, kept: kept.min(at), more }
    }

    /// The peer reports its received bytes.
    pub(super) fn received(
        self,
        got: u64,
        positions: &Positions,
        actions: &mut Vec<Action>,
    ) -> Result<Outgoing, Violation> {
        let Outgoing::Leaving { at, kept, .. } = self else {
            return Err(Violation::OutOfTurn(crate::wire::record::Kind::Received));
        };
        if got > at {
            return Err(Violation::ReceivedBeyondSent { got, sent: at });
        }
        if got < kept {
            return Err(Violation::NoCopy { from: got, kept });
        }
        if got < at {
            actions.push(Action::Repeat { from: got, to: at });
        }
        actions.push(Action::SendTcp);
        Outgoing::Tcp.say(positions, actions);
        Ok(Outgoing::Tcp)
    }

    /// Sends END if the direction has ended and goes by TCP.
    pub(super) fn say(self, positions: &Positions, actions: &mut Vec<Action>) {
        let Positions { sent: at, said: flags, .. } = *positions;
        if self == Outgoing::Tcp && !flags.is_empty() {
            actions.push(Action::Write(Record::End { at, flags }));
        }
    }
}
