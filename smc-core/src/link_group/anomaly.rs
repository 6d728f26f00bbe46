// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Odd messages. Other code sees only the name and the counter of each kind.

use thiserror::Error;

use crate::wire::WireError;
use crate::wire::clc::Version;

use super::LinkKey;

/// An odd message. The group has handled the message already; the value is for logs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum Anomaly {
    /// Not an LLC message but one of connection data (LLC-9): the caller's affair.
    #[error("first byte {0:#04x} is not LLC")]
    NotLlc(u8),
    /// Unknown, and meant to be dropped then (LLC-8).
    #[error("optional LLC type {0:#04x} is not known")]
    Optional(u8),
    /// Cannot be parsed; the link is down (LLC-7, LLC-76, LLCV2-42, ERR-43).
    #[error("LLC message cannot be parsed: {0}")]
    Malformed(WireError),
    /// Of the other LLC version; the link is down (LLCV2-2).
    #[error("LLC message of version {0:?} in a group of the other")]
    WrongVersion(Version),
    /// A request sent to the wrong role; the link is down (LLCV2-9).
    #[error("{0} is not for this end")]
    WrongRole(&'static str),
    /// On an unknown link, or a link given up (ERR-37).
    #[error("message on link {0:?}, which is gone")]
    DeadLink(LinkKey),
    /// The group is over.
    #[error("message after the end of the group")]
    GroupOver,
    /// A reply without a request under way: late, or sent twice.
    #[error("unexpected reply: {0}")]
    UnexpectedReply(&'static str),
    /// A repeated request.
    #[error("{0} again")]
    Repeated(&'static str),
    /// A request at the wrong time, dropped.
    #[error("{0} at the wrong time")]
    WrongTime(&'static str),
    /// Confirm Link with a wrong description of its link (ERR-35).
    #[error("Confirm Link with a wrong {0}")]
    WrongConfirmLink(&'static str),
    /// Add Link or its reply with an unacceptable field (ERR-36).
    #[error("Add Link with a wrong {0}")]
    WrongAddLink(&'static str),
    /// Counts of continuations contradict each other (ERR-38).
    #[error("{left} entries left where {expected} are")]
    WrongCount {
        /// The stated number.
        left: u8,
        /// The number resulting from the message before.
        expected: u8,
    },
    /// A reference to an unknown RKey (LLC-31, LLC-55).
    #[error("RKey is not known")]
    UnknownRkey,
    /// An unknown link number (ERR-39, ERR-40).
    #[error("link number {0} is not known")]
    UnknownLink(u8),
    /// Confirm RKey without a key for a link; the link is down (ERR-41).
    #[error("no key for link number {0}")]
    KeyMissing(u8),
    /// More RMBs than a peer may have (LG-52).
    #[error("peer has too many RMBs")]
    TooManyRmbs,
    /// Test Link came back with other data; the link is down (ERR-42).
    #[error("Test Link came back with other data")]
    WrongEcho,
    /// More of them on one link than any honest peer sends; the link is down.
    #[error("too many anomalies_in_a_row messages on one link")]
    TooMany,
}

/// An [`Anomaly`] without its value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[allow(missing_docs, reason = "the names are those of Anomaly")]
pub enum AnomalyKind {
    NotLlc,
    Optional,
    Malformed,
    WrongVersion,
    WrongRole,
    DeadLink,
    GroupOver,
    UnexpectedReply,
    Repeated,
    WrongTime,
    WrongConfirmLink,
    WrongAddLink,
    WrongCount,
    UnknownRkey,
    UnknownLink,
    KeyMissing,
    TooManyRmbs,
    WrongEcho,
    TooMany,
}

/// How many kinds there are.
const KINDS: usize = AnomalyKind::ALL.len();

impl AnomalyKind {
    /// Every kind.
    pub const ALL: [AnomalyKind; 19] = [
        AnomalyKind::NotLlc,
        AnomalyKind::Optional,
        AnomalyKind::Malformed,
        AnomalyKind::WrongVersion,
        AnomalyKind::WrongRole,
        AnomalyKind::DeadLink,
        AnomalyKind::GroupOver,
        AnomalyKind::UnexpectedReply,
        AnomalyKind::Repeated,
        AnomalyKind::WrongTime,
        AnomalyKind::WrongConfirmLink,
        AnomalyKind::WrongAddLink,
        AnomalyKind::WrongCount,
        AnomalyKind::UnknownRkey,
        AnomalyKind::UnknownLink,
        AnomalyKind::KeyMissing,
        AnomalyKind::TooManyRmbs,
        AnomalyKind::WrongEcho,
        AnomalyKind::TooMany,
    ];
}

impl Anomaly {
    /// The kind of the anomaly.
    pub const fn kind(&self) -> AnomalyKind {
        match self {
            Anomaly::NotLlc(_) => AnomalyKind::NotLlc,
            Anomaly::Optional(_) => AnomalyKind::Optional,
            Anomaly::Malformed(_) => AnomalyKind::Malformed,
            Anomaly::WrongVersion(_) => AnomalyKind::WrongVersion,
            Anomaly::WrongRole(_) => AnomalyKind::WrongRole,
            Anomaly::DeadLink(_) => AnomalyKind::DeadLink,
            Anomaly::GroupOver => AnomalyKind::GroupOver,
            Anomaly::UnexpectedReply(_) => AnomalyKind::UnexpectedReply,
            Anomaly::Repeated(_) => AnomalyKind::Repeated,
            Anomaly::WrongTime(_) => AnomalyKind::WrongTime,
            Anomaly::WrongConfirmLink(_) => AnomalyKind::WrongConfirmLink,
            Anomaly::WrongAddLink(_) => AnomalyKind::WrongAddLink,
            Anomaly::WrongCount { .. } => AnomalyKind::WrongCount,
            Anomaly::UnknownRkey => AnomalyKind::UnknownRkey,
            Anomaly::UnknownLink(_) => AnomalyKind::UnknownLink,
            Anomaly::KeyMissing(_) => AnomalyKind::KeyMissing,
            Anomaly::TooManyRmbs => AnomalyKind::TooManyRmbs,
            Anomaly::WrongEcho => AnomalyKind::WrongEcho,
            Anomaly::TooMany => AnomalyKind::TooMany,
        }
    }

    /// Whether the peer is out of sync, so the link counts as down (RFC 7609 C.7.1, SEC-16). Other
    /// anomalies are bounded by [`super::MOST_ANOMALIES`].
    pub(super) const fn is_violation(&self) -> bool {
        matches!(
            self,
            Anomaly::Malformed(_)
                | Anomaly::WrongVersion(_)
                | Anomaly::WrongRole(_)
                | Anomaly::WrongCount { .. }
                | Anomaly::WrongEcho
                | Anomaly::TooMany
        )
    }
}

/// Counters of a group's events so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// LLC messages received without an anomaly.
    pub received: u64,
    /// LLC messages sent.
    pub sent: u64,
    /// Links that became usable, the first one included.
    pub links_added: u64,
    /// Links deleted, for any reason.
    pub links_deleted: u64,
    /// Links that failed.
    pub links_failed: u64,
    /// Moves of all connections of a link to another.
    pub moves: u64,
    /// Add Link refused, by either end.
    pub add_links_refused: u64,
    /// Confirm RKey refused by the peer.
    pub rkeys_refused: u64,
    /// Waits ended by their time limit.
    pub timeouts: u64,
    /// Messages sent again.
    pub resent: u64,
    anomalies: [u64; KINDS],
}

impl Counters {
    /// How many anomalies of a kind there were.
    pub fn anomalies(&self, kind: AnomalyKind) -> u64 {
        self.anomalies.get(kind as usize).copied().unwrap_or(0)
    }

    pub(super) fn count(&mut self, anomaly: &Anomaly) {
        if let Some(count) = self.anomalies.get_mut(anomaly.kind() as usize) {
            *count += 1;
        }
    }
}
