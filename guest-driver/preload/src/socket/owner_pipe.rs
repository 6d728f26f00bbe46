//! How a child of a fork asks the owner of an inherited SMC connection to carry it.

use std::ffi::c_int;
use std::os::fd::{IntoRawFd, OwnedFd};
use std::sync::atomic::{AtomicI32, Ordering};

use rustix::net::{SendFlags, send};

use crate::socket::stream::StreamSocket;
use crate::sys::{borrowed, raw};

/// The socket at whose other end the owner's thread waits; -1 in a process that inherited no
/// connection. The process keeps it open.
static OWNER: AtomicI32 = AtomicI32::new(-1);

/// Stores the way to the process that forked this one.
pub(crate) fn set(owner: OwnedFd) {
    let old = OWNER.swap(owner.into_raw_fd(), Ordering::SeqCst);
    if old >= 0 {
        let _ = raw::close(old);
    }
}

/// Asks the owner to carry the inherited connections. Only the first call for a socket asks.
pub(crate) fn request(socket: &StreamSocket) {
    let owner: c_int = OWNER.load(Ordering::SeqCst);
    if owner >= 0 && socket.request_owner_once() {
        // An owner that has ended has left a process behind that carries them already.
        let _ = send(borrowed(owner), b"!", SendFlags::NOSIGNAL);
    }
}
