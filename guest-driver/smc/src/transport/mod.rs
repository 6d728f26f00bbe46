// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Transports behind common traits: each measurement is written once and runs over every transport.

mod ring;
mod smc;
mod sockets;
mod vsock;

use std::io::{self, Read, Write};
use std::os::fd::BorrowedFd;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::io::{AsyncRead, AsyncWrite};

pub(crate) use ring::Ring;
pub(crate) use smc::{Path, Smc};
pub(crate) use sockets::{Epoll, LOOPBACK, Tcp, Unix};
pub(crate) use vsock::{ANY_CID, Vsock};

/// A means for servers to listen and for clients to connect.
pub(crate) trait Transport: Sync {
    /// A listening socket.
    type Listener;
    /// A connection.
    type Stream: Stream;
    /// Readiness of many connections.
    type Poll: Poll<Self::Stream>;

    /// Listens on an address of its choice, and returns the address for clients.
    fn listen(&self) -> io::Result<(Self::Listener, String)>;
    /// Takes the next connection.
    fn accept(&self, listener: &Self::Listener) -> io::Result<Self::Stream>;
    /// Connects to where a server listens.
    fn connect(&self, address: &str) -> io::Result<Self::Stream>;
    /// A readiness set, as used by a program on this transport.
    fn poll(&self) -> io::Result<Self::Poll>;

    /// How the first SMC connection travels; `None` if none was SMC.
    fn smc_path(&self) -> Option<SmcPath> {
        None
    }

    /// Counters of the connections' device; `None` without a counting device.
    fn counters(&self) -> Option<Counters> {
        None
    }
}

/// How an SMC connection travels.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SmcPath {
    /// Own stores into the peer's DMB; otherwise the device copies.
    pub(crate) window: bool,
    /// The fabric.
    pub(crate) chid: String,
    /// The own GID.
    pub(crate) gid: String,
    /// The peer's GID.
    pub(crate) peer: String,
}

/// Counts of a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Counters {
    /// Moves, with or without bytes: each is a kick of the device, in a guest an exit.
    pub(crate) moves: u64,
    /// Wake records from the device, in a guest interrupts.
    pub(crate) wakes: u64,
    /// Control commands, such as those for the DMBs of a connection.
    pub(crate) commands: u64,
}

/// A connection.
pub(crate) trait Stream: Read + Write + Send {
    /// Whether calls return `WouldBlock` instead of waiting.
    fn set_nonblocking(&self, nonblocking: bool) -> io::Result<()>;
    /// Sends small messages at once (TCP_NODELAY); no effect on other transports.
    fn send_at_once(&self) -> io::Result<()>;
    /// Closes the sending direction.
    fn finish(&self) -> io::Result<()>;
    /// The descriptor for a program's own epoll set.
    fn readiness_fd(&self) -> io::Result<BorrowedFd<'_>>;
    /// The same connection for tasks of the current runtime.
    fn into_tokio(self) -> io::Result<Box<dyn AsyncStream>>;
}

/// A connection of tokio.
pub(crate) trait AsyncStream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> AsyncStream for T {}

/// The conditions to wait for on a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Interest {
    /// A read without blocking.
    Read,
    /// A write without blocking.
    Write,
    /// Either.
    Both,
}

/// Level-triggered readiness of many connections.
pub(crate) trait Poll<S> {
    /// Watches a connection.
    fn add(&mut self, stream: &S, key: u64, interest: Interest) -> io::Result<()>;
    /// Changes the conditions.
    fn modify(&mut self, stream: &S, key: u64, interest: Interest) -> io::Result<()>;
    /// Stops watching.
    fn remove(&mut self, stream: &S, key: u64) -> io::Result<()>;
    /// Waits and puts the ready (or failed) keys into `ready`. Existing keys in `ready` are removed
    /// first.
    fn wait(&mut self, ready: &mut Vec<u64>, timeout: Duration) -> io::Result<()>;
}

/// For transports unable to wait for many.
pub(crate) enum NoPoll {}

impl<S> Poll<S> for NoPoll {
    fn add(&mut self, _: &S, _: u64, _: Interest) -> io::Result<()> {
        match *self {}
    }

    fn modify(&mut self, _: &S, _: u64, _: Interest) -> io::Result<()> {
        match *self {}
    }

    fn remove(&mut self, _: &S, _: u64) -> io::Result<()> {
        match *self {}
    }

    fn wait(&mut self, _: &mut Vec<u64>, _: Duration) -> io::Result<()> {
        match *self {}
    }
}

#[cfg(test)]
mod tests;
