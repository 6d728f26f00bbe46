//! A device's life as others see it: its GID, and how to tell it something.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, RwLock};

use virtio_ism_abi::config::Features;
use virtio_ism_abi::event::EVENT_LEN;
use virtio_ism_abi::{Gid, Token};
use vm_memory::{GuestMemoryAtomic, GuestMemoryMmap};

use super::claimed::SignalClaim;
use super::counters::Counters;
use super::dmb::Dmb;
use super::mailbox::Mailbox;
use super::rate::Rate;
use super::slab::Slab;
use super::sync::{lock, read, write};
use super::{Clock, Doorbell};

/// What lasts from life to life of a front end and may be needed without its lock.
pub(super) struct Contact {
    /// Unique on the fabric.
    pub(super) member: u64,
    pub(super) bell: Arc<dyn Doorbell>,
    pub(super) clock: Arc<dyn Clock>,
    pub(super) counters: Counters,
    pub(super) wake_rate: Rate,
    memory: RwLock<Option<GuestMemoryAtomic<GuestMemoryMmap>>>,
    window: AtomicU64,
    features: AtomicU64,
}

impl std::fmt::Debug for Contact {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Contact").field("member", &self.member).finish_non_exhaustive()
    }
}

impl Contact {
    pub(super) fn new(
        member: u64,
        bell: Arc<dyn Doorbell>,
        clock: Arc<dyn Clock>,
        wake_rate: Rate,
    ) -> Contact {
        Contact {
            member,
            bell,
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

/// One life: from HELLO to reset, next HELLO or departure.
#[derive(Debug)]
pub(super) struct Life {
    pub(super) gid: Gid,
    /// Number on the socket, from 1.
    pub(super) session: u32,
    pub(super) contact: Arc<Contact>,
    /// Cleared before anybody is told of the end.
    alive: AtomicBool,
    mailbox: Mutex<Mailbox>,
}

impl Life {
    pub(super) fn new(gid: Gid, session: u32, contact: Arc<Contact>) -> Arc<Life> {
        let mailbox = Mutex::new(Mailbox::default());
        Arc::new(Life { gid, session, contact, alive: AtomicBool::new(true), mailbox })
    }

    pub(super) fn is_alive(&self) -> bool {
        self.alive.load(Ordering::Acquire)
    }

    pub(super) fn die(&self) {
        self.alive.store(false, Ordering::Release);
    }

    /// Tells that a DMB is gone which it had attached, or owned.
    pub(super) fn tell_gone(&self, token: Token, owner: Gid) {
        let now = self.contact.clock.now_ns();
        if lock(&self.mailbox).put_gone(token, owner, now) {
            self.contact.bell.ring();
        }
    }

    /// Takes back that a DMB is gone: the driver let go of it before it heard.
    pub(super) fn forget_gone(&self, token: Token) {
        lock(&self.mailbox).forget_gone(token);
    }

    /// Drops what was pending for a DMB that this owner has unregistered.
    pub(super) fn forget_dmb(&self, dmb: &Arc<Dmb>) {
        lock(&self.mailbox).forget_dmb(dmb);
    }

    /// Drops what was pending for a slab that this owner has released.
    pub(super) fn forget_slab(&self, slab: &Arc<Slab>) {
        lock(&self.mailbox).forget_slab(slab);
    }

    /// Tells that a peer is gone. Nothing of that peer is told afterwards.
    pub(super) fn tell_down(&self, peer: Gid, failed: bool) {
        let now = self.contact.clock.now_ns();
        let mut mailbox = lock(&self.mailbox);
        let lost = mailbox.put_down(peer, failed, now);
        drop(mailbox);
        self.contact.counters.sw_events_lost.add(u64::from(lost));
        self.contact.bell.ring();
    }

    /// Peers whose end was not told yet.
    pub(super) fn downs_untold(&self) -> usize {
        lock(&self.mailbox).downs()
    }

    /// Tells a software event; `false` if there is no room for it.
    pub(super) fn tell_sw_event(&self, from: &Life, event: SignalClaim) -> bool {
        let now = self.contact.clock.now_ns();
        let told = lock(&self.mailbox).put_sw_event(from, event, now);
        if told {
            self.contact.bell.ring();
        }
        told
    }

    /// Wakes this owner for a slab of its own, on behalf of `user`.
    pub(super) fn wake_slab(&self, slab: &Arc<Slab>, user: &Life) {
        // Pairs with the swap in `Mailbox::slab_wake`: whoever finds the bit set has its data seen
        // by the one who takes the record.
        if slab.wake_pending.swap(true, Ordering::AcqRel) {
            self.contact.counters.coalesced.add(1);
            return;
        }
        if lock(&self.mailbox).put_slab(slab, self.may_tell(user)) {
            self.contact.bell.ring();
        }
    }

    /// Wakes this owner for a DMB in guest memory, on behalf of `user`.
    pub(super) fn signal_dmb(&self, dmb: &Arc<Dmb>, mask: u16, user: &Life) {
        if !dmb.raise(mask) {
            self.contact.counters.coalesced.add(1);
            return;
        }
        if lock(&self.mailbox).put_dmb(dmb, self.may_tell(user)) {
            self.contact.bell.ring();
        }
    }

    /// Whether news of `user` may still be put into the mailbox, which is to be asked with its lock
    /// held: a life dies first and PEER_DOWN is put afterwards, under the same lock, so that nothing
    /// follows it. Members that share a GID get no PEER_DOWN.
    fn may_tell(&self, user: &Life) -> impl FnOnce() -> bool {
        let related = user.gid != self.gid;
        move || !related || user.is_alive()
    }

    /// Takes the next record for the driver.
    pub(super) fn next_record(&self) -> Option<[u8; EVENT_LEN]> {
        let now = self.contact.clock.now_ns();
        lock(&self.mailbox).next(now, self.contact.wake_rate, &self.contact.counters)
    }

    pub(super) fn has_records(&self) -> bool {
        let now = self.contact.clock.now_ns();
        lock(&self.mailbox).has_any(now, self.contact.wake_rate)
    }

    /// Nanoseconds until the first delayed wake is due.
    pub(super) fn next_due(&self) -> Option<u64> {
        let now = self.contact.clock.now_ns();
        lock(&self.mailbox).next_due(now, self.contact.wake_rate)
    }

    /// Drops what was not told and takes nothing more.
    pub(super) fn close_mailbox(&self) {
        lock(&self.mailbox).close();
    }
}
