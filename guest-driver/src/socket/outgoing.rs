// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The client's half of a handshake on one connected TCP stream.

use std::io;
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::Instant;

use super::Stack;
use super::stack::buffer_of;
use super::stream::SmcStream;
use crate::handshake::client::{ClientHandshake, ClientParams};
use crate::handshake::{Broken, Outcome};
use crate::smcd::Fabrics;
use smc_core::carrier::Role;

/// A handshake with a server on a newly connected TCP stream.
///
/// [`SmcStream::upgrade`] has one, and waits for it. A program with other things to wait for uses this
/// type directly, and decides which thread waits.
pub struct Outgoing {
    stack: Arc<Stack>,
    /// `None`: the handshake has ended.
    tcp: Option<TcpStream>,
    handshake: ClientHandshake,
    /// The server has answered TCP option 254.
    awaited: bool,
    /// The stream of a handshake that failed before the server sent a CLC message.
    unanswered: Option<TcpStream>,
    /// Bytes of the own DMB.
    buffer: u32,
}

impl Outgoing {
    /// Begins on a stream without any data yet. `awaited`: the server has answered TCP option 254, and
    /// waits for a message. Reads and writes nothing yet.
    pub fn new(stack: &Arc<Stack>, tcp: TcpStream, awaited: bool) -> Outgoing {
        stack.sweep();
        let handshake = ClientHandshake::new(awaited);
        let buffer = stack.buffer_len();
        let (stack, tcp) = (stack.clone(), Some(tcp));
        Outgoing { stack, tcp, handshake, awaited, unanswered: None, buffer }
    }

    /// Bounds the receive buffer of the connection, as SO_RCVBUF does. The buffer has 16 KiB at least.
    pub fn limit_buffer(&mut self, bytes: usize) {
        self.buffer = self.buffer.min(buffer_of(bytes));
    }

    /// Sends the Decline awaited by a server, on a stream kept by the caller. The connection continues
    /// as TCP.
    ///
    /// # Errors
    /// An error of send(2).
    pub fn decline(stack: &Arc<Stack>, tcp: &TcpStream) -> io::Result<()> {
        let config = Arc::new(smc_core::handshake::Config::new(stack.peer_id()));
        let params = ClientParams {
            config: &config,
            fabrics: &Fabrics::default(),
            rdma: None,
            buffer: stack.buffer_len(),
        };
        ClientHandshake::new(true).advance(tcp, &params)?;
        Ok(())
    }

    /// The descriptors, readable when [`Outgoing::advance`] can continue: the TCP stream, and one for
    /// LLC messages if the handshake waits for some.
    pub fn fds(&self) -> [Option<BorrowedFd<'_>>; 2] {
        [self.tcp.as_ref().map(AsFd::as_fd), self.handshake.fd()]
    }

    /// Whether the Proposal is sent, with no byte of the answer taken from the stream. Another process
    /// may then continue the handshake ([`PendingDecline`](super::PendingDecline)).
    pub fn only_waits(&self) -> bool {
        self.handshake.only_waits()
    }

    /// The end of the waits of [`Outgoing::advance`]; `None`: the handshake has ended. There is no wait
    /// before the first call of [`Outgoing::advance`].
    pub fn deadline(&self) -> Option<Instant> {
        self.tcp.as_ref().map(|_| self.handshake.deadline())
    }

    /// Continues as far as the server's bytes allow, without waiting; the first call sends the
    /// Proposal. `None`: more bytes have to come.
    ///
    /// # Errors
    /// The handshake broke the connection, which is reset.
    pub fn advance(&mut self) -> io::Result<Option<SmcStream>> {
        match self.step().transpose() {
            None => Ok(None),
            Some(result) => self.finish(result).map(Some),
        }
    }

    /// Like [`Outgoing::advance`], with spinning for the server's next bytes as long as worthwhile.
    ///
    /// # Errors
    /// As [`Outgoing::advance`].
    pub fn advance_soon(&mut self) -> io::Result<Option<SmcStream>> {
        let mut result = self.advance();
        if !matches!(result, Ok(None)) {
            return result;
        }
        let stack = self.stack.clone();
        stack.common().spin.until_asked(|| {
            result = self.advance();
            !matches!(result, Ok(None))
        });
        result
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
                let broken = self.handshake.give_up();
                return self.finish(Err(broken));
            }
            let ends = [self.deadline(), deadline];
            let left =
                ends.into_iter().flatten().min().map(|end| end.saturating_duration_since(now));
            let waited = match self.fds() {
                [Some(tcp), Some(llc)] => ism_sys::poll_readable(&[tcp, llc], left, None),
                [Some(tcp), None] => ism_sys::poll_readable(&[tcp], left, None),
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

    fn step(&mut self) -> Result<Option<Outcome>, Broken> {
        let Some(tcp) = &self.tcp else {
            return Err(Broken::Io(io::ErrorKind::NotConnected.into()));
        };
        let current = self.stack.current();
        // A sent Proposal has an answer, which would be data otherwise. Without a device an Accept is
        // declined.
        if let Some(why) = current.no_device()
            && !self.awaited
            && !self.handshake.has_proposed()
        {
            return Ok(Some(Outcome::Tcp(why)));
        }
        let params = ClientParams {
            config: &current.config,
            fabrics: &current.fabrics,
            rdma: current.rdma(),
            buffer: self.buffer,
        };
        let outcome = self.handshake.advance(tcp, &params)?;
        if outcome.is_none() && Instant::now() >= self.handshake.deadline() {
            return self.handshake.expire(tcp, &params);
        }
        Ok(outcome)
    }

    /// The stream of a handshake that failed without a CLC message of the server: most likely the
    /// server does not speak SMC, despite an answer to TCP option 254. The caller may connect the same
    /// socket again; without this call it is reset. Only the first call returns the stream.
    pub fn take_unanswered(&mut self) -> Option<TcpStream> {
        self.unanswered.take()
    }

    /// Makes a connection of the result of the handshake.
    fn finish(&mut self, result: Result<Outcome, Broken>) -> io::Result<SmcStream> {
        let tcp = self.tcp.take().ok_or(io::ErrorKind::NotConnected)?;
        let result = match result {
            Err(broken) if !self.handshake.is_answered() => {
                self.stack.count_broken();
                self.unanswered = Some(tcp);
                return Err(broken.into());
            }
            result => result,
        };
        SmcStream::of_handshake(&self.stack, tcp, result, Role::Client)
    }
}

impl Drop for Outgoing {
    fn drop(&mut self) {
        if let Some(tcp) = self.unanswered.take() {
            ism_sys::reset_tcp(tcp);
        }
    }
}

impl std::fmt::Debug for Outgoing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Outgoing").field("tcp", &self.tcp).finish_non_exhaustive()
    }
}
