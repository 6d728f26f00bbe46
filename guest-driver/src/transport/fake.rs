//! A fabric in memory, for tests of the rooms above the transport.
//!
//! A [`FakeFabric`] serves the virtqueues of its members, with real slabs, and without quotas. It
//! has no thread: it executes a command or a move within the driver's kick. [`Faults`] makes it
//! break the rules.

use std::collections::{HashMap, VecDeque};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};

use virtio_ism_abi::command::*;
use virtio_ism_abi::config::{CONFIG_LEN, Config, DMB_MAX, DMB_MIN, Features};
use virtio_ism_abi::event::{DmbSignal, EVENT_LEN, EventType, Notice, PEER_DOWN_FAILED, SlabWake};
use virtio_ism_abi::mv::{MoveHeader, Segment, move_flags};
use virtio_ism_abi::signal::{Line, SlabLine};
use virtio_ism_abi::slab::{
    CONTROL_LEN, ControlHeader, FIRST_SLAB_DATA, LINE_ARMED, LINE_PEND, SLAB_LINE, SLAB_PEND,
    line_offset,
};
use virtio_ism_abi::{Gid, REVISION, Status};
use zerocopy::{FromBytes, FromZeros, IntoBytes};

use super::{RunningDevice, Window};
use crate::sys::{EventFd, Reservation, SharedMem, SharedSlice, lock, sealed_memfd};
use crate::virtqueue::{DeviceSide, GuestPool, Health, MAX_PIECES, Notify, Queues, Wiring};

const WINDOW: u64 = 1 << 30;
/// Payload of one move at most: so little that ordinary deliveries need several moves.
const MAX_PAYLOAD: u32 = 4096;
const SLAB_STEP: u64 = 2 << 20;

/// Ways to misbehave.
#[derive(Debug, Default)]
pub(crate) struct Faults {
    /// Replies carry another nonce than the slab.
    pub(crate) wrong_nonce: AtomicBool,
    /// Replies place DMBs this far off.
    pub(crate) displace: AtomicU64,
    /// Every REGISTER in the window is refused.
    pub(crate) no_window: AtomicBool,
    /// This status answers every move and kick.
    pub(crate) move_status: AtomicU16,
    /// For a member that vanishes, the fabric posts PEER_DOWN only.
    pub(crate) no_dmb_gone: AtomicBool,
    /// So many commands are answered with EAGAIN.
    pub(crate) busy: AtomicU64,
}

struct Slab {
    file: OwnedFd,
    view: SharedSlice,
    owner: Gid,
    user: Gid,
    next: u64,
    lines: u16,
    nonce: u64,
}

#[derive(Clone)]
struct Dmb {
    owner: Gid,
    user: Gid,
    index: u32,
    memory: SharedSlice,
    // Slab index, offset in it, line.
    place: Option<(usize, u64, u16)>,
}

#[derive(Default)]
struct State {
    members: HashMap<Gid, Weak<Inner>>,
    slabs: Vec<Slab>,
    dmbs: HashMap<u64, Dmb>,
    serial: u64,
}

/// One CHID.
#[derive(Default)]
pub(crate) struct FakeFabric {
    state: Mutex<State>,
    pub(crate) faults: Faults,
}

/// The number of a queue of a member.
const CONTROL: usize = 0;
const EVENTS: usize = 1;
/// Control queue, event queue, one move queue.
const QUEUES: usize = 3;

/// The device side of a member's virtqueues.
struct Rings {
    rings: [DeviceSide; QUEUES],
    calls: [Arc<EventFd>; QUEUES],
    // Records for which the driver has not provided a buffer yet.
    records: VecDeque<[u8; EVENT_LEN]>,
}

impl Rings {
    /// The next chain that the driver has made available: its head and its readable bytes.
    fn next(&mut self, queue: usize) -> Option<(u16, Vec<u8>)> {
        let ring = &mut self.rings[queue];
        let head = ring.next_or_ask_for_kick()?;
        Some((head, ring.read(head).0))
    }

    fn answer(&mut self, queue: usize, head: u16, reply: &[u8]) {
        self.rings[queue].answer(head, reply);
        if self.rings[queue].interrupts() {
            self.calls[queue].signal();
        }
    }

    fn deliver_records(&mut self) {
        while !self.records.is_empty()
            && let Some((head, _)) = self.next(EVENTS)
            && let Some(record) = self.records.pop_front()
        {
            self.answer(EVENTS, head, &record);
        }
    }
}

struct Inner {
    gid: Gid,
    features: Features,
    pool: Arc<GuestPool>,
    rings: OnceLock<Mutex<Rings>>,
    health: Arc<Health>,
    window: Reservation,
    // Slab (by index) to offset in the window.
    mapped: Mutex<HashMap<usize, u64>>,
    next_offset: AtomicU64,
}

impl Inner {
    fn rings(&self) -> &Mutex<Rings> {
        self.rings.get().expect("a device is not kicked before it has its queues")
    }

    fn post(&self, record: [u8; EVENT_LEN]) {
        let mut rings = lock(self.rings());
        rings.records.push_back(record);
        rings.deliver_records();
    }

    fn map(&self, index: usize, slab: &Slab) -> u64 {
        *lock(&self.mapped).entry(index).or_insert_with(|| {
            let len = slab.view.len() as u64;
            let step = len.next_multiple_of(SLAB_STEP);
            let offset = self.next_offset.fetch_add(step, Ordering::Relaxed);
            self.window.map(offset, len, slab.file.as_fd(), 0).unwrap();
            offset
        })
    }
}

/// A member of a [`FakeFabric`], as its driver and its queues see it.
#[derive(Clone)]
struct ConnectionHandler {
    fabric: Arc<FakeFabric>,
    inner: Arc<Inner>,
}

/// The window of a member. The member leaves the fabric when this is dropped.
struct FakeWindow(ConnectionHandler);

/// The notification of one queue.
struct Kick {
    member: ConnectionHandler,
    queue: usize,
}

impl FakeFabric {
    /// A new member of the fabric: a device that runs.
    pub(crate) fn join(self: &Arc<Self>, features: Features) -> Arc<RunningDevice> {
        let mut state = lock(&self.state);
        state.serial += 1;
        let mut gid = [7; 16];
        gid[..8].copy_from_slice(&state.serial.to_be_bytes());
        let gid = Gid(gid);
        let health = Health::new();
        let pool = GuestPool::new(64 << 20).unwrap();
        let inner = Arc::new(Inner {
            gid,
            features,
            pool: Arc::clone(&pool),
            rings: OnceLock::new(),
            health: Arc::clone(&health),
            window: Reservation::new(WINDOW).unwrap(),
            mapped: Mutex::default(),
            next_offset: AtomicU64::new(0),
        });
        state.members.insert(gid, Arc::downgrade(&inner));
        let mut config = Config::read_from_bytes(&[0; CONFIG_LEN]).unwrap();
        config.revision = REVISION.into();
        config.gid = gid;
        config.chid = 0xff00.into();
        config.num_move_queues = 1.into();
        config.max_dmbs = 4096.into();
        config.dmb_min = DMB_MIN.into();
        config.dmb_max = DMB_MAX.into();
        config.dmb_align = 4096.into();
        config.max_segs = (MAX_PIECES as u16).into();
        config.max_move = MAX_PAYLOAD.into();
        config.window_size = WINDOW.into();
        let member = ConnectionHandler { fabric: Arc::clone(self), inner };
        let queues = member.queues(&pool);
        let window = Box::new(FakeWindow(member));
        Arc::new(RunningDevice::new(config, features, queues, pool, health, window))
    }

    /// The member vanishes; its own driver sees that the device is gone.
    pub(crate) fn kill(&self, gid: Gid) {
        let mut guard = lock(&self.state);
        let state = &mut *guard;
        let Some(gone) = state.members.remove(&gid) else { return };
        let members = &state.members;
        state.dmbs.retain(|token, dmb| {
            if dmb.owner == gid
                && !self.faults.no_dmb_gone.load(Ordering::Relaxed)
                && let Some(user) = members.get(&dmb.user).and_then(Weak::upgrade)
            {
                user.post(notice(EventType::DmbGone, 0, dmb.owner, *token, 0, 0));
            }
            dmb.owner != gid
        });
        for member in state.members.values().filter_map(Weak::upgrade) {
            member.post(notice(EventType::PeerDown, PEER_DOWN_FAILED, gid, 0, 0, 0));
        }
        drop(guard);
        if let Some(gone) = gone.upgrade() {
            gone.health.fail("killed by the test");
        }
    }
}

fn notice(
    kind: EventType,
    subtype: u16,
    gid: Gid,
    token: u64,
    code: u32,
    info: u64,
) -> [u8; EVENT_LEN] {
    let mut record = Notice::new_zeroed();
    record.kind = (kind as u16).into();
    record.subtype = subtype.into();
    (record.gid, record.token, record.code) = (gid, token.into(), code.into());
    record.info = info.into();
    record.as_bytes().try_into().unwrap()
}

impl ConnectionHandler {
    /// Makes the queues of the driver, and keeps their device side.
    fn queues(&self, pool: &Arc<GuestPool>) -> Queues {
        let calls: [Arc<EventFd>; QUEUES] =
            std::array::from_fn(|_| Arc::new(EventFd::new().unwrap()));
        let health = &self.inner.health;
        let mut wirings = calls.iter().enumerate().map(|(queue, call)| {
            health.wake_with(call);
            Wiring {
                kick: Box::new(Kick { member: self.clone(), queue }),
                call: Arc::clone(call),
                health: Arc::clone(health),
                event_idx: true,
            }
        });
        let (control, events) = (wirings.next().unwrap(), wirings.next().unwrap());
        let queues = Queues::new(pool, MAX_PAYLOAD as usize, control, events, wirings).unwrap();
        let rings = queues
            .addresses()
            .iter()
            .map(|addresses| DeviceSide::new(pool.whole().clone(), *addresses))
            .collect::<Vec<_>>();
        let rings = rings.try_into().unwrap_or_else(|_| panic!("a ring for each queue"));
        let rings = Rings { rings, calls: calls.clone(), records: VecDeque::new() };
        assert!(self.inner.rings.set(Mutex::new(rings)).is_ok(), "set once");
        queues.events.start().unwrap();
        queues
    }

    /// Serves a queue that the driver has kicked.
    fn serve(&self, queue: usize) {
        if self.inner.health.is_gone() {
            return;
        }
        if queue == EVENTS {
            return lock(self.inner.rings()).deliver_records();
        }
        loop {
            let next = lock(self.inner.rings()).next(queue);
            let Some((head, request)) = next else { return };
            let reply = match queue {
                CONTROL => self.reply(&request),
                _ => u32::from(self.execute(&request)).to_le_bytes().to_vec(),
            };
            lock(self.inner.rings()).answer(queue, head, &reply);
        }
    }

    fn gid(&self) -> Gid {
        self.inner.gid
    }

    fn register(&self, body: &[u8]) -> Result<RegisterReply, Status> {
        let (request, entries) = RegisterRequest::read_from_prefix(body).unwrap();
        let mut state = lock(&self.fabric.state);
        if !state.members.contains_key(&request.user_gid) {
            return Err(Status::Enodev);
        }
        let len = u64::from(request.len.get());
        let mut reply = RegisterReply::new_zeroed();
        let (memory, place) = if request.backing.get() == BACKING_GUEST {
            let entry = SgEntry::read_from_bytes(entries).unwrap();
            let at = entry.gpa.get() as usize - self.inner.pool.whole().address();
            (self.inner.pool.whole().slice(at, len as usize).unwrap(), None)
        } else {
            if self.fabric.faults.no_window.load(Ordering::Relaxed) {
                return Err(Status::Enotsup);
            }
            let index = state.slab(self.gid(), request.user_gid, len);
            let offset = self.inner.map(index, &state.slabs[index]);
            let user = state.members.get(&request.user_gid);
            let futex = self.both_know(Features::PEER_FUTEX, user);
            let in_slab = self.both_know(Features::SLAB_LINE, user);
            let slab = &mut state.slabs[index];
            let (at, line) = (slab.next, slab.lines);
            slab.next += len;
            slab.lines += 1;
            reply.slab_id = (index as u32).into();
            reply.slab_len = (slab.view.len() as u32).into();
            reply.slab_off = offset.into();
            reply.dmb_off =
                (offset + at + self.fabric.faults.displace.load(Ordering::Relaxed)).into();
            reply.line = line.into();
            reply.bit = (line % 64) as u8;
            reply.nonce = self.nonce(slab).into();
            reply.flags = if futex { register_flags::FUTEX } else { 0 };
            reply.flags |= if in_slab { register_flags::SLAB_LINE } else { 0 };
            (slab.view.slice(at as usize, len as usize).unwrap(), Some((index, at, line)))
        };
        state.serial += 1;
        let token = state.serial << 32 | 0x1234;
        reply.token = token.into();
        let (owner, user, index) = (self.gid(), request.user_gid, request.idx.get());
        state.dmbs.insert(token, Dmb { owner, user, index, memory, place });
        Ok(reply)
    }

    /// Whether this member and the other one have accepted the feature.
    fn both_know(&self, feature: Features, other: Option<&Weak<Inner>>) -> bool {
        let knows = |inner: &Inner| inner.features.contains(feature);
        knows(&self.inner) && other.and_then(Weak::upgrade).is_some_and(|other| knows(&other))
    }

    fn nonce(&self, slab: &Slab) -> u64 {
        slab.nonce ^ u64::from(self.fabric.faults.wrong_nonce.load(Ordering::Relaxed))
    }

    fn attach(&self, token: u64) -> Result<AttachReply, Status> {
        let state = lock(&self.fabric.state);
        let dmb = state.dmbs.get(&token).filter(|dmb| dmb.user == self.gid());
        let dmb = dmb.ok_or(Status::Enoent)?;
        let mut reply = AttachReply::new_zeroed();
        reply.dmb_len = (dmb.memory.len() as u32).into();
        reply.owner_gid = dmb.owner;
        let Some((index, at, line)) = dmb.place else {
            reply.flags = attach_flags::MOVE_ONLY;
            return Ok(reply);
        };
        let slab = &state.slabs[index];
        let offset = self.inner.map(index, slab);
        reply.slab_id = (index as u32).into();
        reply.slab_len = (slab.view.len() as u32).into();
        reply.slab_off = offset.into();
        reply.dmb_off = (offset + at + self.fabric.faults.displace.load(Ordering::Relaxed)).into();
        reply.line = line.into();
        reply.bit = (line % 64) as u8;
        reply.nonce = self.nonce(slab).into();
        let owner = state.members.get(&dmb.owner);
        if self.both_know(Features::PEER_FUTEX, owner) {
            reply.flags |= attach_flags::FUTEX;
        }
        if self.both_know(Features::SLAB_LINE, owner) {
            reply.flags |= attach_flags::SLAB_LINE;
        }
        Ok(reply)
    }

    fn release(&self, id: u32) -> Result<Vec<u8>, Status> {
        let state = lock(&self.fabric.state);
        let id = id as usize;
        let used = |dmb: &Dmb| dmb.place.is_some_and(|(slab, ..)| slab == id);
        if state.dmbs.values().any(used) {
            return Err(Status::Ebusy);
        }
        let Some(offset) = lock(&self.inner.mapped).remove(&id) else {
            return Err(Status::Enoent);
        };
        self.inner.window.unmap(offset, state.slabs[id].view.len() as u64).unwrap();
        Ok(Vec::new())
    }

    /// Executes a MOVE; its status.
    fn execute(&self, request: &[u8]) -> u16 {
        let (header, rest) = MoveHeader::read_from_prefix(request).unwrap();
        let nseg = usize::from(header.nseg.get());
        assert!(nseg <= MAX_PIECES, "{nseg} pieces");
        assert!(header.total.get() <= MAX_PAYLOAD);
        let (segments, mut payload) = rest.split_at(nseg * size_of::<Segment>());
        let pieces: Vec<(u32, &[u8])> = segments
            .chunks(size_of::<Segment>())
            .map(|segment| {
                let segment = Segment::read_from_bytes(segment).unwrap();
                let (bytes, rest) = payload.split_at(segment.len.get() as usize);
                payload = rest;
                (segment.offset.get(), bytes)
            })
            .collect();
        assert!(payload.is_empty(), "the segments are the whole payload");
        let split = |(at, bytes): &(u32, &[u8])| *at < 24 && (*at, bytes.len()) != (8, 16);
        assert!(!pieces.iter().any(split), "the control words are one segment");
        let (token, signal) = (header.token.get(), header.flags.get() & move_flags::SIGNAL != 0);
        let forced = self.fabric.faults.move_status.load(Ordering::Relaxed);
        if forced != 0 {
            return forced;
        }
        let state = lock(&self.fabric.state);
        let dmb = state.dmbs.get(&token).filter(|dmb| dmb.user == self.gid()).cloned();
        let owner = dmb.as_ref().and_then(|dmb| state.members.get(&dmb.owner)?.upgrade());
        let line = dmb.as_ref().and_then(|dmb| dmb.place).map(|(index, _, line)| {
            let view = &state.slabs[index].view;
            let tail = view.len() - CONTROL_LEN;
            let line_memory = view.slice(tail + line_offset(line).unwrap(), 64).unwrap();
            let slab = view.slice(tail + SLAB_LINE, CONTROL_LEN - SLAB_LINE).unwrap();
            (line_memory, slab, line, index)
        });
        drop(state);
        let Some(dmb) = dmb else { return Status::Enoent.code() };
        for (offset, bytes) in &pieces {
            if dmb.memory.copy_in(*offset as usize, bytes).is_err() {
                return Status::Einval.code();
            }
        }
        let Some(owner) = owner.filter(|_| signal) else { return 0 };
        match line {
            Some((slice, slab, line, index)) => {
                let armed = slice.atomic_u32(LINE_ARMED).unwrap();
                let pend = slice.atomic_u64(LINE_PEND).unwrap();
                let line_of_slab = SlabLine {
                    armed: slab.atomic_u32(LINE_ARMED).unwrap(),
                    pend: slab.atomic_u64(SLAB_PEND + 8 * usize::from(line / 64)).unwrap(),
                };
                let line_words = Line { armed, pend };
                let sleepers = line_words.raise_in((line % 64) as u8, line, line_of_slab);
                // The record does not say which line it is for.
                if !sleepers.is_empty() {
                    line_of_slab.raise(line);
                }
                // A pure signal is a kick: its sender has seen that the owner sleeps.
                if !sleepers.is_empty() || pieces.is_empty() {
                    owner.post(SlabWake::new(&[index as u32]).as_bytes().try_into().unwrap());
                }
            }
            None => {
                let mut record = DmbSignal::new_zeroed();
                record.kind = (EventType::DmbSignal as u16).into();
                record.n = 1.into();
                record.entries[0].idx = dmb.index.into();
                record.entries[0].mask = 1.into();
                owner.post(record.as_bytes().try_into().unwrap());
            }
        }
        0
    }
}

impl State {
    /// The slab for the next `len` bytes from `owner` to `user`.
    fn slab(&mut self, owner: Gid, user: Gid, len: u64) -> usize {
        let fits = |slab: &Slab| {
            let data = slab.view.len() as u64 - CONTROL_LEN as u64;
            slab.owner == owner && slab.user == user && slab.next + len <= data && slab.lines < 900
        };
        if let Some(index) = self.slabs.iter().position(fits) {
            return index;
        }
        let data = len.max(FIRST_SLAB_DATA);
        let total = data + CONTROL_LEN as u64;
        let file = sealed_memfd("fake slab", total).unwrap();
        let mem = SharedMem::from_fd(&file, total as usize).unwrap();
        let view = mem.slice(0, total as usize).unwrap();
        let nonce = 0x1111_2222_3333_0000 + 2 * self.slabs.len() as u64;
        let header = ControlHeader { nonce: nonce.into(), version: 1.into(), nlines: 900.into() };
        view.copy_in(data as usize, header.as_bytes()).unwrap();
        self.slabs.push(Slab { file, view, owner, user, next: 0, lines: 0, nonce });
        self.slabs.len() - 1
    }
}

impl ConnectionHandler {
    /// Executes a command; the bytes of its reply.
    fn reply(&self, request: &[u8]) -> Vec<u8> {
        let (header, body) = RequestHeader::read_from_prefix(request).unwrap();
        let answer = |status: Status, body: &[u8]| {
            let mut reply = ReplyHeader::new_zeroed();
            (reply.status, reply.tag) = (status.code().into(), header.tag);
            [reply.as_bytes(), body].concat()
        };
        match self.command(&header, body) {
            Ok(reply) => answer(Status::Ok, &reply),
            Err(status) => answer(status, &[]),
        }
    }

    /// Executes a command; the body of its reply, or the status that refuses it.
    fn command(&self, header: &RequestHeader, body: &[u8]) -> Result<Vec<u8>, Status> {
        let busy = &self.fabric.faults.busy;
        if busy.load(Ordering::Relaxed) > 0 {
            busy.fetch_sub(1, Ordering::Relaxed);
            return Err(Status::Eagain);
        }
        let token = |body: &[u8]| TokenRequest::read_from_bytes(body).unwrap().token.get();
        match Op::from_code(header.op.get()).unwrap() {
            Op::Hello => {
                let mut answer = HelloReply::new_zeroed();
                (answer.gid, answer.session) = (self.gid(), 1.into());
                Ok(answer.as_bytes().to_vec())
            }
            Op::QueryGid => {
                let gid = QueryGidRequest::read_from_bytes(body).unwrap().gid;
                if !lock(&self.fabric.state).members.contains_key(&gid) {
                    return Err(Status::Enodev);
                }
                let flags = peer_flags::REACHABLE | peer_flags::WINDOW;
                let answer = QueryGidReply { flags: flags.into(), reserved: 0.into() };
                Ok(answer.as_bytes().to_vec())
            }
            Op::Register => Ok(self.register(body)?.as_bytes().to_vec()),
            Op::Unregister => {
                let token = token(body);
                let gone = lock(&self.fabric.state).dmbs.remove(&token).ok_or(Status::Enoent)?;
                let user = lock(&self.fabric.state).members.get(&gone.user).and_then(Weak::upgrade);
                if let Some(user) = user {
                    user.post(notice(EventType::DmbGone, 0, gone.owner, token, 0, 0));
                }
                Ok(Vec::new())
            }
            Op::Attach => Ok(self.attach(token(body))?.as_bytes().to_vec()),
            Op::Detach => Ok(Vec::new()),
            Op::ReleaseSlab => {
                self.release(ReleaseSlabRequest::read_from_bytes(body).unwrap().slab_id.get())
            }
            Op::SignalEvent => {
                let request = SignalEventRequest::read_from_bytes(body).unwrap();
                let target =
                    lock(&self.fabric.state).members.get(&request.gid).and_then(Weak::upgrade);
                let (code, info) = (request.code.get(), request.info.get());
                let event = notice(EventType::SwEvent, 1, self.gid(), 0, code, info);
                target.ok_or(Status::Enodev)?.post(event);
                Ok(Vec::new())
            }
            Op::Stats => Ok(StatsReply::new_zeroed().as_bytes().to_vec()),
        }
    }
}

impl Notify for Kick {
    fn notify(&self) {
        self.member.serve(self.queue);
    }
}

impl Window for FakeWindow {
    fn size(&self) -> u64 {
        WINDOW
    }

    fn slice(&self, offset: u64, len: u64) -> Option<SharedSlice> {
        self.0.inner.window.slice(offset, len)
    }

    fn is_cached(&self) -> bool {
        false
    }

    fn outlives_device(&self) -> bool {
        true
    }
}

impl Drop for FakeWindow {
    fn drop(&mut self) {
        self.0.fabric.kill(self.0.gid());
    }
}
