// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! MOVE chains of any shape into a DMB in a slab and a DMB in guest memory. An OK move writes exactly
//! the named bytes, a refused move changes nothing, and memory outside the DMB never changes.
#![no_main]

use std::cell::RefCell;

use libfuzzer_sys::arbitrary::{self, Arbitrary};
use libfuzzer_sys::fuzz_target;
use smc_fuzz::front::{Completion, Front, fabric, guest_memory};
use ism_device::Delivery;
use virtio_ism_abi::command::{
    BACKING_GUEST, BACKING_WINDOW, HelloReply, HelloRequest, Op, RegisterReply, RegisterRequest,
    SgEntry,
};
use virtio_ism_abi::mv::{MoveHeader, Segment};
use virtio_ism_abi::{Gid, Status};
use vm_memory::{Bytes, GuestAddress, GuestAddressSpace, GuestMemoryAtomic, GuestMemoryMmap};
use zerocopy::IntoBytes;

const LEN: u32 = 16 << 10;
/// Guard pages of guest memory, before and behind the owner's DMB. The DMB is in two pieces, the
/// second in front of the first.
const GUARD: u64 = 4096;
const BASE: u64 = 1 << 20;

#[derive(Arbitrary, Debug)]
struct Input {
    chains: Vec<Chain>,
}

#[derive(Arbitrary, Debug)]
struct Chain {
    window: bool,
    by_owner: bool,
    token_change: u64,
    segments: Vec<(u16, u16)>,
    /// Offsets and lengths beyond 16 bits.
    wide: Option<(u32, u32)>,
    nseg_change: u8,
    total_change: u32,
    payload_change: u16,
    flags: u16,
    mask: u16,
    fill: u8,
    cut: u8,
}

struct World {
    owner: Front,
    user: Front,
    memory: GuestMemoryAtomic<GuestMemoryMmap>,
    tokens: [u64; 2],
}

fn hello(front: &mut Front) -> Gid {
    let body = HelloRequest { abi: 1.into(), flags: 0.into(), driver_max_idx: u32::MAX.into() };
    let reply = front.call(Op::Hello, body.as_bytes()).unwrap();
    reply.get::<HelloReply>().unwrap().gid
}

fn world() -> World {
    let fabric = fabric(false);
    let (mut owner, mut user) = (Front::join(&fabric), Front::join(&fabric));
    hello(&mut owner);
    let user_gid = hello(&mut user);
    let memory = guest_memory(LEN as usize + 2 * GUARD as usize);
    owner.device.set_memory(memory.clone());
    let register = |idx: u32, backing: u16, nsg: u32| RegisterRequest {
        user_gid,
        idx: idx.into(),
        len: LEN.into(),
        backing: backing.into(),
        nsg: nsg.into(),
        ..Default::default()
    };
    let piece = |at: u64| SgEntry { gpa: at.into(), len: (LEN / 2).into(), ..Default::default() };
    let half = u64::from(LEN / 2);
    let (guest, first, second) =
        (register(0, BACKING_GUEST, 2), piece(BASE + GUARD + half), piece(BASE + GUARD));
    let request = [guest.as_bytes(), first.as_bytes(), second.as_bytes()];
    let guest = owner.call(Op::Register, &request.concat()).unwrap();
    assert!(owner.call(Op::Register, register(1, BACKING_WINDOW, 0).as_bytes()).is_none());
    let window = owner.complete(Completion::Done).unwrap();
    let token = |reply: RegisterReply| reply.token.get();
    let tokens = [token(guest.get().unwrap()), token(window.get().unwrap())];
    World { owner, user, memory, tokens }
}

thread_local! {
    static WORLD: RefCell<World> = RefCell::new(world());
}

/// The guest-memory DMB in its own order, and whether the guards are whole.
fn guest_dmb(memory: &GuestMemoryAtomic<GuestMemoryMmap>) -> Vec<u8> {
    let mut all = vec![0; LEN as usize + 2 * GUARD as usize];
    memory.memory().read_slice(&mut all, GuestAddress(BASE)).unwrap();
    let (before, rest) = all.split_at(GUARD as usize);
    let (dmb, behind) = rest.split_at(LEN as usize);
    assert!(before.iter().chain(behind).all(|byte| *byte == 0), "written outside of the DMB");
    let (second, first) = dmb.split_at(LEN as usize / 2);
    [first, second].concat()
}

fn run(world: &mut World, chain: &Chain) {
    let mut segments: Vec<(u32, u32)> =
        chain.segments.iter().take(8).map(|(at, len)| (u32::from(*at), u32::from(*len))).collect();
    segments.extend(chain.wide);
    let sum: u64 = segments.iter().map(|(_, len)| u64::from(*len)).sum();
    let total = (sum as u32).wrapping_add(chain.total_change);
    let payload_len = (sum.min(1 << 20) as usize).wrapping_add(chain.payload_change.into());
    let payload: Vec<u8> = (0..payload_len).map(|i| (i as u8).wrapping_add(chain.fill)).collect();
    let token = world.tokens[usize::from(chain.window)];
    let header = MoveHeader {
        token: (token ^ chain.token_change).into(),
        nseg: (segments.len() as u16).wrapping_add(chain.nseg_change.into()).into(),
        flags: chain.flags.into(),
        mask: chain.mask.into(),
        total: total.into(),
        ..Default::default()
    };
    let mut head = header.as_bytes().to_vec();
    for (offset, len) in &segments {
        let segment = Segment { offset: (*offset).into(), len: (*len).into() };
        head.extend_from_slice(segment.as_bytes());
    }
    head.truncate(head.len() - usize::from(chain.cut).min(head.len()));
    let mover = if chain.by_owner { &world.owner } else { &world.user };
    let before = guest_dmb(&world.memory);
    let moved = mover.device.transfer(&head, &mut payload.as_slice(), payload.len() as u64);
    if let Some(wake) = moved.wake {
        wake.deliver(Delivery::Inline);
    }
    let after = guest_dmb(&world.memory);
    let ours = !chain.by_owner && chain.token_change == 0;
    let fits = segments.iter().all(|(at, len)| u64::from(*at) + u64::from(*len) <= LEN.into());
    let exact = chain.total_change == 0
        && chain.payload_change == 0
        && chain.nseg_change == 0
        && chain.cut == 0
        && segments.len() <= 4
        && sum <= 1 << 20
        && chain.flags <= 1;
    assert_eq!(moved.status == Status::Ok, ours && fits && exact, "{:?}: {chain:?}", moved.status);
    let mut expected = before;
    if moved.status == Status::Ok && !chain.window {
        let mut payload = &payload[..];
        for (at, len) in &segments {
            let (now, later) = payload.split_at(*len as usize);
            expected[*at as usize..][..now.len()].copy_from_slice(now);
            payload = later;
        }
    }
    assert!(after == expected, "{chain:?}");
}

fuzz_target!(|input: Input| {
    WORLD.with_borrow_mut(|world| {
        for chain in input.chains.iter().take(8) {
            run(world, chain);
        }
        while world.owner.device.next_event().is_some() {}
    });
});
