//! REGISTER and UNREGISTER: the owner's side of a DMB.

use std::sync::Arc;

use virtio_ism_abi::command::RegisterReply;
use virtio_ism_abi::slab::CONTROL_LEN;
use virtio_ism_abi::{Gid, Status, Token};
use vm_memory::{GuestAddress, GuestAddressSpace, GuestMemoryBackend};
use zerocopy::IntoBytes;

use super::claimed::{BackingClaim, PieceClaim, RegisterClaim};
use super::command::{LetGo, check_peer, done};
use super::dmb::{Backing, Dmb, Piece, pieces};
use super::gid::secret;
use super::life::Life;
use super::map::{Ticket, Waiting};
use super::port::State;
use super::session::{MapState, Session};
use super::slab::{Place, Slab, SlabPlan, slab_sizes};
use super::sync::lock;
use super::window::Window;
use super::{Device, MapJob, Outcome};

/// A place in the window for a new DMB.
struct Spot {
    place: Place,
    slab_id: u32,
    /// Offset in the window of a slab that is not mapped yet.
    new_slab_at: Option<u64>,
}

impl Device {
    pub(super) fn register(&self, tag: u32, claim: RegisterClaim) -> Result<Outcome, Status> {
        let peers = self.fabric.find(claim.user);
        let mut state = lock(&self.state);
        let State { session, window, .. } = &mut *state;
        let session = session.as_mut().ok_or(Status::Estate)?;
        let peer = peers.first().ok_or(Status::Enodev)?;
        self.check_quotas(session, &claim)?;
        let (backing, slab_id, new_slab_at, keep) = match claim.backing {
            BackingClaim::Guest(entries) => {
                let pieces = self.guest_pieces(&entries)?;
                // The owner asked for no window: a slot is kept if there is one.
                let slots = self.slots_to_keep(session, claim.user);
                let keep = slots <= self.free_slots(session, window);
                (Backing::Guest(pieces), None, None, keep)
            }
            BackingClaim::Window => {
                let spot = self.find_spot(session, window, &claim)?;
                (Backing::Window(spot.place), Some(spot.slab_id), spot.new_slab_at, true)
            }
        };
        let Ok(token) = secret() else {
            if let Some(offset) = new_slab_at {
                window.free(offset);
            }
            return Err(Status::Eio);
        };
        let dmb =
            Dmb::new(Token(token), session.life.clone(), claim.user, claim.idx, claim.len, backing);
        if let (Some(id), Some(offset), Some(place)) = (slab_id, new_slab_at, dmb.place()) {
            session.add_mapping(id, place.slab.clone(), offset);
        }
        session.add_dmb(dmb, slab_id);
        if let Some(peer) = session.peers.get_mut(&claim.user) {
            peer.reserved |= keep && self.keeps_slots(&session.life, claim.user);
        }
        let mapping = slab_id.and_then(|id| session.maps.get(&id));
        if let Some((mapping, id)) = mapping.zip(slab_id)
            && mapping.state == MapState::Asked
        {
            let ticket = self.ticket(session, tag, id, mapping.slab.clone(), mapping.offset);
            let asks = new_slab_at.is_some();
            return Ok(Outcome::Map(MapJob {
                ticket,
                what: Waiting::Register(token, peer.clone()),
                asks,
            }));
        }
        self.finish_register(session, token, peer).map(|body| done(tag, body.as_bytes()))
    }

    /// Makes a registered DMB usable: its memory is where it shall be.
    pub(super) fn finish_register(
        &self,
        session: &mut Session,
        token: u64,
        user: &Life,
    ) -> Result<RegisterReply, Status> {
        let reply = self.try_finish_register(session, token, user);
        match session.dmbs.get_mut(&token) {
            Some(holding) if reply.is_ok() => {
                holding.ready = true;
                let slab_id = holding.slab_id;
                session.tell(slab_id);
            }
            _ => drop(session.remove_dmb(token)),
        }
        reply
    }

    fn try_finish_register(
        &self,
        session: &mut Session,
        token: u64,
        user: &Life,
    ) -> Result<RegisterReply, Status> {
        let holding = session.dmbs.get(&token).ok_or(Status::Eio)?;
        let dmb = holding.dmb.clone();
        let reply = session.register_reply(holding)?;
        // Told from here on, if the user still is there.
        if !session.relate(user) {
            return Err(Status::Enodev);
        }
        // Another DMB with the same 64 random bits is as likely as broken memory.
        if !self.fabric.tokens.insert(&dmb) {
            return Err(Status::Eio);
        }
        if let Some(place) = dmb.place() {
            place.hand_out();
        }
        Ok(reply)
    }

    pub(super) fn unregister(&self, tag: u32, token: u64) -> Result<Outcome, Status> {
        let mut _let_go: LetGo = None;
        let mut state = lock(&self.state);
        let session = state.session.as_mut().ok_or(Status::Estate)?;
        if !session.dmbs.get(&token).is_some_and(|holding| holding.ready) {
            return Err(Status::Enoent);
        }
        let holding = session.remove_dmb(token).ok_or(Status::Enoent)?;
        // Waits for the moves that run: at most one of `max_move` bytes per mover.
        holding.dmb.close(&self.fabric.tokens, false);
        session.life.forget_dmb(&holding.dmb);
        // If the driver has attached it itself, it hears of its end like any user.
        if !session.attached.contains_key(&token) {
            session.life.forget_gone(holding.dmb.token);
        }
        _let_go = Some(holding.dmb);
        Ok(done(tag, &[]))
    }

    fn check_quotas(&self, session: &Session, claim: &RegisterClaim) -> Result<(), Status> {
        let limits = &self.limits;
        if claim.idx >= session.idx_bound {
            return Err(Status::Einval);
        }
        if session.idxs.contains(&claim.idx) {
            return Err(Status::Ebusy);
        }
        if session.dmbs.len() >= limits.max_dmbs as usize {
            return Err(Status::Enospc);
        }
        if session.dmb_bytes + u64::from(claim.len) > limits.dmb_bytes {
            return Err(Status::Enomem);
        }
        check_peer(session, claim.user, limits.max_peers)
    }

    /// Guest memory that resolves now. It is looked up again whenever it is used.
    fn guest_pieces(&self, entries: &[PieceClaim]) -> Result<Vec<Piece>, Status> {
        let memory = self.contact.memory().ok_or(Status::Eio)?;
        let memory = memory.memory();
        for entry in entries {
            memory
                .get_slice(GuestAddress(entry.gpa), entry.len as usize)
                .map_err(|_| Status::Eio)?;
        }
        Ok(pieces(entries.iter().map(|entry| (entry.gpa, entry.len))))
    }

    /// A place in a slab that the pair has, or in a new one.
    fn find_spot(
        &self,
        session: &mut Session,
        window: &mut Window,
        claim: &RegisterClaim,
    ) -> Result<Spot, Status> {
        if !self.contact.has_window() {
            return Err(Status::Enotsup);
        }
        let free = self.free_slots(session, window);
        let keep = self.slots_to_keep(session, claim.user);
        let own = |session: &Session, slab: &Slab| session.owns(slab) && slab.user == claim.user;
        let mut shared = 0;
        for (id, mapping) in &session.maps {
            if !own(session, &mapping.slab) || mapping.state == MapState::Releasing {
                continue;
            }
            shared += usize::from(!mapping.slab.dedicated);
            if keep <= free
                && let Some(place) = mapping.slab.place(claim.len, claim.wait_group)
            {
                return Ok(Spot { place, slab_id: *id, new_slab_at: None });
            }
        }
        if keep + 1 > free {
            // Slots that past lives hold come back as soon as the front end has answered.
            return Err(if window.stale() > 0 { Status::Eagain } else { Status::Enospc });
        }
        self.new_slab(session, window, claim, shared)
    }

    fn new_slab(
        &self,
        session: &mut Session,
        window: &mut Window,
        claim: &RegisterClaim,
        shared: usize,
    ) -> Result<Spot, Status> {
        let nonce = secret().map_err(|_| Status::Eio)?;
        let left = self.limits.slab_bytes.saturating_sub(session.slab_bytes);
        let dmb_len = u64::from(claim.len);
        for data_len in slab_sizes(shared, claim.len) {
            let len = data_len + CONTROL_LEN as u64;
            if len > left {
                continue;
            }
            let Some(offset) = window.alloc(len) else { continue };
            let slab_id = session.next_slab_id();
            let slab = Slab::new(SlabPlan {
                serial: self.fabric.next_serial(),
                owner: session.life.clone(),
                user: claim.user,
                owner_id: slab_id,
                nonce,
                data_len,
                dedicated: dmb_len > data_len / 2,
                gauges: self.fabric.gauges.clone(),
            });
            let place = slab.ok().and_then(|slab| slab.place(claim.len, claim.wait_group));
            let Some(place) = place else {
                window.free(offset);
                break;
            };
            return Ok(Spot { place, slab_id, new_slab_at: Some(offset) });
        }
        Err(out_of_bytes(window))
    }

    /// Mapping slots that are neither used nor kept.
    pub(super) fn free_slots(&self, session: &Session, window: &Window) -> u64 {
        let used = session.slots() + window.stale() as u64;
        u64::from(self.max_maps).saturating_sub(used)
    }

    /// Mapping slots that REGISTER has to keep for slabs of `user`: 1, unless one is kept or in use.
    fn slots_to_keep(&self, session: &Session, user: Gid) -> u64 {
        let kept = session.peers.get(&user).is_some_and(|peer| peer.reserved || peer.maps > 0);
        u64::from(!kept && self.keeps_slots(&session.life, user))
    }

    /// Whether slots are kept for slabs of `user` at all: not without a window, and not for this
    /// driver itself, whose slabs are in the window because they are its own.
    fn keeps_slots(&self, life: &Life, user: Gid) -> bool {
        let itself = user == life.gid && self.fabric.shared_gid.is_none();
        self.contact.has_window() && !itself
    }

    pub(super) fn ticket(
        &self,
        session: &Session,
        tag: u32,
        slab_id: u32,
        slab: Arc<Slab>,
        offset: u64,
    ) -> Ticket {
        let (device, life) = (self.me.clone(), session.life.clone());
        Ticket { device, life, tag, slab_id, slab, offset, settled: false }
    }
}

/// No bytes left, or just for now: ranges of past lives come back when the front end has answered.
pub(super) fn out_of_bytes(window: &Window) -> Status {
    if window.stale() > 0 { Status::Eagain } else { Status::Enomem }
}
