// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Common operations on a TCP socket.

use std::io;
use std::net::TcpStream;
use std::os::fd::AsRawFd;
use std::time::Duration;

use rustix::net::{connect_unspec, getpeername, sockopt};

/// Breaks a TCP connection by RST, at once.
///
/// The program may have descriptors of the same socket, and goes on using it. So no option is set:
/// connect(2) to no address resets the connection and leaves the options as they are. A socket whose
/// connection the peer has reset stays as it is: calls on it return what they return on TCP.
pub fn reset_tcp(tcp: TcpStream) {
    if getpeername(&tcp).is_err() {
        return;
    }
    let Err(error) = connect_unspec(&tcp) else { return };
    // A filter of the process's system calls may forbid the call. A close with a linger time of zero sends
    // RST as well.
    tracing::debug!(%error, "connect to no address");
    if let Err(error) = sockopt::set_socket_linger(&tcp, Some(Duration::ZERO)) {
        tracing::debug!(%error, "SO_LINGER");
    }
}

/// Written bytes not acknowledged by the peer's kernel (SIOCOUTQ).
///
/// # Errors
/// The socket is none of TCP, or listens.
pub fn unacknowledged(tcp: &TcpStream) -> io::Result<usize> {
    // SIOCOUTQ is TIOCOUTQ.
    ask_for_bytes(tcp, libc::TIOCOUTQ)
}

/// Written bytes not sent by the kernel (SIOCOUTQNSD).
///
/// # Errors
/// The socket is none of TCP, or listens.
pub fn unsent(tcp: &TcpStream) -> io::Result<usize> {
    const SIOCOUTQNSD: libc::Ioctl = 0x894b;
    ask_for_bytes(tcp, SIOCOUTQNSD)
}

/// `request` is SIOCOUTQ or SIOCOUTQNSD.
fn ask_for_bytes(tcp: &TcpStream, request: libc::Ioctl) -> io::Result<usize> {
    let mut bytes: libc::c_int = 0;
    // SAFETY: both requests write one int to the address, which is that of a live variable.
    let result = unsafe { libc::ioctl(tcp.as_raw_fd(), request, &raw mut bytes) };
    match usize::try_from(bytes) {
        Ok(bytes) if result == 0 => Ok(bytes),
        _ => Err(io::Error::last_os_error()),
    }
}
