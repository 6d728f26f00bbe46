// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The choice between SMC and TCP for one connection, and the handshake for the choice.
//!
//! A connection that the program accepts or makes is *undecided* until a call needs to know the
//! carrier. So a server forking for each client leaves the handshake to the child, which opens a
//! session of its own. A program accepting from an event loop usually finds the client's message
//! waiting, and the handshake takes one short call. A longer handshake goes on in one thread, which
//! waits for the peers of all such handshakes. At the end of a handshake the thread wakes the
//! program's calls. For a socket in an epoll set the program's own wait for the set goes on with
//! the handshake.

pub(crate) mod answering_listeners;
mod choice;
mod circuit_breaker;
mod client;
pub(crate) mod connect;
mod early;
pub(crate) mod establish;
pub(crate) mod filters;
mod first_bytes;
pub(crate) mod handed_listeners;
pub(crate) mod handshake;
pub(crate) mod inherited_options;
mod kernel_sockets;
mod listening_ports;
pub(crate) mod option;
pub(crate) mod options;
pub(crate) mod outcome;
pub(crate) mod own_calls;
mod pending;
mod reconnect;
pub(crate) mod resolve;
pub(crate) mod running;
mod server;
mod server_memory;
pub(crate) mod session;
pub(crate) mod short_lived;
pub(crate) mod transitions;
pub(crate) mod waiting;
pub(crate) mod worthwhile;

use std::time::{Duration, Instant};

/// The carrier of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Selected {
    /// SMC.
    Smc,
    /// TCP, or the socket is not connected. The kernel carries out all calls.
    Tcp,
    /// Nothing: the handshake failed and took the connection with it.
    Failed,
    /// The handshake is not complete. After [`Wait::Block`]: a signal has interrupted the call.
    /// After [`Wait::Until`]: the same, or the time has passed.
    Pending,
}

/// How long [`Wait::Short`] waits.
const SHORT_WAIT: std::time::Duration = std::time::Duration::from_millis(2);

/// How long a call may wait for the handshake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wait {
    /// Until the handshake is complete.
    Block,
    /// Until then, but not longer than the time limit of the program's call.
    Until(Instant),
    /// About as long as a running peer needs to answer.
    Short,
    /// Not at all: the program's wait for an epoll set goes on with the handshake.
    Now,
}

impl Wait {
    /// How long the call may wait, `most` at most.
    fn left(self, most: Duration) -> Duration {
        match self {
            Wait::Until(end) => most.min(end.saturating_duration_since(Instant::now())),
            Wait::Block | Wait::Short | Wait::Now => most,
        }
    }

    /// Whether the time limit of the call has passed.
    pub(crate) fn is_over(self) -> bool {
        matches!(self, Wait::Until(end) if Instant::now() >= end)
    }
}
