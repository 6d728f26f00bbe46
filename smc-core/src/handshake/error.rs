// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The fatal errors of a handshake: protocol errors, silence, and an ended stream.

use core::fmt;

use thiserror::Error;

use super::decline::DeclineReason;
use crate::wire::WireError;
use crate::wire::clc::Kind;
use crate::wire::ids::{Chid, Eid, Gid, Mac, Qpn};

/// The message a side waits for; a Decline may come in its place (CLC-51).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Awaited {
    /// The server waits for the client's Proposal.
    Proposal,
    /// The client waits for the server's Accept.
    Accept,
    /// The server waits for the client's Confirm.
    Confirm,
    /// Nothing more is due; but while the first link of SMC-R comes up, either end watches for a
    /// Decline (ERR-46).
    Decline,
}

impl Awaited {
    /// The message type (CLC-2).
    pub const fn kind(self) -> Kind {
        match self {
            Awaited::Proposal => Kind::Proposal,
            Awaited::Accept => Kind::Accept,
            Awaited::Confirm => Kind::Confirm,
            Awaited::Decline => Kind::Decline,
        }
    }
}

impl fmt::Display for Awaited {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.kind().name())
    }
}

/// The error of a handshake that ended without an agreement to go on as TCP.
///
/// The TCP connection is broken and fallback is forbidden (CLC-54, CLC-55, ERR-8, ERR-9): the two
/// ends may no longer agree which bytes of the stream are messages and which are data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum HandshakeError {
    /// Not a CLC message, most likely application data, or a malformed one (CLC-54, ERR-9).
    #[error("no valid CLC message while waiting for {awaited}: {error}")]
    Malformed {
        /// The awaited message.
        awaited: Awaited,
        /// The error of the parser.
        #[source]
        error: WireError,
    },
    /// A CLC message, out of turn.
    #[error("{} while waiting for {awaited}", got.name())]
    OutOfTurn {
        /// The awaited message.
        awaited: Awaited,
        /// The received message.
        got: Kind,
    },
    /// The stream ended within the message.
    #[error("the connection ended after {received} bytes of the awaited {awaited}")]
    Closed {
        /// The awaited message.
        awaited: Awaited,
        /// Received bytes of the message, at most its length.
        received: usize,
    },
    /// The message did not come in time (ERR-7, ERR-8). A client reports `ETIMEDOUT`, a server
    /// closes.
    #[error("no {awaited} within the time allowed")]
    TimedOut {
        /// The awaited message.
        awaited: Awaited,
    },
    /// Accept names a fabric never offered (CLCV2-64).
    #[error("Accept names CHID {0}, which was not offered")]
    ChidNotOffered(Chid),
    /// Accept names an EID never offered (CLCV2-64, EID-15).
    #[error("Accept names EID {0}, which was not offered")]
    EidNotOffered(Eid),
    /// Confirm does not repeat the fabric of Accept (CLCV2-64).
    #[error("Confirm names CHID {got}, Accept named {accepted}")]
    ConfirmChid {
        /// The CHID of Accept.
        accepted: Chid,
        /// The CHID of Confirm.
        got: Chid,
    },
    /// Confirm does not repeat the EID of Accept (EID-15).
    #[error("Confirm names EID {got}, Accept named {accepted}")]
    ConfirmEid {
        /// The EID of Accept.
        accepted: Eid,
        /// The EID of Confirm.
        got: Eid,
    },
    /// Confirm comes from another GID than was proposed on this fabric (EISM-19, EISM-21).
    #[error("Confirm comes from GID {got}, {proposed} was proposed")]
    ConfirmGid {
        /// The GID of the Proposal.
        proposed: Gid,
        /// The GID of Confirm.
        got: Gid,
    },
    /// The first-contact flags of Accept and Confirm differ (CLCV2-44).
    #[error("first contact is {accepted} in Accept and {got} in Confirm")]
    ConfirmContact {
        /// The flag of Accept.
        accepted: bool,
        /// The flag of Confirm.
        got: bool,
    },
    /// Confirm of a subsequent contact names no active link of the group (CLC-46, CLC-64).
    #[error("Confirm names queue pair {} of GID {gid}, which is no link of the group", qpn.get())]
    ConfirmLink {
        /// The GID of Confirm.
        gid: Gid,
        /// The queue pair of Confirm.
        qpn: Qpn,
    },
    /// Confirm comes from another MAC than was proposed, on a direct link (CLCV2-55).
    #[error("Confirm comes from MAC {got}, {proposed} was proposed")]
    ConfirmMac {
        /// The MAC of the Proposal.
        proposed: Mac,
        /// The MAC of Confirm.
        got: Mac,
    },
    /// Something to decline, but no Decline is allowed any more: the answer of a subsequent contact
    /// over SMC-R (CLC-53).
    #[error("too late to decline: {0}")]
    TooLate(DeclineReason),
    /// Confirm is of another type or version of SMC than Accept (CLCV2-1).
    #[error("Confirm is not of the SMC type of Accept")]
    ConfirmType,
}

impl HandshakeError {
    /// Whether silence was the cause: `ETIMEDOUT` for the application instead of `EPROTO`.
    pub const fn is_timeout(&self) -> bool {
        matches!(self, HandshakeError::TimedOut { .. })
    }
}
