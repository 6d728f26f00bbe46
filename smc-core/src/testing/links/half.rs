//! One half of a connection: its send element, its path, and how it moves to another link.

use super::conn::{Half, Release};
use super::qp::{Op, QpState};
use super::types::{Check, EndId, Event, HalfId};
use super::world::Simulation;
use crate::connection::{Span, State};
use crate::link_group::{LinkKey, Region, RmbId};
use crate::wire::cdc::{Cdc, StateFlags};

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

    /// Bytes that were written lie in the send element: tells the peer, if there is a path.
    pub(super) fn publish(&mut self, id: HalfId, spans: [Span; 2]) -> Check {
        let Some(half) = self.half(id) else { return Ok(()) };
        let Some(q) = half.path.filter(|_| !half.leaving) else {
            half.due = true;
            return Ok(());
        };
        self.post_writes(id, q, spans)?;
        self.post_words(id, q);
        Ok(())
    }

    fn post_words(&mut self, id: HalfId, q: usize) {
        let token = token_of(id.peer());
        let Some(half) = self.half(id) else { return };
        let (producer, consumer) = half.connection.words();
        let number = half.log.post(producer.cursor);
        half.connection.on_published();
        half.due = false;
        let cdc = Cdc {
            sequence: number,
            token,
            producer: producer.cursor,
            consumer: consumer.cursor,
            producer_flags: consumer.producer_flags,
            state_flags: consumer.state_flags,
        };
        self.trace(|| format!("{id:?} on {q}: {cdc:?}"));
        self.post(q, Op::Cdc { from: id, number, bytes: cdc.emit() });
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
            // The memory of one that has ended rests for writes like this, which were slower over
            // their link than the end was over another.
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

    /// The send of a message has completed.
    pub(super) fn on_cdc_sent(&mut self, from: HalfId, number: u16) -> Check {
        let Some(half) = self.half(from) else { return Ok(()) };
        half.log.completed(number);
        if half.leaving && half.log.on_the_way() == 0 {
            self.depart(from);
            self.try_arrive(from)?;
        }
        self.finish(from)
    }

    /// The group says that the half counts on another link now.
    pub(super) fn change_link(&mut self, id: HalfId, to: LinkKey, dead: bool) {
        let now = self.now;
        let Some(half) = self.half(id) else { return };
        half.link = to;
        if half.path.is_none() {
            half.parked = now;
        } else if dead || half.log.on_the_way() == 0 {
            self.depart(id);
        } else {
            half.leaving = true;
        }
    }

    pub(super) fn depart(&mut self, id: HalfId) {
        let now = self.now;
        let Some(half) = self.half(id) else { return };
        (half.path, half.leaving, half.moved, half.parked) = (None, false, true, now);
        self.sessions[id.session].conns[id.conn].moved = true;
    }

    /// Halves without a path go on where they can.
    pub(super) fn revive(&mut self, id: EndId) -> Check {
        for half in self.halves_of(id) {
            if self.half_ref(half).is_some_and(|half| half.path.is_none()) {
                self.try_arrive(half)?;
            }
            let Some(have) = self.half_ref(half).filter(|half| half.path.is_none()) else {
                continue;
            };
            if self.now - have.parked < PARKED || have.peer_rmb.is_none() {
                continue;
            }
            // The key that it waits for never comes.
            if !self.sessions[id.session].lied {
                return Err(format!("{half:?} has had no path for long"));
            }
            self.send_reset(half);
            self.remove_half(half, Release::Withdraw, false);
        }
        Ok(())
    }

    /// Goes on over its link, if the peer has named its key there: validation first.
    pub(super) fn try_arrive(&mut self, id: HalfId) -> Check {
        let end = id.end();
        let Some(half) = self.half_ref(id) else { return Ok(()) };
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
            return self.resume(id, q);
        }
        if half.due {
            let (_, spans) = self.unwritten(id);
            self.post_writes(id, q, spans)?;
            self.post_words(id, q);
        }
        Ok(())
    }

    fn resume(&mut self, id: HalfId, q: usize) -> Check {
        let Some(half) = self.half(id) else { return Ok(()) };
        let unacknowledged = half.log.on_the_way() > 0;
        let over = half.connection.close.peer_flags();
        let (resume, spans) = self.unwritten(id);
        let Some(resume) = resume else { return Err(format!("{id:?}: cannot go on")) };
        let validation = resume.validation(token_of(id.peer()));
        self.trace(|| format!("{id:?} goes on on {q}: {validation:?} {spans:?}"));
        let bytes = validation.emit();
        self.post(q, Op::Cdc { from: id, number: validation.sequence, bytes });
        // Who has said its last word reads nothing any more, and its memory may serve another.
        if !over.intersects(StateFlags::CLOSED | StateFlags::ABORT) {
            self.post_writes(id, q, spans)?;
        }
        if self.half_ref(id).is_some_and(|half| half.state() != State::Closed || half.due)
            || unacknowledged
        {
            self.post_words(id, q);
        }
        self.finish(id)
    }

    fn unwritten(
        &mut self,
        id: HalfId,
    ) -> (Option<crate::connection::failover::Resume>, [Span; 2]) {
        let Some(half) = self.half(id) else { return (None, [Span::default(); 2]) };
        let sender = &half.connection.sender;
        match half.log.fail_over(sender.cursor(), sender.consumed()) {
            Ok(resume) => (Some(resume), resume.spans),
            Err(error) => {
                self.trace(|| format!("{id:?}: {error}"));
                (None, [Span::default(); 2])
            }
        }
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

/// The alert token of a half: what the other puts into its messages.
pub(super) fn token_of(id: HalfId) -> u32 {
    (id.conn * 2 + id.role) as u32
}
