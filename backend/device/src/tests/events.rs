// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The event queue: waiting events, their time and their order.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use virtio_ism_abi::event::Event;
use virtio_ism_abi::{Chid, Gid, Status, Token};

use super::harness::{CountingNotifier, Driver, World, chain};
use super::ism::dmb::{Backing, Dmb};
use super::ism::handle::DeviceHandle;
use super::ism::session::DeviceSession;
use super::ism::slab::{Slab, SlabPlan};
use super::ism::wake_slot::DmbSignalSlot;
use super::ism::{Clock, CloseReason, Delivery, Limits, Wake};

const K64: u32 = 64 << 10;

impl Driver {
    fn own_dmb(&self, token: u64) -> Arc<Dmb> {
        let state = self.device.state.lock().unwrap();
        state.account.as_ref().unwrap().dmbs[&token].dmb.clone()
    }
}

fn kinds(events: &[Event]) -> Vec<&'static str> {
    let kind = |event: &Event| match event {
        Event::DmbSignal(_) => "dmb signal",
        Event::SlabWake(_) => "slab wake",
        Event::DmbGone { .. } => "dmb gone",
        Event::PeerDown { .. } => "peer down",
        Event::SwEvent { .. } => "sw event",
        Event::Lost { .. } => "lost",
        Event::Leave { .. } => "leave",
        Event::Stay { .. } => "stay",
    };
    events.iter().map(kind).collect()
}

#[test]
fn notices_go_before_signals() {
    let world = World::new();
    let (mut a, mut b, mut c) = (world.driver("a"), world.driver("b"), world.driver("c"));
    a.set_memory(&[(0, 1 << 20)]);
    let mine = a.register(b.gid, 0, K64).unwrap();
    let guest = a.register_guest(b.gid, 1, &[(0, K64)]).unwrap();
    let theirs = b.register(a.gid, 0, K64).unwrap();
    a.attach(theirs.token.get()).unwrap();
    a.query(c.gid).unwrap();
    b.kick(mine.token.get());
    b.kick(guest.token.get());
    b.signal_event(a.gid, 5, 6).unwrap();
    c.hello();
    b.unregister(theirs.token.get()).unwrap();
    let events = a.events();
    assert_eq!(kinds(&events), ["dmb gone", "peer down", "sw event", "slab wake", "dmb signal"]);
    let Event::SwEvent { gid, code, info } = events[2] else { panic!() };
    assert_eq!((gid, code, info), (b.gid, 5, 6));
}

#[test]
fn records_carry_trigger_and_time() {
    let world = World::new();
    let (a, mut b) = (world.driver("a"), world.driver("b"));
    b.signal_event(a.gid, 5, 6).unwrap();
    world.clock.advance(77);
    let record = a.device.next_event().unwrap();
    assert_eq!(record[..4], [5, 0, 1, 0], "SW_EVENT, trigger 1");
    assert_eq!(record[8..24], b.gid.0);
    assert_eq!(record[48..56], 1_000_000_000_000u64.to_le_bytes(), "when it was sent");
}

#[test]
fn peer_down_is_the_last_word_of_a_peer() {
    let world = World::new();
    let (mut a, mut b, mut c) = (world.driver("a"), world.driver("b"), world.driver("c"));
    a.set_memory(&[(0, 1 << 20)]);
    let mine = a.register(b.gid, 0, K64).unwrap();
    let guest = a.register_guest(b.gid, 1, &[(0, K64)]).unwrap();
    let other = a.register(c.gid, 2, K64).unwrap();
    let theirs = b.register(a.gid, 0, K64).unwrap();
    a.attach(theirs.token.get()).unwrap();
    b.kick(mine.token.get());
    b.kick(guest.token.get());
    c.kick(other.token.get());
    b.signal_event(a.gid, 1, 0).unwrap();
    b.signal_event(a.gid, 2, 0).unwrap();
    c.signal_event(a.gid, 3, 0).unwrap();
    // A wake still undelivered by the virtio side at the peer's end.
    let (head, _) = chain(mine.token.get(), &[], true, 0);
    let wakes = b.transfer(&head, &[]).wake.unwrap();
    let gone = b.gid;
    b.end();
    wakes.deliver(Delivery::Inline);
    assert_eq!(b.kick(mine.token.get()), Status::Estate);
    let events = a.events();
    assert_eq!(kinds(&events), ["dmb gone", "peer down", "lost", "sw event", "slab wake"]);
    let Event::PeerDown { gid, failed } = events[1] else { panic!() };
    assert_eq!((gid, failed), (gone, true));
    assert!(matches!(events[2], Event::Lost { n: 2 }));
    assert!(matches!(events[3], Event::SwEvent { code: 3, .. }));
    let Event::SlabWake(wake) = events[4] else { panic!() };
    assert_eq!((wake.n.get(), wake.slabs[0]), (1, other.slab_id));
    assert_eq!(a.device.info().counts.sw_events_lost, 2);
}

#[test]
fn departures_are_orderly_or_failed() {
    let world = World::new();
    let mut a = world.driver("a");
    for (how, expected) in [(CloseReason::Orderly, false), (CloseReason::Failed, true)] {
        let b = world.driver("b");
        a.query(b.gid).unwrap();
        b.device.close_session(how);
        b.device.close_session(CloseReason::Failed);
        let [Event::PeerDown { failed, .. }] = a.events()[..] else { panic!() };
        assert_eq!(failed, expected);
    }
}

#[test]
fn an_unrelated_device_gets_no_event() {
    let world = World::new();
    let (mut a, mut b, mut c, mut d) =
        (world.driver("a"), world.driver("b"), world.driver("c"), world.driver("d"));
    a.query(b.gid).unwrap();
    let dmb = c.register(b.gid, 0, K64).unwrap();
    b.attach(dmb.token.get()).unwrap();
    d.signal_event(b.gid, 1, 1).unwrap();
    b.hello();
    assert_eq!(kinds(&a.events()), ["peer down"], "asked for it");
    assert_eq!(kinds(&c.events()), ["peer down"], "registered for it");
    assert_eq!(kinds(&d.events()), [""; 0]);
    c.hello();
    assert_eq!(kinds(&b.events()), [""; 0], "the new life knows nobody");
}

#[test]
fn software_events_are_bounded_per_sender_and_in_all() {
    let world = World::new();
    let a = world.driver("a");
    let mut senders: Vec<_> = (0..9).map(|_| world.driver("s")).collect();
    for (i, sender) in senders.iter_mut().enumerate() {
        let sent = (0..20).filter(|n| sender.signal_event(a.gid, *n, 0).is_ok()).count();
        assert_eq!(sent, if i < 8 { 8 } else { 0 }, "sender {i}");
    }
    assert_eq!(senders[8].signal_event(a.gid, 0, 0), Err(Status::Eagain));
    assert_eq!(a.events().len(), 64);
    assert_eq!(senders[8].signal_event(a.gid, 0, 0), Ok(()));
    assert_eq!(senders[8].signal_event(Gid([9; 16]), 0, 0), Err(Status::Enodev));
}

#[test]
fn a_kick_storm_is_one_record() {
    let world = World::new();
    let (mut a, b) = (world.driver("a"), world.driver("b"));
    let dmb = a.register(b.gid, 0, K64).unwrap();
    for _ in 0..1_000 {
        assert_eq!(b.kick(dmb.token.get()), Status::Ok);
    }
    assert_eq!(a.notifier.count(), 1);
    assert_eq!(a.events().len(), 1);
    assert_eq!(a.device.info().counts.coalesced, 999);
}

#[test]
fn wakes_of_a_slab_are_limited_in_rate_and_none_is_lost() {
    let limits = Limits { wakes_per_second: 1_000, ..Limits::default() };
    let world = World::with(Chid(0xff00), limits);
    let (mut a, b, c) = (world.driver("a"), world.driver("b"), world.driver("c"));
    let noisy = a.register(b.gid, 0, K64).unwrap();
    let quiet = a.register(c.gid, 1, K64).unwrap();
    let mut records = 0;
    for _ in 0..1_000 {
        b.kick(noisy.token.get());
        records += a.events().len();
    }
    assert_eq!(records, 64, "a burst");
    assert!(!a.device.has_events());
    let wait = a.device.next_event_in().unwrap();
    assert_eq!(wait.as_micros(), 1_000);
    c.kick(quiet.token.get());
    assert!(a.device.has_events());
    let [Event::SlabWake(wake)] = a.events()[..] else { panic!() };
    assert_eq!(wake.slabs[0], quiet.slab_id, "others are not delayed");
    world.clock.advance(1_000_000);
    assert!(a.device.has_events());
    let [Event::SlabWake(wake)] = a.events()[..] else { panic!() };
    assert_eq!(wake.slabs[0], noisy.slab_id, "delayed, not dropped");
    assert_eq!(a.device.next_event_in(), None);
}

#[test]
fn signals_of_a_dmb_are_limited_in_rate_and_none_is_lost() {
    let limits = Limits { wakes_per_second: 1_000, ..Limits::default() };
    let world = World::with(Chid(0xff00), limits);
    let (mut a, b, c) = (world.mover("a"), world.driver("b"), world.driver("c"));
    a.set_memory(&[(0, 1 << 20)]);
    let noisy = a.register_guest(b.gid, 0, &[(0, K64)]).unwrap();
    let quiet = a.register_guest(c.gid, 1, &[(u64::from(K64), K64)]).unwrap();
    let mut records = 0;
    for _ in 0..1_000 {
        b.kick(noisy.token.get());
        records += a.events().len();
    }
    assert_eq!(records, 64, "a burst");
    assert!(!a.device.has_events());
    assert_eq!(a.device.next_event_in().map(|wait| wait.as_micros()), Some(1_000));
    c.kick(quiet.token.get());
    let [Event::DmbSignal(signal)] = a.events()[..] else { panic!() };
    assert_eq!((signal.n.get(), signal.entries[0].idx.get()), (1, 1), "others are not delayed");
    world.clock.advance(1_000_000);
    let [Event::DmbSignal(signal)] = a.events()[..] else { panic!() };
    assert_eq!((signal.n.get(), signal.entries[0].idx.get()), (1, 0), "delayed, not dropped");
    assert_eq!(a.device.next_event_in(), None);
}

#[test]
fn slabs_are_served_round_robin_fourteen_to_a_record() {
    let world = World::new();
    let mut a = world.driver("a");
    let users: Vec<_> = (0..20).map(|_| world.driver("u")).collect();
    let dmbs: Vec<_> =
        users.iter().enumerate().map(|(i, u)| a.register(u.gid, i as u32, K64).unwrap()).collect();
    for (user, dmb) in users.iter().zip(&dmbs) {
        user.kick(dmb.token.get());
    }
    let mut seen = Vec::new();
    let Some(Event::SlabWake(first)) = a.event() else { panic!() };
    seen.extend(first.slabs.iter().take(first.n.get() as usize).map(|s| s.get()));
    assert_eq!(seen.len(), 14);
    // The first is noisy, and has to wait for the others.
    users[0].kick(dmbs[0].token.get());
    let Some(Event::SlabWake(second)) = a.event() else { panic!() };
    seen.extend(second.slabs.iter().take(second.n.get() as usize).map(|s| s.get()));
    let expected: Vec<_> = dmbs.iter().chain(&dmbs[..1]).map(|dmb| dmb.slab_id.get()).collect();
    assert_eq!(seen, expected);
}

#[test]
fn what_waits_is_bounded_by_what_is_there() {
    let world = World::new();
    let (mut a, mut b) = (world.driver("a"), world.driver("b"));
    a.set_memory(&[(0, 1 << 20)]);
    // No driver takes events; DMBs, attachments and slabs come and go.
    for _ in 0..50 {
        let mine = a.register(b.gid, 0, K64).unwrap();
        let guest = a.register_guest(b.gid, 1, &[(0, K64)]).unwrap();
        let theirs = b.register(a.gid, 0, K64).unwrap();
        a.attach(theirs.token.get()).unwrap();
        b.kick(mine.token.get());
        b.kick(guest.token.get());
        let held = Arc::downgrade(&a.own_dmb(guest.token.get()));
        b.unregister(theirs.token.get()).unwrap();
        a.detach(theirs.token.get()).unwrap();
        a.unregister(mine.token.get()).unwrap();
        a.unregister(guest.token.get()).unwrap();
        a.release(mine.slab_id.get()).unwrap();
        assert!(held.upgrade().is_none(), "nor does a signal that waits hold a DMB");
    }
    assert_eq!(kinds(&a.events()), [""; 0], "all of it is gone again");
}

#[test]
fn a_wake_that_comes_too_late_is_dropped() {
    let world = World::new();
    let (mut a, b) = (world.driver("a"), world.driver("b"));
    a.set_memory(&[(0, 1 << 20)]);
    let mine = a.register(b.gid, 0, K64).unwrap();
    let guest = a.register_guest(b.gid, 1, &[(0, K64)]).unwrap();
    let wakes = [mine.token.get(), guest.token.get()].map(|token| {
        let (head, _) = chain(token, &[], true, 1);
        let wake = b.transfer(&head, &[]).wake.unwrap();
        a.unregister(token).unwrap();
        wake
    });
    a.release(mine.slab_id.get()).unwrap();
    wakes.into_iter().for_each(|wake: Wake| wake.deliver(Delivery::Inline));
    assert_eq!(kinds(&a.events()), [""; 0], "numbers may mean something else by now");
}

#[test]
fn peers_whose_end_was_not_reported_count_as_peers() {
    let limits = Limits { max_peers: 3, ..Limits::default() };
    let world = World::with(Chid(0xff00), limits);
    let mut a = world.driver("a");
    for _ in 0..3 {
        let b = world.driver("b");
        a.query(b.gid).unwrap();
        b.end();
    }
    let c = world.driver("c");
    assert_eq!(a.query(c.gid), Err(Status::Enospc));
    assert_eq!(kinds(&a.events()), ["peer down"; 3]);
    assert_eq!(a.query(c.gid), Ok(3));
}

/// No cycle of owners: a session owns its pending events, and DMBs and slabs own the session.
#[test]
fn unread_events_keep_no_memory_of_a_session_that_was_never_closed() {
    let world = World::new();
    let notifier = Arc::new(CountingNotifier::default());
    let clock: Arc<dyn Clock> = world.clock.clone();
    let rate = Limits::default().wake_rate();
    let handle = Arc::new(DeviceHandle::new(0, notifier.clone(), clock, rate, None));
    let owner = DeviceSession::new(Gid([1; 16]), 1, false, handle.clone());
    let user = DeviceSession::new(Gid([2; 16]), 1, false, handle);
    let gauges = world.fabric.gauges.clone();
    let slab = Slab::new(SlabPlan {
        serial: 0,
        owner: owner.clone(),
        user: user.gid,
        owner_id: 1,
        nonce: 1,
        data_len: 4 << 20,
        dedicated: false,
        has_doorbell: false,
        range: None,
        gauges: gauges.clone(),
    });
    let slab = slab.unwrap();
    let signal = Arc::new(DmbSignalSlot::new(0, user.gid));
    let backing = Backing::Guest { ranges: Vec::new(), signal: signal.clone() };
    let dmb = Dmb::new(Token(1), owner.clone(), user.gid, 0, K64, backing);
    owner.wake_slab(&slab.wake, &user, Delivery::Deferred);
    owner.signal_dmb(&signal, 1, &user, Delivery::Deferred);
    owner.push_dmb_gone(Token(2), user.gid);
    assert_eq!(notifier.count(), 3);
    assert!(owner.has_records());
    assert_eq!(gauges.slabs.load(Ordering::Relaxed), 1);

    let (dmb_is_left, session_is_left) = (Arc::downgrade(&dmb), Arc::downgrade(&owner));
    drop((slab, dmb, owner));
    assert_eq!(gauges.slabs.load(Ordering::Relaxed), 0, "the memory of the slab is released");
    assert!(dmb_is_left.upgrade().is_none());
    assert!(session_is_left.upgrade().is_none());
}
