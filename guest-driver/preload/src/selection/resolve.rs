// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Finds out whether SMC or TCP carries a connection.

use std::ffi::c_int;
use std::os::fd::OwnedFd;
use std::time::Duration;

use ism_sys::interrupt;

use crate::selection::{SHORT_WAIT, Selected, Wait, handshake, waiting};
use crate::socket::states::SocketEvent;
use crate::socket::stream::SocketState;
use crate::socket::table::DescriptorRef;
use crate::socket::{owner_pipe, registrations};
use crate::sys::raw::{self, Errno};

/// How often a waiting thread looks at the state without being woken.
const RECHECK_INTERVAL: Duration = Duration::from_secs(1);

/// Returns the carrier of a connection, and does the handshake if no thread has begun it.
pub(crate) fn resolve(descriptor: &DescriptorRef, fd: c_int, wait: Wait) -> Selected {
    let Some(socket) = descriptor.stream() else { return Selected::Tcp };
    let mut waited = false;
    loop {
        match socket.state() {
            SocketState::Unconnected | SocketState::Tcp => return Selected::Tcp,
            SocketState::Relayed => {
                owner_pipe::request(socket);
                return Selected::Tcp;
            }
            SocketState::Smc => return Selected::Smc,
            SocketState::Failed => return Selected::Failed,
            SocketState::Undecided => {
                let interrupted =
                    handshake::begin(descriptor, socket, fd, (SocketEvent::Use, wait), None);
                let is_short = matches!(wait, Wait::Short | Wait::Now);
                let is_postponed = is_short && socket.state() == SocketState::Undecided;
                if interrupted || is_postponed {
                    return Selected::Pending;
                }
            }
            // The handshake is one of an ancestor, and so is the connection.
            SocketState::Deciding if socket.owner.is_inherited() => return Selected::Smc,
            SocketState::Deciding => match wait {
                Wait::Block | Wait::Until(_) => {
                    let left = wait.left(RECHECK_INTERVAL);
                    let interrupted = waiting::help(descriptor, left).unwrap_or_else(|| {
                        let decided = interrupt::listening(|| socket.decision.wait(left));
                        decided == Err(Errno(libc::EINTR))
                    });
                    // The kernel never restarts a call with a time limit (signal(7)).
                    let ends_call = interrupted && (wait != Wait::Block || raw::signals_end_call());
                    if ends_call || wait.is_over() && socket.state() == SocketState::Deciding {
                        return Selected::Pending;
                    }
                }
                Wait::Now => return Selected::Pending,
                Wait::Short if waited => return Selected::Pending,
                Wait::Short if registrations::is_in_a_set(socket) => {
                    waited = true;
                    raw::without_signals(|| waiting::go_on(descriptor));
                }
                Wait::Short => {
                    waited = true;
                    if waiting::help(descriptor, SHORT_WAIT).is_none() {
                        let _ = socket.decision.wait(SHORT_WAIT);
                    }
                }
            },
        }
    }
}

/// Begins the handshake of a client if no thread has. [`Wait::Block`]: waits for it as long as
/// `connect` may. `copy`: a second descriptor of the connection, if there is one.
pub(crate) fn start(descriptor: &DescriptorRef, fd: c_int, wait: Wait, copy: Option<OwnedFd>) {
    if let Some(socket) = descriptor.stream() {
        handshake::begin(descriptor, socket, fd, (SocketEvent::Use, wait), copy);
    }
}
