// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The first bytes of a client, and the check for a Proposal of SMC.

use std::io;
use std::os::fd::AsFd;

use smc_core::wire::clc::{Guess, Kind, looks_like_clc};

use super::tcp::peek;

/// The bytes checked by a server: a CLC header. Half of it is the deciding eye catcher (CLC-54,
/// CLC-55); the rest has the length of the message.
const OPENING_LEN: usize = 8;
/// Offset of the message's type in the header.
const TYPE_AT: usize = 4;

/// The beginning of a client's stream on a new connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FirstBytes {
    /// Nothing, or too few bytes to decide.
    Incomplete,
    /// The beginning of a CLC message.
    Smc(ClcPrefix),
    /// Something else, or the client has closed the connection.
    Other,
}

/// The beginning of a CLC message, as peeked by a server from the TCP stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClcPrefix {
    bytes: [u8; OPENING_LEN],
    len: usize,
}

impl ClcPrefix {
    pub(super) fn bytes(&self) -> &[u8] {
        self.bytes.get(..self.len).unwrap_or_default()
    }
}

impl FirstBytes {
    /// Peeks at the first bytes. Does not wait, and leaves the bytes in the stream.
    ///
    /// # Errors
    /// The connection is broken, or `tcp` is no stream socket.
    pub fn peek(tcp: impl AsFd) -> io::Result<FirstBytes> {
        Ok(Self::peek_if_any(tcp)?.unwrap_or(FirstBytes::Incomplete))
    }

    /// Like [`FirstBytes::peek`]. `None`: the client has sent nothing.
    ///
    /// # Errors
    /// As [`FirstBytes::peek`].
    pub fn peek_if_any(tcp: impl AsFd) -> io::Result<Option<FirstBytes>> {
        let mut bytes = [0; OPENING_LEN];
        let len = match peek(tcp, &mut bytes)? {
            None => return Ok(None),
            // The client closed without sending anything: an ordinary connection.
            Some(0) => return Ok(Some(FirstBytes::Other)),
            Some(len) => len,
        };
        let opening = ClcPrefix { bytes, len };
        Ok(Some(match looks_like_clc(opening.bytes()) {
            Guess::Yes => FirstBytes::Smc(opening),
            Guess::NeedMore => FirstBytes::Incomplete,
            Guess::No => FirstBytes::Other,
        }))
    }

    /// Whether the bytes begin a CLC message.
    pub fn is_smc(&self) -> bool {
        matches!(self, FirstBytes::Smc(_))
    }

    /// Whether the bytes begin a Proposal. On a socket possibly of a client, other messages are its
    /// server's.
    pub fn is_proposal(&self) -> bool {
        let code = Kind::Proposal.code();
        matches!(self, FirstBytes::Smc(prefix) if prefix.bytes().get(TYPE_AT) == Some(&code))
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::net::{TcpListener, TcpStream};

    use super::*;

    fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (client, listener.accept().unwrap().0)
    }

    #[test]
    fn the_beginning_of_a_proposal_is_smc_and_stays_in_the_stream() {
        let (mut client, server) = pair();
        assert_eq!(FirstBytes::peek(&server).unwrap(), FirstBytes::Incomplete);
        // "SMCR" in EBCDIC, a Proposal's type, a length, and version 2.
        client.write_all(&[0xe2, 0xd4, 0xc3, 0xd9, 1, 0, 100, 0x20]).unwrap();
        for _ in 0..2 {
            assert!(FirstBytes::peek(&server).unwrap().is_proposal());
        }
    }

    #[test]
    fn only_a_proposal_is_a_proposal() {
        for (bytes, proposal) in [
            (&[0xe2, 0xd4, 0xc3, 0xd9, 1][..], true),
            (&[0xe2, 0xd4, 0xc3, 0xd9, 2, 0, 100, 0x20], false),
            (&[0xe2, 0xd4, 0xc3, 0xd9], false),
        ] {
            let (mut client, server) = pair();
            client.write_all(bytes).unwrap();
            let first = FirstBytes::peek(&server).unwrap();
            assert_eq!((first.is_smc(), first.is_proposal()), (true, proposal), "{bytes:x?}");
        }
    }

    #[test]
    fn other_bytes_and_an_end_without_bytes_are_not() {
        let (mut client, server) = pair();
        client.write_all(b"GET / HTTP/1.1").unwrap();
        assert_eq!(FirstBytes::peek(&server).unwrap(), FirstBytes::Other);
        let (client, server) = pair();
        drop(client);
        let end = std::time::Instant::now() + std::time::Duration::from_secs(5);
        while FirstBytes::peek(&server).unwrap() == FirstBytes::Incomplete {
            assert!(std::time::Instant::now() < end);
        }
        assert_eq!(FirstBytes::peek(&server).unwrap(), FirstBytes::Other);
    }
}
