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

use rustix::net::sockopt::{Timeout, set_socket_timeout};

use super::forward::{put_pair, replace, start, start_undecided};
use crate::socket::pair::{HIGH_FDS, SocketPair};
use crate::socket::states::SocketStage;
use crate::socket::stream::{SocketState, StreamSocket, TemporaryRelay};
use crate::socket::table::{DESCRIPTORS, DescriptorRef, NUMBERS};
use crate::sys::{borrowed, owned, raw, wait_readable};

/// Limit to wait for a new relay to forward the bytes at hand.
const FIRST_BYTES_TIMEOUT: Duration = Duration::from_secs(1);

/// Limit of a call on a connection at the end of the program.
const CUT_OFF_TIMEOUT: Duration = Duration::from_secs(10);

/// The temporary relay for these descriptors; `None`: the relay stays for good. A standard descriptor
/// is for stdio.
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

/// Pairs without a relay, for the numbers of connections at the end of the program. A pair takes some
/// bytes, as TCP does for a peer without reads, and has no bytes to read. There is a pair for blocking
/// calls and another for non-blocking calls. All connections share the two, since a keeper needs
/// numbers, too.
#[derive(Debug, Default)]
pub(crate) struct EndPair {
    waiting: Option<SocketPair>,
    nonblocking: Option<SocketPair>,
}

impl EndPair {
    /// The pair for a connection's number. `None`: the number is no TCP socket any more, because the
    /// program has closed the socket by an instruction of its own, or there are no descriptors. The
    /// caller does not hold [`NUMBERS`]: the pair may get a number with such an entry for a moment,
    /// too.
    pub(crate) fn of(&mut self, fd: c_int) -> Option<&SocketPair> {
        let is_tcp =
            raw::socket_option(fd, libc::SOL_SOCKET, libc::SO_PROTOCOL) == Ok(libc::IPPROTO_TCP);
        if !is_tcp {
            return None;
        }
        let flags = raw::fcntl(fd, libc::F_GETFL, 0).unwrap_or(0) as c_int;
        let pair = match flags & libc::O_NONBLOCK {
            0 => &mut self.waiting,
            _ => &mut self.nonblocking,
        };
        if pair.is_none() {
            *pair = SocketPair::new(fd);
            // Limits the time of the program's destructors.
            for which in [Timeout::Recv, Timeout::Send] {
                let end = &pair.as_ref()?.program_end;
                let _ = set_socket_timeout(end, which, Some(CUT_OFF_TIMEOUT));
            }
        }
        pair.as_ref()
    }
}

/// Puts the end of a pair in the place of a connection's number. `is_smc`: the connection has another
/// descriptor of the TCP socket. Otherwise the TCP socket stays open: its close may wait, and the end
/// of the process does not. The caller holds [`NUMBERS`].
pub(crate) fn cut_off(fd: c_int, pair: &SocketPair, is_smc: bool) {
    put_pair(fd, &pair.program_end, |tcp| {
        if is_smc {
            let _ = raw::close(tcp);
        }
    });
}

/// Whether this process has connections to be left to the kernel before another program gets them, or
/// candidates for SMC, now or when a relay is taken back.
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
