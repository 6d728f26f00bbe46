// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The state of a group: phases and exchanges.

use crate::time::Tick;
use crate::wire::llc::{LinkRkey, RkeyPair};

use super::{LinkKey, Reason, Receipt, Region, RmbId};

/// The life of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// First link: the server awaits the reply to Confirm Link, the client Confirm Link.
    FirstConfirm { until: Tick, resend: Option<Tick> },
    /// Client of a group with one link: its reply to Confirm Link is on its way.
    FirstReply { receipt: Receipt, until: Tick },
    /// Client: Add Link has to come.
    FirstAddLink { until: Tick },
    /// The attempt at a second link, and the clean-up after it.
    SecondLink,
    /// Connections may send.
    Usable,
    /// Delete Link for all links is on its way.
    Ending(FinalDelete),
    /// Over.
    Over,
}

/// The last exchange of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct FinalDelete {
    pub(super) reason: Reason,
    pub(super) over: LinkKey,
    pub(super) receipt: Receipt,
    pub(super) until: Tick,
    /// Client: the server has to send its own.
    pub(super) answered_by_peer: bool,
}

/// The one exchange changing the set of links (LLC-60, LLCV2-8).
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum LinkExchange {
    /// Add Link to Confirm Link.
    Add(Add),
    /// The server's Delete Link for one link. The wait ends at `last`, even if the carrying link is
    /// alive.
    Delete { link: LinkKey, over: LinkKey, until: Tick, last: Tick },
    /// The client's Request Add Link.
    Request { over: LinkKey, until: Tick },
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Add {
    pub(super) over: LinkKey,
    /// None for an attempt without a chance (`SingleRnic::InvalidMtu`).
    pub(super) new: Option<LinkKey>,
    pub(super) number: u8,
    pub(super) stage: Stage,
    pub(super) until: Tick,
    /// Own RMBs whose keys on the new link this end announces to the peer.
    pub(super) announced: Vec<RmbId>,
}

/// How far Add Link is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// The caller makes a queue pair.
    Prepare,
    /// Server: reply to Add Link is awaited.
    Reply,
    /// Version 1: a continuation is awaited.
    Keys(Keys),
    /// Confirm Link (client) or its reply (server) is awaited on the new link.
    Confirm,
}

/// Exchange of keys by continuations (LLC-27 to LLC-30).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Keys {
    /// Own unsent pairs.
    pub(super) own: Vec<RkeyPair>,
    /// The remaining number that the peer's next message must state; `None` before the first
    /// message.
    pub(super) expected: Option<u8>,
    /// The remaining number stated by the peer's last message.
    pub(super) last: Option<u8>,
}

/// An own Confirm RKey or Delete RKey; one of the peer may be under way as well (LLC-61).
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum RkeyExchange {
    Confirm {
        over: LinkKey,
        until: Tick,
        rmb: RmbId,
        region: Region,
        /// Links with a key announced by this end, the carrying one included.
        links: Vec<LinkKey>,
        /// Entries for continuations.
        rest: Vec<LinkRkey>,
        /// The remaining number that the reply to the last continuation must state; 0 before any
        /// was sent.
        left: u8,
    },
    Delete {
        over: LinkKey,
        until: Tick,
        rmbs: Vec<RmbId>,
    },
}

impl RkeyExchange {
    pub(super) fn over(&self) -> LinkKey {
        match self {
            RkeyExchange::Confirm { over, .. } | RkeyExchange::Delete { over, .. } => *over,
        }
    }

    pub(super) fn until(&self) -> Tick {
        match self {
            RkeyExchange::Confirm { until, .. } | RkeyExchange::Delete { until, .. } => *until,
        }
    }
}

/// A version 1 Confirm RKey of the peer with continuations still to come.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PeerConfirm {
    pub(super) link: LinkKey,
    pub(super) region: Region,
    pub(super) entries: Vec<LinkRkey>,
    pub(super) left: u8,
}
