//! Ways to reach a virtio-ism device.
//!
//! [`Transport`] is what the driver ([`crate::ism`]) needs of a device, whatever carries it: a
//! control command with its reply, event records, moves and kicks, a window, and memory that the
//! device can reach. [`vhost_user`] is the transport of a host process or container, [`pci`] that of
//! a virtual machine.
//!
//! A transport fails once and for all: when the device vanishes, breaks a rule of virtio or does
//! not answer in time, [`Transport::is_gone`] turns true, every call fails, and the event
//! descriptor becomes and stays readable so that whoever sleeps on it looks.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::Duration;

use thiserror::Error;
use virtio_ism_abi::command::Op;
use virtio_ism_abi::config::{Config, Features};
use virtio_ism_abi::event::EVENT_LEN;
use virtio_ism_abi::{Status, Token};

use crate::sys::{OutOfBounds, RingError, SharedSlice};

mod address;
#[cfg(test)]
pub(crate) mod fake;
mod health;
mod memory;
pub mod pci;
mod queues;
mod running;
pub mod vhost_user;

pub use address::{DeviceAddress, NoPciAddress, PciAddress};
pub use memory::{GuestMem, GuestPool};

/// How long a control command may take before the device counts as failed.
pub const CONTROL_TIMEOUT: Duration = Duration::from_secs(5);

/// Most pieces of one [`Transport::post_move`].
pub const MAX_PIECES: usize = 8;

/// What can go wrong between driver and device.
#[derive(Debug, Error)]
pub enum TransportError {
    /// The device could not be reached.
    #[error("{what}: {source}")]
    Connect {
        /// What was tried.
        what: String,
        /// What the system said.
        source: io::Error,
    },
    /// A PCI device cannot be used.
    #[error("PCI device {address}: {source}")]
    Pci {
        /// Where it is.
        address: PciAddress,
        /// Why not.
        source: pci::PciError,
    },
    /// No PCI device can be used; which ones were tried, and what came of it.
    #[error("no free ISM device: {0}")]
    NoPciDevice(String),
    /// A step of setting the device up failed.
    #[error("setting up the device, {step}: {reason}")]
    Setup {
        /// What was tried.
        step: &'static str,
        /// What came of it.
        reason: String,
    },
    /// The device's configuration makes no sense to this driver.
    #[error("configuration field {field} is {value}")]
    Config {
        /// The field.
        field: &'static str,
        /// Its value.
        value: u64,
    },
    /// The device lacks something the driver cannot do without.
    #[error("the device does not offer {0}")]
    Missing(&'static str),
    /// The device is gone or failed.
    #[error("the device is gone")]
    Gone,
    /// The device did not answer in time and counts as failed from now on.
    #[error("no answer to {what} for {after:?}")]
    Timeout {
        /// What was waited for.
        what: &'static str,
        /// For how long.
        after: Duration,
    },
    /// A request or reply does not fit its buffers, or the reply is not the one expected.
    #[error("{what} of {len} bytes instead of {expected}")]
    Length {
        /// What it is.
        what: &'static str,
        /// Its length, bytes.
        len: usize,
        /// The length that fits or was expected, bytes.
        expected: usize,
    },
    /// The reply carries another command's tag.
    #[error("reply with tag {got} to a command with tag {expected}")]
    Tag {
        /// The tag in the reply.
        got: u32,
        /// The tag of the request.
        expected: u32,
    },
    /// No memory for the device is left.
    #[error("no {wanted} bytes left of {size} bytes of guest memory")]
    OutOfMemory {
        /// Bytes wanted.
        wanted: usize,
        /// Bytes of the whole pool.
        size: usize,
    },
    /// No slot or descriptor is free for now; nothing was posted.
    #[error("the queue is full")]
    Busy,
    /// A queue is broken.
    #[error("virtqueue: {0}")]
    Ring(#[from] RingError),
    /// A computed range lies outside the shared memory.
    #[error(transparent)]
    Bounds(#[from] OutOfBounds),
    /// A system call failed.
    #[error("{what}: {source}")]
    System {
        /// What was tried.
        what: &'static str,
        /// What the system said.
        source: io::Error,
    },
}

/// The way to one peer DMB through the device: the token, and what became of moves and kicks to
/// it. Completions come late, so a refusal is noted here and seen by the next delivery.
#[derive(Debug)]
pub struct MovePath {
    token: Token,
    queue: u16,
    slot: u32,
    failure: AtomicU16,
}

/// `failure` of a path that was failed for a reason that is not a move's status.
const FAILED_LOCALLY: u16 = u16::MAX;

impl MovePath {
    pub(crate) fn new(token: Token, queue: u16, slot: u32) -> MovePath {
        MovePath { token, queue, slot, failure: AtomicU16::new(0) }
    }

    /// The DMB's token.
    pub fn token(&self) -> Token {
        self.token
    }

    pub(crate) fn queue(&self) -> u16 {
        self.queue
    }

    pub(crate) fn slot(&self) -> u32 {
        self.slot
    }

    /// Whether the DMB is of no use any more.
    #[inline]
    pub fn is_failed(&self) -> bool {
        // Relaxed: a hint that stops further deliveries; it guards no data.
        self.failure.load(Ordering::Relaxed) != 0
    }

    /// The status of the move that failed, if one did.
    pub fn refusal(&self) -> Option<Status> {
        match self.failure.load(Ordering::Relaxed) {
            0 | FAILED_LOCALLY => None,
            code => Status::from_code(code),
        }
    }

    /// Marks the DMB as of no use (its owner is gone).
    pub fn fail(&self) {
        self.note(FAILED_LOCALLY);
    }

    /// Marks the DMB as of no use because the device answered a move with this code.
    pub(crate) fn note(&self, code: u16) {
        // The first reason stays.
        let _ = self.failure.compare_exchange(0, code, Ordering::Relaxed, Ordering::Relaxed);
    }
}

/// What the driver needs of a device.
///
/// All methods may be called from any thread.
pub trait Transport: Send + Sync {
    /// The device's configuration, read once at start.
    fn config(&self) -> &Config;

    /// The features in use.
    fn features(&self) -> Features;

    /// Executes a control command: sends `body` (the bytes after the request header) and, if the
    /// status is OK, fills `reply` (the bytes after the reply header) completely.
    ///
    /// Blocks until the device answers; several threads may have commands under way.
    ///
    /// # Errors
    /// The device is gone, did not answer within [`CONTROL_TIMEOUT`] (and is gone from now on), or
    /// answered something else. The status code of an answer is not an error here.
    fn control(&self, op: Op, body: &[u8], reply: &mut [u8]) -> Result<u16, TransportError>;

    /// Takes the next event record; its buffer goes back to the device.
    ///
    /// # Errors
    /// The device is gone (after the last record was taken) or broke a rule.
    fn try_event(&self) -> Result<Option<[u8; EVENT_LEN]>, TransportError>;

    /// Becomes readable when a record arrives after [`arm_events`](Self::arm_events), or when the
    /// device is gone.
    fn event_fd(&self) -> BorrowedFd<'_>;

    /// Makes [`event_fd`](Self::event_fd) unreadable, unless the device is gone.
    fn clear_event_fd(&self);

    /// Asks for one interrupt when the next record arrives. `false`: a record is there already (or
    /// the device is gone), do not wait.
    fn arm_events(&self) -> bool;

    /// Asks for no interrupts: the caller polls. One that is on its way may still come.
    fn suppress_events(&self);

    /// Prepares moves and kicks to a DMB: chooses its queue, makes its kick chain.
    ///
    /// # Errors
    /// No memory for the kick chain is left; the device is gone.
    fn open_path(&self, token: Token) -> Result<Arc<MovePath>, TransportError>;

    /// Ends a path; a chain under way keeps its memory until it is back.
    fn close_path(&self, path: &MovePath);

    /// Most payload bytes of one [`post_move`](Self::post_move).
    fn max_payload(&self) -> usize;

    /// Copies the pieces (offset in the DMB, bytes) into memory of the device's and posts one
    /// MOVE. Moves of one path are executed in the order of posting. Waits for a free slot if need
    /// be, but not for the move; a refusal is noted in `path`.
    ///
    /// # Errors
    /// More than [`MAX_PIECES`] pieces or `max_payload` bytes; the device is gone.
    fn post_move(
        &self,
        path: &MovePath,
        pieces: &[(u32, &[u8])],
        signal: bool,
    ) -> Result<(), TransportError>;

    /// Wakes the owner of the DMB: a MOVE without payload. Does nothing while the previous kick of
    /// this path is still to be executed, since that one will do.
    ///
    /// # Errors
    /// The device is gone, or the queue stayed full ([`TransportError::Busy`]).
    fn post_kick(&self, path: &MovePath) -> Result<(), TransportError>;

    /// Notes the outcome of moves that are done. Posting does that, too.
    fn reap(&self);

    /// Size of the window in bytes; 0 if there is none.
    fn window_size(&self) -> u64;

    /// A view of a part of the window; `None` unless all of it is mapped.
    fn window_slice(&self, offset: u64, len: u64) -> Option<SharedSlice>;

    /// Whether the window is ordinary cached memory by construction, so that there is no need to
    /// measure it.
    fn window_is_cached(&self) -> bool;

    /// Zeroed memory that the device can reach, aligned to its length rounded up to a power of
    /// two (at most 2 MiB).
    ///
    /// # Errors
    /// The pool is used up.
    fn alloc_guest(&self, len: usize) -> Result<GuestMem, TransportError>;

    /// Whether the device is gone or failed.
    fn is_gone(&self) -> bool;

    /// Whether window and guest memory keep their bytes when the device is gone. Where they do not,
    /// they read as zeros at some time after [`is_gone`](Self::is_gone) has turned true.
    fn memory_outlives_device(&self) -> bool;
}
