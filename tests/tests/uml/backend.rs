// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A vhost-user backend for one guest: a device of `ism_device`, whose answers break rules of
//! docs/virtio-ism.md when a test says so.

use std::collections::VecDeque;
use std::io;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use ism_device::{Delivery, Device, DeviceConfig, Fabric, FabricConfig, Limits, Outcome};
use ism_sys::lock;
use vhost::vhost_user::Listener;
use vhost::vhost_user::message::{VhostUserProtocolFeatures, VhostUserVirtioFeatures};
use vhost_user_backend::{VhostUserBackend, VhostUserDaemon, VringRwLock, VringT};
use virtio_bindings::bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_ism_abi::command::{Op, RequestHeader};
use virtio_ism_abi::config::{Config, Features};
use virtio_ism_abi::event::{EVENT_LEN, EventType};
use virtio_ism_abi::mv::{MoveHeader, Segment};
use virtio_ism_abi::{Chid, Gid};
use virtio_queue::QueueT;
use vm_memory::{Bytes, GuestAddress, GuestAddressSpace, GuestMemoryAtomic, GuestMemoryMmap};
use vmm_sys_util::epoll::EventSet;
use vmm_sys_util::event::{
    EventConsumer, EventFlag, EventNotifier, new_event_consumer_and_notifier,
};
use zerocopy::{FromBytes, Immutable, IntoBytes};

type Memory = GuestMemoryAtomic<GuestMemoryMmap>;

/// Virtqueues: control, event and one for moves.
const QUEUES: usize = 3;
const EVENT: usize = 1;
const MOVE: usize = 2;

/// The kind of a driver's request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Asked {
    /// A command, with this code.
    Command(Op),
    /// A move.
    Move,
}

/// The answer to a chain carried out by the device.
#[derive(Clone, Debug)]
pub(super) struct Answer {
    /// Written into the chain: a reply, a record, or the status of a move.
    pub(super) bytes: Vec<u8>,
    /// The length in the used ring.
    pub(super) len: u32,
    /// The chain named in the used ring.
    pub(super) id: u32,
    /// Number of used-ring elements for the chain.
    pub(super) times: u16,
    /// How many elements more the index of the used ring counts.
    pub(super) skip: u16,
    /// Delay before the answer.
    pub(super) after: Duration,
    /// A record sent to the driver before the answer.
    pub(super) record: Option<[u8; EVENT_LEN]>,
}

/// Changes answers.
type Rule = Box<dyn FnMut(Asked, &mut Answer) + Send>;
/// A record, and a change of its answer.
type Record = ([u8; EVENT_LEN], fn(&mut Answer));

struct Chain {
    head: u16,
    readable: Vec<u8>,
    /// Addresses and lengths.
    writable: Vec<(GuestAddress, usize)>,
}

struct State {
    device: Arc<Device>,
    config: Config,
    rule: Option<Rule>,
    /// Records waiting for a buffer of the driver.
    records: VecDeque<Record>,
    rings: Vec<VringRwLock>,
    memory: Option<Memory>,
}

/// Events need no notifier: the device delivers records when serving the kick with their cause.
struct ServedByKicks;

impl ism_device::EventNotifier for ServedByKicks {
    fn notify(&self, _: Delivery) {}
}

/// The device, listening for one front end.
pub(super) struct Backend(Arc<Mutex<State>>);

impl Backend {
    /// Listens at a socket, as a device keeping the rules so far.
    #[track_caller]
    pub(super) fn listen(socket: &Path) -> Backend {
        let fabric = Fabric::new(FabricConfig::new(Chid::VIRTIO_FIRST)).unwrap();
        // Without a delay of wakes: after a delay no code would serve the queue.
        let limits = Limits { wakes_per_second: u32::MAX, ..Limits::default() };
        let config = DeviceConfig { limits: Some(limits), ..DeviceConfig::default() };
        let device = fabric.join(config, Arc::new(ServedByKicks)).unwrap();
        device.set_features(offered());
        let state = Arc::new(Mutex::new(State {
            config: config_of(&device),
            device,
            rule: None,
            records: VecDeque::new(),
            rings: Vec::new(),
            memory: None,
        }));
        let mut listener = Listener::new(socket, true).unwrap();
        let served = Served(Arc::clone(&state));
        thread::spawn(move || {
            let memory = GuestMemoryAtomic::new(GuestMemoryMmap::new());
            let mut daemon = VhostUserDaemon::new("ism".into(), Arc::new(served), memory).unwrap();
            if daemon.start(&mut listener).is_ok() {
                let _ = daemon.wait();
            }
        });
        Backend(state)
    }

    /// From now on the configuration is the usual one with this change.
    pub(super) fn configure(&self, change: impl FnOnce(&mut Config)) {
        let mut state = lock(&self.0);
        state.config = config_of(&state.device);
        change(&mut state.config);
    }

    /// From now on answers are changed.
    pub(super) fn spoil(&self, rule: impl FnMut(Asked, &mut Answer) + Send + 'static) {
        lock(&self.0).rule = Some(Box::new(rule));
    }

    /// Breaks no rule any more.
    pub(super) fn behave(&self) {
        lock(&self.0).rule = None;
    }

    /// The GID of the driver's session.
    pub(super) fn gid(&self) -> Gid {
        lock(&self.0).device.info().gid.unwrap_or(Gid::NONE)
    }

    /// Sends a record to the driver, with a change of its used-ring entry.
    pub(super) fn send(&self, record: &(impl IntoBytes + Immutable), change: fn(&mut Answer)) {
        let mut state = lock(&self.0);
        state.records.push_back((record_bytes(record), change));
        flush(&mut state);
    }
}

/// The bytes of a record.
pub(super) fn record_bytes(record: &(impl IntoBytes + Immutable)) -> [u8; EVENT_LEN] {
    record.as_bytes().try_into().expect("a record has 64 bytes")
}

fn offered() -> Features {
    Features::MOVE | Features::SW_EVENT | Features::STATS
}

/// The device's configuration space, with the features offered here.
fn config_of(device: &Device) -> Config {
    let mut config = device.config();
    config.features.set(offered().bits() as u32);
    config
}

/// Carries out a command: its reply.
fn command(device: &Device, request: &[u8]) -> Vec<u8> {
    match device.command(request, usize::MAX) {
        Outcome::Reply(reply) => reply.to_vec(),
        Outcome::Map(_) | Outcome::Unmap(_) => panic!("this device has no window"),
    }
}

/// Carries out a move: its status.
fn carry(device: &Device, request: &[u8]) -> Vec<u8> {
    let (header, _) = MoveHeader::read_from_prefix(request).unwrap();
    let head = size_of::<MoveHeader>() + usize::from(header.nseg.get()) * size_of::<Segment>();
    let (head, mut payload) = request.split_at_checked(head).unwrap_or((request, &[]));
    let len = payload.len() as u64;
    let moved = device.transfer(head, &mut payload, len);
    if let Some(wake) = moved.wake {
        wake.deliver(Delivery::Inline);
    }
    u32::from(moved.status.code()).to_le_bytes().to_vec()
}

/// Takes the next chain of a queue.
fn next_chain(ring: &VringRwLock, memory: &Memory) -> Option<Chain> {
    let mut ring = ring.get_mut();
    if !ring.is_enabled() {
        return None;
    }
    let memory = memory.memory();
    let found = ring.get_queue_mut().pop_descriptor_chain(memory.clone())?;
    let head = found.head_index();
    let mut chain = Chain { head, readable: Vec::new(), writable: Vec::new() };
    for piece in found {
        let len = piece.len() as usize;
        if piece.is_write_only() {
            chain.writable.push((piece.addr(), len));
        } else {
            let mut bytes = vec![0; len];
            memory.read_slice(&mut bytes, piece.addr()).unwrap();
            chain.readable.extend(bytes);
        }
    }
    Some(chain)
}

/// Gives a chain back. Not if the driver has stopped the queue meanwhile: its memory may be others'.
fn give_back(ring: &VringRwLock, memory: &Memory, chain: &Chain, answer: &Answer) {
    let mut ring = ring.get_mut();
    if !ring.is_enabled() {
        return;
    }
    let memory = memory.memory();
    let mut rest = &answer.bytes[..];
    for (addr, len) in &chain.writable {
        let now = rest.len().min(*len);
        memory.write_slice(&rest[..now], *addr).unwrap();
        rest = &rest[now..];
    }
    let queue = ring.get_queue_mut();
    let table = queue.used_ring();
    for _ in 0..answer.times {
        let next = queue.next_used();
        let at = table + 4 + 8 * u64::from(next % queue.size());
        memory.write_obj(answer.id.to_le(), GuestAddress(at)).unwrap();
        memory.write_obj(answer.len.to_le(), GuestAddress(at + 4)).unwrap();
        queue.set_next_used(next.wrapping_add(1));
    }
    let index = queue.next_used().wrapping_add(answer.skip);
    memory.store(index.to_le(), GuestAddress(table + 2), Ordering::Release).unwrap();
    // A full call eventfd is signalled already.
    let _ = ring.signal_used_queue();
}

fn answer(chain: &Chain, bytes: Vec<u8>) -> Answer {
    let len = bytes.len() as u32;
    let id = chain.head.into();
    Answer { bytes, len, id, times: 1, skip: 0, after: Duration::ZERO, record: None }
}

/// Answers a chain as the rule says.
fn finish(state: &mut State, queue: usize, asked: Asked, chain: Chain, bytes: Vec<u8>) {
    let mut answer = answer(&chain, bytes);
    if let Some(rule) = &mut state.rule {
        rule(asked, &mut answer);
    }
    if let Some(record) = answer.record {
        state.records.push_back((record, |_| {}));
        flush(state);
    }
    let (ring, memory) = (state.rings[queue].clone(), state.memory.clone().unwrap());
    if answer.after.is_zero() {
        give_back(&ring, &memory, &chain, &answer);
    } else {
        thread::spawn(move || {
            thread::sleep(answer.after);
            give_back(&ring, &memory, &chain, &answer);
        });
    }
}

/// Writes as many records as there are buffers for. The guest is its own peer, and a software event
/// for the last connection makes AF_SMC end every connection with the peer: such events are dropped
/// here.
fn flush(state: &mut State) {
    let (Some(ring), Some(memory)) = (state.rings.get(EVENT), &state.memory) else { return };
    let of_device = std::iter::from_fn(|| state.device.next_event())
        .filter(|record| !record.starts_with(&(EventType::SwEvent as u16).to_le_bytes()))
        .map(|record| (record, (|_| {}) as fn(&mut Answer)));
    state.records.extend(of_device);
    while !state.records.is_empty() {
        let Some(chain) = next_chain(ring, memory) else { return };
        let Some((record, change)) = state.records.pop_front() else { return };
        let mut answer = answer(&chain, record.to_vec());
        change(&mut answer);
        give_back(ring, memory, &chain, &answer);
    }
}

struct Served(Arc<Mutex<State>>);

impl VhostUserBackend for Served {
    type Bitmap = ();
    type Vring = VringRwLock;

    fn num_queues(&self) -> usize {
        QUEUES
    }

    fn max_queue_size(&self) -> usize {
        256
    }

    fn features(&self) -> u64 {
        1 << VIRTIO_F_VERSION_1
            | VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits()
            | offered().bits()
    }

    fn protocol_features(&self) -> VhostUserProtocolFeatures {
        VhostUserProtocolFeatures::CONFIG
            | VhostUserProtocolFeatures::MQ
            | VhostUserProtocolFeatures::REPLY_ACK
    }

    fn set_event_idx(&self, _enabled: bool) {}

    fn get_config(&self, offset: u32, size: u32) -> Vec<u8> {
        let mut space = lock(&self.0).config.as_bytes().to_vec();
        space.resize((offset + size) as usize, 0);
        space.split_off(offset as usize)
    }

    fn update_memory(&self, memory: Memory) -> io::Result<()> {
        let mut state = lock(&self.0);
        state.device.set_memory(memory.clone());
        state.memory = Some(memory);
        Ok(())
    }

    fn exit_event(&self, _thread: usize) -> Option<(EventConsumer, EventNotifier)> {
        new_event_consumer_and_notifier(EventFlag::NONBLOCK | EventFlag::CLOEXEC).ok()
    }

    fn handle_event(
        &self,
        event: u16,
        _set: EventSet,
        rings: &[VringRwLock],
        _thread: usize,
    ) -> io::Result<()> {
        let mut state = lock(&self.0);
        state.rings = rings.to_vec();
        let queue = usize::from(event);
        let memory = state.memory.clone().unwrap();
        while queue != EVENT
            && let Some(chain) = next_chain(&rings[queue], &memory)
        {
            if queue == MOVE {
                let bytes = carry(&state.device, &chain.readable);
                finish(&mut state, queue, Asked::Move, chain, bytes);
                continue;
            }
            let (head, _) = RequestHeader::read_from_prefix(&chain.readable).unwrap();
            let op = Op::from_code(head.op.get()).unwrap();
            let bytes = command(&state.device, &chain.readable);
            finish(&mut state, queue, Asked::Command(op), chain, bytes);
        }
        flush(&mut state);
        Ok(())
    }
}
