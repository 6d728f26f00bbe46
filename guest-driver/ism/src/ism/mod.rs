// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The driver of a virtio-ism device.
//!
//! [`IsmDevice`] sends HELLO and keeps the GID. [`OwnDmb`] is a buffer for the writes of one peer, and
//! [`PeerDmb`] is the right to write a buffer of a peer. [`PeerDmb::deliver`] writes a DMB in the window with
//! stores, and any other DMB through the device.
//!
//! A slab (the unit in which the device maps the window) stays mapped after the end of its last DMB, for the
//! next connection to the same peer. The driver releases the slab after the peer has left the fabric, or by
//! [`IsmDevice::release_idle_slabs`].

use std::fmt;
use std::os::fd::{BorrowedFd, RawFd};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
use std::sync::{Arc, Mutex, TryLockError};
use std::time::{Duration, Instant};

use virtio_ism_abi::command::{
    HelloReply, HelloRequest, LeftRequest, Op, QueryGidReply, QueryGidRequest, SignalEventRequest,
    StatsReply, hello_flags, peer_flags,
};
use virtio_ism_abi::config::{Config, Features};
use virtio_ism_abi::event::{Event, SlabWake};
use virtio_ism_abi::{Chid, Gid, REVISION, Status, Token};
use zerocopy::{FromZeros, IntoBytes};

use crate::transport::{Doorbells, RunningDevice, TransportError};
use crate::virtqueue::QueueError;
use ism_sys::{
    ForkLocks, LockGuardList, OnceBox, PollInterest, is_free, try_hold, wait, wait_in_set,
};

mod attached;
mod error;
mod index;
mod measure;
mod options;
mod own;
mod own_lines;
mod peer;
mod slabs;
#[cfg(test)]
mod tests;

pub use error::{DeliverError, IsmError};
pub use measure::{SLOWEST_WINDOW, WindowSpeed};
pub use options::{OpenOptions, Prefer};
pub use own::OwnDmb;
pub use peer::PeerDmb;
pub use virtio_ism_abi::event::Event as IsmEvent;

use attached::Attached;
use index::IndexPool;
pub use own_lines::LineName;
use own_lines::OwnLines;
use slabs::SlabTable;

/// Offset in a DMB of the producer word of SMC-D's control block, bytes (CDC "prod" cursor).
pub const PRODUCER_WORD: u32 = 8;
/// Offset in a DMB of the consumer-and-flags word of SMC-D's control block, bytes.
pub const CONSUMER_WORD: u32 = 16;
/// Length of SMC-D's control block at the start of a DMB, bytes.
pub const CONTROL_BLOCK: u32 = 32;

/// Most records passed on by one call of [`IsmDevice::poll_events`].
pub const EVENTS_PER_POLL: usize = 1024;

/// Time limit for repeating a command to a busy device.
const BUSY_TIMEOUT: Duration = Duration::from_millis(500);

/// The device's answer about a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerFlags {
    /// Both sides can map: DMBs in the window work in both directions.
    pub window: bool,
}

/// An open ISM device: one GID on one fabric.
pub struct IsmDevice {
    running: Arc<RunningDevice>,
    gid: Gid,
    session: u32,
    prefer: Prefer,
    indices: Mutex<IndexPool>,
    slabs: SlabTable,
    lines: OwnLines,
    attached: Attached,
    // Bytes per second of the window, once measured.
    window_rate: OnceBox<u64>,
    polling: Mutex<()>,
    unknown_events: AtomicU64,
    // Number of the last request to leave; 0: none, or withdrawn by the device.
    leave: AtomicU32,
}

impl ForkLocks for IsmDevice {
    fn try_hold<'a>(&'a self, held: &mut LockGuardList<'a>) -> bool {
        try_hold(&self.polling, held) && self.running.try_hold(held)
    }

    fn is_unlocked(&self) -> bool {
        is_free(&self.indices)
            && self.slabs.is_unlocked()
            && self.lines.is_unlocked()
            && self.attached.is_unlocked()
            && self.running.is_unlocked()
    }

    fn forget_threads(&self) {
        self.lines.forget_threads();
    }

    fn descriptors(&self) -> Vec<RawFd> {
        self.running.descriptors()
    }
}

impl IsmDevice {
    /// Opens the device and sends HELLO.
    ///
    /// # Errors
    /// The device cannot be reached, is no virtio-ism device of this revision, or refuses HELLO.
    pub fn open(options: OpenOptions) -> Result<Arc<IsmDevice>, IsmError> {
        let running = options.address.open(options.setup(), options.timeout)?;
        Self::open_on(running, &options)
    }

    /// Sends HELLO to a running device.
    ///
    /// # Errors
    /// The device speaks another revision, does not offer moves (which carry kicks, too), or
    /// refuses HELLO.
    pub fn open_on(
        running: Arc<RunningDevice>,
        options: &OpenOptions,
    ) -> Result<Arc<IsmDevice>, IsmError> {
        let config = *running.config();
        if config.revision.get() != REVISION {
            return Err(config_error("revision", config.revision.get().into()));
        }
        if !running.features().contains(Features::MOVE) {
            return Err(TransportError::Missing("MOVE").into());
        }
        if config.dmb_min.get() == 0 || config.dmb_max.get() < config.dmb_min.get() {
            return Err(config_error("dmb_max", config.dmb_max.get().into()));
        }
        let max_dmbs = options.max_dmbs.min(config.max_dmbs.get());
        let hello = HelloRequest {
            abi: (REVISION as u16).into(),
            flags: hello_flags::NATIVE.into(),
            driver_max_idx: max_dmbs.into(),
        };
        let mut reply = HelloReply::new_zeroed();
        command(&running, Op::Hello, hello.as_bytes(), reply.as_mut_bytes())?;
        if reply.gid == Gid::NONE {
            return Err(IsmError::NoGid);
        }
        Ok(Arc::new(IsmDevice {
            running,
            gid: reply.gid,
            session: reply.session.get(),
            prefer: options.prefer,
            indices: Mutex::new(IndexPool::new(max_dmbs)),
            slabs: SlabTable::default(),
            lines: OwnLines::default(),
            attached: Attached::default(),
            window_rate: OnceBox::new(),
            polling: Mutex::new(()),
            unknown_events: AtomicU64::new(0),
            leave: AtomicU32::new(0),
        }))
    }

    /// The device's GID, fresh with every HELLO.
    pub fn gid(&self) -> Gid {
        self.gid
    }

    /// The CHID of the fabric.
    pub fn chid(&self) -> Chid {
        Chid(self.config().chid.get())
    }

    /// Number of this session on the device's socket, from 1.
    pub fn session(&self) -> u32 {
        self.session
    }

    /// The user whose daemon has the device; `None`: no daemon of this machine.
    pub fn owner(&self) -> Option<u32> {
        self.running.window.owner()
    }

    /// The device's configuration.
    pub fn config(&self) -> &Config {
        self.running.config()
    }

    /// The features in use.
    pub fn features(&self) -> Features {
        self.running.features()
    }

    /// Whether the device is gone or failed: every call fails, and sleeping threads have been
    /// woken.
    #[inline]
    pub fn is_gone(&self) -> bool {
        self.running.is_gone()
    }

    /// Whether earlier reads of DMBs returned the bytes of the DMBs. `false`: the device and its memory are
    /// gone, so these reads may have returned zeros.
    #[inline]
    pub fn has_memory(&self) -> bool {
        // Orders the reads before the check: memory goes after the device is marked as gone.
        fence(Ordering::Acquire);
        !self.running.is_gone() || self.running.window.has_memory()
    }

    /// Whether own DMBs keep their memory when the device is gone.
    pub fn memory_stays(&self) -> bool {
        self.running.window.outlives_device()
    }

    /// Declares the end of reads from own DMBs without a private copy ([`OwnDmb::keep`]). When a device with
    /// its own memory goes, its removal waits for this call some seconds at most, if the device was opened
    /// with [`OpenOptions::leaves`].
    pub fn let_go(&self) {
        self.running.window.let_go();
    }

    /// Speed of a copy into the window in bytes per second; none until the first DMB of the
    /// window, or if the window is known to be ordinary memory.
    pub fn window_rate(&self) -> Option<u64> {
        self.window_rate.get().copied()
    }

    /// Measures stores into the window and loads from the window, in a DMB reachable by this device only.
    ///
    /// # Errors
    /// There is no window, the device has no room in it, or is gone.
    pub fn measure_window(self: &Arc<Self>) -> Result<WindowSpeed, IsmError> {
        if !self.features().contains(Features::WINDOW) || self.running.window_size() == 0 {
            return Err(TransportError::Missing("a window").into());
        }
        own::measure_window(self)
    }

    /// Number of records of unknown types, which the driver ignores.
    pub fn unknown_events(&self) -> u64 {
        self.unknown_events.load(Ordering::Relaxed)
    }

    /// Queries whether a GID is on this fabric; `None` if not.
    ///
    /// # Errors
    /// The device is gone or refuses (too many queries).
    pub fn query_gid(&self, gid: Gid) -> Result<Option<PeerFlags>, IsmError> {
        let request = QueryGidRequest { gid, ..QueryGidRequest::new_zeroed() };
        let mut reply = QueryGidReply::new_zeroed();
        match self.command(Op::QueryGid, request.as_bytes(), reply.as_mut_bytes()) {
            Ok(()) => {}
            Err(IsmError::Refused { status: Status::Enodev, .. }) => return Ok(None),
            Err(error) => return Err(error),
        }
        let flags = reply.flags.get();
        Ok((flags & peer_flags::REACHABLE != 0)
            .then_some(PeerFlags { window: flags & peer_flags::WINDOW != 0 }))
    }

    /// Whether the device has recently reported the departure of a GID from the fabric.
    pub fn has_left(&self, gid: Gid) -> bool {
        self.slabs.has_left(gid)
    }

    /// Notes the departure of a GID from the fabric, reported by [`query_gid`](Self::query_gid) before the
    /// record came.
    pub fn note_left(&self, gid: Gid) {
        self.slabs.peer_is_gone(gid);
    }

    /// Makes a zeroed DMB of `len` bytes for writes of `user`. The DMB lies in the window if both sides can
    /// map and the options prefer the window, else in guest memory.
    ///
    /// DMBs of different `wait_group`s never share a signal line.
    ///
    /// # Errors
    /// The length is not allowed, memory or numbers are used up, `user` is not on the fabric, or
    /// the device is gone.
    pub fn register(
        self: &Arc<Self>,
        user: Gid,
        len: u32,
        wait_group: u16,
    ) -> Result<OwnDmb, IsmError> {
        own::register(self, user, len, wait_group)
    }

    /// Starts using a peer's DMB of `expected_len` bytes.
    ///
    /// # Errors
    /// There is no such token, or another GID may use it; the DMB has another length; its mapping
    /// does not come; or the device is gone. After an error the DMB is not attached.
    pub fn attach(self: &Arc<Self>, token: Token, expected_len: u32) -> Result<PeerDmb, IsmError> {
        peer::attach(self, token, expected_len)
    }

    /// A DMB of a departed peer, for a connection with bytes left to read.
    ///
    /// # Errors
    /// The device has no place for another DMB, or is gone.
    pub fn gone_dmb(
        self: &Arc<Self>,
        token: Token,
        len: u32,
        owner: Gid,
    ) -> Result<PeerDmb, IsmError> {
        peer::gone(self, token, len, owner)
    }

    /// Sends a software event.
    ///
    /// # Errors
    /// No such GID, the peer's queue is full ([`Status::Eagain`]), or the device is gone.
    pub fn signal_event(&self, gid: Gid, code: u32, info: u64) -> Result<(), IsmError> {
        if !self.features().contains(Features::SW_EVENT) {
            return Err(TransportError::Missing("SW_EVENT").into());
        }
        let request = SignalEventRequest {
            gid,
            trigger: 1.into(),
            code: code.into(),
            info: info.into(),
            reserved: 0.into(),
        };
        self.command(Op::SignalEvent, request.as_bytes(), &mut [])
    }

    /// Whether the device has asked the owner to leave, and takes on no new DMB.
    pub fn is_leaving(&self) -> bool {
        self.leave.load(Ordering::Relaxed) != 0
    }

    /// Answers the request to leave with this number (`IsmEvent::Leave`): the owner no longer needs the
    /// device. Existing mappings stay. `false`: the device has asked again since, or has an answer.
    ///
    /// # Errors
    /// The device is gone, or was opened without [`OpenOptions::leaves`].
    pub fn left(&self, number: u32) -> Result<bool, IsmError> {
        if !self.features().contains(Features::LEAVE) {
            return Err(TransportError::Missing("LEAVE").into());
        }
        let request = LeftRequest { number: number.into(), reserved: 0.into() };
        match self.command(Op::Left, request.as_bytes(), &mut []) {
            Ok(()) => Ok(true),
            Err(IsmError::Refused { status: Status::Enoent, .. }) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// The device's counters, indexed by `virtio_ism_abi::command::stat`.
    ///
    /// # Errors
    /// The device does not count, or is gone.
    pub fn stats(&self) -> Result<[u64; 16], IsmError> {
        if !self.features().contains(Features::STATS) {
            return Err(TransportError::Missing("STATS").into());
        }
        let mut reply = StatsReply::new_zeroed();
        self.command(Op::Stats, &[], reply.as_mut_bytes())?;
        Ok(reply.counters.map(|counter| counter.get()))
    }

    /// Releases the slabs without own or attached DMBs. Returns the number of released slabs.
    ///
    /// # Errors
    /// The device is gone.
    pub fn release_idle_slabs(&self) -> Result<usize, IsmError> {
        self.slabs.unmap(self, |slab| slab.users == 0)
    }

    /// Releases the slabs of departed peers, except slabs with own or attached DMBs. A failure is only
    /// logged, because the next use or release of a slab tries again.
    pub fn release_departed_slabs(&self) {
        self.slabs.release_done(self);
    }

    /// Passes the pending records to `handle`, oldest first, and returns their number. A ring of a doorbell
    /// noted by [`on_reported`](Self::on_reported) counts as a record. Returns 0 at once while another thread
    /// is polling.
    ///
    /// A record of removed peer DMBs reaches `handle` after their paths have failed.
    ///
    /// # Errors
    /// The device is gone, and `handle` has got all earlier records.
    pub fn poll_events(&self, handle: &mut dyn FnMut(Event)) -> Result<usize, IsmError> {
        let _polling = match self.polling.try_lock() {
            Ok(guard) => guard,
            Err(TryLockError::Poisoned(guard)) => guard.into_inner(),
            Err(TryLockError::WouldBlock) => return Ok(0),
        };
        let mut n = 0;
        if let Some(doorbells) = self.running.window.doorbells() {
            doorbells.take_rung(&mut |slab| {
                n += 1;
                let mut wake = SlabWake::new_zeroed();
                (wake.n, wake.slabs[0]) = (1.into(), slab.into());
                handle(Event::SlabWake(wake));
            });
        }
        while n < EVENTS_PER_POLL {
            let Some(record) = self.running.queues.events.take()? else { break };
            n += 1;
            match Event::parse(&record) {
                Some(event) => {
                    self.note(&event);
                    handle(event);
                }
                None => {
                    self.unknown_events.fetch_add(1, Ordering::Relaxed);
                }
            }
        }
        self.running.queues.reap();
        Ok(n)
    }

    /// Adds raised signal lines of busy slabs to `raised`, at the cost of some loads.
    ///
    /// Only users with [`Line::set_in_slab`](virtio_ism_abi::signal::Line) on raise lines in this way.
    #[inline]
    pub fn poll_lines(&self, raised: &mut Vec<LineName>) {
        self.lines.poll(raised);
    }

    /// Like [`poll_lines`](Self::poll_lines), for the slab named by a SLAB_WAKE record. `false`: the users of
    /// the slab do not mark raised lines.
    pub fn take_slab(&self, slab: u32, raised: &mut Vec<LineName>) -> bool {
        self.lines.take_slab(slab, raised)
    }

    /// Asks users for a SLAB_WAKE record at the next raised line, for a thread about to sleep. `false`: there
    /// are news. [`disarm_lines`](Self::disarm_lines) follows in any case.
    #[must_use = "false means: do not sleep"]
    pub fn arm_lines(&self) -> bool {
        self.lines.arm()
    }

    /// Undoes one [`arm_lines`](Self::arm_lines).
    pub fn disarm_lines(&self) {
        self.lines.disarm();
    }

    /// Has users of slabs without news for long send a SLAB_WAKE record at the next line, so threads can stop
    /// reading these slabs. A thread polling lines calls this now and then.
    pub fn age_lines(&self) {
        self.lines.age();
    }

    /// Looks at slabs again whose users should have woken the owner. Once a second is often enough.
    pub fn recheck_lines(&self) {
        self.lines.recheck();
    }

    /// The interrupt: readable when a record arrives after
    /// [`arm_interrupts`](Self::arm_interrupts), and for good once the device is gone.
    pub fn event_fd(&self) -> BorrowedFd<'_> {
        self.running.queues.events.fd()
    }

    /// An epoll set with the edges of [`event_fd`](Self::event_fd) and of the doorbells rung by peers. A
    /// thread waiting for the device waits for the set, and passes reported names to
    /// [`on_reported`](Self::on_reported). `None`: there are no doorbells.
    pub fn event_set(&self) -> Option<BorrowedFd<'_>> {
        self.running.window.doorbells().map(Doorbells::set)
    }

    /// The set has reported this name.
    pub fn on_reported(&self, name: u64) {
        if let Some(doorbells) = self.running.window.doorbells() {
            doorbells.note_reported(name);
        }
    }

    /// Makes [`event_fd`](Self::event_fd) unreadable again (unless the device is gone).
    pub fn clear_event_fd(&self) {
        self.running.queues.events.clear_fd();
    }

    /// Asks for an interrupt at the next record. `false`: a record has arrived already, so poll
    /// instead of waiting.
    #[must_use = "false means: poll, do not wait"]
    pub fn arm_interrupts(&self) -> bool {
        self.running.queues.events.arm()
            && !self.running.window.doorbells().is_some_and(Doorbells::has_rung)
    }

    /// Asks for no interrupts: the caller polls.
    pub fn suppress_interrupts(&self) {
        self.running.queues.events.suppress();
    }

    /// Waits for a record (or the end of the device), at most `timeout`. `true`: poll now. Only one
    /// thread may wait at a time.
    ///
    /// # Errors
    /// As poll(2).
    pub fn wait_events(&self, timeout: Duration) -> Result<bool, IsmError> {
        if !self.arm_interrupts() {
            return Ok(true);
        }
        let system = |source| QueueError::System { what: "poll", source };
        let fd = self.event_set().unwrap_or_else(|| self.event_fd());
        let [state] = wait([(fd, PollInterest::Read)], Some(timeout)).map_err(system)?;
        let woken = state.readable || state.hang_up;
        if woken {
            self.clear_event_fd();
        }
        if let Some(set) = self.event_set() {
            let names = wait_in_set(set, Some(Duration::ZERO), None).map_err(system)?;
            names.for_each(|name| self.on_reported(name));
        }
        self.suppress_interrupts();
        Ok(woken)
    }

    /// Whether the child of a fork can take the device over.
    pub fn can_be_inherited(&self) -> bool {
        self.running.window.inheritance().is_some() && !self.is_gone()
    }

    /// The descriptors to wait for in a child with a taken-over device. The child then calls
    /// [`IsmDevice::serve`].
    pub fn waits_for(&self) -> Vec<RawFd> {
        self.running
            .window
            .inheritance()
            .map(|inheritance| inheritance.waits_for())
            .unwrap_or_default()
    }

    /// Answers requests of the device, in the child of a fork after taking the device over.
    pub fn serve(&self) {
        if let Some(inheritance) = self.running.window.inheritance() {
            inheritance.serve();
        }
    }

    /// Fails the DMBs named by an event as removed.
    fn note(&self, event: &Event) {
        match event {
            Event::DmbGone { token, .. } => self.attached.dmb_is_gone(*token),
            Event::PeerDown { gid, .. } => {
                // In this order: an attaching thread first adds the path and then checks whether the peer has
                // left.
                self.slabs.peer_is_gone(*gid);
                self.attached.peer_is_gone(*gid);
            }
            // Relaxed: the number orders no other access.
            Event::Leave { number, .. } => self.leave.store(*number, Ordering::Relaxed),
            Event::Stay { .. } => self.leave.store(0, Ordering::Relaxed),
            _ => {}
        }
    }

    fn command(&self, op: Op, body: &[u8], reply: &mut [u8]) -> Result<(), IsmError> {
        command(&self.running, op, body, reply)
    }

    fn running(&self) -> &RunningDevice {
        &self.running
    }

    /// Whether own DMBs should be asked for in the window.
    fn wants_window(&self) -> bool {
        self.prefer != Prefer::Move
            && self.features().contains(Features::WINDOW)
            && self.running.window_size() != 0
            && self.window_rate().is_none_or(|rate| rate >= measure::SLOWEST_WINDOW)
    }

    /// Whether the driver may sleep on armed words, and wakes sleeping owners.
    fn knows_futex(&self) -> bool {
        self.features().contains(Features::PEER_FUTEX)
    }

    /// Whether the driver raises the lines of slabs, and reads the lines of its own slabs.
    fn knows_slab_line(&self) -> bool {
        self.features().contains(Features::SLAB_LINE)
    }

    /// Whether the driver still has to measure the window.
    fn must_measure(&self) -> bool {
        self.prefer == Prefer::Auto
            && !self.running.window.is_cached()
            && self.window_rate.get().is_none()
    }
}

impl fmt::Debug for IsmDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IsmDevice")
            .field("gid", &self.gid)
            .field("chid", &self.chid())
            .field("gone", &self.is_gone())
            .finish_non_exhaustive()
    }
}

fn command(running: &RunningDevice, op: Op, body: &[u8], reply: &mut [u8]) -> Result<(), IsmError> {
    let start = Instant::now();
    let mut pause = Duration::from_micros(50);
    loop {
        let code = running.control(op, body, reply)?;
        match Status::from_code(code) {
            Some(Status::Ok) => return Ok(()),
            // The device limits the rate of commands, or the peer's event queue is full. UNREGISTER and
            // DETACH need the repetition most: they must not get lost.
            Some(Status::Eagain) if start.elapsed() < BUSY_TIMEOUT => {
                std::thread::sleep(pause);
                pause = (2 * pause).min(Duration::from_millis(5));
            }
            Some(status) => {
                // A device about to go refuses these two, too.
                if status == Status::Estate && !matches!(op, Op::Register | Op::Attach) {
                    running.health.lose_session();
                }
                return Err(IsmError::Refused { op, status });
            }
            None => return Err(IsmError::UnknownStatus { op, code }),
        }
    }
}

fn config_error(field: &'static str, value: u64) -> IsmError {
    TransportError::Config { field, value }.into()
}
