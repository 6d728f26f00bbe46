//! Finds out whether SMC or TCP carries a connection.

use std::ffi::c_int;
use std::time::Duration;

use crate::selection::handshake::begin;
use crate::selection::{Patience, Verdict};
use crate::socket::owner_pipe;
use crate::socket::stream::State;
use crate::socket::table::DescriptorRef;
use crate::sys::raw;

/// How long a moment is.
const MOMENT: Duration = Duration::from_millis(2);
/// How often a thread that waits for a verdict looks by itself.
const LOOK: Duration = Duration::from_secs(1);

/// Finds out what carries a connection.
pub(crate) fn settle(descriptor: &DescriptorRef, fd: c_int, patience: Patience) -> Verdict {
    let Some(socket) = descriptor.stream() else { return Verdict::Tcp };
    let mut waited = false;
    loop {
        match socket.state() {
            State::Fresh | State::Tcp => return Verdict::Tcp,
            State::Relayed => {
                owner_pipe::request(socket);
                return Verdict::Tcp;
            }
            State::Smc => return Verdict::Smc,
            State::Broken => return Verdict::Broken,
            State::Undecided => {
                if socket.advance(State::Undecided, State::Deciding) {
                    raw::without_signals(|| begin(descriptor, socket, fd, patience));
                }
            }
            State::Deciding => match patience {
                Patience::Forever => socket.await_decision(LOOK),
                Patience::Moment if waited => return Verdict::NotYet,
                Patience::Moment => {
                    waited = true;
                    socket.await_decision(MOMENT);
                }
            },
        }
    }
}

/// Begins the handshake, if nobody has, and does not wait.
pub(crate) fn start(descriptor: &DescriptorRef, fd: c_int) {
    if let Some(socket) = descriptor.stream()
        && socket.advance(State::Undecided, State::Deciding)
    {
        raw::without_signals(|| begin(descriptor, socket, fd, Patience::Moment));
    }
}
