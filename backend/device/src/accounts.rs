// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A device's holdings in one session, and their accounts.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use virtio_ism_abi::command::{AttachReply, RegisterReply, attach_flags};
use virtio_ism_abi::{Gid, Status};

use super::counters::CounterSnapshot;
use super::dmb::Dmb;
use super::leave_group::LeaveGuard;
use super::session::DeviceSession;
use super::slab::Slab;

/// Holdings of one session. Guarded by the device's lock.
#[derive(Debug)]
pub(super) struct QuotaAccount {
    pub(super) session: Arc<DeviceSession>,
    /// Exclusive upper bound of `idx`.
    pub(super) idx_bound: u32,
    /// Own DMBs by token.
    pub(super) dmbs: HashMap<u64, DmbEntry>,
    pub(super) idxs: HashSet<u32>,
    /// Peers' DMBs by token.
    pub(super) attached: HashMap<u64, DmbEntry>,
    /// Slabs in the window, by the number the driver knows.
    pub(super) maps: BTreeMap<u32, Mapping>,
    pub(super) peers: HashMap<Gid, Peer>,
    pub(super) dmb_bytes: u64,
    /// Bytes of owned slabs.
    pub(super) slab_bytes: u64,
    /// Bytes of mapped peers' slabs.
    pub(super) attached_bytes: u64,
    last_slab_id: u32,
    /// Counters at HELLO.
    pub(super) at_start: CounterSnapshot,
    /// Guards of the operators waiting for the driver to leave.
    staying: Vec<LeaveGuard>,
}

/// A DMB owned or attached by the driver.
#[derive(Debug)]
pub(super) struct DmbEntry {
    pub(super) dmb: Arc<Dmb>,
    /// The DMB's slab, if in the window.
    pub(super) slab_id: Option<u32>,
    /// The driver has its reply. Until then its command waits for the front end.
    pub(super) ready: bool,
}

/// A slab in the window.
#[derive(Debug)]
pub(super) struct Mapping {
    pub(super) slab: Arc<Slab>,
    /// Offset in the window, bytes.
    pub(super) offset: u64,
    pub(super) state: MapState,
    /// Own and attached DMBs in the slab, including DMBs of waiting commands.
    pub(super) dmbs: u32,
    /// A reply has named the slab to the driver, so the driver can release it.
    pub(super) reported: bool,
}

/// Progress of the front end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MapState {
    /// Asked to map.
    Asked,
    /// Mapped.
    Mapped,
    /// Asked to unmap.
    Releasing,
}

/// Relations between this driver and a GID.
#[derive(Debug, Default)]
pub(super) struct Peer {
    /// This driver gets PEER_DOWN for the peer.
    pub(super) related: bool,
    /// Own DMBs the peer may write.
    pub(super) dmbs: u32,
    /// The peer's DMBs attached by this driver.
    pub(super) attached: u32,
    /// The peer's slabs in the window.
    pub(super) maps: u32,
    /// A mapping slot is kept for the peer's first slab.
    pub(super) reserved: bool,
}

impl QuotaAccount {
    pub(super) fn new(
        session: Arc<DeviceSession>,
        idx_bound: u32,
        at_start: CounterSnapshot,
    ) -> QuotaAccount {
        QuotaAccount {
            session,
            idx_bound,
            dmbs: HashMap::new(),
            idxs: HashSet::new(),
            attached: HashMap::new(),
            maps: BTreeMap::new(),
            peers: HashMap::new(),
            dmb_bytes: 0,
            slab_bytes: 0,
            attached_bytes: 0,
            last_slab_id: 0,
            at_start,
            staying: Vec::new(),
        }
    }

    /// Whether the driver has registered or attached a DMB.
    pub(super) fn uses_dmbs(&self) -> bool {
        !self.dmbs.is_empty() || !self.attached.is_empty()
    }

    /// Counts the driver in a group until it has left.
    pub(super) fn stay(&mut self, staying: LeaveGuard) {
        self.session.handle.counters.leaves_asked.add(1);
        self.staying.push(staying);
    }

    /// The driver has left: ends every wait for the driver.
    pub(super) fn finish_leaving(&mut self) {
        self.session.handle.counters.leaves_done.add(self.staying.len() as u64);
        self.staying.clear();
    }

    /// The driver may stay: ends every wait for the driver.
    pub(super) fn take_leave_back(&mut self) {
        self.staying.drain(..).for_each(LeaveGuard::take_back);
    }

    fn leave_if_unused(&mut self) {
        if !self.uses_dmbs() {
            self.finish_leaving();
        }
    }

    /// Mapping slots in use or kept.
    pub(super) fn slots(&self) -> u64 {
        let kept = self.peers.values().filter(|peer| peer.reserved && peer.maps == 0).count();
        self.maps.len() as u64 + kept as u64
    }

    /// Slots needed for a further slab of this peer: none if a slot is kept for the peer.
    pub(super) fn slots_for_slab_of(&self, peer: Gid) -> u64 {
        let kept = self.peers.get(&peer).is_some_and(|peer| peer.reserved && peer.maps == 0);
        u64::from(!kept)
    }

    /// Whether one more peer can be bound. A peer with an unread PEER_DOWN counts.
    pub(super) fn has_room_for(&self, peer: Gid, max_peers: u32) -> bool {
        self.peers.contains_key(&peer)
            || self.peers.len() + self.session.unread_peer_downs() < max_peers as usize
    }

    pub(super) fn related_peers(&self) -> u64 {
        self.peers.values().filter(|peer| peer.related).count() as u64
    }

    /// An unused slab number of this session.
    pub(super) fn next_slab_id(&mut self) -> u32 {
        loop {
            self.last_slab_id = self.last_slab_id.wrapping_add(1).max(1);
            if !self.maps.contains_key(&self.last_slab_id) {
                return self.last_slab_id;
            }
        }
    }

    /// The number of a slab in the window.
    pub(super) fn mapping_of(&self, slab: &Slab) -> Option<(u32, &Mapping)> {
        self.maps
            .iter()
            .find(|(_, mapping)| mapping.slab.serial == slab.serial)
            .map(|(id, mapping)| (*id, mapping))
    }

    pub(super) fn owns(&self, slab: &Slab) -> bool {
        Arc::ptr_eq(&slab.owner, &self.session)
    }

    /// Counts a slab new in the window.
    pub(super) fn add_mapping(&mut self, id: u32, slab: Arc<Slab>, offset: u64, state: MapState) {
        if self.owns(&slab) {
            self.slab_bytes += slab.len();
        } else {
            self.attached_bytes += slab.len();
            self.peers.entry(slab.owner.gid).or_default().maps += 1;
        }
        self.maps.insert(id, Mapping { slab, offset, state, dmbs: 0, reported: false });
    }

    /// Removes a slab from the accounts after its removal from the window. An owner closes its slab for good.
    pub(super) fn remove_mapping(&mut self, id: u32) -> Option<Mapping> {
        let mapping = self.maps.remove(&id)?;
        let slab = &mapping.slab;
        if self.owns(slab) {
            self.slab_bytes = self.slab_bytes.saturating_sub(slab.len());
            slab.close();
            self.session.remove_slab_wake(&slab.wake);
        } else {
            self.attached_bytes = self.attached_bytes.saturating_sub(slab.len());
            let owner = slab.owner.gid;
            if let Some(peer) = self.peers.get_mut(&owner) {
                peer.maps = peer.maps.saturating_sub(1);
            }
            self.prune(owner);
        }
        Some(mapping)
    }

    /// Removes a mapped but useless slab: after a failed command the driver does not know of the slab and
    /// cannot release it. Otherwise a peer could spend this driver's slots by leaving or unregistering at the
    /// right moment.
    pub(super) fn remove_unreported(&mut self, id: u32) -> Option<Mapping> {
        let mapping = self.maps.get(&id)?;
        if mapping.reported || mapping.dmbs > 0 || mapping.state != MapState::Mapped {
            return None;
        }
        self.remove_mapping(id)
    }

    /// Marks a slab as named to the driver by a reply.
    pub(super) fn mark_reported(&mut self, id: Option<u32>) {
        if let Some(mapping) = id.and_then(|id| self.maps.get_mut(&id)) {
            mapping.reported = true;
        }
    }

    /// Counts an own DMB.
    pub(super) fn add_dmb(&mut self, dmb: Arc<Dmb>, slab_id: Option<u32>) {
        self.idxs.insert(dmb.idx);
        self.dmb_bytes += u64::from(dmb.len);
        self.peers.entry(dmb.user).or_default().dmbs += 1;
        self.count_in_mapping(slab_id, 1);
        self.dmbs.insert(dmb.token.0, DmbEntry { dmb, slab_id, ready: false });
    }

    /// Removes an own DMB from the accounts.
    pub(super) fn remove_dmb(&mut self, token: u64) -> Option<DmbEntry> {
        let entry = self.dmbs.remove(&token)?;
        let dmb = &entry.dmb;
        self.idxs.remove(&dmb.idx);
        self.dmb_bytes = self.dmb_bytes.saturating_sub(u64::from(dmb.len));
        self.count_in_mapping(entry.slab_id, -1);
        if let Some(peer) = self.peers.get_mut(&dmb.user) {
            peer.dmbs = peer.dmbs.saturating_sub(1);
            peer.reserved &= peer.dmbs > 0;
        }
        self.prune(entry.dmb.user);
        self.leave_if_unused();
        Some(entry)
    }

    /// Counts an attached DMB.
    pub(super) fn add_attached(&mut self, dmb: Arc<Dmb>, slab_id: Option<u32>) {
        self.peers.entry(dmb.owner.gid).or_default().attached += 1;
        self.count_in_mapping(slab_id, 1);
        self.attached.insert(dmb.token.0, DmbEntry { dmb, slab_id, ready: false });
    }

    /// Removes an attached DMB from the accounts.
    pub(super) fn remove_attached(&mut self, token: u64) -> Option<DmbEntry> {
        let entry = self.attached.remove(&token)?;
        let owner = entry.dmb.owner.gid;
        self.count_in_mapping(entry.slab_id, -1);
        if let Some(peer) = self.peers.get_mut(&owner) {
            peer.attached = peer.attached.saturating_sub(1);
        }
        self.prune(owner);
        self.leave_if_unused();
        Some(entry)
    }

    /// Binds this driver to a peer just found; `false` if the peer's session ended meanwhile, without any
    /// change.
    ///
    /// A session first becomes closed, and then checks every device for a relation, under the lock held by
    /// the caller. So either this call sees the session's end, or the ending session sees the relation.
    pub(super) fn relate(&mut self, peer: &DeviceSession) -> bool {
        // Members sharing a GID get no PEER_DOWN for it.
        if peer.gid != self.session.gid && !peer.is_open() {
            return false;
        }
        self.peers.entry(peer.gid).or_default().related = true;
        true
    }

    /// A peer's session has ended. `true`: this driver gets PEER_DOWN.
    pub(super) fn unrelate(&mut self, gid: Gid) -> bool {
        let Some(peer) = self.peers.get_mut(&gid) else { return false };
        let related = std::mem::take(&mut peer.related);
        peer.reserved = false;
        self.prune(gid);
        related
    }

    fn prune(&mut self, gid: Gid) {
        let idle =
            |peer: &Peer| !peer.related && peer.dmbs == 0 && peer.attached == 0 && peer.maps == 0;
        if self.peers.get(&gid).is_some_and(idle) {
            self.peers.remove(&gid);
        }
    }

    fn count_in_mapping(&mut self, slab_id: Option<u32>, change: i32) {
        if let Some(mapping) = slab_id.and_then(|id| self.maps.get_mut(&id)) {
            mapping.dmbs = mapping.dmbs.saturating_add_signed(change);
        }
    }

    /// The reply to a REGISTER with a ready DMB.
    pub(super) fn register_reply(&self, entry: &DmbEntry) -> Result<RegisterReply, Status> {
        let token = entry.dmb.token.0.into();
        let (Some(place), Some(id)) = (entry.dmb.place(), entry.slab_id) else {
            return Ok(RegisterReply { token, ..Default::default() });
        };
        let mapping = self.maps.get(&id).ok_or(Status::Eio)?;
        Ok(RegisterReply {
            token,
            dmb_off: (mapping.offset + place.offset).into(),
            slab_off: mapping.offset.into(),
            slab_len: slab_len(&mapping.slab),
            slab_id: id.into(),
            line: place.line.into(),
            bit: place.bit,
            nonce: mapping.slab.nonce.into(),
            ..Default::default()
        })
    }

    /// The reply to an ATTACH with a ready DMB.
    pub(super) fn attach_reply(&self, entry: &DmbEntry) -> Result<AttachReply, Status> {
        let dmb = &entry.dmb;
        let common =
            AttachReply { dmb_len: dmb.len.into(), owner_gid: dmb.owner.gid, ..Default::default() };
        let (Some(place), Some(id)) = (dmb.place(), entry.slab_id) else {
            return Ok(AttachReply { flags: attach_flags::MOVE_ONLY, ..common });
        };
        let mapping = self.maps.get(&id).ok_or(Status::Eio)?;
        dmb.mapped_users.fetch_add(1, Ordering::Relaxed);
        Ok(AttachReply {
            dmb_off: (mapping.offset + place.offset).into(),
            slab_off: mapping.offset.into(),
            slab_len: slab_len(&mapping.slab),
            slab_id: id.into(),
            line: place.line.into(),
            bit: place.bit,
            nonce: mapping.slab.nonce.into(),
            ..common
        })
    }
}

/// At most 64 MiB and the control tail.
fn slab_len(slab: &Slab) -> zerocopy::little_endian::U32 {
    u32::try_from(slab.len()).unwrap_or(u32::MAX).into()
}
