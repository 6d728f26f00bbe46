// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A device with running queues, over any transport.

use std::fmt;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use virtio_ism_abi::command::Op;
use virtio_ism_abi::config::{Config, Features};

use super::doorbells::Doorbells;
use crate::virtqueue::{GuestPool, Health, QueueError, Queues};
use ism_sys::{ForkLocks, LockGuardList, SharedSlice};

/// The driver's requirements of a device, for any transport.
#[derive(Clone, Copy, Debug)]
pub struct SetupOptions {
    /// Move queues, at most the device's number; at least 1.
    pub move_queues: u16,
    /// Size of the memory for the device, bytes.
    pub guest_memory: u64,
    /// The driver's owner leaves at the device's request.
    pub leaves: bool,
    /// The only user besides root whose daemon may have the device; `None`: any user's daemon may.
    pub owner: Option<u32>,
}

impl SetupOptions {
    /// Features refused by the driver for its owner.
    pub(crate) fn refused(self) -> Features {
        if self.leaves { Features::empty() } else { Features::LEAVE }
    }
}

/// The nonce carried by a slab, and its place in the window.
#[derive(Clone, Debug)]
pub(crate) struct SlabMark {
    pub(crate) at: SharedSlice,
    pub(crate) nonce: u64,
}

impl SlabMark {
    /// The number at the place of the nonce. Orders earlier reads of the slab before the look.
    pub(crate) fn found(&self) -> Option<u64> {
        fence(Ordering::Acquire);
        self.at.atomic_u64(0).ok().map(|at| u64::from_le(at.load(Ordering::Acquire)))
    }

    /// Whether the slab, or its copy in a restored machine, is in place. `false`: other memory may have taken
    /// the place, or the owner may have changed the nonce.
    pub(crate) fn is_there(&self) -> bool {
        self.found() == Some(self.nonce)
    }
}

/// The part of a device that depends on the transport: the window, and the connection to the device.
///
/// Dropping a `Window` closes the device: afterwards the device no longer uses memory of this process.
pub(crate) trait Window: Send + Sync {
    /// Size of the window in bytes; 0 if there is none.
    fn size(&self) -> u64;

    /// A view of a part of the window; `None` unless all of the part is mapped.
    fn slice(&self, offset: u64, len: u64) -> Option<SharedSlice>;

    /// Whether the window is ordinary cached memory by construction, with no need for a measurement.
    fn is_cached(&self) -> bool;

    /// Whether window and guest memory keep their bytes after the end of the device. Otherwise the memory
    /// reads as zeros some time later, see [`Window::let_go`].
    fn outlives_device(&self) -> bool;

    /// Whether window and guest memory still have their bytes.
    fn has_memory(&self) -> bool {
        self.outlives_device()
    }

    /// Ends the need for window and guest memory of a gone device.
    fn let_go(&self) {}

    /// Notes a mark of the window, at the slab's offset. The mark tells later whether the window has gone
    /// with its device.
    fn note_mark(&self, _slab_off: u64, _mark: SlabMark) {}

    /// The doorbells of the slabs; `None`: users kick.
    fn doorbells(&self) -> Option<&Doorbells> {
        None
    }

    /// The user whose daemon has the device; `None`: no daemon.
    fn owner(&self) -> Option<u32> {
        None
    }

    /// The device for a takeover by the child of a fork; `None`: no takeover is possible.
    fn inheritance(&self) -> Option<&dyn ForkTransport> {
        None
    }
}

/// A connection to a device, ready for a takeover by the child of a fork.
///
/// The child has all memory and descriptors, and no threads. The child does the work of the parent's thread
/// by calling [`ForkTransport::serve`].
pub(crate) trait ForkTransport: ForkLocks {
    /// The child's descriptors to wait for: at a readable or hung up descriptor the child calls
    /// [`ForkTransport::serve`].
    fn waits_for(&self) -> Vec<RawFd>;

    /// Answers requests of the device, without waiting.
    fn serve(&self);
}

/// A device with running queues, for the driver ([`IsmDevice`](crate::IsmDevice)).
///
/// Any thread may use any part of the device. A device fails once and for all: when the device vanishes,
/// breaks a rule of virtio or does not answer in time, [`is_gone`](Self::is_gone) turns true, every call
/// fails, and the event descriptor becomes and stays readable to wake sleeping threads. Dropping a
/// `RunningDevice` closes the device.
pub struct RunningDevice {
    // First, since fields are dropped in this order: the device must be closed before the queues and the pool
    // used by the device are freed.
    pub(crate) window: Box<dyn Window>,
    pub(crate) queues: Queues,
    pub(crate) pool: Arc<GuestPool>,
    pub(crate) health: Arc<Health>,
    config: Config,
    features: Features,
}

impl ForkLocks for RunningDevice {
    fn try_hold<'a>(&'a self, held: &mut LockGuardList<'a>) -> bool {
        self.queues.try_hold(held)
            && self.window.inheritance().is_some_and(|inheritance| inheritance.try_hold(held))
    }

    fn is_unlocked(&self) -> bool {
        let connection =
            self.window.inheritance().is_none_or(|inheritance| inheritance.is_unlocked());
        connection
            && self.queues.is_unlocked()
            && self.pool.is_unlocked()
            && self.health.is_unlocked()
    }

    fn descriptors(&self) -> Vec<RawFd> {
        let mut all = self.health.descriptors();
        all.extend(
            self.window.inheritance().into_iter().flat_map(|inheritance| inheritance.descriptors()),
        );
        all
    }
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

    /// The device's configuration at its start.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// The features in use.
    pub fn features(&self) -> Features {
        self.features
    }

    /// Executes a control command for a program talking to the device directly. Returns the status code
    /// of the answer.
    ///
    /// # Errors
    /// The device is gone, or does not answer within
    /// [`CONTROL_TIMEOUT`](crate::virtqueue::CONTROL_TIMEOUT).
    pub fn control(&self, op: Op, body: &[u8], reply: &mut [u8]) -> Result<u16, QueueError> {
        self.queues.control.command(op, body, reply)
    }

    /// Whether the device is gone or failed.
    #[inline]
    pub fn is_gone(&self) -> bool {
        self.health.is_gone()
    }

    /// Size of the window in bytes; 0 if there is none.
    pub fn window_size(&self) -> u64 {
        self.window.size()
    }

    /// A view of a part of the window; `None` unless all of the part is mapped.
    pub fn window_slice(&self, offset: u64, len: u64) -> Option<SharedSlice> {
        self.window.slice(offset, len)
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
