// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Descriptors of the event loop's subscribers, and calls of subscribers from threads.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

use event_manager::{EventOps, EventSet, Events};
use rustix::event::{EventfdFlags, eventfd};

/// A descriptor for threads to call a subscriber.
#[derive(Clone, Debug)]
pub(crate) struct Waker(Arc<OwnedFd>);

impl Waker {
    /// # Errors
    /// No descriptor is left.
    pub(crate) fn new() -> io::Result<Waker> {
        Ok(Waker(Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)))
    }

    /// Has the loop call the subscriber.
    pub(crate) fn wake(&self) {
        // Can fail only after 2^64 - 2 untaken wake-ups.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }

    /// Whether `events` are of this descriptor. If so, clears the descriptor for the next wake.
    pub(crate) fn take(&self, events: Events) -> bool {
        let own = events.fd() == self.0.as_raw_fd();
        if own {
            let _ = rustix::io::read(&self.0, &mut [0; 8]);
        }
        own
    }

    /// Watches the descriptor.
    pub(crate) fn watch(&self, ops: &mut EventOps<'_>) {
        watch(&*self.0, EventSet::IN, ops);
    }
}

/// Wakes on drop.
pub(crate) struct WakeOnDrop(pub(crate) Waker);

impl Drop for WakeOnDrop {
    fn drop(&mut self) {
        self.0.wake();
    }
}

/// Watches a descriptor owned by the calling subscriber.
pub(crate) fn watch(fd: &impl AsRawFd, events: EventSet, ops: &mut EventOps<'_>) -> bool {
    let added = ops.add(Events::new(fd, events));
    if let Err(error) = &added {
        tracing::error!(%error, "a descriptor cannot be watched");
    }
    added.is_ok()
}
