//! The end of another process, seen at its end of a connection.

use std::os::fd::{AsFd, OwnedFd};

use event_manager::{EventOps, EventSet, Events, MutEventSubscriber};

use super::waker::watch;

/// Calls `F` once, when the other end of a socket is closed.
pub(crate) struct OnHangUp<F> {
    socket: OwnedFd,
    on_hang_up: Option<F>,
}

impl<F: FnOnce()> OnHangUp<F> {
    /// Watches a descriptor of the socket, whose messages it leaves alone.
    pub(crate) fn new(socket: OwnedFd, on_hang_up: F) -> OnHangUp<F> {
        OnHangUp { socket, on_hang_up: Some(on_hang_up) }
    }
}

impl<F: FnOnce()> MutEventSubscriber for OnHangUp<F> {
    fn init(&mut self, ops: &mut EventOps<'_>) {
        watch(&self.socket.as_fd(), EventSet::READ_HANG_UP, ops);
    }

    fn process(&mut self, _: Events, ops: &mut EventOps<'_>) {
        let _ = ops.remove(Events::empty(&self.socket.as_fd()));
        if let Some(on_hang_up) = self.on_hang_up.take() {
            on_hang_up();
        }
    }
}
