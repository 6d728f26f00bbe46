// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Carries out the table of a socket's states (`socket/states.rs`).

use std::ffi::c_int;
use std::os::fd::BorrowedFd;

use guest_driver::interpose::ByteQueue;
use guest_driver::{Fallback, SmcStream};

use crate::selection::{early, inherited_options};
use crate::socket::registrations;
use crate::socket::states::{self, SocketAction, SocketEvent};
use crate::socket::stream::SocketRole;
use crate::socket::table::{DESCRIPTORS, DescriptorRef};
use crate::sys::borrowed;
use crate::sys::raw::{self, Errno};
use crate::tcp_notes;

/// The end of a handshake, with the data for the actions.
#[derive(Clone, Copy)]
pub(super) enum HandshakeEnd<'a> {
    /// SMC carries the connection.
    Smc(&'a SmcStream),
    /// TCP carries the connection, by this descriptor.
    Tcp(BorrowedFd<'a>),
    /// TCP carries the connection, and nothing can be sent any more.
    ClosedTcp,
    /// The handshake has broken the connection.
    Broken(Errno),
    /// The peer has reset TCP. 0: the program learns of no error.
    Reset(Errno),
}

impl HandshakeEnd<'_> {
    fn event(self) -> SocketEvent {
        match self {
            HandshakeEnd::Smc(_) => SocketEvent::EndOnSmc,
            HandshakeEnd::Tcp(_) | HandshakeEnd::ClosedTcp => SocketEvent::EndOnTcp,
            HandshakeEnd::Broken(_) => SocketEvent::Break,
            HandshakeEnd::Reset(_) => SocketEvent::Reset,
        }
    }

    /// Sends the early bytes of the program.
    fn send(self, bytes: ByteQueue) {
        match self {
            HandshakeEnd::Smc(stream) => stream.send_queue(bytes),
            HandshakeEnd::Tcp(tcp) => early::send_all(bytes, tcp),
            HandshakeEnd::ClosedTcp | HandshakeEnd::Broken(_) | HandshakeEnd::Reset(_) => {}
        }
    }

    /// The error for a call of the program.
    fn error(self) -> Option<c_int> {
        match self {
            HandshakeEnd::Broken(Errno(error)) | HandshakeEnd::Reset(Errno(error)) => Some(error),
            HandshakeEnd::Smc(_) | HandshakeEnd::Tcp(_) | HandshakeEnd::ClosedTcp => None,
        }
    }
}

/// Ends the handshake of a socket, as the table says.
pub(super) fn end(descriptor: &DescriptorRef, fd: c_int, how: HandshakeEnd<'_>) {
    run(descriptor, fd, how.event(), Some(how));
}

/// Brings an event that is no end of the handshake to a socket, and acts by the table. `true`: the
/// caller begins the handshake.
pub(crate) fn carry_out(descriptor: &DescriptorRef, fd: c_int, event: SocketEvent) -> bool {
    run(descriptor, fd, event, None)
}

fn run(
    descriptor: &DescriptorRef,
    fd: c_int,
    event: SocketEvent,
    end: Option<HandshakeEnd<'_>>,
) -> bool {
    let Some(socket) = descriptor.stream() else { return false };
    let Some(plan) = states::next(socket.stage(), event) else { return false };
    // The program may have closed the number, and got the same number for another file.
    let is_ours = || DESCRIPTORS.get(fd).is_some_and(|now| now.is(descriptor));
    // The early bytes stay locked from sending until the state is stored: no write comes in
    // between.
    let mut early = None;
    let mut begins = false;
    for action in plan.actions {
        match action {
            SocketAction::Store => {
                // Between the plan and here another thread may at most have forbidden SMC, without
                // a change to the actions.
                if socket.decision.store(event).is_none() && socket.stage() != plan.to {
                    return false;
                }
            }
            SocketAction::StartHandshake => begins = true,
            SocketAction::RestoreAcks => {
                if socket.role() == SocketRole::Client && is_ours() {
                    delay_acks(fd, false);
                }
            }
            SocketAction::SendEarly => {
                let bytes = std::mem::take(&mut **early.insert(socket.undecided.early()));
                if let Some(end) = end.filter(|_| !bytes.is_empty()) {
                    end.send(bytes);
                }
            }
            SocketAction::KeepError => {
                if let Some(error) = end.and_then(HandshakeEnd::error) {
                    socket.end.set_error(error);
                }
            }
            SocketAction::Disconnect => {
                if is_ours() {
                    raw::disconnect(fd);
                }
            }
            SocketAction::MoveRegistrations => {
                registrations::follow(descriptor, socket, plan.to.state());
            }
            SocketAction::Wake => socket.decision.wake(),
            SocketAction::RemoveEntry => {
                if is_ours() {
                    tcp_notes::note_unless_known(fd, &Fallback::Asked);
                }
                DESCRIPTORS.remove_if(fd, descriptor);
            }
        }
    }
    begins
}

/// Delays TCP's acknowledgements, or sends them at once. With `delay`, the Proposal carries the
/// last acknowledgement of the three-way handshake. On a connection that stays on TCP this
/// acknowledgement must not be delayed: a server whose program writes first would learn of its
/// client much later. Does nothing in a program with its own use of TCP_QUICKACK.
pub(crate) fn delay_acks(fd: c_int, delay: bool) {
    if inherited_options::may_have_quickack() {
        return;
    }
    let _ = rustix::net::sockopt::set_tcp_quickack(borrowed(fd), !delay);
}
