// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What comes of a handshake: the connection is on SMC, on TCP, or broken.

use std::ffi::c_int;
use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicUsize, Ordering};

use guest_driver::interpose::ByteQueue;
use guest_driver::traffic::Endpoint;
use guest_driver::{ConnectionInfo, Fallback, SmcStream};
use smc_core::handshake::{DeclineCode, FallbackReason, HandshakeError};

use crate::selection::early::{complete_with_tcp, complete_without_sending};
use crate::selection::transitions::{ActionInput, carry_out};
use crate::selection::{declined_servers, inherited_options, worthwhile};
use crate::socket::states::SocketEvent;
use crate::socket::stream::{SocketRole, StreamSocket};
use crate::socket::table::{DESCRIPTORS, DescriptorRef};
use crate::status;
use crate::sys::borrowed;
use crate::sys::raw::{self, Errno};

/// Lowest numbers for the library's own descriptors, out of the program's way. The first one that
/// the limit of the process allows holds.
const HIGH_FDS: [c_int; 3] = [60_000, 4_000, 700];

/// The first of them that the limit may allow.
static FIRST_FLOOR: AtomicUsize = AtomicUsize::new(0);

fn duplicate_high(fd: c_int) -> Result<usize, Errno> {
    let first = FIRST_FLOOR.load(Ordering::Relaxed);
    for (at, &floor) in HIGH_FDS.iter().enumerate().skip(first) {
        match raw::fcntl(fd, libc::F_DUPFD_CLOEXEC, floor) {
            Ok(copy) => return Ok(copy),
            // The limit seldom changes.
            Err(Errno(libc::EINVAL)) => FIRST_FLOOR.store(at + 1, Ordering::Relaxed),
            Err(_) => {}
        }
    }
    raw::fcntl(fd, libc::F_DUPFD_CLOEXEC, 3)
}

/// Makes a second descriptor of the TCP connection, out of the program's way.
pub(super) fn duplicate(fd: c_int) -> Result<OwnedFd, Errno> {
    let copy = duplicate_high(fd)?;
    if let Some(descriptor) = DESCRIPTORS.get(fd)
        && let Some(socket) = descriptor.stream()
    {
        socket.undecided.set_copy(copy as c_int);
    }
    Ok(crate::sys::owned(copy as c_int))
}

/// Stores SO_LINGER, as long as the program has the descriptor: the connection may be decided later.
pub(super) fn note_linger(descriptor: &DescriptorRef, socket: &StreamSocket, fd: c_int) {
    if !inherited_options::may_be_set() {
        return;
    }
    if DESCRIPTORS.get(fd).is_some_and(|now| now.is(descriptor))
        && let Ok(linger) = rustix::net::sockopt::socket_linger(borrowed(fd))
    {
        socket.options.set_linger(linger);
    }
}

/// The server, or the listener, that a connection belongs to.
fn endpoint_of(socket: &StreamSocket) -> Option<Endpoint> {
    match socket.side.server() {
        Some(server) => server.listener.map(Endpoint::Listener),
        None => socket.side.request().map(|request| Endpoint::Server(request.server)),
    }
}

/// Records how a server has answered a Proposal.
fn record_answer(server: &SocketAddr, info: &ConnectionInfo) {
    if !matches!(info, ConnectionInfo::Tcp(_)) && !declined_servers::any() {
        return;
    }
    match info {
        ConnectionInfo::Tcp(Fallback::Handshake(FallbackReason::DeclinedByPeer(peer)))
            if peer.code == DeclineCode::NoIsm2Support =>
        {
            declined_servers::declined(server);
        }
        ConnectionInfo::Tcp(_) => {}
        _ => declined_servers::accepted(server),
    }
}

/// Completes the handshake with its result.
pub(super) fn complete(descriptor: &DescriptorRef, fd: c_int, result: io::Result<SmcStream>) {
    let Some(socket) = descriptor.stream() else { return };
    let role = match socket.role() {
        SocketRole::Client => "client",
        SocketRole::Server => "server",
    };
    match result {
        Ok(stream) => {
            let info = stream.info();
            status::connection_decided(borrowed(fd), role, &info);
            let endpoint = endpoint_of(socket);
            if let Some(Endpoint::Server(server)) = &endpoint {
                record_answer(server, &info);
            }
            // A server that the option does not tell of its clients looks at each one's first bytes.
            // It would wait for those of a client on TCP.
            if let Some(endpoint) = endpoint.filter(|_| socket.side.is_announced()) {
                worthwhile::observe(&stream, &info, endpoint);
            }
            if matches!(info, ConnectionInfo::Tcp(_)) {
                // The stream is TCP's.
                return match stream.pollable() {
                    Ok(tcp) => complete_with_tcp(descriptor, fd, tcp),
                    Err(_) => complete_with_tcp(descriptor, fd, borrowed(fd)),
                };
            }
            // The library waits by itself; see `io/transfer.rs`.
            let _ = stream.set_nonblocking(true);
            if inherited_options::may_be_set() {
                socket.options.set_timeouts(
                    Some(raw::timeout_of(fd, libc::SO_RCVTIMEO)),
                    Some(raw::timeout_of(fd, libc::SO_SNDTIMEO)),
                );
                let inline = raw::socket_option(fd, libc::SOL_SOCKET, libc::SO_OOBINLINE);
                if inline.is_ok_and(|on| on != 0) {
                    let _ = stream.set_oob_inline(true);
                }
            }
            if let Some(bytes) = inherited_options::send_buffer(fd) {
                stream.set_send_buffer(bytes);
            }
            note_linger(descriptor, socket, fd);
            if let Some(linger) = socket.options.linger() {
                let _ = stream.set_linger(Some(linger));
            }
            socket.set_stream(stream);
            let send = |early: ByteQueue| {
                if let Some(stream) = socket.stream() {
                    stream.send_queue(early);
                }
            };
            carry_out(descriptor, fd, SocketEvent::EndOnSmc, ActionInput::Send(&send));
        }
        // The peer has ended TCP without an answer, and TCP tells the program that.
        Err(error) if is_end(&error) => {
            report_end(socket, &error);
            complete_without_sending(descriptor, fd);
        }
        Err(error) if is_reset(&error) => {
            report_end(socket, &error);
            // A client that was killed has ended its data in order, as far as TCP would say.
            let error = match socket.role() {
                SocketRole::Client => libc::ECONNRESET,
                SocketRole::Server => socket.end.take_error(),
            };
            let error = ActionInput::Error(Errno(error));
            carry_out(descriptor, fd, SocketEvent::Reset, error);
        }
        Err(error) => {
            status::connection_failed(role, &error);
            let error = ActionInput::Error(Errno::from(error));
            carry_out(descriptor, fd, SocketEvent::Break, error);
        }
    }
}

/// Reports a handshake whose peer has ended or reset TCP. Clients come and go: one that leaves before
/// its server has answered breaks nothing. A server that does so does not speak SMC.
fn report_end(socket: &StreamSocket, error: &io::Error) {
    match socket.role() {
        SocketRole::Server => status::client_has_left(error),
        SocketRole::Client => status::connection_failed("client", error),
    }
}

/// Whether the peer has ended its direction of TCP.
fn is_end(error: &io::Error) -> bool {
    let broken = error.get_ref().and_then(|inner| inner.downcast_ref::<HandshakeError>());
    matches!(broken, Some(HandshakeError::Closed { received: 0, .. }))
        || error.kind() == io::ErrorKind::UnexpectedEof
}

/// Whether the peer has reset TCP.
fn is_reset(error: &io::Error) -> bool {
    let by_tcp = matches!(error.raw_os_error(), Some(libc::ECONNRESET | libc::EPIPE));
    by_tcp || error.kind() == io::ErrorKind::BrokenPipe
}
