//! Finds out whether SMC or TCP carries a connection.

use std::ffi::c_int;
use std::time::Duration;

use crate::selection::{Selected, Wait, handshake};
use crate::socket::owner_pipe;
use crate::socket::states::SocketEvent;
use crate::socket::stream::{SocketState, StreamSocket};
use crate::socket::table::DescriptorRef;
use crate::sys::raw::{self, Errno};

/// How long [`Wait::Short`] waits.
const SHORT_WAIT: Duration = Duration::from_millis(2);
/// How often a waiting thread looks at the state without being woken.
const RECHECK_INTERVAL: Duration = Duration::from_secs(1);

/// Returns what carries a connection, and does the handshake if no thread has begun it.
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
                    handshake::begin(descriptor, socket, fd, (SocketEvent::Use, wait));
                let is_postponed = wait == Wait::Short && socket.state() == SocketState::Undecided;
                if interrupted || is_postponed {
                    return Selected::Pending;
                }
            }
            // The handshake is one of an ancestor, and so is the connection.
            SocketState::Deciding if socket.is_inherited() => return Selected::Smc,
            SocketState::Deciding => match wait {
                Wait::Block | Wait::Until(_) => {
                    let woken = socket.await_decision(wait.left(RECHECK_INTERVAL));
                    // The kernel never restarts a call with a time limit (signal(7)).
                    let is_interrupted = woken == Err(Errno(libc::EINTR))
                        && (wait != Wait::Block || raw::signals_interrupt());
                    if is_interrupted || wait.is_over() && is_deciding(socket) {
                        return Selected::Pending;
                    }
                }
                Wait::Short if waited => return Selected::Pending,
                Wait::Short => {
                    waited = true;
                    let _ = socket.await_decision(SHORT_WAIT);
                }
            },
        }
    }
}

fn is_deciding(socket: &StreamSocket) -> bool {
    socket.state() == SocketState::Deciding
}

/// Begins the handshake if no thread has, without waiting for it.
pub(crate) fn start(descriptor: &DescriptorRef, fd: c_int) {
    if let Some(socket) = descriptor.stream() {
        handshake::begin(descriptor, socket, fd, (SocketEvent::Use, Wait::Short));
    }
}
