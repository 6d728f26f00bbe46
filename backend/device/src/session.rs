// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A session of a device: its GID, and the events queued by other devices.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use virtio_ism_abi::event::EVENT_LEN;
use virtio_ism_abi::{Gid, Status, Token};

use super::handle::{Delivery, DeviceHandle};
use super::leave_group::LeaveEvent;
use super::pending_events::PendingEvents;
use super::request::CheckedSignalEvent;
use super::sync::lock;
use super::wake_slot::{DmbSignalSlot, SlabWakeSlot};

/// A session of a device: from HELLO to reset, the next HELLO, or the loss of the front end.
///
/// DMBs, slabs and the fabric's table own a session. A session owns its device's handle and its pending
/// events, and these own nothing, so no cycle of owners can form.
#[derive(Debug)]
pub(super) struct DeviceSession {
    pub(super) gid: Gid,
    /// The session's number on the device, from 1 (`HelloReply::session`).
    pub(super) number: u32,
    /// Byte order of the control words in the driver's DMBs.
    big_endian: bool,
    pub(super) handle: Arc<DeviceHandle>,
    /// Cleared before any peer learns of the end.
    open: AtomicBool,
    pending_events: Mutex<PendingEvents>,
}

impl DeviceSession {
    pub(super) fn new(
        gid: Gid,
        number: u32,
        big_endian: bool,
        handle: Arc<DeviceHandle>,
    ) -> Arc<DeviceSession> {
        let (open, pending_events) = (AtomicBool::new(true), Mutex::default());
        Arc::new(DeviceSession { gid, number, big_endian, handle, open, pending_events })
    }

    /// Whether the control words of both drivers have one byte order.
    pub(super) fn has_order_of(&self, other: &DeviceSession) -> bool {
        self.big_endian == other.big_endian
    }

    /// The first session of a GID, if this driver can share DMBs with all of them.
    pub(super) fn first_of_same_order<'a>(
        &self,
        peers: &'a [Arc<DeviceSession>],
    ) -> Result<&'a Arc<DeviceSession>, Status> {
        let first = peers.first().ok_or(Status::Enodev)?;
        if peers.iter().all(|peer| peer.has_order_of(self)) {
            Ok(first)
        } else {
            Err(Status::Eorder)
        }
    }

    /// Whether the session is still open.
    pub(super) fn is_open(&self) -> bool {
        self.open.load(Ordering::Acquire)
    }

    /// Marks the session as ended, before any peer learns of the end.
    pub(super) fn close(&self) {
        self.open.store(false, Ordering::Release);
    }

    /// Queues DMB_GONE for a DMB attached or owned by this session.
    pub(super) fn push_dmb_gone(&self, token: Token, owner: Gid) {
        let now = self.handle.clock.now_ns();
        if lock(&self.pending_events).push_dmb_gone(token, owner, now) {
            self.handle.notifier.notify(Delivery::Deferred);
        }
    }

    /// Removes an unread DMB_GONE after the driver's detach.
    pub(super) fn remove_dmb_gone(&self, token: Token) {
        lock(&self.pending_events).remove_dmb_gone(token);
    }

    /// Removes the pending signal of a DMB unregistered by this owner.
    pub(super) fn remove_dmb_signal(&self, slot: &Arc<DmbSignalSlot>) {
        lock(&self.pending_events).remove_dmb_signal(slot);
    }

    /// Removes the pending wake of a slab released by this owner.
    pub(super) fn remove_slab_wake(&self, slot: &Arc<SlabWakeSlot>) {
        lock(&self.pending_events).remove_slab_wake(slot);
    }

    /// Queues PEER_DOWN. No event of the peer follows.
    pub(super) fn push_peer_down(&self, peer: Gid, failed: bool) {
        let now = self.handle.clock.now_ns();
        let mut pending_events = lock(&self.pending_events);
        let lost = pending_events.push_peer_down(peer, failed, now);
        drop(pending_events);
        self.handle.counters.sw_events_lost.add(u64::from(lost));
        self.handle.notifier.notify(Delivery::Deferred);
    }

    /// Queues LEAVE or STAY, replacing an unread one.
    pub(super) fn push_leave(&self, event: LeaveEvent) {
        let now = self.handle.clock.now_ns();
        lock(&self.pending_events).push_leave(event, now);
        self.handle.notifier.notify(Delivery::Deferred);
    }

    /// Peers with an unread PEER_DOWN.
    pub(super) fn unread_peer_downs(&self) -> usize {
        lock(&self.pending_events).peer_downs()
    }

    /// Queues a software event; `false` without room.
    pub(super) fn push_sw_event(&self, from: &DeviceSession, event: CheckedSignalEvent) -> bool {
        let now = self.handle.clock.now_ns();
        let (gid, member) = (from.gid, from.handle.member);
        let is_open = || from.is_open();
        let queued = lock(&self.pending_events).push_sw_event(gid, member, event, now, is_open);
        if queued {
            self.handle.notifier.notify(Delivery::Deferred);
        }
        queued
    }

    /// Wakes this owner for a slab of its own, on behalf of `user`. `delivery`: the delivery allowed by the
    /// caller's locks.
    pub(super) fn wake_slab(
        &self,
        slot: &Arc<SlabWakeSlot>,
        user: &DeviceSession,
        delivery: Delivery,
    ) {
        if !slot.set_pending() {
            self.handle.counters.coalesced.add(1);
            return;
        }
        if lock(&self.pending_events).push_slab_wake(slot, self.may_queue(user)) {
            self.handle.notifier.notify(delivery);
        }
    }

    /// Wakes this owner for a DMB in guest memory, on behalf of `user`. `delivery`: the delivery allowed by
    /// the caller's locks.
    pub(super) fn signal_dmb(
        &self,
        slot: &Arc<DmbSignalSlot>,
        mask: u16,
        user: &DeviceSession,
        delivery: Delivery,
    ) {
        if !slot.raise(mask) {
            self.handle.counters.coalesced.add(1);
            return;
        }
        if lock(&self.pending_events).push_dmb_signal(slot, self.may_queue(user)) {
            self.handle.notifier.notify(delivery);
        }
    }

    /// Whether an event of `user` may still be queued. The caller holds the lock of the pending events: a
    /// session first closes, and PEER_DOWN is queued afterwards under the same lock, so nothing follows
    /// PEER_DOWN. Members of a loopback fabric share a GID and get no PEER_DOWN.
    fn may_queue(&self, user: &DeviceSession) -> impl FnOnce() -> bool {
        let related = user.gid != self.gid;
        move || !related || user.is_open()
    }

    /// Takes the next record for the driver.
    pub(super) fn next_record(&self) -> Option<[u8; EVENT_LEN]> {
        let now = self.handle.clock.now_ns();
        lock(&self.pending_events).next(now, self.handle.wake_rate, &self.handle.counters)
    }

    /// Whether [`next_record`](Self::next_record) would return a record now.
    pub(super) fn has_records(&self) -> bool {
        let now = self.handle.clock.now_ns();
        lock(&self.pending_events).has_any(now, self.handle.wake_rate)
    }

    /// Nanoseconds until the rate limit allows the first delayed wake.
    pub(super) fn next_due(&self) -> Option<u64> {
        let now = self.handle.clock.now_ns();
        lock(&self.pending_events).next_due(now, self.handle.wake_rate)
    }

    /// Drops unread events, and queues no further ones.
    pub(super) fn close_events(&self) {
        lock(&self.pending_events).close();
    }
}
