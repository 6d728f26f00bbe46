// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The first bytes of a client: SMC or not.

use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use guest_driver::interpose::FirstBytes;
use rustix::event::{PollFd, PollFlags, Timespec};

use crate::config;
use crate::socket::stream::StreamSocket;
use crate::socket::table::DescriptorRef;

/// After so long a silence a server takes the client for one without SMC, even if the server's
/// program only reads.
const SILENCE_TIMEOUT: Duration = Duration::from_secs(5);

/// Peeks at a client's first bytes. A client without SMC costs no more: the library opens no device
/// for such a client. If the socket has an error, the program's next call gets the error from TCP.
pub(crate) fn peek(tcp: impl AsFd) -> FirstBytes {
    peek_if_any(tcp).unwrap_or(FirstBytes::Incomplete)
}

/// Like [`peek`]. `None`: the client has sent nothing.
pub(super) fn peek_if_any(tcp: impl AsFd) -> Option<FirstBytes> {
    first_bytes_and_reset(tcp).0
}

/// The first bytes, and whether the client has reset TCP.
fn first_bytes_and_reset(tcp: impl AsFd) -> (Option<FirstBytes>, bool) {
    let found = poll(&tcp, PollFlags::IN);
    let is_reset = found.is_some_and(|found| found.contains(PollFlags::ERR));
    let first = match found {
        Some(found) if found.is_empty() => None,
        // With nothing to read, a peek would take the error from the program.
        Some(found)
            if found.intersects(PollFlags::ERR | PollFlags::NVAL)
                && rustix::io::ioctl_fionread(&tcp).unwrap_or(0) == 0 =>
        {
            Some(FirstBytes::Other)
        }
        _ => Some(FirstBytes::peek(tcp).unwrap_or(FirstBytes::Other)),
    };
    (first, is_reset)
}

/// Like [`peek`], for a handshake about to begin with a Proposal. The program then gets the error
/// of the handshake only if TCP had an error before.
pub(super) fn peek_to_begin(socket: Option<&StreamSocket>, tcp: impl AsFd) -> FirstBytes {
    let (found, is_reset) = first_bytes_and_reset(tcp);
    let found = found.unwrap_or(FirstBytes::Incomplete);
    if is_reset
        && found.is_smc()
        && let Some(socket) = socket
    {
        socket.end.set_error(libc::ECONNRESET);
    }
    found
}

/// Polls the socket. `None`: poll(2) fails, as with RLIMIT_NOFILE 0.
fn poll(tcp: impl AsFd, events: PollFlags) -> Option<PollFlags> {
    let mut fds = [PollFd::new(&tcp, events)];
    let zero = Timespec { tv_sec: 0, tv_nsec: 0 };
    rustix::event::poll(&mut fds, Some(&zero)).ok()?;
    Some(fds[0].revents())
}

/// How long a server waits for a client's first bytes. If the program wants to write first, the
/// wait ends after the socket's detection timeout. Otherwise the wait ends after `limit` or the
/// detection timeout, whichever is longer. A Proposal coming after the wait would reach the program
/// as data, so the wait is long where possible.
#[derive(Clone, Copy, Debug)]
pub(super) struct FirstBytesWait {
    begun: Instant,
    limit: Duration,
}

impl FirstBytesWait {
    /// Begins. `limit`: the time limit of the program's call, if any.
    pub(super) fn new(limit: Option<Duration>) -> FirstBytesWait {
        FirstBytesWait { begun: Instant::now(), limit: limit.unwrap_or(SILENCE_TIMEOUT) }
    }

    /// Notes a part of a message. A client without an announcement has most likely sent data
    /// beginning like a Proposal. So its server does not wait long for more.
    pub(super) fn note_part(&mut self, socket: &StreamSocket) {
        if !socket.side.is_announced() {
            let most = config::get().map(|config| config.detect).unwrap_or_default();
            self.limit = self.limit.min(self.begun.elapsed() + most);
        }
    }

    /// Whether the wait has lasted for some time.
    pub(super) fn has_lasted(&self, time: Duration) -> bool {
        self.begun.elapsed() >= time
    }

    /// How long the wait goes on.
    pub(super) fn left(&self, socket: &StreamSocket) -> Duration {
        let detect = socket.side.detect_timeout();
        let most = if socket.undecided.wants_to_write() { detect } else { self.limit.max(detect) };
        most.saturating_sub(self.begun.elapsed())
    }

    /// Whether the wait is over: the time has passed, or the program has closed the connection and
    /// no caller waits for the end of the handshake.
    pub(super) fn is_over(&self, descriptor: &DescriptorRef) -> bool {
        descriptor.stream().is_none_or(|socket| {
            self.left(socket).is_zero() || descriptor.handles() == 0 && !socket.must_finish()
        })
    }
}
