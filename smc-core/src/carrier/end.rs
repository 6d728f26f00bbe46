// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! One end of a connection: both directions, and the handshake for a new ring.

use super::action::{Action, Violation};
use super::incoming::{Incoming, Reading};
use super::outgoing::Outgoing;
use super::positions::Positions;
use crate::wire::cdc::StateFlags;
use crate::wire::clc;
use crate::wire::record::{Kind, Reason, Record};

/// The role of an end in proposing a new ring: the proposer of the connection is the client.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    /// Proposes.
    Client,
    /// Accepts.
    Server,
}

/// How far the handshake for a new ring is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Renewal {
    /// No negotiation.
    None,
    /// Client: the Proposal was sent.
    Proposed,
    /// Client: Accept has come, and the owner prepares Confirm.
    Confirming,
    /// Client: Confirm was sent, and the server's CHANGE will begin the ring.
    Confirmed {
        /// The ring will be left at once, for this reason.
        leave: Option<Reason>,
    },
    /// Server: a Proposal has come, and the owner prepares Accept.
    Accepting,
    /// Server: Accept was sent.
    Accepted,
    /// Server: Confirm has come, and the owner attaches the client's buffer.
    Attaching,
    /// Server: CHANGE was sent, and the client's will come.
    Changed,
}

/// The state of the TCP connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Tcp {
    Open,
    /// The peer's FIN came.
    Ended,
    /// The FIN came, and its meaning was reported.
    Told,
    /// The connection was reset.
    Over,
}

/// An event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Input {
    /// The own device works and is about to go, or the ring is no longer wanted.
    Leave(Reason),
    /// The own ring is gone: the device, the last link or a peer's buffer is gone, or the time for
    /// a leave is over. The ring's bytes were copied before, up to [`Positions::arrived`], into
    /// permanent memory; no byte beyond will be taken from the ring.
    RingGone(Reason),
    /// Bytes have arrived in the own ring.
    Arrived,
    /// The header of a record has come.
    Record(Record),
    /// The CLC message of a CLC record has come, and is one of this kind.
    Message(clc::Kind),
    /// [`Action::Prepare`] is done. `false`: there will be no new ring.
    Prepared(bool),
    /// A device or link is available, and the time for a return has come.
    Return,
    /// [`Positions::said`] has changed.
    Said,
    /// TCP has delivered the peer's FIN.
    TcpEnded {
        /// The FIN came between two records.
        whole: bool,
    },
    /// TCP was reset.
    TcpReset,
    /// The peer breaks a rule checked elsewhere.
    Violated,
}

/// One end of a connection whose peer speaks records. Plain data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct End {
    role: Role,
    /// Both ends may come back to a ring.
    returns: bool,
    outgoing: Outgoing,
    incoming: Incoming,
    renewal: Renewal,
    tcp: Tcp,
}

impl End {
    /// A connection put on a ring by its handshake. `returns`: both ends have agreed to return
    /// after a leave.
    pub const fn on_ring(role: Role, returns: bool) -> End {
        let incoming = Incoming::new(Reading::Ring);
        let (renewal, tcp) = (Renewal::None, Tcp::Open);
        End { role, returns, outgoing: Outgoing::Ring, incoming, renewal, tcp }
    }

    /// A connection begun on TCP, with records.
    pub const fn on_tcp(role: Role) -> End {
        let incoming = Incoming::new(Reading::Tcp(0));
        let (renewal, tcp) = (Renewal::None, Tcp::Open);
        End { role, returns: true, outgoing: Outgoing::Tcp, incoming, renewal, tcp }
    }

    /// The own direction.
    pub const fn outgoing(&self) -> Outgoing {
        self.outgoing
    }

    /// The peer's direction.
    pub const fn incoming(&self) -> Incoming {
        self.incoming
    }

    /// The handshake for a new ring.
    pub const fn renewal(&self) -> Renewal {
        self.renewal
    }

    /// The role of this end in proposing a new ring.
    pub const fn role(&self) -> Role {
        self.role
    }

    /// Whether both ends have agreed to return after a leave.
    pub const fn returns(&self) -> bool {
        self.returns
    }

    /// Whether the connection was reset.
    pub const fn is_over(&self) -> bool {
        matches!(self.tcp, Tcp::Over)
    }

    /// Whether neither direction uses a ring.
    pub const fn is_on_tcp(&self) -> bool {
        matches!(self.outgoing, Outgoing::Tcp) && matches!(self.incoming.reading(), Reading::Tcp(_))
    }

    /// Whether both directions use a ring, so the end of TCP has the same meaning as without
    /// records.
    pub const fn is_on_ring(&self) -> bool {
        matches!(self.outgoing, Outgoing::Ring) && matches!(self.incoming.reading(), Reading::Ring)
    }

    /// Applies an input; [`End::step`] in place.
    pub fn on(&mut self, input: Input, positions: &Positions) -> Vec<Action> {
        let (next, actions) = self.step(input, positions);
        *self = next;
        actions
    }

    /// The whole machine as a pure function.
    pub fn step(self, input: Input, positions: &Positions) -> (End, Vec<Action>) {
        let (mut next, mut actions) = (self, Vec::new());
        if self.is_over() {
            return (next, actions);
        }
        let result = next.apply(input, positions, &mut actions).and_then(|()| {
            if next.is_on_tcp() && !self.is_on_tcp() {
                actions.push(Action::ReleaseRing);
            }
            next.judge_end(&mut actions)
        });
        if let Err(violation) = result {
            // Earlier actions of this step are dropped.
            return (End { tcp: Tcp::Over, ..self }, vec![Action::Reset(violation)]);
        }
        (next, actions)
    }

    fn apply(
        &mut self,
        input: Input,
        positions: &Positions,
        actions: &mut Vec<Action>,
    ) -> Result<(), Violation> {
        match input {
            Input::Leave(reason) => self.leave(reason, positions, actions),
            Input::RingGone(reason) => {
                let on_tcp = self.is_on_tcp();
                if !on_tcp || matches!(self.renewal, Renewal::Confirmed { .. }) {
                    self.incoming.ring_gone(positions.arrived);
                    self.leave(reason, positions, actions);
                }
                self.incoming.settle(positions.arrived, actions)?;
            }
            Input::Arrived => {
                self.incoming.settle(positions.arrived, actions)?;
            }
            Input::Record(record) => self.record(record, positions, actions)?,
            Input::Message(kind) => self.message(kind, positions, actions)?,
            Input::Prepared(done) => self.prepared(done, positions, actions),
            Input::Return => {
                let may = self.role == Role::Client && self.returns && self.tcp == Tcp::Open;
                let ends = !positions.said.is_empty() || !self.incoming.said().is_empty();
                if may && !ends && self.is_on_tcp() && self.renewal == Renewal::None {
                    self.renewal = Renewal::Proposed;
                    actions.push(Action::Propose);
                }
            }
            Input::Said => {
                self.outgoing.say(positions, actions);
                // The client has sent Confirm, and awaits CHANGE or Decline.
                if self.has_said(positions) && !matches!(self.renewal, Renewal::Confirmed { .. }) {
                    self.drop_renewal(actions);
                }
            }
            Input::TcpEnded { whole: true } if self.tcp == Tcp::Open => self.tcp = Tcp::Ended,
            Input::TcpEnded { whole: true } => {}
            Input::TcpEnded { whole: false } => {
                return Err(Violation::Cut { at: self.incoming.reached() });
            }
            Input::TcpReset => return Err(Violation::TcpReset),
            Input::Violated => return Err(Violation::Protocol),
        }
        Ok(())
    }

    /// Leaves the ring, or the ring about to begin.
    fn leave(&mut self, reason: Reason, positions: &Positions, actions: &mut Vec<Action>) {
        match &mut self.renewal {
            Renewal::Confirmed { leave } => *leave = Some(reason),
            _ => self.outgoing = self.outgoing.leave(reason, positions, actions),
        }
    }

    fn record(
        &mut self,
        record: Record,
        positions: &Positions,
        actions: &mut Vec<Action>,
    ) -> Result<(), Violation> {
        match record {
            Record::Leave { at, more, .. } => {
                self.incoming.left(at, more)?;
                self.leave(Reason::Answer, positions, actions);
                if !self.incoming.settle(positions.arrived, actions)? {
                    actions.push(Action::Await { to: at });
                }
            }
            Record::Received { at } => {
                self.outgoing = self.outgoing.received(at, positions, actions)?;
            }
            Record::Change { at } => self.changed(at, positions, actions)?,
            Record::Data { at, len, more } => self.incoming.data(at, len, more)?,
            Record::End { at, flags } => {
                self.incoming.ended(at, flags, actions)?;
                // A client with Confirm already sent gets an answer.
                if !matches!(self.renewal, Renewal::Attaching | Renewal::Changed) {
                    self.drop_renewal(actions);
                }
            }
            Record::Urgent { at } => self.incoming.marked(at, actions)?,
            Record::Clc { .. } if !self.returns || !self.incoming.said().is_empty() => {
                return Err(Violation::OutOfTurn(Kind::Clc));
            }
            Record::Clc { .. } => {}
        }
        Ok(())
    }

    /// The peer's direction has gone to the new ring.
    fn changed(
        &mut self,
        at: u64,
        positions: &Positions,
        actions: &mut Vec<Action>,
    ) -> Result<(), Violation> {
        match self.renewal {
            Renewal::Changed => self.incoming.changed(at, actions)?,
            Renewal::Confirmed { leave } => {
                self.incoming.changed(at, actions)?;
                self.begin(positions, actions);
                if let Some(reason) = leave {
                    self.outgoing = self.outgoing.leave(reason, positions, actions);
                }
            }
            _ => return Err(Violation::OutOfTurn(Kind::Change)),
        }
        self.renewal = Renewal::None;
        Ok(())
    }

    /// The own direction goes to the new ring.
    fn begin(&mut self, positions: &Positions, actions: &mut Vec<Action>) {
        self.outgoing = Outgoing::Ring;
        let change = Record::Change { at: positions.sent };
        actions.extend([Action::Write(change), Action::SendRing]);
    }

    /// Whether a record has ended the own direction. This end sends no CLC message afterwards: both
    /// processes may end as soon as both directions have ended.
    fn has_said(&self, positions: &Positions) -> bool {
        self.outgoing == Outgoing::Tcp && !positions.said.is_empty()
    }

    /// Ends the handshake for a new ring without an answer; the peer does not await an answer
    /// either.
    fn drop_renewal(&mut self, actions: &mut Vec<Action>) {
        if std::mem::replace(&mut self.renewal, Renewal::None) != Renewal::None {
            actions.push(Action::DropRing);
        }
    }

    fn message(
        &mut self,
        kind: clc::Kind,
        positions: &Positions,
        actions: &mut Vec<Action>,
    ) -> Result<(), Violation> {
        use clc::Kind::{Accept, Confirm, Decline, Proposal};
        if self.renewal == Renewal::None && self.has_said(positions) {
            let may_cross = match self.role {
                Role::Client => matches!(kind, Accept | Decline),
                Role::Server => matches!(kind, Proposal | Confirm | Decline),
            };
            // The peer sent the message before learning of the end.
            return may_cross.then_some(()).ok_or(Violation::Message(kind));
        }
        self.renewal = match (self.role, self.renewal, kind) {
            (Role::Server, Renewal::None, Proposal) if self.is_on_tcp() && self.returns => {
                Renewal::Accepting
            }
            (Role::Client, Renewal::Proposed, Accept) => Renewal::Confirming,
            (Role::Server, Renewal::Accepted, Confirm) => Renewal::Attaching,
            (_, Renewal::Proposed | Renewal::Confirmed { .. } | Renewal::Accepted, Decline) => {
                Renewal::None
            }
            _ => return Err(Violation::Message(kind)),
        };
        let declined = self.renewal == Renewal::None;
        actions.push(if declined { Action::DropRing } else { Action::Prepare });
        Ok(())
    }

    fn prepared(&mut self, done: bool, positions: &Positions, actions: &mut Vec<Action>) {
        let asked =
            matches!(self.renewal, Renewal::Accepting | Renewal::Confirming | Renewal::Attaching);
        if asked && !done {
            self.renewal = Renewal::None;
            actions.extend([Action::Decline, Action::DropRing]);
            return;
        }
        match self.renewal {
            Renewal::Accepting => {
                self.renewal = Renewal::Accepted;
                actions.push(Action::Accept);
            }
            Renewal::Confirming => {
                self.incoming.begin();
                self.renewal = Renewal::Confirmed { leave: None };
                actions.push(Action::Confirm);
            }
            Renewal::Attaching => {
                self.incoming.begin();
                self.renewal = Renewal::Changed;
                self.begin(positions, actions);
            }
            _ => {}
        }
    }

    /// Judges the meaning of the peer's FIN, as soon as known.
    fn judge_end(&mut self, actions: &mut Vec<Action>) -> Result<(), Violation> {
        if self.tcp != Tcp::Ended || self.is_on_ring() {
            return Ok(());
        }
        match (self.outgoing, self.incoming.reading()) {
            (Outgoing::Tcp, Reading::Until(_)) => Ok(()),
            (Outgoing::Tcp, Reading::Tcp(_)) if self.incoming.is_complete() => {
                self.tcp = Tcp::Told;
                self.drop_renewal(actions);
                if !self.incoming.said().contains(StateFlags::CLOSED) {
                    actions.push(Action::PeerEnded);
                }
                Ok(())
            }
            (Outgoing::Tcp, Reading::Tcp(at)) => Err(Violation::Cut { at }),
            _ => Err(Violation::EndedInChange),
        }
    }
}
