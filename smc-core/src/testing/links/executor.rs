// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Carries out the outputs of link groups, like a host with RNICs.

use super::conn::Release;
use super::ends::{End, Key, Rmb, RmbUse};
use super::plan::{Faults, rnic};
use super::qp::{Done, Message, Op, QpState};
use super::types::{Check, EndId, Event};
use super::world::Simulation;
use crate::link_group::{
    Cause, Ending, LinkGroup, LinkKey, LinkState, Output, Prepared, Region, RmbId,
};
use crate::time::Tick;
use crate::wire::cdc::Cdc;
use crate::wire::ids::{Gid, Psn, Qpn, Rkey};
use crate::wire::llc::Llc;

/// Maximum wait for outstanding writes on a working link before connections leave.
const LAST_WRITES: u64 = 200_000;
/// Outputs of one call; more can only be an endless loop.
const MOST_OUTPUTS: u32 = 4096;

impl Simulation {
    pub(super) fn end(&mut self, id: EndId) -> &mut End {
        &mut self.sessions[id.session].ends[id.role]
    }

    pub(super) fn group(&self, id: EndId) -> Option<&LinkGroup> {
        self.sessions[id.session].ends[id.role].group.as_ref()
    }

    /// A call of the group, with all its consequences.
    pub(super) fn call(&mut self, id: EndId, what: impl FnOnce(&mut LinkGroup, Tick)) -> Check {
        let now = self.instant();
        let Some(group) = &mut self.end(id).group else { return Ok(()) };
        what(group, now);
        self.apply_outputs(id)
    }

    /// Carries out the outputs of nested calls.
    pub(super) fn drain_dirty(&mut self) -> Check {
        while let Some(id) = self.dirty.pop() {
            self.apply_outputs(id)?;
        }
        Ok(())
    }

    pub(super) fn apply_outputs(&mut self, id: EndId) -> Check {
        let mut count = 0;
        while let Some(output) = self.end(id).group.as_mut().and_then(LinkGroup::poll_output) {
            let dialect = self.plan.profile[id.role].dialect;
            self.trace(|| match &output {
                Output::PostLlc { link, bytes, .. } => {
                    let message = Llc::parse(bytes, &dialect).map(|llc| llc.message);
                    format!("{id:?} on {}: {message:?}", link.get())
                }
                _ => format!("{id:?} {output:?}"),
            });
            self.execute(id, output)?;
            count += 1;
            if count > MOST_OUTPUTS {
                return Err(format!("{id:?} has no end of things to do"));
            }
        }
        self.revive(id)?;
        self.check_end(id)?;
        self.arm_timer(id);
        Ok(())
    }

    fn arm_timer(&mut self, id: EndId) {
        let Some(at) = self.group(id).and_then(LinkGroup::poll_timeout) else { return };
        if self.end(id).timer_at.is_none_or(|have| have > at.0) {
            self.end(id).timer_at = Some(at.0);
            // A host may be busy.
            let late = if self.rng.one_in(8) { self.time(20_000) } else { 0 };
            self.at(at.0 + late, Event::Timer(id));
        }
    }

    pub(super) fn on_timer(&mut self, id: EndId) -> Check {
        let now = self.instant();
        if self.end(id).timer_at.take_if(|at| *at <= now.0).is_none() {
            return Ok(());
        }
        if self.group(id).and_then(LinkGroup::poll_timeout).is_some_and(|at| at.has_passed(now)) {
            // A call may start timers already overdue, if the host was busy.
            let is_due = |group: &LinkGroup| group.poll_timeout().is_some_and(|at| at <= now);
            for _ in 0..8 {
                if self.group(id).is_some_and(is_due) {
                    self.call(id, |group, now| group.handle_timeout(now))?;
                }
            }
            if self.group(id).is_some_and(is_due) {
                return Err(format!("{id:?}: timer stands still"));
            }
        }
        self.arm_timer(id);
        Ok(())
    }

    fn execute(&mut self, id: EndId, output: Output) -> Check {
        match output {
            Output::PostLlc { link, bytes, receipt } => {
                let Some(q) = self.end(id).qp(link) else {
                    return Err(format!("{id:?}: message on {link:?}, which has no queue pair"));
                };
                self.post_llc(q, bytes, receipt);
            }
            Output::PrepareLink { link, .. } => {
                let slow = self.plan.faults.contains(Faults::SETUP) && !self.calm;
                let wait = if slow && self.rng.one_in(4) { 3_000_000 } else { 5000 };
                let wait = self.time(wait);
                self.at(self.now + wait, Event::Prepare(id, link));
            }
            Output::ConnectLink { link, remote, .. } => {
                let Some(q) = self.end(id).qp(link) else {
                    return Err(format!(
                        "{id:?}: {link:?} is to be connected and has no queue pair"
                    ));
                };
                self.connect(q, remote.gid, remote.qpn);
            }
            Output::ActivateLink { link } | Output::LinkUsable { link } => {
                if self.end(id).qp(link).is_none() {
                    return Err(format!("{id:?}: {output:?} without a queue pair"));
                }
                if matches!(output, Output::LinkUsable { .. }) {
                    self.report.links += 1;
                }
            }
            Output::GroupUsable => self.on_group_usable(id)?,
            Output::RmbConfirmed { rmb } => {
                let waits = self.end(id).rmb(rmb).map(|rmb| {
                    rmb.usage = RmbUse::Free;
                    rmb.conn.take()
                });
                let Some(waits) = waits else {
                    return Err(format!("{id:?}: {rmb:?} is confirmed, and does not exist"));
                };
                if let Some(conn) = waits {
                    self.on_rmb(id, conn, Some(rmb))?;
                }
            }
            Output::RmbRefused { rmb } => {
                let waits = self.end(id).rmb(rmb).and_then(|rmb| rmb.conn.take());
                self.remove_rmb(id, rmb)?;
                if let Some(conn) = waits {
                    self.on_rmb(id, conn, None)?;
                }
            }
            Output::RmbDeleted { rmb } => self.remove_rmb(id, rmb)?,
            Output::PeerRmbDeleted { rmb } => self.on_peer_rmb_deleted(id, rmb)?,
            Output::MoveConnections { from, to, dead } => {
                self.move_connections(id, from, to, dead)?
            }
            Output::DestroyLink { link } => self.destroy(id, link)?,
            Output::Terminated { reason, ending } => {
                self.trace(|| format!("{id:?} is over: {reason:?}"));
                self.on_terminated(id, ending)?;
            }
        }
        Ok(())
    }

    fn post_llc(&mut self, q: usize, bytes: Vec<u8>, receipt: Option<crate::link_group::Receipt>) {
        let session = self.qps[q].owner.session;
        let faults = if self.calm { Faults::empty() } else { self.plan.faults };
        let mut sent = bytes.clone();
        if faults.contains(Faults::CORRUPT) && self.rng.one_in(24) {
            self.sessions[session].lied = true;
            for _ in 0..1 + self.rng.below(3) {
                let len = sent.len() as u32;
                let bit = self.rng.below(len * 8);
                if let Some(byte) = sent.get_mut(bit as usize / 8) {
                    *byte ^= 1 << (bit % 8);
                }
            }
        }
        if faults.contains(Faults::IGNORE) && self.rng.one_in(40) {
            // The message arrives without any effect.
            sent.clear();
        }
        self.post(q, Op::Llc { bytes: sent, receipt });
        if faults.contains(Faults::DUPLICATE) && self.rng.one_in(12) {
            self.sessions[session].doubled = true;
            if self.rng.one_in(2) {
                self.post(q, Op::Llc { bytes, receipt: None });
            } else {
                self.copies.push(bytes);
                let wait = self.time(8_000_000);
                self.at(self.now + wait, Event::LateLlc(q, self.copies.len() - 1));
            }
        }
    }

    pub(super) fn on_late_llc(&mut self, q: usize, n: usize) -> Check {
        let bytes = std::mem::take(&mut self.copies[n]);
        if !self.calm {
            self.post(q, Op::Llc { bytes, receipt: None });
        }
        Ok(())
    }

    pub(super) fn connect(&mut self, q: usize, gid: Gid, qpn: Qpn) {
        let host = 1 - self.qps[q].owner.role;
        let there = |n: usize| rnic(host, n).gid.same_address(gid);
        let is = |qp: &super::qp::Qp| {
            qp.owner.role == host
                && qp.state != QpState::Gone
                && qp.qpn == qpn.get()
                && there(qp.rnic)
        };
        self.qps[q].peer = self.qps.iter().rposition(is);
    }

    pub(super) fn on_prepare(&mut self, id: EndId, link: LinkKey) -> Check {
        let Some(state) = self.group(id).and_then(|group| group.link(link)) else { return Ok(()) };
        if state.state != LinkState::Preparing {
            return Ok(());
        }
        let n = state.rnic.id.0 as usize;
        let broken = self.plan.faults.contains(Faults::SETUP) && !self.calm && self.rng.one_in(12);
        if n >= 2 || !self.ports[id.role][n] || broken {
            return self.call(id, |group, now| group.handle_link_failed(link, Cause::Setup, now));
        }
        let q = self.new_qp(id, link, n);
        self.end(id).qps.push((link, q));
        let rmbs: Vec<RmbId> = self.end(id).rmbs.iter().map(|rmb| rmb.id).collect();
        let regions = rmbs.into_iter().map(|rmb| (rmb, self.register(id, rmb, link))).collect();
        let qpn = Qpn::new(self.qps[q].qpn);
        let psn = Psn::new(self.rng.below(1 << 24));
        let prepared = Prepared { qpn, psn, regions };
        self.call(id, |group, now| group.handle_link_prepared(link, prepared, now))
    }

    /// A key of an RMB on a link: no two are the same.
    pub(super) fn register(&mut self, id: EndId, rmb: RmbId, link: LinkKey) -> Region {
        let rkey = loop {
            let rkey = Rkey(self.rng.bits() as u32);
            if self.end(id).key(rkey).is_none() {
                break rkey;
            }
        };
        let region = Region { rkey, address: self.rng.bits() >> 1 };
        self.end(id).keys.push(Key { rmb, link, region });
        region
    }

    /// Adds a new RMB and announces the RMB to the peer.
    pub(super) fn add_rmb(&mut self, id: EndId, len: u32, conn: usize, on: LinkKey) -> Check {
        let rmb = RmbId(self.end(id).next_rmb);
        let Some(group) = self.group(id) else { return Ok(()) };
        let links: Vec<LinkKey> = group.key_links().collect();
        if let Some(link) =
            links.iter().find(|link| self.sessions[id.session].ends[id.role].qp(**link).is_none())
        {
            return Err(format!("{id:?}: key wanted for {link:?}, which has no queue pair"));
        }
        self.end(id).next_rmb += 1;
        let since = self.now;
        self.end(id).rmbs.push(Rmb {
            id: rmb,
            memory: vec![0; len as usize],
            usage: RmbUse::Unconfirmed,
            conn: Some(conn),
            rests_until: 0,
            since,
        });
        let regions: Vec<(LinkKey, Region)> =
            links.into_iter().map(|link| (link, self.register(id, rmb, link))).collect();
        let mut result = Ok(());
        self.call(id, |group, now| result = group.add_rmb(rmb, Some(on), &regions, now))?;
        if result.is_err() {
            self.remove_rmb(id, rmb)?;
            self.on_rmb(id, conn, None)?;
        }
        Ok(())
    }

    fn remove_rmb(&mut self, id: EndId, rmb: RmbId) -> Check {
        let lied = self.sessions[id.session].lied;
        let end = self.end(id);
        let Some(at) = end.rmbs.iter().position(|have| have.id == rmb) else {
            return Err(format!("{id:?}: {rmb:?} goes, and does not exist"));
        };
        if end.rmbs[at].usage == RmbUse::Used && !lied {
            return Err(format!("{id:?}: {rmb:?} goes, and is used"));
        }
        end.rmbs.remove(at);
        end.keys.retain(|key| key.rmb != rmb);
        Ok(())
    }

    /// A connection does not need its RMB any more.
    pub(super) fn release_rmb(&mut self, id: EndId, rmb: RmbId, how: Release, moved: bool) {
        // Writes repeated over another link may be slower than the end of the connection, sent over
        // the first link: the memory has to rest.
        let rests_until = if moved { self.now + 10_000_000 } else { self.now };
        let now = self.now;
        let Some(have) = self.end(id).rmb(rmb) else { return };
        (have.conn, have.rests_until, have.since) = (None, rests_until, now);
        have.usage = match how {
            Release::Reuse => RmbUse::Free,
            Release::Withdraw => RmbUse::Unwanted,
        };
        if how == Release::Withdraw {
            let now = self.instant();
            if let Some(group) = &mut self.end(id).group {
                group.remove_rmb(rmb, now);
            }
            self.dirty.push(id);
        }
    }

    /// Moves every connection of a link to another one.
    fn move_connections(&mut self, id: EndId, from: LinkKey, to: LinkKey, dead: bool) -> Check {
        if self.end(id).qp(to).is_none() {
            return Err(format!("{id:?}: connections move to {to:?}, which is gone"));
        }
        self.take_all_cdc(id)?;
        if let (true, Some(q)) = (dead, self.end(id).qp(from)) {
            // Writes still under way there must not arrive after the repeated ones.
            self.stop_qp(q);
        }
        for half in self.halves_of(id) {
            if self.half(half).is_some_and(|half| half.link == from) {
                self.change_link(half, to, dead);
            }
        }
        if !dead {
            self.at(self.now + LAST_WRITES, Event::LastWrites(id, from));
        }
        Ok(())
    }

    /// Enough waiting for outstanding writes.
    pub(super) fn on_last_writes(&mut self, id: EndId, from: LinkKey) -> Check {
        let Some(q) = self.end(id).qp(from) else { return Ok(()) };
        let late = self.halves_of(id).into_iter().filter(|half| {
            self.half_ref(*half).is_some_and(|half| half.path == Some(q) && half.leaving)
        });
        let late: Vec<_> = late.collect();
        if !late.is_empty() {
            self.take_all_cdc(id)?;
            self.break_qp(q);
            for half in late {
                self.detach_path(half);
            }
            self.revive(id)?;
        }
        Ok(())
    }

    /// Delivers arrived messages to the connections before any conclusion from missing ones.
    pub(super) fn take_all_cdc(&mut self, id: EndId) -> Check {
        self.take_all_cdc_but(id, None)
    }

    pub(super) fn take_all_cdc_but(&mut self, id: EndId, but: Option<usize>) -> Check {
        for n in 0..self.end(id).qps.len() {
            let Some((_, q)) = self.end(id).qps.get(n).copied() else { break };
            while Some(q) != but
                && let Some(bytes) = self.take_cdc(q)
            {
                self.on_cdc(id, q, &bytes)?;
            }
        }
        Ok(())
    }

    fn destroy(&mut self, id: EndId, link: LinkKey) -> Check {
        let Some(q) = self.end(id).qp(link) else {
            let preparing = self.end(id).keys.iter().all(|key| key.link != link);
            return match preparing {
                true => Ok(()),
                false => Err(format!("{id:?}: {link:?} is destroyed twice")),
            };
        };
        while let Some(bytes) = self.take_cdc(q) {
            self.on_cdc(id, q, &bytes)?;
        }
        for half in self.halves_of(id) {
            let Some(have) = self.half_ref(half) else { continue };
            let rmb = have.peer_rmb;
            if have.path == Some(q) {
                self.detach_path(half);
            }
            let known = |group: &LinkGroup| rmb.and_then(|rmb| group.peer_region(rmb, link));
            if self.group(id).and_then(known).is_some() {
                return Err(format!("{id:?} remembers keys of {link:?}, which is gone"));
            }
        }
        self.destroy_qp(q);
        let end = self.end(id);
        end.qps.retain(|(key, _)| *key != link);
        end.keys.retain(|key| key.link != link);
        Ok(())
    }

    pub(super) fn on_broken(&mut self, q: usize) -> Check {
        let (id, link) = (self.qps[q].owner, self.qps[q].link);
        if self.qps[q].state != QpState::Error {
            return Ok(());
        }
        self.call(id, |group, now| group.handle_link_failed(link, Cause::QueuePair, now))
    }

    pub(super) fn on_done(&mut self, q: usize, done: Done) -> Check {
        let id = self.qps[q].owner;
        match done {
            Done::Receipt(receipt) => self.call(id, |group, now| group.handle_sent(receipt, now)),
            Done::Cdc { from, number } => self.on_cdc_sent(from, q, number),
        }
    }

    pub(super) fn on_message(&mut self, q: usize, message: Message) -> Check {
        let (id, link) = (self.qps[q].owner, self.qps[q].link);
        match message {
            Message::Cdc(bytes) => {
                self.call(id, |group, now| group.handle_received(link, now))?;
                self.on_cdc(id, q, &bytes)
            }
            Message::Llc(bytes) if bytes.is_empty() => Ok(()),
            Message::Llc(bytes) => {
                let mut result = Ok(());
                self.call(id, |group, now| result = group.handle_message(link, &bytes, now))?;
                self.report.messages += 1;
                if let Err(anomaly) = result {
                    self.report.anomalies += 1;
                    self.trace(|| format!("{id:?} {anomaly}"));
                }
                Ok(())
            }
        }
    }

    fn on_cdc(&mut self, id: EndId, q: usize, bytes: &[u8]) -> Check {
        let Ok(cdc) = Cdc::parse(bytes) else {
            return Err("connection data cannot be parsed".into());
        };
        self.take(id, q, cdc)
    }

    fn on_terminated(&mut self, id: EndId, ending: Ending) -> Check {
        let end = self.end(id);
        if !end.qps.is_empty() {
            return Err(format!("{id:?}: links are left at the end: {:?}", end.qps));
        }
        self.end(id).over = Some(ending);
        self.on_group_over(id, ending)?;
        let end = self.end(id);
        if end.group.as_mut().and_then(LinkGroup::poll_output).is_some() {
            return Err(format!("{id:?} speaks after its end"));
        }
        if end.group.as_ref().is_some_and(|group| group.poll_timeout().is_some()) {
            return Err(format!("{id:?} has a timer after its end"));
        }
        // An ended group gives no outputs, for any inputs.
        self.poke_the_dead(id)?;
        let end = self.end(id);
        end.group = None;
        end.rmbs.clear();
        end.keys.clear();
        Ok(())
    }
}
