// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A front end with a driver: QEMU and a guest in a few calls, on raw rings.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{Ordering, fence};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use super::doorbells::HandedDoorbell;
pub(crate) use super::place::{Place, TIMEOUT, connected, eventually, memfd, until_listening};
use vhost::vhost_user::message::{
    VhostUserConfigFlags, VhostUserHeaderFlag, VhostUserProtocolFeatures as Protocol,
};
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
use virtio_ism_abi::command::{
    AttachReply, BACKING_GUEST, HelloReply, HelloRequest, Op, RegisterReply, RegisterRequest,
    ReplyHeader, RequestHeader, SgEntry, TokenRequest,
};
use virtio_ism_abi::config::Features;
use virtio_ism_abi::event::{EVENT_LEN, Event};
use virtio_ism_abi::mv::{MoveHeader, Segment, move_flags};
use virtio_ism_abi::{Gid, Status};
use vm_memory::{Bytes, FileOffset, GuestAddress, GuestMemoryMmap};
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};
use vmm_sys_util::eventfd::EventFd;
use vmm_sys_util::sock_ctrl_msg::ScmSocket;
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout};

/// How long to wait for an event expected not to come.
pub(crate) const QUIET: Duration = Duration::from_millis(100);

pub(crate) const CONTROL: usize = 0;
pub(crate) const EVENTS: usize = 1;
pub(crate) const MOVES: usize = 2;
pub(crate) const QUEUES: usize = 4;
pub(crate) const QUEUE_SIZE: u16 = 64;
pub(crate) const VERSION_1: u64 = 1 << 32;
pub(crate) const EVENT_IDX: u64 = 1 << 29;
pub(crate) const INDIRECT: u64 = 1 << 28;
pub(crate) const PROTOCOL_FEATURES: u64 = 1 << 30;

/// Requests of the back end, and a flag of message headers.
const SHMEM_MAP: u32 = 9;
const SHMEM_UNMAP: u32 = 10;
const NEED_REPLY: u32 = 8;

/// Guest memory begins here, so address 0 is invalid.
pub(crate) const BASE: u64 = 0x10_0000;
pub(crate) const MEMORY: u64 = 4 << 20;
/// Ring `q` takes one of these from BASE.
const RING: u64 = 0x4000;
/// Addresses from here on belong to buffers.
const BUFFERS: u64 = BASE + 0x4_0000;
/// A DMB in guest memory lies here, beyond most tests' buffers.
pub(crate) const DMB_AT: u64 = BASE + (2 << 20);

/// The front end's reaction to SHMEM requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Maps {
    /// Has no shared memory.
    None,
    /// Maps and acknowledges.
    Yes,
    /// Refuses.
    Refuse,
    /// Does not answer.
    Silent,
    /// Maps, and refuses doorbells.
    RefuseDoorbells,
    /// Maps, and does not answer a doorbell.
    SilentForDoorbells,
    /// Maps, and acknowledges at a call of [`FrontEnd::acknowledge`].
    Late,
}

/// A request of the back end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ShmRequest {
    pub(crate) map: bool,
    pub(crate) fd_offset: u64,
    pub(crate) window_offset: u64,
    pub(crate) len: u64,
}

#[derive(Default)]
struct Window {
    doorbells: Mutex<Vec<HandedDoorbell>>,
    /// Acknowledgements allowed to be sent.
    allowed: Mutex<usize>,
    may_answer: Condvar,
    requests: Mutex<Vec<(ShmRequest, Option<Arc<File>>)>>,
    changed: Condvar,
}

pub(crate) struct Queue {
    pub(crate) kick: EventFd,
    pub(crate) call: EventFd,
    epoll: Epoll,
    pub(crate) desc: u64,
    pub(crate) avail: u64,
    pub(crate) used: u64,
    next_desc: u16,
    next_avail: u16,
    last_used: u16,
}

impl Queue {
    fn new(index: u64) -> Queue {
        let call = EventFd::new(0).unwrap();
        let epoll = Epoll::new().unwrap();
        let readable = EpollEvent::new(EventSet::IN, 0);
        epoll.ctl(ControlOperation::Add, call.as_raw_fd(), readable).unwrap();
        let base = BASE + index * RING;
        Queue {
            kick: EventFd::new(libc::EFD_NONBLOCK).unwrap(),
            call,
            epoll,
            desc: base,
            avail: base + 0x1000,
            used: base + 0x2000,
            next_desc: 0,
            next_avail: 0,
            last_used: 0,
        }
    }
}

/// Parameters of a connection.
pub(crate) struct Wish {
    pub(crate) maps: Maps,
    pub(crate) features: u64,
    pub(crate) sealed: bool,
}

impl Default for Wish {
    fn default() -> Self {
        let features = VERSION_1 | EVENT_IDX | INDIRECT | PROTOCOL_FEATURES;
        // Like a VMM: takes no doorbells.
        let ism = Features::all() - Features::DOORBELL;
        Wish { maps: Maps::Yes, features: features | ism.bits(), sealed: true }
    }
}

pub(crate) struct FrontEnd {
    pub(crate) vhost: Frontend,
    /// The connection, for messages the library refuses to send.
    pub(crate) socket: UnixStream,
    pub(crate) memory: GuestMemoryMmap,
    pub(crate) file: File,
    pub(crate) queues: Vec<Queue>,
    /// The front end's side of the channel for requests; the back end has the other side.
    pub(crate) channel: Option<UnixStream>,
    window: Arc<Window>,
    next_buffer: u64,
    next_tag: u32,
}

impl FrontEnd {
    /// Connects, negotiates, starts the queues, feeds the event queue. No HELLO.
    pub(crate) fn connect(path: &Path) -> FrontEnd {
        Self::connect_with(path, Wish::default())
    }

    pub(crate) fn connect_with(path: &Path, wish: Wish) -> FrontEnd {
        let mut front_end = Self::negotiate(path, &wish);
        front_end.set_memory();
        for queue in 0..QUEUES {
            front_end.start_queue(queue, 0);
        }
        front_end.feed_events(32);
        front_end
    }

    /// Connects, negotiates, says HELLO.
    pub(crate) fn greet(path: &Path) -> (FrontEnd, Gid) {
        let mut front_end = Self::connect(path);
        let gid = front_end.hello();
        (front_end, gid)
    }

    /// Connects and negotiates.
    pub(crate) fn negotiate(path: &Path, wish: &Wish) -> FrontEnd {
        Self::negotiate_on(connected(path), wish)
    }

    pub(crate) fn negotiate_on(socket: UnixStream, wish: &Wish) -> FrontEnd {
        let mut vhost = Frontend::from_stream(socket.try_clone().unwrap(), QUEUES as u64);
        vhost.set_owner().unwrap();
        let offered = vhost.get_features().unwrap();
        assert_eq!(wish.features & !offered, 0, "{offered:#x}");
        let protocol = vhost.get_protocol_features().unwrap();
        let mut wanted = Protocol::CONFIG | Protocol::MQ | Protocol::REPLY_ACK;
        wanted |= Protocol::RESET_DEVICE;
        if wish.maps != Maps::None {
            wanted |= Protocol::BACKEND_REQ | Protocol::SHMEM;
        }
        assert!(protocol.contains(wanted), "{protocol:?}");
        vhost.set_protocol_features(wanted).unwrap();
        vhost.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
        assert_eq!(vhost.get_queue_num().unwrap(), QUEUES as u64);
        vhost.set_features(wish.features).unwrap();

        let window = Arc::new(Window::default());
        let mut channel = None;
        if wish.maps != Maps::None {
            let config = vhost.get_shmem_config().unwrap();
            assert_eq!({ config.nregions }, 1);
            let (ours, theirs) = UnixStream::pair().unwrap();
            vhost.set_backend_request_fd(&theirs).unwrap();
            let (stream, window, maps) = (ours.try_clone().unwrap(), window.clone(), wish.maps);
            std::thread::spawn(move || serve_channel(stream, &window, maps));
            channel = Some(ours);
        }
        FrontEnd { channel, window, ..Self::on_rings(vhost, socket, wish.sealed) }
    }

    /// Memory and rings of a driver, still unknown to the back end.
    pub(crate) fn on_rings(vhost: Frontend, socket: UnixStream, is_sealed: bool) -> FrontEnd {
        let file = memfd(MEMORY, is_sealed);
        let backing = FileOffset::new(file.try_clone().unwrap(), 0);
        let ranges = [(GuestAddress(BASE), MEMORY as usize, Some(backing))];
        let memory = GuestMemoryMmap::from_ranges_with_files(ranges).unwrap();
        let queues = (0..QUEUES as u64).map(Queue::new).collect();
        let (next_buffer, next_tag, channel, window) = (BUFFERS, 100, None, Arc::default());
        FrontEnd { vhost, socket, memory, file, queues, channel, window, next_buffer, next_tag }
    }

    pub(crate) fn set_memory(&mut self) {
        self.try_set_memory().unwrap();
    }

    pub(crate) fn try_set_memory(&mut self) -> Result<(), vhost::Error> {
        self.try_set_memory_of(MEMORY)
    }

    /// Like [`Self::set_memory`], with another length.
    pub(crate) fn try_set_memory_of(&mut self, len: u64) -> Result<(), vhost::Error> {
        let region = VhostUserMemoryRegionInfo {
            guest_phys_addr: BASE,
            memory_size: len,
            userspace_addr: BASE,
            mmap_offset: 0,
            mmap_handle: self.file.as_raw_fd(),
        };
        self.vhost.set_mem_table(&[region]).map(|_| ())
    }

    /// Sets the addresses of a ring; the daemon reads the ring.
    pub(crate) fn try_set_addresses(&mut self, index: usize) -> Result<(), vhost::Error> {
        let queue = &self.queues[index];
        self.vhost.set_vring_num(index, QUEUE_SIZE)?;
        self.vhost.set_vring_base(index, 0)?;
        self.vhost.set_vring_addr(index, &addresses(queue))
    }

    pub(crate) fn start_queue(&mut self, index: usize, base: u16) {
        let queue = &self.queues[index];
        self.vhost.set_vring_num(index, QUEUE_SIZE).unwrap();
        self.vhost.set_vring_base(index, base).unwrap();
        self.vhost.set_vring_addr(index, &addresses(queue)).unwrap();
        self.vhost.set_vring_call(index, &queue.call).unwrap();
        self.vhost.set_vring_kick(index, &queue.kick).unwrap();
        self.vhost.set_vring_enable(index, true).unwrap();
    }

    /// Gives a running queue another kick descriptor; returns the old one.
    pub(crate) fn replace_kick(&mut self, queue: usize) -> EventFd {
        let kick = EventFd::new(libc::EFD_NONBLOCK).unwrap();
        self.vhost.set_vring_kick(queue, &kick).unwrap();
        std::mem::replace(&mut self.queues[queue].kick, kick)
    }

    /// Pauses like a VMM. Returns the values of GET_VRING_BASE.
    pub(crate) fn pause(&mut self) -> Vec<u16> {
        for queue in 0..QUEUES {
            self.vhost.set_vring_enable(queue, false).unwrap();
        }
        (0..QUEUES).map(|q| self.vhost.get_vring_base(q).unwrap() as u16).collect()
    }

    pub(crate) fn resume(&mut self, bases: &[u16]) {
        for (queue, base) in bases.iter().enumerate() {
            self.start_queue(queue, *base);
        }
    }

    /// Restarts like a guest: empty rings.
    pub(crate) fn restart(&mut self) {
        self.clear_rings();
        (0..QUEUES).for_each(|queue| self.start_queue(queue, 0));
        self.feed_events(32);
    }

    pub(crate) fn clear_rings(&mut self) {
        self.memory.write_slice(&[0; (RING * QUEUES as u64) as usize], GuestAddress(BASE)).unwrap();
        for q in &mut self.queues {
            (q.next_avail, q.last_used, q.next_desc) = (0, 0, 0);
        }
    }

    /// Allocates `len` bytes of guest memory.
    pub(crate) fn buffer(&mut self, len: usize) -> u64 {
        let at = self.next_buffer;
        self.next_buffer += (len as u64).next_multiple_of(64);
        if self.next_buffer > BASE + MEMORY {
            self.next_buffer = BUFFERS + (len as u64).next_multiple_of(64);
            return BUFFERS;
        }
        at
    }

    pub(crate) fn write_buffer(&mut self, bytes: &[u8]) -> u64 {
        let at = self.buffer(bytes.len());
        self.memory.write_slice(bytes, GuestAddress(at)).unwrap();
        at
    }

    pub(crate) fn read_buffer(&self, at: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.memory.read_slice(&mut bytes, GuestAddress(at)).unwrap();
        bytes
    }

    pub(crate) fn descriptor(
        &self,
        queue: usize,
        slot: u16,
        addr: u64,
        len: u32,
        flags: u16,
        next: u16,
    ) {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&addr.to_le_bytes());
        bytes[8..12].copy_from_slice(&len.to_le_bytes());
        bytes[12..14].copy_from_slice(&flags.to_le_bytes());
        bytes[14..].copy_from_slice(&next.to_le_bytes());
        let at = self.queues[queue].desc + 16 * u64::from(slot);
        self.memory.write_slice(&bytes, GuestAddress(at)).unwrap();
    }

    /// Makes a chain available without a kick.
    pub(crate) fn offer(&mut self, queue: usize, head: u16) {
        let q = &mut self.queues[queue];
        let slot = q.avail + 4 + 2 * u64::from(q.next_avail % QUEUE_SIZE);
        q.next_avail = q.next_avail.wrapping_add(1);
        self.memory.write_obj(head, GuestAddress(slot)).unwrap();
        let at = GuestAddress(q.avail + 2);
        self.memory.store(q.next_avail, at, Ordering::Release).unwrap();
        fence(Ordering::SeqCst);
    }

    /// A chain of pieces `(address, length, device writes)`. Returns its head.
    pub(crate) fn add(&mut self, queue: usize, pieces: &[(u64, u32, bool)]) -> u16 {
        let head = self.queues[queue].next_desc;
        for (i, (addr, len, write)) in pieces.iter().enumerate() {
            let slot = (head + i as u16) % QUEUE_SIZE;
            let last = i + 1 == pieces.len();
            let flags = u16::from(!last) | if *write { 2 } else { 0 };
            self.descriptor(queue, slot, *addr, *len, flags, (slot + 1) % QUEUE_SIZE);
        }
        self.queues[queue].next_desc = (head + pieces.len() as u16) % QUEUE_SIZE;
        self.offer(queue, head);
        head
    }

    pub(crate) fn kick(&self, queue: usize) {
        self.queues[queue].kick.write(1).unwrap();
    }

    /// The next used element: `(head, length)`.
    pub(crate) fn try_used(&mut self, queue: usize) -> Option<(u32, u32)> {
        let q = &mut self.queues[queue];
        let index: u16 = self.memory.load(GuestAddress(q.used + 2), Ordering::Acquire).unwrap();
        if index == q.last_used {
            return None;
        }
        let slot = q.used + 4 + 8 * u64::from(q.last_used % QUEUE_SIZE);
        q.last_used = q.last_used.wrapping_add(1);
        let head = self.memory.read_obj(GuestAddress(slot)).unwrap();
        let len = self.memory.read_obj(GuestAddress(slot + 4)).unwrap();
        Some((head, len))
    }

    /// Like [`Self::try_used`], but sleeps on the call descriptor.
    pub(crate) fn used(&mut self, queue: usize, limit: Duration) -> Option<(u32, u32)> {
        let deadline = Instant::now() + limit;
        loop {
            self.want_call(queue);
            if let Some(used) = self.try_used(queue) {
                return Some(used);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if !self.wait_call(queue, left) {
                return self.try_used(queue);
            }
        }
    }

    /// Asks for an interrupt at the next element (used_event).
    pub(crate) fn want_call(&self, queue: usize) {
        let q = &self.queues[queue];
        let at = GuestAddress(q.avail + 4 + 2 * u64::from(QUEUE_SIZE));
        self.memory.store(q.last_used, at, Ordering::Relaxed).unwrap();
        fence(Ordering::SeqCst);
    }

    /// Waits for the call descriptor and empties it.
    pub(crate) fn wait_call(&self, queue: usize, limit: Duration) -> bool {
        let mut events = [EpollEvent::default()];
        let limit = limit.as_millis().min(60_000) as i32;
        let q = &self.queues[queue];
        matches!(q.epoll.wait(limit, &mut events), Ok(1)) && q.call.read().is_ok()
    }

    /// Sends a command. Returns its status and the reply's body.
    pub(crate) fn command(&mut self, op: Op, body: &[u8]) -> (Status, Vec<u8>) {
        self.send_command(op, body);
        self.reply().expect("no reply")
    }

    /// Sends a command without waiting.
    pub(crate) fn send_command(&mut self, op: Op, body: &[u8]) -> u32 {
        self.next_tag += 1;
        let header = RequestHeader {
            op: (op as u16).into(),
            tag: self.next_tag.into(),
            ..RequestHeader::default()
        };
        let request = [header.as_bytes(), body].concat();
        let readable = self.write_buffer(&request);
        let room = 8 + op.reply_body_len();
        let writable = self.buffer(room);
        self.add(
            CONTROL,
            &[(readable, request.len() as u32, false), (writable, room as u32, true)],
        );
        self.kick(CONTROL);
        self.next_tag
    }

    /// The next reply.
    pub(crate) fn reply(&mut self) -> Option<(Status, Vec<u8>)> {
        let (head, len) = self.used(CONTROL, TIMEOUT)?;
        let q = &self.queues[CONTROL];
        let second = (head as u16 + 1) % QUEUE_SIZE;
        let at = GuestAddress(q.desc + 16 * u64::from(second));
        let addr: u64 = self.memory.read_obj(at).unwrap();
        let bytes = self.read_buffer(addr, len as usize);
        let (header, body) = ReplyHeader::read_from_prefix(&bytes).unwrap();
        Some((Status::from_code(header.status.get()).unwrap(), body.to_vec()))
    }

    fn ask<T: FromBytes + KnownLayout + Immutable>(&mut self, op: Op, body: &[u8]) -> T {
        let (status, reply) = self.command(op, body);
        assert_eq!(status, Status::Ok, "{op:?}");
        T::read_from_bytes(&reply).unwrap()
    }

    pub(crate) fn hello(&mut self) -> Gid {
        let hello = HelloRequest { abi: 1.into(), flags: 0.into(), driver_max_idx: 4096.into() };
        self.ask::<HelloReply>(Op::Hello, hello.as_bytes()).gid
    }

    pub(crate) fn register(
        &mut self,
        user: Gid,
        idx: u32,
        len: u32,
        backing: u16,
    ) -> RegisterReply {
        let request = register_request(user, idx, len, backing);
        self.ask(Op::Register, request.as_bytes())
    }

    /// Registers a DMB in this guest's memory.
    pub(crate) fn register_in_memory(&mut self, user: Gid, idx: u32, len: u32) -> RegisterReply {
        self.register_at(user, idx, len, DMB_AT)
    }

    /// Registers a DMB at `gpa`.
    pub(crate) fn register_at(&mut self, user: Gid, idx: u32, len: u32, gpa: u64) -> RegisterReply {
        let mut request = register_request(user, idx, len, BACKING_GUEST);
        request.nsg = 1.into();
        let entry = SgEntry { gpa: gpa.into(), len: len.into(), ..SgEntry::default() };
        self.ask(Op::Register, &[request.as_bytes(), entry.as_bytes()].concat())
    }

    pub(crate) fn attach(&mut self, token: u64) -> AttachReply {
        self.ask(Op::Attach, TokenRequest { token: token.into() }.as_bytes())
    }

    /// Sends a move and waits for its status.
    pub(crate) fn transfer(&mut self, token: u64, pieces: &[(u32, &[u8])], signal: bool) -> Status {
        let status = self.send_move(MOVES, token, pieces, signal);
        self.used(MOVES, TIMEOUT).expect("no answer to a move");
        let code = u32::from_le_bytes(self.read_buffer(status, 4).try_into().unwrap());
        Status::from_code(code as u16).unwrap()
    }

    /// Sends a move. Returns the address of its status.
    pub(crate) fn send_move(
        &mut self,
        queue: usize,
        token: u64,
        pieces: &[(u32, &[u8])],
        signal: bool,
    ) -> u64 {
        let total: usize = pieces.iter().map(|(_, bytes)| bytes.len()).sum();
        let header = MoveHeader {
            token: token.into(),
            nseg: (pieces.len() as u16).into(),
            flags: if signal { move_flags::SIGNAL } else { 0 }.into(),
            mask: 1.into(),
            total: (total as u32).into(),
            ..MoveHeader::new_zeroed()
        };
        let mut bytes = header.as_bytes().to_vec();
        for (offset, piece) in pieces {
            let segment = Segment { offset: (*offset).into(), len: (piece.len() as u32).into() };
            bytes.extend_from_slice(segment.as_bytes());
        }
        for (_, piece) in pieces {
            bytes.extend_from_slice(piece);
        }
        let readable = self.write_buffer(&bytes);
        let writable = self.write_buffer(&[0xff; 4]);
        self.add(queue, &[(readable, bytes.len() as u32, false), (writable, 4, true)]);
        self.kick(queue);
        writable
    }

    pub(crate) fn feed_events(&mut self, count: usize) {
        for _ in 0..count {
            let at = self.buffer(EVENT_LEN);
            self.add(EVENTS, &[(at, EVENT_LEN as u32, true)]);
        }
        self.kick(EVENTS);
    }

    /// The next event; its buffer goes back.
    pub(crate) fn event(&mut self, limit: Duration) -> Option<Event> {
        let (head, len) = self.used(EVENTS, limit)?;
        assert_eq!(len as usize, EVENT_LEN);
        let at = GuestAddress(self.queues[EVENTS].desc + 16 * u64::from(head));
        let addr: u64 = self.memory.read_obj(at).unwrap();
        let record: [u8; EVENT_LEN] = self.read_buffer(addr, EVENT_LEN).try_into().unwrap();
        self.offer(EVENTS, head as u16);
        self.kick(EVENTS);
        Some(Event::parse(&record).unwrap())
    }

    pub(crate) fn config(&mut self, offset: u32, len: u32) -> Vec<u8> {
        let flags = VhostUserConfigFlags::empty();
        let buffer = vec![0; len as usize];
        self.vhost.get_config(offset, len, flags, &buffer).unwrap().1
    }

    /// Requests of the back end so far.
    pub(crate) fn shm_requests(&self) -> Vec<ShmRequest> {
        self.window.requests.lock().unwrap().iter().map(|(request, _)| *request).collect()
    }

    /// Doorbells so far.
    pub(crate) fn doorbells(&self) -> Vec<HandedDoorbell> {
        self.window.doorbells.lock().unwrap().clone()
    }

    pub(crate) fn wait_shm_requests(&self, count: usize) {
        let requests = self.window.requests.lock().unwrap();
        let few = |r: &mut Vec<_>| r.len() < count;
        let (_guard, late) =
            self.window.changed.wait_timeout_while(requests, TIMEOUT, few).unwrap();
        assert!(!late.timed_out(), "no SHMEM request");
    }

    /// Sends one delayed acknowledgement.
    pub(crate) fn acknowledge(&self) {
        *self.window.allowed.lock().unwrap() += 1;
        self.window.may_answer.notify_all();
    }

    /// The memory mapped at this offset of the window, and the offset in the memory.
    fn mapped(&self, offset: u64) -> (Arc<File>, u64) {
        let requests = self.window.requests.lock().unwrap();
        let holds = |r: &ShmRequest| r.map && offset.wrapping_sub(r.window_offset) < r.len;
        let (request, file) = requests.iter().rev().find(|(r, _)| holds(r)).expect("not mapped");
        (file.clone().unwrap(), request.fd_offset + offset - request.window_offset)
    }

    /// Puts a file into the window, without a request of the back end.
    pub(crate) fn map_file(&self, request: ShmRequest, file: OwnedFd) {
        self.window.requests.lock().unwrap().push((request, Some(Arc::new(file.into()))));
    }

    pub(crate) fn read_window(&self, offset: u64, len: usize) -> Vec<u8> {
        let (mut bytes, (file, at)) = (vec![0; len], self.mapped(offset));
        file.read_exact_at(&mut bytes, at).unwrap();
        bytes
    }

    pub(crate) fn write_window(&self, offset: u64, bytes: &[u8]) {
        let (file, at) = self.mapped(offset);
        file.write_all_at(bytes, at).unwrap();
    }

    /// Waits until the daemon has closed the connection.
    pub(crate) fn wait_cut(&mut self) {
        self.socket.set_read_timeout(Some(TIMEOUT)).unwrap();
        loop {
            match self.socket.read(&mut [0; 64]) {
                Ok(0) => return,
                Ok(_) => {} // an answer that was under way
                Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => return,
                Err(error) => panic!("still connected: {error}"),
            }
        }
    }
}

pub(crate) fn addresses(queue: &Queue) -> VringConfigData {
    VringConfigData {
        queue_max_size: QUEUE_SIZE,
        queue_size: QUEUE_SIZE,
        flags: 0,
        desc_table_addr: queue.desc,
        used_ring_addr: queue.used,
        avail_ring_addr: queue.avail,
        log_addr: None,
    }
}

pub(crate) fn register_request(user: Gid, idx: u32, len: u32, backing: u16) -> RegisterRequest {
    RegisterRequest {
        user_gid: user,
        idx: idx.into(),
        len: len.into(),
        backing: backing.into(),
        ..RegisterRequest::default()
    }
}

/// Answers requests of the back end, like a VMM's main loop.
fn serve_channel(stream: UnixStream, window: &Window, maps: Maps) {
    // Header: request, flags, size. Body: shmid, fd_offset, shm_offset, len, flags.
    let mut message = [0u8; 12 + 40];
    loop {
        let (mut filled, mut file) = (0, None);
        while filled < message.len() {
            match stream.recv_with_fd(&mut message[filled..]) {
                Ok((0, _)) | Err(_) => return,
                Ok((n, received)) => {
                    filled += n;
                    file = received.or(file);
                }
            }
        }
        let u32_at = |at: usize| u32::from_le_bytes(message[at..at + 4].try_into().unwrap());
        let u64_at = |at: usize| u64::from_le_bytes(message[at..at + 8].try_into().unwrap());
        let (request, flags) = (u32_at(0), u32_at(4));
        assert!(request == SHMEM_MAP || request == SHMEM_UNMAP, "{request}");
        let map = request == SHMEM_MAP;
        let is_doorbell = message[12] == virtio_ism_abi::DOORBELL_SHMID;
        if is_doorbell {
            let fd = Arc::new(file.unwrap());
            let doorbell = HandedDoorbell { slab: u64_at(20), rings: u64_at(44) & 1 != 0, fd };
            window.doorbells.lock().unwrap().push(doorbell);
        } else {
            assert_eq!(message[12], virtio_ism_abi::WINDOW_SHMID);
            assert_eq!(map, file.is_some(), "a map has a file");
            let [fd_offset, window_offset, len] = [20, 28, 36].map(u64_at);
            let shm = ShmRequest { map, fd_offset, window_offset, len };
            window.requests.lock().unwrap().push((shm, file.map(Arc::new)));
        }
        window.changed.notify_all();
        if maps == Maps::Silent || is_doorbell && maps == Maps::SilentForDoorbells {
            continue;
        }
        if maps == Maps::Late {
            let allowed = window.allowed.lock().unwrap();
            *window.may_answer.wait_while(allowed, |allowed| *allowed == 0).unwrap() -= 1;
        }
        assert_ne!(flags & NEED_REPLY, 0, "REPLY_ACK was negotiated");
        let mut answer = [0u8; 20];
        answer[..4].copy_from_slice(&message[..4]);
        answer[4] = 1 | 4; // version, reply
        answer[8] = 8;
        let refuses = maps == Maps::Refuse || is_doorbell && maps == Maps::RefuseDoorbells;
        answer[12] = u8::from(refuses);
        if (&stream).write_all(&answer).is_err() {
            return;
        }
    }
}
