// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Attacks by drivers, each with the expected answer.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use virtio_ism_abi::command::{Op, RegisterRequest, TokenRequest};
use virtio_ism_abi::event::{Event, SlabWake};
use virtio_ism_abi::{Chid, Gid, Status};

use super::harness::{World, request};
use super::ism::{Fabric, FabricConfig, Limits, Outcome};

const K64: u32 = 64 << 10;

#[test]
fn a_guessed_token_and_a_foreign_one_get_the_same_answer() {
    let world = World::new();
    let (mut a, b, mut c) = (world.driver("a"), world.driver("b"), world.driver("c"));
    let dmb = a.register(b.gid, 0, K64).unwrap();
    for token in [dmb.token.get(), dmb.token.get() ^ 1, 0, u64::MAX] {
        let mut replies = Vec::new();
        for op in [Op::Attach, Op::Detach, Op::Unregister] {
            let body = TokenRequest { token: token.into() };
            let bytes = request(op, 5, &body);
            let Outcome::Reply(reply) = c.device.command(&bytes, 4096) else { panic!() };
            replies.push(reply.to_vec());
        }
        assert!(replies.iter().all(|reply| *reply == [2, 0, 0, 0, 5, 0, 0, 0]), "{replies:?}");
        assert_eq!(c.mv(token, &[(0, b"x")], true), Status::Enoent);
    }
    assert!(a.event().is_none());
    assert_eq!(c.unregister(dmb.token.get()), Err(Status::Enoent));
    assert_eq!(a.front.read(dmb.dmb_off.get(), 1), [0]);
}

// Shows: EISM-27, EISM-28.
#[test]
fn a_third_gid_cannot_attach_nor_can_the_owner() {
    let world = World::new();
    let (mut a, mut b, mut c) = (world.driver("a"), world.driver("b"), world.driver("c"));
    let dmb = a.register(b.gid, 0, K64).unwrap();
    assert_eq!(c.attach(dmb.token.get()).unwrap_err(), Status::Enoent);
    assert_eq!(a.attach(dmb.token.get()).unwrap_err(), Status::Enoent);
    assert!(b.attach(dmb.token.get()).is_ok());
    assert_eq!(b.unregister(dmb.token.get()), Err(Status::Enoent), "not its own");
    assert_eq!(c.device.info().slabs, 0);
}

#[test]
fn a_token_of_one_fabric_is_nothing_on_another() {
    let one = World::with(Chid(0xff00), Limits::default());
    let two = World::with(Chid(0xff01), Limits::default());
    let (mut a, b) = (one.driver("a"), one.driver("b"));
    let mut stranger = two.driver("stranger");
    let dmb = a.register(b.gid, 0, K64).unwrap();
    assert_eq!(stranger.attach(dmb.token.get()).unwrap_err(), Status::Enoent);
    assert_eq!(stranger.kick(dmb.token.get()), Status::Enoent);
    assert_eq!(stranger.query(a.gid), Err(Status::Enodev));
    assert_eq!(stranger.register(a.gid, 0, K64).unwrap_err(), Status::Enodev);
    assert_eq!(stranger.signal_event(a.gid, 0, 0), Err(Status::Enodev));
    assert!(Fabric::new(FabricConfig::new(Chid(0x1234))).is_err());
}

#[test]
fn a_past_life_gives_no_rights() {
    let world = World::new();
    let (mut a, mut b) = (world.driver("a"), world.driver("b"));
    let dmb = a.register(b.gid, 0, K64).unwrap();
    b.attach(dmb.token.get()).unwrap();
    let old = b.gid;
    b.hello();
    assert_eq!(b.attach(dmb.token.get()).unwrap_err(), Status::Enoent);
    assert_eq!(b.mv(dmb.token.get(), &[(0, b"x")], true), Status::Enoent);
    assert_eq!(b.detach(dmb.token.get()), Err(Status::Enoent));
    assert_eq!(a.query(old), Err(Status::Enodev));
    assert_eq!(a.register(old, 1, K64).unwrap_err(), Status::Enodev);
}

#[test]
fn registering_for_nobody_in_a_flood_costs_nothing_but_rate() {
    let world = World::new();
    let mut a = world.driver("a");
    for idx in 0..1_000 {
        let refused = a.register(Gid([idx as u8 | 1; 16]), idx, K64).unwrap_err();
        assert_eq!(refused, Status::Enodev);
    }
    let snapshot = world.fabric.snapshot();
    let info = &snapshot.devices[0];
    assert_eq!((snapshot.slabs, info.peers, info.map_slots, info.dmbs), (0, 0, 0, 0));
    assert_eq!(info.refusals[Status::Enodev as usize], 1_000);
}

#[test]
fn a_store_into_a_dmb_that_is_over_reaches_no_third_party() {
    let world = World::new();
    let (mut a, mut b, mut c) = (world.driver("a"), world.driver("b"), world.driver("c"));
    let dmb = a.register(b.gid, 0, K64).unwrap();
    let seen = b.attach(dmb.token.get()).unwrap();
    b.detach(dmb.token.get()).unwrap();
    a.unregister(dmb.token.get()).unwrap();
    let for_c = a.register(c.gid, 1, K64).unwrap();
    let c_sees = c.attach(for_c.token.get()).unwrap();
    let range = |off: u64| off - off % u64::from(K64);
    b.front.write(range(seen.dmb_off.get()), &[0xbb; K64 as usize]);
    assert_eq!(c.front.read(c_sees.dmb_off.get(), K64 as usize), [0; K64 as usize]);
    a.end();
    a.hello();
    b.front.write(range(seen.dmb_off.get()), &[0xbb; K64 as usize]);
    let fresh = a.register(c.gid, 0, K64).unwrap();
    assert_eq!(a.front.read(fresh.dmb_off.get(), K64 as usize), [0; K64 as usize]);
}

#[test]
fn a_scribbled_control_tail_stalls_only_its_pair() {
    let world = World::new();
    let (mut a, mut b, mut c) = (world.driver("a"), world.driver("b"), world.driver("c"));
    let dmb = a.register(b.gid, 0, K64).unwrap();
    let other = a.register(c.gid, 1, K64).unwrap();
    let seen = b.attach(dmb.token.get()).unwrap();
    let tail = seen.slab_off.get() + u64::from(seen.slab_len.get()) - 0x1_0000;
    b.front.write(tail, &[0xff; 0x1_0000]);
    // The device answers from its own memory.
    let again = a.register(b.gid, 2, K64).unwrap();
    assert_eq!(again.nonce, dmb.nonce);
    assert!(again.line.get() < 1023 && again.bit < 64);
    assert_eq!(b.mv(again.token.get(), &[(0, b"x")], true), Status::Ok);
    a.unregister(again.token.get()).unwrap();
    c.attach(other.token.get()).unwrap();
    assert_eq!(c.kick(other.token.get()), Status::Ok);
    let woken = |wake: &SlabWake| wake.slabs[..wake.n.get() as usize].contains(&other.slab_id);
    assert!(a.events().iter().any(|event| matches!(event, Event::SlabWake(wake) if woken(wake))));
}

#[test]
fn an_owner_that_never_reads_events_slows_nobody() {
    let limits = Limits { commands_per_second: 1_000_000, ..Limits::default() };
    let world = World::with(Chid(0xff00), limits);
    let (mut deaf, mut b) = (world.driver("deaf"), world.driver("b"));
    let dmb = deaf.register(b.gid, 0, K64).unwrap();
    for n in 0..10_000u32 {
        assert_eq!(b.kick(dmb.token.get()), Status::Ok);
        let _ = b.signal_event(deaf.gid, n, 0);
    }
    assert_eq!(deaf.events().len(), 9);
}

#[test]
fn bytes_of_any_kind_are_answered() {
    use proptest::prelude::Rng;
    use proptest::test_runner::{RngAlgorithm, TestRng};
    let mut rng = TestRng::deterministic_rng(RngAlgorithm::ChaCha);
    let limits = Limits { commands_per_second: u32::MAX, ..Limits::default() };
    let world = World::with(Chid(0xff00), limits);
    let mut a = world.driver("a");
    a.set_memory(&[(0, 1 << 20)]);
    for _ in 0..20_000 {
        let mut bytes = vec![0; (rng.next_u32() % 80) as usize];
        rng.fill_bytes(&mut bytes);
        if let Some(op) = bytes.first_mut() {
            *op %= 70;
        }
        if let Some(high) = bytes.get_mut(1) {
            *high = 0;
        }
        let room = (rng.next_u32() % 200) as usize;
        let outcome = a.device.command(&bytes, room);
        assert!(a.complete(outcome).len() <= room);
        let split = (rng.next_u32() as usize) % (bytes.len() + 1);
        let (head, payload) = bytes.split_at(split);
        let _ = a.transfer(head, payload);
        let _ = a.events();
    }
}

/// Runs two racing threads, each with fresh state.
fn race(first: impl Fn() + Sync, second: impl Fn() + Sync) {
    let barrier = std::sync::Barrier::new(2);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            barrier.wait();
            first();
        });
        barrier.wait();
        second();
    });
}

#[test]
fn unregister_races_moves_and_wins() {
    let world =
        World::with(Chid(0xff00), Limits { commands_per_second: u32::MAX, ..Limits::default() });
    let (mut owner, user) = (world.driver("owner"), world.mover("user"));
    for round in 0..60u32 {
        let dmb = owner.register(user.gid, 0, 16 << 10).unwrap();
        let token = dmb.token.get();
        let (ended, moved) = (AtomicBool::new(false), AtomicU64::new(0));
        let body = TokenRequest { token: token.into() };
        let bytes = request(Op::Unregister, round, &body);
        race(
            || loop {
                let late = ended.load(Ordering::SeqCst);
                match user.mv(token, &[(0, &[0xaa; 4096])], true) {
                    Status::Ok => assert!(!late, "a move after UNREGISTER was answered"),
                    status => break assert_eq!(status, Status::Enoent),
                }
                moved.fetch_add(1, Ordering::SeqCst);
            },
            || {
                for _ in 0..round % 7 {
                    std::thread::yield_now();
                }
                let Outcome::Reply(reply) = owner.device.command(&bytes, 64) else { panic!() };
                assert_eq!(reply.status(), Some(Status::Ok));
                ended.store(true, Ordering::SeqCst);
            },
        );
        let again = owner.register(user.gid, 1, 16 << 10).unwrap();
        assert_eq!(again.dmb_off, dmb.dmb_off);
        assert_eq!(owner.front.read(again.dmb_off.get(), 16 << 10), [0; 16 << 10]);
        owner.unregister(again.token.get()).unwrap();
        let _ = owner.events();
    }
}

#[test]
fn a_departure_races_commands_and_everybody_hears_of_it() {
    let world = World::with(
        Chid(0xff00),
        Limits { commands_per_second: u32::MAX, queries_per_second: u32::MAX, ..Limits::default() },
    );
    let mut user = world.driver("user");
    let mut heard = 0;
    for round in 0..200 {
        let mut owner = world.driver("owner");
        let dmb = owner.register(user.gid, 0, K64).unwrap();
        let body = TokenRequest { token: dmb.token };
        let attach = request(Op::Attach, 1, &body);
        let body = RegisterRequest {
            user_gid: owner.gid,
            idx: 1.into(),
            len: K64.into(),
            backing: 2.into(),
            ..Default::default()
        };
        let register = request(Op::Register, 2, &body);
        let bound = AtomicBool::new(false);
        let device = user.device.clone();
        let run = |bytes: &[u8]| match device.command(bytes, 4096) {
            Outcome::Reply(reply) => reply.status() == Some(Status::Ok),
            Outcome::Map(job) => device.mapped(job, true).status() == Some(Status::Ok),
            Outcome::Unmap(_) => false,
        };
        race(
            || {
                let first = if round % 2 == 0 { &attach } else { &register };
                bound.store(run(first), Ordering::SeqCst);
            },
            || owner.end(),
        );
        let downs = user
            .events()
            .iter()
            .filter(|event| matches!(event, Event::PeerDown { gid, .. } if *gid == owner.gid))
            .count();
        let expected = usize::from(bound.load(Ordering::SeqCst));
        assert_eq!(downs, expected, "round {round}: notified if and only if related");
        heard += downs;
        user.hello();
    }
    drop(user);
    let snapshot = world.fabric.snapshot();
    assert_eq!((snapshot.tokens, snapshot.slabs), (0, 0), "{heard} of 200 were related");
}
