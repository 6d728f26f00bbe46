// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The server's half of a handshake on one accepted TCP stream.

use std::io;
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::Stack;
use super::devices::Current;
use super::handshake::{Handshake, Side};
use super::offers::{Offer, Source};
use super::stream::SmcStream;
use crate::handshake::server::ServerHandshake;
use crate::handshake::{Broken, FirstBytes, Outcome, Params};
use crate::smcd::Fabrics;
use smc_core::carrier::Role;
use smc_core::handshake::{Config, DeclineReason};
use smc_info::Fallback;
use smc_rendezvous::{Mode, PROPOSAL_TIMEOUT, ServerAction};

/// The longest wait of [`Incoming::decline`] for the rest of a Proposal.
const DECLINE_TIMEOUT: Duration = Duration::from_secs(1);

/// A handshake with a client on a newly accepted TCP stream.
///
/// [`SmcListener`](super::SmcListener) has one for each client that is not ready.
pub type Incoming = Handshake<ServerSide>;

/// The server's side of a handshake.
pub struct ServerSide {
    handshake: ServerHandshake,
    /// The client's location, if the caller knows it: the kernel need not be asked.
    source: Option<Source>,
    /// Counts the handshake while it holds memory for a client without a Confirm.
    offer: Option<Offer>,
    /// The configuration to decline by, if the caller wants TCP.
    left: Option<Arc<Config>>,
}

/// A configuration to decline every Proposal with this reason.
fn declining(stack: &Stack, reason: DeclineReason) -> Arc<Config> {
    let mut config = Config::new(stack.peer_id());
    config.without_device = reason;
    Arc::new(config)
}

impl ServerSide {
    fn new(handshake: ServerHandshake, source: Option<Source>) -> ServerSide {
        ServerSide { handshake, source, offer: None, left: None }
    }
}

impl Incoming {
    /// Begins with the known first bytes of the client. If they are incomplete, the handshake waits for
    /// the rest for [`Config::detect_timeout`](super::Config::detect_timeout). Reads and writes nothing
    /// yet.
    pub fn new(stack: &Arc<Stack>, tcp: TcpStream, first_bytes: FirstBytes) -> Incoming {
        stack.sweep();
        let handshake = ServerHandshake::new(first_bytes, stack.config().detect_timeout);
        Self::begin(stack, tcp, ServerSide::new(handshake, None))
    }

    /// Declines the Proposal of a client with its first bytes received, because descriptors or threads
    /// are short, on a stream kept by the caller. The connection continues as TCP.
    ///
    /// # Errors
    /// The handshake broke the connection, or the rest of the Proposal did not come within a second.
    pub fn decline(stack: &Arc<Stack>, tcp: &TcpStream, first_bytes: FirstBytes) -> io::Result<()> {
        let mut handshake = ServerHandshake::new(first_bytes, DECLINE_TIMEOUT);
        let deadline = Instant::now() + DECLINE_TIMEOUT;
        let params = Params {
            config: &declining(stack, DeclineReason::NoResources),
            fabrics: &Fabrics::default(),
            rdma: None,
            buffer: stack.buffer_len(),
            message_timeout: DECLINE_TIMEOUT,
        };
        while handshake.advance(tcp, &params, true)?.is_none() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(io::ErrorKind::TimedOut.into());
            }
            if ism_sys::wait([(tcp.as_fd(), ism_sys::PollInterest::Read)], Some(left)).is_err() {
                // A process that may have no descriptors (RLIMIT_NOFILE) cannot poll any.
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        Ok(())
    }

    /// Begins by the verdict of the stack's peer discovery, with a client of this source.
    pub(super) fn accepted(stack: &Arc<Stack>, tcp: TcpStream, source: Source) -> Incoming {
        let config = stack.config();
        let handshake = match stack.peer_discovery().accepted(&tcp) {
            ServerAction::AwaitProposal if stack.peer_discovery().mode() == Mode::Required => {
                ServerHandshake::required(config.clc_timeout)
            }
            ServerAction::AwaitProposal => {
                ServerHandshake::announced(PROPOSAL_TIMEOUT.min(config.clc_timeout))
            }
            ServerAction::Peek | ServerAction::NotAnnounced => {
                ServerHandshake::new(FirstBytes::Incomplete, config.detect_timeout)
            }
            ServerAction::UseTcp => ServerHandshake::new(FirstBytes::Other, Duration::ZERO),
        };
        Self::begin(stack, tcp, ServerSide::new(handshake, Some(source)))
    }

    /// Has the handshake decline the client's Proposal, for a reason of the caller's.
    pub fn leave_to_tcp(&mut self, why: DeclineReason) {
        self.side.left = Some(declining(&self.stack, why));
    }

    /// Ends the handshake before its deadline, because others need its place. A client that has neither
    /// sent nor announced anything continues as a TCP client.
    ///
    /// # Errors
    /// The handshake has begun. The connection is reset.
    pub fn evict(&mut self) -> io::Result<SmcStream> {
        let result = self.side.handshake.evict();
        self.finish(result)
    }

    /// Whether the handshake waits for the client's answer to Accept, and so for TCP's descriptor only.
    pub(super) fn awaits_confirm(&self) -> bool {
        self.side.handshake.awaits_confirm()
    }

    /// Like [`Incoming::advance`], without a check for the client's answer right after Accept: no
    /// client answers so soon. For callers that poll the kernel afterwards.
    ///
    /// # Errors
    /// As [`Incoming::advance`].
    pub fn advance_to_accept(&mut self) -> io::Result<Option<SmcStream>> {
        self.advance_draining(false)
    }
}

impl Side for ServerSide {
    fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.handshake.fd()
    }

    fn deadline(&self) -> Instant {
        self.handshake.deadline()
    }

    fn step(
        &mut self,
        stack: &Stack,
        tcp: &TcpStream,
        _: &Current,
        params: Params<'_>,
        drain: bool,
    ) -> Result<Option<Outcome>, Broken> {
        let (mut params, none) = (params, Fabrics::default());
        if let Some(config) = &self.left {
            params.config = config;
            (params.fabrics, params.rdma) = (&none, None);
        }
        let source = || self.source.or_else(|| Source::of_stream(tcp));
        if self.offer.is_none() && !stack.offers().has_room(source) {
            // Without a device the Proposal is declined.
            (params.fabrics, params.rdma) = (&none, None);
        }
        let result = self.handshake.advance(tcp, &params, drain);
        if self.offer.is_none() && self.handshake.has_accepted() {
            // Without a source the client has gone.
            self.offer = source().map(|source| stack.offers().add(source));
        }
        match result {
            Ok(None) if Instant::now() >= self.handshake.deadline() => {
                self.handshake.expire(tcp, &params)
            }
            result => result,
        }
    }

    fn finish(
        &mut self,
        stack: &Arc<Stack>,
        tcp: TcpStream,
        result: Result<Outcome, Broken>,
    ) -> io::Result<SmcStream> {
        self.offer = None;
        // Whatever the client proposed, the policy decided.
        let left = self.left.as_ref().map(|config| config.without_device);
        let by_policy = left == Some(DeclineReason::Policy);
        let result = result.map(|outcome| match outcome {
            Outcome::Tcp(_) if by_policy => Outcome::Tcp(Fallback::Policy),
            outcome => outcome,
        });
        SmcStream::of_handshake(stack, tcp, result, Role::Server)
    }
}
