// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The faults of a run: kind, time, and the ends to be notified.

use super::conn::Tcp;
use super::ends::RmbUse;
use super::plan::{Faults, rnic};
use super::types::{Check, EndId, Event, HalfId};
use super::world::Simulation;
use crate::link_group::{Ending, LinkGroup, LinkKey, LinkState};
use crate::wire::llc::DeleteReason;

impl Simulation {
    pub(super) fn on_fault(&mut self) -> Check {
        if self.calm {
            return Ok(());
        }
        let wait = 1 + self.time(self.plan.fault_every * 2);
        self.at(self.now + wait, Event::Fault);
        let kinds: Vec<Faults> = self.plan.faults.iter().collect();
        if kinds.is_empty() {
            return Ok(());
        }
        let kind = kinds[self.rng.below(kinds.len() as u32) as usize];
        let host = self.rng.below(2) as usize;
        let n = self.rng.below(self.plan.rnics[host]) as usize;
        match kind {
            Faults::PORT => self.port_down(host, n),
            Faults::CUT => {
                let (a, b) = (self.rng.below(2) as usize, self.rng.below(2) as usize);
                self.cuts[a][b] = true;
                let wait = self.time(20_000_000);
                self.at(self.now + wait, Event::CutEnds(a, b));
            }
            Faults::QUEUE_PAIR => {
                if let Some(q) = self.some_qp() {
                    self.break_qp(q);
                }
            }
            Faults::SLOW => {
                if let Some(q) = self.some_qp() {
                    self.qps[q].slow_until = self.now + self.time(6_000_000);
                }
            }
            Faults::STALL => self.stalled[host] = self.now + self.time(4_000_000),
            Faults::KILL if self.rng.one_in(16) => {
                if let Some(session) = self.some_session() {
                    let polite = self.rng.one_in(2);
                    self.kill(EndId { session, role: host }, polite)?;
                }
            }
            Faults::API => self.use_api(host)?,
            _ => {}
        }
        Ok(())
    }

    fn some_qp(&mut self) -> Option<usize> {
        let sessions: Vec<usize> = self.live_sessions().collect();
        let ends = sessions.iter().flat_map(|n| self.sessions[*n].ends.iter());
        let qps: Vec<usize> = ends.flat_map(|end| end.qps.iter().map(|(_, q)| *q)).collect();
        let n = self.rng.below(qps.len() as u32) as usize;
        qps.get(n).copied()
    }

    fn some_session(&mut self) -> Option<usize> {
        let sessions: Vec<usize> = self.live_sessions().collect();
        let n = self.rng.below(sessions.len() as u32) as usize;
        sessions.get(n).copied()
    }

    fn port_down(&mut self, host: usize, n: usize) {
        if !self.ports[host][n] {
            return;
        }
        self.ports[host][n] = false;
        let removed = self.rng.one_in(4);
        for q in 0..self.qps.len() {
            if removed && self.qps[q].owner.role == host && self.qps[q].rnic == n {
                self.break_qp(q);
            }
        }
        let back = self.time(30_000_000);
        if !self.rng.one_in(4) {
            for session in self.live_sessions().collect::<Vec<_>>() {
                let wait = self.time(200_000);
                self.at(self.now + wait, Event::PortNotice(host, n, session));
            }
        }
        self.at(self.now + back, Event::PortUp(host, n));
    }

    /// A host is notified of a port, and reports the change to its group.
    pub(super) fn on_port_notice(&mut self, host: usize, n: usize, session: usize) -> Check {
        let id = EndId { session, role: host };
        let which = rnic(host, n);
        let knows = |group: &LinkGroup| group.params().rnics.iter().any(|r| r.id == which.id);
        let Some(knows) = self.group(id).map(knows) else { return Ok(()) };
        match self.ports[host][n] {
            true if !knows => self.call(id, |group, now| group.handle_rnic_up(which, now)),
            false if knows => self.call(id, |group, now| group.handle_rnic_down(which.id, now)),
            _ => Ok(()),
        }
    }

    pub(super) fn on_port_up(&mut self, host: usize, n: usize) {
        self.ports[host][n] = true;
        for session in self.live_sessions().collect::<Vec<_>>() {
            let wait = self.time(500_000);
            self.at(self.now + wait, Event::PortNotice(host, n, session));
        }
    }

    /// Kills a host; `polite`: its kernel resets the TCP connections.
    fn kill(&mut self, id: EndId, polite: bool) -> Check {
        if self.end(id).dead || !self.end(id).lives() {
            return Ok(());
        }
        self.trace(|| format!("{id:?} dies"));
        for (_, q) in std::mem::take(&mut self.end(id).qps) {
            self.destroy_qp(q);
        }
        let end = self.end(id);
        (end.dead, end.group, end.over) = (true, None, Some(Ending::Reset));
        end.keys.clear();
        end.rmbs.clear();
        self.sessions[id.session].closing = true;
        for conn in 0..self.sessions[id.session].conns.len() {
            let half = HalfId { session: id.session, conn, role: id.role };
            let conn = &mut self.sessions[id.session].conns[half.conn];
            let ended = conn.ended[id.role];
            conn.halves[id.role] = None;
            (conn.excuse, conn.ended[id.role]) = (true, true);
            if !ended && polite {
                self.tcp(half.peer(), Tcp::Reset);
            }
        }
        // A peer not yet begun at the death of the host never begins.
        let peer = id.peer();
        if self.group(peer).is_none() && self.end(peer).over.is_none() {
            for (_, q) in std::mem::take(&mut self.end(peer).qps) {
                self.destroy_qp(q);
            }
            let end = self.end(peer);
            (end.dead, end.over) = (true, Some(Ending::Reset));
            end.keys.clear();
            end.rmbs.clear();
        }
        Ok(())
    }

    /// Calls of applications and administrators, at one end or at both at once.
    fn use_api(&mut self, host: usize) -> Check {
        let Some(session) = self.some_session() else { return Ok(()) };
        let both = self.rng.one_in(3);
        let what = self.rng.below(24);
        for role in [host, 1 - host] {
            let id = EndId { session, role };
            match what {
                0 => {
                    self.sessions[session].closing = true;
                    self.excuse_all(session);
                    self.call(id, |group, now| group.terminate(DeleteReason::OPERATOR, now))?;
                }
                1..=7 => {
                    let active = self.active_links(id);
                    let n = self.rng.below(active.len() as u32) as usize;
                    // The last link takes the group along.
                    let Some(link) = active.get(n).copied().filter(|_| active.len() > 1) else {
                        continue;
                    };
                    let reason = DeleteReason::OPERATOR;
                    self.call(id, |group, now| group.delete_link(link, reason, now))?;
                }
                8..=15 => self.remove_idle_rmb(id)?,
                16..=19 => {
                    let n = self.rng.below(self.plan.rnics[role]) as usize;
                    if self.ports[role][n] {
                        self.call(id, |group, now| group.handle_rnic_up(rnic(role, n), now))?;
                    }
                }
                _ => self.call(id, |group, now| group.handle_timeout(now))?,
            }
            if !both {
                break;
            }
        }
        Ok(())
    }

    fn active_links(&self, id: EndId) -> Vec<LinkKey> {
        let links = self.group(id).map_or(&[][..], LinkGroup::links).iter();
        links.filter(|link| link.state == LinkState::Active).map(|link| link.key).collect()
    }

    fn remove_idle_rmb(&mut self, id: EndId) -> Check {
        let now = self.now;
        let idle =
            |rmb: &&mut super::ends::Rmb| rmb.usage == RmbUse::Free && rmb.rests_until <= now;
        let Some(rmb) = self.end(id).rmbs.iter_mut().find(idle) else { return Ok(()) };
        (rmb.usage, rmb.since) = (RmbUse::Unwanted, now);
        let rmb = rmb.id;
        self.call(id, |group, now| group.remove_rmb(rmb, now))
    }

    fn excuse_all(&mut self, session: usize) {
        for conn in &mut self.sessions[session].conns {
            conn.excuse = true;
        }
    }

    /// From now on everything works.
    pub(super) fn calm_down(&mut self) -> Check {
        self.trace(|| "calm".into());
        self.calm = true;
        self.cuts = [[false; 2]; 2];
        self.stalled = [0; 2];
        for q in &mut self.qps {
            q.slow_until = 0;
        }
        for host in 0..2 {
            for n in 0..self.plan.rnics[host] as usize {
                self.on_port_up(host, n);
            }
        }
        for session in self.live_sessions().collect::<Vec<_>>() {
            for conn in 0..self.sessions[session].conns.len() {
                for role in 0..2 {
                    let half = HalfId { session, conn, role };
                    if let Some(have) = self.half(half) {
                        have.scheduled = false;
                        have.budget = have.budget.min(2000);
                        self.wake(half);
                    }
                }
            }
        }
        Ok(())
    }
}
