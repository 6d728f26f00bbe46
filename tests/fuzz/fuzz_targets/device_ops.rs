// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Three devices on a fabric act in any order; their front ends answer late, refuse, or lose answers.
//! Rights equal those of a small model, mappings never overlap, and nothing is left after the last
//! device.
#![no_main]

use std::collections::BTreeMap;

use ism_device::{CloseReason, Delivery};
use libfuzzer_sys::arbitrary::{self, Arbitrary};
use libfuzzer_sys::fuzz_target;
use smc_fuzz::front::{Answer, Completion, Front, WINDOW, fabric, guest_memory, small_limits};
use virtio_ism_abi::command::{
    AttachReply, BACKING_GUEST, BACKING_WINDOW, HelloReply, HelloRequest, Op, QueryGidRequest,
    RegisterReply, RegisterRequest, ReleaseSlabRequest, SgEntry, SignalEventRequest, TokenRequest,
    attach_flags,
};
use virtio_ism_abi::event::Event;
use virtio_ism_abi::mv::{MoveHeader, Segment};
use virtio_ism_abi::{Gid, Status};
use zerocopy::IntoBytes;

const DEVICES: usize = 3;

#[derive(Arbitrary, Debug)]
struct Input {
    loopback: bool,
    operations: Vec<(u8, Operation)>,
}

#[derive(Arbitrary, Debug)]
enum Operation {
    Hello,
    Query { whom: u8 },
    Register { user: u8, idx: u8, size: u8, guest: bool, group: u8 },
    Unregister { dmb: u8 },
    Attach { dmb: u8 },
    Detach { dmb: u8 },
    Release { slab: u8 },
    Signal { whom: u8, code: u8 },
    Stats,
    Move { dmb: u8, offset: u16, len: u8, signal: bool, hold: bool },
    Kick { dmb: u8 },
    Completion(Completion),
    SettleStale,
    Event,
    End { failed: bool },
    Window { on: bool },
    Memory { pages: u8 },
    Raw(Vec<u8>),
}

/// The subject of a waiting REGISTER or ATTACH.
#[derive(Clone, Copy, Debug)]
enum Waiting {
    Register { user: Gid, guest: bool, len: u32 },
    Attach { dmb: usize },
    Other,
}

#[derive(Debug)]
struct Dmb {
    token: u64,
    owner: usize,
    user: Gid,
    len: u32,
    guest: bool,
    over: bool,
}

struct World {
    fronts: Vec<Front>,
    gids: [Option<Gid>; DEVICES],
    waiting: [Vec<Waiting>; DEVICES],
    dmbs: Vec<Dmb>,
    slabs: [Vec<u32>; DEVICES],
    attached: BTreeMap<(usize, usize), ()>,
}

impl World {
    fn call(&mut self, id: usize, op: Op, body: &[u8], waiting: Waiting) {
        let before = self.fronts[id].jobs.len();
        let answer = self.fronts[id].call(op, body);
        if self.fronts[id].jobs.len() > before {
            self.waiting[id].push(waiting);
        }
        self.learn(id, waiting, answer);
    }

    fn learn(&mut self, id: usize, waiting: Waiting, answer: Option<Answer>) {
        let Some(answer) = answer else { return };
        match waiting {
            Waiting::Register { user, guest, len } => {
                let Some(reply) = answer.get::<RegisterReply>() else { return };
                if guest {
                    assert_eq!(reply.slab_len.get(), 0);
                } else {
                    self.check_place(
                        id,
                        reply.dmb_off.get(),
                        len,
                        &reply.slab_off.get(),
                        reply.slab_len.get(),
                    );
                    self.slabs[id].push(reply.slab_id.get());
                }
                let token = reply.token.get();
                assert!(token != 0 && self.dmbs.iter().all(|dmb| dmb.token != token));
                self.dmbs.push(Dmb { token, owner: id, user, len, guest, over: false });
            }
            Waiting::Attach { dmb } => {
                let Some(reply) = answer.get::<AttachReply>() else { return };
                let Dmb { len, owner, user, guest, .. } = self.dmbs[dmb];
                assert_eq!(reply.dmb_len.get(), len);
                assert_eq!(Some(user), self.gids[id], "attached by who is not its user");
                assert_eq!(Some(reply.owner_gid), self.gids[owner]);
                if reply.flags & attach_flags::MOVE_ONLY == 0 {
                    assert!(!guest);
                    self.check_place(
                        id,
                        reply.dmb_off.get(),
                        len,
                        &reply.slab_off.get(),
                        reply.slab_len.get(),
                    );
                    self.slabs[id].push(reply.slab_id.get());
                }
                self.attached.insert((id, dmb), ());
            }
            Waiting::Other => {}
        }
    }

    /// A DMB lies in its slab, and the slab is mapped.
    fn check_place(&self, id: usize, dmb_off: u64, len: u32, slab_off: &u64, slab_len: u32) {
        assert_eq!(self.fronts[id].maps.get(slab_off), Some(&u64::from(slab_len)));
        let data_end = slab_off + u64::from(slab_len) - (64 << 10);
        assert!(dmb_off >= *slab_off && dmb_off + u64::from(len) <= data_end);
        assert!((dmb_off - slab_off).is_multiple_of(len.into()));
    }

    fn dmb(&self, choice: u8) -> Option<usize> {
        let n = self.dmbs.len();
        if n == 0 { None } else { Some(usize::from(choice) % n) }
    }

    fn token(&self, choice: u8) -> (Option<usize>, u64) {
        match self.dmb(choice) {
            Some(dmb) => (Some(dmb), self.dmbs[dmb].token),
            None => (None, u64::from(choice)),
        }
    }

    fn gid(&self, choice: u8) -> Gid {
        let known = self.gids.get(usize::from(choice) % (DEVICES + 1)).copied().flatten();
        known.unwrap_or(Gid([choice; 16]))
    }

    /// Whether the model lets device `id` use a DMB.
    fn may_use(&self, id: usize, dmb: usize) -> bool {
        let Dmb { user, over, .. } = self.dmbs[dmb];
        !over && self.gids[id] == Some(user)
    }

    fn end(&mut self, id: usize) {
        self.gids[id] = None;
        for dmb in self.dmbs.iter_mut().filter(|dmb| dmb.owner == id) {
            dmb.over = true;
        }
        self.slabs[id].clear();
        self.attached.retain(|(who, _), ()| *who != id);
    }

    fn run(&mut self, id: usize, operation: Operation) {
        match operation {
            Operation::Hello => {
                let body = HelloRequest { abi: 1.into(), flags: 0.into(), driver_max_idx: 5.into() };
                let answer = self.fronts[id].call(Op::Hello, body.as_bytes());
                let reply: HelloReply = answer.and_then(|a| a.get()).expect("HELLO works");
                self.end(id);
                self.gids[id] = Some(reply.gid);
            }
            Operation::Query { whom } => {
                let body = QueryGidRequest { gid: self.gid(whom), ..Default::default() };
                self.call(id, Op::QueryGid, body.as_bytes(), Waiting::Other);
            }
            Operation::Register { user, idx, size, guest, group } => {
                self.register(id, user, idx, 16 << 10 << (size % 10), guest, group);
            }
            Operation::Unregister { dmb } => self.unregister(id, dmb),
            Operation::Attach { dmb } => {
                let (dmb, token) = self.token(dmb);
                let waiting = dmb.map_or(Waiting::Other, |dmb| Waiting::Attach { dmb });
                let body = TokenRequest { token: token.into() };
                self.call(id, Op::Attach, body.as_bytes(), waiting);
            }
            Operation::Detach { dmb } => {
                let (dmb, token) = self.token(dmb);
                let answer = self.token_op(id, Op::Detach, token);
                let had = dmb.is_some_and(|dmb| self.attached.remove(&(id, dmb)).is_some());
                assert_eq!(answer.status == Status::Ok, had, "{:?}", answer.status);
            }
            Operation::Release { slab } => {
                let slabs = &self.slabs[id];
                let slab_id = match slabs.len() {
                    0 => slab.into(),
                    n => slabs[usize::from(slab) % n],
                };
                let body = ReleaseSlabRequest { slab_id: slab_id.into(), ..Default::default() };
                self.call(id, Op::ReleaseSlab, body.as_bytes(), Waiting::Other);
            }
            Operation::Signal { whom, code } => {
                let gid = self.gid(whom);
                let body =
                    SignalEventRequest { gid, code: u32::from(code).into(), ..Default::default() };
                self.call(id, Op::SignalEvent, body.as_bytes(), Waiting::Other);
            }
            Operation::Stats => self.call(id, Op::Stats, &[], Waiting::Other),
            Operation::Move { dmb, offset, len, signal, hold } => {
                self.transfer(id, dmb, Some((offset.into(), len)), signal, hold);
            }
            Operation::Kick { dmb } => self.transfer(id, dmb, None, true, false),
            Operation::Completion(how) => self.complete(id, how),
            Operation::SettleStale => self.fronts[id].settle_stale(),
            Operation::Event => {
                if let Some(record) = self.fronts[id].device.next_event() {
                    let event = Event::parse(&record).expect("a record of the contract");
                    assert!(self.gids[id].is_some(), "{event:?} for nobody");
                }
            }
            Operation::End { failed } => {
                let how = if failed { CloseReason::Failed } else { CloseReason::Orderly };
                self.fronts[id].device.close_session(how);
                self.end(id);
            }
            Operation::Window { on } => {
                self.fronts[id].device.set_window(if on { WINDOW } else { 0 });
            }
            Operation::Memory { pages } => {
                let len = (usize::from(pages) + 1) << 12;
                self.fronts[id].device.set_memory(guest_memory(len));
            }
            Operation::Raw(bytes) => {
                // HELLO would go unnoticed by the model.
                if bytes.first() != Some(&1) {
                    let before = self.fronts[id].jobs.len();
                    self.fronts[id].raw(&bytes, 4096);
                    if self.fronts[id].jobs.len() > before {
                        self.waiting[id].push(Waiting::Other);
                    }
                }
            }
        }
    }

    fn register(&mut self, id: usize, user: u8, idx: u8, len: u32, guest: bool, group: u8) {
        let user = self.gid(user);
        let body = RegisterRequest {
            user_gid: user,
            idx: u32::from(idx % 8).into(),
            len: len.into(),
            backing: if guest { BACKING_GUEST } else { BACKING_WINDOW }.into(),
            wait_group: u16::from(group).into(),
            nsg: u32::from(guest).into(),
            ..Default::default()
        };
        let piece = SgEntry { gpa: (1 << 20).into(), len: len.into(), ..Default::default() };
        let piece = if guest { piece.as_bytes() } else { &[] };
        let bytes = [body.as_bytes(), piece].concat();
        self.call(id, Op::Register, &bytes, Waiting::Register { user, guest, len });
    }

    fn unregister(&mut self, id: usize, dmb: u8) {
        let (dmb, token) = self.token(dmb);
        let answer = self.token_op(id, Op::Unregister, token);
        let ours = dmb.is_some_and(|d| self.dmbs[d].owner == id && !self.dmbs[d].over);
        // Guest memory may have vanished; its DMB still has to be unregistered.
        assert!(answer.status != Status::Ok || ours);
        if answer.status == Status::Ok
            && let Some(dmb) = dmb
        {
            self.dmbs[dmb].over = true;
        }
    }

    fn complete(&mut self, id: usize, how: Completion) {
        if !self.waiting[id].is_empty() {
            let waiting = self.waiting[id].remove(0);
            let answer = self.fronts[id].complete(how);
            self.learn(id, waiting, answer);
            if matches!(how, Completion::Lost { .. }) {
                // The daemon drops a silent front end.
                self.fronts[id].device.close_session(CloseReason::Failed);
                self.end(id);
            }
        }
    }

    fn token_op(&mut self, id: usize, op: Op, token: u64) -> Answer {
        let body = TokenRequest { token: token.into() };
        self.fronts[id].call(op, body.as_bytes()).expect("no front end is asked")
    }

    fn transfer(
        &mut self,
        id: usize,
        dmb: u8,
        segment: Option<(u32, u8)>,
        signal: bool,
        hold: bool,
    ) {
        let (dmb, token) = self.token(dmb);
        let payload = vec![id as u8; segment.map_or(0, |(_, len)| len.into())];
        let header = MoveHeader {
            token: token.into(),
            nseg: u16::from(segment.is_some()).into(),
            flags: u16::from(signal).into(),
            mask: 1.into(),
            total: (payload.len() as u32).into(),
            ..Default::default()
        };
        let mut head = header.as_bytes().to_vec();
        if let Some((offset, len)) = segment {
            let segment = Segment { offset: offset.into(), len: u32::from(len).into() };
            head.extend_from_slice(segment.as_bytes());
        }
        let device = &self.fronts[id].device;
        let moved = device.transfer(&head, &mut &payload[..], payload.len() as u64);
        let may = dmb.is_some_and(|dmb| self.may_use(id, dmb));
        assert!(moved.status != Status::Ok || may, "moved without a right");
        if moved.status == Status::Eio
            && let Some(dmb) = dmb
        {
            // The owner's memory has changed. The DMB stays registered but is useless.
            assert!(self.dmbs[dmb].guest);
        }
        match moved.wake {
            Some(wake) if hold => drop(wake),
            Some(wake) => wake.deliver(Delivery::Inline),
            None => {}
        }
    }

    fn check(&self) {
        let limits = small_limits();
        for front in &self.fronts {
            let info = front.device.info();
            assert!(info.dmbs <= limits.max_dmbs.into());
            assert!(info.dmb_bytes <= limits.dmb_bytes);
            assert!(info.slab_bytes <= limits.slab_bytes);
            assert!(info.attached <= limits.max_attach.into());
            assert!(info.attached_slab_bytes <= limits.attached_slab_bytes);
            assert!(info.peers <= limits.max_peers.into());
            assert!(info.map_slots + info.stale_maps <= u64::from(limits.max_maps), "{info:?}");
        }
    }
}

fuzz_target!(|input: Input| {
    let fabric = fabric(input.loopback);
    let mut world = World {
        fronts: (0..DEVICES).map(|_| Front::join(&fabric)).collect(),
        gids: [None; DEVICES],
        waiting: Default::default(),
        dmbs: Vec::new(),
        slabs: Default::default(),
        attached: BTreeMap::new(),
    };
    for front in &world.fronts {
        front.device.set_memory(guest_memory(1 << 20));
    }
    for (id, operation) in input.operations.into_iter().take(200) {
        world.run(usize::from(id) % DEVICES, operation);
        world.check();
    }
    for id in 0..DEVICES {
        world.fronts[id].device.close_session(CloseReason::Orderly);
        while !world.fronts[id].jobs.is_empty() {
            world.fronts[id].complete(Completion::Done);
        }
        // Only a started front end is asked to unmap.
        world.run(id, Operation::Hello);
        world.fronts[id].settle_stale();
        assert!(world.fronts[id].maps.is_empty(), "left mapped: {:?}", world.fronts[id].maps);
    }
    for front in world.fronts {
        front.device.close_session(CloseReason::Orderly);
        assert!(!front.device.has_events());
    }
    let left = fabric.snapshot();
    assert_eq!((left.tokens, left.slabs, left.slab_bytes), (0, 0, 0));
    assert!(left.devices.is_empty());
});
