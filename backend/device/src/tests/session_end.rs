// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! How sessions end.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use virtio_ism_abi::command::{Op, RegisterRequest, TokenRequest};
use virtio_ism_abi::{Gid, Status};
use vm_memory::bitmap::BitmapSlice;
use vm_memory::{ReadVolatile, VolatileMemoryError, VolatileSlice};
use zerocopy::IntoBytes;

use super::harness::{CountingNotifier, Driver, World, chain, parse};
use super::ism::{
    CloseReason, Device, DeviceConfig, Fabric, FabricCaps, FabricConfig, JoinError, MapJob, Outcome,
};
use virtio_ism_abi::Chid;

const K64: u32 = 64 << 10;

// Shows: CLOSE-38.
#[test]
fn nothing_is_left_of_a_life() {
    let world = World::new();
    let (mut a, mut b) = (world.driver("a"), world.driver("b"));
    a.set_memory(&[(0, 1 << 20)]);
    for idx in 0..10 {
        let dmb = a.register(b.gid, idx, K64 << (idx % 4)).unwrap();
        b.attach(dmb.token.get()).unwrap();
        let dmb = b.register(a.gid, idx, K64).unwrap();
        a.attach(dmb.token.get()).unwrap();
        a.kick(dmb.token.get());
    }
    a.register_guest(b.gid, 10, &[(0, K64)]).unwrap();
    for driver in [&a, &b] {
        driver.end();
        let info = driver.device.info();
        assert_eq!((info.gid, info.dmbs, info.attached, info.slabs), (None, 0, 0, 0));
    }
    let snapshot = world.fabric.snapshot();
    assert_eq!((snapshot.tokens, snapshot.slabs, snapshot.slab_bytes), (0, 0, 0));
    drop(a);
    assert_eq!(world.fabric.snapshot().devices.len(), 1);
}

#[test]
fn the_users_mapping_outlives_the_owner() {
    let world = World::new();
    let (mut a, mut b) = (world.driver("a"), world.driver("b"));
    let dmb = a.register(b.gid, 0, K64).unwrap();
    let seen = b.attach(dmb.token.get()).unwrap();
    drop(a);
    b.front.write(seen.dmb_off.get(), b"late");
    assert_eq!(b.mv(dmb.token.get(), &[], true), Status::Enoent);
    assert_eq!(b.release(seen.slab_id.get()), Err(Status::Ebusy), "still attached");
    b.detach(dmb.token.get()).unwrap();
    b.release(seen.slab_id.get()).unwrap();
    assert_eq!(world.fabric.snapshot().slabs, 0);
}

#[test]
fn ranges_of_a_past_session_wait_until_the_front_end_confirms() {
    let world = World::new();
    let (mut a, b) = (world.driver("a"), world.driver("b"));
    a.device.close_session(CloseReason::Orderly);
    a.hello();
    let old = a.register(b.gid, 0, K64).unwrap();
    a.device.close_session(CloseReason::Orderly);
    assert!(a.device.stale_map().is_none(), "not before the next start");
    // HELLO without the harness' cleanup.
    a.command(Op::Hello, &[1, 0, 0, 0, 0xff, 0xff, 0, 0]);
    let new = a.register(b.gid, 0, K64).unwrap();
    assert_ne!(new.slab_off, old.slab_off);
    let stale = a.device.stale_map().unwrap();
    assert_eq!((stale.window_offset(), stale.len()), (old.slab_off.get(), 0x41_0000));
    assert!(a.device.stale_map().is_none());
    a.front.unmap(stale.window_offset());
    a.device.stale_unmapped(stale);
    let c = world.driver("c");
    let third = a.register(c.gid, 1, K64).unwrap();
    assert_eq!(third.slab_off, old.slab_off);
}

#[test]
fn a_window_full_of_past_lives_says_try_again() {
    let world = World::new();
    let port = DeviceConfig { max_maps: Some(2), ..DeviceConfig::default() };
    let (mut a, mut b) = (world.join_with(port), world.driver("b"));
    a.hello();
    a.register(b.gid, 0, K64).unwrap();
    let theirs = b.register(a.gid, 0, K64).unwrap();
    a.attach(theirs.token.get()).unwrap();
    a.command(Op::Hello, &[1, 0, 0, 0, 0xff, 0xff, 0, 0]);
    assert_eq!(a.register(b.gid, 0, K64).unwrap_err(), Status::Eagain);
    while let Some(stale) = a.device.stale_map() {
        a.front.unmap(stale.window_offset());
        a.device.stale_unmapped(stale);
    }
    assert!(a.register(b.gid, 0, K64).is_ok());
}

/// `a` registers a buffer and attaches one of `b`'s; the front end has not mapped either.
fn two_maps(a: &mut Driver, b: &mut Driver) -> (MapJob, MapJob) {
    let body = RegisterRequest {
        user_gid: b.gid,
        len: K64.into(),
        backing: 2.into(),
        ..Default::default()
    };
    let Outcome::Map(register) = a.command(Op::Register, body.as_bytes()) else { panic!() };
    let theirs = b.register(a.gid, 0, K64).unwrap();
    let attach = TokenRequest { token: theirs.token };
    let Outcome::Map(attach) = a.command(Op::Attach, attach.as_bytes()) else { panic!() };
    (register, attach)
}

#[test]
fn an_answer_for_a_past_life_changes_nothing_in_the_next() {
    let world = World::new();
    let (mut a, mut b) = (world.driver("a"), world.driver("b"));
    let (register, attach) = two_maps(&mut a, &mut b);
    a.hello();
    assert_eq!(a.device.info().stale_maps, 2, "not offered while they are being mapped");
    for (op, job) in [(Op::Register, register), (Op::Attach, attach)] {
        let tag = job.tag();
        let ok = a.front.map(&job);
        let reply = a.device.mapped(job, ok);
        assert_eq!(parse(op, tag, &reply), Err(Status::Estate));
    }
    assert_eq!((a.device.info().slabs, a.device.info().attached), (0, 0));
    assert_eq!(world.fabric.snapshot().tokens, 1, "b's own");
    while let Some(stale) = a.device.stale_map() {
        assert!(a.front.unmap(stale.window_offset()), "it had landed after the reset");
        a.device.stale_unmapped(stale);
    }
    assert_eq!(a.device.info().stale_maps, 0);
}

#[test]
fn a_peer_that_ends_while_the_front_end_maps_is_not_there_any_more() {
    let world = World::new();
    let (mut a, mut b) = (world.driver("a"), world.driver("b"));
    let (register, attach) = two_maps(&mut a, &mut b);
    b.end();
    for (op, job, expected) in
        [(Op::Register, register, Status::Enodev), (Op::Attach, attach, Status::Enoent)]
    {
        let tag = job.tag();
        let ok = a.front.map(&job);
        assert_eq!(parse(op, tag, &a.device.mapped(job, ok)), Err(expected));
    }
    assert!(a.event().is_none(), "never related, so there is nothing to tell");
    let info = a.device.info();
    assert_eq!((info.dmbs, info.attached, info.peers, info.slabs), (0, 0, 0, 0));
    // The driver knows no slab to release.
    while let Some(stale) = a.device.stale_map() {
        assert!(a.front.unmap(stale.window_offset()));
        a.device.stale_unmapped(stale);
    }
    assert!(a.front.maps.is_empty());
    assert_eq!(world.fabric.snapshot().slabs, 0);
}

#[test]
fn an_unmap_that_a_reset_overtakes_ends_with_its_answer() {
    let world = World::new();
    let (mut a, b) = (world.driver("a"), world.driver("b"));
    for ok in [true, false] {
        let dmb = a.register(b.gid, 0, K64).unwrap();
        a.unregister(dmb.token.get()).unwrap();
        let body = virtio_ism_abi::command::ReleaseSlabRequest {
            slab_id: dmb.slab_id,
            ..Default::default()
        };
        let Outcome::Unmap(job) = a.command(Op::ReleaseSlab, body.as_bytes()) else { panic!() };
        assert_eq!(a.release(dmb.slab_id.get()), Err(Status::Ebusy), "on its way");
        a.command(Op::Hello, &[1, 0, 0, 0, 0xff, 0xff, 0, 0]);
        assert!(a.device.stale_map().is_none());
        let tag = job.tag();
        a.front.unmap(job.window_offset());
        assert_eq!(parse(Op::ReleaseSlab, tag, &a.device.unmapped(job, ok)), Err(Status::Estate));
        assert_eq!(a.device.info().stale_maps, u64::from(!ok), "asked again if it failed");
        if let Some(stale) = a.device.stale_map() {
            a.device.stale_unmapped(stale);
        }
    }
}

#[test]
fn no_slab_is_used_for_another_pair() {
    let world = World::new();
    let (mut a, mut b) = (world.driver("a"), world.driver("b"));
    let mut nonces = std::collections::HashSet::new();
    for _ in 0..4 {
        let dmb = a.register(b.gid, 0, K64).unwrap();
        let seen = b.attach(dmb.token.get()).unwrap();
        b.front.write(seen.dmb_off.get(), b"secret");
        assert!(nonces.insert(dmb.nonce.get()), "a slab of its own for each life");
        assert_eq!(a.front.read(dmb.dmb_off.get() + 6, 100), [0; 100]);
        b.hello();
        // The front end of the old session could still store there; no new DMB lies in the slab.
        assert_eq!(a.register(Gid([5; 16]), 1, K64).unwrap_err(), Status::Enodev);
        a.unregister(dmb.token.get()).unwrap();
    }
    assert_eq!(a.device.info().slabs, 4, "a releases them when it likes");
}

#[test]
fn gids_are_unique_on_the_host_and_pinned_ones_stay() {
    let config = FabricConfig::new(Chid(0xff00));
    let other = FabricConfig { gids: config.gids.clone(), ..FabricConfig::new(Chid(0xff01)) };
    let (one, two) = (Fabric::new(config.clone()).unwrap(), Fabric::new(other).unwrap());
    let join = |fabric: &Arc<Fabric>, pinned_gid| {
        let port = DeviceConfig { pinned_gid, ..DeviceConfig::default() };
        fabric.join(port, Arc::new(CountingNotifier::default()))
    };
    let pinned = Gid([3; 16]);
    let device = join(&one, Some(pinned)).unwrap();
    for _ in 0..2 {
        device.command(&[1, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0], 64);
        assert_eq!(device.info().gid, Some(pinned));
    }
    let mut same_half = pinned;
    same_half.0[0] = 4;
    for gid in [pinned, same_half] {
        assert!(matches!(join(&two, Some(gid)), Err(JoinError::GidInUse(_))), "{gid}");
    }
    assert!(matches!(join(&two, Some(Gid::NONE)), Err(JoinError::GidIllegal(_))));
    drop(device);
    let device = join(&two, Some(pinned)).unwrap();
    drop(device);
    let loopback = Fabric::new(FabricConfig {
        gids: config.gids.clone(),
        ..FabricConfig::new(Chid::LOOPBACK)
    });
    let loopback = loopback.unwrap();
    assert!(matches!(join(&loopback, Some(pinned)), Err(JoinError::GidOnLoopback)));
    drop(join(&loopback, None).unwrap());
    drop(loopback);
    assert!(config.gids.is_empty(), "all are given back");
}

/// A payload letting another thread run in the middle of a copy.
struct Slow<'a> {
    inside: &'a AtomicBool,
    go_on: &'a AtomicBool,
    copied: &'a AtomicBool,
}

impl ReadVolatile for Slow<'_> {
    fn read_volatile<B: BitmapSlice>(
        &mut self,
        buf: &mut VolatileSlice<'_, B>,
    ) -> Result<usize, VolatileMemoryError> {
        self.inside.store(true, Ordering::SeqCst);
        let start = Instant::now();
        while !self.go_on.load(Ordering::SeqCst) && start.elapsed() < Duration::from_secs(120) {
            std::thread::yield_now();
        }
        buf.copy_from(&vec![0xaau8; buf.len()]);
        self.copied.store(true, Ordering::SeqCst);
        Ok(buf.len())
    }
}

/// Runs `end` in the middle of a copy of `user` into a DMB of `owner`. Meanwhile runs `others`; these must
/// not wait. Returns whether `end` has waited.
fn during_a_move(
    world: &World,
    end: impl FnOnce(&mut Driver, &mut Driver, u64) + Send,
    others: impl FnOnce([&Device; 2]),
) -> bool {
    let (mut owner, user) = (world.driver("owner"), world.mover("user"));
    let mut user_again = Driver::of(&user);
    let devices = [owner.device.clone(), user.device.clone()];
    let token = owner.register(user.gid, 0, K64).unwrap().token.get();
    let [inside, go_on, copied] = [(); 3].map(|()| AtomicBool::new(false));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let (head, _) = chain(token, &[(0, &[0; 100])], false, 0);
            let mut payload = Slow { inside: &inside, go_on: &go_on, copied: &copied };
            let moved = user.device.transfer(&head, &mut payload, 100);
            assert_eq!(moved.status, Status::Ok);
        });
        while !inside.load(Ordering::SeqCst) {
            std::thread::yield_now();
        }
        let ending = scope.spawn(|| {
            end(&mut owner, &mut user_again, token);
            copied.load(Ordering::SeqCst)
        });
        std::thread::sleep(Duration::from_millis(20));
        others(devices.each_ref().map(|device| &**device));
        assert!(!copied.load(Ordering::SeqCst), "somebody else waited for the move");
        go_on.store(true, Ordering::SeqCst);
        ending.join().unwrap()
    })
}

#[test]
fn unregister_waits_for_a_move_that_runs() {
    assert!(during_a_move(
        &World::new(),
        |owner, _, token| owner.unregister(token).unwrap(),
        |_| {}
    ));
}

#[test]
fn the_end_of_a_session_waits_for_its_own_moves_and_those_into_its_dmbs() {
    assert!(during_a_move(&World::new(), |_, user, _| user.end(), |_| {}));
    assert!(during_a_move(&World::new(), |owner, _, _| owner.end(), |_| {}));
}

/// Checks whether only `end` waits for a move. A guest can delay a copy into its memory.
fn nobody_else_waits(end: impl FnOnce(&mut Driver, &mut Driver, u64) + Send) {
    let world = World::new();
    during_a_move(&world, end, |devices| {
        // The end of another device tells every device; management asks every device.
        world.driver("bystander").end();
        assert!(!world.fabric.snapshot().devices.is_empty());
        // A thread of another device asks this before delivering an event.
        for device in devices {
            let _ = (device.has_events(), device.next_event_in());
        }
    });
}

#[test]
fn no_other_device_waits_for_a_command_that_waits_for_a_move() {
    nobody_else_waits(|owner, _, token| owner.unregister(token).unwrap());
    nobody_else_waits(|_, user, token| {
        user.attach(token).unwrap();
        user.detach(token).unwrap();
    });
}

#[test]
fn no_other_device_waits_for_the_end_of_a_session_that_waits_for_a_move() {
    nobody_else_waits(|_, user, _| user.end());
    nobody_else_waits(|owner, _, _| owner.end());
}

#[test]
fn a_device_that_has_left_counts_no_longer_and_serves_nobody() {
    let caps = FabricCaps { devices: 1, ..Default::default() };
    let fabric = Fabric::new(FabricConfig { caps, ..FabricConfig::new(Chid(0xff01)) }).unwrap();
    let world = World { fabric, clock: World::new().clock };
    // A hanging thread keeps the device itself.
    let mut gone = world.driver("gone");
    gone.device.leave();
    assert_eq!(gone.try_hello().unwrap_err(), Status::Eio);
    assert_eq!(world.fabric.snapshot().devices.len(), 0);
    let next = world.driver("next");
    drop(gone);
    assert_eq!(world.fabric.snapshot().devices.len(), 1);
    drop(next);
}
