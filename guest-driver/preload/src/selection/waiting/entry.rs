// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! One handshake of the list.

use std::ffi::c_int;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::{Duration, Instant};

use guest_driver::interpose::SignalMask;

use crate::socket::registrations;
use crate::socket::table::DescriptorRef;
use crate::sys::raw::{self, Errno};
use crate::sys::timespec;

/// A handshake waiting for its peer.
pub(in crate::selection) trait PendingHandshake: Send {
    /// The descriptors to poll: readable once the peer has sent something.
    fn fds(&self) -> [Option<BorrowedFd<'_>>; 2];
    /// Whether the descriptors become writable instead: TCP is connecting.
    fn awaits_room(&self) -> bool {
        false
    }
    /// Whether the wait is over, with or without a message of the peer.
    fn is_over(&self, descriptor: &DescriptorRef) -> bool;
    /// Whether the handshake has taken nothing from the stream.
    fn is_untouched(&self) -> bool {
        false
    }
    /// Whether [`PendingHandshake::advance`] can go on.
    fn is_ready(&mut self, descriptor: &DescriptorRef) -> bool {
        let _ = descriptor;
        true
    }
    /// Goes on as far as the peer's bytes allow. `None`: the handshake is complete.
    fn advance(
        self: Box<Self>,
        descriptor: &DescriptorRef,
        fd: c_int,
    ) -> Option<Box<dyn PendingHandshake>>;
}

/// A handshake in the list.
pub(super) struct Waiting {
    pub(super) descriptor: DescriptorRef,
    pub(super) fd: c_int,
    pub(super) pending: Box<dyn PendingHandshake>,
    /// The descriptors in the set.
    pub(super) watched: Vec<c_int>,
}

impl Waiting {
    /// Whether the program's waits for epoll sets go on with the handshake. Such a wait is for TCP
    /// only.
    pub(super) fn is_in_a_set(&self) -> bool {
        self.watched.is_empty()
            && matches!(self.pending.fds(), [Some(_), None])
            && self.descriptor.stream().is_some_and(registrations::is_in_a_set)
    }

    /// Goes on as far as the peer's bytes allow, on a stack of the library. `None`: the handshake is
    /// complete.
    pub(super) fn advance(mut self, set: c_int) -> Option<Waiting> {
        if !self.pending.is_ready(&self.descriptor) {
            // The descriptors stay in the set: once removed and added again, they would report the
            // same bytes again.
            return Some(self);
        }
        unwatch(set, &self.watched);
        self.watched.clear();
        let (pending, descriptor) = (self.pending, &self.descriptor);
        self.pending = pending.advance(descriptor, self.fd)?;
        Some(self)
    }

    /// Waits for the peer and goes on, for `timeout` at most. Returns the handshake if still
    /// waiting, and whether a signal has ended the wait.
    pub(super) fn advance_here(
        mut self,
        set: c_int,
        timeout: Duration,
        mask: SignalMask,
    ) -> (Option<Waiting>, bool) {
        let end = Instant::now() + timeout;
        loop {
            let events = if self.pending.awaits_room() { libc::POLLOUT } else { libc::POLLIN };
            // The kernel ignores negative numbers.
            let mut list = [libc::pollfd { fd: -1, events, revents: 0 }; 2];
            for (entry, fd) in list.iter_mut().zip(self.pending.fds().into_iter().flatten()) {
                entry.fd = fd.as_raw_fd();
            }
            let left = end.saturating_duration_since(Instant::now());
            match raw::ppoll(&mut list, Some(&timespec(left)), Some(mask)) {
                Ok(1..) => {}
                Ok(_) if !self.pending.is_over(&self.descriptor) => return (Some(self), false),
                Ok(_) => {}
                Err(error) => return (Some(self), error == Errno(libc::EINTR)),
            }
            match self.advance(set) {
                Some(rest) => self = rest,
                None => return (None, false),
            }
        }
    }
}

/// Takes descriptors out of a set, before they are closed. The program's descriptor of the same
/// socket would keep the entries in the set.
pub(super) fn unwatch(set: c_int, watched: &[c_int]) {
    for fd in watched {
        let _ = raw::epoll_ctl(set, libc::EPOLL_CTL_DEL, *fd, 0, 0);
    }
}
