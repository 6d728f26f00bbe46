// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The two sides of a connection, with the library's knowledge of each.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::socket::proposal_answer::ProposalAnswer;
use crate::socket::smc_request::SmcRequest;
use crate::sys::fork_lock::{ForkMutex, ForkMutexGuard};

/// An end of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SocketRole {
    /// Accepted.
    Server,
    /// Connected.
    Client,
}

/// The side of the connection.
#[derive(Debug)]
pub(crate) enum Side {
    /// `accept` made the socket.
    Server(ServerSide),
    /// `socket` made the socket.
    Client(ClientSide),
}

/// The library's record of an accepted connection.
#[derive(Debug, Default)]
pub(crate) struct ServerSide {
    /// The address of the listener as reached by the client, if known.
    pub(crate) listener: Option<SocketAddr>,
    /// The client has announced a Proposal, by TCP option 254.
    pub(crate) announced: bool,
    /// How long the server waits for the client's first bytes. After this time the server takes the
    /// client for one without SMC.
    pub(crate) detect_timeout: Duration,
    /// The policy has changed, and a Proposal is to be declined.
    pub(crate) left_by_policy: bool,
    /// A call has postponed the handshake.
    postponed: AtomicBool,
}

/// The library's record of a connection made by the program.
#[derive(Debug, Default)]
pub(crate) struct ClientSide {
    /// The client's question for SMC; `None`: no question, or not connected.
    request: ForkMutex<Option<SmcRequest>>,
    /// The progress of the server's answer to the Proposal.
    pub(crate) answer: ProposalAnswer,
    /// The program has asked for the name of its socket.
    name_known: AtomicBool,
}

impl Side {
    /// A new side; nothing is known yet.
    pub(super) fn new(role: SocketRole) -> Side {
        match role {
            SocketRole::Server => Side::Server(ServerSide::default()),
            SocketRole::Client => Side::Client(ClientSide::default()),
        }
    }

    /// Whether this side is the client or the server.
    #[inline]
    pub(crate) fn role(&self) -> SocketRole {
        match self {
            Side::Server(_) => SocketRole::Server,
            Side::Client(_) => SocketRole::Client,
        }
    }

    /// The client's side.
    #[inline]
    pub(crate) fn client(&self) -> Option<&ClientSide> {
        match self {
            Side::Client(client) => Some(client),
            Side::Server(_) => None,
        }
    }

    /// The server's side.
    #[inline]
    pub(crate) fn server(&self) -> Option<&ServerSide> {
        match self {
            Side::Server(server) => Some(server),
            Side::Client(_) => None,
        }
    }

    /// The client's request for SMC.
    pub(crate) fn request(&self) -> Option<SmcRequest> {
        *self.client()?.lock_request()
    }

    /// Whether both ends know by TCP option 254 of the client's coming Proposal.
    pub(crate) fn is_announced(&self) -> bool {
        match self {
            Side::Server(server) => server.announced,
            Side::Client(_) => self.request().is_some_and(|request| request.awaited == Some(true)),
        }
    }

    /// Whether the kernel carries out all calls until the next use of the connection: the client of
    /// this server has announced nothing, or an earlier call has postponed the handshake.
    pub(crate) fn is_plain_if_silent(&self) -> bool {
        self.server().is_some_and(|server| {
            server.detect_timeout.is_zero() || server.postponed.load(Ordering::Relaxed)
        })
    }

    /// Whether the client of this server has announced nothing, and is plain unless its first bytes
    /// are a Proposal.
    pub(crate) fn may_be_plain(&self) -> bool {
        self.server().is_some_and(|server| server.detect_timeout.is_zero() && !server.announced)
    }

    /// [`ServerSide::detect_timeout`]; zero for a client.
    pub(crate) fn detect_timeout(&self) -> Duration {
        self.server().map_or(Duration::ZERO, |server| server.detect_timeout)
    }
}

impl ServerSide {
    /// An accepted connection.
    pub(crate) fn new(
        listener: Option<SocketAddr>,
        announced: bool,
        detect_timeout: Duration,
    ) -> ServerSide {
        ServerSide { listener, announced, detect_timeout, ..ServerSide::default() }
    }

    /// Stores that a call has postponed the handshake.
    pub(crate) fn set_postponed(&self) {
        self.postponed.store(true, Ordering::Relaxed);
    }
}

impl ClientSide {
    /// The request for SMC, locked.
    pub(crate) fn lock_request(&self) -> ForkMutexGuard<'_, Option<SmcRequest>> {
        self.request.lock()
    }

    /// Stores the server's answer to TCP option 254: whether the server waits for a message.
    pub(crate) fn set_awaited(&self, awaited: bool) {
        if let Some(request) = &mut *self.lock_request() {
            request.awaited = Some(awaited);
        }
    }

    /// Whether the program has asked for the name of its socket.
    pub(crate) fn is_name_known(&self) -> bool {
        self.name_known.load(Ordering::Relaxed)
    }

    /// Stores that the program asks for the name of its socket.
    pub(crate) fn set_name_known(&self) {
        self.name_known.store(true, Ordering::Relaxed);
    }
}
