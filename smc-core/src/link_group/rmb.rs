// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Own RMBs and the peer's: their key on each link (LG-59).

use thiserror::Error;

use crate::time::Tick;
use crate::wire::ids::Rkey;

use super::{LinkKey, PeerRmbId, Region, RmbId};

/// Most RMBs of one peer in one group (LG-52).
pub const MAX_RMBS: usize = 255;

/// The error of a call about an RMB or a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum UseError {
    /// The group may not announce more RMBs to the peer (LG-52).
    #[error("group has {MAX_RMBS} RMBs")]
    TooManyRmbs,
    /// The RMB is part of the group already.
    #[error("RMB {0:?} is known")]
    KnownRmb(RmbId),
    /// The call lacks the RMB's key for a link.
    #[error("no key for link {0:?}")]
    KeyMissing(LinkKey),
    /// No such link, or not active.
    #[error("link {0:?} is not usable")]
    NoLink(LinkKey),
    /// The agreed number of connections is reached (LG-53).
    #[error("group has {0} connections")]
    Full(u32),
    /// The group is over.
    #[error("group is over")]
    Over,
}

/// Where an own RMB stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RmbState {
    /// The peer does not know the RMB, or lacks one of its keys.
    Unconfirmed,
    /// The peer knows the RMB's key on each link.
    Confirmed,
    /// To be deleted.
    Unwanted,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Rmb {
    pub(super) id: RmbId,
    pub(super) state: RmbState,
    /// Whether the group has reported the confirmation to the caller.
    pub(super) reported: bool,
    /// Key on each link with a queue pair, and whether the peer knows the key.
    pub(super) keys: Vec<(LinkKey, Region, bool)>,
    /// Link of the connection in need of the RMB (LLC-52).
    pub(super) on: Option<LinkKey>,
    /// Refusals so far.
    pub(super) refused: u32,
    /// Earliest time of the next attempt.
    pub(super) not_before: Option<Tick>,
}

impl Rmb {
    pub(super) fn on(&self, link: LinkKey) -> Option<Region> {
        self.keys.iter().find(|(key, ..)| *key == link).map(|(_, region, _)| *region)
    }
}

/// The peer's RMBs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct PeerRmbs {
    rmbs: Vec<(PeerRmbId, Vec<(LinkKey, Region)>)>,
    next: u32,
}

impl PeerRmbs {
    /// The RMB with the key `rkey` on `link`.
    pub(super) fn find(&self, link: LinkKey, rkey: Rkey) -> Option<PeerRmbId> {
        let has = |keys: &[(LinkKey, Region)]| {
            keys.iter().any(|(key, region)| *key == link && region.rkey == rkey)
        };
        self.rmbs.iter().find(|(_, keys)| has(keys)).map(|(id, _)| *id)
    }

    /// Where to write on a link.
    pub(super) fn on(&self, id: PeerRmbId, link: LinkKey) -> Option<Region> {
        let (_, keys) = self.rmbs.iter().find(|(have, _)| *have == id)?;
        keys.iter().find(|(key, _)| *key == link).map(|(_, region)| *region)
    }

    /// Takes a key of a link: of the RMB already having the key, or of a new one.
    pub(super) fn learn(&mut self, link: LinkKey, region: Region) -> Option<PeerRmbId> {
        if let Some(id) = self.find(link, region.rkey) {
            self.set(id, link, region);
            return Some(id);
        }
        if self.rmbs.len() >= MAX_RMBS {
            return None;
        }
        let id = PeerRmbId(self.next);
        self.next = self.next.wrapping_add(1);
        self.rmbs.push((id, vec![(link, region)]));
        Some(id)
    }

    /// Sets the key of an RMB on a link; any other RMB with this key there loses the key.
    pub(super) fn set(&mut self, id: PeerRmbId, link: LinkKey, region: Region) {
        for (have, keys) in &mut self.rmbs {
            keys.retain(|(key, old)| *key != link || (*have != id && old.rkey != region.rkey));
            if *have == id {
                keys.push((link, region));
            }
        }
        self.rmbs.retain(|(_, keys)| !keys.is_empty());
    }

    pub(super) fn remove(&mut self, id: PeerRmbId) {
        self.rmbs.retain(|(have, _)| *have != id);
    }

    pub(super) fn remove_link(&mut self, link: LinkKey) {
        for (_, keys) in &mut self.rmbs {
            keys.retain(|(key, _)| *key != link);
        }
        self.rmbs.retain(|(_, keys)| !keys.is_empty());
    }

    pub(super) fn len(&self) -> usize {
        self.rmbs.len()
    }
}
