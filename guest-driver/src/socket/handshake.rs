// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A handshake on one TCP stream, in steps of the caller.

use std::io;
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::Instant;

use super::Stack;
use super::devices::Current;
use super::stack::buffer_of;
use super::stream::SmcStream;
use crate::handshake::{Broken, Outcome, Params};

/// The side of an end in a handshake: the client's ([`ClientSide`](super::outgoing::ClientSide)) or
/// the server's ([`ServerSide`](super::incoming::ServerSide)).
pub trait Side {
    /// The descriptor of LLC messages, if the handshake waits for some.
    fn fd(&self) -> Option<BorrowedFd<'_>>;

    /// The end of the waits for the peer.
    fn deadline(&self) -> Instant;

    /// Continues as far as the peer's bytes allow, or ends the handshake if its deadline has passed.
    /// `None`: more bytes have to come. `drain`: whether to read until the stream is empty.
    fn step(
        &mut self,
        stack: &Stack,
        tcp: &TcpStream,
        current: &Current,
        params: Params<'_>,
        drain: bool,
    ) -> Result<Option<Outcome>, Broken>;

    /// Makes a connection of the result of the handshake.
    fn finish(
        &mut self,
        stack: &Arc<Stack>,
        tcp: TcpStream,
        result: Result<Outcome, Broken>,
    ) -> io::Result<SmcStream>;
}

/// A handshake on a new TCP stream: [`Incoming`](super::incoming::Incoming) or
/// [`Outgoing`](super::outgoing::Outgoing).
///
/// A program with other things to wait for uses this type directly, and decides which thread waits.
pub struct Handshake<S> {
    pub(super) stack: Arc<Stack>,
    /// `None`: the handshake has ended.
    tcp: Option<TcpStream>,
    /// Bytes of the own DMB.
    buffer: u32,
    pub(super) side: S,
}

impl<S: Side> Handshake<S> {
    /// Begins. Reads and writes nothing yet.
    pub(super) fn begin(stack: &Arc<Stack>, tcp: TcpStream, side: S) -> Handshake<S> {
        let buffer = stack.buffer_len();
        Handshake { stack: stack.clone(), tcp: Some(tcp), buffer, side }
    }

    /// Bounds the receive buffer of the connection, as SO_RCVBUF does. The buffer has 16 KiB at least.
    pub fn limit_buffer(&mut self, bytes: usize) {
        self.buffer = self.buffer.min(buffer_of(bytes));
    }

    /// The descriptors, readable when [`Handshake::advance`] can continue: the TCP stream, and one for
    /// LLC messages if the handshake waits for some.
    pub fn fds(&self) -> [Option<BorrowedFd<'_>>; 2] {
        [self.tcp.as_ref().map(AsFd::as_fd), self.side.fd()]
    }

    /// The end of the waits of [`Handshake::advance`]; `None`: the handshake has ended. A client waits
    /// for nothing before its first step.
    pub fn deadline(&self) -> Option<Instant> {
        self.tcp.as_ref().map(|_| self.side.deadline())
    }

    /// Continues as far as the peer's bytes allow, without waiting; a client's first step sends the
    /// Proposal. `None`: more bytes have to come.
    ///
    /// # Errors
    /// The handshake broke the connection, which is reset.
    pub fn advance(&mut self) -> io::Result<Option<SmcStream>> {
        self.advance_draining(true)
    }

    /// Like [`Handshake::advance`]; see [`Side::step`] for `drain`.
    pub(super) fn advance_draining(&mut self, drain: bool) -> io::Result<Option<SmcStream>> {
        let current = self.stack.current();
        match self.step(&current, drain) {
            None => Ok(None),
            Some(result) => self.finish(result).map(Some),
        }
    }

    /// Like [`Handshake::advance`], with spinning for the peer's next bytes as long as worthwhile.
    ///
    /// # Errors
    /// As [`Handshake::advance`].
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

    /// Takes a [`Side::step`]. `None`: more bytes have to come; else the caller calls
    /// [`Handshake::finish`].
    pub(super) fn step(
        &mut self,
        current: &Current,
        drain: bool,
    ) -> Option<Result<Outcome, Broken>> {
        let Some(tcp) = &self.tcp else {
            return Some(Err(Broken::Io(io::ErrorKind::NotConnected.into())));
        };
        let params = Params {
            config: &current.config,
            fabrics: &current.fabrics,
            rdma: current.rdma(),
            buffer: self.buffer,
            message_timeout: self.stack.config().clc_timeout,
        };
        self.side.step(&self.stack, tcp, current, params, drain).transpose()
    }

    /// Makes a connection of the result of the handshake.
    ///
    /// # Errors
    /// The handshake broke the connection, which is reset.
    pub(super) fn finish(&mut self, result: Result<Outcome, Broken>) -> io::Result<SmcStream> {
        let tcp = self.tcp.take().ok_or(io::ErrorKind::NotConnected)?;
        self.side.finish(&self.stack, tcp, result)
    }
}

impl<S> std::fmt::Debug for Handshake<S> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Handshake").field("tcp", &self.tcp).finish_non_exhaustive()
    }
}
