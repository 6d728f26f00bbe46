// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What a device holds for one session, and its accounts.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use virtio_ism_abi::command::{AttachReply, RegisterReply, attach_flags};
use virtio_ism_abi::{Gid, Status};

use super::counters::CounterSnapshot;
use super::dmb::Dmb;
use super::leave::LeaveGuard;
use super::session::DeviceSession;
use super::slab::Slab;

/// Holdings of one session. Guarded by the device's lock.
#[derive(Debug)]
pub(super) struct QuotaAccount {
    pub(super) session: Arc<DeviceSession>,
    /// `idx` must be below.
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
    /// Of slabs owned.
    pub(super) slab_bytes: u64,
    /// Of peers' slabs mapped.
    pub(super) attached_bytes: u64,
    last_slab_id: u32,
    /// Counters at HELLO.
    pub(super) at_start: CounterSnapshot,
    /// Those who wait until the driver has left.
    staying: Vec<LeaveGuard>,
}

/// A DMB that the driver owns or has attached.
#[derive(Debug)]
pub(super) struct DmbEntry {
    pub(super) dmb: Arc<Dmb>,
    /// The slab it lies in, if it is in the window.
    pub(super) slab_id: Option<u32>,
    /// The driver has had its reply. Until then its command waits for the front end.
    pub(super) ready: bool,
}

/// A slab in the window.
#[derive(Debug)]
pub(super) struct Mapping {
    pub(super) slab: Arc<Slab>,
    /// Offset in the window, bytes.
    pub(super) offset: u64,
    pub(super) state: MapState,
    /// Own and attached DMBs in it, waiting commands included.
    pub(super) dmbs: u32,
    /// A reply has named the slab to the driver, so the driver can release it.
    pub(super) reported: bool,
}

/// How far the front end is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MapState {
    /// Asked to map.
    Asked,
    /// Mapped.
    Mapped,
    /// Asked to unmap.
    Releasing,
}

/// What binds this driver to a GID.
#[derive(Debug, Default)]
pub(super) struct Peer {
    /// This driver gets PEER_DOWN for it.
    pub(super) related: bool,
    /// Own DMBs that it may write.
    pub(super) dmbs: u32,
    /// Its DMBs attached.
    pub(super) attached: u32,
    /// Its slabs in the window.
    pub(super) maps: u32,
    /// A mapping slot is kept for the first of its slabs.
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

    /// The driver has left: nobody waits for it any more.
    pub(super) fn finish_leaving(&mut self) {
        self.session.handle.counters.leaves_done.add(self.staying.len() as u64);
        self.staying.clear();
    }

    /// The driver need not leave any more: nobody waits for it.
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

    /// Slots that a further slab of this peer would cost: none if one is kept for it.
    pub(super) fn slots_for_slab_of(&self, peer: Gid) -> u64 {
        let kept = self.peers.get(&peer).is_some_and(|peer| peer.reserved && peer.maps == 0);
        u64::from(!kept)
    }

    /// Whether one more peer can be bound. A peer whose PEER_DOWN is unread counts.
    pub(super) fn has_room_for(&self, peer: Gid, max_peers: u32) -> bool {
        self.peers.contains_key(&peer)
            || self.peers.len() + self.session.unread_peer_downs() < max_peers as usize
    }

    pub(super) fn related_peers(&self) -> u64 {
        self.peers.values().filter(|peer| peer.related).count() as u64
    }

    /// A number no slab of this session has.
    pub(super) fn next_slab_id(&mut self) -> u32 {
        loop {
            self.last_slab_id = self.last_slab_id.wrapping_add(1).max(1);
            if !self.maps.contains_key(&self.last_slab_id) {
                return self.last_slab_id;
            }
        }
    }

    /// The number under which a slab is in the window.
    pub(super) fn mapping_of(&self, slab: &Slab) -> Option<(u32, &Mapping)> {
        self.maps
            .iter()
            .find(|(_, mapping)| mapping.slab.serial == slab.serial)
            .map(|(id, mapping)| (*id, mapping))
    }

    pub(super) fn owns(&self, slab: &Slab) -> bool {
        Arc::ptr_eq(&slab.owner, &self.session)
    }

    /// Counts a slab that comes into the window.
    pub(super) fn add_mapping(&mut self, id: u32, slab: Arc<Slab>, offset: u64) {
        if self.owns(&slab) {
            self.slab_bytes += slab.len();
        } else {
            self.attached_bytes += slab.len();
            self.peers.entry(slab.owner.gid).or_default().maps += 1;
        }
        let state = MapState::Asked;
        self.maps.insert(id, Mapping { slab, offset, state, dmbs: 0, reported: false });
    }

    /// Removes a slab from the accounts that is not in the window any more. An owner closes it for
    /// good.
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

    /// Takes out a slab that is mapped but of no use: its command failed in the end, so the driver
    /// does not know of it and cannot release it. A peer that leaves, or unregisters, at the right
    /// moment would otherwise spend this driver's slots.
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

    /// Takes an own DMB out of the accounts.
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

    /// Takes an attached DMB out of the accounts.
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

    /// Binds this driver to a peer that was just found; `false` if the peer's session ended in
    /// between, and nothing has changed.
    ///
    /// A session that ends dies first and then asks every device, under the lock that the caller
    /// holds, whether it is related. So either its end is seen here, or it sees the relation.
    pub(super) fn relate(&mut self, peer: &DeviceSession) -> bool {
        // Members that share a GID get no PEER_DOWN for it.
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

    /// The reply to a REGISTER whose DMB is ready.
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

    /// The reply to an ATTACH whose DMB is ready.
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
