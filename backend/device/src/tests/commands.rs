// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Control commands: their form, their quotas, their answers.

use virtio_ism_abi::command::{HelloRequest, Op, RegisterRequest, stat};
use virtio_ism_abi::config::Features;
use virtio_ism_abi::{Chid, Gid, Status};
use zerocopy::IntoBytes;

use super::harness::{World, guest_body, request};
use super::ism::{
    CloseReason, DeviceConfig, Fabric, FabricCaps, FabricConfig, JoinError, Limits, Outcome,
};

const K64: u32 = 64 << 10;

/// Every op with a body of the right size.
fn well_formed() -> Vec<(Op, Vec<u8>)> {
    let sizes = [8, 8, 24, 40, 8, 8, 8, 8, 40, 0];
    Op::ALL.into_iter().zip(sizes).map(|(op, size)| (op, vec![0; size])).collect()
}

#[test]
fn before_hello_every_other_command_gets_estate() {
    let mut driver = World::new().join("a");
    for (op, mut body) in well_formed() {
        match op {
            Op::Hello => continue,
            Op::Register => {
                body.copy_from_slice(
                    RegisterRequest {
                        user_gid: Gid([1; 16]),
                        len: K64.into(),
                        backing: 2.into(),
                        ..Default::default()
                    }
                    .as_bytes(),
                );
            }
            _ => {}
        }
        assert_eq!(driver.call(op, &body), Err(Status::Estate), "{op:?}");
    }
    assert_eq!(driver.kick(1), Status::Estate);
}

#[test]
fn hello_of_another_revision_changes_nothing() {
    let mut driver = World::new().driver("a");
    let gid = driver.gid;
    for (abi, flags) in [(0, 0), (2, 0), (u16::MAX, 0), (1, 2), (1, u16::MAX)] {
        let body = HelloRequest { abi: abi.into(), flags: flags.into(), driver_max_idx: 1.into() };
        assert_eq!(driver.call(Op::Hello, body.as_bytes()), Err(Status::Einval));
    }
    assert_eq!(driver.device.info().gid, Some(gid));
}

#[test]
fn hello_gives_the_gid_of_the_configuration_first_and_a_new_one_each_time() {
    let mut driver = World::new().join("a");
    let shown = driver.device.config().gid;
    let first = driver.hello();
    assert_eq!((first.gid, first.session.get()), (shown, 1));
    let second = driver.hello();
    assert_ne!(second.gid, first.gid);
    assert_eq!(second.session.get(), 2);
    assert_eq!(driver.device.config().gid, shown, "constant until reset");
    driver.end();
    assert_ne!(driver.device.config().gid, shown);
    let next = driver.device.config().gid;
    assert_eq!(driver.hello().gid, next);
}

#[test]
fn sizes_are_exact() {
    let mut driver = World::new().driver("a");
    for (op, body) in well_formed() {
        for len in [body.len().wrapping_sub(1), body.len() + 1, body.len() + 16] {
            if len == usize::MAX {
                continue;
            }
            assert_eq!(driver.call(op, &vec![0; len]), Err(Status::Einval), "{op:?} {len}");
        }
    }
    for len in 0..8 {
        let Outcome::Reply(reply) = driver.device.command(&vec![1; len], 64) else { panic!() };
        assert_eq!(*reply, [1, 0, 0, 0, 0, 0, 0, 0], "EINVAL, tag 0");
    }
}

#[test]
fn unknown_ops_and_ops_of_features_not_accepted_are_refused() {
    let mut driver = World::new().driver("a");
    for op in [0u16, 3, 37, 65, u16::MAX] {
        let mut bytes = request(Op::Hello, 9, &[0u8; 8]);
        bytes[..2].copy_from_slice(&op.to_le_bytes());
        let Outcome::Reply(reply) = driver.device.command(&bytes, 64) else { panic!() };
        assert_eq!((reply.status(), &reply[4..]), (Some(Status::Einval), &[9, 0, 0, 0][..]));
    }
    driver.device.set_features(Features::MOVE | Features::WINDOW);
    assert_eq!(driver.call(Op::Stats, &[]), Err(Status::Einval));
    assert_eq!(driver.signal_event(driver.gid, 0, 0), Err(Status::Einval));
    driver.device.set_features(Features::MOVE);
    assert_eq!(driver.register(driver.gid, 0, K64).unwrap_err(), Status::Enotsup);
}

#[test]
fn a_reply_buffer_that_is_too_small_means_no_effect() {
    let mut driver = World::new().driver("a");
    let gid = driver.gid;
    let hello = HelloRequest { abi: 1.into(), flags: 0.into(), driver_max_idx: 9.into() };
    for room in [8, 31] {
        let Outcome::Reply(reply) = driver.device.command(&request(Op::Hello, 3, &hello), room)
        else {
            panic!()
        };
        assert_eq!(*reply, [11, 0, 0, 0, 3, 0, 0, 0]);
    }
    for room in 0..8 {
        let outcome = driver.device.command(&request(Op::Hello, 3, &hello), room);
        let Outcome::Reply(reply) = outcome else { panic!() };
        assert_eq!(*reply, [11, 0, 0, 0, 3, 0, 0, 0][..room]);
    }
    assert_eq!(driver.device.info().gid, Some(gid));
    let body =
        RegisterRequest { user_gid: gid, len: K64.into(), backing: 2.into(), ..Default::default() };
    let outcome = driver.device.command(&request(Op::Register, 3, &body), 8 + 47);
    assert!(matches!(outcome, Outcome::Reply(r) if r.status() == Some(Status::E2small)));
    assert_eq!(driver.stats()[stat::DMBS], 0);
}

#[test]
fn query_gid_relates_and_tells_whether_both_can_map() {
    let world = World::new();
    let (mut a, b) = (world.driver("a"), world.driver("b"));
    let c = world.mover("c");
    assert_eq!(a.query(b.gid), Ok(3));
    assert_eq!(a.query(c.gid), Ok(1));
    assert_eq!(a.query(Gid([7; 16])), Err(Status::Enodev));
    assert_eq!(a.stats()[stat::PEERS], 2);
}

#[test]
fn drivers_of_different_byte_orders_share_no_memory() {
    let world = World::new();
    let (mut little, mut other) = (world.driver("a"), world.driver("b"));
    let mut big = world.join("c").hello_of_other_order();
    let mut big_too = world.join("d").hello_of_other_order();
    for (one, peer) in [(&mut little, big.gid), (&mut big, other.gid)] {
        assert_eq!(one.query(peer), Err(Status::Eorder));
        assert_eq!(one.register(peer, 0, 16 << 10).err(), Some(Status::Eorder));
        assert_eq!(one.device.info().peers, 0, "the peer is not related");
    }
    for (owner, user) in [(&mut little, &mut other), (&mut big, &mut big_too)] {
        let token = owner.register(user.gid, 0, 16 << 10).unwrap().token.get();
        assert!(user.attach(token).is_ok());
    }
    // A HELLO can change the order: its session has another GID.
    let big = big.hello_of_other_order();
    assert!(big_too.query(big.gid).is_ok());
    assert!(little.query(world.driver("e").gid).is_ok());
}

#[test]
fn on_loopback_a_driver_of_the_other_byte_order_reaches_no_dmb() {
    let world = World::loopback();
    let (mut owner, mut user) = (world.driver("a"), world.driver("b"));
    let token = owner.register(user.gid, 0, 16 << 10).unwrap().token.get();
    let mut big = world.join("c").hello_of_other_order();
    assert_eq!(big.attach(token).err(), Some(Status::Enoent));
    assert_eq!(big.kick(token), Status::Enoent);
    for driver in [&mut owner, &mut big] {
        let gid = driver.gid;
        assert_eq!(driver.query(gid), Err(Status::Eorder));
    }
    assert!(user.attach(token).is_ok(), "what was shared before goes on");
    big.device.close_session(CloseReason::Orderly);
    assert!(owner.register(user.gid, 1, 16 << 10).is_ok());
}

#[test]
fn fields_of_register_that_are_never_legal_are_refused() {
    let limits = Limits { max_sg: 4, dmb_max: 1 << 20, max_dmbs: 100, ..Limits::default() };
    let world = World::with(Chid(0xff00), limits);
    let (mut a, b) = (world.driver("a"), world.driver("b"));
    a.set_memory(&[(0, 8 << 20)]);
    for len in [0, 1, 8 << 10, (64 << 10) + 1, 96 << 10, 2 << 20, u32::MAX] {
        assert_eq!(a.register(b.gid, 0, len).unwrap_err(), Status::Einval, "{len}");
    }
    assert_eq!(a.register(Gid::NONE, 0, K64).unwrap_err(), Status::Einval);
    assert_eq!(a.register(b.gid, 100, K64).unwrap_err(), Status::Einval, "idx");
    for sg in [
        &[][..],
        &[(0, K64), (0, 0)],
        &[(1, K64)],
        &[(0, K64 - 1), (0x10_0000, 1)],
        &[(0, 16 << 10); 5],
        &[(u64::MAX - 0xfff, K64)],
    ] {
        let body = guest_body(b.gid, 0, K64, sg);
        assert_eq!(a.call(Op::Register, &body), Err(Status::Einval), "{sg:x?}");
    }
    let mut wrong_sum = guest_body(b.gid, 0, K64, &[(0, K64), (0x10_0000, K64)]);
    assert_eq!(a.call(Op::Register, &wrong_sum), Err(Status::Einval));
    // nsg above the number of entries; an unknown backing; entries of a window DMB.
    wrong_sum[28] = 3;
    assert_eq!(a.call(Op::Register, &wrong_sum), Err(Status::Einval));
    let mut backing = guest_body(b.gid, 0, K64, &[(0, K64)]);
    backing[24] = 3;
    assert_eq!(a.call(Op::Register, &backing), Err(Status::Einval));
    backing[24] = 2;
    assert_eq!(a.call(Op::Register, &backing), Err(Status::Einval));
    assert_eq!(a.device.info().refusals[Status::Einval as usize], 19);
    assert_eq!(a.stats()[stat::DMBS], 0);
    // Reserved fields are ignored.
    let mut fine = guest_body(b.gid, 0, K64, &[(0, K64)]);
    fine[32..40].fill(0xff);
    assert!(a.call(Op::Register, &fine).is_ok());
}

#[test]
fn an_idx_is_below_the_drivers_bound_and_used_once() {
    let world = World::new();
    let (mut a, b) = (world.join("a"), world.driver("b"));
    let hello = HelloRequest { abi: 1.into(), flags: 0.into(), driver_max_idx: 10.into() };
    a.call(Op::Hello, hello.as_bytes()).unwrap();
    assert_eq!(a.register(b.gid, 10, K64).unwrap_err(), Status::Einval);
    let dmb = a.register(b.gid, 9, K64).unwrap();
    assert_eq!(a.register(b.gid, 9, K64).unwrap_err(), Status::Ebusy);
    a.unregister(dmb.token.get()).unwrap();
    assert!(a.register(b.gid, 9, K64).is_ok());
}

#[test]
fn counts_and_bytes_are_limited_and_come_back() {
    let limits = Limits {
        max_dmbs: 3,
        dmb_bytes: 256 << 10,
        max_attach: 2,
        max_peers: 2,
        ..Limits::default()
    };
    let world = World::with(Chid(0xff00), limits);
    let (mut a, mut b) = (world.driver("a"), world.driver("b"));
    let dmbs: Vec<_> = (0..3).map(|i| a.register(b.gid, i, K64).unwrap().token.get()).collect();
    assert_eq!(a.register(b.gid, 2, K64).unwrap_err(), Status::Ebusy);
    b.attach(dmbs[0]).unwrap();
    b.attach(dmbs[1]).unwrap();
    assert_eq!(b.attach(dmbs[2]).unwrap_err(), Status::Enospc);
    b.detach(dmbs[0]).unwrap();
    b.attach(dmbs[2]).unwrap();
    a.unregister(dmbs[2]).unwrap();
    assert_eq!(a.register(b.gid, 2, 256 << 10).unwrap_err(), Status::Enomem);
    assert!(a.register(b.gid, 2, 128 << 10).is_ok());
    let (c, d) = (world.driver("c"), world.driver("d"));
    assert_eq!(a.query(c.gid), Ok(3));
    assert_eq!(a.query(d.gid), Err(Status::Enospc), "two peers");
    assert_eq!(a.query(b.gid), Ok(3), "known ones cost nothing");
}

#[test]
fn commands_and_queries_are_limited_in_rate() {
    let limits = Limits { commands_per_second: 100, queries_per_second: 20, ..Limits::default() };
    let world = World::with(Chid(0xff00), limits);
    let mut a = world.driver("a");
    let peer = world.driver("b").gid;
    world.clock.advance(1_000_000_000);
    assert_eq!(a.query(peer), Err(Status::Enodev), "gone with its device");
    assert_eq!(a.query(peer), Err(Status::Enodev));
    assert_eq!(a.query(peer), Err(Status::Eagain), "a burst of two");
    let answers: Vec<_> = (0..10).map(|_| a.call(Op::Stats, &[]).is_ok()).collect();
    assert_eq!(answers.iter().filter(|ok| **ok).count(), 7, "ten in all");
    // Malformed commands cost as much.
    world.clock.advance(20_000_000);
    assert_eq!(a.call(Op::Attach, &[]), Err(Status::Einval));
    assert_eq!(a.call(Op::Attach, &[]), Err(Status::Einval));
    assert_eq!(a.call(Op::Attach, &[]), Err(Status::Eagain));
    world.clock.advance(10_000_000);
    assert!(a.call(Op::Stats, &[]).is_ok());
}

#[test]
fn a_device_that_would_overcommit_a_cap_cannot_join() {
    let limits = Limits { dmb_bytes: 4 << 20, max_dmbs: 10, ..Limits::default() };
    let caps = FabricCaps { dmb_bytes: 9 << 20, dmbs: 25, devices: 5, ..FabricCaps::default() };
    let fabric =
        Fabric::new(FabricConfig { limits, caps, ..FabricConfig::new(Chid(0xff01)) }).unwrap();
    let join = |limits| {
        let port = DeviceConfig { limits, ..DeviceConfig::default() };
        fabric.join(port, std::sync::Arc::new(super::harness::CountingNotifier::default()))
    };
    let a = join(None).unwrap();
    let _b = join(None).unwrap();
    assert!(matches!(join(None), Err(JoinError::Cap { what: "DMBs" })));
    let few = Limits { max_dmbs: 5, ..limits };
    assert!(matches!(join(Some(few)), Err(JoinError::Cap { what: "DMB bytes" })));
    let small = Limits { dmb_bytes: 1 << 20, ..few };
    let _c = join(Some(small)).unwrap();
    drop(a);
    assert!(join(None).is_ok(), "a device that leaves gives back what was promised to it");
    let wrong = Limits { dmb_min: 5, ..limits };
    assert!(matches!(join(Some(wrong)), Err(JoinError::Limits(_))));
}

#[test]
fn stats_have_the_order_of_the_contract_and_count_since_hello() {
    let world = World::new();
    let (mut a, mut b) = (world.driver("a"), world.driver("b"));
    let dmb = a.register(b.gid, 0, K64).unwrap();
    b.attach(dmb.token.get()).unwrap();
    assert_eq!(b.mv(dmb.token.get(), &[(64, &[1; 100])], true), Status::Ok);
    assert_eq!(b.mv(dmb.token.get() ^ 1, &[], false), Status::Enoent);
    assert_eq!(b.kick(dmb.token.get()), Status::Ok);
    assert_eq!(b.kick(dmb.token.get()), Status::Ok);
    b.signal_event(a.gid, 1, 2).unwrap();
    let _ = a.events();
    assert_eq!(b.attach(3).unwrap_err(), Status::Enoent);
    let slab = (4 << 20) + (64 << 10);
    assert_eq!(
        a.stats(),
        [1, u64::from(K64), 0, 1, slab, 1, 2, 0, 0, 0, 0, 0, 1, 1, 1, 0],
        "owner: HELLO and REGISTER done, one record for two kicks"
    );
    assert_eq!(b.stats(), [0, 0, 1, 1, 0, 1, 3, 1, 3, 100, 1, 3, 0, 0, 0, 0], "user");
    b.hello();
    assert_eq!(b.stats()[stat::COMMANDS], 1, "HELLO itself");
    assert_eq!(b.device.info().counts.moves, 3, "the operator's counters go on");
}
