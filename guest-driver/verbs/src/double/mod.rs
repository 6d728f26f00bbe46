// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A double of `libibverbs.so.1` for tests: RNICs in the memory of this process.
//!
//! Both ends of a queue pair are in this process, so a request is a copy, carried out by the post
//! itself. Requests under way on an RNIC can be [held up](Rnic::hold), and the RNIC can be [cut
//! off](Rnic::cut) between requests: then a part of the requests arrives, and the senders do not
//! know how many.
//!
//! Not doubled: packets, memory windows, protection domains, and a device's delay in detecting a
//! silent peer.

pub(super) mod calls;

use std::collections::{HashMap, VecDeque};
use std::ffi::{c_char, c_int};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard};

use smc_core::wire::ids::{Gid, Mac};

use super::ffi;
use ism_sys::lock;

const ACTIVE: u32 = 4;
const DOWN: u32 = 1;
const PORT_ACTIVE: u32 = 9;
const PORT_ERROR: u32 = 10;
const RETRIES_EXCEEDED: u32 = 12;
const FLUSHED: u32 = 5;
const REMOTE_ACCESS: u32 = 10;
const RECEIVED: u32 = 0x80;

/// An RNIC of the double, with one port.
#[derive(Clone, Debug)]
pub struct Rnic {
    name: String,
}

/// A descriptor, readable while something waits.
struct Notice(c_int);

/// A request under way.
struct Request {
    id: u64,
    opcode: u32,
    signaled: bool,
    remote: u64,
    key: u32,
    payload: Payload,
}

enum Payload {
    Inline(Vec<u8>),
    Memory(u64, usize),
}

struct QueuePair {
    context: usize,
    send_cq: usize,
    recv_cq: usize,
    state: u32,
    peer: u32,
    wire: VecDeque<Request>,
    receives: VecDeque<(u64, u64, usize)>,
}

struct Queue {
    channel: usize,
    armed: bool,
    done: VecDeque<ffi::Wc>,
}

struct Adapter {
    name: String,
    entry: usize,
    gid: Gid,
    down: bool,
    held: bool,
}

#[derive(Default)]
struct World {
    adapters: Vec<Adapter>,
    /// The adapter of each open context, and its events.
    contexts: HashMap<usize, (usize, Notice, VecDeque<u32>)>,
    pds: HashMap<usize, usize>,
    regions: HashMap<u32, (u64, usize)>,
    channels: HashMap<usize, (Notice, VecDeque<usize>)>,
    queues: HashMap<usize, Queue>,
    pairs: HashMap<u32, QueuePair>,
    last: u32,
}

static INSTALLED: AtomicBool = AtomicBool::new(false);
static WORLD: Mutex<Option<World>> = Mutex::new(None);

/// The double, empty at first.
struct Guard(MutexGuard<'static, Option<World>>);

fn world() -> Guard {
    let mut guard = lock(&WORLD);
    guard.get_or_insert_with(World::default);
    Guard(guard)
}

impl std::ops::Deref for Guard {
    type Target = World;
    fn deref(&self) -> &World {
        self.0.as_ref().unwrap_or_else(|| unreachable!("it was made"))
    }
}

impl std::ops::DerefMut for Guard {
    fn deref_mut(&mut self) -> &mut World {
        self.0.as_mut().unwrap_or_else(|| unreachable!("it was made"))
    }
}

impl Rnic {
    /// Adds an RNIC with this IPv4 address, on the loopback interface. From now on this process has
    /// only the RNICs of the double.
    pub fn add(name: &str, address: [u8; 4]) -> Rnic {
        INSTALLED.store(true, Ordering::Release);
        // SAFETY: zero is a value of each field, and C reads only the fields set below.
        let mut entry: Box<ffi::Device> = Box::new(unsafe { std::mem::zeroed() });
        (entry.node_type, entry.transport_type) = (ffi::NODE_CA, ffi::TRANSPORT_IB);
        for text in [&mut entry.name, &mut entry.dev_name] {
            for (to, from) in text.iter_mut().zip(name.bytes()) {
                *to = c_char::from_ne_bytes([from]);
            }
        }
        // A list of devices may name the entry at any time.
        let entry = std::ptr::from_mut(Box::leak(entry)).expose_provenance();
        let (name, gid) = (name.to_owned(), Gid::from_ipv4(address));
        let adapter = Adapter { name: name.clone(), entry, gid, down: false, held: false };
        world().adapters.push(adapter);
        Rnic { name }
    }

    /// Holds up requests over the RNIC, from both ends, or lets held requests go on.
    pub fn hold(&self, held: bool) {
        let mut world = world();
        let Some(at) = world.find(&self.name) else { return };
        world.adapters[at].held = held;
        world.run_all();
    }

    /// Cuts the RNIC off: its port is down. On each queue pair of the RNIC or to it, `arrives` maps
    /// the number of requests under way to the number carried out; the senders get no completion of
    /// success.
    pub fn cut(&self, mut arrives: impl FnMut(usize) -> usize) {
        let mut world = world();
        let Some(at) = world.find(&self.name) else { return };
        for pair in world.pairs_over(at) {
            let under_way = world.pairs.get(&pair).map_or(0, |pair| pair.wire.len());
            for _ in 0..arrives(under_way) {
                if !world.carry_out(pair, false) {
                    break;
                }
            }
        }
        (world.adapters[at].down, world.adapters[at].held) = (true, false);
        world.tell(at, PORT_ERROR);
        world.run_all();
    }

    /// Ends a cut: the port of the RNIC is up again.
    pub fn join(&self) {
        let mut world = world();
        let Some(at) = world.find(&self.name) else { return };
        world.adapters[at].down = false;
        world.tell(at, PORT_ACTIVE);
    }
}

impl Notice {
    fn new() -> Notice {
        // SAFETY: no argument is a pointer.
        Notice(unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) })
    }

    fn raise(&self) {
        let one = 1u64.to_ne_bytes();
        // SAFETY: the buffer is 8 bytes long.
        unsafe { libc::write(self.0, one.as_ptr().cast(), one.len()) };
    }

    fn clear(&self) {
        let mut count = [0u8; 8];
        // SAFETY: the buffer is 8 bytes long.
        unsafe { libc::read(self.0, count.as_mut_ptr().cast(), count.len()) };
    }
}

impl Drop for Notice {
    fn drop(&mut self) {
        // SAFETY: the descriptor is this object's.
        unsafe { libc::close(self.0) };
    }
}

impl World {
    fn find(&self, name: &str) -> Option<usize> {
        self.adapters.iter().position(|adapter| adapter.name == name)
    }

    fn next(&mut self) -> u32 {
        self.last += 1;
        self.last
    }

    fn tell(&mut self, adapter: usize, event: u32) {
        for (of, notice, events) in self.contexts.values_mut().filter(|(of, ..)| *of == adapter) {
            debug_assert_eq!(*of, adapter);
            events.push_back(event);
            notice.raise();
        }
    }

    fn adapter_of(&self, pair: u32) -> Option<usize> {
        Some(self.contexts.get(&self.pairs.get(&pair)?.context)?.0)
    }

    /// The queue pairs ending at an adapter on either side.
    fn pairs_over(&self, adapter: usize) -> Vec<u32> {
        let ends_there = |pair: u32| self.adapter_of(pair) == Some(adapter);
        let over = |(number, pair): (&u32, &QueuePair)| {
            (ends_there(*number) || ends_there(pair.peer)).then_some(*number)
        };
        self.pairs.iter().filter_map(over).collect()
    }

    fn complete(&mut self, queue: usize, completion: ffi::Wc) {
        let Some(found) = self.queues.get_mut(&queue) else { return };
        found.done.push_back(completion);
        if std::mem::take(&mut found.armed)
            && let Some((notice, events)) = self.channels.get_mut(&found.channel)
        {
            events.push_back(queue);
            notice.raise();
        }
    }

    /// The queue pair has failed: its requests complete as failed, the first with this status.
    fn fail(&mut self, number: u32, mut status: u32) {
        let Some(pair) = self.pairs.get_mut(&number) else { return };
        pair.state = ffi::QPS_ERR;
        let (send_cq, recv_cq) = (pair.send_cq, pair.recv_cq);
        let (wire, receives) = (std::mem::take(&mut pair.wire), std::mem::take(&mut pair.receives));
        for request in wire {
            let wc = ffi::Wc { wr_id: request.id, status, qp_num: number, ..Default::default() };
            self.complete(send_cq, wc);
            status = FLUSHED;
        }
        for (wr_id, ..) in receives {
            let wc = ffi::Wc { wr_id, status: FLUSHED, qp_num: number, ..Default::default() };
            self.complete(recv_cq, wc);
        }
    }

    /// Carries out the first request of a queue pair. `false`: no request waits, or the peer is not
    /// ready.
    fn carry_out(&mut self, number: u32, acknowledged: bool) -> bool {
        let Some(pair) = self.pairs.get(&number) else { return false };
        let Some(request) = pair.wire.front() else { return false };
        let Some(peer) = self.pairs.get(&pair.peer) else { return false };
        let ready = peer.state == ffi::QPS_RTR || peer.state == ffi::QPS_RTS;
        let is_send = request.opcode == ffi::WR_SEND;
        let to = match is_send {
            true => peer.receives.front().map(|(_, address, len)| (*address, *len)),
            false => self.regions.get(&request.key).and_then(|(address, len)| {
                let end = address + *len as u64;
                let room = end.checked_sub(request.remote)?;
                (request.remote >= *address).then_some((request.remote, room as usize))
            }),
        };
        let peer = pair.peer;
        if ready && !is_send && to.is_none() {
            // A key or a place that the peer never gave ends both queue pairs.
            self.fail(number, REMOTE_ACCESS);
            self.fail(peer, FLUSHED);
            return false;
        }
        let Some((to, room)) = to.filter(|_| ready) else { return false };
        let (from, len) = match &request.payload {
            Payload::Inline(bytes) => (bytes.as_ptr().expose_provenance() as u64, bytes.len()),
            Payload::Memory(address, len) => (*address, *len),
        };
        if len > room {
            return false;
        }
        let [from, to] = [from, to].map(|address| address as usize);
        // SAFETY: both are registered memory, or inline bytes, of the checked length. The owners
        // expect accesses of a device at any time.
        unsafe {
            std::ptr::copy(
                std::ptr::with_exposed_provenance::<u8>(from),
                std::ptr::with_exposed_provenance_mut::<u8>(to),
                len,
            );
        }
        let send_cq = pair.send_cq;
        let (recv_cq, receive) = match self.pairs.get_mut(&peer) {
            Some(peer) if is_send => (peer.recv_cq, peer.receives.pop_front()),
            _ => (0, None),
        };
        if let Some((wr_id, ..)) = receive {
            let (opcode, byte_len) = (RECEIVED, len as u32);
            let wc = ffi::Wc { wr_id, opcode, byte_len, qp_num: peer, ..Default::default() };
            self.complete(recv_cq, wc);
        }
        let request = self.pairs.get_mut(&number).and_then(|pair| pair.wire.pop_front());
        if let Some(Request { id, signaled, .. }) = request {
            let opcode = u32::from(!is_send);
            let wc = ffi::Wc { wr_id: id, opcode, qp_num: number, ..Default::default() };
            match acknowledged {
                true if signaled => self.complete(send_cq, wc),
                true => {}
                // The sender only learns of the failure of the queue pair.
                false => {
                    self.complete(send_cq, ffi::Wc { status: RETRIES_EXCEEDED, ..wc });
                    if let Some(pair) = self.pairs.get_mut(&number) {
                        pair.state = ffi::QPS_ERR;
                    }
                }
            }
        }
        true
    }

    fn run(&mut self, number: u32) {
        loop {
            let Some(pair) = self.pairs.get(&number) else { return };
            if pair.state == ffi::QPS_ERR {
                return self.fail(number, FLUSHED);
            }
            if pair.wire.is_empty() {
                return;
            }
            let ends = [self.adapter_of(number), self.adapter_of(pair.peer)];
            let mut adapters = ends.iter().flatten().filter_map(|at| self.adapters.get(*at));
            let is_held = adapters.clone().any(|adapter| adapter.held);
            let peer_is_over =
                self.pairs.get(&pair.peer).is_none_or(|peer| peer.state == ffi::QPS_ERR);
            if adapters.any(|adapter| adapter.down) || peer_is_over {
                return self.fail(number, RETRIES_EXCEEDED);
            }
            if is_held || !self.carry_out(number, true) {
                return;
            }
        }
    }

    fn run_all(&mut self) {
        let all: Vec<u32> = self.pairs.keys().copied().collect();
        all.into_iter().for_each(|number| self.run(number));
    }
}

fn number_of<T>(pointer: *mut T) -> usize {
    pointer.expose_provenance()
}

/// Whether there is an RNIC of the double.
fn is_installed() -> bool {
    INSTALLED.load(Ordering::Acquire)
}

/// Replaces the device file, absent for the double's RNICs.
pub(super) fn node() -> Option<PathBuf> {
    is_installed().then(|| PathBuf::from("/"))
}

/// Whether a path is the double's [`node`] instead of a device file.
pub(super) fn is_node(node: &Path) -> bool {
    node == Path::new("/")
}

/// An Ethernet address for the loopback interface, which has none.
pub(super) fn mac() -> Option<Mac> {
    is_installed().then_some(Mac([2, 0, 0, 0, 0, 1]))
}
