// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The choice of a client before it connects: to ask the server for SMC, or to leave the connection
//! to TCP. The client chooses once per connection, by the record of the server.

use std::ffi::c_int;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;

use guest_driver::Fallback;
use smc_core::handshake::FallbackReason;

use crate::selection::outcome::duplicate;
use crate::selection::server_memory::{self, ServerRecord};
use crate::selection::transitions::delay_acks;
use crate::selection::worthwhile::{self, PlainConnection};
use crate::selection::{option, session};
use crate::socket::smc_request::SmcRequest;
use crate::socket::states::SocketStage;
use crate::socket::stream::StreamSocket;
use crate::sys::borrowed;
use crate::sys::raw::{self, Errno, SysResult};
use crate::{status, tcp_notes};

/// The choice for one connection.
pub(super) enum Choice {
    /// The client asks for SMC.
    Ask(ClientRequest),
    /// TCP carries the connection.
    Tcp(TcpChoice),
}

/// A client asking its server for SMC.
pub(super) struct ClientRequest {
    pub(super) request: SmcRequest,
    /// The descriptor for the handshake; `None`: the server seems to be plain.
    pub(super) copy: Option<OwnedFd>,
    server: ServerRecord,
}

/// A connection left to TCP.
pub(super) struct TcpChoice {
    why: Fallback,
    server: Option<SocketAddr>,
    /// Whether the choice is reported; otherwise SMC was not to be expected.
    reported: bool,
    sample: Option<PlainConnection>,
}

/// Chooses for a socket that is about to connect, and prepares the socket for the request.
pub(super) fn choose(fd: c_int, socket: &StreamSocket, to: Option<SocketAddr>) -> Choice {
    option::refresh_policy();
    let may_ask = socket.stage() != SocketStage::UnconnectedForTcp;
    let Some(to) = to.filter(|_| may_ask) else { return TcpChoice::expected(Fallback::Asked) };
    if let Some(plain) = worthwhile::choose_tcp(&to, session::opened().is_some()) {
        let not_smc = FallbackReason::PeerNotSmc.into();
        let why = if plain.by_server { not_smc } else { Fallback::TooShort };
        return TcpChoice::reported(why, to, Some(plain));
    }
    let server = server_memory::record(&to);
    if server.is_paused(raw::monotonic_micros) {
        let why = FallbackReason::PeerNotSmc.into();
        return TcpChoice::reported(why, to, None);
    }
    let seems_plain = server.is_plain();
    let request = match option::before_connect(fd, &to, server) {
        Ok(request) => request,
        Err(why) => {
            socket.undecided.set_copy(-1);
            return TcpChoice::expected(why);
        }
    };
    // The handshake takes a descriptor.
    let copy = if seems_plain { None } else { duplicate(fd).ok() };
    if copy.is_none() && !seems_plain {
        option::after_failed_connect(request, borrowed(fd));
        socket.undecided.set_copy(-1);
        return TcpChoice::expected(Fallback::NoResources);
    }
    if request.listed {
        // The server waits for a Proposal only for a short time, and opening a device takes long.
        let _ = session::current();
    }
    if !seems_plain {
        delay_acks(fd, true);
    }
    Choice::Ask(ClientRequest { request, copy, server })
}

impl ClientRequest {
    /// Stores the server's answer, as far as known when connect(2) has returned `result`.
    ///
    /// # Errors
    /// The reason for TCP to carry the connection.
    pub(super) fn take_answer(&mut self, fd: c_int, result: SysResult) -> Result<(), Fallback> {
        let answer = match result {
            Ok(_) => Some(option::after_connect(self.request, borrowed(fd))),
            Err(Errno(libc::EINPROGRESS)) => option::during_connect(self.request, borrowed(fd)),
            Err(_) => None,
        };
        let Some(answer) = answer else { return Ok(()) };
        self.server.note_answer(answer.is_ok(), raw::monotonic_micros);
        // An answer shows that TCP is connected, whatever the call returns.
        self.request.awaited = Some(answer?);
        Ok(())
    }

    /// Undoes the change to TCP's acknowledgements.
    pub(super) fn restore_acks(&self, fd: c_int) {
        if self.copy.is_some() {
            delay_acks(fd, false);
        }
    }
}

impl TcpChoice {
    /// The choice for a connection not expected to be on SMC.
    fn expected(why: Fallback) -> Choice {
        Choice::Tcp(TcpChoice { why, server: None, reported: false, sample: None })
    }

    fn reported(why: Fallback, server: SocketAddr, sample: Option<PlainConnection>) -> Choice {
        Choice::Tcp(TcpChoice { why, server: Some(server), reported: true, sample })
    }

    /// Reports why TCP carries the connection, made or about to be made.
    pub(super) fn report(&self, fd: c_int) {
        match self.reported {
            true => status::connecting_on_tcp(fd, self.server, self.why.clone()),
            false => tcp_notes::note(fd, &self.why),
        }
    }

    /// Begins to observe the connection, if the connection is a sample.
    pub(super) fn observe(self, fd: c_int) {
        if let Some(sample) = self.sample {
            sample.connected(fd);
        }
    }
}
