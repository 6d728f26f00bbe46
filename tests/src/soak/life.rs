// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! One life of a hostile front end: it connects, negotiates, acts by its seed, and goes.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use virtio_ism_abi::Gid;
use virtio_ism_abi::command::Op;
use virtio_ism_abi::config::Features;

use super::descriptor::Descriptor;
use super::driver::{CONTROL, Driver, EVENTS, MOVES, QUEUE_SIZE, QUEUES, edge, token_of};
use super::memory::{BASE, Kind, LEN, Memory, PAGE};
use super::message::{self as m, Channel, words};
use super::window::{Answers, Window};
use crate::bytes::Rng;

/// Operations kept for the report of a failure.
const REMEMBERED: usize = 64;
/// Tokens and GIDs shared among hostile front ends.
const SHARED: usize = 256;
/// How long a reply of the device is waited for.
const SHORT: Duration = Duration::from_millis(20);

const VERSION_1: u64 = 1 << 32;
const EVENT_IDX: u64 = 1 << 29;
const INDIRECT: u64 = 1 << 28;
const PROTOCOL_FEATURES: u64 = 1 << 30;

/// The next act of a life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Operation {
    /// A command of the driver.
    Hello,
    Query,
    Register,
    Unregister,
    Attach,
    Detach,
    ReleaseSlab,
    SignalEvent,
    Stats,
    /// An unknown command.
    Unknown,
    /// A move with a token, and moves one after the other.
    Transfer,
    Transfers,
    /// Notifications, few and many.
    Kick,
    Kicks,
    /// Buffers for events, and the events received.
    Feed,
    TakeUsed,
    /// Malformed chains and rings.
    Nonsense,
    Scribble,
    /// Changes of memory.
    Punch,
    Cut,
    Restore,
    Seal,
    Swap,
    /// Descriptors in the place of kicks, calls and memory.
    Descriptor,
    /// Slabs and their control tails.
    Slab,
    /// Acts of a VMM: stop and start queues, reset, read and write configuration.
    Pause,
    Reset,
    Config,
    Table,
    /// Malformed messages.
    Message,
    Garbage,
    /// A second connection to the same port.
    Second,
}

/// Operations and how often each is done. Such as end most connections are seldom, or nothing would
/// live long enough to be interesting.
const WEIGHTS: [(Operation, u32); 32] = [
    (Operation::Hello, 20),
    (Operation::Query, 20),
    (Operation::Register, 120),
    (Operation::Unregister, 80),
    (Operation::Attach, 100),
    (Operation::Detach, 60),
    (Operation::ReleaseSlab, 20),
    (Operation::SignalEvent, 60),
    (Operation::Stats, 20),
    (Operation::Unknown, 10),
    (Operation::Transfer, 200),
    (Operation::Transfers, 60),
    (Operation::Kick, 60),
    (Operation::Kicks, 10),
    (Operation::Feed, 40),
    (Operation::TakeUsed, 120),
    (Operation::Nonsense, 4),
    (Operation::Scribble, 4),
    (Operation::Punch, 20),
    (Operation::Cut, 2),
    (Operation::Restore, 4),
    (Operation::Seal, 2),
    (Operation::Swap, 4),
    (Operation::Descriptor, 4),
    (Operation::Slab, 40),
    (Operation::Pause, 10),
    (Operation::Reset, 6),
    (Operation::Config, 10),
    (Operation::Table, 4),
    (Operation::Message, 2),
    (Operation::Garbage, 1),
    (Operation::Second, 1),
];

impl Operation {
    fn draw(rng: &mut Rng) -> Operation {
        let all: u32 = WEIGHTS.iter().map(|(_, weight)| weight).sum();
        let mut at = rng.below(all);
        for (operation, weight) in WEIGHTS {
            if at < weight {
                return operation;
            }
            at -= weight;
        }
        Operation::Stats
    }
}

/// State shared by the hostile front ends.
#[derive(Debug, Default)]
pub(super) struct Shared {
    /// Tokens and GIDs seen so far.
    known: Mutex<VecDeque<(Gid, u64)>>,
    /// GIDs of the bystanders, exempt from attacks.
    pub(super) bystanders: Mutex<Vec<Gid>>,
    /// Operations done.
    pub(super) done: AtomicU64,
    /// Set to end all lives.
    pub(super) stop: AtomicBool,
}

impl Shared {
    fn tell(&self, gid: Gid, token: u64) {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if known.len() == SHARED {
            known.pop_front();
        }
        known.push_back((gid, token));
    }

    fn one(&self, rng: &mut Rng) -> (Gid, u64) {
        let known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let at = rng.below(known.len() as u32) as usize;
        known.get(at).copied().unwrap_or((Gid::NONE, 0))
    }

    fn bystander(&self, rng: &mut Rng) -> Option<Gid> {
        let gids = self.bystanders.lock().unwrap_or_else(PoisonError::into_inner);
        gids.get(rng.below(gids.len() as u32) as usize).copied()
    }
}

/// Properties of a life drawn from its seed before the beginning.
#[derive(Clone, Copy, Debug)]
pub(super) struct Plan {
    pub(super) memory: Kind,
    /// None: this front end has no window.
    pub(super) answers: Option<Answers>,
    /// One in so many values is wrong; 0: none.
    pub(super) wrong: u32,
    pub(super) features: u64,
    pub(super) operations: u32,
}

impl Plan {
    fn draw(rng: &mut Rng) -> Plan {
        let mut features = VERSION_1 | EVENT_IDX | INDIRECT | PROTOCOL_FEATURES;
        features |= (Features::all() - Features::DOORBELL).bits();
        if rng.one_in(4) {
            features |= Features::DOORBELL.bits();
        }
        if rng.one_in(8) {
            features &= !(rng.bits() & !VERSION_1 & !PROTOCOL_FEATURES);
        }
        Plan {
            memory: Kind::any(rng),
            answers: (!rng.one_in(4)).then(|| Answers::any(rng)),
            wrong: [0, 256, 32, 4, 1][rng.below(5) as usize],
            features,
            operations: 1 << rng.below(14),
        }
    }
}

/// A running life.
pub(super) struct Life<'a> {
    pub(super) plan: Plan,
    /// The last operations, newest at the end.
    pub(super) remembered: VecDeque<(u32, Operation)>,
    path: &'a Path,
    shared: &'a Shared,
    rng: Rng,
    channel: Channel,
    driver: Driver,
    window: Option<Window>,
    need_reply: bool,
    gid: Gid,
    /// Own DMBs.
    own: Vec<u64>,
    /// Further connections.
    others: Vec<Channel>,
}

impl<'a> Life<'a> {
    /// Connects to a port and negotiates. `None`: the daemon cut the connection meanwhile, or the
    /// machine has no descriptors.
    pub(super) fn begin(path: &'a Path, shared: &'a Shared, seed: u64) -> Option<Life<'a>> {
        let mut rng = Rng::new(seed);
        let plan = Plan::draw(&mut rng);
        let driver = Driver::new(Memory::new(plan.memory)?)?;
        let channel = loop {
            match Channel::connect(path) {
                Ok(channel) => break channel,
                Err(error) if error.kind() != io::ErrorKind::WouldBlock => return None,
                Err(_) if shared.stop.load(Ordering::Relaxed) => return None,
                Err(_) => std::thread::sleep(SHORT / 10),
            }
        };
        let mut life = Life {
            plan,
            remembered: VecDeque::new(),
            path,
            shared,
            rng,
            channel,
            driver,
            window: None,
            need_reply: true,
            gid: Gid::NONE,
            own: Vec::new(),
            others: Vec::new(),
        };
        life.negotiate().is_ok().then_some(life)
    }

    fn ask(&mut self, request: u32, body: &[u64]) -> io::Result<Vec<u8>> {
        self.channel.ask(request, &words(body), &[], self.need_reply)
    }

    fn negotiate(&mut self) -> io::Result<()> {
        self.need_reply = false;
        self.ask(m::SET_OWNER, &[])?;
        let offered = m::u64_at(&self.ask(m::GET_FEATURES, &[])?, 0);
        let protocol = m::u64_at(&self.ask(m::GET_PROTOCOL_FEATURES, &[])?, 0);
        self.ask(m::SET_PROTOCOL_FEATURES, &[protocol])?;
        self.need_reply = true;
        self.ask(m::SET_FEATURES, &[self.plan.features & offered])?;
        if let Some((window, theirs)) = self.plan.answers.and_then(Window::new) {
            self.ask(m::GET_SHMEM_CONFIG, &[])?;
            self.channel.ask(m::SET_BACKEND_REQ_FD, &[], &[theirs.as_fd()], true)?;
            self.window = Some(window);
        }
        self.set_memory()?;
        for queue in 0..QUEUES {
            self.start_queue(queue, 0)?;
        }
        self.driver.feed_events(16);
        self.hello();
        Ok(())
    }

    fn set_memory(&mut self) -> io::Result<()> {
        let wrong = self.is_wrong();
        let regions = if wrong { 1 + self.rng.below(9) } else { 1 };
        let mut body = words(&[u64::from(regions)]);
        for _ in 0..regions {
            // Guest address, size, address in the front end, offset in the file.
            let mut region = [BASE, LEN, BASE, 0];
            if wrong {
                let part = self.rng.below(4) as usize;
                region[part] = edge(&mut self.rng);
                region[0] = region[0].wrapping_add(PAGE * u64::from(self.rng.below(2048)));
            }
            body.extend_from_slice(&words(&region));
        }
        let fds = vec![self.driver.memory.fd(); regions as usize];
        self.channel.ask(m::SET_MEM_TABLE, &body, &fds, true).map(drop)
    }

    fn start_queue(&mut self, index: usize, base: u64) -> io::Result<()> {
        let n = index as u64;
        let (desc, avail, used) = {
            let q = &self.driver.queues[index];
            (q.desc, q.avail, q.used)
        };
        let size = if self.is_wrong() { edge(&mut self.rng) as u32 } else { QUEUE_SIZE.into() };
        self.ask(m::SET_VRING_NUM, &[n | u64::from(size) << 32])?;
        self.ask(m::SET_VRING_BASE, &[n | base << 32])?;
        let mut addresses = [n, desc, used, avail, 0];
        if self.is_wrong() {
            addresses[self.rng.below(5) as usize] = edge(&mut self.rng);
        }
        self.ask(m::SET_VRING_ADDR, &addresses)?;
        let q = &self.driver.queues[index];
        self.channel.ask(m::SET_VRING_CALL, &words(&[n]), &[q.call.as_fd()], true)?;
        self.channel.ask(m::SET_VRING_KICK, &words(&[n]), &[q.kick.as_fd()], true)?;
        self.ask(m::SET_VRING_ENABLE, &[n | 1 << 32]).map(drop)
    }

    fn is_wrong(&mut self) -> bool {
        self.rng.one_in(self.plan.wrong)
    }

    /// Waits shortly for a reply of the device, which may need mappings first.
    fn reply(&mut self) -> Option<[u8; 64]> {
        for _ in 0..4 {
            if let Some(window) = &mut self.window {
                window.serve(&mut self.rng);
            }
            if let Some(body) = self.driver.reply(SHORT / 4) {
                return Some(body);
            }
        }
        None
    }

    fn hello(&mut self) {
        let wrong = self.is_wrong();
        self.driver.hello(&mut self.rng, wrong);
        if let Some(body) = self.reply() {
            let mut gid = [0; 16];
            gid.copy_from_slice(&body[..16]);
            self.gid = Gid(gid);
            self.own.clear();
            self.shared.tell(self.gid, 0);
        }
    }

    /// A GID to do something to.
    fn target(&mut self) -> Gid {
        match self.rng.below(8) {
            0 => self.shared.bystander(&mut self.rng).unwrap_or(Gid::NONE),
            1 => self.gid,
            2 => Gid(std::array::from_fn(|_| self.rng.bits() as u8)),
            _ => self.shared.one(&mut self.rng).0,
        }
    }

    /// A token to do something with.
    fn token(&mut self) -> u64 {
        match self.rng.below(8) {
            0 => self.rng.bits(),
            1..3 if !self.own.is_empty() => {
                self.own[self.rng.below(self.own.len() as u32) as usize]
            }
            _ => self.shared.one(&mut self.rng).1,
        }
    }

    /// Performs the next operation of the seed. `false`: the connection has ended.
    pub(super) fn step(&mut self, n: u32) -> bool {
        let operation = Operation::draw(&mut self.rng);
        if self.remembered.len() == REMEMBERED {
            self.remembered.pop_front();
        }
        self.remembered.push_back((n, operation));
        let done = self.perform(operation);
        self.shared.done.fetch_add(1, Ordering::Relaxed);
        if let Some(window) = &mut self.window {
            window.serve(&mut self.rng);
        }
        done.and_then(|()| self.channel.drain()).is_ok()
    }

    fn perform(&mut self, operation: Operation) -> io::Result<()> {
        let wrong = self.is_wrong();
        let queue = self.rng.below(QUEUES as u32) as usize;
        match operation {
            Operation::Hello
            | Operation::Query
            | Operation::Register
            | Operation::Unregister
            | Operation::Attach
            | Operation::Detach
            | Operation::ReleaseSlab
            | Operation::SignalEvent
            | Operation::Stats
            | Operation::Unknown => self.command(operation, wrong),
            Operation::Transfer => self.transfers(1, wrong),
            Operation::Transfers => {
                let count = 1 + self.rng.below(20);
                self.transfers(count, wrong);
            }
            Operation::Kick => self.driver.kick(queue),
            Operation::Kicks => {
                for _ in 0..1 << self.rng.below(10) {
                    self.driver.kick(queue);
                }
            }
            Operation::Feed => self.driver.feed_events(4),
            Operation::TakeUsed => (0..QUEUES).for_each(|queue| self.driver.take_used(queue)),
            Operation::Nonsense => self.driver.nonsense(queue, &mut self.rng),
            Operation::Scribble => {
                self.driver.scribble(&mut self.rng);
                self.driver.kick(queue);
            }
            Operation::Punch => self.driver.memory.punch(&mut self.rng),
            Operation::Cut => {
                self.driver.memory.cut(&mut self.rng);
                self.driver.kick(queue);
            }
            Operation::Restore => self.driver.memory.restore(),
            Operation::Seal => self.driver.memory.seal(&mut self.rng),
            Operation::Swap => {
                let kind = Kind::any(&mut self.rng);
                if let Some(memory) = Memory::new(kind) {
                    self.driver.memory = memory;
                }
                self.set_memory()?;
                if self.rng.one_in(2) {
                    self.restart()?;
                }
            }
            Operation::Descriptor => self.pass_descriptor()?,
            Operation::Slab => {
                if let Some(window) = &self.window {
                    window.damage(&mut self.rng);
                }
            }
            Operation::Pause => self.pause()?,
            Operation::Reset => {
                self.ask(m::RESET_DEVICE, &[])?;
                self.restart()?;
            }
            Operation::Config => self.configuration(wrong)?,
            Operation::Table => self.table()?,
            Operation::Message => self.message()?,
            Operation::Garbage => {
                let bytes: Vec<u8> =
                    (0..self.rng.below(64)).map(|_| self.rng.bits() as u8).collect();
                m::send(&self.channel.socket, &bytes, &[])?;
            }
            Operation::Second => {
                if self.others.len() < 2 {
                    self.others.extend(Channel::connect(self.path));
                } else {
                    self.others.clear();
                }
            }
        }
        Ok(())
    }

    /// A command of the driver.
    fn command(&mut self, operation: Operation, wrong: bool) {
        match operation {
            Operation::Hello if self.rng.one_in(4) => self.hello(),
            Operation::Query => {
                let gid = self.target();
                self.driver.query(gid, &mut self.rng, wrong);
            }
            Operation::Register => {
                let gid = self.target();
                self.driver.take_used(CONTROL);
                self.driver.register(gid, &mut self.rng, wrong);
                if let Some(body) = self.reply() {
                    let token = token_of(&body);
                    self.own.push(token);
                    self.shared.tell(self.gid, token);
                }
            }
            Operation::Unregister => {
                let token = self.token();
                self.own.retain(|own| *own != token);
                self.driver.by_token(Op::Unregister, token, &mut self.rng, wrong);
            }
            Operation::Attach => {
                let token = self.token();
                self.driver.by_token(Op::Attach, token, &mut self.rng, wrong);
            }
            Operation::Detach => {
                let token = self.token();
                self.driver.by_token(Op::Detach, token, &mut self.rng, wrong);
            }
            Operation::ReleaseSlab => self.driver.release_slab(&mut self.rng, wrong),
            Operation::SignalEvent => {
                let gid = self.target();
                self.driver.signal_event(gid, &mut self.rng, wrong);
            }
            Operation::Stats => self.driver.command(Op::Stats as u16, &[], &mut self.rng, wrong),
            Operation::Unknown => {
                let bytes: Vec<u8> =
                    (0..self.rng.below(128)).map(|_| self.rng.bits() as u8).collect();
                let op = self.rng.bits() as u16 & if self.rng.one_in(2) { 0x7f } else { 0xffff };
                self.driver.command(op, &bytes, &mut self.rng, wrong);
            }
            _ => {}
        }
    }

    /// Reads or writes configuration space.
    fn configuration(&mut self, wrong: bool) -> io::Result<()> {
        let mut body = vec![0; 12];
        let (at, len) = (self.rng.below(300), self.rng.below(300));
        for (word, value) in body.chunks_exact_mut(4).zip([at, len, self.rng.below(4)]) {
            word.copy_from_slice(&value.to_le_bytes());
        }
        let request = if self.rng.one_in(4) { m::SET_CONFIG } else { m::GET_CONFIG };
        body.resize(12 + if wrong { self.rng.below(300) } else { len } as usize, 7);
        self.channel.ask(request, &body, &[], true).map(drop)
    }

    fn transfers(&mut self, count: u32, wrong: bool) {
        for _ in 0..count {
            let token = self.token();
            self.driver.transfer(token, &mut self.rng, wrong);
        }
        self.shared.done.fetch_add(u64::from(count - 1), Ordering::Relaxed);
        self.driver.take_used(MOVES);
        self.driver.take_used(MOVES + 1);
    }

    /// The guest starts its queues anew.
    fn restart(&mut self) -> io::Result<()> {
        self.driver.clear();
        self.own.clear();
        for queue in 0..QUEUES {
            self.start_queue(queue, 0)?;
        }
        self.driver.feed_events(16);
        self.hello();
        Ok(())
    }

    fn pause(&mut self) -> io::Result<()> {
        let mut bases = [0; QUEUES];
        for (queue, base) in bases.iter_mut().enumerate() {
            let reply = self.ask(m::GET_VRING_BASE, &[queue as u64])?;
            *base = m::u64_at(&reply, 0) >> 32;
        }
        for (queue, base) in bases.into_iter().enumerate() {
            let base = if self.is_wrong() { u64::from(self.rng.bits() as u16) } else { base };
            self.start_queue(queue, base)?;
        }
        Ok(())
    }

    /// A descriptor of any kind in the place of a kick, a call or whatever takes one.
    fn pass_descriptor(&mut self) -> io::Result<()> {
        let kind = Descriptor::any(&mut self.rng);
        let Some(fd) = kind.make() else { return Ok(()) };
        let beyond = u32::from(self.rng.one_in(8));
        let queue = u64::from(self.rng.below(QUEUES as u32 + beyond));
        let request = match self.rng.below(8) {
            0..3 => m::SET_VRING_KICK,
            3..6 => m::SET_VRING_CALL,
            6 => m::SET_VRING_ERR,
            _ => [m::SET_LOG_FD, m::SET_LOG_BASE, m::SET_BACKEND_REQ_FD, m::GET_FEATURES]
                [self.rng.below(4) as usize],
        };
        // Without a descriptor: bit 8 marks its absence.
        let none = self.rng.one_in(8);
        let fds: &[BorrowedFd<'_>] = if none { &[] } else { &[fd.as_fd()] };
        let queue = queue | if none { 1 << 8 } else { 0 };
        let done = self.channel.ask(request, &words(&[queue]), fds, true);
        self.driver.passed.push(fd);
        self.driver.kick(EVENTS);
        done.map(drop)
    }

    /// A region more or less.
    fn table(&mut self) -> io::Result<()> {
        let mut region = [0, BASE + LEN * u64::from(self.rng.below(4)), LEN, BASE, 0];
        if self.is_wrong() {
            region[1 + self.rng.below(4) as usize] = edge(&mut self.rng);
        }
        let add = self.rng.one_in(2);
        let request = if add { m::ADD_MEM_REG } else { m::REM_MEM_REG };
        let fd = self.driver.memory.fd();
        let fds: &[BorrowedFd<'_>] = if add { &[fd] } else { &[] };
        self.channel.ask(request, &words(&region), fds, true).map(drop)
    }

    /// Any request with any body and any descriptors. Does not await an answer.
    fn message(&mut self) -> io::Result<()> {
        let request = self.rng.below(m::BEYOND);
        if request == m::RESET_OWNER || request == m::GET_INFLIGHT_FD {
            // Worth more than one in fifty.
            self.driver.kick(CONTROL);
        }
        let mut body: Vec<u8> = Vec::new();
        for _ in 0..self.rng.below(8) {
            body.extend_from_slice(&edge(&mut self.rng).to_le_bytes());
        }
        if self.rng.one_in(4) {
            body.truncate(self.rng.below(body.len() as u32 + 1) as usize);
        }
        let flags = if self.is_wrong() { self.rng.bits() as u32 } else { m::VERSION };
        let mut bytes = m::message(request, flags, &body);
        if self.rng.one_in(8) {
            let len = (edge(&mut self.rng) as u32).to_le_bytes();
            bytes[8..12].copy_from_slice(&len);
        }
        let count = if self.rng.one_in(2) { self.rng.below(m::MAX_FDS as u32) } else { 0 };
        let fds: Vec<OwnedFd> =
            (0..count).filter_map(|_| Descriptor::any(&mut self.rng).make()).collect();
        let fds: Vec<BorrowedFd<'_>> = fds.iter().map(OwnedFd::as_fd).collect();
        m::send(&self.channel.socket, &bytes, &fds)
    }

    /// Goes, in one of several ways. No thread of the daemon waits for this front end afterwards.
    pub(super) fn end(mut self) {
        if self.rng.one_in(4) {
            // In the middle of a message.
            let bytes = m::message(m::SET_MEM_TABLE, m::VERSION, &[0; 40]);
            let _ = m::send(&self.channel.socket, &bytes[..30], &[self.driver.memory.fd()]);
        }
        if self.rng.one_in(2) {
            // The channel first.
            self.window = None;
        }
        let _ = self.channel.socket.shutdown(std::net::Shutdown::Both);
        self.driver.empty_all();
    }
}
