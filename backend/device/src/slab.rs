// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A slab: memory of one owner and one user, and the ranges of DMBs in it.

use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use virtio_ism_abi::Gid;
use virtio_ism_abi::slab::{FIRST_SLAB_DATA, MAX_SLAB_DATA};
use vm_memory::VolatileSlice;

use super::doorbell::Doorbell;
use super::lines::Lines;
use super::session::DeviceSession;
use super::sync::lock;
use super::wake_slot::SlabWakeSlot;
use crate::shm::{Buddy, PairMemory, PairRange, ShmError, SlabMemory};

/// Smallest range of a slab, bytes.
const RANGE_MIN: u64 = 16 << 10;

/// Front ends map in steps of this many bytes, so the length of a slab is a multiple.
const MAP_STEP: u64 = 64 << 10;

/// Slabs of a fabric with existing memory.
#[derive(Debug, Default)]
pub(super) struct Gauges {
    pub(super) slabs: AtomicU64,
    pub(super) slab_bytes: AtomicU64,
}

/// Memory for exactly one owner (a device's session) and one user (a GID).
///
/// A slab exists for as long as a DMB lies in the slab or a window maps it. A slab is never used for another
/// pair, so a late store reaches only memory of the same pair.
#[derive(Debug)]
pub(super) struct Slab {
    /// Unique on the fabric.
    pub(super) serial: u64,
    pub(super) owner: Arc<DeviceSession>,
    pub(super) user: Gid,
    pub(super) nonce: u64,
    /// Wake state shared with the owner's pending events.
    pub(super) wake: Arc<SlabWakeSlot>,
    /// Made for a single large DMB.
    pub(super) dedicated: bool,
    /// Rung by the user to wake the owner without the device. `None`: owner or user without doorbells.
    pub(super) doorbell: Option<Doorbell>,
    memory: SlabMemory,
    room: Mutex<Room>,
    gauges: Arc<Gauges>,
}

#[derive(Debug)]
struct Room {
    ranges: Buddy,
    lines: Lines,
    /// The owner has released the slab: no DMB is placed here again, so nothing needs clearing.
    closed: bool,
}

/// Parameters of a new slab.
pub(super) struct SlabPlan {
    pub(super) serial: u64,
    pub(super) owner: Arc<DeviceSession>,
    pub(super) user: Gid,
    pub(super) owner_id: u32,
    pub(super) nonce: u64,
    /// A power of two.
    pub(super) data_len: u64,
    pub(super) dedicated: bool,
    /// Owner and user support doorbells.
    pub(super) has_doorbell: bool,
    /// Memory mapped ahead by a front end of the pair; `None`: a file of the slab's own.
    pub(super) range: Option<PairRange>,
    pub(super) gauges: Arc<Gauges>,
}

impl Slab {
    pub(super) fn new(plan: SlabPlan) -> Result<Arc<Slab>, ShmError> {
        let SlabPlan { serial, owner, user, owner_id, nonce, data_len, .. } = plan;
        let SlabPlan { dedicated, has_doorbell, range, gauges, .. } = plan;
        let memory = match range {
            Some(range) => SlabMemory::within(range, data_len, nonce)?,
            None => SlabMemory::new(data_len, nonce)?,
        };
        gauges.slabs.fetch_add(1, Ordering::Relaxed);
        gauges.slab_bytes.fetch_add(memory.len(), Ordering::Relaxed);
        let ranges = Buddy::new(data_len, RANGE_MIN);
        let room = Mutex::new(Room { ranges, lines: Lines::default(), closed: false });
        Ok(Arc::new(Slab {
            serial,
            doorbell: has_doorbell.then(|| Doorbell::new(&owner.handle)),
            owner,
            user,
            nonce,
            wake: Arc::new(SlabWakeSlot::new(owner_id, user)),
            dedicated,
            memory,
            room,
            gauges,
        }))
    }

    /// Length of data and control tail, bytes.
    pub(super) fn len(&self) -> u64 {
        self.memory.len()
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.memory.fd()
    }

    /// Begin of the slab in its file, bytes.
    pub(super) fn fd_offset(&self) -> u64 {
        self.memory.fd_offset()
    }

    /// The memory of the pair with the slab; `None` for a file of its own.
    pub(super) fn pair(&self) -> Option<&Arc<PairMemory>> {
        self.memory.range().map(PairRange::pair)
    }

    /// A range for a DMB of `len` bytes, if room and a line for its wait group are left.
    pub(super) fn place(self: &Arc<Slab>, len: u32, wait_group: u16) -> Option<SlabRange> {
        let mut room = lock(&self.room);
        if room.closed {
            return None;
        }
        let offset = room.ranges.alloc(u64::from(len))?;
        let Some((line, bit)) = room.lines.take(wait_group) else {
            room.ranges.free(offset);
            return None;
        };
        let exposed = AtomicBool::new(false);
        Some(SlabRange { slab: self.clone(), offset, len, line, bit, exposed })
    }

    /// The owner has released the slab: no further DMB is placed here.
    pub(super) fn close(&self) {
        lock(&self.room).closed = true;
        self.wake.close();
    }
}

impl Drop for Slab {
    fn drop(&mut self) {
        self.gauges.slabs.fetch_sub(1, Ordering::Relaxed);
        self.gauges.slab_bytes.fetch_sub(self.memory.len(), Ordering::Relaxed);
    }
}

/// The place of a DMB: a range of a slab and a bit of a line.
///
/// The range belongs to a DMB for as long as an `Arc` of the DMB exists: held by the owner since registering,
/// by the user since attaching, by a running move. Dropping the last `Arc` clears the range and frees it for
/// the next DMB of the same pair.
#[derive(Debug)]
pub(super) struct SlabRange {
    pub(super) slab: Arc<Slab>,
    /// Offset in the slab, bytes.
    pub(super) offset: u64,
    pub(super) len: u32,
    pub(super) line: u16,
    pub(super) bit: u8,
    /// A driver has learnt of the range, so a front end may have written there.
    exposed: AtomicBool,
}

impl SlabRange {
    pub(super) fn mark_exposed(&self) {
        self.exposed.store(true, Ordering::Relaxed);
    }

    /// `len` bytes at `offset` in the DMB.
    pub(super) fn bytes(&self, offset: u32, len: u32) -> Result<VolatileSlice<'_>, ShmError> {
        if u64::from(offset) + u64::from(len) > u64::from(self.len) {
            return Err(ShmError::Range { offset: offset.into(), len: len.into() });
        }
        self.slab.memory.data(self.offset + u64::from(offset), u64::from(len))
    }

    /// Raises the line like a user, and with `in_slab` also the slab's line; `true`: the owner needs a wake.
    pub(super) fn raise(&self, in_slab: bool) -> Result<bool, ShmError> {
        let memory = &self.slab.memory;
        let line = memory.line(self.line)?;
        if !in_slab {
            return Ok(!line.raise(self.bit).is_empty());
        }
        let slab = memory.slab_line(self.line)?;
        let kicks = !line.raise_in(self.bit, self.line, slab).is_empty();
        if kicks {
            // The record does not name its line, and the device kicks for words as well.
            slab.raise(self.line);
        }
        Ok(kicks)
    }
}

impl Drop for SlabRange {
    fn drop(&mut self) {
        if lock(&self.slab.room).closed {
            return;
        }
        // Not under the lock: clearing can take a while, and the range still has no other user.
        let memory = &self.slab.memory;
        let clean = !self.exposed.load(Ordering::Relaxed)
            || memory.zero(self.offset, u64::from(self.len)).is_ok();
        let mut room = lock(&self.slab.room);
        // A range that could not be cleared is lost until the slab ends.
        if clean {
            room.ranges.free(self.offset);
        }
        if room.lines.release(self.line, self.bit) {
            // No owner waits on the line: a bit set by a late user causes at most a spurious wake.
            let _ = memory.clear_line(self.line);
        }
    }
}

/// Bytes of data to try for a pair's next shared slab, largest first: the next in the row 4 MiB, 8 MiB, ...
/// 64 MiB, then smaller sizes down to the first, then a slab of the DMB's own.
///
/// A DMB larger than half of a slab gets a slab of its own at once.
pub(super) fn slab_sizes(shared_slabs: usize, dmb_len: u32) -> impl Iterator<Item = u64> {
    let dmb_len = u64::from(dmb_len);
    let shift = shared_slabs.min((MAX_SLAB_DATA / FIRST_SLAB_DATA).ilog2() as usize);
    (0..=shift)
        .rev()
        .map(|doublings| FIRST_SLAB_DATA << doublings)
        .filter(move |data| dmb_len <= data / 2)
        .chain(std::iter::once(dmb_len.max(MAP_STEP)))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn slabs_of_a_pair_double_up_to_64_mib() {
        let first = |n| slab_sizes(n, 64 << 10).next().unwrap();
        let sizes: Vec<_> = (0..7).map(|n| first(n) / MIB).collect();
        assert_eq!(sizes, [4, 8, 16, 32, 64, 64, 64]);
    }

    #[test]
    fn a_large_dmb_gets_a_slab_of_its_own() {
        assert_eq!(slab_sizes(0, 2 << 20).next(), Some(4 * MIB));
        assert_eq!(slab_sizes(0, 4 << 20).next(), Some(4 * MIB), "exactly its length");
        assert_eq!(slab_sizes(0, 32 << 20).next(), Some(32 * MIB));
        assert_eq!(slab_sizes(4, 32 << 20).next(), Some(64 * MIB), "half of it");
    }

    #[test]
    fn lengths_are_multiples_of_what_front_ends_map() {
        for dmb_len in (14..=25).map(|bits| 1 << bits) {
            let smallest = slab_sizes(0, dmb_len).last().unwrap();
            assert!(smallest >= u64::from(dmb_len) && smallest.is_multiple_of(MAP_STEP));
        }
    }

    #[test]
    fn smaller_slabs_are_tried_when_a_quota_forbids_the_next() {
        let sizes: Vec<_> = slab_sizes(2, 1 << 20).collect();
        assert_eq!(sizes, [16 * MIB, 8 * MIB, 4 * MIB, MIB]);
    }
}
