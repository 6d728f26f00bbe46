//! What a driver has not been told yet.
//!
//! Bounded whatever the peers do and however long the driver gives no buffers: one entry per DMB
//! that is gone (and was attached or owned), one per related peer that is down, 64 software
//! events, one per slab and one per guest-memory DMB; what the driver releases or unregisters
//! leaves with it. Only software events can be refused or lost.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use virtio_ism_abi::event::{
    DMB_SIGNAL_MAX, DmbSignal, DmbSignalEntry, EVENT_LEN, EventType, Notice, PEER_DOWN_FAILED,
    PEER_DOWN_ORDERLY, SLAB_WAKE_MAX, SlabWake,
};
use virtio_ism_abi::{Gid, Token};
use zerocopy::{FromZeros, IntoBytes};

use super::counters::Counters;
use super::dmb::Dmb;
use super::rate::Rate;
use super::request::CheckedSignalEvent;
use super::session::DeviceSession;
use super::slab::Slab;

/// Software events that one driver may leave unread.
pub(super) const SW_EVENTS_MAX: usize = 64;
/// Those of one sender among them.
pub(super) const SW_EVENTS_PER_SENDER: usize = 8;

#[derive(Debug, Default)]
pub(super) struct PendingEvents {
    closed: bool,
    gone: BTreeMap<u64, Timed<Gid>>,
    downs: BTreeMap<Gid, Timed<u16>>,
    lost: u32,
    sw_events: VecDeque<Timed<SwEvent>>,
    /// Served in the order in which they came; one that was served goes to the end.
    slabs: VecDeque<Arc<Slab>>,
    dmbs: VecDeque<Arc<Dmb>>,
    /// Slabs were served last: DMBs are next.
    dmbs_first: bool,
}

#[derive(Debug)]
struct Timed<T> {
    what: T,
    time_ns: u64,
}

#[derive(Debug)]
struct SwEvent {
    gid: Gid,
    member: u64,
    event: CheckedSignalEvent,
}

impl PendingEvents {
    /// `true`: there is something new to tell.
    pub(super) fn push_gone(&mut self, token: Token, owner: Gid, time_ns: u64) -> bool {
        if !self.closed {
            self.gone.insert(token.0, Timed { what: owner, time_ns });
        }
        !self.closed
    }

    pub(super) fn remove_dmb_gone(&mut self, token: Token) {
        self.gone.remove(&token.0);
    }

    /// Folds everything of that peer but DMB_GONE, which is told before, into its PEER_DOWN.
    /// Returns how many software events got lost by that.
    pub(super) fn push_down(&mut self, peer: Gid, failed: bool, time_ns: u64) -> u32 {
        if self.closed {
            return 0;
        }
        self.slabs.retain(|slab| {
            let keep = slab.user != peer;
            if !keep {
                slab.wake_pending.store(false, Ordering::Release);
            }
            keep
        });
        self.dmbs.retain(|dmb| {
            let keep = dmb.user != peer;
            if !keep {
                dmb.take_mask();
            }
            keep
        });
        let before = self.sw_events.len();
        self.sw_events.retain(|e| e.what.gid != peer);
        let lost = u32::try_from(before - self.sw_events.len()).unwrap_or(u32::MAX);
        self.lost = self.lost.saturating_add(lost);
        let what = if failed { PEER_DOWN_FAILED } else { PEER_DOWN_ORDERLY };
        self.downs.insert(peer, Timed { what, time_ns });
        lost
    }

    pub(super) fn downs(&self) -> usize {
        self.downs.len()
    }

    /// `false`: no room, or the sender is dead.
    pub(super) fn push_sw_event(
        &mut self,
        from: &DeviceSession,
        event: CheckedSignalEvent,
        time_ns: u64,
    ) -> bool {
        let member = from.handle.member;
        let of_sender = self.sw_events.iter().filter(|e| e.what.member == member).count();
        if self.closed
            || self.sw_events.len() >= SW_EVENTS_MAX
            || of_sender >= SW_EVENTS_PER_SENDER
            || !from.is_alive()
        {
            return false;
        }
        let what = SwEvent { gid: from.gid, member, event };
        self.sw_events.push_back(Timed { what, time_ns });
        true
    }

    /// Takes a slab whose `wake_pending` the caller has set.
    pub(super) fn push_slab(&mut self, slab: &Arc<Slab>, may_queue: impl FnOnce() -> bool) -> bool {
        if self.closed || slab.is_closed() || !may_queue() {
            slab.wake_pending.store(false, Ordering::Release);
            return false;
        }
        self.slabs.push_back(slab.clone());
        true
    }

    /// Takes a DMB that the caller has raised.
    pub(super) fn push_dmb(&mut self, dmb: &Arc<Dmb>, may_queue: impl FnOnce() -> bool) -> bool {
        if self.closed || !dmb.is_registered() || !may_queue() {
            dmb.take_mask();
            return false;
        }
        self.dmbs.push_back(dmb.clone());
        true
    }

    /// Drops the wake of a slab that the owner has released.
    pub(super) fn remove_slab(&mut self, slab: &Arc<Slab>) {
        self.slabs.retain(|other| !Arc::ptr_eq(other, slab));
    }

    /// Drops the signal of a DMB that the owner has unregistered.
    pub(super) fn remove_dmb(&mut self, dmb: &Arc<Dmb>) {
        self.dmbs.retain(|other| !Arc::ptr_eq(other, dmb));
    }

    /// Drops everything and takes nothing more. Also breaks the cycle of a session, its pending_events and
    /// its slabs and DMBs.
    pub(super) fn close(&mut self) {
        *self = PendingEvents { closed: true, ..PendingEvents::default() };
    }

    /// The next record. What it says is forgotten here.
    pub(super) fn next(
        &mut self,
        now: u64,
        rate: Rate,
        counters: &Counters,
    ) -> Option<[u8; EVENT_LEN]> {
        if let Some((token, Timed { what: gid, time_ns })) = self.gone.pop_first() {
            let token = token.into();
            return record(Notice { token, gid, ..notice(EventType::DmbGone, time_ns) });
        }
        if let Some((gid, Timed { what: subtype, time_ns })) = self.downs.pop_first() {
            let subtype = subtype.into();
            return record(Notice { gid, subtype, ..notice(EventType::PeerDown, time_ns) });
        }
        if self.lost > 0 {
            let n = std::mem::take(&mut self.lost).into();
            return record(Notice { n, ..notice(EventType::Lost, now) });
        }
        if let Some(Timed { what: SwEvent { gid, event, .. }, time_ns }) =
            self.sw_events.pop_front()
        {
            counters.sw_events.add(1);
            return record(Notice {
                // The field has 16 bits; SMC's triggers are 0 and 1.
                subtype: u16::try_from(event.trigger).unwrap_or(u16::MAX).into(),
                gid,
                code: event.code.into(),
                info: event.info.into(),
                ..notice(EventType::SwEvent, time_ns)
            });
        }
        let signal = if self.dmbs_first {
            self.dmb_signal().or_else(|| self.slab_wake(now, rate))
        } else {
            self.slab_wake(now, rate).or_else(|| self.dmb_signal())
        };
        if signal.is_some() {
            counters.wakes.add(1);
        }
        signal
    }

    pub(super) fn has_any(&self, now: u64, rate: Rate) -> bool {
        !self.gone.is_empty()
            || !self.downs.is_empty()
            || self.lost > 0
            || !self.sw_events.is_empty()
            || self.dmbs.iter().any(|dmb| dmb.is_registered())
            || self.slabs.iter().any(|slab| wait(slab, now, rate) == 0)
    }

    /// Nanoseconds until the first delayed wake is due; `None` if no wake is delayed.
    pub(super) fn next_due(&self, now: u64, rate: Rate) -> Option<u64> {
        self.slabs.iter().map(|slab| wait(slab, now, rate)).filter(|wait| *wait > 0).min()
    }

    fn slab_wake(&mut self, now: u64, rate: Rate) -> Option<[u8; EVENT_LEN]> {
        let mut ids = [0; SLAB_WAKE_MAX];
        let mut n = 0;
        for _ in 0..self.slabs.len() {
            let Some(id) = ids.get_mut(n) else { break };
            let Some(slab) = self.slabs.pop_front() else { break };
            let mut full_at = slab.wake_full_at.load(Ordering::Relaxed);
            if rate.take(&mut full_at, now) {
                slab.wake_full_at.store(full_at, Ordering::Relaxed);
                // From here on a kick makes a new record. It is cleared before the record is
                // published rather than after, so no kick falls in between. Pairs with the swap in
                // `DeviceSession::wake_slab`.
                slab.wake_pending.swap(false, Ordering::AcqRel);
                *id = slab.owner_id;
                n += 1;
            } else {
                self.slabs.push_back(slab);
            }
        }
        self.dmbs_first = true;
        let ids = ids.get(..n).filter(|ids| !ids.is_empty())?;
        record(SlabWake::new(ids))
    }

    fn dmb_signal(&mut self) -> Option<[u8; EVENT_LEN]> {
        let mut signal = DmbSignal::new_zeroed();
        let mut n = 0;
        while let Some(entry) = signal.entries.get_mut(n) {
            let Some(dmb) = self.dmbs.pop_front() else { break };
            let mask = dmb.take_mask();
            // An idx may be in use again for another DMB.
            if !dmb.is_registered() {
                continue;
            }
            *entry = DmbSignalEntry { idx: dmb.idx.into(), mask: mask.into(), ..*entry };
            n += 1;
        }
        self.dmbs_first = false;
        signal.kind = (EventType::DmbSignal as u16).into();
        signal.n = u32::try_from(n).ok().filter(|n| *n > 0)?.into();
        record(signal)
    }
}

const _: () = assert!(DMB_SIGNAL_MAX == 7);

fn wait(slab: &Slab, now: u64, rate: Rate) -> u64 {
    rate.wait(slab.wake_full_at.load(Ordering::Relaxed), now)
}

fn notice(kind: EventType, time_ns: u64) -> Notice {
    let kind = (kind as u16).into();
    Notice { kind, time_ns: time_ns.into(), ..Notice::default() }
}

fn record<T: IntoBytes + zerocopy::Immutable>(record: T) -> Option<[u8; EVENT_LEN]> {
    record.as_bytes().try_into().ok()
}
