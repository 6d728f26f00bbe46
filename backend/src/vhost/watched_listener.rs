// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A listening socket of a subscriber of the event loop.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use event_manager::{EventOps, EventSet, Events};

use super::timers::Timers;
use super::waker::{Waker, watch};

/// Pause after an error likely to repeat at once.
pub(crate) const PAUSE: Duration = Duration::from_millis(100);

/// A listening socket of a subscriber, with pauses.
pub(crate) struct WatchedListener {
    socket: Arc<OwnedFd>,
    resume: Waker,
}

impl WatchedListener {
    /// # Errors
    /// No descriptor is left.
    pub(crate) fn new(socket: OwnedFd) -> io::Result<WatchedListener> {
        Ok(WatchedListener { socket: Arc::new(socket), resume: Waker::new()? })
    }

    /// The socket.
    pub(crate) fn socket(&self) -> &Arc<OwnedFd> {
        &self.socket
    }

    /// Begins to watch the socket.
    pub(crate) fn watch(&self, ops: &mut EventOps<'_>) {
        self.resume.watch(ops);
        watch(&self.socket.as_fd(), EventSet::IN, ops);
    }

    /// Whether `events` announce a connection in the socket's queue.
    pub(crate) fn is_ready(&self, events: Events, ops: &mut EventOps<'_>) -> bool {
        if self.resume.take(events) {
            watch(&self.socket.as_fd(), EventSet::IN, ops);
        }
        events.fd() == self.socket.as_raw_fd()
    }

    /// Stops watching the socket until the waker is used.
    pub(crate) fn pause(&self, ops: &mut EventOps<'_>) -> Waker {
        let _ = ops.remove(Events::empty(&self.socket.as_fd()));
        self.resume.clone()
    }

    /// Stops watching the socket for a moment, after an error likely to repeat at once.
    pub(crate) fn pause_briefly(&self, timers: &Timers, ops: &mut EventOps<'_>) {
        let resume = self.pause(ops);
        timers.call_at(Instant::now() + PAUSE, move || resume.wake());
    }
}
