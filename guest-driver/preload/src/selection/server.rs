// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The server's half of the handshake of one connection.

use std::ffi::c_int;
use std::io;
use std::net::TcpStream;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::time::{Duration, Instant};

use guest_driver::interpose::{DeclineReason, FirstBytes, Incoming, ServerSide, SignalMask};
use guest_driver::{Fallback, SmcStream};

use crate::selection::first_bytes::{self, FirstBytesWait, peek, peek_to_begin};
use crate::selection::outcome::{complete, complete_with_tcp, duplicate};
use crate::selection::pending::{self, PendingSide, PendingStage, Step};
use crate::selection::waiting::{self, PendingHandshake, WaitingPlace, Watcher};
use crate::selection::{Wait, handed_listeners, option, own_calls, session, worthwhile};
use crate::socket::states::SocketStage;
use crate::socket::stream::StreamSocket;
use crate::socket::table::DescriptorRef;
use crate::sys::raw::{self, Errno, SysResult};
use crate::sys::{borrowed, lent_stream, timespec};
use crate::{status, tcp_notes};

/// The server's half, for a call that must not wait. Often the client's message has already
/// arrived.
pub(super) fn start(descriptor: &DescriptorRef, socket: &StreamSocket, fd: c_int, call: Wait) {
    let wait = FirstBytesWait::new(None);
    let step: Step<ServerSide> = match call {
        // Other connections of the same event loop wait meanwhile, and the kernel's set reports
        // bytes already there once the set gets the socket.
        Wait::Now => Incoming::advance_to_accept,
        Wait::Block | Wait::Until(_) | Wait::Short => Incoming::advance_soon,
    };
    let found = peek_to_begin(Some(socket), borrowed(fd));
    let is_silent = found == FirstBytes::Incomplete && !wait.left(socket).is_zero();
    if !is_silent && !found.is_smc() {
        return stay_on_tcp(descriptor, fd);
    }
    let copy = duplicate(fd).ok().and_then(|copy| Some((copy.into(), WaitingPlace::take()?)));
    let Some((tcp, place)) = copy else {
        return match is_silent {
            true => waiting::postpone(descriptor, fd),
            false => decline_here(descriptor, fd, found),
        };
    };
    let pending: Box<dyn PendingHandshake> = match is_silent {
        true => Box::new(AwaitFirstBytes { tcp, wait }),
        false => match serve(descriptor, fd, tcp, found, step) {
            Some(pending) => pending,
            None => return,
        },
    };
    // A call using the connection goes on to wait for the client's next message.
    let watcher = match socket.stage() {
        _ if call == Wait::Now => Watcher::NextCall,
        SocketStage::Proposing if !pending.is_untouched() => Watcher::NextCall,
        _ => Watcher::Thread,
    };
    waiting::add(&place, descriptor, fd, pending, watcher);
}

/// A server waiting for its client's first bytes.
struct AwaitFirstBytes {
    tcp: TcpStream,
    wait: FirstBytesWait,
}

impl PendingHandshake for AwaitFirstBytes {
    fn fds(&self) -> [Option<BorrowedFd<'_>>; 2] {
        [Some(self.tcp.as_fd()), None]
    }

    fn is_over(&self, descriptor: &DescriptorRef) -> bool {
        self.wait.is_over(descriptor)
            || self.wait.has_lasted(CHECK_INTERVAL)
                && descriptor.stream().is_some_and(|s| has_read_around(s, self.tcp.as_raw_fd()))
    }

    fn is_untouched(&self) -> bool {
        true
    }

    fn is_ready(&mut self, descriptor: &DescriptorRef) -> bool {
        if self.is_over(descriptor) || peek(&self.tcp) != FirstBytes::Incomplete {
            return true;
        }
        if rustix::io::ioctl_fionread(&self.tcp).unwrap_or(0) > 0
            && let Some(socket) = descriptor.stream()
        {
            self.wait.note_part(socket);
        }
        false
    }

    fn advance(self: Box<Self>, descriptor: &DescriptorRef, fd: c_int) -> PendingStage {
        let found = peek_to_begin(descriptor.stream(), &self.tcp);
        serve(descriptor, fd, self.tcp, found, Incoming::advance)
    }
}

impl PendingSide for ServerSide {
    fn advance(
        _: &DescriptorRef,
        incoming: &mut Incoming,
        step: Step<ServerSide>,
    ) -> io::Result<Option<SmcStream>> {
        step(incoming)
    }

    fn end(
        descriptor: &DescriptorRef,
        fd: c_int,
        _: &mut Incoming,
        result: io::Result<SmcStream>,
    ) -> PendingStage {
        complete(descriptor, fd, result);
        None
    }
}

/// How long a call waits before the next look at a part of a message again.
const PART_INTERVAL: Duration = Duration::from_millis(5);

/// How much longer than a call with a time limit the wait for a client's first bytes may last.
const CALL_MARGIN: Duration = Duration::from_secs(1);
/// How often a wait checks whether the program has closed the connection.
const CHECK_INTERVAL: Duration = Duration::from_millis(50);

/// The server's half, for a waiting call. `true`: a signal interrupts the call, or its time has
/// passed.
pub(super) fn wait_here(
    descriptor: &DescriptorRef,
    socket: &StreamSocket,
    fd: c_int,
    (call, mask): (Wait, SignalMask),
) -> bool {
    // The call ends before the wait does.
    let limit = match call {
        Wait::Until(end) => Some(end.saturating_duration_since(Instant::now()) + CALL_MARGIN),
        Wait::Block | Wait::Short | Wait::Now => None,
    };
    let mut wait = FirstBytesWait::new(limit);
    // The kernel never restarts a call with a time limit (signal(7)).
    let is_interrupted = |result| {
        result == Err(Errno(libc::EINTR)) && (limit.is_some() || raw::signals_end_call())
            || call.is_over()
    };
    let copy = duplicate(fd).map(TcpStream::from);
    let tcp = copy.as_ref().map_or(borrowed(fd), AsFd::as_fd);
    let found = loop {
        let found = peek_to_begin(Some(socket), tcp);
        if found != FirstBytes::Incomplete || wait.is_over(descriptor) {
            break found;
        }
        if wait.has_lasted(CHECK_INTERVAL) && has_read_around(socket, tcp.as_raw_fd()) {
            break FirstBytes::Other;
        }
        let left = call.left(wait.left(socket).min(CHECK_INTERVAL));
        let mut result = ppoll(tcp, left, mask);
        let is_part = result == Ok(1) && peek(tcp) == FirstBytes::Incomplete;
        if is_part {
            wait.note_part(socket);
        }
        // With RLIMIT_NOFILE 0 poll(2) takes no descriptors.
        if is_part || result == Err(Errno(libc::EINVAL)) {
            result = raw::ppoll(&mut [], Some(&timespec(left.min(PART_INTERVAL))), Some(mask));
        }
        if is_interrupted(result) {
            if socket.undecided.wants_to_write()
                && let Ok(tcp) = copy
                && let Some(place) = WaitingPlace::take()
            {
                let pending = Box::new(AwaitFirstBytes { tcp, wait });
                waiting::add(&place, descriptor, fd, pending, Watcher::Thread);
                // The bytes of the program are kept, as TCP keeps them.
                return true;
            }
            waiting::postpone(descriptor, fd);
            return true;
        }
    };
    if !found.is_smc() {
        stay_on_tcp(descriptor, fd);
        return false;
    }
    let copy = copy.ok().and_then(|copy| Some((copy, WaitingPlace::take()?)));
    let Some((copy, place)) = copy else {
        decline_here(descriptor, fd, found);
        return false;
    };
    let pending = serve(descriptor, fd, copy, found, Incoming::advance_soon);
    let left = || call.left(CHECK_INTERVAL);
    pending::wait_here((descriptor, fd), pending, &place, mask, left, is_interrupted)
}

/// Whether the program has read the first bytes of a client without the library. Its listeners then
/// answer no more: the next client's Proposal would be data, too.
pub(super) fn has_read_around(socket: &StreamSocket, fd: c_int) -> bool {
    let has_read = own_calls::has_read(socket, fd);
    if has_read {
        handed_listeners::leave_inherited(|_| true);
    }
    has_read
}

/// Waits until a socket is readable, with the program's signals.
fn ppoll(tcp: BorrowedFd<'_>, timeout: Duration, mask: SignalMask) -> SysResult {
    let mut list = [libc::pollfd { fd: tcp.as_raw_fd(), events: libc::POLLIN, revents: 0 }];
    raw::ppoll(&mut list, Some(&timespec(timeout)), Some(mask))
}

/// A call's first sight of a client, before a handshake begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ClientLook {
    /// The client does not propose SMC: its first bytes are no Proposal, or the program wants to
    /// write first without an announced Proposal.
    Plain,
    /// The client has sent nothing and has announced nothing. The kernel reports its first bytes.
    Silent,
    /// The client may propose SMC, or has.
    MayPropose,
}

/// Looks at a client. This waits for nothing and takes no lock.
pub(super) fn look_at_client(socket: &StreamSocket, fd: c_int) -> ClientLook {
    if socket.side.is_announced() {
        return ClientLook::MayPropose;
    }
    match first_bytes::peek_if_any(borrowed(fd)) {
        Some(FirstBytes::Other) => ClientLook::Plain,
        Some(FirstBytes::Smc(_) | FirstBytes::Incomplete) => ClientLook::MayPropose,
        None if !socket.side.detect_timeout().is_zero() => ClientLook::MayPropose,
        None if socket.undecided.wants_to_write() => ClientLook::Plain,
        None => ClientLook::Silent,
    }
}

/// The client has not proposed SMC.
fn stay_on_tcp(descriptor: &DescriptorRef, fd: c_int) {
    let server = descriptor.stream().and_then(|socket| socket.side.server());
    if let Some(local) = server.and_then(|server| server.listener.as_ref()) {
        worthwhile::count_tcp(local);
    }
    status::server_stays_on_tcp(fd, borrowed(fd), why_not_proposed(descriptor));
    complete_with_tcp(descriptor, fd, borrowed(fd));
}

/// Whether the connection stays on TCP by a policy changed since its client learned of SMC.
fn is_left_by_policy(descriptor: &DescriptorRef) -> bool {
    let server = descriptor.stream().and_then(|socket| socket.side.server());
    server.is_some_and(|server| server.left_by_policy)
}

fn why_not_proposed(descriptor: &DescriptorRef) -> Fallback {
    match is_left_by_policy(descriptor) {
        true => Fallback::Policy,
        false => option::why_not_proposed(),
    }
}

/// Declines a Proposal on the program's own descriptor: there are none left, or no threads.
fn decline_here(descriptor: &DescriptorRef, fd: c_int, first_bytes: FirstBytes) {
    let Some(session) = session::declining() else { return stay_on_tcp(descriptor, fd) };
    match session.decline(&lent_stream(fd), first_bytes) {
        Ok(()) => {
            tcp_notes::note(fd, &Fallback::NoResources);
            complete_with_tcp(descriptor, fd, borrowed(fd));
        }
        Err(error) => complete(descriptor, fd, Err(error)),
    }
}

/// Does the server's half, after the client's first bytes, and begins by `step`. Returns a
/// handshake still waiting for the client's next message.
fn serve(
    descriptor: &DescriptorRef,
    fd: c_int,
    tcp: TcpStream,
    first_bytes: FirstBytes,
    step: Step<ServerSide>,
) -> PendingStage {
    let may_be_smc = first_bytes.is_smc()
        && descriptor.stream().is_some_and(|socket| socket.decision.begin_proposal());
    let session = match first_bytes.is_smc() {
        true if may_be_smc => session::for_client(),
        true => session::declining(),
        false => None,
    };
    let Some(session) = session else {
        status::server_stays_on_tcp(fd, &tcp, why_not_proposed(descriptor));
        complete_with_tcp(descriptor, fd, &tcp);
        return None;
    };
    let mut incoming = session.incoming(tcp, first_bytes);
    let why = match (is_left_by_policy(descriptor), may_be_smc) {
        (true, _) => Some(DeclineReason::Policy),
        (false, false) => Some(DeclineReason::OptionUnsupported),
        (false, true) => own_calls::found().then_some(DeclineReason::OwnCalls),
    };
    why.into_iter().for_each(|why| incoming.leave_to_tcp(why));
    pending::go_on(descriptor, fd, incoming, step)
}
