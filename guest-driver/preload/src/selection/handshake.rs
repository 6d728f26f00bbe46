// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The beginning of the handshake of one connection.

use std::ffi::c_int;
use std::os::fd::OwnedFd;

use guest_driver::interpose::{FirstBytes, SignalMask};

use crate::selection::first_bytes::peek;
use crate::selection::outcome::note_linger;
use crate::selection::server::ClientLook;
use crate::selection::transitions::carry_out;
use crate::selection::{Wait, client, option, server, waiting};
use crate::socket::states::SocketEvent;
use crate::socket::stream::{SocketRole, SocketState, StreamSocket};
use crate::socket::table::DescriptorRef;
use crate::status;
use crate::sys::borrowed;
use crate::sys::own_stack::OwnStack;
use crate::sys::raw::{self, Errno};

/// Begins the handshake, if the state of the socket allows this event. `true`: a signal interrupts
/// the call of the program. `copy`: a second descriptor of the connection, if a client has one.
pub(super) fn begin(
    descriptor: &DescriptorRef,
    socket: &StreamSocket,
    fd: c_int,
    (event, wait): (SocketEvent, Wait),
    copy: Option<OwnedFd>,
) -> bool {
    if socket.role() == SocketRole::Server && event == SocketEvent::Use {
        match server::look_at_client(socket, fd) {
            ClientLook::Plain => {
                stay_plain(descriptor, fd);
                return false;
            }
            ClientLook::Silent if matches!(wait, Wait::Short | Wait::Now) => return false,
            ClientLook::Silent | ClientLook::MayPropose => {}
        }
    }
    carry_out(descriptor, fd, event)
        && raw::blocking_signals(|mask| match OwnStack::take() {
            Some(mut stack) => stack.run(|| start(descriptor, socket, fd, (wait, mask), copy)),
            None if socket.role() == SocketRole::Client => {
                client::decline_here(descriptor, socket, fd);
                false
            }
            // To decline takes little of the caller's stack.
            None => {
                socket.decision.forbid_proposal();
                start(descriptor, socket, fd, (wait, mask), copy)
            }
        })
}

/// The client of a server proposes nothing, and no handshake has begun.
fn stay_plain(descriptor: &DescriptorRef, fd: c_int) {
    status::server_stays_on_tcp(fd, borrowed(fd), option::why_not_proposed());
    carry_out(descriptor, fd, SocketEvent::Plain);
}

/// Looks at the first bytes of a client without an announcement, for a reading call.
///
/// # Errors
/// The result of the call: the socket has an error, or there is nothing to read and the call does not
/// wait.
pub(crate) fn look_before_read(
    descriptor: &DescriptorRef,
    fd: c_int,
    dont_wait: bool,
) -> Result<(), Errno> {
    match FirstBytes::peek_if_any(borrowed(fd)) {
        Ok(Some(FirstBytes::Other)) => stay_plain(descriptor, fd),
        Ok(Some(FirstBytes::Smc(_) | FirstBytes::Incomplete)) => {}
        Ok(None) if dont_wait => return Err(Errno(libc::EAGAIN)),
        Ok(None) => {}
        Err(error) => {
            stay_plain(descriptor, fd);
            return Err(error.into());
        }
    }
    Ok(())
}

/// Begins the handshake. The socket is in [`SocketState::Deciding`], and the signals of the program
/// are blocked; `mask`: the signals blocked by the program. `true`: a signal has interrupted the
/// call of the program.
fn start(
    descriptor: &DescriptorRef,
    socket: &StreamSocket,
    fd: c_int,
    (wait, mask): (Wait, SignalMask),
    copy: Option<OwnedFd>,
) -> bool {
    socket.owner.adopt();
    match (socket.role(), wait) {
        (SocketRole::Client, _) => client::start(descriptor, socket, fd, (wait, mask), copy),
        (SocketRole::Server, Wait::Short | Wait::Now) => {
            server::start(descriptor, socket, fd, wait);
            false
        }
        // A signal that came meanwhile must interrupt the program's call.
        (SocketRole::Server, Wait::Block | Wait::Until(_)) => {
            server::wait_here(descriptor, socket, fd, (wait, mask)) || raw::is_interrupted(mask)
        }
    }
}

/// Called before the program closes the last descriptor of an undecided connection. A client with a
/// Proposal gets an answer in any case: TCP would reset the connection for its unread message. A
/// child process with a copy of the descriptor may do the handshake instead.
pub(crate) fn before_close(
    descriptor: &DescriptorRef,
    fd: c_int,
    is_elsewhere: impl Fn(c_int) -> bool,
) {
    let Some(socket) = descriptor.stream() else { return };
    if socket.state() == SocketState::Undecided
        && !socket.owner.may_be_shared()
        && socket.role() == SocketRole::Server
        && (socket.side.is_announced() || peek(borrowed(fd)).is_proposal())
        && !server::has_read_around(socket, fd)
        && !(socket.owner.is_handed_on() && is_elsewhere(fd))
    {
        begin(descriptor, socket, fd, (SocketEvent::Close, Wait::Short), None);
    }
    if socket.state() == SocketState::Deciding {
        note_linger(descriptor, socket, fd);
        // The socket leaves the program's sets.
        waiting::watch(descriptor);
        waiting::check();
    }
}
