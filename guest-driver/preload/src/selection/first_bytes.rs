//! The first bytes of a client: SMC or not.

use std::net::TcpStream;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use smc_core::wire::clc::{Guess, looks_like_opening};

use crate::socket::stream::Socket;
use crate::socket::table::DescriptorRef;
use crate::sys::wait_readable;

/// A client that says nothing for so long has nothing to do with SMC, even if its server only listens.
pub(crate) const SILENCE_TIMEOUT: Duration = Duration::from_secs(5);
/// How often it is looked whether the program is to speak first, or has closed the connection.
const CHECK_INTERVAL: Duration = Duration::from_millis(50);

/// What a client said first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FirstBytes {
    /// Nothing, or not enough to know.
    Incomplete,
    /// A message of SMC.
    Smc,
    /// Something else.
    Other,
}

/// Looks at a client's first bytes without taking them. An ordinary client costs no more than that:
/// no device is opened for it.
pub(crate) fn peek(tcp: impl AsFd) -> FirstBytes {
    use rustix::net::RecvFlags;
    let mut bytes = [0u8; 8];
    match rustix::net::recv(tcp, &mut bytes[..], RecvFlags::PEEK | RecvFlags::DONTWAIT) {
        Err(rustix::io::Errno::WOULDBLOCK | rustix::io::Errno::INTR) => FirstBytes::Incomplete,
        Err(_) | Ok((0, _)) => FirstBytes::Other,
        Ok((n, _)) => match looks_like_opening(bytes.get(..n).unwrap_or_default()) {
            Guess::Yes => FirstBytes::Smc,
            Guess::NeedMore => FirstBytes::Incomplete,
            Guess::No => FirstBytes::Other,
        },
    }
}

/// Waits for a client's first bytes. One that stays silent is taken for one without SMC: after a short
/// while if the program is to speak first, else not before `limit`. For a Proposal that comes later would
/// be data of the program.
pub(crate) fn await_first_bytes(
    descriptor: &DescriptorRef,
    socket: &Socket,
    tcp: &TcpStream,
    limit: Duration,
) -> FirstBytes {
    let begun = Instant::now();
    let limit = limit.max(socket.detect_timeout());
    loop {
        let found = peek(tcp);
        let left = if socket.wants_to_write() { socket.detect_timeout() } else { limit };
        let left = left.saturating_sub(begun.elapsed());
        if found != FirstBytes::Incomplete || left.is_zero() || descriptor.handles() == 0 {
            return found;
        }
        wait_readable(&[Some(tcp.as_fd())], left.min(CHECK_INTERVAL));
    }
}
