// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The state of one host in a pair of link groups.

use crate::link_group::{Ending, LinkGroup, LinkKey, LinkState, Region, RmbId};
use crate::wire::ids::Rkey;

/// A key of an RMB on a link.
#[derive(Clone, Copy, Debug)]
pub(super) struct Key {
    pub(super) rmb: RmbId,
    pub(super) link: LinkKey,
    pub(super) region: Region,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RmbUse {
    /// The peer is being notified.
    Unconfirmed,
    Free,
    Used,
    Unwanted,
}

#[derive(Debug)]
pub(super) struct Rmb {
    pub(super) id: RmbId,
    pub(super) memory: Vec<u8>,
    pub(super) usage: RmbUse,
    /// Connection using the RMB, or waiting for the RMB.
    pub(super) conn: Option<usize>,
    /// Earliest time of the next use.
    pub(super) rests_until: u64,
    pub(super) since: u64,
}

/// One end of a pair of groups.
#[derive(Debug, Default)]
pub(super) struct End {
    pub(super) group: Option<LinkGroup>,
    /// The host's process has died.
    pub(super) dead: bool,
    pub(super) over: Option<Ending>,
    pub(super) qps: Vec<(LinkKey, usize)>,
    pub(super) keys: Vec<Key>,
    pub(super) rmbs: Vec<Rmb>,
    pub(super) next_rmb: u32,
    pub(super) timer_at: Option<u64>,
    /// The links' states, each with its beginning.
    pub(super) watch: Vec<(LinkKey, LinkState, u64)>,
}

impl End {
    pub(super) fn lives(&self) -> bool {
        self.group.is_some()
    }

    pub(super) fn qp(&self, link: LinkKey) -> Option<usize> {
        self.qps.iter().find(|(key, _)| *key == link).map(|(_, q)| *q)
    }

    pub(super) fn region(&self, rmb: RmbId, link: LinkKey) -> Option<Region> {
        let key = self.keys.iter().find(|key| key.rmb == rmb && key.link == link)?;
        Some(key.region)
    }

    pub(super) fn key(&self, rkey: Rkey) -> Option<Key> {
        self.keys.iter().find(|key| key.region.rkey == rkey).copied()
    }

    pub(super) fn rmb(&mut self, id: RmbId) -> Option<&mut Rmb> {
        self.rmbs.iter_mut().find(|rmb| rmb.id == id)
    }
}
