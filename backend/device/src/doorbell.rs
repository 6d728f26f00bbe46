// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The doorbell of a slab: an eventfd. The user signals the doorbell instead of kicking, and the owner waits
//! for the doorbell beside its event queue.
//!
//! The device makes the eventfd and hands it to both, to the owner first. The device never reads or writes
//! the eventfd. Both can do anything with the counter, with no effect but wake-ups for this slab.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use rustix::event::{EventfdFlags, eventfd};

use super::handle::DeviceHandle;
use super::sync::lock;

/// Most doorbells of one owner not yet handed to their users. Each is a descriptor of the daemon. A further
/// slab has no doorbell, and its user kicks.
const MAX_WAITING: u32 = 64;

/// The doorbell of a slab, and how far it is handed out.
#[derive(Debug, Default)]
pub(super) struct Doorbell {
    /// Held until both ends have the descriptor.
    fd: Mutex<Option<Arc<CountedFd>>>,
    /// The owner waits for the doorbell, so the user may have it.
    is_heard: AtomicBool,
}

/// A descriptor counted in the account of its owner.
#[derive(Debug)]
struct CountedFd {
    fd: OwnedFd,
    owner: Arc<DeviceHandle>,
}

impl Drop for CountedFd {
    fn drop(&mut self) {
        self.owner.doorbells.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Doorbell {
    /// A doorbell of `owner`. Has no descriptor if the owner has too many, or the process has none left.
    pub(super) fn new(owner: &Arc<DeviceHandle>) -> Doorbell {
        if owner.doorbells.fetch_add(1, Ordering::Relaxed) >= MAX_WAITING {
            owner.doorbells.fetch_sub(1, Ordering::Relaxed);
            return Doorbell::default();
        }
        let fd = match eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK) {
            Ok(fd) => Some(Arc::new(CountedFd { fd, owner: owner.clone() })),
            Err(error) => {
                owner.doorbells.fetch_sub(1, Ordering::Relaxed);
                tracing::debug!(%error, "a slab without a doorbell");
                None
            }
        };
        Doorbell { fd: Mutex::new(fd), is_heard: AtomicBool::new(false) }
    }

    /// The descriptor to hand to this end of the slab now, if any.
    pub(super) fn offer(&self, end: End) -> Option<DoorbellFd> {
        let due = match end {
            End::Owner => !self.is_heard.load(Ordering::Relaxed),
            End::User => self.is_heard.load(Ordering::Acquire),
        };
        if due { lock(&self.fd).clone().map(DoorbellFd) } else { None }
    }

    /// The front end of this end has answered: it has `taken` or refused the doorbell.
    pub(super) fn answered(&self, end: End, taken: bool) {
        match (end, taken) {
            (End::Owner, true) => self.is_heard.store(true, Ordering::Release),
            // No further end will get the descriptor.
            _ => *lock(&self.fd) = None,
        }
    }
}

/// An end of a slab.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    /// Waits for the doorbell.
    Owner,
    /// Rings the doorbell.
    User,
}

/// The descriptor of a doorbell, on its way to a front end.
#[derive(Debug)]
pub struct DoorbellFd(Arc<CountedFd>);

impl AsFd for DoorbellFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.fd.as_fd()
    }
}
