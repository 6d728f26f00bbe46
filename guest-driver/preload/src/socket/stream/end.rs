// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The end of a connection as reported by the program's calls: each error once, as TCP does.

use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};

use guest_driver::{Readiness, SmcStream};

use crate::sys::raw::{Errno, SysResult};

/// The end of a connection, as far as known to the program.
#[derive(Debug, Default)]
pub(crate) struct ConnectionEnd {
    /// The error of a failed handshake, for one call of the program.
    error: AtomicI32,
    /// The program has ended its own direction.
    write_shut: AtomicBool,
    /// A write went to a closed peer.
    wrote_after_close: AtomicBool,
    /// A call has reported the EPIPE of such a write.
    epipe_reported: AtomicBool,
    /// A call has reported the reset of the connection.
    reset_reported: AtomicBool,
    /// The program has disconnected the socket.
    disconnected: AtomicBool,
}

impl ConnectionEnd {
    /// Takes the error of a failed handshake; 0: no error, or taken already.
    pub(crate) fn take_error(&self) -> c_int {
        self.error.swap(0, Ordering::Relaxed)
    }

    /// Stores the error of a failed handshake; 0: the peer has closed.
    pub(crate) fn set_error(&self, error: c_int) {
        self.wrote_after_close.store(error != 0, Ordering::Relaxed);
        self.error.store(error, Ordering::Relaxed);
    }

    /// Whether the program has ended its own direction.
    pub(crate) fn is_write_shut(&self) -> bool {
        self.write_shut.load(Ordering::Relaxed)
    }

    /// Stores the end of the program's own direction.
    pub(crate) fn set_write_shut(&self) {
        self.write_shut.store(true, Ordering::Relaxed);
    }

    /// Stores that the program has disconnected the socket.
    pub(crate) fn set_disconnected(&self) {
        self.disconnected.store(true, Ordering::Relaxed);
    }

    /// Whether a call has reported the reset of the connection.
    pub(crate) fn is_reset_reported(&self) -> bool {
        self.reset_reported.load(Ordering::Relaxed)
    }

    /// Whether a write to a closed peer has ended the connection.
    pub(crate) fn has_written_after_close(&self) -> bool {
        self.wrote_after_close.load(Ordering::Relaxed)
    }

    /// Whether the next write to a closed peer would be the first one, which TCP accepts.
    pub(crate) fn may_write_after_close(&self) -> bool {
        !self.is_write_shut() && !self.is_reset_reported() && !self.has_written_after_close()
    }

    /// Like [`ConnectionEnd::may_write_after_close`], for a writing call: only the first one may.
    pub(crate) fn begin_write_after_close(&self) -> bool {
        !self.is_write_shut()
            && !self.is_reset_reported()
            && !self.wrote_after_close.swap(true, Ordering::Relaxed)
    }

    /// Takes the error after a write to a closed peer; 0: no error.
    pub(crate) fn take_epipe(&self) -> c_int {
        let wrote = self.has_written_after_close();
        if wrote && !self.epipe_reported.swap(true, Ordering::Relaxed) { libc::EPIPE } else { 0 }
    }

    /// The error of a reset connection for SO_ERROR, once.
    pub(crate) fn take_reset(&self, stream: &SmcStream) -> c_int {
        let error = stream.take_error().ok().flatten().map(Errno::from);
        if !stream.readiness(false).failed || self.reset_reported.swap(true, Ordering::Relaxed) {
            return 0;
        }
        pending_error(stream, error.unwrap_or(Errno(libc::ECONNRESET))).0
    }

    /// The result of a failed read. If the peer has ended its direction before the reset, TCP's
    /// readers see an end of data.
    pub(crate) fn read_failed(&self, stream: &SmcStream, error: Errno) -> SysResult {
        if self.disconnected.load(Ordering::Relaxed) {
            // The socket was disconnected during the call.
            return Err(Errno(libc::EPIPE));
        }
        match pending_error(stream, error) {
            Errno(libc::EPIPE) => Ok(0),
            error => self.report_once(error),
        }
    }

    /// The error of a failed write. After a reported reset, writes fail as on a closed connection.
    pub(crate) fn write_failed(&self, stream: &SmcStream, error: Errno) -> Errno {
        let error = pending_error(stream, error);
        if error == Errno(libc::EPIPE) {
            self.reset_reported.store(true, Ordering::Relaxed);
            return error;
        }
        self.report_once(error).err().unwrap_or(Errno(libc::EPIPE))
    }

    /// The result of a call on a reset connection: only the first call reports the reset. Later
    /// reads find an end of data.
    fn report_once(&self, error: Errno) -> SysResult {
        if is_reset(error) && self.reset_reported.swap(true, Ordering::Relaxed) {
            return Ok(0);
        }
        Err(error)
    }

    /// The readiness of a connection for the program's poll.
    pub(super) fn shown(&self, mut readiness: Readiness) -> Readiness {
        // POLLHUP means the end of both directions. For TCP a closed peer has ended only its own
        // direction.
        let both = readiness.read_closed && self.is_write_shut();
        readiness.hang_up &= readiness.failed || both;
        if readiness.failed && self.is_reset_reported() {
            readiness.failed = false;
        }
        if self.has_written_after_close() {
            readiness.hang_up = true;
            readiness.failed |= !self.epipe_reported.load(Ordering::Relaxed);
        }
        readiness
    }
}

fn is_reset(error: Errno) -> bool {
    matches!(error, Errno(libc::ECONNRESET | libc::ECONNABORTED))
}

/// The error after a reset: EPIPE for a writer whose peer had ended its direction before.
fn pending_error(stream: &SmcStream, error: Errno) -> Errno {
    match is_reset(error) && stream.peer_has_ended() == Some(true) {
        true => Errno(libc::EPIPE),
        false => error,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tcp_accepts_one_write_after_the_peer_has_closed_and_reports_it_once() {
        let end = ConnectionEnd::default();
        assert_eq!(end.take_epipe(), 0);
        assert!(end.may_write_after_close() && end.begin_write_after_close());
        assert!(!end.may_write_after_close() && !end.begin_write_after_close());
        assert_eq!((end.take_epipe(), end.take_epipe()), (libc::EPIPE, 0));
    }

    #[test]
    fn a_program_that_has_ended_its_direction_writes_no_more() {
        let end = ConnectionEnd::default();
        end.set_write_shut();
        assert!(!end.may_write_after_close() && !end.begin_write_after_close());
        assert!(!end.has_written_after_close());
    }

    #[test]
    fn the_error_of_a_handshake_is_reported_once() {
        let end = ConnectionEnd::default();
        end.set_error(libc::ECONNRESET);
        assert_eq!((end.take_error(), end.take_error()), (libc::ECONNRESET, 0));
        assert!(!end.begin_write_after_close());
    }

    #[test]
    fn poll_shows_a_hang_up_when_both_directions_have_ended() {
        let end = ConnectionEnd::default();
        let closed = Readiness { read_closed: true, hang_up: true, ..Readiness::default() };
        assert!(!end.shown(closed).hang_up);
        end.set_write_shut();
        assert!(end.shown(closed).hang_up && !end.shown(closed).failed);
    }
}
