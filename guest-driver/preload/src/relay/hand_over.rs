// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Connections that go to the kernel: for good, or as a temporary relay.
//!
//! The library cannot see what stdio, another process or io_uring does with a descriptor. Before a
//! descriptor gets there, the kernel must be able to carry out all calls on it. A connection that
//! no handshake has decided yet stays on TCP. One that SMC carries gets a pair of Unix sockets in
//! the place of all its descriptors.

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

/// How long a connection that is handed over waits for its relay to forward what can be read.
const FIRST_BYTES_TIMEOUT: Duration = Duration::from_secs(1);

/// The temporary relay that the relay of these descriptors is; `None`: it stays. A standard
/// descriptor is for stdio.
pub(super) fn temporary_relay_of(fds: &[c_int], pair: &SocketPair) -> Option<Arc<TemporaryRelay>> {
    let is_temporary = !fds.is_empty() && fds.iter().all(|fd| *fd > 2);
    is_temporary.then(|| TemporaryRelay::new(&pair.program_end)).flatten()
}

/// Hands a decided connection over, if SMC carries it and there are descriptors for a pair.
/// `is_temporary`: only other processes need that. Returns a number for [`await_first`].
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

/// Waits until a new relay has brought what was there before it: what a call has reported, a call
/// that does not wait finds. The relay waits in turn for those who have a reference to the
/// connection, so the caller has none.
pub(crate) fn await_first(fd: c_int) {
    wait_readable(&[Some(borrowed(fd))], FIRST_BYTES_TIMEOUT);
}

/// Hands a connection over whose handshake has begun and may end with SMC: the program need not
/// wait for it. If it has ended meanwhile, nothing happens. `false`: there are no descriptors for a
/// pair.
pub(crate) fn hand_over_undecided(descriptor: &DescriptorRef) -> bool {
    let Some(socket) = descriptor.stream() else { return true };
    let _numbers = NUMBERS.lock();
    // Whoever decides the connection has this lock when it stores the state. From then on calls of
    // other threads sleep in the kernel on the TCP socket, and would never see the pair.
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
    // For good: the handshake goes on although the program has no descriptor of it any more.
    socket.undecided.add_offer();
    replace(descriptor, &fds, &pair.program_end, None);
    let _ = start_undecided(descriptor.clone(), pair, tcp);
    true
}

/// Hands a client's connection over that the program has closed, and on which it has written, while
/// its server has not answered the Proposal. So a keeper can send the bytes, and the process need
/// not wait for the server. If that fails, the process has to wait. `tcp`: a duplicate of its
/// socket.
pub(crate) fn hand_over_closed(descriptor: DescriptorRef, tcp: OwnedFd) {
    // Nobody has the program's end: the relay reads an end of data.
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

/// Whether another program can use a connection only after it was left to the kernel, or after its
/// owner was asked to carry it.
pub(crate) fn must_be_left(socket: &StreamSocket) -> bool {
    is_in_use(socket) || socket.awaits_owner()
}

/// Whether SMC carries a connection, or its handshake is under way: another process cannot use its
/// TCP socket.
pub(crate) fn is_in_use(socket: &StreamSocket) -> bool {
    socket.smc().is_some()
        || socket.state() == SocketState::Deciding && !socket.owner.is_inherited()
}
