// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The request of a forked child to the owner of an inherited SMC connection: to carry the
//! connection.

use std::ffi::c_int;
use std::os::fd::{IntoRawFd, OwnedFd};
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{SendFlags, send};

use crate::socket::stream::StreamSocket;
use crate::sys::{borrowed, own_numbers};

/// The socket to the owner's thread, never closed; -1 in a process without inherited connections.
static OWNER: AtomicI32 = AtomicI32::new(-1);

/// Stores the socket to the parent of this process.
pub(crate) fn set(owner: OwnedFd) {
    let owner = owner.into_raw_fd();
    own_numbers::enter(owner);
    own_numbers::close(OWNER.swap(owner, Ordering::AcqRel));
}

/// How long a child waits for its owner.
const ANSWER: Duration = Duration::from_secs(2);

/// Asks the owner to carry the inherited connections. Only the first call for a socket asks.
///
/// Returns when the owner uses the relay itself: later writes of the owner must not overtake the
/// writes of this process.
///
/// Returns when the owner uses the relay itself: what this process writes from now on must not be
/// passed by what the owner writes after it has heard of that.
pub(crate) fn request(socket: &StreamSocket) {
    let owner: c_int = OWNER.load(Ordering::Acquire);
    if !own_numbers::contains(owner) || !socket.relayed.request_owner_once() {
        return;
    }
    // An ended owner has left a process behind, which carries the connections already.
    let _ = send(borrowed(owner), b"!", SendFlags::NOSIGNAL);
    let end = Instant::now() + ANSWER;
    loop {
        // As the answer the owner closes its end.
        let mut fds = [PollFd::from_borrowed_fd(borrowed(owner), PollFlags::IN)];
        let left = end.saturating_duration_since(Instant::now());
        let left = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
        match poll(&mut fds, Some(&left)) {
            Err(Errno::INTR) if Instant::now() < end => {}
            _ => return,
        }
    }
}
