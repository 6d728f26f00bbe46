// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The connections whose handshakes other threads carry out.

use std::ffi::c_int;
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use crate::socket::stream::{SocketState, StreamSocket};
use crate::socket::table::{DESCRIPTORS, DescriptorRef};
use crate::sys::fork_lock::{ForkLock, ForkMutex};
use crate::sys::{borrowed, raw};

/// Held by each user of [`RUNNING`] or the list of `waiting`, and by a process during a fork.
pub(super) static RUNNING_LOCK: ForkLock = ForkLock::new();
/// The connections whose handshakes run in other threads.
static RUNNING: ForkMutex<Vec<DescriptorRef>> = ForkMutex::new(Vec::new());

/// Enters a connection whose handshake another thread carries out. The caller holds
/// [`RUNNING_LOCK`].
pub(super) fn begin(descriptor: &DescriptorRef) {
    RUNNING.lock().push(descriptor.clone());
}

/// Undoes [`begin`]. The caller does not hold [`RUNNING_LOCK`].
pub(super) fn end(descriptor: DescriptorRef) {
    let other = {
        let _running = RUNNING_LOCK.lock();
        let mut running = RUNNING.lock();
        let at = running.iter().position(|other| other.is(&descriptor));
        at.map(|at| running.swap_remove(at))
    };
    // The last references close a connection whose descriptors the program has closed.
    drop((other, descriptor));
}

/// Whether one of the connections fulfils a condition. The caller holds [`RUNNING_LOCK`].
pub(super) fn any(condition: impl Fn(&DescriptorRef) -> bool) -> bool {
    RUNNING.lock().iter().any(condition)
}

/// Calls `f` for all of the connections. The caller holds [`RUNNING_LOCK`].
pub(super) fn for_each(f: impl FnMut(&DescriptorRef)) {
    RUNNING.lock().iter().for_each(f);
}

/// Forgets the parent's connections, in the child of a fork. The caller holds [`RUNNING_LOCK`].
pub(super) fn forget() {
    let parents = std::mem::take(&mut *RUNNING.lock());
    // The child's copies of the threads' stacks hold references as well, for ever.
    std::mem::forget(parents);
}

/// How long a fork waits for threads whose handshake is complete.
const ENDING: Duration = Duration::from_millis(100);

/// Takes [`RUNNING_LOCK`] before a fork. Waits for a thread with a decided connection to end first:
/// the thread holds locks and descriptors, and the child would keep both.
pub(super) fn before_fork() {
    let begun = Instant::now();
    loop {
        RUNNING_LOCK.acquire_before_fork();
        let is_ending = |found: &DescriptorRef| {
            let state = found.stream().map(StreamSocket::state);
            !matches!(state, Some(SocketState::Undecided | SocketState::Deciding))
        };
        if !any(is_ending) || begun.elapsed() > ENDING {
            return;
        }
        RUNNING_LOCK.release_after_fork();
        std::thread::sleep(Duration::from_micros(50));
    }
}

/// Replaces the library's duplicate of a TCP socket by another socket without a connection: the
/// thread doing the handshake finds nothing any more. `fd`: the program's descriptor.
pub(super) fn take_socket_away(fd: c_int, socket: &StreamSocket) {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};
    let Some(copy) = socket.take_copy().filter(|copy| is_copy(*copy, fd)) else { return };
    let (family, kind) = (AddressFamily::INET, SocketType::STREAM);
    if let Ok(other) = socket_with(family, kind, SocketFlags::CLOEXEC, None) {
        let _ = raw::dup3(other.as_raw_fd(), copy, libc::O_CLOEXEC);
    }
}

/// Whether a number still is a duplicate of a socket, and not another file by now.
fn is_copy(copy: c_int, fd: c_int) -> bool {
    let cookie = |fd: c_int| rustix::net::sockopt::socket_cookie(borrowed(fd)).ok();
    copy != fd && cookie(copy).is_some() && cookie(copy) == cookie(fd)
}

/// Closes the library's duplicates of TCP sockets, in the child: they are for the parent's threads
/// and connections. With open duplicates these connections would not end while the child lives.
pub(crate) fn close_copies() {
    for fd in 0..=DESCRIPTORS.highest() {
        if !DESCRIPTORS.has(fd) {
            continue;
        }
        let Some(descriptor) = DESCRIPTORS.get(fd) else { continue };
        let Some(copy) = descriptor.stream().and_then(StreamSocket::take_copy) else { continue };
        if is_copy(copy, fd) {
            let _ = raw::close(copy);
        }
    }
}
