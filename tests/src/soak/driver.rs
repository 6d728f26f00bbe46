// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The guest's part behind a hostile front end: four queues, and their commands and moves. Writes go
//! by system calls, as the memory may be gone.

use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::write;
use virtio_ism_abi::Gid;
use virtio_ism_abi::command::{
    BACKING_GUEST, BACKING_WINDOW, HelloRequest, Op, QueryGidRequest, RegisterRequest,
    ReleaseSlabRequest, RequestHeader, SgEntry, SignalEventRequest, TokenRequest,
};
use virtio_ism_abi::config::DMB_MIN;
use virtio_ism_abi::event::EVENT_LEN;
use virtio_ism_abi::mv::{MoveHeader, Segment};
use zerocopy::{FromZeros, IntoBytes};

use super::descriptor::{self, Descriptor};
use super::memory::{BASE, LEN, Memory};
use super::message::{u32_at, u64_at};
use crate::bytes::Rng;

pub(super) const CONTROL: usize = 0;
pub(super) const EVENTS: usize = 1;
pub(super) const MOVES: usize = 2;
pub(super) const QUEUES: usize = 4;
/// Descriptors of a queue.
pub(super) const QUEUE_SIZE: u16 = 64;

/// Bytes of guest memory for a queue.
const RING: u64 = 0x4000;
/// Start of the buffers, behind the queues.
const BUFFERS: u64 = BASE + RING * QUEUES as u64;
/// DMBs in guest memory lie in the upper half.
const DMBS: u64 = BASE + LEN / 2;
/// Longest payload of a move here, bytes.
const PAYLOAD: u32 = 64 << 10;

const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;

/// Numbers at the edges of arithmetic.
pub(super) const EDGES: [u64; 16] = [
    0,
    1,
    8,
    63,
    64,
    4095,
    4096,
    DMB_MIN as u64,
    BASE - 1,
    BASE + LEN - 1,
    BASE + LEN,
    0x7fff_ffff,
    0xffff_ffff,
    0x1_0000_0000,
    u64::MAX - 7,
    u64::MAX,
];

/// Draws a number of [`EDGES`], or any.
pub(super) fn edge(rng: &mut Rng) -> u64 {
    if rng.one_in(4) { rng.bits() } else { EDGES[rng.below(16) as usize] }
}

/// The driver's view of a queue.
#[derive(Debug)]
pub(super) struct Queue {
    pub(super) kick: OwnedFd,
    pub(super) call: OwnedFd,
    pub(super) desc: u64,
    pub(super) avail: u64,
    pub(super) used: u64,
    next_desc: u16,
    next_avail: u16,
    last_used: u16,
}

impl Queue {
    fn new(index: u64) -> Option<Queue> {
        let base = BASE + index * RING;
        Some(Queue {
            kick: Descriptor::Counter.make()?,
            call: Descriptor::Counter.make()?,
            desc: base,
            avail: base + 0x1000,
            used: base + 0x2000,
            next_desc: 0,
            next_avail: 0,
            last_used: 0,
        })
    }
}

/// A buffer of a chain: address, length, whether the device writes to this buffer.
pub(super) type Buffer = (u64, u32, bool);

/// The driver's half of a front end.
#[derive(Debug)]
pub(super) struct Driver {
    pub(super) memory: Memory,
    pub(super) queues: Vec<Queue>,
    /// Descriptors passed in the place of proper ones. A thread of the daemon may wait for one of
    /// them.
    pub(super) passed: Vec<OwnedFd>,
    next_buffer: u64,
}

impl Driver {
    pub(super) fn new(memory: Memory) -> Option<Driver> {
        let queues = (0..QUEUES as u64).map(Queue::new).collect::<Option<_>>()?;
        Some(Driver { memory, queues, passed: Vec::new(), next_buffer: BUFFERS })
    }

    /// `len` bytes of guest memory, used for something else some thousand buffers later.
    fn buffer(&mut self, len: usize) -> u64 {
        let len = (len as u64).next_multiple_of(64);
        if self.next_buffer + len > DMBS {
            self.next_buffer = BUFFERS;
        }
        let at = self.next_buffer;
        self.next_buffer += len;
        at
    }

    fn write_buffer(&mut self, bytes: &[u8]) -> u64 {
        let at = self.buffer(bytes.len());
        self.memory.write(at, bytes);
        at
    }

    /// The bytes of a descriptor.
    fn descriptor(addr: u64, len: u32, flags: u16, next: u16) -> [u8; 16] {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&addr.to_le_bytes());
        bytes[8..12].copy_from_slice(&len.to_le_bytes());
        bytes[12..14].copy_from_slice(&flags.to_le_bytes());
        bytes[14..].copy_from_slice(&next.to_le_bytes());
        bytes
    }

    /// Makes a chain available, by a table of its own if `indirect`.
    pub(super) fn add(&mut self, queue: usize, buffers: &[Buffer], indirect: bool) {
        let size = if indirect { u16::MAX } else { QUEUE_SIZE };
        let first = if indirect { 0 } else { self.queues[queue].next_desc };
        let mut table = Vec::with_capacity(buffers.len() * 16);
        for (i, (addr, len, writes)) in buffers.iter().enumerate() {
            let next = (first + i as u16 + 1) % size;
            let more = if i + 1 < buffers.len() { NEXT } else { 0 };
            let flags = more | if *writes { WRITE } else { 0 };
            table.extend_from_slice(&Self::descriptor(*addr, *len, flags, next));
        }
        if indirect {
            let len = table.len() as u32;
            let at = self.write_buffer(&table);
            table = Self::descriptor(at, len, INDIRECT, 0).to_vec();
        }
        let (head, desc) = (self.queues[queue].next_desc, self.queues[queue].desc);
        for (i, bytes) in table.chunks_exact(16).enumerate() {
            let slot = (head + i as u16) % QUEUE_SIZE;
            self.memory.write(desc + 16 * u64::from(slot), bytes);
        }
        self.queues[queue].next_desc = (head + (table.len() / 16) as u16) % QUEUE_SIZE;
        self.offer(queue, head);
    }

    /// Puts a head into the avail ring.
    pub(super) fn offer(&mut self, queue: usize, head: u16) {
        let q = &mut self.queues[queue];
        let slot = q.avail + 4 + 2 * u64::from(q.next_avail % QUEUE_SIZE);
        q.next_avail = q.next_avail.wrapping_add(1);
        self.memory.write(slot, &head.to_le_bytes());
        self.memory.write(q.avail + 2, &q.next_avail.to_le_bytes());
    }

    /// Notifies the device.
    pub(super) fn kick(&self, queue: usize) {
        let _ = write(&self.queues[queue].kick, &1u64.to_ne_bytes());
    }

    /// The queues are empty, as after a reset.
    pub(super) fn clear(&mut self) {
        for q in &mut self.queues {
            (q.next_avail, q.last_used, q.next_desc) = (0, 0, 0);
            self.memory.write(q.avail, &[0; 256]);
            self.memory.write(q.used, &[0; 1024]);
        }
    }

    /// The head of the next used element.
    fn try_used(&mut self, queue: usize) -> Option<u16> {
        let q = &mut self.queues[queue];
        let index = u16::from_le_bytes(self.memory.read(q.used + 2));
        if index == q.last_used {
            return None;
        }
        let slot = q.used + 4 + 8 * u64::from(q.last_used % QUEUE_SIZE);
        q.last_used = q.last_used.wrapping_add(1);
        Some(u32::from_le_bytes(self.memory.read(slot)) as u16)
    }

    /// Like [`Self::try_used`], waiting for an interrupt.
    fn used(&mut self, queue: usize, limit: Duration) -> Option<u16> {
        let used_event = self.queues[queue].avail + 4 + 2 * u64::from(QUEUE_SIZE);
        self.memory.write(used_event, &self.queues[queue].last_used.to_le_bytes());
        if let Some(head) = self.try_used(queue) {
            return Some(head);
        }
        let call = &self.queues[queue].call;
        let limit = Timespec { tv_sec: 0, tv_nsec: limit.as_nanos() as i64 };
        let _ = poll(&mut [PollFd::new(call, PollFlags::IN)], Some(&limit));
        descriptor::empty(call);
        self.try_used(queue)
    }

    /// The body of the next reply, if a success arrives within `limit`.
    pub(super) fn reply(&mut self, limit: Duration) -> Option<[u8; 64]> {
        let head = self.used(CONTROL, limit)?;
        let second = u64::from((head + 1) % QUEUE_SIZE);
        let addr = u64::from_le_bytes(self.memory.read(self.queues[CONTROL].desc + 16 * second));
        let reply: [u8; 72] = self.memory.read(addr);
        let mut body = [0; 64];
        body.copy_from_slice(&reply[8..]);
        (u32_at(&reply, 0) as u16 == 0).then_some(body)
    }

    /// Takes all used elements of a queue, and gives events their buffers back.
    pub(super) fn take_used(&mut self, queue: usize) {
        for _ in 0..QUEUE_SIZE {
            let Some(head) = self.try_used(queue) else { return };
            if queue == EVENTS {
                self.offer(EVENTS, head % QUEUE_SIZE);
            }
        }
    }

    /// Gives the device room for events.
    pub(super) fn feed_events(&mut self, count: usize) {
        for _ in 0..count {
            let at = self.buffer(EVENT_LEN);
            self.add(EVENTS, &[(at, EVENT_LEN as u32, true)], false);
        }
        self.kick(EVENTS);
    }

    /// Sends a command.
    pub(super) fn command(&mut self, op: u16, body: &[u8], rng: &mut Rng, wrong: bool) {
        let header =
            RequestHeader { op: op.into(), tag: (rng.bits() as u32).into(), ..Default::default() };
        let mut request = [header.as_bytes(), body].concat();
        let mut room = 8 + Op::from_code(op).map_or(64, Op::reply_body_len) as u32;
        if wrong {
            match rng.below(4) {
                0 => request.truncate(rng.below(request.len() as u32 + 1) as usize),
                1 => request.extend_from_slice(&rng.bits().to_le_bytes()),
                2 => room = rng.below(room + 8),
                _ => {
                    let at = rng.below(request.len() as u32) as usize;
                    request[at] ^= 1 << rng.below(8);
                }
            }
        }
        let readable = self.write_buffer(&request);
        let writable = self.buffer(room.max(80) as usize);
        let len = request.len() as u32;
        // How a chain is cut means nothing.
        if rng.one_in(4) && len > 1 {
            let first = 1 + rng.below(len - 1);
            let rest = (readable + u64::from(first), len - first, false);
            self.add(CONTROL, &[(readable, first, false), rest, (writable, room, true)], true);
        } else {
            self.add(CONTROL, &[(readable, len, false), (writable, room, true)], false);
        }
        self.kick(CONTROL);
    }

    pub(super) fn hello(&mut self, rng: &mut Rng, wrong: bool) {
        let hello = HelloRequest { abi: 1.into(), flags: 0.into(), driver_max_idx: 4096.into() };
        self.command(Op::Hello as u16, hello.as_bytes(), rng, wrong);
    }

    pub(super) fn query(&mut self, gid: Gid, rng: &mut Rng, wrong: bool) {
        let query = QueryGidRequest { gid, ..Default::default() };
        self.command(Op::QueryGid as u16, query.as_bytes(), rng, wrong);
    }

    pub(super) fn register(&mut self, user: Gid, rng: &mut Rng, wrong: bool) {
        let len = DMB_MIN << if rng.one_in(8) { rng.below(12) } else { rng.below(4) };
        let guest = rng.one_in(2) && u64::from(len) <= LEN / 2;
        let pieces = if guest { 1 + rng.below(4) } else { 0 };
        let mut request = RegisterRequest {
            user_gid: user,
            idx: rng.below(if wrong { 5000 } else { 64 }).into(),
            len: len.into(),
            backing: if guest { BACKING_GUEST } else { BACKING_WINDOW }.into(),
            wait_group: (rng.below(80) as u16).into(),
            nsg: pieces.into(),
            ..Default::default()
        };
        let mut entries = Vec::new();
        for n in 0..pieces {
            let piece = len / 4096 / pieces * 4096;
            let piece = if n + 1 == pieces { len - piece * (pieces - 1) } else { piece };
            let gpa = DMBS
                + u64::from(rng.below(((LEN / 2 - u64::from(piece)) / 4096) as u32 + 1)) * 4096;
            let mut entry = SgEntry { gpa: gpa.into(), len: piece.into(), ..Default::default() };
            if wrong && rng.one_in(2) {
                entry.gpa = edge(rng).into();
            }
            entries.extend_from_slice(entry.as_bytes());
        }
        if wrong && rng.one_in(4) {
            request.len = (edge(rng) as u32).into();
        }
        let body = [request.as_bytes(), &entries].concat();
        let wrong = wrong && rng.one_in(2);
        self.command(Op::Register as u16, &body, rng, wrong);
    }

    /// UNREGISTER, ATTACH or DETACH.
    pub(super) fn by_token(&mut self, op: Op, token: u64, rng: &mut Rng, wrong: bool) {
        let request = TokenRequest { token: token.into() };
        self.command(op as u16, request.as_bytes(), rng, wrong);
    }

    pub(super) fn release_slab(&mut self, rng: &mut Rng, wrong: bool) {
        let slab_id = if wrong { rng.bits() as u32 } else { rng.below(16) };
        let request = ReleaseSlabRequest { slab_id: slab_id.into(), ..Default::default() };
        self.command(Op::ReleaseSlab as u16, request.as_bytes(), rng, wrong);
    }

    pub(super) fn signal_event(&mut self, gid: Gid, rng: &mut Rng, wrong: bool) {
        let request = SignalEventRequest {
            gid,
            trigger: rng.below(2).into(),
            code: (rng.bits() as u32).into(),
            info: rng.bits().into(),
            ..Default::default()
        };
        self.command(Op::SignalEvent as u16, request.as_bytes(), rng, wrong);
    }

    /// A move: a header, segments, a payload in other memory.
    pub(super) fn transfer(&mut self, token: u64, rng: &mut Rng, wrong: bool) {
        let segments = if rng.one_in(3) { 0 } else { 1 + rng.below(if wrong { 40 } else { 4 }) };
        let mut total = 0u32;
        let mut bytes = Vec::new();
        for _ in 0..segments {
            let word = rng.one_in(2);
            let mut len = if word { 8 * rng.below(9) } else { rng.below(PAYLOAD / segments) };
            let mut offset = rng.below(DMB_MIN);
            if word {
                offset = offset / 8 * 8;
            }
            if wrong && rng.one_in(4) {
                (offset, len) = (edge(rng) as u32, edge(rng) as u32);
            }
            len = len.min(if wrong { u32::MAX } else { DMB_MIN - offset });
            total = total.wrapping_add(len);
            let segment = Segment { offset: offset.into(), len: len.into() };
            bytes.extend_from_slice(segment.as_bytes());
        }
        let header = MoveHeader {
            token: token.into(),
            nseg: (segments as u16).into(),
            flags: (if wrong { rng.bits() as u16 } else { rng.below(2) as u16 }).into(),
            mask: (rng.bits() as u16).into(),
            total: (if wrong && rng.one_in(4) { edge(rng) as u32 } else { total }).into(),
            ..MoveHeader::new_zeroed()
        };
        let head = [header.as_bytes(), &bytes].concat();
        let readable = self.write_buffer(&head);
        let writable = self.buffer(64);
        // Anywhere in guest memory: written bytes, holes, rings, the target itself.
        let room = LEN - u64::from(total).min(LEN);
        let mut payload = BASE + u64::from(rng.below(room as u32 + 1));
        if wrong && rng.one_in(4) {
            payload = edge(rng);
        }
        let mut buffers = vec![(readable, head.len() as u32, false)];
        if total > 0 {
            buffers.push((payload, total, false));
        }
        if !wrong || !rng.one_in(8) {
            buffers.push((writable, 4, true));
        }
        let queue = MOVES + rng.below(2) as usize;
        self.add(queue, &buffers, rng.one_in(3));
        self.kick(queue);
    }

    /// Offers a malformed chain.
    pub(super) fn nonsense(&mut self, queue: usize, rng: &mut Rng) {
        match rng.below(5) {
            // Any descriptors.
            0 => {
                let buffers: Vec<Buffer> = (0..1 + rng.below(8))
                    .map(|_| (edge(rng), edge(rng) as u32, rng.one_in(2)))
                    .collect();
                let indirect = rng.one_in(2);
                self.add(queue, &buffers, indirect);
            }
            // A loop, or links beyond the table.
            1 => {
                let slot = rng.below(QUEUE_SIZE.into()) as u16;
                let next = rng.below(u32::from(QUEUE_SIZE) + 2) as u16;
                let bytes = Self::descriptor(edge(rng), 16, NEXT | (rng.bits() as u16 & 6), next);
                let at = self.queues[queue].desc + 16 * u64::from(slot);
                self.memory.write(at, &bytes);
                self.offer(queue, slot);
            }
            // Tables in tables.
            2 => {
                let at = self.buffer(4096);
                let bytes = Self::descriptor(at, 4096, INDIRECT | (rng.bits() as u16 & 3), 1);
                for entry in 0..rng.below(16) {
                    self.memory.write(at + 16 * u64::from(entry), &bytes);
                }
                let desc = self.queues[queue].desc;
                self.memory.write(desc, &Self::descriptor(at, edge(rng) as u32, INDIRECT, 0));
                self.offer(queue, 0);
            }
            // Heads out of range, or an index ahead of the ring.
            3 => self.offer(queue, rng.bits() as u16),
            _ => {
                let q = &mut self.queues[queue];
                q.next_avail = q.next_avail.wrapping_add(rng.bits() as u16);
                self.memory.write(q.avail + 2, &q.next_avail.to_le_bytes());
            }
        }
        self.kick(queue);
    }

    /// Writes random bytes where the rings lie.
    pub(super) fn scribble(&mut self, rng: &mut Rng) {
        for _ in 0..1 + rng.below(16) {
            let at = BASE + u64::from(rng.below((RING * QUEUES as u64) as u32));
            self.memory.write(at, &rng.bits().to_le_bytes());
        }
    }

    /// Empties every descriptor of this driver, so no writer waits any longer.
    pub(super) fn empty_all(&self) {
        for q in &self.queues {
            descriptor::empty(&q.call);
            descriptor::empty(&q.kick);
        }
        self.passed.iter().for_each(descriptor::empty);
    }
}

/// The token in the reply to REGISTER.
pub(super) fn token_of(body: &[u8]) -> u64 {
    u64_at(body, 0)
}
