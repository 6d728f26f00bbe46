// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! One half of a connection: its send element, its path, and its move to another link.

use super::conn::{Half, Release};
use super::qp::{Op, QpState};
use super::types::{Check, EndId, Event, HalfId};
use super::world::Simulation;
use crate::connection::{Span, State};
use crate::link_group::{LinkKey, Region, RmbId};
use crate::wire::cdc::{Cdc, ConsumerWord, ProducerFlags};

/// How long a connection may be between two links, microseconds.
const PARKED: u64 = 60_000_000;

impl Simulation {
    pub(super) fn half(&mut self, id: HalfId) -> Option<&mut Half> {
        self.sessions[id.session].conns[id.conn].halves[id.role].as_mut()
    }

    pub(super) fn half_ref(&self, id: HalfId) -> Option<&Half> {
        self.sessions[id.session].conns[id.conn].halves[id.role].as_ref()
    }

    pub(super) fn halves_of(&self, id: EndId) -> Vec<HalfId> {
        let EndId { session, role } = id;
        let conns = self.sessions[session].conns.iter().enumerate();
        let there = conns.filter(|(_, conn)| conn.halves[role].is_some());
        there.map(|(conn, _)| HalfId { session, conn, role }).collect()
    }

    /// Sends the newest words, with the announced bytes of the send element.
    pub(super) fn publish(&mut self, id: HalfId) -> Check {
        let Some(half) = self.half(id).filter(|half| !half.abandoned) else { return Ok(()) };
        let (producer, consumer) = half.connection.words();
        half.outbound.set_words([producer.to_u64(), consumer.to_u64()]);
        half.connection.on_published();
        self.post_pending(id)
    }

    /// Posts pending messages, if there is a path.
    fn post_pending(&mut self, id: HalfId) -> Check {
        while let Some(half) = self.half_ref(id)
            && let Some(q) = half.path.filter(|_| !half.leaving)
            && let Some(post) = half.outbound.next_post()
        {
            self.post_writes(id, q, post.spans)?;
            let number = post.sequence;
            self.trace(|| format!("{id:?} on {q}: {:?} {:?}", Cdc::parse(&post.cdc), post.spans));
            self.post(q, Op::Cdc { from: id, number, bytes: post.cdc });
            if let Some(half) = self.half(id) {
                half.outbound.on_posted(&post);
                half.in_flight.push((q, number));
            }
        }
        Ok(())
    }

    fn post_writes(&mut self, id: HalfId, q: usize, spans: [Span; 2]) -> Check {
        for span in spans.into_iter().filter(|span| span.len > 0) {
            let Some(half) = self.half_ref(id) else { return Ok(()) };
            let Region { rkey, address } = half.region;
            self.check_target(id, q, half.region)?;
            let address = address.wrapping_add(span.offset.into());
            self.post(q, Op::Write { from: id, span, rkey: rkey.0, address });
        }
        Ok(())
    }

    /// A write lands in the peer's memory; false if its adapter refuses it.
    pub(super) fn land(
        &mut self,
        from: HalfId,
        q: usize,
        span: Span,
        rkey: u32,
        address: u64,
    ) -> Result<bool, String> {
        let id = self.qps[q].owner;
        let lied = self.sessions[id.session].lied;
        let Some(key) = self.end(id).key(crate::wire::ids::Rkey(rkey)) else { return Ok(false) };
        let offset = address.wrapping_sub(key.region.address);
        let Session2 { element, memory, user } = match self.two(from, id, key.rmb) {
            Some(two) => two,
            None => return Ok(true),
        };
        let (Ok(at), len) = (usize::try_from(offset), span.len as usize) else { return Ok(false) };
        let start = span.offset as usize;
        let Some(end) = at.checked_add(len).filter(|end| *end <= memory.len()) else {
            return Ok(false);
        };
        if user.is_none_or(|user| user == from.conn) && at == start {
            // The memory of an ended connection rests for such writes, slower on their link than
            // the end on another one.
            memory[at..end].copy_from_slice(&element[start..start + len]);
            return Ok(true);
        }
        if !lied {
            return Err(format!("{from:?} writes {span:?} to {at}.. of what {user:?} uses"));
        }
        memory[at..end].copy_from_slice(&element[start..start + len]);
        if let Some(user) = user {
            self.sessions[id.session].conns[user].spoiled = true;
        }
        Ok(true)
    }

    fn two(&mut self, from: HalfId, to: EndId, rmb: RmbId) -> Option<Session2<'_>> {
        let session = self.sessions.get_mut(to.session)?;
        if from.session != to.session {
            return None;
        }
        let half = session.conns.get(from.conn)?.halves[from.role].as_ref()?;
        let rmb = session.ends[to.role].rmbs.iter_mut().find(|have| have.id == rmb)?;
        Some(Session2 { element: &half.element, user: rmb.conn, memory: &mut rmb.memory })
    }

    /// The send of a message has completed. Has no meaning on a queue pair left by the half.
    pub(super) fn on_cdc_sent(&mut self, from: HalfId, q: usize, number: u16) -> Check {
        let Some(half) = self.half(from) else { return Ok(()) };
        if let Some(at) = half.in_flight.iter().position(|sent| *sent == (q, number)) {
            half.in_flight.remove(at);
        }
        if half.leaving && half.in_flight.is_empty() {
            self.detach_path(from);
            self.try_attach_path(from)?;
        }
        self.finish(from)
    }

    /// The group counts the half on another link now.
    pub(super) fn change_link(&mut self, id: HalfId, to: LinkKey, dead: bool) {
        let now = self.now;
        let Some(half) = self.half(id) else { return };
        half.link = to;
        if half.path.is_none() {
            half.parked = now;
        } else if dead || half.in_flight.is_empty() {
            self.detach_path(id);
        } else {
            half.leaving = true;
        }
    }

    pub(super) fn detach_path(&mut self, id: HalfId) {
        let now = self.now;
        let Some(half) = self.half(id) else { return };
        (half.path, half.leaving, half.moved, half.parked) = (None, false, true, now);
        let unacknowledged = std::mem::take(&mut half.in_flight);
        let peer = ConsumerWord {
            cursor: half.connection.sender.consumed(),
            producer_flags: ProducerFlags::empty(),
            state_flags: half.connection.close.peer_flags(),
        };
        let over = half.state() == State::Closed;
        let numbers = unacknowledged.into_iter().map(|(_, number)| number);
        half.abandoned = half.abandoned || !half.outbound.fail_over(numbers, peer, over);
        self.sessions[id.session].conns[id.conn].moved = true;
    }

    /// Halves without a path continue on an available link.
    pub(super) fn revive(&mut self, id: EndId) -> Check {
        for half in self.halves_of(id) {
            if self.half_ref(half).is_some_and(|half| half.abandoned) {
                self.finish(half)?;
                continue;
            }
            if self.half_ref(half).is_some_and(|half| half.path.is_none()) {
                self.try_attach_path(half)?;
            }
            let Some(have) = self.half_ref(half).filter(|half| half.path.is_none()) else {
                continue;
            };
            if self.now - have.parked < PARKED || have.peer_rmb.is_none() {
                continue;
            }
            // The awaited key never comes.
            if !self.sessions[id.session].lied {
                return Err(format!("{half:?} has had no path for long"));
            }
            self.send_reset(half);
            self.remove_half(half, Release::Withdraw, false);
        }
        Ok(())
    }

    /// Goes on over its link, if the peer has named its key there: validation first.
    pub(super) fn try_attach_path(&mut self, id: HalfId) -> Check {
        let end = id.end();
        let Some(half) = self.half_ref(id).filter(|half| !half.abandoned) else { return Ok(()) };
        let (link, Some(peer_rmb)) = (half.link, half.peer_rmb) else { return Ok(()) };
        let Some(q) = self.sessions[end.session].ends[end.role].qp(link) else { return Ok(()) };
        let Some(group) = self.group(end) else { return Ok(()) };
        if self.qps[q].state != QpState::Up || !group.is_usable() {
            return Ok(());
        }
        let Some(region) = group.peer_region(peer_rmb, link) else { return Ok(()) };
        let Some(half) = self.half(id) else { return Ok(()) };
        (half.path, half.region, half.leaving) = (Some(q), region, false);
        if half.moved {
            self.report.failovers += 1;
        }
        self.post_pending(id)?;
        self.finish(id)
    }

    /// Wakes the application soon.
    pub(super) fn wake(&mut self, id: HalfId) {
        let Some(half) = self.half(id) else { return };
        if half.scheduled {
            return;
        }
        half.scheduled = true;
        let most = if half.slow && !self.calm { 3_000_000 } else { 2000 };
        let wait = self.time(most);
        self.at(self.now + wait, Event::App(id));
    }
}

struct Session2<'a> {
    element: &'a [u8],
    memory: &'a mut [u8],
    user: Option<usize>,
}

/// The alert token of a half, for the messages of the other half.
pub(super) fn token_of(id: HalfId) -> u32 {
    (id.conn * 2 + id.role) as u32
}
