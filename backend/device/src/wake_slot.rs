// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The wake state shared by a slab or a DMB with the pending events of its owner.
//!
//! A slab and a DMB own the session of their owner, and the session owns its pending events. So the pending
//! events must not own slabs or DMBs, and keep slots instead. A slot owns nothing, so an unread event keeps
//! no memory of a guest alive.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use virtio_ism_abi::Gid;

use super::rate::Rate;

/// Wake state of a slab: the contents of SLAB_WAKE, and whether a record waits already.
#[derive(Debug)]
pub(super) struct SlabWakeSlot {
    /// The slab's number on the owner's device.
    pub(super) owner_id: u32,
    /// The slab's user.
    pub(super) user: Gid,
    /// A record of the slab waits for an event buffer.
    pending: AtomicBool,
    /// State of the wake rate. Only the owner's pending events use it, under their lock.
    full_at: AtomicU64,
    closed: AtomicBool,
}

impl SlabWakeSlot {
    pub(super) fn new(owner_id: u32, user: Gid) -> SlabWakeSlot {
        SlabWakeSlot {
            owner_id,
            user,
            pending: AtomicBool::new(false),
            full_at: AtomicU64::new(0),
            closed: AtomicBool::new(false),
        }
    }

    /// Marks a wake as pending. `true`: no wake was pending, so the caller has to queue the slot.
    ///
    /// Pairs with [`take`](Self::take): for a user finding the mark set, the driver reading the record sees
    /// the user's data.
    pub(super) fn set_pending(&self) -> bool {
        !self.pending.swap(true, Ordering::AcqRel)
    }

    /// Clears the mark of an undeliverable wake.
    pub(super) fn clear_pending(&self) {
        self.pending.store(false, Ordering::Release);
    }

    /// Nanoseconds until the rate allows a record of this slab; 0: at once.
    pub(super) fn wait(&self, now: u64, rate: Rate) -> u64 {
        rate.wait(self.full_at.load(Ordering::Relaxed), now)
    }

    /// Takes the wake for a record if the rate allows one. A kick after this call makes a new record.
    ///
    /// The mark is cleared before publishing the record rather than after, so no kick is lost in between.
    /// Pairs with [`set_pending`](Self::set_pending).
    pub(super) fn take(&self, now: u64, rate: Rate) -> bool {
        let mut full_at = self.full_at.load(Ordering::Relaxed);
        if !rate.take(&mut full_at, now) {
            return false;
        }
        self.full_at.store(full_at, Ordering::Relaxed);
        self.pending.swap(false, Ordering::AcqRel);
        true
    }

    /// The owner has released the slab: its wakes are no longer queued.
    pub(super) fn close(&self) {
        self.closed.store(true, Ordering::Release);
    }

    pub(super) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }
}

/// Signal state of a DMB in guest memory: the contents of DMB_SIGNAL.
#[derive(Debug)]
pub(super) struct DmbSignalSlot {
    /// The owner's number for the DMB.
    pub(super) idx: u32,
    /// The DMB's user.
    pub(super) user: Gid,
    /// The mask to deliver, and [`RAISED`].
    pending: AtomicU32,
    /// Like the field of a [`SlabWakeSlot`].
    full_at: AtomicU64,
    closed: AtomicBool,
}

/// Marks a pending signal, for any mask.
const RAISED: u32 = 1 << 16;

impl DmbSignalSlot {
    pub(super) fn new(idx: u32, user: Gid) -> DmbSignalSlot {
        DmbSignalSlot {
            idx,
            user,
            pending: AtomicU32::new(0),
            full_at: AtomicU64::new(0),
            closed: AtomicBool::new(false),
        }
    }

    /// Adds to the pending mask. `true`: nothing was pending, so the caller has to queue the slot.
    pub(super) fn raise(&self, mask: u16) -> bool {
        // Pairs with the swap in `take_mask`.
        self.pending.fetch_or(RAISED | u32::from(mask), Ordering::AcqRel) & RAISED == 0
    }

    /// Takes the pending mask. A move after this call makes a new record.
    pub(super) fn take_mask(&self) -> u16 {
        (self.pending.swap(0, Ordering::AcqRel) & u32::from(u16::MAX)) as u16
    }

    /// Nanoseconds until the rate allows a record of this DMB; 0: at once.
    pub(super) fn wait(&self, now: u64, rate: Rate) -> u64 {
        rate.wait(self.full_at.load(Ordering::Relaxed), now)
    }

    /// Takes the pending mask for a record if the rate allows one.
    pub(super) fn take(&self, now: u64, rate: Rate) -> Option<u16> {
        let mut full_at = self.full_at.load(Ordering::Relaxed);
        rate.take(&mut full_at, now).then(|| {
            self.full_at.store(full_at, Ordering::Relaxed);
            self.take_mask()
        })
    }

    /// The DMB is no longer registered: its signals are no longer delivered.
    pub(super) fn close(&self) {
        self.closed.store(true, Ordering::Release);
    }

    pub(super) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }
}
