//! The first bytes of a client: SMC or not.

use std::net::TcpStream;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use smc_core::wire::clc::{Guess, looks_like_opening};

use crate::socket::stream::Socket;
use crate::socket::table::DescriptorRef;
use crate::sys::wait_readable;

/// A client that says nothing for so long has nothing to do with SMC, even if its server only listens.
pub(crate) const SILENCE: Duration = Duration::from_secs(5);
/// How often it is looked whether the program is to speak first, or has closed the connection.
const GLANCE: Duration = Duration::from_millis(50);

/// What a client said first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Opening {
    /// Nothing, or not enough to know.
    Silence,
    /// A message of SMC.
    Smc,
    /// Something else.
    Other,
}

/// Looks at a client's first bytes without taking them. An ordinary client costs no more than that:
/// no device is opened for it.
pub(crate) fn opening(tcp: impl AsFd) -> Opening {
    use rustix::net::RecvFlags;
    let mut bytes = [0u8; 8];
    match rustix::net::recv(tcp, &mut bytes[..], RecvFlags::PEEK | RecvFlags::DONTWAIT) {
        Err(rustix::io::Errno::WOULDBLOCK | rustix::io::Errno::INTR) => Opening::Silence,
        Err(_) | Ok((0, _)) => Opening::Other,
        Ok((n, _)) => match looks_like_opening(bytes.get(..n).unwrap_or_default()) {
            Guess::Yes => Opening::Smc,
            Guess::NeedMore => Opening::Silence,
            Guess::No => Opening::Other,
        },
    }
}

/// Waits for a client's first bytes. One that stays silent is taken for one without SMC: after a short
/// while if the program is to speak first, else not before `limit`. For a Proposal that comes later would
/// be data of the program.
pub(crate) fn await_opening(
    descriptor: &DescriptorRef,
    socket: &Socket,
    tcp: &TcpStream,
    limit: Duration,
) -> Opening {
    let begun = Instant::now();
    let limit = limit.max(socket.patience());
    loop {
        let found = opening(tcp);
        let left = if socket.speaks() { socket.patience() } else { limit };
        let left = left.saturating_sub(begun.elapsed());
        if found != Opening::Silence || left.is_zero() || descriptor.handles() == 0 {
            return found;
        }
        wait_readable(&[Some(tcp.as_fd())], left.min(GLANCE));
    }
}
