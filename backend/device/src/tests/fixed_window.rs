// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! DMBs in the areas of front ends that map at their start only.

use virtio_ism_abi::Status;
use virtio_ism_abi::command::attach_flags;

use super::harness::{Driver, World};

const K64: u32 = 64 << 10;
const MIB: u32 = 1 << 20;

/// Registers a DMB at `owner` for `user`, and sends bytes from the user to the owner by the window.
fn send(owner: &mut Driver, user: &mut Driver, idx: u32, bytes: &[u8]) -> (u64, u64) {
    let dmb = owner.register(user.gid, idx, K64).unwrap();
    let seen = user.attach(dmb.token.get()).unwrap();
    assert_eq!(seen.flags & attach_flags::MOVE_ONLY, 0);
    user.front.write(seen.dmb_off.get(), bytes);
    assert_eq!(owner.front.read(dmb.dmb_off.get(), bytes.len()), bytes);
    for (front, off) in [(&owner.front, dmb.slab_off), (&user.front, seen.slab_off)] {
        assert_eq!(front.nonce(off.get(), dmb.slab_len.get()), dmb.nonce.get());
        assert!(off.get().is_multiple_of(2 << 20));
    }
    (dmb.token.get(), dmb.dmb_off.get())
}

#[test]
fn two_front_ends_exchange_bytes_without_a_request_to_map() {
    let world = World::new();
    let (mut a, mut b) = (world.fixed("a", 4), world.fixed("b", 4));
    let mut c = world.fixed("c", 4);
    send(&mut a, &mut b, 0, b"from b");
    send(&mut b, &mut a, 0, b"from a");
    send(&mut c, &mut a, 0, b"also from a");
    send(&mut b, &mut c, 1, b"from c");
    assert_eq!([&a, &b, &c].map(|driver| driver.front.asked), [0; 3]);
    assert_eq!(a.device.config().window_size.get(), a.device.info().window_size);
}

#[test]
fn a_front_end_that_maps_on_request_takes_a_free_area() {
    let world = World::new();
    let (mut vm, mut process) = (world.fixed("vm", 2), world.driver("process"));
    send(&mut vm, &mut process, 0, b"into the vm");
    send(&mut process, &mut vm, 0, b"out of the vm");
    assert_eq!((vm.front.asked, process.front.asked), (0, 2));
    let inodes: Vec<_> = process.front.maps.keys().map(|at| process.front.inode(*at)).collect();
    assert_eq!(inodes[0], inodes[1], "both slabs lie in the pair's file");
}

#[test]
fn a_front_end_without_a_free_area_moves() {
    let world = World::new();
    let (mut a, _b) = (world.fixed("a", 1), world.fixed("b", 1));
    for mut late in [world.fixed("late", 1), world.driver("process")] {
        assert_eq!(a.register(late.gid, 0, K64).unwrap_err(), Status::Enospc);
        let own = match late.front.refuses {
            true => late.register(a.gid, 0, K64).unwrap_err(),
            false => {
                let dmb = late.register(a.gid, 0, K64).unwrap();
                let seen = a.attach(dmb.token.get()).unwrap();
                assert_eq!(seen.flags, attach_flags::MOVE_ONLY);
                assert_eq!(a.mv(dmb.token.get(), &[(0, b"moved")], false), Status::Ok);
                assert_eq!(late.front.read(dmb.dmb_off.get(), 5), b"moved");
                Status::Enospc
            }
        };
        assert_eq!(own, Status::Enospc);
    }
    let mover = world.mover("mover");
    let mut lone = world.fixed("lone", 1);
    assert_eq!(lone.register(mover.gid, 0, K64).unwrap_err(), Status::Enospc);
    let mut process = world.driver("later process");
    send(&mut lone, &mut process, 0, b"the area was not spent on a mover");
}

#[test]
fn an_area_of_a_pair_never_serves_another() {
    let world = World::new();
    let mut vm = world.fixed("vm", 2);
    let mut first = world.driver("first");
    let (token, at) = send(&mut vm, &mut first, 0, b"secret");
    let inode = *first.front.maps.keys().next().unwrap();
    let inode = first.front.inode(inode);
    vm.unregister(token).unwrap();
    drop(first);
    let mut second = world.driver("second");
    let (_, next) = send(&mut vm, &mut second, 0, b"fresh");
    assert_ne!(at, next);
    let own = *second.front.maps.keys().next().unwrap();
    assert_ne!(second.front.inode(own), inode);
    let third = world.driver("third");
    assert_eq!(vm.register(third.gid, 1, K64).unwrap_err(), Status::Enospc, "both are spent");
}

#[test]
fn a_range_comes_back_clean_when_both_ends_have_released_its_slab() {
    let world = World::new();
    let (mut a, mut b) = (world.fixed("a", 2), world.fixed("b", 2));
    let dmb = a.register(b.gid, 0, MIB).unwrap();
    let seen = b.attach(dmb.token.get()).unwrap();
    b.front.write(seen.dmb_off.get(), &[7; 64]);
    a.unregister(dmb.token.get()).unwrap();
    a.release(dmb.slab_id.get()).unwrap();
    let other = a.register(b.gid, 1, MIB).unwrap();
    assert_ne!(other.slab_off, dmb.slab_off, "the user may still store into the slab");
    a.unregister(other.token.get()).unwrap();
    a.release(other.slab_id.get()).unwrap();
    b.detach(dmb.token.get()).unwrap();
    b.release(seen.slab_id.get()).unwrap();
    assert_eq!(b.release(seen.slab_id.get()), Err(Status::Enoent));
    let again = a.register(b.gid, 0, MIB).unwrap();
    assert_eq!(again.slab_off, dmb.slab_off);
    assert_eq!(a.front.read(again.dmb_off.get(), 64), [0; 64]);
    assert_eq!(world.fabric.snapshot().slabs, 1);
}

#[test]
fn a_driver_that_begins_anew_has_its_areas_still() {
    let world = World::new();
    let (mut a, mut b) = (world.fixed("a", 2), world.fixed("b", 2));
    for _ in 0..40 {
        send(&mut a, &mut b, 0, b"again");
        a.hello();
        b.hello();
    }
    assert_eq!((a.device.info().stale_maps, a.device.info().slabs), (0, 0));
    assert_eq!(world.fabric.snapshot().slabs, 0);
}

#[test]
fn a_full_area_refuses_and_the_next_slab_fits_again() {
    let world = World::new();
    let (mut a, b) = (world.fixed("a", 16), world.fixed("b", 16));
    let mut dmbs = Vec::new();
    let refused = loop {
        match a.register(b.gid, dmbs.len() as u32, 32 * MIB) {
            Ok(dmb) => dmbs.push(dmb),
            Err(status) => break status,
        }
    };
    assert_eq!(refused, Status::Enomem);
    assert!(!dmbs.is_empty());
    let last = dmbs.pop().unwrap();
    a.unregister(last.token.get()).unwrap();
    a.release(last.slab_id.get()).unwrap();
    assert!(a.register(b.gid, dmbs.len() as u32, 32 * MIB).is_ok());
}
