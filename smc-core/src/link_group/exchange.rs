// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What is under way in a group: phases and exchanges.

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
    /// The attempt at a second link, and whatever has to be cleaned up after it.
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

/// The one exchange that changes the set of links (LLC-60, LLCV2-8).
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum LinkExchange {
    /// Add Link to Confirm Link.
    Add(Add),
    /// The server's Delete Link for one link. `last` is when it is not waited for any more, alive
    /// as the carrying link may be.
    Delete { link: LinkKey, over: LinkKey, until: Tick, last: Tick },
    /// The client's Request Add Link.
    Request { over: LinkKey, until: Tick },
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Add {
    pub(super) over: LinkKey,
    /// None for an attempt that cannot succeed (`SingleRnic::InvalidMtu`).
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
    /// Own pairs that were not sent yet.
    pub(super) own: Vec<RkeyPair>,
    /// What the peer's next message must say is left; `None` before its first.
    pub(super) expected: Option<u8>,
    /// What its last message said is left.
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
        /// Links for which this end announces a key, the carrying one included.
        links: Vec<LinkKey>,
        /// Entries for continuations.
        rest: Vec<LinkRkey>,
        /// What the reply to the last continuation must say is left; 0 before any was sent.
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

/// A version 1 Confirm RKey of the peer that continuations follow.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PeerConfirm {
    pub(super) link: LinkKey,
    pub(super) region: Region,
    pub(super) entries: Vec<LinkRkey>,
    pub(super) left: u8,
}
