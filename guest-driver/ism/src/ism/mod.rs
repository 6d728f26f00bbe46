// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The driver of a virtio-ism device.
//!
//! [`IsmDevice`] sends HELLO and keeps the GID. [`OwnDmb`] is a buffer that one peer may write, and
//! [`PeerDmb`] is the right to write a buffer of a peer. [`PeerDmb::deliver`] writes a DMB in the
//! window with stores, and any other through the device.
//!
//! A slab (the unit in which the device maps the window) stays mapped when its last DMB is gone,
//! because the next connection to that peer will need it. The driver releases it when the peer has
//! left the fabric, or by [`IsmDevice::release_idle_slabs`].

use std::fmt;
use std::os::fd::{BorrowedFd, RawFd};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
use std::sync::{Arc, Mutex, OnceLock, TryLockError};
use std::time::{Duration, Instant};

use virtio_ism_abi::command::{
    HelloReply, HelloRequest, LeftRequest, Op, QueryGidReply, QueryGidRequest, SignalEventRequest,
    StatsReply, peer_flags,
};
use virtio_ism_abi::config::{Config, Features};
use virtio_ism_abi::event::{Event, SlabWake};
use virtio_ism_abi::{Chid, Gid, REVISION, Status, Token};
use zerocopy::{FromZeros, IntoBytes};

use crate::transport::{Doorbells, RunningDevice, TransportError};
use crate::virtqueue::QueueError;
use ism_sys::{ForkLocks, LockGuardList, PollInterest, is_free, try_hold, wait, wait_in_set};

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

/// Records that one call of [`IsmDevice::poll_events`] passes on, at most.
pub const EVENTS_PER_POLL: usize = 1024;

/// How long the driver repeats a command that a busy device refuses.
const BUSY_TIMEOUT: Duration = Duration::from_millis(500);

/// What a device answers about a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerFlags {
    /// Both sides can map, so that DMBs in the window work in both directions.
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
    window_rate: OnceLock<u64>,
    polling: Mutex<()>,
    unknown_events: AtomicU64,
    // Number of the last request to leave; 0: the device has not asked, or has taken it back.
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

    /// Sends HELLO to a device that is set up.
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
        let hello = HelloRequest { abi: REVISION.into(), driver_max_idx: max_dmbs.into() };
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
            window_rate: OnceLock::new(),
            polling: Mutex::new(()),
            unknown_events: AtomicU64::new(0),
            leave: AtomicU32::new(0),
        }))
    }

    /// The device's GID, fresh with every HELLO.
    pub fn gid(&self) -> Gid {
        self.gid
    }

    /// The fabric.
    pub fn chid(&self) -> Chid {
        Chid(self.config().chid.get())
    }

    /// Number of this session on the device's socket, from 1.
    pub fn session(&self) -> u32 {
        self.session
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

    /// Whether earlier reads of DMBs have read the bytes of the DMBs. `false`: the device is gone
    /// and its memory with it, so these reads may have read zeros.
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

    /// Says that nobody reads own DMBs any more that were not kept ([`OwnDmb::keep`]). A device whose
    /// memory goes with it waits for that when it is gone, some seconds at most, if it was opened with
    /// [`OpenOptions::leaves`].
    pub fn let_go(&self) {
        self.running.window.let_go();
    }

    /// Speed of a copy into the window in bytes per second; none until the first DMB of the
    /// window, or if the window is known to be ordinary memory.
    pub fn window_rate(&self) -> Option<u64> {
        self.window_rate.get().copied()
    }

    /// Measures stores into and loads from the window, in a DMB that only this device can reach.
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

    /// Whether the device has said, not long ago, that a GID has left the fabric.
    pub fn has_left(&self, gid: Gid) -> bool {
        self.slabs.has_left(gid)
    }

    /// Notes that a GID has left the fabric, as [`query_gid`](Self::query_gid) has said before the
    /// record came.
    pub fn note_left(&self, gid: Gid) {
        self.slabs.peer_is_gone(gid);
    }

    /// Makes a zeroed DMB of `len` bytes that `user` may write. It lies in the window if both sides
    /// can map it and the options prefer that, else in guest memory.
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

    /// A DMB of a peer that has left the fabric, for a connection that still has bytes to read.
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

    /// Answers the request to leave with this number (`IsmEvent::Leave`): the owner needs the device no
    /// more. What is mapped stays mapped. `false`: the device has asked again since, or has an answer.
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

    /// Releases the slabs that no own or attached DMB uses. Returns how many.
    ///
    /// # Errors
    /// The device is gone.
    pub fn release_idle_slabs(&self) -> Result<usize, IsmError> {
        self.slabs.unmap(self, |slab| slab.users == 0)
    }

    /// Releases the slabs of peers that have left, if no own or attached DMB uses them. A failure
    /// is only logged, because the next use or release of a slab tries again.
    pub fn release_departed_slabs(&self) {
        self.slabs.release_done(self);
    }

    /// Passes the records that have arrived to `handle`, oldest first, and returns how many. A ring
    /// of a doorbell that [`on_reported`](Self::on_reported) has noted counts as a record.
    /// Returns 0 at once if another thread is polling.
    ///
    /// If a record says that peer DMBs are gone, they have failed before `handle` gets the record.
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

    /// Adds the signal lines that users have raised to `raised`, of slabs that were busy lately. This
    /// costs some loads.
    ///
    /// A user raises lines in this way whose [`Line::set_in_slab`](virtio_ism_abi::signal::Line) is on.
    #[inline]
    pub fn poll_lines(&self, raised: &mut Vec<LineName>) {
        self.lines.poll(raised);
    }

    /// As [`poll_lines`](Self::poll_lines), of a slab that a SLAB_WAKE record names. `false`: its users
    /// do not say which lines they raise.
    pub fn take_slab(&self, slab: u32, raised: &mut Vec<LineName>) -> bool {
        self.lines.take_slab(slab, raised)
    }

    /// Asks users for a SLAB_WAKE record when they next raise a line, for a thread that is about to
    /// sleep. `false`: there are news. [`disarm_lines`](Self::disarm_lines) follows in any case.
    #[must_use = "false means: do not sleep"]
    pub fn arm_lines(&self) -> bool {
        self.lines.arm()
    }

    /// Undoes one [`arm_lines`](Self::arm_lines).
    pub fn disarm_lines(&self) {
        self.lines.disarm();
    }

    /// Has users of slabs without news for long send a SLAB_WAKE record at the next, so that nobody
    /// looks at these slabs. A thread that polls lines calls this now and then.
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

    /// An epoll set with the edges of [`event_fd`](Self::event_fd) and of the doorbells that peers
    /// ring. A thread that waits for the device waits for the set, and calls
    /// [`on_reported`](Self::on_reported) with what it reports. `None`: there are no doorbells.
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
    /// Those of poll(2).
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

    /// The descriptors for which a child that has taken the device over waits; it then calls
    /// [`IsmDevice::serve`].
    pub fn waits_for(&self) -> Vec<RawFd> {
        self.running
            .window
            .inheritance()
            .map(|inheritance| inheritance.waits_for())
            .unwrap_or_default()
    }

    /// Answers what the device asks, in a child that has taken the device over.
    pub fn serve(&self) {
        if let Some(inheritance) = self.running.window.inheritance() {
            inheritance.serve();
        }
    }

    /// Fails the DMBs that an event says are gone.
    fn note(&self, event: &Event) {
        match event {
            Event::DmbGone { token, .. } => self.attached.dmb_is_gone(*token),
            Event::PeerDown { gid, .. } => {
                // In this order: a thread that attaches adds the path and then asks whether the
                // peer has left.
                self.slabs.peer_is_gone(*gid);
                self.attached.peer_is_gone(*gid);
            }
            // Relaxed: nothing is ordered by it.
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

    /// Whether the driver may sleep on armed words, and wakes those who do.
    fn knows_futex(&self) -> bool {
        self.features().contains(Features::PEER_FUTEX)
    }

    /// Whether the driver raises the lines of slabs, and looks at those of its own.
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
            // The device limits the rate of commands, or the peer's event queue is full. Repeating
            // matters most for UNREGISTER and DETACH, which must not get lost.
            Some(Status::Eagain) if start.elapsed() < BUSY_TIMEOUT => {
                std::thread::sleep(pause);
                pause = (2 * pause).min(Duration::from_millis(5));
            }
            Some(status) => return Err(IsmError::Refused { op, status }),
            None => return Err(IsmError::UnknownStatus { op, code }),
        }
    }
}

fn config_error(field: &'static str, value: u64) -> IsmError {
    TransportError::Config { field, value }.into()
}
