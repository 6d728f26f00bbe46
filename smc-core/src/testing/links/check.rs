// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The rules of the simulation.

use super::ends::RmbUse;
use super::plan::Faults;
use super::qp::QpState;
use super::types::{Check, EndId, HalfId};
use super::world::Simulation;
use crate::link_group::{
    Cause, Generation, LinkGroup, LinkKey, LinkRecord, LinkState, Region, RmbId, RmbState, Topology,
};
use crate::wire::llc::DeleteReason;

/// How long a link may be on its way in or out, and an RMB unconfirmed, microseconds. The longest
/// way has several waits one after the other.
const STUCK: u64 = 120_000_000;
/// Maximum number of a group's links, in any state.
const MOST_LINKS: usize = 16;

impl Simulation {
    /// Checks an end after each of its events.
    pub(super) fn check_end(&mut self, id: EndId) -> Check {
        let Some(group) = self.group(id) else { return Ok(()) };
        let links = group.links();
        if links.len() > MOST_LINKS {
            return Err(format!("{id:?} remembers {} links", links.len()));
        }
        let most = match self.plan.generation {
            Generation::V21(limits) => usize::from(limits.max_links),
            _ => 2,
        };
        let active = || links.iter().filter(|link| link.state == LinkState::Active);
        let full = active().filter(|link| !link.asymmetric).count();
        let asymmetric = active().filter(|link| link.asymmetric).count();
        if full > most || asymmetric > 1 {
            return Err(format!("{id:?} has {full} links and {asymmetric} asymmetric ones"));
        }
        let carries: Vec<&LinkRecord> = links.iter().filter(|link| link.state.carries()).collect();
        for (n, link) in carries.iter().enumerate() {
            let parallel = |other: &&LinkRecord| {
                other.rnic.id == link.rnic.id
                    && other.remote.zip(link.remote).is_some_and(|(a, b)| a.gid.same_address(b.gid))
            };
            if carries.iter().take(n).copied().any(|other| parallel(&other)) {
                return Err(format!("{id:?}: {:?} is parallel to another", link.key));
            }
            if self.sessions[id.session].ends[id.role].qp(link.key).is_none() {
                return Err(format!("{id:?}: {:?} has no queue pair", link.key));
            }
        }
        let left = links.iter().find(|link| {
            link.connections > 0 && !link.state.carries() && link.state != LinkState::Confirming
        });
        if let (Some(left), false) = (left, carries.is_empty() || !group.is_usable()) {
            return Err(format!("{id:?}: connections stay on {:?}, {:?}", left.key, left.state));
        }
        let over = links.iter().map(|link| link.connections).sum::<u32>();
        let halves = self.sessions[id.session].conns.iter();
        let halves = halves.filter(|conn| conn.halves[id.role].is_some()).count();
        if over as usize != halves {
            return Err(format!("{id:?} counts {over} connections of {halves}"));
        }
        self.watch(id)
    }

    /// Checks the duration of transient states.
    fn watch(&mut self, id: EndId) -> Check {
        let now = self.now;
        let end = &mut self.sessions[id.session].ends[id.role];
        let Some(group) = &end.group else { return Ok(()) };
        end.watch
            .retain(|(key, state, _)| group.link(*key).is_some_and(|link| link.state == *state));
        for link in group.links().iter().filter(|link| link.state != LinkState::Active) {
            match end.watch.iter().find(|(key, ..)| *key == link.key) {
                None => end.watch.push((link.key, link.state, now)),
                Some((.., since)) if now - since > STUCK => {
                    return Err(format!("{id:?}: {:?} is {:?} for ever", link.key, link.state));
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// A write is about to be posted: its place must be the element of its connection, and its key
    /// valid there, as long as there is a peer.
    pub(super) fn check_target(&mut self, id: HalfId, q: usize, region: Region) -> Check {
        let Some(peer) = self.qps[q].peer else { return Ok(()) };
        let session = &self.sessions[id.session];
        let there = &self.qps[peer];
        if there.state != QpState::Up || there.owner != id.end().peer() || session.lied {
            return Ok(());
        }
        let end = &session.ends[1 - id.role];
        let Some(half) = &session.conns[id.conn].halves[1 - id.role] else {
            // The owner has ended the connection; the memory exists until the peer has been
            // notified.
            return match end.key(region.rkey) {
                Some(_) => Ok(()),
                None => Err(format!("{id:?} writes with the key of an RMB that is gone")),
            };
        };
        match end.region(half.rmb, there.link) {
            Some(right) if right == region => Ok(()),
            right => Err(format!("{id:?} writes to {region:?}, and its peer has {right:?}")),
        }
    }

    pub(super) fn is_quiet(&self) -> bool {
        self.sessions
            .iter()
            .all(|session| session.conns.iter().all(|conn| conn.halves.iter().all(Option::is_none)))
    }

    /// Checks that every connection has ended.
    pub(super) fn check_quiet(&self) -> Check {
        for (n, session) in self.sessions.iter().enumerate() {
            for (c, conn) in session.conns.iter().enumerate() {
                for (role, half) in conn.halves.iter().enumerate() {
                    let Some(half) = half else { continue };
                    let (state, flags) = (half.state(), half.connection.close.peer_flags());
                    return Err(format!(
                        "connection {n}/{c} has not ended at {role}: {state:?}, peer {flags:?}, \
                         link {:?}, path {:?}, {} on the way, due {}",
                        half.link,
                        half.path,
                        half.in_flight.len(),
                        half.outbound.has_pending()
                    ));
                }
            }
        }
        Ok(())
    }

    /// Checks that both ends agree, and are redundant if possible.
    pub(super) fn check_agreement(&self) -> Check {
        for (n, session) in self.sessions.iter().enumerate() {
            let [a, b] = [0, 1].map(|role| EndId { session: n, role });
            let (a, b) = match (self.group(a), self.group(b)) {
                (Some(a), Some(b)) => (a, b),
                (None, None) => continue,
                _ => return Err(format!("of group {n} one end is left")),
            };
            if !a.is_usable() || !b.is_usable() {
                return Err(format!("group {n} is not usable: {a:?} {b:?}"));
            }
            if session.lied {
                continue;
            }
            self.same_links(n, a, b)?;
            self.same_links(n, b, a)?;
            if a.topology() == Topology::None {
                return Err(format!("group {n} has no links"));
            }
            let two = a.max_links() > 1 && self.plan.rnics == [2, 2];
            if two && a.topology() != Topology::Symmetric && !session.doubled {
                let links = |group: &LinkGroup| -> Vec<_> {
                    let of = |link: &LinkRecord| (link.number, link.rnic.id.0, link.asymmetric);
                    group.links().iter().map(of).collect()
                };
                let (links, rnics) = ([links(a), links(b)], [a, b].map(|g| g.params().rnics.len()));
                let topology = a.topology();
                return Err(format!("group {n} is {topology:?}: {links:?}, {rnics:?} RNICs"));
            }
            for role in 0..2 {
                self.same_keys(EndId { session: n, role })?;
            }
        }
        Ok(())
    }

    fn same_links(&self, n: usize, a: &LinkGroup, b: &LinkGroup) -> Check {
        for link in a.links() {
            if link.state != LinkState::Active {
                return Err(format!("group {n}: {link:?} after rest"));
            }
            let other = b.links().iter().find(|other| other.number == link.number);
            let agrees = other.is_some_and(|other| {
                other.remote.is_some_and(|r| r.qpn == link.qpn && r.gid == link.rnic.gid)
                    && link.remote.is_some_and(|r| r.qpn == other.qpn && r.gid == other.rnic.gid)
                    && other.asymmetric == link.asymmetric
            });
            if !agrees {
                return Err(format!("group {n}: {link:?} is {other:?} at the peer"));
            }
        }
        Ok(())
    }

    /// Each RMB of an end is known to the peer on each link, and no other is.
    fn same_keys(&self, id: EndId) -> Check {
        let peer = id.peer();
        let (Some(own), Some(group)) = (self.group(id), self.group(peer)) else { return Ok(()) };
        let end = &self.sessions[id.session].ends[id.role];
        for rmb in &end.rmbs {
            if own.rmb_state(rmb.id) != Some(RmbState::Confirmed) || rmb.usage != RmbUse::Free {
                return Err(format!("{id:?}: {:?} is {:?} after rest", rmb.id, rmb.usage));
            }
            for link in group.links() {
                let here = own.links().iter().find(|own| own.number == link.number);
                let want = here.and_then(|here| end.region(rmb.id, here.key));
                let have = want.and_then(|want| group.find_peer_rmb(link.key, want.rkey));
                let have = have.and_then(|have| group.peer_region(have, link.key));
                if have != want || want.is_none() {
                    let (rmb, link) = (rmb.id, link.number);
                    return Err(format!(
                        "{id:?}: {rmb:?} on {link} is {want:?}, known as {have:?}"
                    ));
                }
            }
        }
        let (known, have) = (group.peer_rmbs(), end.rmbs.len());
        if known != have && !self.sessions[id.session].doubled {
            return Err(format!("{peer:?} knows {known} RMBs, and the peer has {have}"));
        }
        Ok(())
    }

    /// One end ends each group.
    pub(super) fn end_groups(&mut self) -> Check {
        for session in self.live_sessions().collect::<Vec<_>>() {
            let id = EndId { session, role: self.rng.below(2) as usize };
            self.call(id, |group, now| group.terminate(DeleteReason::OPERATOR, now))?;
        }
        Ok(())
    }

    /// Checks that nothing is left.
    pub(super) fn check_over(&self) -> Check {
        for (n, session) in self.sessions.iter().enumerate() {
            for (role, end) in session.ends.iter().enumerate() {
                if end.lives() || !end.qps.is_empty() || !end.keys.is_empty() {
                    return Err(format!("group {n} is not over at {role}"));
                }
            }
        }
        if self.qps.iter().any(|qp| qp.state != QpState::Gone) {
            return Err("a queue pair is left".into());
        }
        if self.faults() == Faults::empty() && self.report.reset > 0 {
            return Err("a connection was reset, and nothing went wrong".into());
        }
        Ok(())
    }

    /// A terminated group gives no more outputs, for any inputs.
    pub(super) fn poke_the_dead(&mut self, id: EndId) -> Check {
        let now = self.instant();
        let Some(group) = &mut self.end(id).group else { return Ok(()) };
        group.handle_timeout(now);
        group.handle_link_failed(LinkKey::FIRST, Cause::QueuePair, now);
        group.remove_rmb(RmbId(0), now);
        group.terminate(DeleteReason::OPERATOR, now);
        group.handle_decline(now);
        group.delete_link(LinkKey::FIRST, DeleteReason::OPERATOR, now);
        match group.poll_output() {
            Some(output) => Err(format!("{id:?} does {output:?} after its end")),
            None => Ok(()),
        }
    }
}
