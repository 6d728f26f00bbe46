// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The client's half of a handshake on one connected TCP stream.

use std::io;
use std::net::TcpStream;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Instant;

use super::Stack;
use super::devices::Current;
use super::handshake::{Handshake, Side};
use super::stream::SmcStream;
use crate::handshake::client::ClientHandshake;
use crate::handshake::{Broken, Outcome, Params};
use crate::smcd::Fabrics;
use crate::smcd::claim::ClaimWord;
use smc_core::carrier::Role;

/// A handshake with a server on a newly connected TCP stream.
///
/// [`SmcStream::upgrade`] has one, and waits for it.
pub type Outgoing = Handshake<ClientSide>;

/// The client's side of a handshake.
pub struct ClientSide {
    handshake: ClientHandshake,
    /// The server has answered TCP option 254.
    awaited: bool,
    /// The stream of a handshake that failed before the server sent a CLC message.
    unanswered: Option<TcpStream>,
}

/// The claim of a buffer by a Proposal. A server that has taken the claim has its connection.
#[derive(Clone, Debug)]
pub struct ProposalClaim(ClaimWord);

impl ProposalClaim {
    /// Ends the claim, so that another process may decline the server's answer. `false`: the server has
    /// taken the claim, and its answer is under way.
    pub fn withdraw(&self) -> bool {
        self.0.withdraw()
    }
}

impl Outgoing {
    /// Begins on a stream without any data yet. `awaited`: the server has answered TCP option 254, and
    /// waits for a message. Reads and writes nothing yet.
    pub fn new(stack: &Arc<Stack>, tcp: TcpStream, awaited: bool) -> Outgoing {
        stack.sweep();
        let handshake = ClientHandshake::new(awaited);
        Self::begin(stack, tcp, ClientSide { handshake, awaited, unanswered: None })
    }

    /// Sends the Decline awaited by a server, on a stream kept by the caller. The connection continues
    /// as TCP.
    ///
    /// # Errors
    /// An error of send(2).
    pub fn decline(stack: &Arc<Stack>, tcp: &TcpStream) -> io::Result<()> {
        let config = Arc::new(smc_core::handshake::Config::new(stack.peer_id()));
        let params = Params {
            config: &config,
            fabrics: &Fabrics::default(),
            rdma: None,
            buffer: stack.buffer_len(),
            message_timeout: stack.config().clc_timeout,
        };
        ClientHandshake::new(true).advance(tcp, &params)?;
        Ok(())
    }

    /// Whether the Proposal is sent, with no byte of the answer taken from the stream. Another process
    /// may then continue the handshake ([`PendingDecline`](super::PendingDecline)).
    pub fn only_waits(&self) -> bool {
        self.side.handshake.only_waits()
    }

    /// The claim of the Proposal, to be withdrawn before another process continues the handshake.
    pub fn claim(&self) -> Option<ProposalClaim> {
        self.side.handshake.claim().map(ProposalClaim)
    }

    /// Waits for the end of the handshake. `deadline`: the time limit of the application's call.
    ///
    /// # Errors
    /// The handshake broke the connection, which is reset; `TimedOut`.
    pub(super) fn wait(mut self, deadline: Option<Instant>) -> io::Result<SmcStream> {
        let mut result = self.advance_soon();
        loop {
            if let Some(result) = result.transpose() {
                return result;
            }
            let now = Instant::now();
            if deadline.is_some_and(|end| now >= end) {
                let broken = self.side.handshake.give_up();
                return self.finish(Err(broken));
            }
            let ends = [self.deadline(), deadline];
            let left =
                ends.into_iter().flatten().min().map(|end| end.saturating_duration_since(now));
            let waited = match self.fds() {
                [Some(tcp), llc] => ism_sys::poll_readable([Some(tcp), llc, None], &[], left, None),
                [None, _] => Err(io::ErrorKind::NotConnected.into()),
            };
            match waited {
                Err(error) if error.kind() != io::ErrorKind::Interrupted => {
                    return self.finish(Err(error.into()));
                }
                _ => {}
            }
            result = self.advance();
        }
    }

    /// The stream of a handshake that failed without a CLC message of the server: most likely the
    /// server does not speak SMC, despite an answer to TCP option 254. The caller may connect the same
    /// socket again; without this call it is reset. Only the first call returns the stream.
    pub fn take_unanswered(&mut self) -> Option<TcpStream> {
        self.side.unanswered.take()
    }
}

impl Side for ClientSide {
    fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.handshake.fd()
    }

    fn deadline(&self) -> Instant {
        self.handshake.deadline()
    }

    fn step(
        &mut self,
        _: &Stack,
        tcp: &TcpStream,
        current: &Current,
        params: Params<'_>,
        _: bool,
    ) -> Result<Option<Outcome>, Broken> {
        // A sent Proposal has an answer, which would be data otherwise. Without a device an Accept is
        // declined.
        if let Some(why) = current.no_device()
            && !self.awaited
            && !self.handshake.has_proposed()
        {
            return Ok(Some(Outcome::Tcp(why)));
        }
        let outcome = self.handshake.advance(tcp, &params)?;
        if outcome.is_none() && Instant::now() >= self.handshake.deadline() {
            return self.handshake.expire(tcp, &params);
        }
        Ok(outcome)
    }

    fn finish(
        &mut self,
        stack: &Arc<Stack>,
        tcp: TcpStream,
        result: Result<Outcome, Broken>,
    ) -> io::Result<SmcStream> {
        match result {
            Err(broken) if !self.handshake.is_answered() => {
                stack.counters().count_broken();
                self.unanswered = Some(tcp);
                Err(broken.into())
            }
            result => SmcStream::of_handshake(stack, tcp, result, Role::Client),
        }
    }
}

impl Drop for ClientSide {
    fn drop(&mut self) {
        if let Some(tcp) = self.unanswered.take() {
            ism_sys::reset_tcp(tcp);
        }
    }
}
