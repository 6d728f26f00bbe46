// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The handshake's use of TCP.

use std::io;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::net::{self, AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, sockopt};
use smc_core::handshake::ClcReader;

use ism_sys::timespec;
use smc_rendezvous::{OptionRequest, PeerDiscovery};

/// Reads the available bytes of the message awaited by `reader`. `false`: more bytes have to come.
///
/// The bytes behind the message stay in the stream (CLC-57).
pub(super) fn fill(tcp: &TcpStream, reader: &mut ClcReader) -> Result<bool, super::Broken> {
    while reader.message().is_none() {
        match net::recv(tcp, reader.space(), RecvFlags::DONTWAIT) {
            Ok((n, _)) => reader.filled(n)?,
            Err(Errno::WOULDBLOCK) => return Ok(false),
            Err(Errno::INTR) => {}
            Err(error) => return Err(io::Error::from(error).into()),
        }
    }
    Ok(true)
}

/// Copies the first bytes of the stream without taking them; `None` if there are none yet.
pub(super) fn peek(tcp: impl AsFd, prefix: &mut [u8]) -> io::Result<Option<usize>> {
    loop {
        match net::recv(&tcp, &mut *prefix, RecvFlags::PEEK | RecvFlags::DONTWAIT) {
            Ok((n, _)) => return Ok(Some(n)),
            Err(Errno::WOULDBLOCK) => return Ok(None),
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// Whether the peer has ended its direction.
pub(super) fn has_ended(tcp: &TcpStream) -> bool {
    let mut fds = [PollFd::new(tcp, PollFlags::RDHUP)];
    let found = rustix::event::poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }));
    found.is_ok() && fds[0].revents().contains(PollFlags::RDHUP)
}

/// Sends a whole CLC message as the payload of TCP (CLC-1, OPT-14). A message is small and the send
/// buffer of a new connection is empty, so this seldom waits.
pub(super) fn send(tcp: &TcpStream, message: &[u8]) -> io::Result<()> {
    let mut rest = message;
    while !rest.is_empty() {
        match net::send(tcp, rest, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
            Ok(n) => rest = rest.get(n..).unwrap_or_default(),
            Err(Errno::WOULDBLOCK) => {
                wait(tcp, PollFlags::OUT, Duration::from_secs(1))?;
            }
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// Waits for an event of the stream, for `timeout` at most.
fn wait(tcp: &TcpStream, flags: PollFlags, timeout: Duration) -> io::Result<()> {
    match rustix::event::poll(&mut [PollFd::new(tcp, flags)], Some(&timespec(timeout))) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Connects. Acknowledgements are lazy from the start. With a `discovery` the socket sends TCP
/// option 254 if mode and policy allow.
///
/// # Errors
/// An error of connect(2); `TimedOut` when the deadline has passed.
pub(crate) fn connect(
    addr: &SocketAddr,
    discovery: Option<&PeerDiscovery>,
    deadline: Option<Instant>,
) -> io::Result<(TcpStream, Option<OptionRequest>)> {
    let family = if addr.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let socket = net::socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    acknowledge_lazily(&socket, true);
    let asked = discovery.map(|discovery| discovery.before_connect(&socket, addr));
    if deadline.is_some() {
        rustix::io::ioctl_fionbio(&socket, true)?;
    }
    match net::connect(&socket, addr) {
        Ok(()) => {}
        // The kernel continues to connect.
        Err(Errno::INTR | Errno::INPROGRESS) => {
            let left = || deadline.map(|end| end.saturating_duration_since(Instant::now()));
            loop {
                let mut fds = [PollFd::new(&socket, PollFlags::OUT)];
                let timeout = left().map(timespec);
                match rustix::event::poll(&mut fds, timeout.as_ref()) {
                    Ok(0) if left().is_some_and(|left| left.is_zero()) => {
                        return Err(io::ErrorKind::TimedOut.into());
                    }
                    Ok(0) | Err(Errno::INTR) => {}
                    Ok(_) => break,
                    Err(error) => return Err(error.into()),
                }
            }
            sockopt::socket_error(&socket)??;
        }
        Err(error) => return Err(error.into()),
    }
    if deadline.is_some() {
        rustix::io::ioctl_fionbio(&socket, false)?;
    }
    Ok((socket.into(), asked))
}

/// Sets whether the kernel delays acknowledgements. In a handshake each message answers the one before
/// and carries its acknowledgement, so a packet for the acknowledgement alone is useless. A connection
/// staying on TCP leaves the choice to the kernel.
pub(crate) fn acknowledge_lazily(socket: impl AsFd, lazily: bool) {
    if let Err(error) = sockopt::set_tcp_quickack(socket, !lazily) {
        tracing::debug!(%error, "TCP_QUICKACK");
    }
}
