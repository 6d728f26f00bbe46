// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! DMBs in the window: slabs, lines, mapping slots, and the front end's answers.

use virtio_ism_abi::command::{Op, RegisterRequest, TokenRequest, attach_flags, register_flags};
use virtio_ism_abi::config::Features;
use virtio_ism_abi::{Chid, Status};
use zerocopy::IntoBytes;

use super::harness::{Driver, World, parse};
use super::ism::{DeviceConfig, Limits, Outcome};

const K64: u32 = 64 << 10;
const MIB: u32 = 1 << 20;

#[test]
fn owner_and_user_see_the_same_bytes_at_their_own_offsets() {
    let world = World::new();
    let (mut a, mut b) = (world.driver("a"), world.driver("b"));
    // A first allocation, to make the windows differ.
    a.register(a.gid, 99, MIB).unwrap();
    let dmb = a.register(b.gid, 0, K64).unwrap();
    let other = a.register(b.gid, 1, K64).unwrap();
    let (mine, theirs) = (dmb.dmb_off.get(), b.attach(dmb.token.get()).unwrap());
    assert_ne!(mine, theirs.dmb_off.get());
    assert_eq!(theirs.owner_gid, a.gid);
    let flags = attach_flags::FUTEX | attach_flags::SLAB_LINE;
    assert_eq!((theirs.dmb_len.get(), theirs.flags), (K64, flags));
    assert_eq!((theirs.line, theirs.bit, theirs.nonce), (dmb.line, dmb.bit, dmb.nonce));
    b.front.write(theirs.dmb_off.get() + 5, b"hello");
    assert_eq!(a.front.read(mine + 5, 5), b"hello");
    assert_eq!(a.front.read(other.dmb_off.get(), 64), [0; 64], "the neighbour is untouched");
    for (front, off) in [(&a.front, dmb.slab_off), (&b.front, theirs.slab_off)] {
        assert_eq!(front.nonce(off.get(), dmb.slab_len.get()), dmb.nonce.get());
    }
    assert_eq!(mine % u64::from(K64), 0);
    assert_eq!(dmb.slab_len.get(), 4 * MIB + K64);
}

#[test]
fn a_slab_is_mapped_once_for_many_dmbs() {
    let world = World::new();
    let (mut a, mut b) = (world.driver("a"), world.driver("b"));
    for idx in 0..64 {
        let dmb = a.register(b.gid, idx, K64).unwrap();
        b.attach(dmb.token.get()).unwrap();
    }
    assert_eq!((a.front.asked, b.front.asked), (1, 1));
    a.register(b.gid, 64, K64).unwrap();
    assert_eq!(a.front.asked, 2, "4 MiB are full");
    assert_eq!(a.device.info().slab_bytes, u64::from(12 * MIB + 2 * K64), "the next has 8 MiB");
}

#[test]
fn each_peer_has_slabs_of_its_own_in_each_direction() {
    let world = World::new();
    let (mut a, mut b, mut c) = (world.driver("a"), world.driver("b"), world.driver("c"));
    let ids = [
        a.register(b.gid, 0, K64).unwrap(),
        a.register(c.gid, 1, K64).unwrap(),
        a.register(a.gid, 2, K64).unwrap(),
    ];
    let ab = ids[0];
    let ba = b.register(a.gid, 0, K64).unwrap();
    assert_ne!(ab.nonce, ba.nonce);
    let slabs: std::collections::HashSet<_> = ids.iter().map(|dmb| dmb.slab_id.get()).collect();
    assert_eq!(slabs.len(), 3);
    assert_eq!(c.attach(ab.token.get()).unwrap_err(), Status::Enoent);
}

#[test]
fn wait_groups_do_not_share_lines() {
    let world = World::new();
    let (mut a, b) = (world.driver("a"), world.driver("b"));
    let mut group_of = std::collections::HashMap::new();
    for idx in 0..200 {
        let group = (idx % 5) as u16;
        let dmb = a.register_in(b.gid, idx, 16 << 10, group).unwrap();
        let at = (dmb.slab_id.get(), dmb.line.get());
        assert_eq!(*group_of.entry(at).or_insert(group), group);
    }
    assert_eq!(group_of.len(), 200, "and as long as lines last no DMB shares one");
}

#[test]
fn a_range_is_free_only_when_unregistered_and_detached_and_then_reads_as_zero() {
    let world = World::new();
    let (mut a, mut b) = (world.driver("a"), world.driver("b"));
    for len in [K64, 2 * MIB] {
        let dmb = a.register(b.gid, 0, len).unwrap();
        let seen = b.attach(dmb.token.get()).unwrap();
        b.front.write(seen.dmb_off.get(), &vec![0xaa; len as usize]);
        a.unregister(dmb.token.get()).unwrap();
        let next = a.register(b.gid, 0, len).unwrap();
        assert_ne!(next.dmb_off, dmb.dmb_off, "the user may still store into it");
        assert!(!a.front.read(dmb.dmb_off.get(), 8).contains(&0));
        b.detach(dmb.token.get()).unwrap();
        let again = a.register(b.gid, 1, len).unwrap();
        assert_eq!(again.dmb_off, dmb.dmb_off);
        let bytes = a.front.read(again.dmb_off.get(), len as usize);
        assert!(bytes.iter().all(|byte| *byte == 0), "{len}");
        for token in [next.token, again.token] {
            a.unregister(token.get()).unwrap();
        }
    }
}

#[test]
fn a_slab_can_be_released_by_each_side_when_it_has_no_dmb_of_it() {
    let world = World::new();
    let (mut a, mut b) = (world.driver("a"), world.driver("b"));
    let dmb = a.register(b.gid, 0, K64).unwrap();
    let seen = b.attach(dmb.token.get()).unwrap();
    assert_eq!(a.release(dmb.slab_id.get()), Err(Status::Ebusy));
    assert_eq!(b.release(seen.slab_id.get()), Err(Status::Ebusy));
    assert_eq!(a.release(777), Err(Status::Enoent));
    a.unregister(dmb.token.get()).unwrap();
    a.release(dmb.slab_id.get()).unwrap();
    assert_eq!(a.release(dmb.slab_id.get()), Err(Status::Enoent));
    assert_eq!(a.device.info().slab_bytes, 0);
    b.front.write(seen.dmb_off.get(), b"late");
    let next = a.register(b.gid, 0, K64).unwrap();
    assert_ne!(next.nonce, dmb.nonce, "a slab that was released does not come back");
    assert_eq!(a.front.read(next.dmb_off.get(), 4), [0; 4]);
    b.detach(dmb.token.get()).unwrap();
    b.release(seen.slab_id.get()).unwrap();
    assert_eq!(b.device.info().attached_slab_bytes, 0);
    assert_eq!(world.fabric.snapshot().slabs, 1);
}

#[test]
fn a_device_that_cannot_map_must_move() {
    let world = World::new();
    let (mut a, mut b) = (world.driver("a"), world.mover("b"));
    assert_eq!(b.register(a.gid, 0, K64).unwrap_err(), Status::Enotsup);
    let dmb = a.register(b.gid, 0, K64).unwrap();
    let seen = b.attach(dmb.token.get()).unwrap();
    assert_eq!((seen.flags, seen.dmb_len.get()), (attach_flags::MOVE_ONLY, K64));
    assert_eq!(seen.as_bytes()[..24], [0; 24]);
    assert_eq!(b.mv(dmb.token.get(), &[(0, b"moved")], false), Status::Ok);
    assert_eq!(a.front.read(dmb.dmb_off.get(), 5), b"moved");
    b.detach(dmb.token.get()).unwrap();
}

#[test]
fn register_keeps_a_slot_so_that_attach_finds_one() {
    let world = World::new();
    let port = DeviceConfig { max_maps: Some(4), ..DeviceConfig::default() };
    let mut a = world.join_with(port);
    a.hello();
    let mut peers: Vec<_> = (0..3).map(|_| world.driver("peer")).collect();
    let (b, c, d) = (peers[0].gid, peers[1].gid, peers[2].gid);
    let first = a.register(b, 0, K64).unwrap();
    a.register(c, 1, K64).unwrap();
    assert_eq!(a.device.info().map_slots, 4, "two slabs, two kept");
    assert_eq!(a.register(d, 2, K64).unwrap_err(), Status::Enospc);
    let theirs: Vec<_> = peers.iter_mut().map(|p| p.register(a.gid, 0, K64).unwrap()).collect();
    assert_eq!(a.attach(theirs[2].token.get()).unwrap_err(), Status::Enospc, "none kept for d");
    a.attach(theirs[0].token.get()).unwrap();
    a.attach(theirs[1].token.get()).unwrap();
    // Further DMBs of the same slabs cost nothing, a further slab does.
    let more = peers[0].register(a.gid, 1, K64).unwrap();
    a.attach(more.token.get()).unwrap();
    let large = peers[0].register(a.gid, 2, 8 * MIB).unwrap();
    assert_eq!(a.attach(large.token.get()).unwrap_err(), Status::Enospc);
    // Guest memory needs no slot; a slot is kept only if available.
    a.set_memory(&[(0, 1 << 20)]);
    a.register_guest(d, 9, &[(0, K64)]).unwrap();
    assert_eq!(a.device.info().map_slots, 4);
    a.unregister(first.token.get()).unwrap();
    a.release(first.slab_id.get()).unwrap();
    assert_eq!(a.device.info().map_slots, 3);
    assert!(a.attach(theirs[2].token.get()).is_ok());
}

#[test]
fn slab_bytes_count_whole_for_owner_and_user() {
    let slab = (4 << 20) + u64::from(K64);
    let limits = Limits {
        slab_bytes: slab + u64::from(2 * K64),
        attached_slab_bytes: slab,
        ..Limits::default()
    };
    let world = World::with(Chid(0xff00), limits);
    let (mut a, mut b) = (world.driver("a"), world.driver("b"));
    let first = a.register(b.gid, 0, 16 << 10).unwrap();
    let c = world.driver("c");
    assert_eq!(a.register(c.gid, 1, MIB).unwrap_err(), Status::Enomem);
    let small = a.register(c.gid, 1, 16 << 10).unwrap();
    assert_eq!(small.slab_len.get(), 2 * K64, "what is left is enough for one of its own");
    assert_eq!(a.register(c.gid, 2, 64 << 10).unwrap_err(), Status::Enomem);
    b.attach(first.token.get()).unwrap();
    let mut d = world.driver("d");
    let other = d.register(b.gid, 0, K64).unwrap();
    assert_eq!(b.attach(other.token.get()).unwrap_err(), Status::Enomem);
}

#[test]
fn a_refused_mapping_is_eio_and_leaves_nothing_behind() {
    let world = World::new();
    let (mut a, mut b) = (world.driver("a"), world.driver("b"));
    a.front.refuses = true;
    for _ in 0..3 {
        assert_eq!(a.register(b.gid, 0, K64).unwrap_err(), Status::Eio);
    }
    let info = a.device.info();
    assert_eq!((info.dmbs, info.slabs, info.slab_bytes, info.dmb_bytes), (0, 0, 0, 0));
    assert_eq!((info.map_slots, world.fabric.snapshot().slabs), (0, 0));
    a.front.refuses = false;
    let dmb = a.register(b.gid, 0, K64).unwrap();
    b.front.refuses = true;
    assert_eq!(b.attach(dmb.token.get()).unwrap_err(), Status::Eio);
    let info = b.device.info();
    assert_eq!((info.attached, info.slabs, info.attached_slab_bytes), (0, 0, 0));
    b.front.refuses = false;
    let seen = b.attach(dmb.token.get()).unwrap();
    b.detach(dmb.token.get()).unwrap();
    b.front.refuses = true;
    assert_eq!(b.release(seen.slab_id.get()), Err(Status::Eio));
    b.front.refuses = false;
    assert_eq!(b.attach(dmb.token.get()).unwrap().slab_id, seen.slab_id, "still mapped");
}

#[test]
fn commands_that_come_while_a_slab_is_being_mapped_share_its_fate() {
    let world = World::new();
    let (mut a, b) = (world.driver("a"), world.driver("b"));
    for refuses in [true, false] {
        let mut register = |idx: u32| {
            let body = RegisterRequest {
                user_gid: b.gid,
                idx: idx.into(),
                len: K64.into(),
                backing: 2.into(),
                ..Default::default()
            };
            let outcome = a.command(Op::Register, body.as_bytes());
            (outcome, a.tag)
        };
        let jobs = [register(0), register(1)];
        let asks =
            |outcome: &Outcome| matches!(outcome, Outcome::Map(job) if job.request().is_some());
        assert!(asks(&jobs[0].0) && !asks(&jobs[1].0), "asked for once");
        a.front.refuses = refuses;
        for (outcome, tag) in jobs {
            let reply = a.complete(outcome);
            let result = parse(Op::Register, tag, &reply).map(drop);
            assert_eq!(result, if refuses { Err(Status::Eio) } else { Ok(()) });
        }
    }
    assert_eq!(world.fabric.snapshot().tokens, 2);
}

#[test]
fn a_dmb_cannot_be_used_before_its_owner_has_the_reply() {
    let world = World::new();
    let (mut a, mut b) = (world.driver("a"), world.driver("b"));
    let dmb = a.register(b.gid, 0, K64).unwrap();
    let body = TokenRequest { token: dmb.token };
    let Outcome::Map(job) = b.command(Op::Attach, body.as_bytes()) else { panic!() };
    assert_eq!(b.detach(dmb.token.get()), Err(Status::Enoent), "not attached yet");
    assert_eq!(b.attach(dmb.token.get()).unwrap_err(), Status::Ebusy);
    // The owner ends the DMB meanwhile: the user learns this from the reply.
    a.unregister(dmb.token.get()).unwrap();
    let tag = job.tag();
    let ok = b.front.map(&job);
    let reply = b.device.mapped(job, ok);
    assert_eq!(parse(Op::Attach, tag, &reply), Err(Status::Enoent));
    assert!(b.event().is_none());
    assert_eq!(b.device.info().slabs, 0, "nor is there a slab that it could not release");
    let stale = b.device.stale_map().unwrap();
    assert!(b.front.unmap(stale.window_offset()));
    b.device.stale_unmapped(stale);
    let next = a.register(b.gid, 0, K64).unwrap();
    assert_eq!(next.dmb_off, dmb.dmb_off, "and the range is free");
}

#[test]
fn a_dropped_job_fails_and_its_range_is_kept_aside() {
    let world = World::new();
    let (mut a, b) = (world.driver("a"), world.driver("b"));
    let body = RegisterRequest {
        user_gid: b.gid,
        len: K64.into(),
        backing: 2.into(),
        ..Default::default()
    };
    let Outcome::Map(job) = a.command(Op::Register, body.as_bytes()) else { panic!() };
    let offset = job.request().unwrap().window_offset;
    drop(job);
    assert_eq!(a.device.info().dmbs, 0);
    assert_eq!(a.device.info().stale_maps, 1);
    let dmb = a.register(b.gid, 0, K64).unwrap();
    assert_ne!(dmb.slab_off.get(), offset);
    let stale = a.device.stale_map().unwrap();
    assert_eq!(stale.window_offset(), offset);
    drop(stale);
    assert!(a.device.stale_map().is_some(), "offered again");
}

#[test]
fn loopback_members_share_a_gid_and_slabs() {
    let world = World::loopback();
    let (mut a, mut b, mut c) = (world.driver("a"), world.driver("b"), world.driver("c"));
    assert!(a.gid == b.gid && b.gid == c.gid);
    assert_eq!(a.query(b.gid), Ok(3));
    let dmb = a.register(b.gid, 0, K64).unwrap();
    for user in [&mut a, &mut b, &mut c] {
        let seen = user.attach(dmb.token.get()).unwrap();
        user.front.write(seen.dmb_off.get(), b"x");
        assert_eq!(seen.nonce, dmb.nonce);
    }
    assert_eq!(a.front.asked, 1, "its own slab is in its window already");
    b.end();
    assert!(c.event().is_none(), "the GID is not gone with one of its members");
    assert_eq!(b.hello().gid, c.gid);
    a.end();
    assert!(matches!(c.events()[..], [virtio_ism_abi::event::Event::DmbGone { .. }]));
}

#[test]
fn a_doorbell_is_for_the_owner_first_and_for_a_user_whose_owner_has_taken_it() {
    for (owner_takes, user_takes) in [(true, true), (true, false), (false, true)] {
        let world = World::new();
        let (mut owner, mut user) = (world.driver("owner"), world.driver("user"));
        owner.front.refuses_doorbells = !owner_takes;
        user.front.refuses_doorbells = !user_takes;
        for idx in 0..2 {
            let dmb = owner.register(user.gid, idx, K64).unwrap();
            assert_eq!(owner.front.doorbells, [false], "to wait for");
            user.attach(dmb.token.get()).unwrap();
            assert_eq!(user.front.doorbells, vec![true; usize::from(owner_takes)], "to ring");
            assert_eq!(held(&owner), 0, "the daemon keeps no descriptor");
        }
    }
}

#[test]
fn a_slab_has_no_doorbell_unless_owner_and_user_have_accepted_that() {
    let without = Features::all() - Features::DOORBELL;
    for loopback in [false, true] {
        let world = if loopback { World::loopback() } else { World::new() };
        for (of_owner, of_user) in [(true, true), (true, false), (false, true)] {
            let (mut owner, mut user) = (world.driver("owner"), world.driver("user"));
            for (driver, accepts) in [(&owner, of_owner), (&user, of_user)] {
                driver.device.set_features(if accepts { Features::all() } else { without });
            }
            let dmb = owner.register(user.gid, 0, K64).unwrap();
            user.attach(dmb.token.get()).unwrap();
            let both = usize::from(of_owner && of_user && !loopback);
            assert_eq!((owner.front.doorbells.len(), user.front.doorbells.len()), (both, both));
            owner.end();
            user.end();
        }
    }
}

#[test]
fn an_owner_has_a_bounded_number_of_doorbells_that_no_user_takes() {
    let world = World::new();
    let mut owner = world.driver("owner");
    let mut users: Vec<_> = (0..100).map(|n| world.driver(&format!("user {n}"))).collect();
    let mut tokens = Vec::new();
    for (user, idx) in users.iter().zip(0..) {
        tokens.push(owner.register(user.gid, idx, K64).unwrap().token.get());
    }
    assert_eq!((held(&owner), owner.front.doorbells.len()), (64, 64));
    for (user, token) in users.iter_mut().zip(tokens) {
        user.attach(token).unwrap();
    }
    assert_eq!(held(&owner), 0);
    owner.register(owner.gid, 100, K64).unwrap();
    assert_eq!(held(&owner), 1, "of a slab of its own");
    owner.end();
    drop(owner);
}

/// Doorbells of a device with descriptors held by the daemon.
fn held(driver: &Driver) -> u32 {
    driver.device.handle.doorbells.load(std::sync::atomic::Ordering::Relaxed)
}

#[test]
fn drivers_wake_each_other_by_words_and_lines_of_slabs_only_if_both_accepted_that() {
    let cases = [
        (Features::PEER_FUTEX, register_flags::FUTEX, attach_flags::FUTEX),
        (Features::SLAB_LINE, register_flags::SLAB_LINE, attach_flags::SLAB_LINE),
    ];
    for (loopback, (feature, to_owner, to_user)) in
        cases.iter().flat_map(|case| [(false, *case), (true, *case)])
    {
        let without = Features::all() - feature;
        let world = if loopback { World::loopback() } else { World::new() };
        for (of_owner, of_user) in [(true, true), (true, false), (false, true)] {
            let (mut owner, mut user) = (world.driver("owner"), world.driver("user"));
            for (driver, accepts) in [(&owner, of_owner), (&user, of_user)] {
                driver.device.set_features(if accepts { Features::all() } else { without });
            }
            let dmb = owner.register(user.gid, 0, K64).unwrap();
            let attached = user.attach(dmb.token.get()).unwrap();
            let both = of_owner && of_user && !loopback;
            let said = [dmb.flags & to_owner != 0, attached.flags & to_user != 0];
            assert_eq!(said, [both; 2], "{feature:?} {of_owner} {of_user} {loopback}");
            owner.end();
            user.end();
        }
    }
}
