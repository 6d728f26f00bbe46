//! A fabric in memory, for tests of what lies above the transport.
//!
//! It does what a device does as far as the driver can tell, with real slabs, and nothing of how:
//! no queues, no quotas, moves happen at once. `Faults` makes it lie.

use std::collections::{HashMap, VecDeque};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};

use virtio_ism_abi::command::*;
use virtio_ism_abi::config::{CONFIG_LEN, Config, DMB_MAX, DMB_MIN, Features, MAX_MOVE};
use virtio_ism_abi::event::{DmbSignal, EVENT_LEN, EventType, Notice, PEER_DOWN_FAILED, SlabWake};
use virtio_ism_abi::signal::Line;
use virtio_ism_abi::slab::{
    CONTROL_LEN, ControlHeader, FIRST_SLAB_DATA, LINE_ARMED, LINE_PEND, line_offset,
};
use virtio_ism_abi::{Gid, REVISION, Status, Token};
use zerocopy::{FromBytes, FromZeros, IntoBytes};

use super::health::Health;
use super::{GuestMem, GuestPool, MAX_PIECES, MovePath, Transport, TransportError};
use crate::sys::{EventFd, Reservation, SharedMem, SharedSlice, lock, sealed_memfd};

const WINDOW: u64 = 1 << 30;
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
    /// A member that vanishes is told of by PEER_DOWN only.
    pub(crate) no_dmb_gone: AtomicBool,
    /// So many commands are answered with EAGAIN.
    pub(crate) busy: AtomicU64,
    /// Kicks and signals so far.
    pub(crate) kicks: AtomicU64,
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

struct Inner {
    gid: Gid,
    events: Mutex<VecDeque<[u8; EVENT_LEN]>>,
    armed: AtomicBool,
    interrupt: Arc<EventFd>,
    health: Arc<Health>,
    window: Reservation,
    // Slab (by index) to offset in the window.
    mapped: Mutex<HashMap<usize, u64>>,
    next_offset: AtomicU64,
}

impl Inner {
    fn post(&self, record: [u8; EVENT_LEN]) {
        lock(&self.events).push_back(record);
        if self.armed.swap(false, Ordering::SeqCst) {
            self.interrupt.signal();
        }
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

/// A member of a [`FakeFabric`].
pub(crate) struct FakeTransport {
    fabric: Arc<FakeFabric>,
    inner: Arc<Inner>,
    config: Config,
    features: Features,
    pool: Arc<GuestPool>,
}

impl FakeFabric {
    pub(crate) fn join(self: &Arc<Self>, features: Features) -> Arc<FakeTransport> {
        let mut state = lock(&self.state);
        state.serial += 1;
        let mut gid = [7; 16];
        gid[..8].copy_from_slice(&state.serial.to_be_bytes());
        let gid = Gid(gid);
        let health = Health::new();
        let interrupt = Arc::new(EventFd::new().unwrap());
        health.wake_with(&interrupt);
        let inner = Arc::new(Inner {
            gid,
            events: Mutex::default(),
            armed: AtomicBool::new(false),
            interrupt,
            health,
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
        config.max_move = MAX_MOVE.into();
        config.window_size = WINDOW.into();
        let pool = GuestPool::new(64 << 20).unwrap();
        Arc::new(FakeTransport { fabric: Arc::clone(self), inner, config, features, pool })
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

impl FakeTransport {
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
            let at = entry.gpa.get() as usize - self.pool.whole().address();
            (self.pool.whole().slice(at, len as usize).unwrap(), None)
        } else {
            if self.fabric.faults.no_window.load(Ordering::Relaxed) {
                return Err(Status::Enotsup);
            }
            let index = state.slab(self.gid(), request.user_gid, len);
            let offset = self.inner.map(index, &state.slabs[index]);
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
            (slab.view.slice(at as usize, len as usize).unwrap(), Some((index, at, line)))
        };
        state.serial += 1;
        let token = state.serial << 32 | 0x1234;
        reply.token = token.into();
        let (owner, user, index) = (self.gid(), request.user_gid, request.idx.get());
        state.dmbs.insert(token, Dmb { owner, user, index, memory, place });
        Ok(reply)
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
        Ok(reply)
    }

    fn release(&self, id: u32) -> Status {
        let state = lock(&self.fabric.state);
        let id = id as usize;
        let used = |dmb: &Dmb| dmb.place.is_some_and(|(slab, ..)| slab == id);
        if state.dmbs.values().any(used) {
            return Status::Ebusy;
        }
        let Some(offset) = lock(&self.inner.mapped).remove(&id) else { return Status::Enoent };
        self.inner.window.unmap(offset, state.slabs[id].view.len() as u64).unwrap();
        Status::Ok
    }

    /// Executes a move or kick; its status.
    fn execute(&self, token: u64, pieces: &[(u32, &[u8])], signal: bool) -> u16 {
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
            (view.slice(tail + line_offset(line).unwrap(), 64).unwrap(), line, index)
        });
        drop(state);
        let Some(dmb) = dmb else { return Status::Enoent.code() };
        for (offset, bytes) in pieces {
            if dmb.memory.copy_in(*offset as usize, bytes).is_err() {
                return Status::Einval.code();
            }
        }
        let Some(owner) = owner.filter(|_| signal) else { return 0 };
        self.fabric.faults.kicks.fetch_add(1, Ordering::Relaxed);
        match line {
            Some((slice, line, index)) => {
                let armed = slice.atomic_u32(LINE_ARMED).unwrap();
                let pend = slice.atomic_u64(LINE_PEND).unwrap();
                let sleeps = Line { armed, pend }.raise((line % 64) as u8);
                // A pure signal is a kick: its sender has seen that the owner sleeps.
                if sleeps || pieces.is_empty() {
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

impl Transport for FakeTransport {
    fn config(&self) -> &Config {
        &self.config
    }

    fn features(&self) -> Features {
        self.features
    }

    fn control(&self, op: Op, body: &[u8], reply: &mut [u8]) -> Result<u16, TransportError> {
        if self.is_gone() {
            return Err(TransportError::Gone);
        }
        let busy = &self.fabric.faults.busy;
        if busy.load(Ordering::Relaxed) > 0 {
            busy.fetch_sub(1, Ordering::Relaxed);
            return Ok(Status::Eagain.code());
        }
        let token = |body: &[u8]| TokenRequest::read_from_bytes(body).unwrap().token.get();
        let status = match op {
            Op::Hello => {
                let mut answer = HelloReply::new_zeroed();
                (answer.gid, answer.session) = (self.gid(), 1.into());
                reply.copy_from_slice(answer.as_bytes());
                Status::Ok
            }
            Op::QueryGid => {
                let asked = QueryGidRequest::read_from_bytes(body).unwrap().gid;
                let known = lock(&self.fabric.state).members.contains_key(&asked);
                let flags = if known { peer_flags::REACHABLE | peer_flags::WINDOW } else { 0 };
                let answer = QueryGidReply { flags: flags.into(), reserved: 0.into() };
                reply.copy_from_slice(answer.as_bytes());
                if known { Status::Ok } else { Status::Enodev }
            }
            Op::Register => match self.register(body) {
                Ok(answer) => {
                    reply.copy_from_slice(answer.as_bytes());
                    Status::Ok
                }
                Err(status) => status,
            },
            Op::Unregister => {
                let gone = lock(&self.fabric.state).dmbs.remove(&token(body));
                if let Some(dmb) = &gone
                    && let Some(user) =
                        lock(&self.fabric.state).members.get(&dmb.user).and_then(Weak::upgrade)
                {
                    user.post(notice(EventType::DmbGone, 0, dmb.owner, token(body), 0, 0));
                }
                if gone.is_some() { Status::Ok } else { Status::Enoent }
            }
            Op::Attach => match self.attach(token(body)) {
                Ok(answer) => {
                    reply.copy_from_slice(answer.as_bytes());
                    Status::Ok
                }
                Err(status) => status,
            },
            Op::Detach => Status::Ok,
            Op::ReleaseSlab => {
                self.release(ReleaseSlabRequest::read_from_bytes(body).unwrap().slab_id.get())
            }
            Op::SignalEvent => {
                let request = SignalEventRequest::read_from_bytes(body).unwrap();
                let target =
                    lock(&self.fabric.state).members.get(&request.gid).and_then(Weak::upgrade);
                let (code, info) = (request.code.get(), request.info.get());
                let event = notice(EventType::SwEvent, 1, self.gid(), 0, code, info);
                target.map_or(Status::Enodev, |target| {
                    target.post(event);
                    Status::Ok
                })
            }
            Op::Stats => Status::Ok,
        };
        Ok(status.code())
    }

    fn try_event(&self) -> Result<Option<[u8; EVENT_LEN]>, TransportError> {
        match lock(&self.inner.events).pop_front() {
            None if self.is_gone() => Err(TransportError::Gone),
            record => Ok(record),
        }
    }

    fn event_fd(&self) -> BorrowedFd<'_> {
        self.inner.interrupt.as_fd()
    }

    fn clear_event_fd(&self) {
        self.inner.health.clear(&self.inner.interrupt);
    }

    fn arm_events(&self) -> bool {
        self.inner.armed.store(true, Ordering::SeqCst);
        lock(&self.inner.events).is_empty() && !self.is_gone()
    }

    fn suppress_events(&self) {
        self.inner.armed.store(false, Ordering::SeqCst);
    }

    fn open_path(&self, token: Token) -> Result<Arc<MovePath>, TransportError> {
        Ok(Arc::new(MovePath::new(token, 0, 0)))
    }

    fn close_path(&self, _: &MovePath) {}

    fn max_payload(&self) -> usize {
        4096
    }

    fn post_move(
        &self,
        path: &MovePath,
        pieces: &[(u32, &[u8])],
        signal: bool,
    ) -> Result<(), TransportError> {
        if self.is_gone() {
            return Err(TransportError::Gone);
        }
        assert!(pieces.len() <= MAX_PIECES, "{} pieces", pieces.len());
        assert!(pieces.iter().map(|(_, bytes)| bytes.len()).sum::<usize>() <= self.max_payload());
        let split = |(at, bytes): &(u32, &[u8])| *at < 24 && (*at, bytes.len()) != (8, 16);
        assert!(!pieces.iter().any(split), "the control words are one segment");
        match self.execute(path.token().0, pieces, signal) {
            0 => {}
            code => path.note(code),
        }
        Ok(())
    }

    fn post_kick(&self, path: &MovePath) -> Result<(), TransportError> {
        self.post_move(path, &[], true)
    }

    fn reap(&self) {}

    fn window_size(&self) -> u64 {
        WINDOW
    }

    fn window_slice(&self, offset: u64, len: u64) -> Option<SharedSlice> {
        self.inner.window.slice(offset, len)
    }

    fn window_is_cached(&self) -> bool {
        false
    }

    fn alloc_guest(&self, len: usize) -> Result<GuestMem, TransportError> {
        self.pool.alloc(len)
    }

    fn is_gone(&self) -> bool {
        self.inner.health.is_gone()
    }

    fn memory_outlives_device(&self) -> bool {
        true
    }
}

impl Drop for FakeTransport {
    fn drop(&mut self) {
        self.fabric.kill(self.gid());
    }
}
