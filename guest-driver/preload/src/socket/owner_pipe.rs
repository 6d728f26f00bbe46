// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! How a child of a fork asks the owner of an inherited SMC connection to carry it.

use std::ffi::c_int;
use std::os::fd::{IntoRawFd, OwnedFd};
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{SendFlags, send};

use crate::socket::stream::StreamSocket;
use crate::sys::{borrowed, own_numbers};

/// The socket at whose other end the owner's thread waits; -1 in a process that inherited no
/// connection. The process keeps it open.
static OWNER: AtomicI32 = AtomicI32::new(-1);

/// Stores the way to the process that forked this one.
pub(crate) fn set(owner: OwnedFd) {
    let owner = owner.into_raw_fd();
    own_numbers::enter(owner);
    own_numbers::close(OWNER.swap(owner, Ordering::SeqCst));
}

/// How long a child waits for its owner.
const ANSWER: Duration = Duration::from_secs(2);

/// Asks the owner to carry the inherited connections. Only the first call for a socket asks.
///
/// Returns when the owner uses the relay itself: what this process writes from now on must not be
/// passed by what the owner writes after it has heard of that.
pub(crate) fn request(socket: &StreamSocket) {
    let owner: c_int = OWNER.load(Ordering::SeqCst);
    if !own_numbers::contains(owner) || !socket.relayed.request_owner_once() {
        return;
    }
    // An owner that has ended has left a process behind that carries them already.
    let _ = send(borrowed(owner), b"!", SendFlags::NOSIGNAL);
    let end = Instant::now() + ANSWER;
    loop {
        // The answer is that the owner closes its end.
        let mut fds = [PollFd::from_borrowed_fd(borrowed(owner), PollFlags::IN)];
        let left = end.saturating_duration_since(Instant::now());
        let left = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
        match poll(&mut fds, Some(&left)) {
            Err(Errno::INTR) if Instant::now() < end => {}
            _ => return,
        }
    }
}
