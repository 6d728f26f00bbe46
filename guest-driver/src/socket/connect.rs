// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Connections of a client.

use std::io;
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::outgoing::Outgoing;
use super::{SmcStream, Stack};
use crate::handshake;
use smc_info::Fallback;
use smc_rendezvous::{ClientAction, OptionRequest, PeerDiscovery};

impl SmcStream {
    /// Connects to a server that speaks SMC; if SMC does not work out, the connection is TCP. Returns
    /// once this is decided (SOCK-19).
    ///
    /// Without [`Config::rendezvous`](super::Config::rendezvous) the server must expect SMC: an
    /// ordinary TCP server would take the handshake for data. Use [`SmcStream::connect_tcp`] for such
    /// servers.
    ///
    /// # Errors
    /// An error of [`TcpStream::connect`]; a handshake that broke the connection.
    pub fn connect(stack: &Arc<Stack>, addr: impl ToSocketAddrs) -> io::Result<SmcStream> {
        let mut failed = None;
        for addr in addr.to_socket_addrs()? {
            match handshake::connect(&addr, Self::peer_discovery(stack), None) {
                Ok(connected) => return Self::upgrade_connected(stack, connected, None),
                Err(error) => failed = Some(error),
            }
        }
        let none = || io::Error::new(io::ErrorKind::InvalidInput, "no address");
        Err(failed.unwrap_or_else(none))
    }

    /// The peer discovery, if this end has a device to offer.
    fn peer_discovery(stack: &Arc<Stack>) -> Option<&PeerDiscovery> {
        stack.current().no_device().is_none().then(|| stack.peer_discovery())
    }

    /// Proposes SMC, or continues as TCP, by the verdict of peer discovery.
    fn upgrade_connected(
        stack: &Arc<Stack>,
        (tcp, asked): (TcpStream, Option<OptionRequest>),
        deadline: Option<Instant>,
    ) -> io::Result<SmcStream> {
        // Without a device `upgrade` makes it TCP, with the reason.
        let Some(asked) = asked else { return Self::upgrade(stack, tcp, deadline) };
        match stack.peer_discovery().connected(&tcp, asked) {
            ClientAction::Propose { awaited } => Outgoing::new(stack, tcp, awaited).wait(deadline),
            ClientAction::UseTcp(reason) => {
                let why = Fallback::from_discovery(reason, stack.peer_discovery());
                Self::of_tcp(stack, tcp, why)
            }
        }
    }

    /// Like [`SmcStream::connect`] to one address, with a time limit for everything.
    ///
    /// # Errors
    /// As [`SmcStream::connect`], and `TimedOut`.
    pub fn connect_timeout(
        stack: &Arc<Stack>,
        addr: &SocketAddr,
        timeout: Duration,
    ) -> io::Result<SmcStream> {
        let deadline = Instant::now() + timeout;
        let connected = handshake::connect(addr, Self::peer_discovery(stack), Some(deadline))?;
        Self::upgrade_connected(stack, connected, Some(deadline))
    }

    /// Connects to an ordinary TCP server.
    ///
    /// # Errors
    /// An error of [`TcpStream::connect`].
    pub fn connect_tcp(stack: &Arc<Stack>, addr: impl ToSocketAddrs) -> io::Result<SmcStream> {
        Self::from_tcp(stack, TcpStream::connect(addr)?)
    }

    /// Makes a stream of an existing TCP connection, to stay TCP.
    ///
    /// # Errors
    /// None today.
    pub fn from_tcp(stack: &Arc<Stack>, tcp: TcpStream) -> io::Result<SmcStream> {
        Self::of_tcp(stack, tcp, Fallback::Asked)
    }

    /// Proposes SMC on a new TCP connection without any data yet.
    ///
    /// # Errors
    /// A handshake that broke the connection.
    pub fn upgrade(
        stack: &Arc<Stack>,
        tcp: TcpStream,
        deadline: Option<Instant>,
    ) -> io::Result<SmcStream> {
        Outgoing::new(stack, tcp, false).wait(deadline)
    }
}
