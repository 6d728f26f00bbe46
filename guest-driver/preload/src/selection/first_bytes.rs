//! The first bytes of a client, which show whether it speaks SMC.

use std::net::TcpStream;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use guest_driver::FirstBytes;

use crate::socket::stream::StreamSocket;
use crate::socket::table::DescriptorRef;
use crate::sys::wait_readable;

/// A server takes a client that sends nothing for this long for one without SMC, even if the
/// server's program only reads.
pub(crate) const SILENCE_TIMEOUT: Duration = Duration::from_secs(5);
/// How often the wait checks whether the program wants to write first, or has closed the
/// connection.
const CHECK_INTERVAL: Duration = Duration::from_millis(50);

/// Peeks at a client's first bytes. A client without SMC costs no more than that: the library opens
/// no device for it. If the socket has an error, the program's next call gets it from TCP.
pub(crate) fn peek(tcp: impl AsFd) -> FirstBytes {
    FirstBytes::peek(tcp).unwrap_or(FirstBytes::Other)
}

/// Waits for a client's first bytes. If the program wants to write first, the wait ends after the
/// socket's detection timeout. Otherwise it ends after `limit`, or the detection timeout if that is
/// longer. A Proposal that comes after the wait would reach the program as data, so the wait is
/// long where it can be.
pub(crate) fn await_first_bytes(
    descriptor: &DescriptorRef,
    socket: &StreamSocket,
    tcp: &TcpStream,
    limit: Duration,
) -> FirstBytes {
    let begun = Instant::now();
    let limit = limit.max(socket.detect_timeout());
    loop {
        let found = peek(tcp);
        let left = if socket.wants_to_write() { socket.detect_timeout() } else { limit };
        let left = left.saturating_sub(begun.elapsed());
        // The program has closed the connection, and nobody waits for the end of the handshake.
        let closed = descriptor.handles() == 0 && !socket.must_finish();
        if found != FirstBytes::Incomplete || left.is_zero() || closed {
            return found;
        }
        wait_readable(&[Some(tcp.as_fd())], left.min(CHECK_INTERVAL));
    }
}
