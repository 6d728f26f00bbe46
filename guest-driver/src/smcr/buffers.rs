// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! RMBs and send buffers: registered memory, and the pools of memory for later connections.
//!
//! An RMB has one element, for one connection (RMB-14). Each RMB belongs to one link group (RMB-18,
//! LG-49) and is registered with the protection domain of each of the group's links (LG-59, RMB-30), so
//! no other peer's keys reach it (SEC-6). A pooled RMB (RMB-17) is known to the peer: the next
//! connection of the group needs no Confirm RKey.
//!
//! A send buffer is as long as the peer's receive element, with each byte at the same offset as in the
//! element. A byte may be overwritten exactly when the peer's consumer cursor has passed it, so every
//! unconfirmed byte can be written once more.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use smc_core::connection::EYE_CATCHER;
use smc_core::link_group::{LinkKey, Region, RmbId};
use thiserror::Error;

use ism_sys::{OutOfBounds, lock};
use smc_verbs::{Access, Memory, Mr, Pd, VerbsError};

/// The most buffers kept by a group for later connections.
const POOL_MAX: usize = 200;
/// The most bytes of RMBs kept by a group for later connections.
const POOL_BYTES: u64 = 64 << 20;
/// Time of registration after an RMB's removal: a write of the peer already under way would fail the
/// link if its memory were not registered.
const REGISTERED_AFTER_REMOVAL: Duration = Duration::from_secs(5);
/// The most RMBs still registered after their removal.
const MAX_REMOVED: usize = 64;

/// Memory and its registrations, one per link.
#[derive(Debug)]
pub(crate) struct Registered {
    memory: Arc<Memory>,
    len: u32,
    access: Access,
    regions: Mutex<Vec<(LinkKey, Arc<Mr>)>>,
}

impl Registered {
    fn new(len: u32, access: Access) -> Result<Registered, VerbsError> {
        let memory = Memory::new(len as usize)?;
        Ok(Registered { memory, len, access, regions: Mutex::default() })
    }

    #[inline]
    pub(crate) fn memory(&self) -> &Arc<Memory> {
        &self.memory
    }

    /// Length, bytes.
    pub(crate) fn len(&self) -> u32 {
        self.len
    }

    /// Registers the memory with a link, unless already registered.
    ///
    /// # Errors
    /// The error of the registration; most often a limit of locked memory.
    pub(crate) fn register(&self, link: LinkKey, pd: &Arc<Pd>) -> Result<Arc<Mr>, VerbsError> {
        let mut regions = lock(&self.regions);
        if let Some((_, region)) = regions.iter().find(|(key, _)| *key == link) {
            return Ok(region.clone());
        }
        let region = Arc::new(Mr::register(pd, &self.memory, self.access)?);
        regions.push((link, region.clone()));
        Ok(region)
    }

    /// Removes and returns the registration with an ending link: the registration must outlive the
    /// queue pair (see `Link::keep`).
    #[must_use = "the end of a registration may take long while its queue pair lives"]
    pub(crate) fn remove_region(&self, link: LinkKey) -> Option<Arc<Mr>> {
        let mut regions = lock(&self.regions);
        let at = regions.iter().position(|(key, _)| *key == link)?;
        Some(regions.swap_remove(at).1)
    }

    /// The key and the address for writes of the peer over a link.
    pub(crate) fn region(&self, link: LinkKey) -> Option<Region> {
        let regions = lock(&self.regions);
        let (_, region) = regions.iter().find(|(key, _)| *key == link)?;
        Some(Region { rkey: region.rkey(), address: region.address() })
    }
}

/// Reasons not to return received bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub(crate) enum BufferError {
    /// The range does not lie in the element.
    #[error(transparent)]
    Range(#[from] OutOfBounds),
    /// The peer has written over the eye catcher.
    #[error("the eye catcher of the element is gone")]
    Overlaid,
}

/// An RMB: registered memory of one element (RMB-1).
#[derive(Debug)]
pub(crate) struct Rmb {
    id: RmbId,
    buffer: Registered,
    eye_catcher: bool,
}

impl Rmb {
    /// Zeroed memory of `len` bytes, behind an eye catcher if wanted (RMB-9), not registered yet.
    ///
    /// # Errors
    /// No memory is left.
    pub(crate) fn new(id: RmbId, len: u32, eye_catcher: bool) -> Result<Arc<Rmb>, VerbsError> {
        let buffer = Registered::new(len, Access::RemoteWrite)?;
        let rmb = Rmb { id, buffer, eye_catcher };
        let usable = rmb.clear(0);
        debug_assert!(usable, "elements are longer than an eye catcher");
        Ok(Arc::new(rmb))
    }

    /// Zeroes the first `dirty` bytes and writes the eye catcher. `false`: that failed, and the RMB
    /// cannot be used again.
    #[must_use = "old bytes are shown to nobody"]
    pub(crate) fn clear(&self, dirty: usize) -> bool {
        let memory = self.buffer.memory();
        memory.zero(0, dirty.min(memory.len())).is_ok()
            && (!self.eye_catcher || memory.copy_in(0, &EYE_CATCHER).is_ok())
    }

    /// Copies received bytes out, if the eye catcher is unchanged (RMB-7). Behind a damaged one no byte
    /// is the peer's for sure (RMB-8).
    ///
    /// # Errors
    /// See [`BufferError`].
    #[inline]
    pub(crate) fn copy_out(&self, offset: usize, into: &mut [u8]) -> Result<(), BufferError> {
        // Checked last, to notice writes during the copy.
        self.buffer.memory().copy_out(offset, into)?;
        if self.is_intact() { Ok(()) } else { Err(BufferError::Overlaid) }
    }

    #[inline]
    fn is_intact(&self) -> bool {
        if !self.eye_catcher {
            return true;
        }
        let mut found = [0; EYE_CATCHER.len()];
        self.buffer.memory().copy_out(0, &mut found).is_ok() && found == EYE_CATCHER
    }

    /// The number in the group.
    pub(crate) fn id(&self) -> RmbId {
        self.id
    }

    #[inline]
    pub(crate) fn buffer(&self) -> &Registered {
        &self.buffer
    }
}

/// A send buffer.
pub(crate) type SendBuffer = Registered;

/// Memory of `len` bytes for bytes to be sent.
///
/// # Errors
/// No memory is left.
pub(crate) fn send_buffer(len: u32) -> Result<Arc<SendBuffer>, VerbsError> {
    Registered::new(len, Access::Local).map(Arc::new)
}

/// The RMBs and the unused send buffers of a group.
#[derive(Debug, Default)]
pub(crate) struct Buffers {
    next: u32,
    rmbs: Vec<Arc<Rmb>>,
    free: Vec<RmbId>,
    /// RMBs removed by the group, with the time of removal.
    removed: Vec<(Instant, Arc<Rmb>)>,
    send_buffers: Vec<Arc<SendBuffer>>,
}

impl Buffers {
    /// A number for a new RMB.
    pub(crate) fn next_id(&mut self) -> RmbId {
        self.next = self.next.wrapping_add(1);
        RmbId(self.next)
    }

    /// Adds an RMB to the group.
    pub(crate) fn add(&mut self, rmb: Arc<Rmb>) {
        self.rmbs.push(rmb);
    }

    /// A pooled RMB of `len` bytes; others may have other lengths (RMB-3). Returns the one put back
    /// last, the most likely to be in a cache.
    pub(crate) fn take(&mut self, len: u32) -> Option<Arc<Rmb>> {
        let fits = |id: &RmbId| self.get(*id).is_some_and(|rmb| rmb.buffer.len() == len);
        let at = self.free.iter().rposition(fits)?;
        let id = self.free.remove(at);
        self.get(id).cloned()
    }

    /// An RMB of the group.
    pub(crate) fn get(&self, id: RmbId) -> Option<&Arc<Rmb>> {
        self.rmbs.iter().find(|rmb| rmb.id == id)
    }

    /// Returns a zeroed RMB to the pool. `false`: the pool is full, and the caller removes the RMB.
    #[must_use = "a buffer that is not pooled has to be removed"]
    pub(crate) fn put_back(&mut self, rmb: &Rmb) -> bool {
        let pooled = self.free.iter().filter_map(|id| self.get(*id));
        let bytes: u64 = pooled.map(|other| u64::from(other.buffer.len())).sum();
        let room = self.free.len() < POOL_MAX && bytes + u64::from(rmb.buffer.len()) <= POOL_BYTES;
        if room && self.get(rmb.id).is_some() {
            self.free.push(rmb.id);
        }
        room
    }

    /// Removes an RMB from the group.
    pub(crate) fn remove(&mut self, id: RmbId) {
        self.free.retain(|free| *free != id);
        let Some(at) = self.rmbs.iter().position(|rmb| rmb.id == id) else { return };
        let rmb = self.rmbs.swap_remove(at);
        let now = Instant::now();
        self.removed.retain(|(since, _)| now.duration_since(*since) < REGISTERED_AFTER_REMOVAL);
        if self.removed.len() >= MAX_REMOVED {
            self.removed.remove(0);
        }
        self.removed.push((now, rmb));
    }

    pub(crate) fn all(&self) -> &[Arc<Rmb>] {
        &self.rmbs
    }

    /// Numbers of RMBs in use, and in the pool.
    pub(crate) fn counts(&self) -> (usize, usize) {
        (self.rmbs.len().saturating_sub(self.free.len()), self.free.len())
    }

    /// An unused send buffer of `len` bytes.
    pub(crate) fn take_send_buffer(&mut self, len: u32) -> Option<Arc<SendBuffer>> {
        let at = self.send_buffers.iter().rposition(|send_buffer| send_buffer.len() == len)?;
        Some(self.send_buffers.swap_remove(at))
    }

    /// Keeps a send buffer for the next connection.
    pub(crate) fn put_back_send_buffer(&mut self, send_buffer: Arc<SendBuffer>) {
        if self.send_buffers.len() < POOL_MAX {
            self.send_buffers.push(send_buffer);
        }
    }

    /// Removes and returns the registrations of every buffer with an ending link.
    #[must_use = "as that of `Registered::remove_region`"]
    pub(crate) fn remove_link(&self, link: LinkKey) -> Vec<Arc<Mr>> {
        let rmbs = self.rmbs.iter().chain(self.removed.iter().map(|(_, rmb)| rmb));
        let send_buffers = self.send_buffers.iter().map(|send_buffer| &**send_buffer);
        let all = rmbs.map(|rmb| &rmb.buffer).chain(send_buffers);
        all.filter_map(|buffer| buffer.remove_region(link)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // Shows: RMB-7, RMB-9.
    #[test]
    fn an_eye_catcher_is_there_from_the_start_and_again_after_use() {
        let rmb = Rmb::new(RmbId(1), 16 << 10, true).unwrap();
        assert!(rmb.is_intact());
        rmb.buffer().memory().copy_in(4, b"data").unwrap();
        assert!(rmb.is_intact());
        rmb.buffer().memory().copy_in(3, b"overlay").unwrap();
        assert!(!rmb.is_intact());
        assert!(rmb.clear(10));
        assert!(rmb.is_intact());
        let mut left = [1; 8];
        rmb.buffer().memory().copy_out(4, &mut left).unwrap();
        assert_eq!(left, [0; 8]);
    }

    // Shows: RMB-8.
    #[test]
    fn behind_a_damaged_eye_catcher_no_byte_is_read() {
        let rmb = Rmb::new(RmbId(1), 16 << 10, true).unwrap();
        rmb.buffer().memory().copy_in(4, b"data").unwrap();
        let mut room = [0; 4];
        assert_eq!(rmb.copy_out(4, &mut room), Ok(()));
        assert_eq!(&room, b"data");
        rmb.buffer().memory().copy_in(0, &[0]).unwrap();
        assert_eq!(rmb.copy_out(4, &mut room), Err(BufferError::Overlaid));
    }

    #[test]
    fn without_eye_catcher_any_bytes_are_intact() {
        let rmb = Rmb::new(RmbId(1), 16 << 10, false).unwrap();
        rmb.buffer().memory().copy_in(0, b"data").unwrap();
        assert!(rmb.is_intact() && rmb.clear(4));
        let mut left = [1; 4];
        rmb.buffer().memory().copy_out(0, &mut left).unwrap();
        assert_eq!(left, [0; 4]);
    }

    fn add(buffers: &mut Buffers, len: u32) -> Arc<Rmb> {
        let rmb = Rmb::new(buffers.next_id(), len, false).unwrap();
        buffers.add(rmb.clone());
        rmb
    }

    // Shows: RMB-3.
    #[test]
    fn a_pooled_rmb_serves_requests_of_its_length_only() {
        let mut buffers = Buffers::default();
        for len in [16 << 10, 64 << 10] {
            let rmb = add(&mut buffers, len);
            assert!(buffers.put_back(&rmb));
        }
        assert!(buffers.take(32 << 10).is_none());
        assert_eq!(buffers.take(64 << 10).unwrap().buffer().len(), 64 << 10);
        assert!(buffers.take(64 << 10).is_none());
        assert_eq!(buffers.counts(), (1, 1));
    }

    // Shows: RMB-17.
    #[test]
    fn a_pool_keeps_so_many_rmbs_and_no_more() {
        let mut buffers = Buffers::default();
        let rmbs: Vec<_> = (0..=POOL_MAX).map(|_| add(&mut buffers, 16 << 10)).collect();
        let kept = rmbs.iter().filter(|rmb| buffers.put_back(rmb)).count();
        assert_eq!(kept, POOL_MAX);
        // The caller removes an RMB without room in the pool.
        buffers.remove(rmbs[POOL_MAX].id());
        assert_eq!(buffers.counts(), (0, POOL_MAX));
    }
}
