// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A vhost-user backend that is a small virtio-ism device for one guest, and breaks rules of
//! docs/virtio-ism.md when a test says so.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use ism_sys::lock;
use vhost::vhost_user::Listener;
use vhost::vhost_user::message::{VhostUserProtocolFeatures, VhostUserVirtioFeatures};
use vhost_user_backend::{VhostUserBackend, VhostUserDaemon, VringRwLock, VringT};
use virtio_bindings::bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_ism_abi::command::{
    HelloReply, Op, QueryGidReply, RegisterReply, RegisterRequest, ReplyHeader, RequestHeader,
    SgEntry, StatsReply, TokenRequest, peer_flags,
};
use virtio_ism_abi::config::{Config, DMB_MAX, DMB_MIN, Features, MAX_MOVE};
use virtio_ism_abi::event::{DmbSignal, DmbSignalEntry, EVENT_LEN, EventType};
use virtio_ism_abi::mv::{MoveHeader, Segment, move_flags};
use virtio_ism_abi::{Chid, Gid, REVISION, Status};
use virtio_queue::QueueT;
use vm_memory::{Bytes, GuestAddress, GuestAddressSpace, GuestMemoryAtomic, GuestMemoryMmap};
use vmm_sys_util::epoll::EventSet;
use vmm_sys_util::event::{
    EventConsumer, EventFlag, EventNotifier, new_event_consumer_and_notifier,
};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes};

type Memory = GuestMemoryAtomic<GuestMemoryMmap>;

/// Virtqueues: control, event and one for moves.
const QUEUES: usize = 3;
const EVENT: usize = 1;
const MOVE: usize = 2;

/// What the driver has asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Asked {
    /// A command, with this code.
    Command(Op),
    /// A move.
    Move,
}

/// What becomes of a chain that the device has carried out.
#[derive(Clone, Debug)]
pub(super) struct Answer {
    /// Written into the chain: a reply, a record, or the status of a move.
    pub(super) bytes: Vec<u8>,
    /// The length that the used ring names.
    pub(super) len: u32,
    /// The chain that the used ring names.
    pub(super) id: u32,
    /// How many elements of the used ring name it.
    pub(super) times: u16,
    /// How many elements more the index of the used ring counts.
    pub(super) skip: u16,
    /// When the driver gets it.
    pub(super) after: Duration,
    /// A record that the driver gets before it.
    pub(super) record: Option<[u8; EVENT_LEN]>,
}

/// Changes answers.
type Rule = Box<dyn FnMut(Asked, &mut Answer) + Send>;
/// A record, and what changes its answer.
type Record = ([u8; EVENT_LEN], fn(&mut Answer));

struct Dmb {
    gpa: u64,
    len: u32,
    idx: u32,
}

struct Chain {
    head: u16,
    readable: Vec<u8>,
    /// Addresses and lengths.
    writable: Vec<(GuestAddress, usize)>,
}

struct State {
    config: Config,
    rule: Option<Rule>,
    gid: Gid,
    sessions: u32,
    tokens: u64,
    dmbs: HashMap<u64, Dmb>,
    records: VecDeque<Record>,
    rings: Vec<VringRwLock>,
    memory: Option<Memory>,
}

/// The device, listening for one front end.
pub(super) struct Backend(Arc<Mutex<State>>);

impl Backend {
    /// Listens at a socket, as a device that breaks no rule yet.
    #[track_caller]
    pub(super) fn listen(socket: &Path) -> Backend {
        let state = Arc::new(Mutex::new(State {
            config: config(),
            rule: None,
            gid: Gid::NONE,
            sessions: 0,
            tokens: 0,
            dmbs: HashMap::new(),
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
        let mut config = config();
        change(&mut config);
        lock(&self.0).config = config;
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
        lock(&self.0).gid
    }

    /// Sends a record to the driver, with a change of what the used ring says of it.
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

fn features() -> u64 {
    (Features::MOVE | Features::SW_EVENT | Features::STATS).bits()
}

fn config() -> Config {
    let mut config = Config::new_zeroed();
    config.revision.set(REVISION);
    config.features.set(features() as u32);
    config.gid = Gid([1; 16]);
    config.chid.set(Chid::VIRTIO_FIRST.0);
    config.num_move_queues.set(1);
    config.max_dmbs.set(1024);
    config.dmb_min.set(DMB_MIN);
    config.dmb_max.set(DMB_MAX);
    config.dmb_align.set(4096);
    config.max_sg.set(16);
    config.max_segs.set(16);
    config.max_move.set(MAX_MOVE);
    config.max_peers.set(16);
    config
}

impl State {
    /// Carries out a command: its reply.
    fn command(&mut self, op: Op, request: &[u8]) -> (Status, Vec<u8>) {
        let done = |body: &[u8]| (Status::Ok, body.to_vec());
        match op {
            Op::Hello => {
                self.sessions += 1;
                self.dmbs.clear();
                self.gid = Gid([self.sessions as u8; 16]);
                let session = self.sessions.into();
                done(HelloReply { gid: self.gid, session, ..Default::default() }.as_bytes())
            }
            Op::QueryGid => {
                let flags = peer_flags::REACHABLE.into();
                done(QueryGidReply { flags, ..Default::default() }.as_bytes())
            }
            Op::Register => {
                let (head, rest) = RegisterRequest::read_from_prefix(request).unwrap();
                let (piece, _) = SgEntry::read_from_prefix(rest).unwrap();
                self.tokens += 1;
                let (len, idx) = (head.len.get(), head.idx.get());
                self.dmbs.insert(self.tokens, Dmb { gpa: piece.gpa.get(), len, idx });
                let token = self.tokens.into();
                done(RegisterReply { token, ..Default::default() }.as_bytes())
            }
            Op::Unregister => {
                let (named, _) = TokenRequest::read_from_prefix(request).unwrap();
                match self.dmbs.remove(&named.token.get()) {
                    Some(_) => done(&[]),
                    None => (Status::Enoent, Vec::new()),
                }
            }
            Op::SignalEvent => done(&[]),
            Op::Stats => done(StatsReply::default().as_bytes()),
            _ => (Status::Einval, Vec::new()),
        }
    }

    /// Carries out a move: its status.
    fn carry(&mut self, request: &[u8]) -> Status {
        let (head, mut rest) = MoveHeader::read_from_prefix(request).unwrap();
        let Some(dmb) = self.dmbs.get(&head.token.get()) else { return Status::Enoent };
        if head.nseg.get() > 0 {
            let (segment, payload) = Segment::read_from_prefix(rest).unwrap();
            rest = payload;
            let (offset, len) = (segment.offset.get(), segment.len.get() as usize);
            if u64::from(offset) + len as u64 > u64::from(dmb.len) || rest.len() != len {
                return Status::Einval;
            }
            let at = GuestAddress(dmb.gpa + u64::from(offset));
            let memory = self.memory.as_ref().unwrap().memory();
            memory.write_slice(rest, at).unwrap();
        }
        if head.flags.get() & move_flags::SIGNAL != 0 {
            let mut record = DmbSignal::default();
            record.kind.set(EventType::DmbSignal as u16);
            record.n.set(1);
            record.entries[0] =
                DmbSignalEntry { idx: dmb.idx.into(), mask: head.mask, ..Default::default() };
            self.records.push_back((record_bytes(&record), |_| {}));
        }
        Status::Ok
    }
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
    // A call that is full has been signalled.
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

/// Writes as many records as there are buffers for.
fn flush(state: &mut State) {
    let (Some(ring), Some(memory)) = (state.rings.get(EVENT), &state.memory) else { return };
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
        1 << VIRTIO_F_VERSION_1 | VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits() | features()
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
        lock(&self.0).memory = Some(memory);
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
                let status = state.carry(&chain.readable);
                let bytes = u32::from(status.code()).to_le_bytes().to_vec();
                finish(&mut state, queue, Asked::Move, chain, bytes);
                continue;
            }
            let (head, body) = RequestHeader::read_from_prefix(&chain.readable).unwrap();
            let op = Op::ALL.into_iter().find(|op| *op as u16 == head.op.get()).unwrap();
            let (status, body) = state.command(op, body);
            let reply =
                ReplyHeader { status: status.code().into(), tag: head.tag, ..Default::default() };
            let bytes = [reply.as_bytes(), &body].concat();
            finish(&mut state, queue, Asked::Command(op), chain, bytes);
        }
        flush(&mut state);
        Ok(())
    }
}
