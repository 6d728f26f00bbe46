//! The server's half of a handshake on one accepted TCP stream, for programs that accept themselves.

use std::io;
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::Instant;

use super::Stack;
use super::stack::Current;
use super::stream::{SmcStream, break_off};
use crate::handshake::{Outcome, server};

/// A handshake with a client that was just accepted. [`SmcListener`](super::SmcListener) does all
/// this by itself; here the caller has the listening socket and decides who waits.
pub struct Incoming {
    stack: Arc<Stack>,
    tcp: Option<TcpStream>,
    handshake: Option<server::Handshake>,
}

impl Incoming {
    /// Begins to wait for the client's first bytes; nothing is read or written yet.
    pub fn new(stack: &Arc<Stack>, tcp: TcpStream) -> Incoming {
        stack.sweep();
        let current = stack.current();
        let handshake = Some(server::Handshake::new(&terms(stack, &current)));
        Incoming { stack: stack.clone(), tcp: Some(tcp), handshake }
    }

    /// The descriptors that become readable when [`Incoming::advance`] can go on: the TCP stream, and
    /// what LLC has beside it.
    pub fn fds(&self) -> [Option<BorrowedFd<'_>>; 2] {
        let other = self.handshake.as_ref().and_then(server::Handshake::fd);
        [self.tcp.as_ref().map(AsFd::as_fd), other]
    }

    /// When [`Incoming::advance`] gives up waiting: the client is an ordinary one, or broken.
    pub fn deadline(&self) -> Option<Instant> {
        self.handshake.as_ref().map(server::Handshake::deadline)
    }

    /// Looks for the client's next bytes for as long as spinning is worth it.
    ///
    /// # Errors
    /// As [`Incoming::advance`].
    pub fn advance_soon(&mut self) -> io::Result<Option<SmcStream>> {
        let stack = self.stack.clone();
        let mut result = self.advance();
        if !matches!(result, Ok(None)) {
            return result;
        }
        stack.spin().until_asked(|| {
            result = self.advance();
            !matches!(result, Ok(None))
        });
        result
    }

    /// Goes on as far as the client's bytes allow, without waiting. `None`: more has to come.
    ///
    /// # Errors
    /// The handshake broke the connection, which is reset.
    pub fn advance(&mut self) -> io::Result<Option<SmcStream>> {
        let gone = || io::Error::from(io::ErrorKind::NotConnected);
        let tcp = self.tcp.as_ref().ok_or_else(gone)?;
        let mut handshake = self.handshake.take().ok_or_else(gone)?;
        let current = self.stack.current();
        let terms = terms(&self.stack, &current);
        let mut result = handshake.advance(tcp, &terms, true);
        if matches!(result, Ok(None)) && Instant::now() >= handshake.deadline() {
            result = handshake.expire(tcp, &terms);
        }
        let outcome = match result {
            Ok(None) => {
                self.handshake = Some(handshake);
                return Ok(None);
            }
            Ok(Some(outcome)) => Ok(outcome),
            Err(broken) => Err(broken),
        };
        let tcp = self.tcp.take().ok_or_else(gone)?;
        match outcome {
            Ok(Outcome::Smc(link)) => SmcStream::of_established(&self.stack, tcp, link).map(Some),
            Ok(Outcome::Tcp(why)) => SmcStream::of_tcp(&self.stack, tcp, why).map(Some),
            Err(broken) => {
                self.stack.count_broken();
                break_off(tcp, &broken);
                Err(broken.into())
            }
        }
    }
}

impl std::fmt::Debug for Incoming {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Incoming").field("tcp", &self.tcp).finish_non_exhaustive()
    }
}

fn terms<'a>(stack: &'a Stack, current: &'a Current) -> server::Terms<'a> {
    server::Terms {
        config: &current.config,
        fabrics: &current.fabrics,
        rdma: current.rdma(),
        buffer: stack.buffer_len(),
        detect: stack.config().detect_timeout,
        patience: stack.config().clc_timeout,
    }
}
