// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Groups begin, connections are opened and reset: the exchanges over TCP.

use super::conn::{Conn, Half, Release, Tcp};
use super::ends::{End, Rmb, RmbUse};
use super::half::token_of;
use super::plan::rnic;
use super::types::{Check, EndId, Event, HalfId};
use super::world::{Session, Simulation};
use crate::connection::close::{Event as CloseEvent, State};
use crate::connection::{Ring, RingError};
use crate::link_group::{
    Ending, FirstLink, LinkGroup, LinkKey, PeerRmbId, Region, RemoteEnd, RmbId,
};
use crate::wire::ids::{Mtu, Psn, Qpn};

/// Connections of one pair of groups at a time.
const MOST_CONNS: usize = 10;
/// RMBs of one end; more are not made.
const MOST_RMBS: usize = 32;

impl Simulation {
    fn new_conn(&mut self) -> Conn {
        let lens = [0, 1].map(|_| 64 << (2 * self.rng.below(3)));
        let bytes = self.plan.bytes;
        let budgets = [0, 1].map(|_| if self.rng.one_in(4) { 0 } else { self.rng.below(bytes) });
        self.report.connections += 1;
        Conn::new(lens, budgets)
    }

    fn new_half(
        &mut self,
        id: HalfId,
        rmb: RmbId,
        link: LinkKey,
        peer: Option<PeerRmbId>,
    ) -> Check {
        let conn = &self.sessions[id.session].conns[id.conn];
        let (own, peers) = (conn.lens[id.role], conn.lens[1 - id.role]);
        let ring = |len| -> Result<Ring, RingError> { self.plan.ring(len) };
        let (Ok(own), Ok(ring)) = (ring(own), ring(peers)) else { return Err("no ring".into()) };
        let mut half = Half::new(self.now, [own, ring], peers, token_of(id.peer()), rmb, link);
        half.peer_rmb = peer;
        half.budget = conn.budgets[id.role];
        half.slow = self.rng.one_in(12);
        self.sessions[id.session].conns[id.conn].halves[id.role] = Some(half);
        Ok(())
    }

    // ---- first contact

    fn some_port(&mut self, host: usize) -> Option<usize> {
        let first = self.rng.below(self.plan.rnics[host]) as usize;
        [first, 0, 1]
            .into_iter()
            .find(|n| *n < self.plan.rnics[host] as usize && self.ports[host][*n])
    }

    /// A client proposes, and the server accepts, over two queue pairs.
    pub(super) fn open_session(&mut self) {
        let (Some(a), Some(b)) = (self.some_port(0), self.some_port(1)) else { return };
        let session = self.sessions.len();
        let conn = self.new_conn();
        let lens = conn.lens;
        self.sessions.push(Session {
            ends: [End::default(), End::default()],
            conns: vec![conn],
            doubled: false,
            lied: false,
            closing: false,
        });
        self.report.groups += 1;
        let ends = [0, 1].map(|role| EndId { session, role });
        let rnics = [a, b];
        let qps = [0, 1].map(|n: usize| self.new_qp(ends[n], LinkKey::FIRST, rnics[n]));
        (self.qps[qps[0]].peer, self.qps[qps[1]].peer) = (Some(qps[1]), Some(qps[0]));
        let regions = ends.map(|end| {
            let q = qps[end.role];
            self.end(end).qps.push((LinkKey::FIRST, q));
            let since = self.now;
            self.end(end).rmbs.push(Rmb {
                id: RmbId(0),
                memory: vec![0; lens[end.role] as usize],
                usage: RmbUse::Used,
                conn: Some(0),
                rests_until: 0,
                since,
            });
            self.end(end).next_rmb = 1;
            self.register(end, RmbId(0), LinkKey::FIRST)
        });
        let confirm = Tcp::FirstConfirm { rnics, regions };
        self.tcp(HalfId { session, conn: 0, role: 0 }, confirm);
        if self.begin(ends[1], rnics, regions).is_err() {
            self.sessions[session].closing = true;
        }
        self.dirty.push(ends[1]);
    }

    fn begin(&mut self, id: EndId, rnics: [usize; 2], regions: [Region; 2]) -> Check {
        let (own, peer) = (id.role, 1 - id.role);
        let (Some(q), there) = (self.end(id).qp(LinkKey::FIRST), rnic(peer, rnics[peer])) else {
            return Ok(());
        };
        let Some(other) = self.qps[q].peer else { return Ok(()) };
        let remote = RemoteEnd {
            gid: there.gid,
            mac: there.mac,
            qpn: Qpn::new(self.qps[other].qpn),
            psn: Psn::new(0),
            mtu: Mtu::B1024,
        };
        let first = FirstLink {
            rnic: rnic(own, rnics[own]),
            qpn: Qpn::new(self.qps[q].qpn),
            remote,
            rmb: RmbId(0),
            region: regions[own],
            peer_region: regions[peer],
        };
        let params = self.plan.params(own, id.session as u32 + 1, &self.ports[own]);
        let group = LinkGroup::new(params, first, self.instant());
        let peer_rmb = group.find_peer_rmb(LinkKey::FIRST, regions[peer].rkey);
        self.end(id).group = Some(group);
        let half = HalfId { session: id.session, conn: 0, role: own };
        self.new_half(half, RmbId(0), LinkKey::FIRST, peer_rmb)?;
        let now = self.instant();
        if let Some(group) = &mut self.end(id).group
            && group.connection_added(LinkKey::FIRST, now).is_err()
        {
            return Err(format!("{id:?}: no room for the first connection"));
        }
        self.dirty.push(id);
        Ok(())
    }

    pub(super) fn on_group_usable(&mut self, id: EndId) -> Check {
        for half in self.halves_of(id) {
            self.wake(half);
        }
        if id.role == 0 {
            let wait = self.time(self.plan.open_every);
            self.at(self.now + wait, Event::Open(id.session));
        }
        Ok(())
    }

    pub(super) fn on_group_over(&mut self, id: EndId, ending: Ending) -> Check {
        for half in self.halves_of(id) {
            let used = self.half(half).is_some_and(|half| half.written > 0 || half.read > 0);
            match ending {
                Ending::Quiet => return Err(format!("{half:?} is left, and the end is quiet")),
                Ending::Fallback => {
                    if used {
                        return Err(format!("{half:?} goes back to TCP, and was used"));
                    }
                    self.tcp(half.peer(), Tcp::FirstDecline);
                }
                Ending::Reset => self.send_reset(half),
            }
            self.sessions[id.session].conns[half.conn].excuse = true;
            self.remove_half(half, Release::Withdraw, false);
        }
        for conn in &mut self.sessions[id.session].conns {
            conn.excuse = true;
            conn.ended[id.role] = true;
        }
        Ok(())
    }

    // ---- further connections

    pub(super) fn on_open(&mut self, session: usize) -> Check {
        let id = EndId { session, role: 0 };
        if self.calm || self.sessions[session].closing || !self.end(id).lives() {
            return Ok(());
        }
        let wait = self.time(self.plan.open_every * 2);
        self.at(self.now + wait, Event::Open(session));
        let usable = self.group(id).is_some_and(LinkGroup::is_usable);
        let now = self.now;
        let room = |end: &End| {
            let free = |rmb: &Rmb| rmb.usage == RmbUse::Free && rmb.rests_until <= now;
            end.rmbs.len() < MOST_RMBS || end.rmbs.iter().any(free)
        };
        let full = !self.sessions[session].ends.iter().all(room);
        if !usable || full || self.halves_of(id).len() >= MOST_CONNS {
            return Ok(());
        }
        let conn = self.new_conn();
        self.sessions[session].conns.push(conn);
        let conn = self.sessions[session].conns.len() - 1;
        self.take_rmb(id, conn)
    }

    fn take_rmb(&mut self, id: EndId, conn: usize) -> Check {
        let len = self.sessions[id.session].conns[conn].lens[id.role] as usize;
        let now = self.now;
        let fits = |rmb: &&mut Rmb| {
            rmb.usage == RmbUse::Free && rmb.rests_until <= now && rmb.memory.len() == len
        };
        if let Some(rmb) = self.end(id).rmbs.iter_mut().find(fits) {
            let rmb = rmb.id;
            return self.on_rmb(id, conn, Some(rmb));
        }
        let on = self.group(id).and_then(LinkGroup::pick_link);
        match on.filter(|_| self.sessions[id.session].ends[id.role].rmbs.len() < MOST_RMBS) {
            Some(link) => self.add_rmb(id, len as u32, conn, link),
            None => self.on_rmb(id, conn, None),
        }
    }

    /// A connection being opened has memory now, or cannot have any.
    pub(super) fn on_rmb(&mut self, id: EndId, conn: usize, rmb: Option<RmbId>) -> Check {
        let half = HalfId { session: id.session, conn, role: id.role };
        if self.sessions[id.session].conns[conn].ended != [false; 2] {
            return Ok(());
        }
        let linked = match (rmb, id.role) {
            (None, _) => false,
            (Some(rmb), 0) => self.accept(half, rmb)?,
            (Some(rmb), _) => self.confirm(half, rmb)?,
        };
        if !linked {
            self.cancel(half);
            self.tcp(half.peer(), Tcp::Decline);
        }
        Ok(())
    }

    fn cancel(&mut self, id: HalfId) {
        let conn = &mut self.sessions[id.session].conns[id.conn];
        (conn.ended, conn.declined, conn.excuse) = ([true; 2], true, true);
    }

    fn use_rmb(&mut self, id: HalfId, rmb: RmbId) {
        if let Some(rmb) = self.end(id.end()).rmb(rmb) {
            (rmb.usage, rmb.conn) = (RmbUse::Used, Some(id.conn));
            rmb.memory.fill(0);
        }
    }

    /// Counts a connection, made at once if the group has room. The caller then carries out the
    /// outputs.
    fn count(&mut self, id: EndId, link: LinkKey) -> bool {
        let now = self.instant();
        let Some(group) = &mut self.end(id).group else { return false };
        group.connection_added(link, now).is_ok()
    }

    fn accept(&mut self, id: HalfId, rmb: RmbId) -> Result<bool, String> {
        let end = id.end();
        let Some(group) = self.group(end) else { return Ok(false) };
        let Some(link) = group.pick_link().filter(|_| group.has_room()) else { return Ok(false) };
        let Some((qpn, gid)) = group.link(link).map(|link| (link.qpn, link.rnic.gid)) else {
            return Err(format!("{end:?}: picks {link:?}, which is not there"));
        };
        let Some(region) = self.sessions[end.session].ends[end.role].region(rmb, link) else {
            return Err(format!("{end:?}: {rmb:?} has no key on {link:?}"));
        };
        self.use_rmb(id, rmb);
        if !self.count(end, link) {
            self.release_rmb(end, rmb, Release::Reuse, false);
            return Ok(false);
        }
        self.new_half(id, rmb, link, None)?;
        self.apply_outputs(end)?;
        self.sessions[id.session].conns[id.conn].named = Some(link);
        self.tcp(id.peer(), Tcp::Accept { qpn, gid, region });
        Ok(true)
    }

    fn confirm(&mut self, id: HalfId, rmb: RmbId) -> Result<bool, String> {
        let end = id.end();
        let accept = self.sessions[id.session].conns[id.conn].accept;
        let (Some(group), Some((qpn, gid, region))) = (self.group(end), accept) else {
            return Ok(false);
        };
        // The link may have gone since.
        let Some(link) = group.link_to(qpn, gid).filter(|_| group.is_usable()) else {
            return Ok(false);
        };
        let Some(own) = self.sessions[end.session].ends[end.role].region(rmb, link) else {
            return Err(format!("{end:?}: {rmb:?} has no key on {link:?}"));
        };
        self.use_rmb(id, rmb);
        let mut bound = Err(crate::link_group::UseError::Over);
        self.call(end, |group, _| bound = group.bind_peer_rmb(link, region))?;
        let counted = bound.is_ok() && self.count(end, link);
        let (Ok(peer), true) = (bound, counted) else {
            self.release_rmb(end, rmb, Release::Reuse, false);
            return Ok(false);
        };
        self.new_half(id, rmb, link, Some(peer))?;
        self.apply_outputs(end)?;
        self.tcp(id.peer(), Tcp::Confirm { region: own });
        self.try_attach_path(id)?;
        self.wake(id);
        Ok(true)
    }

    // ---- TCP

    pub(super) fn tcp(&mut self, to: HalfId, what: Tcp) {
        self.sessions[to.session].conns[to.conn].lanes[to.role].push_back(what);
        let wait = self.time(30_000);
        self.at(self.now + wait, Event::Tcp(to));
    }

    pub(super) fn send_reset(&mut self, id: HalfId) {
        self.sessions[id.session].conns[id.conn].excuse = true;
        self.tcp(id.peer(), Tcp::Reset);
    }

    pub(super) fn on_tcp(&mut self, id: HalfId) -> Check {
        let conn = &mut self.sessions[id.session].conns[id.conn];
        let Some(what) = conn.lanes[id.role].pop_front() else { return Ok(()) };
        self.trace(|| format!("{id:?} {what:?}"));
        let end = id.end();
        if self.end(end).dead {
            return Ok(());
        }
        match what {
            Tcp::FirstConfirm { rnics, regions } => self.begin(end, rnics, regions),
            Tcp::FirstDecline => {
                self.call(end, |group, now| group.handle_decline(now))?;
                self.on_reset(id)
            }
            Tcp::Accept { qpn, gid, region } => {
                let conn = &mut self.sessions[id.session].conns[id.conn];
                conn.accept = Some((qpn, gid, region));
                let fits = |group: &LinkGroup| {
                    group.is_usable() && group.has_room() && group.link_to(qpn, gid).is_some()
                };
                if self.group(end).is_some_and(fits) {
                    return self.take_rmb(end, id.conn);
                }
                self.cancel(id);
                self.tcp(id.peer(), Tcp::Decline);
                Ok(())
            }
            Tcp::Confirm { region } => self.on_confirm(id, region),
            Tcp::Decline => {
                self.cancel(id);
                if self.half_ref(id).is_some() {
                    self.remove_half(id, Release::Reuse, false);
                }
                Ok(())
            }
            Tcp::Reset => self.on_reset(id),
        }
    }

    fn on_confirm(&mut self, id: HalfId, region: Region) -> Check {
        let Some(link) = self.sessions[id.session].conns[id.conn].named else { return Ok(()) };
        if self.half_ref(id).is_none() {
            return Ok(());
        }
        let mut bound = Err(crate::link_group::UseError::Over);
        self.call(id.end(), |group, _| bound = group.bind_peer_rmb(link, region))?;
        let Ok(peer) = bound else {
            // The link is gone, and the key has no meaning any more.
            self.send_reset(id);
            return self.close_event(id, CloseEvent::Abort);
        };
        if let Some(half) = self.half(id) {
            half.peer_rmb = Some(peer);
        }
        self.try_attach_path(id)?;
        self.wake(id);
        Ok(())
    }

    fn on_reset(&mut self, id: HalfId) -> Check {
        self.sessions[id.session].conns[id.conn].excuse = true;
        if self.half_ref(id).is_none() {
            self.sessions[id.session].conns[id.conn].ended[id.role] = true;
            return Ok(());
        }
        self.close_event(id, CloseEvent::TcpReset)
    }

    /// The peer has deleted an RMB: connections writing to the RMB must stop.
    pub(super) fn on_peer_rmb_deleted(&mut self, id: EndId, rmb: PeerRmbId) -> Check {
        // The peer's last word may have come over another link, still unread.
        self.take_all_cdc(id)?;
        let users = self.halves_of(id).into_iter();
        let users = users
            .filter(|half| self.half_ref(*half).is_some_and(|half| half.peer_rmb == Some(rmb)));
        for half in users.collect::<Vec<_>>() {
            if let Some(have) = self.half_ref(half).filter(|half| half.state() == State::Closed) {
                // A closed half waits only for the arrival of its last message, now certain.
                let complete = !have.failed && have.saw_end && have.budget == 0;
                let how = have.release.unwrap_or(Release::Withdraw);
                self.remove_half(half, how, complete);
                continue;
            }
            let lied = self.sessions[id.session].lied;
            let conn = &mut self.sessions[id.session].conns[half.conn];
            if !conn.excuse && !lied {
                return Err(format!("{half:?} loses its peer's memory"));
            }
            conn.reset = true;
            self.send_reset(half);
            self.remove_half(half, Release::Withdraw, false);
        }
        Ok(())
    }
}
