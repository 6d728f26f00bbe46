//! What every room does to a TCP socket.

use std::net::TcpStream;
use std::time::Duration;

use rustix::net::sockopt;

/// Breaks a TCP connection by RST.
pub(crate) fn reset_tcp(tcp: TcpStream) {
    // Closing with a linger time of zero sends RST.
    if let Err(error) = sockopt::set_socket_linger(&tcp, Some(Duration::ZERO)) {
        tracing::debug!(%error, "SO_LINGER");
    }
    drop(tcp);
}
