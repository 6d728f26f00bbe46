//! How a child of a fork asks the owner of an inherited SMC connection to carry it.

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Mutex;

use crate::socket::stream::StreamSocket;
use crate::sys::{lock, raw};

/// The pipe at which the owner's thread waits; `None` in a process that inherited no connection.
static PIPE: Mutex<Option<OwnedFd>> = Mutex::new(None);

/// Stores the pipe of the process that forked this one.
pub(crate) fn set(pipe: OwnedFd) {
    *lock(&PIPE) = Some(pipe);
}

/// Asks the owner to carry the inherited connections. Only the first call for a socket asks.
pub(crate) fn request(socket: &StreamSocket) {
    if socket.request_owner_once()
        && let Some(pipe) = &*lock(&PIPE)
    {
        let _ = raw::write(pipe.as_raw_fd(), b"!");
    }
}
