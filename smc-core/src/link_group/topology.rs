// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The links of a group, and the possible further links (RFC 7609 section 2.2).

use super::{Add, LinkExchange, LinkGroup, LinkKey, LinkRecord, LinkState, Rnic, RnicId, Topology};
use crate::wire::ids::Gid;

impl LinkGroup {
    pub(super) fn link_mut(&mut self, key: LinkKey) -> Option<&mut LinkRecord> {
        self.links.iter_mut().find(|link| link.key == key)
    }

    pub(super) fn state_of(&self, key: LinkKey) -> LinkState {
        self.link(key).map_or(LinkState::Gone, |link| link.state)
    }

    pub(super) fn active(&self) -> impl Iterator<Item = &LinkRecord> {
        self.links.iter().filter(|link| link.state == LinkState::Active)
    }

    /// The link to take over from others: active, with the fewest connections.
    pub(super) fn least_loaded(&self, but: Option<LinkKey>) -> Option<LinkKey> {
        let others = self.active().filter(|link| Some(link.key) != but);
        others.min_by_key(|link| (link.connections, link.key)).map(|link| link.key)
    }

    /// The link for messages of the group, other than `but`: the oldest active one, else a leaving
    /// one.
    pub(super) fn carrier(&self, but: Option<LinkKey>) -> Option<LinkKey> {
        let carries = |link: &&LinkRecord| Some(link.key) != but && link.state.carries();
        let leaving = |link: &&LinkRecord| link.state == LinkState::Leaving;
        self.links
            .iter()
            .filter(carries)
            .min_by_key(|link| (leaving(link), link.key))
            .map(|l| l.key)
    }

    pub(super) fn by_number(&self, number: u8) -> Option<LinkKey> {
        self.links.iter().find(|link| link.number == number).map(|link| link.key)
    }

    pub(super) fn adding(&self) -> Option<&Add> {
        match &self.link_exchange {
            Some(LinkExchange::Add(add)) => Some(add),
            _ => None,
        }
    }

    /// Number of links counting against the maximum (LG-10, LG-11).
    pub(super) fn full_links(&self) -> usize {
        self.active().filter(|link| !link.asymmetric).count()
    }

    fn has_asymmetric(&self) -> bool {
        self.active().any(|link| link.asymmetric)
    }

    /// Whether one more link may be wanted at all (LG-13, LLCV2-39); one will do (LG-8).
    pub(super) fn below_maximum(&self) -> bool {
        self.max_links > 1 && self.full_links() < usize::from(self.max_links)
    }

    fn is_used(&self, rnic: RnicId) -> bool {
        self.active().any(|link| link.rnic.id == rnic)
    }

    /// The RNIC used by the asymmetric link only.
    fn of_asymmetric_only(&self) -> Option<Rnic> {
        let asymmetric = self.active().find(|link| link.asymmetric)?;
        let shared = |link: &LinkRecord| !link.asymmetric && link.rnic.id == asymmetric.rnic.id;
        (!self.active().any(shared)).then_some(asymmetric.rnic)
    }

    /// Own RNIC without a link so far.
    pub(super) fn unused_rnic(&self) -> Option<Rnic> {
        self.params.rnics.iter().find(|rnic| !self.is_used(rnic.id)).copied()
    }

    /// The server's RNIC for one more link (LG-18): one without a link, else the RNIC of the
    /// asymmetric link, to be replaced by the new link, else the only RNIC.
    pub(super) fn server_rnic(&self) -> Option<Rnic> {
        if !self.below_maximum() {
            return None;
        }
        let lone = || match self.has_asymmetric() {
            true => None,
            false if self.full_links() == 1 => self.active().next().map(|link| link.rnic),
            false => None,
        };
        self.unused_rnic().or_else(|| self.of_asymmetric_only()).or_else(lone)
    }

    /// The client's RNIC for a link to the server's RNIC `server` (LG-20 to LG-23), `target` being
    /// the one the server would like (LLCV2-21). `None`: refuse.
    pub(super) fn client_rnic(&self, server: Gid, target: Gid) -> Option<Rnic> {
        let rnics = || self.params.rnics.iter().filter(|rnic| !self.is_used(rnic.id)).copied();
        let wanted = rnics().filter(|rnic| !target.is_none() && rnic.gid.same_address(target));
        let shared = self.active().map(|link| link.rnic);
        let all = wanted.chain(rnics()).chain(self.of_asymmetric_only()).chain(shared);
        let mut fitting = all.filter(|rnic| self.fits(rnic.id, server));
        fitting.next()
    }

    /// Whether a link between these RNICs may be added: no parallel one (LG-7), no second
    /// asymmetric one (LG-9), none above the maximum (LG-13).
    pub(super) fn fits(&self, rnic: RnicId, peer: Gid) -> bool {
        let parallel = |link: &LinkRecord| link.rnic.id == rnic && ends_at(link, peer);
        if self.max_links <= 1 || self.links.iter().any(|l| l.state.carries() && parallel(l)) {
            return false;
        }
        match self.would_be_asymmetric(rnic, peer) {
            true => !self.has_asymmetric(),
            false => self.below_maximum(),
        }
    }

    fn would_be_asymmetric(&self, rnic: RnicId, peer: Gid) -> bool {
        let shares = |link: &LinkRecord| link.rnic.id == rnic || ends_at(link, peer);
        self.active().any(|link| !link.asymmetric && shares(link))
    }

    /// Recomputes the asymmetric links: a link is asymmetric if one of its ends is also an end of
    /// an older symmetric link.
    pub(super) fn judge_symmetry(&mut self) {
        let keys: Vec<LinkKey> = self.active().map(|link| link.key).collect();
        let mut full: Vec<(RnicId, Gid)> = Vec::new();
        // Links symmetric before stay so; other links are considered afterwards.
        let mut order: Vec<&LinkRecord> = self.active().collect();
        order.sort_by_key(|link| (link.asymmetric, link.key));
        let mut asymmetric = Vec::new();
        for link in order {
            let gid = link.remote.map_or(Gid::NONE, |remote| remote.gid);
            let meets =
                |(rnic, peer): &(RnicId, Gid)| *rnic == link.rnic.id || peer.same_address(gid);
            if full.iter().any(meets) {
                asymmetric.push(link.key);
            } else {
                full.push((link.rnic.id, gid));
            }
        }
        for key in keys {
            let is = asymmetric.contains(&key);
            if let Some(link) = self.link_mut(key) {
                link.asymmetric = is;
            }
        }
    }

    /// How redundant the group is (LG-54: one link is neither symmetric nor asymmetric).
    pub fn topology(&self) -> Topology {
        let asymmetric = self.active().find(|link| link.asymmetric);
        let shares = |link: &LinkRecord| {
            self.active().any(|other| !other.asymmetric && other.rnic.id == link.rnic.id)
        };
        match (self.full_links(), asymmetric) {
            (0, None) => Topology::None,
            (1, None) | (0, Some(_)) => Topology::Single,
            (1, Some(link)) => match shares(link) {
                true => Topology::AsymmetricLocal,
                false => Topology::AsymmetricPeer,
            },
            _ => Topology::Symmetric,
        }
    }
}

/// IPv4 has two forms of address (LLCV2-16).
fn ends_at(link: &LinkRecord, peer: Gid) -> bool {
    link.remote.is_some_and(|remote| remote.gid.same_address(peer))
}
