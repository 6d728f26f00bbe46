// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A client whose server has answered a Proposal by anything but a message of the handshake, or not
//! at all: TCP option 254 was answered, but the server's program does not speak SMC.
//!
//! The program has sent nothing yet: the library keeps the program's bytes until the connection is
//! decided. So the same socket connects again, without the option. The program notices only by
//! comparing the name of its socket with the server's view, and not even then after asking for the
//! name before. If the second attempt fails, the program sees a reset, as TCP shows of a vanished
//! server.

use std::ffi::c_int;
use std::io;
use std::net::TcpStream;
use std::os::fd::AsRawFd;
use std::time::Duration;

use rustix::event::PollFlags;
use rustix::net::sockopt::{self, Timeout};
use smc_core::handshake::FallbackReason;

use crate::selection::outcome::{complete, complete_with_tcp};
use crate::selection::pending::{Connecting, PendingStage, poll};
use crate::selection::worthwhile;
use crate::socket::registrations;
use crate::socket::states::SocketStage;
use crate::socket::stream::StreamSocket;
use crate::socket::table::DescriptorRef;
use crate::status;
use crate::sys::raw;

/// Ends a handshake failed before any message of the server, or connects again. `Some`: TCP is
/// connecting.
pub(super) fn instead(
    descriptor: &DescriptorRef,
    fd: c_int,
    tcp: TcpStream,
    why: io::Error,
) -> PendingStage {
    if let Some(socket) = descriptor.stream()
        && let Some(done) = connect(socket, &tcp, &why)
    {
        return match done {
            true => end(descriptor, fd, tcp),
            false => Some(Box::new(Connecting { tcp, then: end })),
        };
    }
    complete(descriptor, fd, Err(why));
    None
}

/// Whether a new connection would undo nothing.
fn may_connect_again(socket: &StreamSocket) -> bool {
    socket.stage() == SocketStage::Proposing && !socket.end.is_write_shut()
}

/// Connects the socket again. `true`: connected; `false`: connecting; `None`: not connected.
fn connect(socket: &StreamSocket, tcp: &TcpStream, why: &io::Error) -> Option<bool> {
    // A disconnect by the program takes the request first.
    let client = socket.side.client()?;
    let request = client.lock_request();
    let server = request.as_ref()?.server;
    worthwhile::note_plain(&server);
    if !may_connect_again(socket) {
        return None;
    }
    status::client_connects_again(&server, why);
    // Until the connection is decided, the sets would report the end of the old one.
    registrations::detach(socket);
    let name = client.is_name_known().then(|| tcp.local_addr().ok()).flatten();
    raw::disconnect(tcp.as_raw_fd());
    if let Some(name) = name {
        // Where another socket uses the port as well, the kernel chooses a new one.
        let _ = rustix::net::bind(tcp, &name);
    }
    match without_waiting(tcp, || rustix::net::connect(tcp, &server)) {
        Ok(()) => Some(true),
        Err(rustix::io::Errno::INPROGRESS | rustix::io::Errno::INTR) => Some(false),
        Err(_) => None,
    }
}

/// Calls connect(2) with a wait of a moment at most. The program would see O_NONBLOCK.
fn without_waiting<T>(tcp: &TcpStream, connect: impl FnOnce() -> T) -> T {
    let before = sockopt::socket_timeout(tcp, Timeout::Send).ok().flatten();
    let _ = sockopt::set_socket_timeout(tcp, Timeout::Send, Some(Duration::from_micros(1)));
    let result = connect();
    let _ = sockopt::set_socket_timeout(tcp, Timeout::Send, before);
    result
}

/// The connection is made, or has failed.
fn end(descriptor: &DescriptorRef, fd: c_int, tcp: TcpStream) -> PendingStage {
    match poll(&tcp).intersects(PollFlags::ERR | PollFlags::HUP | PollFlags::NVAL) {
        true => {
            // The program sees a reset instead of the refused connection.
            let _ = sockopt::socket_error(&tcp);
            complete(descriptor, fd, Err(io::ErrorKind::ConnectionReset.into()));
        }
        false => {
            let why = FallbackReason::PeerNotSmc.into();
            status::client_stays_on_tcp(fd, &tcp, why);
            complete_with_tcp(descriptor, fd, &tcp);
        }
    }
    None
}
