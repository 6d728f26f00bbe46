// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The server's half of a handshake on one accepted TCP stream.

use std::io;
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::Stack;
use super::offers::{Offer, Source};
use super::stack::{Current, buffer_of};
use super::stream::SmcStream;
use crate::handshake::server::{ServerHandshake, ServerParams};
use crate::handshake::{Broken, FirstBytes, Outcome};
use crate::info::Fallback;
use crate::smcd::Fabrics;
use smc_core::carrier::Role;
use smc_core::handshake::DeclineReason;
use smc_rendezvous::{Mode, PROPOSAL_TIMEOUT, ServerAction};

/// The longest wait of [`Incoming::decline`] for the rest of a Proposal.
const DECLINE_TIMEOUT: Duration = Duration::from_secs(1);

/// A handshake with a client on a newly accepted TCP stream.
///
/// [`SmcListener`](super::SmcListener) has one for each client that is not ready. A program that
/// accepts TCP streams by itself uses this type directly, and decides which thread waits.
pub struct Incoming {
    stack: Arc<Stack>,
    /// `None`: the handshake has ended.
    tcp: Option<TcpStream>,
    handshake: ServerHandshake,
    /// The client's location, if the caller knows it: the kernel need not be asked.
    source: Option<Source>,
    /// Counts the handshake while it holds memory for a client without a Confirm.
    offer: Option<Offer>,
    /// Bytes of the own DMB.
    buffer: u32,
    /// The configuration to decline by, if the caller's policy says TCP.
    left_by_policy: Option<Arc<smc_core::handshake::Config>>,
}

impl Incoming {
    /// Begins with the known first bytes of the client. If they are incomplete, the handshake waits for
    /// the rest for [`Config::detect_timeout`](super::Config::detect_timeout). Reads and writes nothing
    /// yet.
    pub fn new(stack: &Arc<Stack>, tcp: TcpStream, first_bytes: FirstBytes) -> Incoming {
        stack.sweep();
        let handshake = ServerHandshake::new(first_bytes, stack.config().detect_timeout);
        Self::begin(stack, tcp, handshake, None)
    }

    /// Declines the Proposal of a client with its first bytes received, because descriptors or threads
    /// are short, on a stream kept by the caller. The connection continues as TCP.
    ///
    /// # Errors
    /// The handshake broke the connection, or the rest of the Proposal did not come within a second.
    pub fn decline(stack: &Arc<Stack>, tcp: &TcpStream, first_bytes: FirstBytes) -> io::Result<()> {
        let mut handshake = ServerHandshake::new(first_bytes, DECLINE_TIMEOUT);
        let deadline = Instant::now() + DECLINE_TIMEOUT;
        let mut config = smc_core::handshake::Config::new(stack.peer_id());
        config.without_device = DeclineReason::NoResources;
        let config = Arc::new(config);
        let params = ServerParams {
            config: &config,
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
        Self::begin(stack, tcp, handshake, Some(source))
    }

    fn begin(
        stack: &Arc<Stack>,
        tcp: TcpStream,
        handshake: ServerHandshake,
        source: Option<Source>,
    ) -> Incoming {
        let buffer = stack.buffer_len();
        let (stack, tcp) = (stack.clone(), Some(tcp));
        Incoming { stack, tcp, handshake, source, offer: None, buffer, left_by_policy: None }
    }

    /// Has the handshake decline the client's Proposal: a policy of the caller's says TCP.
    pub fn leave_by_policy(&mut self) {
        let mut config = smc_core::handshake::Config::new(self.stack.peer_id());
        config.without_device = DeclineReason::Policy;
        self.left_by_policy = Some(Arc::new(config));
    }

    /// Like [`Outgoing::limit_buffer`](super::Outgoing::limit_buffer).
    pub fn limit_buffer(&mut self, bytes: usize) {
        self.buffer = self.buffer.min(buffer_of(bytes));
    }

    /// Ends the handshake before its deadline, because others need its place. A client that has neither
    /// sent nor announced anything continues as a TCP client.
    ///
    /// # Errors
    /// The handshake has begun. The connection is reset.
    pub fn evict(&mut self) -> io::Result<SmcStream> {
        let result = self.handshake.evict();
        self.finish(result)
    }

    /// The descriptors, readable when [`Incoming::advance`] can continue: the TCP stream, and one for
    /// LLC messages if the handshake waits for some.
    pub fn fds(&self) -> [Option<BorrowedFd<'_>>; 2] {
        [self.tcp.as_ref().map(AsFd::as_fd), self.handshake.fd()]
    }

    /// The end of the waits of [`Incoming::advance`]; `None`: the handshake has ended.
    pub fn deadline(&self) -> Option<Instant> {
        self.tcp.as_ref().map(|_| self.handshake.deadline())
    }

    /// Whether the handshake waits for the client's answer to Accept, and so for TCP's descriptor only.
    pub(super) fn awaits_confirm(&self) -> bool {
        self.handshake.awaits_confirm()
    }

    /// Like [`Incoming::advance`], with spinning for the client's next bytes as long as worthwhile.
    ///
    /// # Errors
    /// As [`Incoming::advance`].
    pub fn advance_soon(&mut self) -> io::Result<Option<SmcStream>> {
        let stack = self.stack.clone();
        let mut result = self.advance();
        if !matches!(result, Ok(None)) {
            return result;
        }
        stack.common().spin.until_asked(|| {
            result = self.advance();
            !matches!(result, Ok(None))
        });
        result
    }

    /// Like [`Incoming::advance`], without a check for the client's answer right after Accept: no
    /// client answers so soon. For callers that poll the kernel afterwards.
    ///
    /// # Errors
    /// As [`Incoming::advance`].
    pub fn advance_to_accept(&mut self) -> io::Result<Option<SmcStream>> {
        let current = self.stack.current();
        match self.step(&current, false) {
            None => Ok(None),
            Some(result) => self.finish(result).map(Some),
        }
    }

    /// Continues as far as the client's bytes allow, without waiting. `None`: more bytes have to come.
    ///
    /// # Errors
    /// The handshake broke the connection, which is reset.
    pub fn advance(&mut self) -> io::Result<Option<SmcStream>> {
        let current = self.stack.current();
        match self.step(&current, true) {
            None => Ok(None),
            Some(result) => self.finish(result).map(Some),
        }
    }

    /// Continues as far as the client's bytes allow, or ends the handshake if its deadline has passed.
    /// `None`: more bytes have to come; else the caller calls [`Incoming::finish`]. For `drain` see
    /// [`ServerHandshake::advance`].
    pub(super) fn step(
        &mut self,
        current: &Current,
        drain: bool,
    ) -> Option<Result<Outcome, Broken>> {
        let Some(tcp) = &self.tcp else {
            return Some(Err(Broken::Io(io::ErrorKind::NotConnected.into())));
        };
        let none = Fabrics::default();
        let mut params = ServerParams {
            config: &current.config,
            fabrics: &current.fabrics,
            rdma: current.rdma(),
            buffer: self.buffer,
            message_timeout: self.stack.config().clc_timeout,
        };
        if let Some(config) = &self.left_by_policy {
            params.config = config;
            (params.fabrics, params.rdma) = (&none, None);
        }
        let source = || self.source.or_else(|| Source::of_stream(tcp));
        if self.offer.is_none() && !self.stack.offers().has_room(source) {
            // Without a device the Proposal is declined.
            (params.fabrics, params.rdma) = (&none, None);
        }
        let mut result = self.handshake.advance(tcp, &params, drain);
        if self.offer.is_none() && self.handshake.has_accepted() {
            // Without a source the client has gone.
            self.offer = source().map(|source| self.stack.offers().add(source));
        }
        if matches!(result, Ok(None)) && Instant::now() >= self.handshake.deadline() {
            result = self.handshake.expire(tcp, &params);
        }
        result.transpose()
    }

    /// Makes a connection of the result of the handshake.
    ///
    /// # Errors
    /// The handshake broke the connection, which is reset.
    pub(super) fn finish(&mut self, result: Result<Outcome, Broken>) -> io::Result<SmcStream> {
        let tcp = self.tcp.take().ok_or(io::ErrorKind::NotConnected)?;
        self.offer = None;
        // Whatever the client proposed, the policy decided.
        let by_policy = self.left_by_policy.is_some();
        let result = result.map(|outcome| match outcome {
            Outcome::Tcp(_) if by_policy => Outcome::Tcp(Fallback::Policy),
            outcome => outcome,
        });
        SmcStream::of_handshake(&self.stack, tcp, result, Role::Server)
    }
}

impl std::fmt::Debug for Incoming {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Incoming").field("tcp", &self.tcp).finish_non_exhaustive()
    }
}
