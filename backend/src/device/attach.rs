//! ATTACH, DETACH, RELEASE_SLAB: the user's side, and what becomes of them when the front end has
//! answered.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use virtio_ism_abi::Status;
use virtio_ism_abi::command::AttachReply;
use zerocopy::IntoBytes;

use super::command::{LetGo, check_peer, done};
use super::life::Life;
use super::map::{Answer, Ticket, Waiting};
use super::port::State;
use super::register::out_of_bytes;
use super::session::{Holding, MapState, Session};
use super::slab::Slab;
use super::sync::lock;
use super::window::Window;
use super::{Device, MapJob, Outcome, Reply, StaleMap, UnmapJob};

impl Device {
    pub(super) fn attach(&self, tag: u32, token: u64) -> Result<Outcome, Status> {
        let mut _let_go: LetGo = None;
        let mut state = lock(&self.state);
        let State { session, window, .. } = &mut *state;
        let session = session.as_mut().ok_or(Status::Estate)?;
        let dmb = self.fabric.tokens.find(token, session.life.gid).ok_or(Status::Enoent)?;
        _let_go = Some(dmb.clone());
        if session.attached.contains_key(&token) {
            return Err(Status::Ebusy);
        }
        if session.attached.len() >= self.limits.max_attach as usize {
            return Err(Status::Enospc);
        }
        check_peer(session, dmb.owner.gid, self.limits.max_peers)?;
        // Who cannot map can still move, and wants to hear when the DMB goes.
        let place = dmb.place().filter(|_| self.contact.has_window());
        let Some(place) = place else {
            session.add_attached(dmb, None);
            return self.finish_attach(session, token).map(|body| done(tag, body.as_bytes()));
        };
        let slab = place.slab.clone();
        let present = session.mapping_of(&slab).map(|(id, mapping)| (id, mapping.state));
        let (slab_id, state, asks) = match present {
            Some((_, MapState::Releasing)) => return Err(Status::Eagain),
            Some((id, state)) => (id, state, false),
            None => (session.next_slab_id(), MapState::Asked, true),
        };
        let new_slab_at = if asks { Some(self.find_range(session, window, &slab)?) } else { None };
        if let Some(offset) = new_slab_at {
            session.add_mapping(slab_id, slab.clone(), offset);
        }
        session.add_attached(dmb, Some(slab_id));
        if state == MapState::Mapped {
            return self.finish_attach(session, token).map(|body| done(tag, body.as_bytes()));
        }
        let offset = session.maps.get(&slab_id).map_or(0, |mapping| mapping.offset);
        let ticket = self.ticket(session, tag, slab_id, slab, offset);
        Ok(Outcome::Map(MapJob { ticket, what: Waiting::Attach(token), asks }))
    }

    /// A range of the window for a peer's slab.
    fn find_range(
        &self,
        session: &Session,
        window: &mut Window,
        slab: &Slab,
    ) -> Result<u64, Status> {
        if session.attached_bytes + slab.len() > self.limits.attached_slab_bytes {
            return Err(Status::Enomem);
        }
        // A kept slot counts as used, so one that is taken up costs nothing.
        if session.slots_for_slab_of(slab.owner.gid) > self.free_slots(session, window) {
            return Err(if window.stale() > 0 { Status::Eagain } else { Status::Enospc });
        }
        window.alloc(slab.len()).ok_or_else(|| out_of_bytes(window))
    }

    /// Makes an attached DMB usable: its slab is where it shall be.
    fn finish_attach(&self, session: &mut Session, token: u64) -> Result<AttachReply, Status> {
        let reply = Self::try_finish_attach(session, token);
        match session.attached.get_mut(&token) {
            Some(holding) if reply.is_ok() => {
                holding.ready = true;
                let slab_id = holding.slab_id;
                session.tell(slab_id);
            }
            _ => drop(session.remove_attached(token)),
        }
        reply
    }

    fn try_finish_attach(session: &mut Session, token: u64) -> Result<AttachReply, Status> {
        let (life, holding) = (session.life.clone(), session.attached.get(&token));
        let dmb = holding.ok_or(Status::Eio)?.dmb.clone();
        // From here on it hears when the DMB goes, and then when the owner goes.
        if !dmb.hold(&life) {
            return Err(Status::Enoent);
        }
        let reply = if session.relate(&dmb.owner) {
            session.attached.get(&token).ok_or(Status::Eio).and_then(|h| session.attach_reply(h))
        } else {
            Err(Status::Enoent)
        };
        if reply.is_err() {
            dmb.let_go(&life);
            life.forget_gone(dmb.token);
        }
        reply
    }

    pub(super) fn detach(&self, tag: u32, token: u64) -> Result<Outcome, Status> {
        let mut _let_go: LetGo = None;
        let mut state = lock(&self.state);
        let session = state.session.as_mut().ok_or(Status::Estate)?;
        if !session.attached.get(&token).is_some_and(|holding| holding.ready) {
            return Err(Status::Enoent);
        }
        let holding = session.remove_attached(token).ok_or(Status::Enoent)?;
        self.let_go(&session.life, &holding);
        // The owner of a DMB may have attached it itself, and has not unregistered it yet.
        if !session.dmbs.contains_key(&token) {
            session.life.forget_gone(holding.dmb.token);
        }
        _let_go = Some(holding.dmb);
        Ok(done(tag, &[]))
    }

    /// A user does not want a DMB any more.
    pub(super) fn let_go(&self, life: &Arc<Life>, holding: &Holding) {
        holding.dmb.let_go(life);
        if holding.slab_id.is_some() {
            holding.dmb.mapped_users.fetch_sub(1, Ordering::Relaxed);
        }
    }

    pub(super) fn release_slab(&self, tag: u32, slab_id: u32) -> Result<Outcome, Status> {
        let mut state = lock(&self.state);
        let session = state.session.as_mut().ok_or(Status::Estate)?;
        let mapping = session.maps.get_mut(&slab_id).ok_or(Status::Enoent)?;
        if mapping.dmbs > 0 || mapping.state != MapState::Mapped {
            return Err(Status::Ebusy);
        }
        mapping.state = MapState::Releasing;
        let (slab, offset) = (mapping.slab.clone(), mapping.offset);
        let ticket = self.ticket(session, tag, slab_id, slab, offset);
        Ok(Outcome::Unmap(UnmapJob { ticket }))
    }

    /// Ends a job: the front end has acknowledged (`ok`) or refused. The reply is for the request
    /// that led to the job.
    pub fn mapped(&self, mut job: MapJob, ok: bool) -> Reply {
        job.ticket.settled = true;
        self.finish_map(&job, Answer::of(ok))
    }

    /// Ends a job: the front end has acknowledged (`ok`) or refused. The reply is for the request
    /// that led to the job.
    pub fn unmapped(&self, mut job: UnmapJob, ok: bool) -> Reply {
        job.ticket.settled = true;
        self.finish_unmap(&job, Answer::of(ok))
    }

    pub(super) fn finish_map(&self, job: &MapJob, answer: Answer) -> Reply {
        let MapJob { ticket, what, asks } = job;
        let mut state = lock(&self.state);
        let State { session, window, .. } = &mut *state;
        let Some(session) = self.session_of(session, ticket) else {
            // The life has ended meanwhile. Its range waits for an end that the front end confirms.
            if *asks && self.is_own(ticket) {
                window.settle(ticket.offset);
            }
            return self.account(Reply::refusal(ticket.tag, Status::Estate));
        };
        if *asks {
            self.settle_mapping(session, window, ticket, answer);
        }
        let mapped = session
            .maps
            .get(&ticket.slab_id)
            .is_some_and(|mapping| mapping.state == MapState::Mapped);
        let reply = match what {
            Waiting::Register(token, user) if mapped => self
                .finish_register(session, *token, user)
                .map(|b| Reply::ok(ticket.tag, b.as_bytes())),
            Waiting::Attach(token) if mapped => {
                self.finish_attach(session, *token).map(|b| Reply::ok(ticket.tag, b.as_bytes()))
            }
            Waiting::Register(token, _) => {
                session.remove_dmb(*token);
                Err(Status::Eio)
            }
            Waiting::Attach(token) => {
                session.remove_attached(*token);
                Err(Status::Eio)
            }
        };
        if let Some(mapping) = session.remove_untold(ticket.slab_id) {
            window.retire(mapping.offset, mapping.slab.len(), false);
        }
        self.account(reply.unwrap_or_else(|status| Reply::refusal(ticket.tag, status)))
    }

    fn settle_mapping(
        &self,
        session: &mut Session,
        window: &mut Window,
        ticket: &Ticket,
        answer: Answer,
    ) {
        match (session.maps.get_mut(&ticket.slab_id), answer) {
            (None, _) => {}
            (Some(mapping), Answer::Yes) => mapping.state = MapState::Mapped,
            (Some(_), Answer::No) => {
                session.remove_mapping(ticket.slab_id);
                window.free(ticket.offset);
            }
            (Some(_), Answer::Unknown) => {
                session.remove_mapping(ticket.slab_id);
                window.retire(ticket.offset, ticket.slab.len(), false);
            }
        }
    }

    pub(super) fn finish_unmap(&self, job: &UnmapJob, answer: Answer) -> Reply {
        let UnmapJob { ticket } = job;
        let mut state = lock(&self.state);
        let State { session, window, .. } = &mut *state;
        let Some(session) = self.session_of(session, ticket) else {
            if self.is_own(ticket) {
                match answer {
                    Answer::Yes => window.free_stale(ticket.offset),
                    Answer::No | Answer::Unknown => window.settle(ticket.offset),
                }
            }
            return self.account(Reply::refusal(ticket.tag, Status::Estate));
        };
        let reply = match answer {
            Answer::Yes => {
                session.remove_mapping(ticket.slab_id);
                window.free(ticket.offset);
                Reply::ok(ticket.tag, &[])
            }
            Answer::No | Answer::Unknown => {
                if let Some(mapping) = session.maps.get_mut(&ticket.slab_id) {
                    mapping.state = MapState::Mapped;
                }
                Reply::refusal(ticket.tag, Status::Eio)
            }
        };
        self.account(reply)
    }

    /// A range that a past life, or a command that failed, may have left mapped. After HELLO was
    /// answered and after each job, ask the front end to unmap it and call
    /// [`stale_unmapped`](Self::stale_unmapped), until there is none. `None` while there is no life: a
    /// front end that is not started cannot serve the request.
    pub fn stale_map(&self) -> Option<StaleMap> {
        let mut state = lock(&self.state);
        state.session.as_ref()?;
        let (window_offset, len) = state.window.next_stale()?;
        Some(StaleMap { device: self.me.clone(), window_offset, len, settled: false })
    }

    /// The front end has answered, one way or the other: it refuses if nothing is mapped there,
    /// which is the rule after a reset.
    pub fn stale_unmapped(&self, mut stale: StaleMap) {
        stale.settled = true;
        self.finish_stale(&stale, Answer::Yes);
    }

    pub(super) fn finish_stale(&self, stale: &StaleMap, answer: Answer) {
        let mut state = lock(&self.state);
        match answer {
            Answer::Unknown => state.window.settle(stale.window_offset),
            Answer::Yes | Answer::No => state.window.free_stale(stale.window_offset),
        }
    }

    /// The session that a ticket was made for, if it still lives.
    fn session_of<'a>(
        &self,
        session: &'a mut Option<Session>,
        ticket: &Ticket,
    ) -> Option<&'a mut Session> {
        session.as_mut().filter(|session| Arc::ptr_eq(&session.life, &ticket.life))
    }

    fn is_own(&self, ticket: &Ticket) -> bool {
        Arc::ptr_eq(&ticket.life.contact, &self.contact)
    }
}
