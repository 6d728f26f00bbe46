//! A device's session as others see it: its GID, and how to tell it something.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, RwLock};

use virtio_ism_abi::config::Features;
use virtio_ism_abi::event::EVENT_LEN;
use virtio_ism_abi::{Gid, Token};
use vm_memory::{GuestMemoryAtomic, GuestMemoryMmap};

use super::counters::Counters;
use super::dmb::Dmb;
use super::pending_events::PendingEvents;
use super::rate::Rate;
use super::request::CheckedSignalEvent;
use super::slab::Slab;
use super::sync::{lock, read, write};
use super::{Clock, EventNotifier};

/// What lasts from session to session of a front end and may be needed without its lock.
pub(super) struct DeviceHandle {
    /// Unique on the fabric.
    pub(super) member: u64,
    pub(super) notifier: Arc<dyn EventNotifier>,
    pub(super) clock: Arc<dyn Clock>,
    pub(super) counters: Counters,
    pub(super) wake_rate: Rate,
    memory: RwLock<Option<GuestMemoryAtomic<GuestMemoryMmap>>>,
    window: AtomicU64,
    features: AtomicU64,
}

impl std::fmt::Debug for DeviceHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DeviceHandle").field("member", &self.member).finish_non_exhaustive()
    }
}

impl DeviceHandle {
    pub(super) fn new(
        member: u64,
        notifier: Arc<dyn EventNotifier>,
        clock: Arc<dyn Clock>,
        wake_rate: Rate,
    ) -> DeviceHandle {
        DeviceHandle {
            member,
            notifier,
            clock,
            counters: Counters::default(),
            wake_rate,
            memory: RwLock::new(None),
            window: AtomicU64::new(0),
            features: AtomicU64::new(Features::all().bits()),
        }
    }

    pub(super) fn set_memory(&self, memory: GuestMemoryAtomic<GuestMemoryMmap>) {
        *write(&self.memory) = Some(memory);
    }

    pub(super) fn memory(&self) -> Option<GuestMemoryAtomic<GuestMemoryMmap>> {
        read(&self.memory).clone()
    }

    pub(super) fn set_window(&self, bytes: u64) {
        self.window.store(bytes, Ordering::Relaxed);
    }

    /// What the front end can map, bytes.
    pub(super) fn window(&self) -> u64 {
        self.window.load(Ordering::Relaxed)
    }

    pub(super) fn set_features(&self, features: Features) {
        self.features.store(features.bits(), Ordering::Relaxed);
    }

    pub(super) fn features(&self) -> Features {
        Features::from_bits_truncate(self.features.load(Ordering::Relaxed))
    }

    /// Whether the front end can map and the driver said that it will use it.
    pub(super) fn has_window(&self) -> bool {
        self.window() > 0 && self.features().contains(Features::WINDOW)
    }
}

/// One session: from HELLO to reset, next HELLO or departure.
#[derive(Debug)]
pub(super) struct DeviceSession {
    pub(super) gid: Gid,
    /// Number on the socket, from 1.
    pub(super) number: u32,
    pub(super) handle: Arc<DeviceHandle>,
    /// Cleared before anybody is told of the end.
    alive: AtomicBool,
    pending_events: Mutex<PendingEvents>,
}

impl DeviceSession {
    pub(super) fn new(gid: Gid, number: u32, handle: Arc<DeviceHandle>) -> Arc<DeviceSession> {
        let pending_events = Mutex::new(PendingEvents::default());
        Arc::new(DeviceSession {
            gid,
            number,
            handle,
            alive: AtomicBool::new(true),
            pending_events,
        })
    }

    pub(super) fn is_alive(&self) -> bool {
        self.alive.load(Ordering::Acquire)
    }

    pub(super) fn mark_ended(&self) {
        self.alive.store(false, Ordering::Release);
    }

    /// Tells that a DMB is gone which it had attached, or owned.
    pub(super) fn push_dmb_gone(&self, token: Token, owner: Gid) {
        let now = self.handle.clock.now_ns();
        if lock(&self.pending_events).push_gone(token, owner, now) {
            self.handle.notifier.notify();
        }
    }

    /// Takes back that a DMB is gone: the driver let go of it before it heard.
    pub(super) fn remove_dmb_gone(&self, token: Token) {
        lock(&self.pending_events).remove_dmb_gone(token);
    }

    /// Drops what was pending for a DMB that this owner has unregistered.
    pub(super) fn remove_dmb(&self, dmb: &Arc<Dmb>) {
        lock(&self.pending_events).remove_dmb(dmb);
    }

    /// Drops what was pending for a slab that this owner has released.
    pub(super) fn remove_slab(&self, slab: &Arc<Slab>) {
        lock(&self.pending_events).remove_slab(slab);
    }

    /// Tells that a peer is gone. Nothing of that peer is told afterwards.
    pub(super) fn push_peer_down(&self, peer: Gid, failed: bool) {
        let now = self.handle.clock.now_ns();
        let mut pending_events = lock(&self.pending_events);
        let lost = pending_events.push_down(peer, failed, now);
        drop(pending_events);
        self.handle.counters.sw_events_lost.add(u64::from(lost));
        self.handle.notifier.notify();
    }

    /// Peers whose end was not told yet.
    pub(super) fn unread_peer_downs(&self) -> usize {
        lock(&self.pending_events).downs()
    }

    /// Tells a software event; `false` if there is no room for it.
    pub(super) fn push_sw_event(&self, from: &DeviceSession, event: CheckedSignalEvent) -> bool {
        let now = self.handle.clock.now_ns();
        let told = lock(&self.pending_events).push_sw_event(from, event, now);
        if told {
            self.handle.notifier.notify();
        }
        told
    }

    /// Wakes this owner for a slab of its own, on behalf of `user`.
    pub(super) fn wake_slab(&self, slab: &Arc<Slab>, user: &DeviceSession) {
        // Pairs with the swap in `PendingEvents::slab_wake`: whoever finds the bit set has its data seen
        // by the one who takes the record.
        if slab.wake_pending.swap(true, Ordering::AcqRel) {
            self.handle.counters.coalesced.add(1);
            return;
        }
        if lock(&self.pending_events).push_slab(slab, self.may_queue(user)) {
            self.handle.notifier.notify();
        }
    }

    /// Wakes this owner for a DMB in guest memory, on behalf of `user`.
    pub(super) fn signal_dmb(&self, dmb: &Arc<Dmb>, mask: u16, user: &DeviceSession) {
        if !dmb.raise(mask) {
            self.handle.counters.coalesced.add(1);
            return;
        }
        if lock(&self.pending_events).push_dmb(dmb, self.may_queue(user)) {
            self.handle.notifier.notify();
        }
    }

    /// Whether news of `user` may still be put into the pending_events, which is to be asked with its lock
    /// held: a session dies first and PEER_DOWN is put afterwards, under the same lock, so that nothing
    /// follows it. Members that share a GID get no PEER_DOWN.
    fn may_queue(&self, user: &DeviceSession) -> impl FnOnce() -> bool {
        let related = user.gid != self.gid;
        move || !related || user.is_alive()
    }

    /// Takes the next record for the driver.
    pub(super) fn next_record(&self) -> Option<[u8; EVENT_LEN]> {
        let now = self.handle.clock.now_ns();
        lock(&self.pending_events).next(now, self.handle.wake_rate, &self.handle.counters)
    }

    pub(super) fn has_records(&self) -> bool {
        let now = self.handle.clock.now_ns();
        lock(&self.pending_events).has_any(now, self.handle.wake_rate)
    }

    /// Nanoseconds until the first delayed wake is due.
    pub(super) fn next_due(&self) -> Option<u64> {
        let now = self.handle.clock.now_ns();
        lock(&self.pending_events).next_due(now, self.handle.wake_rate)
    }

    /// Drops what was not told and takes nothing more.
    pub(super) fn close_events(&self) {
        lock(&self.pending_events).close();
    }
}
