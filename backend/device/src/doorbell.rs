// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The doorbell of a slab: an eventfd that its user signals instead of a kick, and for which its
//! owner waits beside its event queue.
//!
//! The device makes it and hands it to both, to the owner first. It never reads or writes it. Both
//! can do with the counter what they like, and reach nothing but wake-ups for this slab.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use rustix::event::{EventfdFlags, eventfd};

use super::handle::DeviceHandle;
use super::sync::lock;

/// Doorbells of one owner that wait for their users, at most. Each is a descriptor of the daemon.
/// A slab beyond has none, and its user kicks.
const MAX_WAITING: u32 = 64;

/// The doorbell of a slab, as far as it is handed out.
#[derive(Debug, Default)]
pub(super) struct Doorbell {
    /// Until both ends have it.
    fd: Mutex<Option<Arc<CountedFd>>>,
    /// The owner waits for it, so that the user may have it.
    is_heard: AtomicBool,
}

/// A descriptor that counts in the account of its owner.
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
    /// A doorbell of `owner`. It has no descriptor if the owner has too many, or none is left.
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

    /// What to hand to this end of the slab now, if anything.
    pub(super) fn offer(&self, end: End) -> Option<DoorbellFd> {
        let due = match end {
            End::Owner => !self.is_heard.load(Ordering::Relaxed),
            End::User => self.is_heard.load(Ordering::Acquire),
        };
        if due { lock(&self.fd).clone().map(DoorbellFd) } else { None }
    }

    /// The front end of this end has answered: it has `taken` the doorbell or refused it.
    pub(super) fn answered(&self, end: End, taken: bool) {
        match (end, taken) {
            (End::Owner, true) => self.is_heard.store(true, Ordering::Release),
            // Nobody else will have it.
            _ => *lock(&self.fd) = None,
        }
    }
}

/// An end of a slab.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    /// Waits for the doorbell.
    Owner,
    /// Rings it.
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
