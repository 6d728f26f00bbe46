// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The link groups of a process: the lookup for handshakes, and the groups' work.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use smc_core::handshake::{PeerLink, PeerRnic};
use smc_core::link_group::{LinkKey, Role};

use super::endpoint::Endpoint;
use super::group::{Group, Status};
use super::shared::Shared;
use ism_sys::lock;

/// The link groups of a process, and the closing connections.
#[derive(Debug)]
pub(crate) struct LinkGroups {
    shared: Arc<Shared>,
    /// Groups past their end are removed by the next [`work`](LinkGroups::work).
    groups: Mutex<Vec<Arc<Group>>>,
    /// Connections closed here while their last words are under way.
    closing: Mutex<Vec<(Arc<Group>, Arc<Endpoint>)>>,
    /// `closing` may be non-empty. The lock orders the entries; the word spares the lock.
    has_closing: AtomicBool,
}

impl LinkGroups {
    /// No groups yet.
    pub(crate) fn new(shared: &Arc<Shared>) -> Arc<LinkGroups> {
        Arc::new(LinkGroups {
            shared: Arc::clone(shared),
            groups: Mutex::default(),
            closing: Mutex::default(),
            has_closing: AtomicBool::new(false),
        })
    }

    /// Has the groups handle their inputs. Called without locks.
    pub(super) fn work(&self) {
        if !self.shared.signal().take() {
            return;
        }
        self.shared.fail_links_of_broken_devices();
        let groups = self.all();
        groups.iter().filter(|group| group.inputs().is_due()).for_each(|group| group.work());
        self.shared.close_deferred();
        let mut groups = lock(&self.groups);
        let (ended, alive) = std::mem::take(&mut *groups)
            .into_iter()
            .partition::<Vec<_>, _>(|group| group.status() == Status::Over);
        *groups = alive;
        drop(groups);
        // Their contents are dropped without the lock.
        drop(ended);
    }

    /// The groups, including groups just ended.
    fn all(&self) -> Vec<Arc<Group>> {
        lock(&self.groups).clone()
    }

    /// The groups not over.
    pub(crate) fn groups(&self) -> Vec<Arc<Group>> {
        let mut groups = self.all();
        groups.retain(|group| group.status() != Status::Over);
        groups
    }

    /// Whether there are groups, or links not closed yet.
    pub(crate) fn has_groups(&self) -> bool {
        let alive = |group: &Arc<Group>| group.status() != Status::Over;
        lock(&self.groups).iter().any(alive) || self.shared.has_deferred()
    }

    /// Adds a new group.
    pub(crate) fn add(&self, group: Arc<Group>) {
        let due = group.inputs().is_due();
        lock(&self.groups).push(group);
        if due {
            // A thread may have looked for work before the group could be found.
            self.shared.signal().post();
        }
    }

    /// The group for a client's Proposal (CLC-19): one with room (LG-47), or one with first contact
    /// under way, for which the handshake waits.
    pub(crate) fn for_client(&self, peer: &PeerRnic) -> Option<Arc<Group>> {
        let groups = self.groups();
        let mine = |group: &&Arc<Group>| group.role() == Role::Server && group.is_with(peer);
        let mine: Vec<_> = groups.iter().filter(mine).collect();
        let usable = |group: &&&Arc<Group>| {
            group.status() == Status::Usable
                && group.with(|machine, _| machine.has_room()) == Some(true)
        };
        let forming = |group: &&&Arc<Group>| group.status() == Status::Forming;
        let found = mine.iter().find(usable).or_else(|| mine.iter().find(forming));
        found.map(|group| Arc::clone(group))
    }

    /// The group and the link named by a server to this client (CLC-33); without the link if there is a
    /// group with this server, but not that link. A group with this host as the server is another one
    /// (LG-3).
    pub(crate) fn to_server(&self, peer: &PeerLink) -> Option<(Arc<Group>, Option<LinkKey>)> {
        let mut known = None;
        for group in self.groups() {
            // The address is the link's, not necessarily the first link's.
            if group.role() != Role::Client || !group.is_with_stack(&peer.rnic) {
                continue;
            }
            let (qpn, gid) = (peer.qpn, peer.rnic.gid());
            if let Some(Some(link)) = group.with(|machine, _| machine.link_to(qpn, gid)) {
                return Some((group, Some(link)));
            }
            known = known.or(Some((group, None)));
        }
        known
    }

    /// Closes a connection, at once or when its last words have arrived.
    pub(crate) fn close(&self, group: Arc<Group>, endpoint: Arc<Endpoint>) {
        if endpoint.is_quiet() {
            return self.finish_close(&group, &endpoint);
        }
        lock(&self.closing).push((group, endpoint));
        self.has_closing.store(true, Ordering::Release);
    }

    fn finish_close(&self, group: &Arc<Group>, endpoint: &Arc<Endpoint>) {
        self.shared.tokens.remove(endpoint.token());
        group.remove_connection(endpoint);
    }

    /// Whether there are connections whose last words may still be under way.
    pub(super) fn has_closing(&self) -> bool {
        self.has_closing.load(Ordering::Acquire)
    }

    /// Finishes connections after the arrival of their last words. `true`: others are still closing.
    pub(super) fn finish_closing(&self) -> bool {
        if !self.has_closing() {
            return false;
        }
        let (gone, left): (Vec<_>, Vec<_>) = std::mem::take(&mut *lock(&self.closing))
            .into_iter()
            .partition(|(group, endpoint)| group.status() == Status::Over || endpoint.is_quiet());
        let mut closing = lock(&self.closing);
        closing.extend(left);
        let more = !closing.is_empty();
        self.has_closing.store(more, Ordering::Release);
        drop(closing);
        gone.iter().for_each(|(group, endpoint)| self.finish_close(group, endpoint));
        more
    }
}

#[cfg(test)]
mod tests {
    use smc_core::wire::clc::Version;
    use smc_core::wire::ids::{Gid, Mac, PeerId, Qpn};

    use super::*;
    use crate::smcr::SmcrOptions;
    use crate::smcr::inbox::WorkSignal;

    // Shows: LG-3.
    #[test]
    fn a_group_serves_one_direction_only() {
        let signal = WorkSignal::new().unwrap();
        let options = SmcrOptions::default();
        let shared = Shared::new(Vec::new(), Vec::new(), options, signal).unwrap();
        let groups = LinkGroups::new(&shared);
        let gid = Gid::from_ipv4([10, 0, 0, 2]);
        let peer = PeerRnic::new(Version::V2, PeerId([7; 8]), gid, Mac::NONE);
        let enter = |role| {
            let group = Group::new(shared.next_number(), role, peer, &shared);
            groups.add(group.clone());
            group
        };
        // To the peer as a server: nothing for the peer as a client, and vice versa.
        let out = enter(Role::Client);
        assert!(groups.for_client(&peer).is_none());
        let into = enter(Role::Server);
        assert!(groups.for_client(&peer).is_some_and(|group| Arc::ptr_eq(&group, &into)));
        let named = PeerLink { rnic: peer, qpn: Qpn::new(1) };
        let (group, link) = groups.to_server(&named).unwrap();
        assert!(Arc::ptr_eq(&group, &out));
        assert_eq!(link, None);
    }
}
