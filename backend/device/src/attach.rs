// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! ATTACH, DETACH, RELEASE_SLAB: the user's side, including the steps after the front end's answer.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use virtio_ism_abi::Status;
use virtio_ism_abi::command::{AttachReply, attach_flags};
use zerocopy::IntoBytes;

use super::accounts::{DmbEntry, MapState, QuotaAccount};
use super::command::{DeferredDrop, check_peer, done};
use super::device::DeviceState;
use super::map::{JobTarget, MapAnswer, PendingCommand};
use super::register::out_of_bytes;
use super::session::DeviceSession;
use super::slab::Slab;
use super::sync::lock;
use super::window::Window;
use super::{Device, MapJob, Outcome, Reply, StaleMap, UnmapJob};

impl Device {
    pub(super) fn attach(&self, tag: u32, token: u64) -> Result<Outcome, Status> {
        let mut _deferred: DeferredDrop = None;
        let mut state = lock(&self.state);
        let is_leaving = state.is_leaving();
        let DeviceState { account, window, .. } = &mut *state;
        let account = account.as_mut().filter(|_| !is_leaving).ok_or(Status::Estate)?;
        let dmb = self.fabric.tokens.find(token, &account.session).ok_or(Status::Enoent)?;
        _deferred = Some(dmb.clone());
        if account.attached.contains_key(&token) {
            return Err(Status::Ebusy);
        }
        if account.attached.len() >= self.limits.max_attach as usize {
            return Err(Status::Enospc);
        }
        check_peer(account, dmb.owner.gid, self.limits.max_peers)?;
        // A device unable to map can still move, and gets DMB_GONE.
        let place = dmb.place().filter(|place| self.reaches(&place.slab));
        let Some(place) = place else {
            account.add_attached(dmb, None);
            return self.finish_attach(account, token).map(|body| done(tag, body.as_bytes()));
        };
        let slab = place.slab.clone();
        let present = account.mapping_of(&slab).map(|(id, mapping)| (id, mapping.state));
        let (slab_id, state, asks) = match present {
            Some((_, MapState::Releasing)) => return Err(Status::Eagain),
            Some((id, state)) => (id, state, false),
            None => (account.next_slab_id(), self.initial_state(), true),
        };
        let new_slab_at = if asks { Some(self.find_range(account, window, &slab)?) } else { None };
        if let Some(offset) = new_slab_at {
            account.add_mapping(slab_id, slab.clone(), offset, state);
        }
        account.add_attached(dmb, Some(slab_id));
        if state == MapState::Mapped {
            return self.finish_attach(account, token).map(|body| done(tag, body.as_bytes()));
        }
        let offset = account.maps.get(&slab_id).map_or(0, |mapping| mapping.offset);
        let target = self.target(account, tag, slab_id, slab, offset);
        Ok(Outcome::Map(MapJob { target, what: PendingCommand::Attach(token), asks }))
    }

    /// Whether a slab can be in the window.
    fn reaches(&self, slab: &Slab) -> bool {
        let is_fixed = self.handle.fixed_window.is_some();
        self.handle.has_window() && (!is_fixed || self.fixed_offset_of(slab).is_some())
    }

    /// Begin of a slab in a fixed window, bytes.
    fn fixed_offset_of(&self, slab: &Slab) -> Option<u64> {
        self.fixed_offset(slab.pair()?, slab.fd_offset())
    }

    /// A range of the window for a peer's slab.
    fn find_range(
        &self,
        account: &QuotaAccount,
        window: &mut Window,
        slab: &Slab,
    ) -> Result<u64, Status> {
        if account.attached_bytes + slab.len() > self.limits.attached_slab_bytes {
            return Err(Status::Enomem);
        }
        // A kept slot counts as used, so using a kept slot costs nothing.
        if account.slots_for_slab_of(slab.owner.gid) > self.free_slots(account, window) {
            return Err(if window.stale() > 0 { Status::Eagain } else { Status::Enospc });
        }
        let fixed = self.fixed_offset_of(slab);
        fixed.or_else(|| window.alloc(slab.len())).ok_or_else(|| out_of_bytes(window))
    }

    /// Makes an attached DMB usable: its slab is in place.
    fn finish_attach(&self, account: &mut QuotaAccount, token: u64) -> Result<AttachReply, Status> {
        let reply = self.try_finish_attach(account, token);
        match account.attached.get_mut(&token) {
            Some(entry) if reply.is_ok() => {
                entry.ready = true;
                let slab_id = entry.slab_id;
                account.mark_reported(slab_id);
            }
            _ => drop(account.remove_attached(token)),
        }
        reply
    }

    fn try_finish_attach(
        &self,
        account: &mut QuotaAccount,
        token: u64,
    ) -> Result<AttachReply, Status> {
        let (session, entry) = (account.session.clone(), account.attached.get(&token));
        let dmb = entry.ok_or(Status::Eio)?.dmb.clone();
        // From here on the session gets DMB_GONE, and then PEER_DOWN.
        if !dmb.attach_session(&session) {
            return Err(Status::Enoent);
        }
        let reply = if account.relate(&dmb.owner) {
            account.attached.get(&token).ok_or(Status::Eio).and_then(|h| account.attach_reply(h))
        } else {
            Err(Status::Enoent)
        };
        let reply = reply.map(|mut reply| {
            if reply.flags & attach_flags::MOVE_ONLY == 0 {
                if self.can_futex(&dmb.owner) {
                    reply.flags |= attach_flags::FUTEX;
                }
                if self.can_raise_slab(&dmb.owner) {
                    reply.flags |= attach_flags::SLAB_LINE;
                }
            }
            reply
        });
        if reply.is_err() {
            dmb.detach_session(&session);
            session.remove_dmb_gone(dmb.token);
        }
        reply
    }

    /// Whether this driver and the driver of another session wake each other's threads by armed words. With a
    /// GID shared by all devices of a fabric, a line has users unknown to the owner.
    pub(super) fn can_futex(&self, other: &DeviceSession) -> bool {
        self.fabric.shared_gid.is_none() && self.handle.knows_futex() && other.handle.knows_futex()
    }

    /// Whether this driver and the driver of another session raise the lines of slabs for each other. With a
    /// GID shared by all devices of a fabric, a slab has users unknown to the owner.
    pub(super) fn can_raise_slab(&self, other: &DeviceSession) -> bool {
        let both = self.handle.knows_slab_line() && other.handle.knows_slab_line();
        self.fabric.shared_gid.is_none() && both
    }

    /// Whether this driver and the driver of another session wake each other by doorbells. With a GID shared
    /// by all devices of a fabric, a slab has users unknown to the owner.
    pub(super) fn can_ring(&self, other: &DeviceSession) -> bool {
        let both = self.handle.knows_doorbell() && other.handle.knows_doorbell();
        self.fabric.shared_gid.is_none() && both
    }

    pub(super) fn detach(&self, tag: u32, token: u64) -> Result<Outcome, Status> {
        let mut _deferred: DeferredDrop = None;
        let mut state = lock(&self.state);
        let account = state.account.as_mut().ok_or(Status::Estate)?;
        if !account.attached.get(&token).is_some_and(|entry| entry.ready) {
            return Err(Status::Enoent);
        }
        let entry = account.remove_attached(token).ok_or(Status::Enoent)?;
        self.detach_session(&account.session, &entry);
        // The owner of a DMB may itself have attached the DMB, and not yet unregistered it.
        if !account.dmbs.contains_key(&token) {
            account.session.remove_dmb_gone(entry.dmb.token);
        }
        _deferred = Some(entry.dmb);
        Ok(done(tag, &[]))
    }

    /// A user releases a DMB.
    pub(super) fn detach_session(&self, session: &Arc<DeviceSession>, entry: &DmbEntry) {
        entry.dmb.detach_session(session);
        if entry.slab_id.is_some() {
            entry.dmb.mapped_users.fetch_sub(1, Ordering::Relaxed);
        }
    }

    pub(super) fn release_slab(&self, tag: u32, slab_id: u32) -> Result<Outcome, Status> {
        let mut state = lock(&self.state);
        let account = state.account.as_mut().ok_or(Status::Estate)?;
        let mapping = account.maps.get_mut(&slab_id).ok_or(Status::Enoent)?;
        if mapping.dmbs > 0 || mapping.state != MapState::Mapped {
            return Err(Status::Ebusy);
        }
        if self.handle.fixed_window.is_some() {
            account.remove_mapping(slab_id);
            return Ok(done(tag, &[]));
        }
        mapping.state = MapState::Releasing;
        let (slab, offset) = (mapping.slab.clone(), mapping.offset);
        let target = self.target(account, tag, slab_id, slab, offset);
        Ok(Outcome::Unmap(UnmapJob { target }))
    }

    /// Ends a job: the front end has acknowledged (`ok`) or refused. The reply is for the job's request.
    pub fn mapped(&self, mut job: MapJob, ok: bool) -> Reply {
        job.target.answered = true;
        self.finish_map(&job, MapAnswer::of(ok))
    }

    /// Ends a job: the front end has acknowledged (`ok`) or refused. The reply is for the job's request.
    pub fn unmapped(&self, mut job: UnmapJob, ok: bool) -> Reply {
        job.target.answered = true;
        self.finish_unmap(&job, MapAnswer::of(ok))
    }

    pub(super) fn finish_map(&self, job: &MapJob, answer: MapAnswer) -> Reply {
        let MapJob { target, what, asks } = job;
        let mut state = lock(&self.state);
        let DeviceState { account, window, .. } = &mut *state;
        let Some(account) = self.account_of(account, target) else {
            // The session has ended meanwhile. Its range waits for an end confirmed by the front end.
            if *asks && self.is_own(target) {
                window.mark_answered(target.offset);
            }
            return self.account(Reply::refusal(target.tag, Status::Estate));
        };
        if *asks {
            self.apply_answer(account, window, target, answer);
        }
        let mapped = account
            .maps
            .get(&target.slab_id)
            .is_some_and(|mapping| mapping.state == MapState::Mapped);
        let reply = match what {
            PendingCommand::Register(token, user) if mapped => self
                .finish_register(account, *token, user)
                .map(|b| Reply::ok(target.tag, b.as_bytes())),
            PendingCommand::Attach(token) if mapped => {
                self.finish_attach(account, *token).map(|b| Reply::ok(target.tag, b.as_bytes()))
            }
            PendingCommand::Register(token, _) => {
                account.remove_dmb(*token);
                Err(Status::Eio)
            }
            PendingCommand::Attach(token) => {
                account.remove_attached(*token);
                Err(Status::Eio)
            }
        };
        if let Some(mapping) = account.remove_unreported(target.slab_id) {
            window.mark_stale(mapping.offset, mapping.slab.len(), false);
        }
        self.account(reply.unwrap_or_else(|status| Reply::refusal(target.tag, status)))
    }

    fn apply_answer(
        &self,
        account: &mut QuotaAccount,
        window: &mut Window,
        target: &JobTarget,
        answer: MapAnswer,
    ) {
        match (account.maps.get_mut(&target.slab_id), answer) {
            (None, _) => {}
            (Some(mapping), MapAnswer::Yes) => mapping.state = MapState::Mapped,
            (Some(_), MapAnswer::No) => {
                account.remove_mapping(target.slab_id);
                window.free(target.offset);
            }
            (Some(_), MapAnswer::Unknown) => {
                account.remove_mapping(target.slab_id);
                window.mark_stale(target.offset, target.slab.len(), false);
            }
        }
    }

    pub(super) fn finish_unmap(&self, job: &UnmapJob, answer: MapAnswer) -> Reply {
        let UnmapJob { target } = job;
        let mut state = lock(&self.state);
        let DeviceState { account, window, .. } = &mut *state;
        let Some(account) = self.account_of(account, target) else {
            if self.is_own(target) {
                match answer {
                    MapAnswer::Yes => window.free_stale(target.offset),
                    MapAnswer::No | MapAnswer::Unknown => window.mark_answered(target.offset),
                }
            }
            return self.account(Reply::refusal(target.tag, Status::Estate));
        };
        let reply = match answer {
            MapAnswer::Yes => {
                account.remove_mapping(target.slab_id);
                window.free(target.offset);
                Reply::ok(target.tag, &[])
            }
            MapAnswer::No | MapAnswer::Unknown => {
                if let Some(mapping) = account.maps.get_mut(&target.slab_id) {
                    mapping.state = MapState::Mapped;
                }
                Reply::refusal(target.tag, Status::Eio)
            }
        };
        self.account(reply)
    }

    /// A range possibly left mapped by a past session or a failed command. After the answer to HELLO and
    /// after each job, ask the front end to unmap the range and call
    /// [`stale_unmapped`](Self::stale_unmapped), until `None`. `None` without a session: a front end not
    /// started cannot serve the request.
    pub fn stale_map(&self) -> Option<StaleMap> {
        let mut state = lock(&self.state);
        state.account.as_ref()?;
        let (window_offset, len) = state.window.next_stale()?;
        Some(StaleMap { device: self.me.clone(), window_offset, len, answered: false })
    }

    /// The front end has answered, in either way: by the rule after a reset, the front end refuses if nothing
    /// is mapped there.
    pub fn stale_unmapped(&self, mut stale: StaleMap) {
        stale.answered = true;
        self.finish_stale(&stale, MapAnswer::Yes);
    }

    pub(super) fn finish_stale(&self, stale: &StaleMap, answer: MapAnswer) {
        let mut state = lock(&self.state);
        match answer {
            MapAnswer::Unknown => state.window.mark_answered(stale.window_offset),
            MapAnswer::Yes | MapAnswer::No => state.window.free_stale(stale.window_offset),
        }
    }

    /// The account of a target, if its session is still the present one.
    fn account_of<'a>(
        &self,
        account: &'a mut Option<QuotaAccount>,
        target: &JobTarget,
    ) -> Option<&'a mut QuotaAccount> {
        account.as_mut().filter(|account| Arc::ptr_eq(&account.session, &target.session))
    }

    fn is_own(&self, target: &JobTarget) -> bool {
        Arc::ptr_eq(&target.session.handle, &self.handle)
    }
}
