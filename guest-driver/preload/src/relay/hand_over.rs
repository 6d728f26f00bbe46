// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Connections left to the kernel: for good, or as a temporary relay.
//!
//! The library cannot see the work of stdio, of another process or of io_uring on a descriptor. Before
//! a descriptor gets there, the kernel must be able to carry out all calls on the descriptor. An
//! undecided connection stays on TCP. A connection on SMC gets a pair of Unix sockets in the place of
//! all its descriptors.

use std::ffi::c_int;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use super::forward::{replace, start, start_undecided};
use crate::socket::pair::{HIGH_FDS, SocketPair};
use crate::socket::states::SocketStage;
use crate::socket::stream::{SocketState, StreamSocket, TemporaryRelay};
use crate::socket::table::{DESCRIPTORS, DescriptorRef, NUMBERS};
use crate::sys::{borrowed, owned, raw, wait_readable};

/// Limit to wait for a new relay to forward the bytes at hand.
const FIRST_BYTES_TIMEOUT: Duration = Duration::from_secs(1);

/// The temporary relay that the relay of these descriptors is; `None`: it stays. A standard
/// descriptor is for stdio.
pub(super) fn temporary_relay_of(fds: &[c_int], pair: &SocketPair) -> Option<Arc<TemporaryRelay>> {
    let is_temporary = !fds.is_empty() && fds.iter().all(|fd| *fd > 2);
    is_temporary.then(|| TemporaryRelay::new(&pair.program_end)).flatten()
}

/// Hands a decided connection over, if SMC carries the connection and there are descriptors for a pair.
/// `is_temporary`: only because of other processes. Returns a number for [`await_first`].
pub(crate) fn hand_over(descriptor: &DescriptorRef, is_temporary: bool) -> Option<c_int> {
    let _numbers = NUMBERS.lock();
    let socket = descriptor.stream()?;
    let readiness = socket.readiness(socket.smc()?, false);
    let numbers = |fd: &c_int| DESCRIPTORS.get(*fd).is_some_and(|now| now.is(descriptor));
    let fds: Vec<c_int> = (0..=DESCRIPTORS.highest()).filter(numbers).collect();
    let &first = fds.first()?;
    let pair = SocketPair::new(first)?;
    let temporary = is_temporary.then(|| temporary_relay_of(&fds, &pair)).flatten();
    replace(descriptor, &fds, &pair.program_end, temporary.as_ref());
    start(descriptor.clone(), pair, temporary);
    (readiness.readable || readiness.read_closed).then_some(first)
}

/// Waits until a new relay has forwarded the bytes readable before the relay: a non-blocking call must
/// find bytes reported by an earlier call. The relay in turn waits for other references to the
/// connection, so the caller must not have one.
pub(crate) fn await_first(fd: c_int) {
    wait_readable(&[Some(borrowed(fd))], FIRST_BYTES_TIMEOUT);
}

/// Hands a connection over during a handshake with a possible end on SMC: the program need not wait.
/// Does nothing if the handshake has ended meanwhile. `false`: there are no descriptors for a pair.
pub(crate) fn hand_over_undecided(descriptor: &DescriptorRef) -> bool {
    let Some(socket) = descriptor.stream() else { return true };
    let _numbers = NUMBERS.lock();
    // A decision stores the state under this lock. From then on calls of other threads sleep in the
    // kernel on the TCP socket, and would never see the pair.
    let _early = socket.undecided.early();
    if socket.stage() != SocketStage::Proposing {
        return true;
    }
    let numbers = |fd: &c_int| DESCRIPTORS.get(*fd).is_some_and(|now| now.is(descriptor));
    let fds: Vec<c_int> = (0..=DESCRIPTORS.highest()).filter(numbers).collect();
    let Some(&first) = fds.first() else { return true };
    let Ok(tcp) = raw::fcntl(first, libc::F_DUPFD_CLOEXEC, HIGH_FDS) else { return false };
    let tcp = owned(tcp as c_int);
    let Some(pair) = SocketPair::new(first) else { return false };
    // For good: the handshake goes on although the program has no descriptor of the connection any
    // more.
    socket.undecided.add_offer();
    replace(descriptor, &fds, &pair.program_end, None);
    let _ = start_undecided(descriptor.clone(), pair, tcp);
    true
}

/// Hands over a client's connection closed by the program with unsent bytes, before the server has
/// answered the Proposal. So a keeper can send the bytes, and the process need not wait for the server.
/// On failure the process has to wait. `tcp`: a duplicate of the connection's socket.
pub(crate) fn hand_over_closed(descriptor: DescriptorRef, tcp: OwnedFd) {
    // No process has the program's end: the relay reads an end of data.
    let Some(pair) = SocketPair::new(tcp.as_raw_fd()) else { return };
    if let Some(socket) = descriptor.stream() {
        socket.undecided.add_offer();
    }
    if !start_undecided(descriptor.clone(), pair, tcp)
        && let Some(socket) = descriptor.stream()
    {
        socket.undecided.remove_offer();
    }
}

/// Whether this process has connections that are to be left to the kernel before another program
/// gets them, or that SMC may carry, now or when a relay is taken back.
pub(crate) fn has_any() -> bool {
    let counts = |socket: &StreamSocket| {
        must_be_left(socket)
            || socket.state() == SocketState::Undecided
            || socket.temporary_relay().is_some()
    };
    let found = |fd| DESCRIPTORS.get(fd).is_some_and(|found| found.stream().is_some_and(counts));
    (0..=DESCRIPTORS.highest()).any(|fd| DESCRIPTORS.has(fd) && found(fd))
}

/// Whether another program can use a connection only after the connection was left to the kernel, or
/// after the owner was asked to carry the connection.
pub(crate) fn must_be_left(socket: &StreamSocket) -> bool {
    is_in_use(socket) || socket.awaits_owner()
}

/// Whether SMC carries a connection, or the handshake is under way: another process cannot use the TCP
/// socket.
pub(crate) fn is_in_use(socket: &StreamSocket) -> bool {
    socket.smc().is_some()
        || socket.state() == SocketState::Deciding && !socket.owner.is_inherited()
}
