// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! REGISTER and UNREGISTER: the owner's side of a DMB.

use std::sync::Arc;

use virtio_ism_abi::command::{RegisterReply, register_flags};
use virtio_ism_abi::slab::CONTROL_LEN;
use virtio_ism_abi::{Gid, Status, Token};
use vm_memory::{GuestAddress, GuestAddressSpace, GuestMemoryBackend};
use zerocopy::IntoBytes;

use super::accounts::{MapState, QuotaAccount};
use super::command::{check_peer, done};
use super::device::DeviceState;
use super::dmb::{Backing, Dmb, GuestRange, ranges};
use super::fixed_window::FixedWindow;
use super::gid::secret;
use super::handle::DeviceHandle;
use super::map::{JobTarget, PendingCommand};
use super::request::{CheckedBacking, CheckedRegister, CheckedSgEntry};
use super::session::DeviceSession;
use super::shm::PairMemory;
use super::slab::{Slab, SlabPlan, SlabRange, slab_sizes};
use super::sync::lock;
use super::wake_slot::DmbSignalSlot;
use super::window::Window;
use super::{Device, MapJob, Outcome};

/// Place of a new DMB in the window.
struct WindowBacking {
    place: SlabRange,
    slab_id: u32,
    /// Offset in the window of a slab not mapped yet.
    new_slab_at: Option<u64>,
}

/// Properties of a new slab, from its pair.
struct NewSlab {
    /// Memory mapped ahead by a front end of the pair.
    pair: Option<Arc<PairMemory>>,
    /// Number of the pair's shared slabs.
    shared: usize,
    has_doorbell: bool,
}

impl Device {
    pub(super) fn register(&self, tag: u32, request: CheckedRegister) -> Result<Outcome, Status> {
        let peers = self.fabric.find(request.user);
        let mut state = lock(&self.state);
        let is_leaving = state.is_leaving();
        let DeviceState { account, window, .. } = &mut *state;
        let account = account.as_mut().filter(|_| !is_leaving).ok_or(Status::Estate)?;
        let peer = account.session.first_of_same_order(&peers)?;
        self.check_quotas(account, &request)?;
        let (backing, slab_id, new_slab_at, keep) = match request.backing {
            CheckedBacking::Guest(entries) => {
                let ranges = self.guest_ranges(&entries)?;
                // The owner asked for no window: keep a slot if available.
                let slots = self.slots_to_keep(account, request.user);
                let keep = slots <= self.free_slots(account, window);
                let signal = Arc::new(DmbSignalSlot::new(request.idx, request.user));
                (Backing::Guest { ranges, signal }, None, None, keep)
            }
            CheckedBacking::Window => {
                let found = self.find_backing(account, window, &request, peer)?;
                (Backing::Window(found.place), Some(found.slab_id), found.new_slab_at, true)
            }
        };
        let Ok(token) = secret() else {
            if let Some(offset) = new_slab_at {
                window.free(offset);
            }
            return Err(Status::Eio);
        };
        let dmb = Dmb::new(
            Token(token),
            account.session.clone(),
            request.user,
            request.idx,
            request.len,
            backing,
        );
        if let (Some(id), Some(offset), Some(place)) = (slab_id, new_slab_at, dmb.place()) {
            account.add_mapping(id, place.slab.clone(), offset, self.initial_state());
        }
        account.add_dmb(dmb, slab_id);
        if let Some(peer) = account.peers.get_mut(&request.user) {
            peer.reserved |= keep && self.keeps_slots(&account.session, request.user);
        }
        let mapping = slab_id.and_then(|id| account.maps.get(&id));
        if let Some((mapping, id)) = mapping.zip(slab_id)
            && mapping.state == MapState::Asked
        {
            let target = self.target(account, tag, id, mapping.slab.clone(), mapping.offset);
            let asks = new_slab_at.is_some();
            return Ok(Outcome::Map(MapJob {
                target,
                what: PendingCommand::Register(token, peer.clone()),
                asks,
            }));
        }
        self.finish_register(account, token, peer).map(|body| done(tag, body.as_bytes()))
    }

    /// Makes a registered DMB usable: its memory is in place.
    pub(super) fn finish_register(
        &self,
        account: &mut QuotaAccount,
        token: u64,
        user: &DeviceSession,
    ) -> Result<RegisterReply, Status> {
        let reply = self.try_finish_register(account, token, user);
        match account.dmbs.get_mut(&token) {
            Some(entry) if reply.is_ok() => {
                entry.ready = true;
                let slab_id = entry.slab_id;
                account.mark_reported(slab_id);
            }
            _ => drop(account.remove_dmb(token)),
        }
        reply
    }

    fn try_finish_register(
        &self,
        account: &mut QuotaAccount,
        token: u64,
        user: &DeviceSession,
    ) -> Result<RegisterReply, Status> {
        let entry = account.dmbs.get(&token).ok_or(Status::Eio)?;
        let dmb = entry.dmb.clone();
        let mut reply = account.register_reply(entry)?;
        if dmb.place().is_some() {
            if self.can_futex(user) {
                reply.flags |= register_flags::FUTEX;
            }
            if self.can_raise_slab(user) {
                reply.flags |= register_flags::SLAB_LINE;
            }
        }
        // From here on this driver gets the user's PEER_DOWN, if the user has not ended already.
        if !account.relate(user) {
            return Err(Status::Enodev);
        }
        // Another DMB with the same 64 random bits is as unlikely as broken memory.
        if !self.fabric.tokens.insert(&dmb) {
            return Err(Status::Eio);
        }
        if let Some(place) = dmb.place() {
            place.mark_exposed();
        }
        Ok(reply)
    }

    pub(super) fn unregister(&self, tag: u32, token: u64) -> Result<Outcome, Status> {
        // The session does not end meanwhile, so PEER_DOWN follows the DMB_GONE of this DMB.
        let _lifecycle = lock(&self.lifecycle);
        let (session, entry, is_attached) = {
            let mut state = lock(&self.state);
            let account = state.account.as_mut().ok_or(Status::Estate)?;
            if !account.dmbs.get(&token).is_some_and(|entry| entry.ready) {
                return Err(Status::Enoent);
            }
            let entry = account.remove_dmb(token).ok_or(Status::Enoent)?;
            (account.session.clone(), entry, account.attached.contains_key(&token))
        };
        // Waits for running moves: at most one of `max_move` bytes per session. Other devices take this
        // device's lock to report their end, so the lock is not held here.
        entry.dmb.close(&self.fabric.tokens, false);
        if let Backing::Guest { signal, .. } = &entry.dmb.backing {
            session.remove_dmb_signal(signal);
        }
        // A driver with its own DMB attached gets DMB_GONE like any user.
        if !is_attached {
            session.remove_dmb_gone(entry.dmb.token);
        }
        Ok(done(tag, &[]))
    }

    fn check_quotas(
        &self,
        account: &QuotaAccount,
        request: &CheckedRegister,
    ) -> Result<(), Status> {
        let limits = &self.limits;
        if request.idx >= account.idx_bound {
            return Err(Status::Einval);
        }
        if account.idxs.contains(&request.idx) {
            return Err(Status::Ebusy);
        }
        if account.dmbs.len() >= limits.max_dmbs as usize {
            return Err(Status::Enospc);
        }
        if account.dmb_bytes + u64::from(request.len) > limits.dmb_bytes {
            return Err(Status::Enomem);
        }
        check_peer(account, request.user, limits.max_peers)
    }

    /// Guest memory accessible now. Looked up again at every use.
    fn guest_ranges(&self, entries: &[CheckedSgEntry]) -> Result<Vec<GuestRange>, Status> {
        let memory = self.handle.memory().ok_or(Status::Eio)?;
        let memory = memory.memory();
        for entry in entries {
            memory
                .get_slice(GuestAddress(entry.gpa), entry.len as usize)
                .map_err(|_| Status::Eio)?;
        }
        Ok(ranges(entries.iter().map(|entry| (entry.gpa, entry.len))))
    }

    /// A range in a present slab of the pair, or in a new slab.
    fn find_backing(
        &self,
        account: &mut QuotaAccount,
        window: &mut Window,
        request: &CheckedRegister,
        user: &DeviceSession,
    ) -> Result<WindowBacking, Status> {
        if !self.handle.has_window() {
            return Err(Status::Enotsup);
        }
        let free = self.free_slots(account, window);
        let keep = self.slots_to_keep(account, request.user);
        let own =
            |account: &QuotaAccount, slab: &Slab| account.owns(slab) && slab.user == request.user;
        let mut shared = 0;
        for (id, mapping) in &account.maps {
            if !own(account, &mapping.slab) || mapping.state == MapState::Releasing {
                continue;
            }
            shared += usize::from(!mapping.slab.dedicated);
            if keep <= free
                && let Some(place) = mapping.slab.place(request.len, request.wait_group)
            {
                return Ok(WindowBacking { place, slab_id: *id, new_slab_at: None });
            }
        }
        if keep + 1 > free {
            // Slots of past sessions are free again as soon as the front end has answered.
            return Err(if window.stale() > 0 { Status::Eagain } else { Status::Enospc });
        }
        let has_doorbell = self.can_ring(user);
        let plan = NewSlab { pair: self.pair_memory(user)?, shared, has_doorbell };
        self.new_slab(account, window, request, &plan)
    }

    /// Memory for slabs with `user` if one of both front ends maps at its start only, and `None` otherwise.
    fn pair_memory(&self, user: &DeviceSession) -> Result<Option<Arc<PairMemory>>, Status> {
        let (own, other) = (&self.handle, &user.handle);
        let shared = |window: &FixedWindow, peer: &DeviceHandle| {
            let met = window.shared_with(peer.front_end());
            // Another front end with areas of its own has not mapped a free area.
            let may_take = peer.fixed_window.is_none() && peer.has_window();
            met.or_else(|| may_take.then(|| window.give(peer.front_end()))?)
        };
        match (&own.fixed_window, &other.fixed_window) {
            (Some(window), _) => shared(window, other).map(Some).ok_or(Status::Enospc),
            // A slab of its own is of use to this driver, and the user moves.
            (None, Some(window)) => Ok(shared(window, own)),
            (None, None) => Ok(None),
        }
    }

    /// State of a slab new in the window: a front end that maps at its start only is not asked.
    pub(super) fn initial_state(&self) -> MapState {
        match self.handle.fixed_window {
            Some(_) => MapState::Mapped,
            None => MapState::Asked,
        }
    }

    /// Begin of a slab of the pair's memory in a fixed window, bytes; `None`: mapped on request, or not in
    /// this window.
    pub(super) fn fixed_offset(&self, pair: &Arc<PairMemory>, at: u64) -> Option<u64> {
        Some(self.handle.fixed_window.as_ref()?.offset_of(pair)? + at)
    }

    fn new_slab(
        &self,
        account: &mut QuotaAccount,
        window: &mut Window,
        request: &CheckedRegister,
        plan: &NewSlab,
    ) -> Result<WindowBacking, Status> {
        let nonce = secret().map_err(|_| Status::Eio)?;
        let left = self.limits.slab_bytes.saturating_sub(account.slab_bytes);
        let dmb_len = u64::from(request.len);
        for data_len in slab_sizes(plan.shared, request.len) {
            let len = data_len + CONTROL_LEN as u64;
            if len > left {
                continue;
            }
            let range = plan.pair.as_ref().map(|pair| pair.alloc(len));
            let fixed = range.as_ref().and_then(|range| {
                let range = range.as_ref()?;
                self.fixed_offset(range.pair(), range.offset())
            });
            let Some(offset) = fixed.or_else(|| window.alloc(len)) else { continue };
            if range.as_ref().is_some_and(Option::is_none) {
                window.free(offset);
                continue;
            }
            let slab_id = account.next_slab_id();
            let slab = Slab::new(SlabPlan {
                serial: self.fabric.next_serial(),
                owner: account.session.clone(),
                user: request.user,
                owner_id: slab_id,
                nonce,
                data_len,
                dedicated: dmb_len > data_len / 2,
                has_doorbell: plan.has_doorbell,
                range: range.flatten(),
                gauges: self.fabric.gauges.clone(),
            });
            let place = slab.ok().and_then(|slab| slab.place(request.len, request.wait_group));
            let Some(place) = place else {
                window.free(offset);
                break;
            };
            return Ok(WindowBacking { place, slab_id, new_slab_at: Some(offset) });
        }
        Err(out_of_bytes(window))
    }

    /// Mapping slots neither used nor kept.
    pub(super) fn free_slots(&self, account: &QuotaAccount, window: &Window) -> u64 {
        let used = account.slots() + window.stale() as u64;
        u64::from(self.max_maps).saturating_sub(used)
    }

    /// Mapping slots REGISTER has to keep for slabs of `user`: 1, unless one is kept or in use.
    fn slots_to_keep(&self, account: &QuotaAccount, user: Gid) -> u64 {
        let kept = account.peers.get(&user).is_some_and(|peer| peer.reserved || peer.maps > 0);
        u64::from(!kept && self.keeps_slots(&account.session, user))
    }

    /// Whether slots are kept for slabs of `user` at all: not without a window, and not for this driver
    /// itself, whose own slabs are in the window anyway.
    fn keeps_slots(&self, session: &DeviceSession, user: Gid) -> bool {
        let itself = user == session.gid && self.fabric.shared_gid.is_none();
        self.handle.has_window() && !itself
    }

    pub(super) fn target(
        &self,
        account: &QuotaAccount,
        tag: u32,
        slab_id: u32,
        slab: Arc<Slab>,
        offset: u64,
    ) -> JobTarget {
        let (device, session) = (self.me.clone(), account.session.clone());
        JobTarget { device, session, tag, slab_id, slab, offset, answered: false }
    }
}

/// No bytes left, or none at present: ranges of past sessions are free again after the front end's answer.
pub(super) fn out_of_bytes(window: &Window) -> Status {
    if window.stale() > 0 { Status::Eagain } else { Status::Enomem }
}
