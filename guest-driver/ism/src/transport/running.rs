//! A device whose queues run, whichever transport carries it.

use std::fmt;
use std::os::fd::{BorrowedFd, RawFd};
use std::sync::Arc;

use virtio_ism_abi::Token;
use virtio_ism_abi::command::Op;
use virtio_ism_abi::config::{Config, Features};
use virtio_ism_abi::event::EVENT_LEN;

use super::doorbells::Doorbells;
use crate::virtqueue::{GuestMem, GuestPool, Health, MovePath, QueueError, Queues};
use ism_sys::{LockGuardList, SharedSlice};

/// What differs between transports: the window, and the connection to the device.
///
/// Dropping it closes the device: afterwards the device no longer uses memory of this process.
pub(crate) trait Window: Send + Sync {
    /// Size of the window in bytes; 0 if there is none.
    fn size(&self) -> u64;

    /// A view of a part of the window; `None` unless all of the part is mapped.
    fn slice(&self, offset: u64, len: u64) -> Option<SharedSlice>;

    /// Whether the window is ordinary cached memory by construction, so that there is no need to
    /// measure it.
    fn is_cached(&self) -> bool;

    /// Whether window and guest memory keep their bytes when the device is gone.
    fn outlives_device(&self) -> bool;

    /// The doorbells of the slabs; `None`: users kick.
    fn doorbells(&self) -> Option<&Doorbells> {
        None
    }

    /// What lets the child of a fork take the device over; `None`: no child can.
    fn inheritance(&self) -> Option<&dyn ForkTransport> {
        None
    }
}

/// A connection to a device that a child of a fork can take over.
///
/// The child has all memory and descriptors, and no threads. What a thread of the parent did for
/// the connection, the child does by calling [`ForkTransport::serve`].
pub(crate) trait ForkTransport {
    /// Holds the locks of the connection, so that no thread uses it. `false`: one does.
    fn try_hold<'a>(&'a self, held: &mut LockGuardList<'a>) -> bool;

    /// Whether no thread holds a lock of it that [`ForkTransport::try_hold`] does not hold.
    fn is_unlocked(&self) -> bool;

    /// The descriptors that it needs.
    fn descriptors(&self) -> Vec<RawFd>;

    /// The descriptors for which the child waits: when one is readable or hung up, it calls
    /// [`ForkTransport::serve`].
    fn waits_for(&self) -> Vec<RawFd>;

    /// Answers what the device asks, without waiting.
    fn serve(&self);
}

/// A device that is set up, with its queues running: what the driver ([`IsmDevice`](crate::IsmDevice)) works with.
///
/// All methods may be called from any thread. A device fails once and for all: when it vanishes,
/// breaks a rule of virtio or does not answer in time, [`is_gone`](Self::is_gone) turns true, every
/// call fails, and the event descriptor becomes and stays readable, so that a thread that sleeps on
/// it wakes up. Dropping a `RunningDevice` closes the device.
pub struct RunningDevice {
    // First, since fields are dropped in this order: the device must be closed before queues and
    // pool, which it uses, are freed.
    window: Box<dyn Window>,
    queues: Queues,
    pool: Arc<GuestPool>,
    health: Arc<Health>,
    config: Config,
    features: Features,
}

impl RunningDevice {
    pub(crate) fn new(
        config: Config,
        features: Features,
        queues: Queues,
        pool: Arc<GuestPool>,
        health: Arc<Health>,
        window: Box<dyn Window>,
    ) -> RunningDevice {
        RunningDevice { window, queues, pool, health, config, features }
    }

    /// The device's configuration, as it was at start.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// The features in use.
    pub fn features(&self) -> Features {
        self.features
    }

    /// Executes a control command: sends `body` (the bytes after the request header) and, if the
    /// status is OK, fills `reply` (the bytes after the reply header) completely. Returns the
    /// status code of the answer.
    ///
    /// Blocks until the device answers; several threads may have commands under way.
    ///
    /// # Errors
    /// The device is gone, did not answer within
    /// [`CONTROL_TIMEOUT`](crate::virtqueue::CONTROL_TIMEOUT) (and is gone from now on), or
    /// answered something else.
    pub fn control(&self, op: Op, body: &[u8], reply: &mut [u8]) -> Result<u16, QueueError> {
        self.queues.control.command(op, body, reply)
    }

    /// Takes the next event record and gives its buffer back to the device.
    ///
    /// # Errors
    /// The device is gone (after the last record was taken) or broke a rule.
    pub fn try_event(&self) -> Result<Option<[u8; EVENT_LEN]>, QueueError> {
        self.queues.events.take()
    }

    /// Becomes readable when a record arrives after [`arm_events`](Self::arm_events), or when the
    /// device is gone.
    pub fn event_fd(&self) -> BorrowedFd<'_> {
        self.queues.events.fd()
    }

    /// Makes [`event_fd`](Self::event_fd) unreadable, unless the device is gone.
    pub fn clear_event_fd(&self) {
        self.queues.events.clear_fd();
    }

    /// Asks for one interrupt when the next record arrives. `false`: a record is there already (or
    /// the device is gone), do not wait.
    pub fn arm_events(&self) -> bool {
        self.queues.events.arm()
    }

    /// Asks for no interrupts: the caller polls. One that is on its way may still come.
    pub fn suppress_events(&self) {
        self.queues.events.suppress();
    }

    /// Prepares moves and kicks to a DMB: chooses its queue, makes its kick chain.
    ///
    /// # Errors
    /// No memory for the kick chain is left, or the device has no move queue.
    pub fn open_path(&self, token: Token) -> Result<Arc<MovePath>, QueueError> {
        self.queues.open_path(token)
    }

    /// Closes a path; a chain under way keeps its memory until it is back.
    pub fn close_path(&self, path: &MovePath) {
        if let Ok(queue) = self.queues.of(path) {
            queue.close_path(path);
        }
    }

    /// Most payload bytes of one [`post_move`](Self::post_move).
    pub fn max_payload(&self) -> usize {
        self.queues.max_payload()
    }

    /// Copies the pieces (offset in the DMB, bytes) into memory that the device can reach, and
    /// posts one MOVE. The device executes the moves of one path in the order of posting. The call
    /// waits for a free slot if need be, but not for the move; the queue notes a refusal in `path`.
    ///
    /// # Errors
    /// There are more than [`MAX_PIECES`](crate::virtqueue::MAX_PIECES) pieces or
    /// [`max_payload`](Self::max_payload) bytes, or the device is gone.
    pub fn post_move(
        &self,
        path: &MovePath,
        pieces: &[(u32, &[u8])],
        signal: bool,
    ) -> Result<(), QueueError> {
        self.queues.of(path)?.post(path, pieces, signal)
    }

    /// Wakes the owner of the DMB by a MOVE without payload. Does nothing while the device has not
    /// executed the previous kick of this path, since that one wakes the owner.
    ///
    /// # Errors
    /// The device is gone, or the queue stayed full ([`QueueError::Busy`]).
    pub fn post_kick(&self, path: &MovePath) -> Result<(), QueueError> {
        self.queues.of(path)?.kick(path)
    }

    /// Notes the outcome of moves that are done. Posting does that, too.
    pub fn reap(&self) {
        self.queues.reap();
    }

    /// Size of the window in bytes; 0 if there is none.
    pub fn window_size(&self) -> u64 {
        self.window.size()
    }

    /// A view of a part of the window; `None` unless all of the part is mapped.
    pub fn window_slice(&self, offset: u64, len: u64) -> Option<SharedSlice> {
        self.window.slice(offset, len)
    }

    /// Whether the window is ordinary cached memory by construction, so that there is no need to
    /// measure it.
    pub fn window_is_cached(&self) -> bool {
        self.window.is_cached()
    }

    /// The doorbells of the slabs; `None`: users kick.
    pub(crate) fn doorbells(&self) -> Option<&Doorbells> {
        self.window.doorbells()
    }

    /// What lets the child of a fork take the device over; `None`: no child can.
    pub(crate) fn inheritance(&self) -> Option<&dyn ForkTransport> {
        self.window.inheritance()
    }

    /// Holds the locks of all queues and of the connection, so that no thread uses the device.
    /// `false`: one does, or no child could take the device over.
    pub(crate) fn try_hold<'a>(&'a self, held: &mut LockGuardList<'a>) -> bool {
        self.queues.try_hold(held)
            && self.inheritance().is_some_and(|inheritance| inheritance.try_hold(held))
    }

    /// Whether no thread holds a lock that [`RunningDevice::try_hold`] does not hold.
    pub(crate) fn is_unlocked(&self) -> bool {
        let connection = self.inheritance().is_none_or(ForkTransport::is_unlocked);
        connection && self.pool.is_unlocked() && self.health.is_unlocked()
    }

    /// The descriptors that the driver needs.
    pub(crate) fn descriptors(&self) -> Vec<RawFd> {
        let mut all = self.health.descriptors();
        all.extend(self.inheritance().into_iter().flat_map(ForkTransport::descriptors));
        all
    }

    /// Zeroed memory that the device can reach, aligned to its length rounded up to a power of
    /// two (at most 2 MiB).
    ///
    /// # Errors
    /// The pool is used up.
    pub fn alloc_guest(&self, len: usize) -> Result<GuestMem, QueueError> {
        self.pool.alloc(len)
    }

    /// Whether the device is gone or failed.
    #[inline]
    pub fn is_gone(&self) -> bool {
        self.health.is_gone()
    }

    /// Whether window and guest memory keep their bytes when the device is gone. Where they do not,
    /// they read as zeros at some time after [`is_gone`](Self::is_gone) has turned true.
    pub fn memory_outlives_device(&self) -> bool {
        self.window.outlives_device()
    }
}

impl fmt::Debug for RunningDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RunningDevice")
            .field("features", &self.features)
            .field("gone", &self.is_gone())
            .finish_non_exhaustive()
    }
}
