// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The outcome of a handshake: the connection is on SMC, on TCP, or broken.

use std::ffi::c_int;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, IntoRawFd, OwnedFd};

use guest_driver::traffic::Endpoint;
use guest_driver::{ConnectionInfo, Fallback, SmcStream};
use rustix::fs::{Mode, OFlags};
use smc_core::handshake::{DeclineCode, FallbackReason, HandshakeError};

use crate::selection::early::{await_room, send_kept};
use crate::selection::running::{self, RUNNING_LOCK};
use crate::selection::transitions::{HandshakeEnd, end};
use crate::selection::{inherited_options, server_memory, session, waiting, worthwhile};
use crate::socket::descriptors;
use crate::socket::pair::high;
use crate::socket::stream::{SocketRole, StreamSocket};
use crate::socket::table::{DESCRIPTORS, DescriptorRef};
use crate::status;
use crate::sys::raw::{self, Errno};
use crate::sys::{STACK, borrowed, own_copies};

/// Has the kernel grow the table of descriptors to the library's numbers. In a process with threads
/// the kernel waits until all processors have seen the new table, some 10 ms. The first connection
/// would pay for the wait.
///
/// Closing a copy of a descriptor of the program would release the program's record locks and flush
/// the file.
pub(crate) fn grow_table() {
    let Ok(root) = rustix::fs::open(c"/", OFlags::PATH | OFlags::CLOEXEC, Mode::empty()) else {
        return;
    };
    let root = root.into_raw_fd();
    // Which number is higher depends on the limit.
    drop(session::duplicate_above_device(root));
    drop(own_copies::duplicate(root));
    let _ = raw::close(root);
}

/// Makes a second descriptor of the TCP connection for its handshake, out of the program's way, if
/// numbers are not short.
pub(super) fn duplicate(fd: c_int) -> Result<OwnedFd, Errno> {
    // A connection whose readiness the kernel has to show may need numbers for its whole life.
    if SmcStream::with_readiness_descriptors() >= own_copies::most_readiness_descriptors() {
        return Err(Errno(libc::EMFILE));
    }
    let were_short = own_copies::are_short();
    let copy = own_copies::duplicate_if_plenty(fd, waiting::pending());
    if copy.is_err() && !were_short {
        // The thread waiting for handshakes has numbers soon needed by the program.
        waiting::check();
        session::report_limit();
    }
    let copy = copy?;
    if let Some(descriptor) = DESCRIPTORS.get(fd)
        && let Some(socket) = descriptor.stream()
    {
        socket.undecided.set_copy(copy.as_raw_fd());
    }
    Ok(copy)
}

/// Stores SO_LINGER, while the program still has the descriptor: the connection may be decided
/// later.
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

/// The server, or the listener, of a connection.
fn endpoint_of(socket: &StreamSocket) -> Option<Endpoint> {
    match socket.side.server() {
        Some(server) => server.listener.map(Endpoint::Listener),
        None => socket.side.request().map(|request| Endpoint::Server(request.server)),
    }
}

/// Records how a server answered a Proposal.
fn record_answer(server: &SocketAddr, info: &ConnectionInfo) {
    if !matches!(info, ConnectionInfo::Tcp(_)) && !server_memory::has_any_declined() {
        return;
    }
    match info {
        ConnectionInfo::Tcp(Fallback::Handshake(FallbackReason::DeclinedByPeer(peer)))
            if matches!(
                peer.code,
                DeclineCode::NoIsm2Support
                    | DeclineCode::NoDescriptor
                    | DeclineCode::OptionUnsupported
                    | DeclineCode::OwnCalls
            ) =>
        {
            server_memory::record(server).note_decline(raw::monotonic_micros());
        }
        ConnectionInfo::Tcp(_) => {}
        _ => server_memory::record(server).note_accept(),
    }
}

/// Completes the handshake with its result.
pub(super) fn complete(descriptor: &DescriptorRef, fd: c_int, result: io::Result<SmcStream>) {
    let Some(socket) = descriptor.stream() else { return };
    let is_server = socket.role() == SocketRole::Server;
    let role = if is_server { "server" } else { "client" };
    match result {
        Ok(stream) => {
            let info = stream.info();
            status::connection_decided(fd, borrowed(fd), role, &info);
            let endpoint = endpoint_of(socket);
            if let Some(Endpoint::Server(server)) = &endpoint {
                record_answer(server, &info);
            }
            // A server without the option for its clients looks at each client's first bytes. Such
            // a server would wait for the bytes of a client on TCP.
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
            if let Some(bytes) = inherited_options::unsent_limit(fd) {
                stream.set_unsent_limit(bytes);
            }
            if let Some(milliseconds) = inherited_options::user_timeout(fd) {
                stream.set_user_timeout(milliseconds);
            }
            note_linger(descriptor, socket, fd);
            // The close of the program has returned before the handshake ended. SO_LINGER would
            // cost time of the thread waiting for all handshakes.
            let waits = descriptor.handles() > 0;
            let linger = socket.options.linger().filter(|time| waits || time.is_zero());
            let _ = stream.set_linger(linger);
            socket.set_stream(stream);
            // A fork holding the numbers now does not wait for a thread still at a handshake.
            descriptors::lend_number(descriptor, fd);
            if let Some(stream) = socket.stream() {
                end(descriptor, fd, HandshakeEnd::Smc(stream));
            }
        }
        // The peer has ended TCP without an answer, and TCP tells the program so. Not if the peer
        // was gone when the server's answer came: TCP would let the program write once more.
        Err(error) if is_end(&error) && !(is_server && raw::is_closed_tcp(fd)) => {
            report_end(socket, &error);
            end(descriptor, fd, HandshakeEnd::ClosedTcp);
        }
        Err(error) if is_reset(&error) || is_end(&error) => {
            report_end(socket, &error);
            // A killed client has ended its data in order, from the view of TCP.
            let error = match socket.role() {
                SocketRole::Client => libc::ECONNRESET,
                SocketRole::Server => socket.end.take_error(),
            };
            end(descriptor, fd, HandshakeEnd::Reset(Errno(error)));
        }
        Err(error) => {
            status::connection_failed(role, &error);
            end(descriptor, fd, HandshakeEnd::Broken(Errno::from(error)));
        }
    }
}

/// Completes the handshake: TCP carries the connection. The bytes written by the program so far go
/// first. If TCP is full, a thread completes the handshake later, and the library keeps further
/// bytes of the program until then. `tcp`: the connection.
pub(super) fn complete_with_tcp(descriptor: &DescriptorRef, fd: c_int, tcp: impl AsFd) {
    let tcp = tcp.as_fd();
    if send_kept(descriptor, tcp) || !complete_later(descriptor, fd, tcp) {
        complete_now(descriptor, fd, tcp);
    }
}

fn complete_now(descriptor: &DescriptorRef, fd: c_int, tcp: BorrowedFd<'_>) {
    // Sends the bytes written by the program since the last look, most often none.
    end(descriptor, fd, HandshakeEnd::Tcp(tcp));
}

/// Has a thread complete the handshake. `false`: there are no descriptors or threads left.
fn complete_later(descriptor: &DescriptorRef, fd: c_int, tcp: BorrowedFd<'_>) -> bool {
    let Ok(tcp) = tcp.try_clone_to_owned().map(high) else { return false };
    {
        let _running = RUNNING_LOCK.lock();
        running::begin(descriptor);
    }
    let of_thread = descriptor.clone();
    let body = move || send_and_complete(of_thread, fd, &tcp);
    let begun = raw::without_signals(|| ism_sys::start_thread("smc-early", STACK, body)).is_ok();
    if !begun {
        running::end(descriptor.clone());
    }
    begun
}

fn send_and_complete(descriptor: DescriptorRef, fd: c_int, tcp: &OwnedFd) {
    while !send_kept(&descriptor, tcp.as_fd()) {
        await_room(tcp.as_fd());
    }
    complete_now(&descriptor, fd, tcp.as_fd());
    running::end(descriptor);
}

/// Reports a handshake whose peer has ended or reset TCP. A client leaving before its server has
/// answered breaks nothing: clients come and go. A server leaving so early does not speak SMC.
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
