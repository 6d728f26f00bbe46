// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Carries out what the table of a socket's states (`socket/states.rs`) says.

use std::ffi::c_int;

use guest_driver::interpose::ByteQueue;

use crate::selection::inherited_options;
use crate::socket::registrations;
use crate::socket::states::{self, SocketAction, SocketEvent};
use crate::socket::stream::SocketRole;
use crate::socket::table::{DESCRIPTORS, DescriptorRef};
use crate::sys::borrowed;
use crate::sys::raw::{self, Errno};

/// What the actions of an event need from the one who brings it.
#[derive(Clone, Copy)]
pub(crate) enum ActionInput<'a> {
    /// Nothing.
    Nothing,
    /// What begins the handshake.
    Start(&'a dyn Fn()),
    /// What sends the bytes that the program has written before the connection was decided.
    Send(&'a dyn Fn(ByteQueue)),
    /// Why the handshake broke the connection.
    Error(Errno),
}

/// Brings an event to a socket, and does what the table says.
pub(crate) fn carry_out(
    descriptor: &DescriptorRef,
    fd: c_int,
    event: SocketEvent,
    input: ActionInput<'_>,
) {
    let Some(socket) = descriptor.stream() else { return };
    let Some(plan) = states::next(socket.stage(), event) else { return };
    // The program may have closed the number, and got it again for something else.
    let is_ours = || DESCRIPTORS.get(fd).is_some_and(|now| now.is(descriptor));
    // Locked from when they are sent until the state is stored: no write comes in between.
    let mut early = None;
    for action in plan.actions {
        match action {
            SocketAction::Store => {
                // Between the plan and here another thread may at most have forbidden SMC, which
                // changes nothing of the actions.
                if socket.decision.store(event).is_none() && socket.stage() != plan.to {
                    return;
                }
            }
            SocketAction::StartHandshake => {
                if let ActionInput::Start(start) = input {
                    start();
                }
            }
            SocketAction::RestoreAcks => {
                if socket.role() == SocketRole::Client && is_ours() {
                    delay_acks(fd, false);
                }
            }
            SocketAction::SendEarly => {
                let bytes = std::mem::take(&mut **early.insert(socket.undecided.early()));
                if let ActionInput::Send(send) = input
                    && !bytes.is_empty()
                {
                    send(bytes);
                }
            }
            SocketAction::KeepError => {
                if let ActionInput::Error(Errno(error)) = input {
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
            SocketAction::RemoveEntry => DESCRIPTORS.remove_if(fd, descriptor),
        }
    }
}

/// Delays TCP's acknowledgements, or sends them at once. With `delay`, the Proposal carries the
/// last acknowledgement of the three-way handshake. A connection that stays on TCP must not delay
/// it: a server whose program writes first would learn of its client much later. In a program that
/// sets TCP_QUICKACK itself nothing happens.
pub(crate) fn delay_acks(fd: c_int, delay: bool) {
    if inherited_options::may_have_quickack() {
        return;
    }
    let _ = rustix::net::sockopt::set_tcp_quickack(borrowed(fd), !delay);
}
