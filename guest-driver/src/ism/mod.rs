//! The driver: what a virtio-ism device can do, as calls.
//!
//! [`IsmDevice`] says HELLO and keeps the GID; [`OwnDmb`] is a buffer that one peer may write,
//! [`PeerDmb`] the right to write a buffer of a peer. Window and move look alike: a DMB in the
//! window is written with stores, any other through the device, by the same
//! [`PeerDmb::deliver`].
//!
//! A slab (the unit in which the device maps the window) stays mapped when its last DMB is gone,
//! because the next connection to that peer will want it; it is given back when the peer has left
//! the fabric, or by [`IsmDevice::release_idle_slabs`].

use std::fmt;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::sync::{Arc, Mutex, OnceLock, TryLockError};
use std::time::{Duration, Instant};

use virtio_ism_abi::command::{
    HelloReply, HelloRequest, Op, QueryGidReply, QueryGidRequest, SignalEventRequest, StatsReply,
    peer_flags,
};
use virtio_ism_abi::config::{Config, Features};
use virtio_ism_abi::event::Event;
use virtio_ism_abi::{Chid, Gid, REVISION, Status, Token};
use zerocopy::{FromZeros, IntoBytes};

use crate::sys::{Interest, wait};
use crate::transport::{RunningDevice, TransportError};
use crate::virtqueue::QueueError;

mod attached;
mod error;
mod index;
mod measure;
mod options;
mod own;
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
use slabs::SlabTable;

/// Offset in a DMB of the producer word of SMC-D's control block, bytes (CDC "prod" cursor).
pub const PRODUCER_WORD: u32 = 8;
/// Offset in a DMB of the consumer-and-flags word of SMC-D's control block, bytes.
pub const CONSUMER_WORD: u32 = 16;
/// Length of SMC-D's control block at the start of a DMB, bytes.
pub const CONTROL_BLOCK: u32 = 32;

/// Records that one [`IsmDevice::poll_events`] hands over at most.
pub(crate) const EVENTS_PER_POLL: usize = 1024;

/// How long a command that the device is too busy for is tried again.
const BUSY_PATIENCE: Duration = Duration::from_millis(if cfg!(test) { 20 } else { 500 });

/// What the device says of a peer.
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
    attached: Attached,
    // Bytes per second of the window, once measured.
    window_rate: OnceLock<u64>,
    polling: Mutex<()>,
    unknown_events: AtomicU64,
}

impl IsmDevice {
    /// Opens the device and says HELLO.
    ///
    /// # Errors
    /// The device cannot be reached, is no virtio-ism device of this revision, or refuses HELLO.
    pub fn open(options: OpenOptions) -> Result<Arc<IsmDevice>, IsmError> {
        let running = options.address.open(options.move_queues, options.guest_memory)?;
        Self::open_on(running, &options)
    }

    /// Says HELLO to a device that is set up.
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
            attached: Attached::default(),
            window_rate: OnceLock::new(),
            polling: Mutex::new(()),
            unknown_events: AtomicU64::new(0),
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

    /// Number of this device life on its socket, from 1.
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

    /// Whether the device is gone or failed: nothing works any more, sleepers were woken.
    #[inline]
    pub fn is_gone(&self) -> bool {
        self.running.is_gone()
    }

    /// Whether what was read from DMBs before this call was theirs. `false`: the device is gone
    /// and its memory with it, zeros may have been read instead.
    #[inline]
    pub fn has_memory(&self) -> bool {
        // Orders the reads before the look: memory goes after the device is marked as gone.
        fence(Ordering::Acquire);
        !self.running.is_gone() || self.running.memory_outlives_device()
    }

    /// Speed of a copy into the window in bytes per second; none until the first DMB of the
    /// window, or if the window is known to be ordinary memory.
    pub fn window_rate(&self) -> Option<u64> {
        self.window_rate.get().copied()
    }

    /// Measures stores into and loads from the window, in memory that nobody else sees.
    ///
    /// # Errors
    /// There is no window, the device has no room in it, or is gone.
    pub fn measure_window(self: &Arc<Self>) -> Result<WindowSpeed, IsmError> {
        if !self.features().contains(Features::WINDOW) || self.running.window_size() == 0 {
            return Err(TransportError::Missing("a window").into());
        }
        own::measure_window(self)
    }

    /// Records of unknown types that were ignored.
    pub fn unknown_events(&self) -> u64 {
        self.unknown_events.load(Ordering::Relaxed)
    }

    /// Asks whether a GID is on this fabric; `None` if not.
    ///
    /// # Errors
    /// The device is gone or refuses (too many questions).
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

    /// Makes a DMB of `len` bytes that `user` may write: in the window if possible on both sides
    /// (and preferred), else in guest memory. It is zeroed.
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
    /// No such token (or not ours to use), another length, a mapping that does not come, or the
    /// device is gone. Nothing stays attached then.
    pub fn attach(self: &Arc<Self>, token: Token, expected_len: u32) -> Result<PeerDmb, IsmError> {
        peer::attach(self, token, expected_len)
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

    /// Gives slabs back in which nothing is owned or attached; how many.
    ///
    /// # Errors
    /// The device is gone.
    pub fn release_idle_slabs(&self) -> Result<usize, IsmError> {
        self.slabs.release(self, |slab| slab.users == 0)
    }

    /// Gives slabs of peers that left back, in which nothing is owned or attached. A failure is not worth
    /// more than a log line: the next one that is used or let go tries again.
    pub(crate) fn release_departed_slabs(&self) {
        self.slabs.release_done(self);
    }

    /// Hands over the records that have arrived, oldest first, and says how many. Returns 0 at
    /// once if another thread is at it.
    ///
    /// Peer DMBs that a record declares gone are marked as failed before `handle` sees it.
    ///
    /// # Errors
    /// The device is gone (and all records before were handed over).
    pub fn poll_events(&self, handle: &mut dyn FnMut(Event)) -> Result<usize, IsmError> {
        let _polling = match self.polling.try_lock() {
            Ok(guard) => guard,
            Err(TryLockError::Poisoned(guard)) => guard.into_inner(),
            Err(TryLockError::WouldBlock) => return Ok(0),
        };
        let mut n = 0;
        while n < EVENTS_PER_POLL {
            let Some(record) = self.running.try_event()? else { break };
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
        self.running.reap();
        Ok(n)
    }

    /// The interrupt: readable when a record arrives after [`arm_interrupts`](Self::arm_interrupts),
    /// and for good once the device is gone.
    pub fn event_fd(&self) -> BorrowedFd<'_> {
        self.running.event_fd()
    }

    /// Makes [`event_fd`](Self::event_fd) unreadable again (unless the device is gone).
    pub fn clear_event_fd(&self) {
        self.running.clear_event_fd();
    }

    /// Asks for an interrupt at the next record. `false`: something is there already, poll instead
    /// of waiting.
    #[must_use = "false means: poll, do not wait"]
    pub fn arm_interrupts(&self) -> bool {
        self.running.arm_events()
    }

    /// Asks for no interrupts, for a leader that polls.
    pub fn suppress_interrupts(&self) {
        self.running.suppress_events();
    }

    /// Waits for a record (or the end of the device), at most `timeout`. `true`: poll now. For one
    /// thread at a time.
    ///
    /// # Errors
    /// What poll says.
    pub fn wait_events(&self, timeout: Duration) -> Result<bool, IsmError> {
        if !self.arm_interrupts() {
            return Ok(true);
        }
        let [state] = wait([(self.event_fd(), Interest::Read)], Some(timeout))
            .map_err(|source| QueueError::System { what: "poll", source })?;
        let woken = state.readable || state.hang_up;
        if woken {
            self.clear_event_fd();
        }
        self.suppress_interrupts();
        Ok(woken)
    }

    /// Marks what an event declares gone.
    fn note(&self, event: &Event) {
        match event {
            Event::DmbGone { token, .. } => self.attached.dmb_is_gone(*token),
            Event::PeerDown { gid, .. } => {
                // In this order: who attaches now adds the DMB and then asks whether the peer has left.
                self.slabs.peer_is_gone(*gid);
                self.attached.peer_is_gone(*gid);
            }
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

    /// Whether the window's speed is still to be found out.
    fn must_measure(&self) -> bool {
        self.prefer == Prefer::Auto
            && !self.running.window_is_cached()
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
            // Too fast for the device, or the peer's event queue is full. Most of all the ends of
            // DMBs must not get lost by that.
            Some(Status::Eagain) if start.elapsed() < BUSY_PATIENCE => {
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
