// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Connections and listening sockets.

use std::ffi::c_int;
use std::net::{Shutdown, SocketAddr, TcpStream, ToSocketAddrs};
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use guest_driver::{SmcListener, SmcStream};

use crate::error::Error;
use crate::fork::Generation;
use crate::stack::Stack;

/// `smc_socket`.
#[derive(Debug)]
pub(crate) struct Socket {
    kind: Kind,
    /// Of a connection. A listener knows by itself.
    nonblocking: AtomicBool,
    pub(crate) generation: Generation,
}

#[derive(Debug)]
enum Kind {
    Stream(SmcStream),
    Listener(SmcListener),
}

/// The addresses of a name.
fn resolve(host: &str, port: u16) -> Result<Vec<SocketAddr>, Error> {
    let found = (host, port).to_socket_addrs();
    let found: Vec<_> =
        found.map_err(|error| Error::new(libc::ENOENT, format!("{host:?}: {error}")))?.collect();
    match found.is_empty() {
        true => Err(Error::new(libc::ENOENT, format!("{host:?} has no address"))),
        false => Ok(found),
    }
}

/// Tries the addresses one after the other, each within the remaining time.
fn connect_to_any(
    addresses: &[SocketAddr],
    timeout: Duration,
    mut connect: impl FnMut(&SocketAddr, Duration) -> std::io::Result<SmcStream>,
) -> std::io::Result<SmcStream> {
    let deadline = Instant::now() + timeout;
    let mut result = Err(std::io::ErrorKind::TimedOut.into());
    for address in addresses {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            break;
        }
        result = connect(address, left);
        if result.is_ok() {
            break;
        }
    }
    result
}

impl Socket {
    fn of_stream(stream: SmcStream, generation: Generation) -> Result<Socket, Error> {
        // This library does the waiting itself, for MSG_DONTWAIT in a single call. On TCP the kernel has the
        // flag.
        if stream.is_smc() {
            stream.set_nonblocking(true)?;
        }
        Ok(Socket { kind: Kind::Stream(stream), nonblocking: AtomicBool::new(false), generation })
    }

    /// Connects, by TCP only or by SMC if possible.
    ///
    /// # Errors
    /// As `smc_connect`.
    pub(crate) fn connect(
        stack: &Stack,
        (host, port): (&str, u16),
        timeout_ms: c_int,
        tcp_only: bool,
    ) -> Result<Socket, Error> {
        if port == 0 {
            return Err(Error::new(libc::EINVAL, "the port is 0"));
        }
        let timeout = match (u64::try_from(timeout_ms), timeout_ms) {
            (Ok(millis), _) => Some(Duration::from_millis(millis)),
            (Err(_), -1) => None,
            _ => return Err(Error::new(libc::EINVAL, format!("a time-out of {timeout_ms} ms"))),
        };
        let addresses = resolve(host, port)?;
        let stack_of = &stack.stack;
        let stream = match (timeout, tcp_only) {
            (None, false) => SmcStream::connect(stack_of, &addresses[..]),
            (None, true) => SmcStream::connect_tcp(stack_of, &addresses[..]),
            (Some(timeout), false) => connect_to_any(&addresses, timeout, |address, left| {
                SmcStream::connect_timeout(stack_of, address, left)
            }),
            (Some(timeout), true) => connect_to_any(&addresses, timeout, |address, left| {
                SmcStream::from_tcp(stack_of, TcpStream::connect_timeout(address, left)?)
            }),
        };
        Socket::of_stream(stream?, stack.generation)
    }

    /// Listens.
    ///
    /// # Errors
    /// As `smc_listen`.
    pub(crate) fn listen(stack: &Stack, (host, port): (&str, u16)) -> Result<Socket, Error> {
        let addresses = resolve(host, port)?;
        let listener = SmcListener::bind(&stack.stack, &addresses[..])?;
        let (kind, generation) = (Kind::Listener(listener), stack.generation);
        Ok(Socket { kind, nonblocking: AtomicBool::new(false), generation })
    }

    /// Accepts the next connection.
    ///
    /// # Errors
    /// As `smc_accept`.
    pub(crate) fn accept(&self) -> Result<Socket, Error> {
        match &self.kind {
            Kind::Listener(listener) => Socket::of_stream(listener.accept()?.0, self.generation),
            Kind::Stream(_) => Err(Error::new(libc::EINVAL, "the socket does not listen")),
        }
    }

    /// The connection.
    ///
    /// # Errors
    /// ENOTCONN: the socket listens.
    pub(crate) fn stream(&self) -> Result<&SmcStream, Error> {
        match &self.kind {
            Kind::Stream(stream) => Ok(stream),
            Kind::Listener(_) => Err(Error::new(libc::ENOTCONN, "the socket listens")),
        }
    }

    /// Ends one direction, or both, of a connection; or listening.
    ///
    /// # Errors
    /// As `smc_shutdown`.
    pub(crate) fn shutdown(&self, how: c_int) -> Result<(), Error> {
        let how = match how {
            libc::SHUT_RD => Shutdown::Read,
            libc::SHUT_WR => Shutdown::Write,
            libc::SHUT_RDWR => Shutdown::Both,
            other => return Err(Error::new(libc::EINVAL, format!("a shutdown of {other}"))),
        };
        match &self.kind {
            Kind::Stream(stream) => Ok(stream.shutdown(how)?),
            Kind::Listener(listener) => Ok(listener.shutdown(how)?),
        }
    }

    /// Whether calls return EAGAIN instead of waiting.
    pub(crate) fn is_nonblocking(&self) -> bool {
        self.nonblocking.load(Ordering::Relaxed)
    }

    /// Sets [`Socket::is_nonblocking`].
    ///
    /// # Errors
    /// None today.
    pub(crate) fn set_nonblocking(&self, nonblocking: bool) -> Result<(), Error> {
        self.nonblocking.store(nonblocking, Ordering::Relaxed);
        match &self.kind {
            Kind::Listener(listener) => Ok(listener.set_nonblocking(nonblocking)?),
            Kind::Stream(_) => Ok(()),
        }
    }

    /// The descriptor for polling readiness.
    ///
    /// # Errors
    /// No descriptors are left.
    pub(crate) fn pollable(&self) -> Result<c_int, Error> {
        match &self.kind {
            Kind::Stream(stream) => Ok(stream.pollable()?.as_raw_fd()),
            Kind::Listener(listener) => Ok(listener.pollable().as_raw_fd()),
        }
    }

    /// The address of this end.
    ///
    /// # Errors
    /// As getsockname(2).
    pub(crate) fn local_addr(&self) -> Result<SocketAddr, Error> {
        match &self.kind {
            Kind::Stream(stream) => Ok(stream.local_addr()?),
            Kind::Listener(listener) => Ok(listener.local_addr()?),
        }
    }
}
