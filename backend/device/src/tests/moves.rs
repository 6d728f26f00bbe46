// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! MOVE chains.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use virtio_ism_abi::Status;
use virtio_ism_abi::config::Features;
use virtio_ism_abi::event::Event;
use virtio_ism_abi::signal::Sleepers;
use vm_memory::{Bytes, GuestAddress, GuestAddressSpace, GuestMemoryBackend, VolatileMemory};

use super::harness::{Driver, World, chain};
use super::ism::Delivery;
use super::ism::SliceReader;

const K64: u32 = 64 << 10;

/// An owner with a DMB in guest memory of three pieces, out of order, and its user.
fn guest_pair(world: &World) -> (Driver, Driver, u64) {
    let (mut owner, user) = (world.mover("owner"), world.mover("user"));
    owner.set_memory(&[(0, 1 << 20), (2 << 20, 1 << 20)]);
    let sg = [(0x20_0000, 0x4000), (0x1000, 0x8000), (0x2f_c000, 0x4000)];
    let dmb = owner.register_guest(user.gid, 7, &sg).unwrap();
    assert_eq!(dmb.dmb_off.get() | dmb.nonce.get(), 0, "zero for guest memory");
    let token = dmb.token.get();
    (owner, user, token)
}

#[test]
fn segments_land_in_their_places_across_pieces() {
    let (owner, user, token) = guest_pair(&World::new());
    let long: Vec<u8> = (0..0x9000u32).map(|i| (i % 251) as u8).collect();
    let status = user.mv(token, &[(0x3f00, &long), (0xffff, &[9]), (32, &[5; 32])], false);
    assert_eq!(status, Status::Ok);
    assert_eq!(owner.peek(0x20_3f00, 0x100), long[..0x100]);
    assert_eq!(owner.peek(0x1000, 0x8000), long[0x100..0x8100]);
    assert_eq!(owner.peek(0x2f_c000, 0xf00), long[0x8100..]);
    assert_eq!(owner.peek(0x2f_ffff, 1), [9]);
    assert_eq!(owner.peek(0x20_0020, 32), [5; 32]);
    assert_eq!(owner.peek(0x20_0040, 8), [0; 8]);
    assert!(owner.event().is_none(), "no signal was asked for");
}

#[test]
fn flawed_chains_are_refused_before_the_first_byte() {
    let (owner, user, token) = guest_pair(&World::new());
    let good: (u32, &[u8]) = (0, &[0xff; 16]);
    let refused = |head: &[u8], payload: &[u8]| {
        let moved = user.transfer(head, payload);
        assert!(moved.wake.is_none());
        moved.status
    };
    // A later segment beyond the DMB, also by overflow.
    for (offset, len) in [(K64, 1), (K64 - 8, 9), (u32::MAX, 8), (u32::MAX - 7, 8)] {
        let (head, payload) = chain(token, &[good, (offset, &vec![0xff; len])], true, 1);
        assert_eq!(refused(&head, &payload), Status::Einval, "{offset:#x} {len}");
    }
    let (head, payload) = chain(token, &[good, (64, &[0xff; 8])], true, 1);
    for len in [0, 1, 23, 24, 32, head.len() - 1] {
        assert_eq!(refused(&head[..len], &payload), Status::Einval, "{len} bytes of head");
    }
    assert_eq!(refused(&[&head[..], &[0; 8]].concat(), &payload), Status::Einval, "surplus");
    assert_eq!(refused(&head, &payload[1..]), Status::Einval, "payload too short");
    assert_eq!(refused(&head, &[&payload[..], &[0]].concat()), Status::Einval, "too long");
    let with = |at: usize, value: u8| {
        let mut head = head.clone();
        head[at] = value;
        head
    };
    assert_eq!(refused(&with(10, 2), &payload), Status::Einval, "unknown flag");
    assert_eq!(refused(&with(16, 25), &payload), Status::Einval, "total is not the sum");
    let many: Vec<(u32, &[u8])> = vec![(0, &[1]); 33];
    let (head, payload) = chain(token, &many, false, 0);
    assert_eq!(refused(&head, &payload), Status::Einval, "more than max_segs");
    let huge = vec![0xff; (1 << 20) + 1];
    let (head, payload) = chain(token, &[(0, &huge)], false, 0);
    assert_eq!(refused(&head, &payload), Status::Einval, "more than max_move");
    assert_eq!(owner.peek(0x20_0000, 0x4000), [0; 0x4000]);
    assert!(owner.event().is_none());
    let mut lengths = chain(token, &[(0, &[]), (8, &[])], false, 0).0;
    lengths[28..32].copy_from_slice(&u32::MAX.to_le_bytes());
    lengths[36..40].copy_from_slice(&1u32.to_le_bytes());
    assert_eq!(refused(&lengths, &[]), Status::Einval, "lengths that wrap to total");
}

#[test]
fn empty_segments_and_moves_without_any_do_nothing() {
    let (owner, user, token) = guest_pair(&World::new());
    assert_eq!(user.mv(token, &[], false), Status::Ok);
    assert_eq!(user.mv(token, &[(0, &[]), (K64, &[])], false), Status::Ok);
    assert!(owner.event().is_none());
}

#[test]
fn without_f_move_only_kicks_pass() {
    let (_owner, user, token) = guest_pair(&World::new());
    user.device.set_features(Features::WINDOW);
    assert_eq!(user.mv(token, &[(0, &[1])], false), Status::Einval);
    assert_eq!(user.kick(token), Status::Ok);
}

// Shows: EISM-27.
#[test]
fn only_the_user_may_move() {
    let world = World::new();
    let (owner, user, token) = guest_pair(&world);
    let third = world.driver("third");
    for (who, expected) in [(&user, Status::Ok), (&third, Status::Enoent), (&owner, Status::Enoent)]
    {
        assert_eq!(who.mv(token, &[(0, &[1])], false), expected);
        assert_eq!(who.mv(token ^ 1, &[(0, &[1])], false), Status::Enoent);
    }
}

#[test]
fn a_signal_on_guest_memory_reports_idx_and_all_masks_once() {
    let world = World::new();
    let (owner, user, token) = guest_pair(&world);
    for mask in [0x1000, 0x0001, 0x0001] {
        let (head, payload) = chain(token, &[(0, &[1; 8])], true, mask);
        let moved = user.transfer(&head, &payload);
        assert_eq!(moved.status, Status::Ok);
        moved.wake.unwrap().deliver(Delivery::Inline);
    }
    let [Event::DmbSignal(signal)] = owner.events()[..] else { panic!() };
    assert_eq!(signal.n.get(), 1);
    assert_eq!((signal.entries[0].idx.get(), signal.entries[0].mask.get()), (7, 0x1001));
    assert_eq!(owner.device.info().counts.coalesced, 2);
    assert_eq!(user.kick(token), Status::Ok);
    assert_eq!(owner.events().len(), 1, "reported again after it was taken");
}

#[test]
fn the_owner_is_woken_when_the_wake_is_delivered_and_not_before() {
    let (owner, user, token) = guest_pair(&World::new());
    let (head, payload) = chain(token, &[], true, 1);
    let moved = user.transfer(&head, &payload);
    assert!(!owner.device.has_events());
    assert_eq!(owner.notifier.count(), 0);
    moved.wake.unwrap().deliver(Delivery::Inline);
    assert!(owner.device.has_events());
    assert_eq!(owner.notifier.count(), 1);
}

#[test]
fn a_move_into_the_window_does_what_a_user_does() {
    let world = World::new();
    let (mut owner, user) = (world.driver("owner"), world.mover("user"));
    let dmb = owner.register(user.gid, 0, K64).unwrap();
    let token = dmb.token.get();
    let line = || owner.front.line(dmb.slab_off.get(), dmb.slab_len.get(), dmb.line.get());
    assert_eq!(user.mv(token, &[(64, b"data"), (0, &[1; 32])], true), Status::Ok);
    assert_eq!(owner.front.read(dmb.dmb_off.get() + 64, 4), b"data");
    assert_eq!(line().take(), 1 << dmb.bit);
    assert!(owner.event().is_none(), "awake: no wake");
    assert_eq!(user.device.info().counts.kicks_saved, 1);
    assert!(line().arm());
    assert_eq!(user.mv(token, &[(0, &[2; 32])], true), Status::Ok);
    let [Event::SlabWake(wake)] = owner.events()[..] else { panic!() };
    assert_eq!((wake.n.get(), wake.slabs[0]), (1, dmb.slab_id));
    assert_eq!(line().take(), 1 << dmb.bit);
    assert_eq!(user.mv(token, &[(0, &[2; 32])], false), Status::Ok);
    assert_eq!(line().take(), 0, "without SIGNAL the line stays");
    assert_eq!(line().arm_as(Sleepers::FUTEX), (0, true));
    assert_eq!(user.mv(token, &[(0, &[3; 32])], true), Status::Ok);
    assert_eq!(owner.events().len(), 1, "the device kicks those who sleep on the word");
}

#[test]
fn a_kick_always_wakes_and_sets_the_bit_of_a_user_that_cannot() {
    let world = World::new();
    let (mut owner, mut user) = (world.driver("owner"), world.driver("user"));
    let dmb = owner.register(user.gid, 0, K64).unwrap();
    let token = dmb.token.get();
    assert_eq!(user.kick(token), Status::Ok);
    assert_eq!(owner.events().len(), 1);
    let line = || owner.front.line(dmb.slab_off.get(), dmb.slab_len.get(), dmb.line.get());
    assert_eq!(line().take(), 1 << dmb.bit, "not attached: the device raises the line");
    user.attach(token).unwrap();
    assert_eq!(user.kick(token), Status::Ok);
    assert_eq!(owner.events().len(), 1);
    assert_eq!(line().take(), 0, "attached: the user raises it");
}

#[test]
fn memory_that_vanished_ends_the_dmb_and_notifies_owner_and_user() {
    let world = World::new();
    let (mut owner, mut user, token) = guest_pair(&world);
    user.attach(token).unwrap();
    // The second region is unplugged.
    owner.set_memory(&[(0, 1 << 20)]);
    assert_eq!(user.mv(token, &[(0x4000, &[1; 64]), (0, &[1; 64])], true), Status::Eio);
    assert_eq!(owner.peek(0x1000, 64), [0; 64], "all or nothing");
    assert_eq!(user.mv(token, &[(0x4000, &[1; 64])], true), Status::Enoent, "over");
    for driver in [&owner, &user] {
        let [Event::DmbGone { token: gone, owner: gid }] = driver.events()[..] else { panic!() };
        assert_eq!((gone.0, gid), (token, owner.gid));
    }
    assert_eq!(owner.device.info().dmbs, 1, "until the owner unregisters it");
    owner.unregister(token).unwrap();
    user.detach(token).unwrap();
    assert_eq!(owner.device.info().dmbs, 0);
}

#[test]
fn guest_memory_must_resolve_when_it_is_registered() {
    let world = World::new();
    let (mut owner, user) = (world.mover("owner"), world.mover("user"));
    let register =
        |owner: &mut Driver, gpa| owner.register_guest(user.gid, 0, &[(gpa, 0x1_0000)]).map(drop);
    assert_eq!(register(&mut owner, 0), Err(Status::Eio), "no memory at all");
    owner.set_memory(&[(0, 1 << 20), (1 << 20, 1 << 20)]);
    assert_eq!(register(&mut owner, 2 << 20), Err(Status::Eio));
    assert_eq!(register(&mut owner, (2 << 20) - 0x8000), Err(Status::Eio));
    assert_eq!(register(&mut owner, (1 << 20) - 0x8000), Err(Status::Eio), "two regions");
    assert_eq!(register(&mut owner, (1 << 20) - 0x1_0000), Ok(()));
}

#[test]
fn overlapping_source_and_target_behave_like_memmove() {
    let world = World::new();
    let mut both = world.mover("both");
    both.set_memory(&[(0, 1 << 20)]);
    let dmb = both.register_guest(both.gid, 0, &[(0, K64)]).unwrap();
    let bytes: Vec<u8> = (0..4096u32).map(|i| (i % 253) as u8).collect();
    let memory = both.memory.as_ref().unwrap().memory();
    for (from, to) in [(0x1000, 0x1010), (0x3010, 0x3000)] {
        memory.write_slice(&bytes, GuestAddress(from)).unwrap();
        let (head, _) = chain(dmb.token.get(), &[(to as u32, &bytes)], false, 0);
        let slice = memory.get_slice(GuestAddress(from), bytes.len()).unwrap();
        let (a, b) = slice.split_at(100).unwrap();
        // One descriptor, and two in a row without a backward overlap.
        let moved = if to < from {
            both.device.transfer(&head, &mut SliceReader::new([a, b].into_iter()), 4096)
        } else {
            both.device.transfer(&head, &mut SliceReader::new([slice].into_iter()), 4096)
        };
        assert_eq!(moved.status, Status::Ok);
        assert_eq!(both.peek(to, bytes.len()), bytes);
    }
}

#[test]
fn aligned_words_are_never_seen_torn_and_never_before_what_precedes_them() {
    let world = World::new();
    let (mut owner, user) = (world.driver("owner"), world.mover("user"));
    let dmb = owner.register(user.gid, 0, K64).unwrap();
    let stop = AtomicBool::new(false);
    let base = (dmb.dmb_off.get() - dmb.slab_off.get()) as usize;
    let map = &owner.front.maps[&dmb.slab_off.get()];
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for n in 1..=20_000u32 {
                let word = (u64::from(n) << 32 | u64::from(n)).to_ne_bytes();
                let (data, control) = (n.to_ne_bytes(), [word, word].concat());
                let status = user.mv(dmb.token.get(), &[(4100, &data), (0, &control)], false);
                assert_eq!(status, Status::Ok);
            }
            stop.store(true, Ordering::Release);
        });
        let words: [&AtomicU64; 2] = [0, 8].map(|at| map.get_atomic_ref(base + at).unwrap());
        let data: &AtomicU32 = map.get_atomic_ref(base + 4100).unwrap();
        while !stop.load(Ordering::Acquire) {
            // Against the order of the stores: a later read is at least as new.
            let [second, first] = [1, 0].map(|i: usize| words[i].load(Ordering::Acquire));
            let data = data.load(Ordering::Acquire);
            for word in [first, second] {
                assert_eq!(word >> 32, word & 0xffff_ffff, "torn: {word:#x}");
            }
            assert!(first >= second, "ascending");
            assert!(data >= first as u32, "a word before what precedes it");
        }
    });
}

#[test]
fn an_owner_that_makes_copies_last_is_told_of() {
    let world = World::new();
    let (owner, user, token) = guest_pair(&world);
    let slow = |slow, times| {
        world.clock.make_slow(slow);
        for _ in 0..times {
            assert_eq!(user.mv(token, &[(0, &[1; 64])], false), Status::Ok);
        }
        (owner.notifier.slow_memory(), user.notifier.slow_memory())
    };
    assert_eq!(slow(false, 10), (0, 0));
    // After the first slow copy, from any cause, the device checks the owner's pages.
    assert_eq!(slow(true, 1), (0, 0));
    assert_eq!(slow(true, 3), (3, 0));
    assert_eq!(slow(false, 10), (3, 0));
    world.clock.advance(61_000_000_000);
    assert_eq!(slow(true, 1), (3, 0), "after a minute it is trusted again");
}
