// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The end of another process, seen at its end of a connection.

use std::os::fd::{AsFd, OwnedFd};

use event_manager::{EventOps, EventSet, Events, MutEventSubscriber};

use super::waker::watch;

/// Calls `F` once, when the other end of a socket is closed.
pub(crate) struct OnClose<F> {
    socket: OwnedFd,
    on_close: Option<F>,
}

impl<F: FnOnce()> OnClose<F> {
    /// Watches a descriptor of the socket without reading its messages.
    pub(crate) fn new(socket: OwnedFd, on_close: F) -> OnClose<F> {
        OnClose { socket, on_close: Some(on_close) }
    }
}

impl<F: FnOnce()> MutEventSubscriber for OnClose<F> {
    fn init(&mut self, ops: &mut EventOps<'_>) {
        watch(&self.socket.as_fd(), EventSet::READ_HANG_UP, ops);
    }

    fn process(&mut self, _: Events, ops: &mut EventOps<'_>) {
        let _ = ops.remove(Events::empty(&self.socket.as_fd()));
        if let Some(on_close) = self.on_close.take() {
            on_close();
        }
    }
}
