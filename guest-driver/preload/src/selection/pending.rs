// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Handshakes that wait for their peers: the parts that a client and a server have in common.

use std::ffi::c_int;
use std::io;
use std::net::TcpStream;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::time::{Duration, Instant};

use guest_driver::SmcStream;
use guest_driver::interpose::{Handshake, Side, SignalMask};
use rustix::event::{PollFd, PollFlags, Timespec};

use crate::selection::waiting::{self, PendingHandshake, WaitingPlace, Watcher};
use crate::socket::stream::StreamSocket;
use crate::socket::table::DescriptorRef;
use crate::sys::raw::{self, SysResult};
use crate::sys::timespec;

/// The next stage of a handshake; `None`: the handshake is complete.
pub(super) type PendingStage = Option<Box<dyn PendingHandshake>>;

/// A step of a handshake, as [`Handshake::advance`].
pub(super) type Step<S> = fn(&mut Handshake<S>) -> io::Result<Option<SmcStream>>;

/// The side of this process in a handshake.
pub(super) trait PendingSide: Side + Sized + Send + 'static {
    /// Takes a step.
    fn advance(
        descriptor: &DescriptorRef,
        handshake: &mut Handshake<Self>,
        step: Step<Self>,
    ) -> io::Result<Option<SmcStream>>;

    /// Ends the handshake by its result.
    fn end(
        descriptor: &DescriptorRef,
        fd: c_int,
        handshake: &mut Handshake<Self>,
        result: io::Result<SmcStream>,
    ) -> PendingStage;
}

/// A handshake waiting for the next message of the peer.
struct AwaitMessage<S>(Handshake<S>);

/// Goes on with a handshake by `step`.
pub(super) fn go_on<S: PendingSide>(
    descriptor: &DescriptorRef,
    fd: c_int,
    mut handshake: Handshake<S>,
    step: Step<S>,
) -> PendingStage {
    match S::advance(descriptor, &mut handshake, step).transpose() {
        Some(result) => S::end(descriptor, fd, &mut handshake, result),
        None => Some(Box::new(AwaitMessage(handshake))),
    }
}

impl<S: PendingSide> PendingHandshake for AwaitMessage<S> {
    fn fds(&self) -> [Option<BorrowedFd<'_>>; 2] {
        self.0.fds()
    }

    fn is_over(&self, _: &DescriptorRef) -> bool {
        self.0.deadline().is_none_or(|end| Instant::now() >= end)
    }

    fn advance(mut self: Box<Self>, descriptor: &DescriptorRef, fd: c_int) -> PendingStage {
        match S::advance(descriptor, &mut self.0, Handshake::advance).transpose() {
            Some(result) => S::end(descriptor, fd, &mut self.0, result),
            None => Some(self),
        }
    }
}

/// A client whose TCP socket is connecting, or whose process has no device open yet.
pub(super) struct Connecting {
    pub(super) tcp: TcpStream,
    /// Goes on once TCP's handshake is over.
    pub(super) then: fn(&DescriptorRef, c_int, TcpStream) -> PendingStage,
}

impl PendingHandshake for Connecting {
    fn fds(&self) -> [Option<BorrowedFd<'_>>; 2] {
        [Some(self.tcp.as_fd()), None]
    }

    fn awaits_room(&self) -> bool {
        true
    }

    fn is_over(&self, descriptor: &DescriptorRef) -> bool {
        descriptor.handles() == 0 && !descriptor.stream().is_some_and(StreamSocket::must_finish)
    }

    fn is_ready(&mut self, descriptor: &DescriptorRef) -> bool {
        !poll(&self.tcp).is_empty() || self.is_over(descriptor)
    }

    fn advance(self: Box<Self>, descriptor: &DescriptorRef, fd: c_int) -> PendingStage {
        (self.then)(descriptor, fd, self.tcp)
    }
}

/// Polls a stream that connects. A poll(2) that fails, as with RLIMIT_NOFILE 0, is an error.
pub(super) fn poll(tcp: &TcpStream) -> PollFlags {
    let mut fds = [PollFd::new(tcp, PollFlags::OUT)];
    let zero = Timespec { tv_sec: 0, tv_nsec: 0 };
    match rustix::event::poll(&mut fds, Some(&zero)) {
        Ok(_) => fds[0].revents(),
        Err(_) => PollFlags::ERR,
    }
}

/// Waits for a handshake in the program's call, for `left` at a time. `true`: the wait was `cut`
/// short, and a thread goes on with the handshake.
pub(super) fn wait_here(
    (descriptor, fd): (&DescriptorRef, c_int),
    mut pending: PendingStage,
    place: &WaitingPlace,
    mask: SignalMask,
    left: impl Fn() -> Duration,
    mut cut: impl FnMut(SysResult) -> bool,
) -> bool {
    while let Some(mut now) = pending {
        let events = if now.awaits_room() { libc::POLLOUT } else { libc::POLLIN };
        let mut list = [libc::pollfd { fd: -1, events, revents: 0 }; 2];
        for (entry, fd) in list.iter_mut().zip(now.fds().into_iter().flatten()) {
            entry.fd = fd.as_raw_fd();
        }
        if cut(raw::ppoll(&mut list, Some(&timespec(left())), Some(mask))) {
            waiting::add(place, descriptor, fd, now, Watcher::Thread);
            return true;
        }
        pending = match now.is_ready(descriptor) {
            true => now.advance(descriptor, fd),
            false => Some(now),
        };
    }
    false
}
