// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Orders to the caller.

use crate::wire::ids::Mtu;
use crate::wire::llc::DeleteReason;

use super::{AnomalyKind, LinkKey, PeerRmbId, Receipt, RemoteEnd, RmbId, RnicId};

/// An order to the caller, in the sequence of [`super::LinkGroup::poll_output`].
///
/// Report a failed order by [`handle_link_failed`](super::LinkGroup::handle_link_failed) for its
/// link.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Output {
    /// Send one message on the queue pair of the link (LLC-2).
    PostLlc {
        /// The link.
        link: LinkKey,
        /// 44 bytes, more in version 2.
        bytes: Vec<u8>,
        /// If any, the send completion is reported by `handle_sent`.
        receipt: Option<Receipt>,
    },
    /// Create a queue pair for a new link (state INIT, receives posted) and register all RMBs for
    /// the link, then call `handle_link_prepared`.
    PrepareLink {
        /// The new link.
        link: LinkKey,
        /// The RNIC of the link.
        rnic: RnicId,
        /// Peer's end, known to the client only.
        remote: Option<RemoteEnd>,
    },
    /// Bring the queue pair of the link to RTR. Not given for the first link, connected by the
    /// handshake.
    ConnectLink {
        /// The link.
        link: LinkKey,
        /// Peer's end.
        remote: RemoteEnd,
        /// The smaller MTU of both ends.
        mtu: Mtu,
    },
    /// Bring the queue pair of the link to RTS, if not there yet; also for the first link.
    ActivateLink {
        /// The link.
        link: LinkKey,
    },
    /// Connections may use the link.
    LinkUsable {
        /// The link.
        link: LinkKey,
    },
    /// First contact is over: connections may send (LG-17).
    GroupUsable,
    /// Every link's key of the RMB is known to the peer: connections may use the RMB (LLC-51).
    RmbConfirmed {
        /// The RMB.
        rmb: RmbId,
    },
    /// The peer refuses the RMB, and the RMB is no longer part of the group.
    RmbRefused {
        /// The RMB.
        rmb: RmbId,
    },
    /// The peer has forgotten the RMB: the memory may be freed (LLC-57).
    RmbDeleted {
        /// The RMB.
        rmb: RmbId,
    },
    /// The peer has deleted one of its RMBs: no connection may write to the RMB any more.
    PeerRmbDeleted {
        /// The RMB.
        rmb: PeerRmbId,
    },
    /// Move all connections from one link to another (LG-30, LG-33): failover validation first on
    /// each. The counts of connections have been moved already.
    MoveConnections {
        /// The link to leave.
        from: LinkKey,
        /// The link to take over.
        to: LinkKey,
        /// Whether `from` is dead already; if not, wait for its outstanding writes first (LG-32).
        dead: bool,
    },
    /// Free the queue pair of the link and the link's keys.
    DestroyLink {
        /// The link.
        link: LinkKey,
    },
    /// The group is over. Last output; each link has been destroyed before.
    Terminated {
        /// The reason.
        reason: Reason,
        /// The fate of the group's connections.
        ending: Ending,
    },
}

/// The fate of a terminated group's connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Ending {
    /// First contact failed early enough: the first connection goes on as TCP, with an SMC Decline
    /// unless the peer has sent one (ERR-2, ERR-3).
    Fallback,
    /// Reset all there are, with RST on TCP (ERR-5, LG-56).
    Reset,
    /// The group has no connections.
    Quiet,
}

/// Why a group is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Reason {
    /// No Confirm Link, or no reply to Confirm Link, on the first link (ERR-14, ERR-17).
    NoConfirmLink,
    /// Confirm Link of the first link has wrong data (ERR-35, LLCV2-12).
    WrongConfirmLink,
    /// One end has eye catchers and the other none (wire erratum D-3).
    EyeCatcher,
    /// SMC Decline of the peer during first contact (ERR-46).
    PeerDeclined,
    /// No Add Link at first contact (ERR-20).
    NoAddLink,
    /// No reply to Add Link at first contact, or its exchange of keys broke off (ERR-21, ERR-27).
    NoAddLinkReply,
    /// The last link has failed (LG-56).
    LastLinkLost(Cause),
    /// The peer ended the group by Delete Link (LLC-44, LLC-45).
    PeerDeletedAll(DeleteReason),
    /// No connection for long.
    Idle,
    /// The caller's wish.
    Local(DeleteReason),
}

/// Why a link has failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Cause {
    /// The queue pair went to error, or a send failed (ERR-13).
    QueuePair,
    /// Port down or device gone.
    Rnic,
    /// The queue pair could not be made or connected.
    Setup,
    /// No answer to Confirm RKey or Delete RKey (ERR-33, ERR-47).
    NoRkeyReply,
    /// No answer to Test Link (ERR-34).
    NoTestReply,
    /// No answer to Add Link or Request Add Link (ERR-22, ERR-48).
    NoAddLinkReply,
    /// No answer to Delete Link (ERR-29, ERR-32).
    NoDeleteReply,
    /// No answer to Confirm Link on a new link (ERR-19, ERR-25).
    NoConfirmLink,
    /// The peer deletes the link.
    PeerDeleted(DeleteReason),
    /// The peer did not announce a key for the link (ERR-41).
    KeyMissing,
    /// The peer broke the rules (ERR-43, ERR-44).
    Violation(AnomalyKind),
}

impl Cause {
    /// The reason to give in Delete Link (LLC-35).
    pub(super) const fn delete_reason(self) -> DeleteReason {
        match self {
            Cause::Violation(_) | Cause::KeyMissing => DeleteReason::VIOLATION,
            _ => DeleteReason::LOST_PATH,
        }
    }
}
