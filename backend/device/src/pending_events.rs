// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The unread events of a device's driver.
//!
//! The queue is bounded against any action of peers, and however long the driver gives no buffers: one LEAVE,
//! one entry per ended DMB (attached or owned before), one per ended related peer, 64 software events, one
//! per slab and one per guest-memory DMB. An entry is removed when the driver releases the slab or
//! unregisters the DMB. Only software events can be refused or lost.
//!
//! The queue keeps keys and [wake slots](super::wake_slot), never slabs, DMBs or sessions: these own the
//! session, and the session owns the queue.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use virtio_ism_abi::event::{
    DMB_SIGNAL_MAX, DmbSignal, DmbSignalEntry, EVENT_LEN, EventType, Notice, PEER_DOWN_FAILED,
    PEER_DOWN_ORDERLY, SLAB_WAKE_MAX, SlabWake,
};
use virtio_ism_abi::{Gid, Token};
use zerocopy::{FromZeros, IntoBytes};

use super::counters::Counters;
use super::leave_group::LeaveEvent;
use super::rate::Rate;
use super::request::CheckedSignalEvent;
use super::wake_slot::{DmbSignalSlot, SlabWakeSlot};

/// Most unread software events of one driver.
pub(super) const SW_EVENTS_MAX: usize = 64;
/// Most unread software events from one sender.
pub(super) const SW_EVENTS_PER_SENDER: usize = 8;

/// The events of one session waiting for buffers of its driver.
#[derive(Debug, Default)]
pub(super) struct PendingEvents {
    closed: bool,
    leave: Option<Stamped<LeaveEvent>>,
    /// DMB_GONE: token and owner.
    dmbs_gone: BTreeMap<u64, Stamped<Gid>>,
    /// PEER_DOWN: GID and subtype.
    peers_down: BTreeMap<Gid, Stamped<u16>>,
    /// Software events of ended peers.
    lost: u32,
    sw_events: VecDeque<Stamped<SwEvent>>,
    /// SLAB_WAKE, first come, first served. A slab delayed by its rate goes to the end.
    slab_wakes: VecDeque<Arc<SlabWakeSlot>>,
    /// DMB_SIGNAL, like SLAB_WAKE.
    dmb_signals: VecDeque<Arc<DmbSignalSlot>>,
    /// Slabs were served last: DMBs are next.
    dmbs_first: bool,
}

/// An event with the time of its queueing.
#[derive(Debug)]
struct Stamped<T> {
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
    /// Queues LEAVE or STAY, replacing a waiting one.
    pub(super) fn push_leave(&mut self, what: LeaveEvent, time_ns: u64) {
        if !self.closed {
            self.leave = Some(Stamped { what, time_ns });
        }
    }

    /// `true`: there is a new event.
    pub(super) fn push_dmb_gone(&mut self, token: Token, owner: Gid, time_ns: u64) -> bool {
        if !self.closed {
            self.dmbs_gone.insert(token.0, Stamped { what: owner, time_ns });
        }
        !self.closed
    }

    pub(super) fn remove_dmb_gone(&mut self, token: Token) {
        self.dmbs_gone.remove(&token.0);
    }

    /// Queues PEER_DOWN and removes every other event of the peer except DMB_GONE, read first by the driver.
    /// Returns the number of software events lost.
    pub(super) fn push_peer_down(&mut self, peer: Gid, failed: bool, time_ns: u64) -> u32 {
        if self.closed {
            return 0;
        }
        self.slab_wakes.retain(|slot| {
            let keep = slot.user != peer;
            if !keep {
                slot.clear_pending();
            }
            keep
        });
        self.dmb_signals.retain(|slot| {
            let keep = slot.user != peer;
            if !keep {
                slot.take_mask();
            }
            keep
        });
        let before = self.sw_events.len();
        self.sw_events.retain(|e| e.what.gid != peer);
        let lost = u32::try_from(before - self.sw_events.len()).unwrap_or(u32::MAX);
        self.lost = self.lost.saturating_add(lost);
        let what = if failed { PEER_DOWN_FAILED } else { PEER_DOWN_ORDERLY };
        self.peers_down.insert(peer, Stamped { what, time_ns });
        lost
    }

    /// Number of waiting PEER_DOWN events.
    pub(super) fn peer_downs(&self) -> usize {
        self.peers_down.len()
    }

    /// Queues an event of the session `gid` of `member`; `is_open` tells whether the session is still open.
    /// `false`: there is no room, or the session has ended.
    pub(super) fn push_sw_event(
        &mut self,
        gid: Gid,
        member: u64,
        event: CheckedSignalEvent,
        time_ns: u64,
        is_open: impl FnOnce() -> bool,
    ) -> bool {
        let of_sender = self.sw_events.iter().filter(|e| e.what.member == member).count();
        if self.closed
            || self.sw_events.len() >= SW_EVENTS_MAX
            || of_sender >= SW_EVENTS_PER_SENDER
            || !is_open()
        {
            return false;
        }
        self.sw_events.push_back(Stamped { what: SwEvent { gid, member, event }, time_ns });
        true
    }

    /// Queues a slot marked as pending by the caller.
    pub(super) fn push_slab_wake(
        &mut self,
        slot: &Arc<SlabWakeSlot>,
        may_queue: impl FnOnce() -> bool,
    ) -> bool {
        if self.closed || slot.is_closed() || !may_queue() {
            slot.clear_pending();
            return false;
        }
        self.slab_wakes.push_back(slot.clone());
        true
    }

    /// Queues a slot raised by the caller.
    pub(super) fn push_dmb_signal(
        &mut self,
        slot: &Arc<DmbSignalSlot>,
        may_queue: impl FnOnce() -> bool,
    ) -> bool {
        if self.closed || slot.is_closed() || !may_queue() {
            slot.take_mask();
            return false;
        }
        self.dmb_signals.push_back(slot.clone());
        true
    }

    /// Removes the wake of a slab released by the owner.
    pub(super) fn remove_slab_wake(&mut self, slot: &Arc<SlabWakeSlot>) {
        self.slab_wakes.retain(|other| !Arc::ptr_eq(other, slot));
    }

    /// Removes the signal of a DMB unregistered by the owner.
    pub(super) fn remove_dmb_signal(&mut self, slot: &Arc<DmbSignalSlot>) {
        self.dmb_signals.retain(|other| !Arc::ptr_eq(other, slot));
    }

    /// Drops all events and queues no further ones.
    pub(super) fn close(&mut self) {
        *self = PendingEvents { closed: true, ..PendingEvents::default() };
    }

    /// Takes the next record out of the queue.
    pub(super) fn next(
        &mut self,
        now: u64,
        rate: Rate,
        counters: &Counters,
    ) -> Option<[u8; EVENT_LEN]> {
        if let Some(Stamped { what, time_ns }) = self.leave.take() {
            return record(match what {
                LeaveEvent::Leave(request) => {
                    let left_ms = request.deadline_ns.saturating_sub(now).div_ceil(1_000_000);
                    Notice {
                        subtype: (request.reason as u16).into(),
                        n: request.number.into(),
                        code: u32::try_from(left_ms).unwrap_or(u32::MAX).into(),
                        ..notice(EventType::Leave, time_ns)
                    }
                }
                LeaveEvent::Stay(number) => {
                    Notice { n: number.into(), ..notice(EventType::Stay, time_ns) }
                }
            });
        }
        if let Some((token, Stamped { what: gid, time_ns })) = self.dmbs_gone.pop_first() {
            let token = token.into();
            return record(Notice { token, gid, ..notice(EventType::DmbGone, time_ns) });
        }
        if let Some((gid, Stamped { what: subtype, time_ns })) = self.peers_down.pop_first() {
            let subtype = subtype.into();
            return record(Notice { gid, subtype, ..notice(EventType::PeerDown, time_ns) });
        }
        if self.lost > 0 {
            let n = std::mem::take(&mut self.lost).into();
            return record(Notice { n, ..notice(EventType::Lost, now) });
        }
        if let Some(Stamped { what: SwEvent { gid, event, .. }, time_ns }) =
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
            self.dmb_signal(now, rate).or_else(|| self.slab_wake(now, rate))
        } else {
            self.slab_wake(now, rate).or_else(|| self.dmb_signal(now, rate))
        };
        if signal.is_some() {
            counters.wakes.add(1);
        }
        signal
    }

    pub(super) fn has_any(&self, now: u64, rate: Rate) -> bool {
        self.leave.is_some()
            || !self.dmbs_gone.is_empty()
            || !self.peers_down.is_empty()
            || self.lost > 0
            || !self.sw_events.is_empty()
            || self.dmb_signals.iter().any(|slot| !slot.is_closed() && slot.wait(now, rate) == 0)
            || self.slab_wakes.iter().any(|slot| slot.wait(now, rate) == 0)
    }

    /// Nanoseconds until the first delayed wake is due; `None` if no wake is delayed.
    pub(super) fn next_due(&self, now: u64, rate: Rate) -> Option<u64> {
        let slabs = self.slab_wakes.iter().map(|slot| slot.wait(now, rate));
        let open = self.dmb_signals.iter().filter(|slot| !slot.is_closed());
        let dmbs = open.map(|slot| slot.wait(now, rate));
        slabs.chain(dmbs).filter(|wait| *wait > 0).min()
    }

    fn slab_wake(&mut self, now: u64, rate: Rate) -> Option<[u8; EVENT_LEN]> {
        let mut ids = [0; SLAB_WAKE_MAX];
        let mut n = 0;
        for _ in 0..self.slab_wakes.len() {
            let Some(id) = ids.get_mut(n) else { break };
            let Some(slot) = self.slab_wakes.pop_front() else { break };
            if slot.take(now, rate) {
                *id = slot.owner_id;
                n += 1;
            } else {
                self.slab_wakes.push_back(slot);
            }
        }
        self.dmbs_first = true;
        let ids = ids.get(..n).filter(|ids| !ids.is_empty())?;
        record(SlabWake::new(ids))
    }

    fn dmb_signal(&mut self, now: u64, rate: Rate) -> Option<[u8; EVENT_LEN]> {
        let mut signal = DmbSignal::new_zeroed();
        let mut n = 0;
        for _ in 0..self.dmb_signals.len() {
            let Some(entry) = signal.entries.get_mut(n) else { break };
            let Some(slot) = self.dmb_signals.pop_front() else { break };
            // The idx may belong to another DMB by now.
            if slot.is_closed() {
                slot.take_mask();
                continue;
            }
            let Some(mask) = slot.take(now, rate) else {
                self.dmb_signals.push_back(slot);
                continue;
            };
            *entry = DmbSignalEntry { idx: slot.idx.into(), mask: mask.into(), ..*entry };
            n += 1;
        }
        self.dmbs_first = false;
        signal.kind = (EventType::DmbSignal as u16).into();
        signal.n = u32::try_from(n).ok().filter(|n| *n > 0)?.into();
        record(signal)
    }
}

const _: () = assert!(DMB_SIGNAL_MAX == 7);

fn notice(kind: EventType, time_ns: u64) -> Notice {
    let kind = (kind as u16).into();
    Notice { kind, time_ns: time_ns.into(), ..Notice::default() }
}

fn record<T: IntoBytes + zerocopy::Immutable>(record: T) -> Option<[u8; EVENT_LEN]> {
    record.as_bytes().try_into().ok()
}
