// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The end of a connection as the program's calls have reported it: each error once, as TCP does.

use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};

use guest_driver::{Readiness, SmcStream};

use crate::sys::raw::{Errno, SysResult};

/// The end of a connection, as far as the program knows it.
#[derive(Debug, Default)]
pub(crate) struct ConnectionEnd {
    /// The error of a failed handshake. A call of the program takes it.
    error: AtomicI32,
    /// The program has ended its own direction.
    write_shut: AtomicBool,
    /// A write went to a peer that has closed.
    wrote_after_close: AtomicBool,
    /// A call has reported the EPIPE that comes of such a write.
    epipe_reported: AtomicBool,
    /// A call has reported that the connection was reset.
    reset_reported: AtomicBool,
}

impl ConnectionEnd {
    /// Takes the error of a failed handshake; 0: there is none, or a call has taken it.
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

    /// Stores that the program has ended its own direction.
    pub(crate) fn set_write_shut(&self) {
        self.write_shut.store(true, Ordering::Relaxed);
    }

    /// Whether a call has reported that the connection was reset.
    pub(crate) fn is_reset_reported(&self) -> bool {
        self.reset_reported.load(Ordering::Relaxed)
    }

    /// Whether a write went to a peer that has closed, which ends the connection.
    pub(crate) fn has_written_after_close(&self) -> bool {
        self.wrote_after_close.load(Ordering::Relaxed)
    }

    /// Whether a write to a peer that has closed would be the first one, which TCP accepts.
    pub(crate) fn may_write_after_close(&self) -> bool {
        !self.is_write_shut() && !self.is_reset_reported() && !self.has_written_after_close()
    }

    /// As [`ConnectionEnd::may_write_after_close`], for a call that writes: only the first one may.
    pub(crate) fn begin_write_after_close(&self) -> bool {
        !self.is_write_shut()
            && !self.is_reset_reported()
            && !self.wrote_after_close.swap(true, Ordering::Relaxed)
    }

    /// Takes the error that comes of a write to a peer that has closed; 0: there is none.
    pub(crate) fn take_epipe(&self) -> c_int {
        let wrote = self.has_written_after_close();
        if wrote && !self.epipe_reported.swap(true, Ordering::Relaxed) { libc::EPIPE } else { 0 }
    }

    /// The error that SO_ERROR shows of a connection that was reset, once.
    pub(crate) fn take_reset(&self, stream: &SmcStream) -> c_int {
        let error = stream.take_error().ok().flatten().map(Errno::from);
        if !stream.readiness(false).failed || self.reset_reported.swap(true, Ordering::Relaxed) {
            return 0;
        }
        pending_error(stream, error.unwrap_or(Errno(libc::ECONNRESET))).0
    }

    /// The result of a read that failed. A peer that ends its direction and then resets the
    /// connection has ended it, as far as TCP's readers know.
    pub(crate) fn read_failed(&self, stream: &SmcStream, error: Errno) -> SysResult {
        match pending_error(stream, error) {
            Errno(libc::EPIPE) => Ok(0),
            error => self.report_once(error),
        }
    }

    /// The error of a write that failed. After a reset that was reported, writes fail as on a closed
    /// connection.
    pub(crate) fn write_failed(&self, stream: &SmcStream, error: Errno) -> Errno {
        let error = pending_error(stream, error);
        if error == Errno(libc::EPIPE) {
            self.reset_reported.store(true, Ordering::Relaxed);
            return error;
        }
        self.report_once(error).err().unwrap_or(Errno(libc::EPIPE))
    }

    /// The result of a call that found the connection reset: only the first one reports that. Later
    /// reads find an end of data.
    fn report_once(&self, error: Errno) -> SysResult {
        if is_reset(error) && self.reset_reported.swap(true, Ordering::Relaxed) {
            return Ok(0);
        }
        Err(error)
    }

    /// The readiness of a connection that the program's poll shows.
    pub(super) fn shown(&self, mut readiness: Readiness) -> Readiness {
        // POLLHUP means that both directions have ended. A peer that has closed has ended only its
        // own, as far as TCP knows.
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

/// The error that a reset leaves: for a writer whose peer had ended its direction before, that is
/// EPIPE.
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
