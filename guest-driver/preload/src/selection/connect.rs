// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `connect` on a socket of the library.

use std::ffi::c_int;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use crate::selection::choice::{self, Choice};
use crate::selection::transitions::carry_out;
use crate::selection::{Wait, option, resolve, running};
use crate::socket::descriptors;
use crate::socket::states::SocketEvent;
use crate::socket::stream::{SocketState, StreamSocket};
use crate::socket::table::DescriptorRef;
use crate::status;
use crate::sys::borrowed;
use crate::sys::raw::{Errno, SysResult};

/// How long a disconnect waits for the thread doing the handshake.
const DISCONNECT: Duration = Duration::from_secs(1);

/// `connect` on a known socket. `native` calls libc's function.
pub(crate) fn connect(
    fd: c_int,
    descriptor: &DescriptorRef,
    socket: &StreamSocket,
    to: Option<SocketAddr>,
    native: impl FnOnce() -> SysResult,
) -> SysResult {
    let client = socket.side.client().filter(|_| socket.state() == SocketState::Unconnected);
    let Some(client) = client else { return connect_again(socket, native) };
    let mut asking = match choice::choose(fd, socket, to) {
        Choice::Ask(asking) => asking,
        Choice::Tcp(chosen) => {
            let result = native();
            // After a failure the program may try another address, so the entry stays.
            if has_begun(result) {
                chosen.report(fd);
                carry_out(descriptor, fd, SocketEvent::Plain);
                chosen.observe(fd);
            }
            return result;
        }
    };
    let result = native();
    if let Err(why) = asking.take_answer(fd, result) {
        asking.restore_acks(fd);
        status::client_stays_on_tcp(fd, borrowed(fd), why);
        carry_out(descriptor, fd, SocketEvent::Plain);
        return result;
    }
    if !has_begun(result) {
        // The program may use the socket for something else.
        socket.undecided.set_copy(-1);
        option::after_failed_connect(asking.request, borrowed(fd));
        asking.restore_acks(fd);
        return result;
    }
    *client.lock_request() = Some(asking.request);
    carry_out(descriptor, fd, SocketEvent::Connect);
    let may_block = result.is_ok() && !socket.options.is_nonblocking();
    let wait = if may_block { Wait::Block } else { Wait::Short };
    resolve::start(descriptor, fd, wait, asking.copy);
    if result.is_ok() && socket.state() == SocketState::Failed { broken(socket) } else { result }
}

/// Whether TCP is connected or about to be. Interrupted: the kernel goes on connecting, and the
/// program polls for the result.
fn has_begun(result: SysResult) -> bool {
    matches!(result, Ok(_) | Err(Errno(libc::EINPROGRESS | libc::EINTR)))
}

/// The result of a `connect` whose handshake has broken the connection.
fn broken(socket: &StreamSocket) -> SysResult {
    match socket.end.take_error() {
        0 => Ok(0),
        error @ libc::ECONNRESET => {
            // TCP was connected when the call returned.
            socket.end.set_error(error);
            Ok(0)
        }
        error => Err(Errno(error)),
    }
}

/// `connect` on a socket that was connected before. The kernel knows how far TCP is.
fn connect_again(socket: &StreamSocket, native: impl FnOnce() -> SysResult) -> SysResult {
    match socket.state() {
        SocketState::Failed => match socket.end.take_error() {
            0 => native(),
            error => Err(Errno(error)),
        },
        // The library has disconnected the kernel's socket after a reset.
        SocketState::Smc if socket.smc().is_some_and(|s| s.readiness(false).failed) => {
            Err(Errno(libc::EISCONN))
        }
        _ => native(),
    }
}

/// `connect` to no address (AF_UNSPEC): the kernel disconnects the socket and serves all further
/// calls. `native` calls libc's function.
pub(crate) fn disconnect(
    fd: c_int,
    descriptor: &DescriptorRef,
    native: impl FnOnce() -> SysResult,
) -> SysResult {
    let Some(socket) = descriptor.stream() else { return native() };
    if !matches!(socket.state(), SocketState::Undecided | SocketState::Deciding) {
        let was_over = descriptors::disconnect(descriptor);
        let result = native();
        if was_over {
            // The kernel has reset a connection already over for TCP, and reports the reset as an
            // error.
            let _ = rustix::net::sockopt::socket_error(borrowed(fd));
        }
        return result;
    }
    socket.decision.forbid_proposal();
    // The thread must not connect the socket again, or has done so by now.
    let take_request = || socket.side.client()?.lock_request().take();
    take_request();
    let result = native();
    // A thread doing the handshake finds the socket disconnected. The thread must not find the next
    // connection.
    let end = Instant::now() + DISCONNECT;
    while socket.state() == SocketState::Deciding && Instant::now() < end {
        let _ = socket.decision.wait(Duration::from_millis(10));
    }
    if socket.state() == SocketState::Deciding {
        running::take_socket_away(fd, socket);
    }
    if let Some(request) = take_request() {
        option::after_failed_connect(request, borrowed(fd));
    }
    descriptors::release(descriptor);
    result
}
