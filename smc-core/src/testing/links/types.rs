// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The names shared by all parts of the simulation.

use crate::link_group::LinkKey;

/// `Err` names the broken rule.
pub(super) type Check = Result<(), String>;

/// One host's half of a pair of groups. `role` 0 is the server, also called host 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct EndId {
    pub(super) session: usize,
    pub(super) role: usize,
}

impl EndId {
    pub(super) fn peer(self) -> EndId {
        EndId { role: 1 - self.role, ..self }
    }
}

/// One host's half of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct HalfId {
    pub(super) session: usize,
    pub(super) conn: usize,
    pub(super) role: usize,
}

impl HalfId {
    pub(super) fn end(self) -> EndId {
        EndId { session: self.session, role: self.role }
    }

    pub(super) fn peer(self) -> HalfId {
        HalfId { role: 1 - self.role, ..self }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Event {
    Deliver(usize),
    Ack(usize),
    Poll(usize),
    Broken(usize),
    Prepare(EndId, LinkKey),
    Timer(EndId),
    LastWrites(EndId, LinkKey),
    App(HalfId),
    ConnTimer(HalfId),
    Tcp(HalfId),
    LateLlc(usize, usize),
    Open(usize),
    Fault,
    PortNotice(usize, usize, usize),
    PortUp(usize, usize),
    CutEnds(usize, usize),
    NewSession,
}
