// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! One link and its states.

use crate::time::Tick;
use crate::wire::llc::DeleteReason;

use super::{LinkKey, Receipt, RemoteEnd, Rnic};
use crate::wire::ids::{Psn, Qpn};

/// Where a link stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum LinkState {
    /// The caller makes a queue pair.
    Preparing,
    /// Add Link is under way; the queue pair exists.
    Adding,
    /// Connected; Confirm Link has not passed (LLC-10).
    Confirming,
    /// In use.
    Active,
    /// Works, but is to be deleted: no new connection.
    Leaving,
    /// Does not work; the peer may not know yet.
    Failed,
    /// Both ends agree to delete the link; the last message about the link is on its way.
    Deleting,
    /// No longer there.
    Gone,
}

impl LinkState {
    /// Every state.
    pub const ALL: [LinkState; 8] = [
        LinkState::Preparing,
        LinkState::Adding,
        LinkState::Confirming,
        LinkState::Active,
        LinkState::Leaving,
        LinkState::Failed,
        LinkState::Deleting,
        LinkState::Gone,
    ];

    /// The state after an event, or `None` if the event has no meaning in this one.
    pub const fn next(self, event: LinkEvent) -> Option<LinkState> {
        use LinkEvent as E;
        use LinkState as S;
        match (self, event) {
            (S::Preparing, E::Prepared) => Some(S::Adding),
            (S::Preparing | S::Adding, E::Connected) => Some(S::Confirming),
            (S::Confirming, E::Confirmed) => Some(S::Active),
            (S::Active, E::DeleteWanted) => Some(S::Leaving),
            (S::Leaving, E::Kept) => Some(S::Active),
            (S::Preparing | S::Adding | S::Confirming | S::Active | S::Leaving, E::Failed) => {
                Some(S::Failed)
            }
            (S::Adding | S::Confirming | S::Active | S::Leaving | S::Failed, E::DeletionAgreed) => {
                Some(S::Deleting)
            }
            (S::Gone, _) => None,
            (_, E::Destroyed) => Some(S::Gone),
            _ => None,
        }
    }

    /// Whether messages about other links may be sent on the link.
    pub const fn carries(self) -> bool {
        matches!(self, LinkState::Active | LinkState::Leaving)
    }
}

/// An event of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LinkEvent {
    /// The link's queue pair exists.
    Prepared,
    /// The queue pair knows the peer's.
    Connected,
    /// Confirm Link and its reply have passed.
    Confirmed,
    /// The link is to be deleted while still working.
    DeleteWanted,
    /// The link is the last one and stays after all.
    Kept,
    /// The link does not work.
    Failed,
    /// Delete Link has passed.
    DeletionAgreed,
    /// The link's queue pair is freed.
    Destroyed,
}

impl LinkEvent {
    /// Every event.
    pub const ALL: [LinkEvent; 8] = [
        LinkEvent::Prepared,
        LinkEvent::Connected,
        LinkEvent::Confirmed,
        LinkEvent::DeleteWanted,
        LinkEvent::Kept,
        LinkEvent::Failed,
        LinkEvent::DeletionAgreed,
        LinkEvent::Destroyed,
    ];
}

/// How redundant a group is (LG-7 to LG-12, LG-54).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Topology {
    /// No link yet, or no more.
    None,
    /// One link.
    Single,
    /// Links share no RNIC.
    Symmetric,
    /// Two links meet at one RNIC of this end.
    AsymmetricLocal,
    /// Two links meet at one RNIC of the peer.
    AsymmetricPeer,
}

/// Test Link of one link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Probe {
    pub(super) data: [u8; 16],
    pub(super) until: Tick,
}

/// A pending request to delete a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct DeleteRequest {
    pub(super) reason: DeleteReason,
    pub(super) orderly: bool,
}

/// A client's Delete Link before the server's own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SentDelete {
    pub(super) over: LinkKey,
    pub(super) until: Tick,
    /// See `last` of `LinkExchange::Delete`.
    pub(super) last: Tick,
}

/// A link.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LinkRecord {
    /// The group's name of the link.
    pub key: LinkKey,
    /// State of the link.
    pub state: LinkState,
    /// Number of the link at both ends; 0 until the server has assigned one.
    pub number: u8,
    /// Own user id of the link, for display (LLC-16).
    pub user_id: u32,
    /// The peer's user id of the link, for display.
    pub peer_user_id: u32,
    /// Own RNIC.
    pub rnic: Rnic,
    /// Own queue pair; 0 while it is being made.
    pub qpn: Qpn,
    /// Own first packet sequence number.
    pub psn: Psn,
    /// Peer's end, once known.
    pub remote: Option<RemoteEnd>,
    /// Whether the link shares an RNIC with an older link (LG-9).
    pub asymmetric: bool,
    /// Connections sending over the link.
    pub connections: u32,
    /// Time of the last received message.
    pub last_received: Tick,
    pub(super) probe: Option<Probe>,
    pub(super) delete_request: Option<DeleteRequest>,
    pub(super) sent_delete: Option<SentDelete>,
    /// Receipt of the last message about a link under deletion, and the time of destruction without
    /// a receipt.
    pub(super) last_message: Option<(Receipt, Tick)>,
    /// Anomalies in a row.
    pub(super) anomalies_in_a_row: u32,
}
