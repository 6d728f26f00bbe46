// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The client's half of the handshake of one connection.

use std::ffi::c_int;
use std::io;
use std::net::TcpStream;
use std::os::fd::{AsRawFd, OwnedFd};
use std::time::{Duration, Instant};

use guest_driver::interpose::{ClientSide, Outgoing, SignalMask};
use guest_driver::{Fallback, SmcStream};
use ism_sys::interrupt;
use rustix::event::PollFlags;

use crate::selection::outcome::{complete, complete_with_tcp, duplicate};
use crate::selection::pending::{self, Connecting, PendingSide, PendingStage, Step};
use crate::selection::waiting::{self, PendingHandshake, WaitingPlace, Watcher};
use crate::selection::{Wait, listening_ports, option, reconnect, server_memory, session};
use crate::socket::states::SocketStage;
use crate::socket::stream::StreamSocket;
use crate::socket::table::DescriptorRef;
use crate::sys::raw::{self, Errno};
use crate::sys::{borrowed, lent_stream};
use crate::{status, tcp_notes};

/// How long `connect` on a blocking socket waits for the handshake. Then the call returns with the
/// connection undecided: TCP's `connect` does not wait for the server's program either.
const CONNECT: Duration = Duration::from_millis(50);

/// Begins. With [`Wait::Block`] the caller waits for the handshake, for [`CONNECT`] at most.
/// `true`: a signal interrupts the call. `copy`: a second descriptor of the connection, if there is
/// one.
pub(super) fn start(
    descriptor: &DescriptorRef,
    socket: &StreamSocket,
    fd: c_int,
    (wait, mask): (Wait, SignalMask),
    copy: Option<OwnedFd>,
) -> bool {
    let copy = copy.or_else(|| duplicate(fd).ok());
    let copy = copy.and_then(|copy| Some((TcpStream::from(copy), WaitingPlace::take()?)));
    let Some((tcp, place)) = copy else {
        decline_here(descriptor, socket, fd);
        return false;
    };
    let answered = socket.side.request().is_some_and(|request| request.awaited.is_some());
    let is_connected = answered || is_connected(&tcp);
    // The first handshake of a process opens the device, a long operation.
    let pending: Box<dyn PendingHandshake> = if is_connected && session::opened().is_some() {
        let step = if wait == Wait::Block { Outgoing::advance_soon } else { Outgoing::advance };
        match propose(descriptor, fd, tcp, step) {
            proposed @ Some(_) if wait == Wait::Block => {
                return wait_here(descriptor, fd, proposed, mask, &place);
            }
            Some(proposed) => proposed,
            None => return false,
        }
    } else {
        Box::new(Connecting { tcp, then: connected })
    };
    let watcher = match wait {
        Wait::Block | Wait::Until(_) => Watcher::Thread,
        Wait::Short | Wait::Now => Watcher::NextCall,
    };
    waiting::add(&place, descriptor, fd, pending, watcher);
    if wait != Wait::Block {
        return false;
    }
    let decided = interrupt::listening(|| socket.decision.wait(CONNECT));
    decided == Err(Errno(libc::EINTR)) && raw::signals_interrupt()
}

/// There are no descriptors, threads or stacks left. Sends a Decline if the server awaits a message
/// and no other thread may write.
pub(super) fn decline_here(descriptor: &DescriptorRef, socket: &StreamSocket, fd: c_int) {
    let request = socket.side.request();
    let awaited = request.is_some_and(|request| {
        matches!(option::during_connect(request, borrowed(fd)), Some(Ok(true)))
    });
    let is_ours = socket.stage() == SocketStage::Deciding;
    if awaited
        && is_ours
        && let Some(session) = session::declining()
    {
        // TCP reports an error with the program's next call.
        let _ = session.decline_awaited(&lent_stream(fd));
    }
    tcp_notes::note(fd, &Fallback::NoResources);
    complete_with_tcp(descriptor, fd, borrowed(fd));
}

/// Waits for the server in the program's call. `true`: a signal interrupts the call.
fn wait_here(
    descriptor: &DescriptorRef,
    fd: c_int,
    pending: PendingStage,
    mask: SignalMask,
    place: &WaitingPlace,
) -> bool {
    let end = Instant::now() + CONNECT;
    let left = || end.saturating_duration_since(Instant::now());
    let mut interrupted = false;
    pending::wait_here((descriptor, fd), pending, place, mask, left, |waited| {
        interrupted = waited == Err(Errno(libc::EINTR));
        interrupted || left().is_zero()
    });
    interrupted && raw::signals_interrupt()
}

/// TCP's handshake is over.
fn connected(descriptor: &DescriptorRef, fd: c_int, tcp: TcpStream) -> PendingStage {
    if !is_connected(&tcp) {
        if let Some(request) = descriptor.stream().and_then(|socket| socket.side.request()) {
            option::after_failed_connect(request, &tcp);
        }
        // The kernel reports the error to the program.
        complete_with_tcp(descriptor, fd, &tcp);
        return None;
    }
    // Since TCP was connected, the program may have written by a system call outside the library. A
    // Proposal behind such bytes would be data to the server.
    if raw::has_data_segments(tcp.as_raw_fd()) {
        status::client_stays_on_tcp(fd, &tcp, Fallback::Asked);
        complete_with_tcp(descriptor, fd, &tcp);
        return None;
    }
    propose(descriptor, fd, tcp, Outgoing::advance)
}

impl PendingSide for ClientSide {
    /// Waits while a keeper holds the server's answer.
    fn advance(
        descriptor: &DescriptorRef,
        outgoing: &mut Outgoing,
        step: Step<ClientSide>,
    ) -> io::Result<Option<SmcStream>> {
        let client = descriptor.stream().and_then(|socket| socket.side.client());
        let Some(client) = client else { return step(outgoing) };
        client.answer.take();
        let result = step(outgoing);
        if matches!(result, Ok(None)) && outgoing.only_waits() {
            client.answer.is_awaited_from_now(outgoing.claim());
        }
        result
    }

    fn end(
        descriptor: &DescriptorRef,
        fd: c_int,
        outgoing: &mut Outgoing,
        result: io::Result<SmcStream>,
    ) -> PendingStage {
        match (result, outgoing.take_unanswered()) {
            (Err(why), Some(tcp)) => reconnect::instead(descriptor, fd, tcp, why),
            (result, _) => {
                complete(descriptor, fd, result);
                None
            }
        }
    }
}

/// Proposes SMC on a connected stream by `step`, unless TCP has to carry the connection. Returns
/// the handshake if it still has to wait.
fn propose(
    descriptor: &DescriptorRef,
    fd: c_int,
    tcp: TcpStream,
    step: Step<ClientSide>,
) -> PendingStage {
    let request = descriptor.stream().and_then(|socket| socket.side.request());
    let stay_on_tcp = || complete_with_tcp(descriptor, fd, &tcp);
    let awaited = match request {
        _ if connects_to_itself(&tcp) => {
            tcp_notes::note(fd, &Fallback::SameProcess);
            stay_on_tcp();
            return None;
        }
        Some(request) => match option::after_connect(request, &tcp) {
            Ok(awaited) => awaited,
            Err(why) => {
                if let Ok(server) = tcp.peer_addr() {
                    let record = server_memory::record(&server);
                    record.note_answer(false, raw::monotonic_micros);
                }
                status::client_stays_on_tcp(fd, &tcp, why);
                stay_on_tcp();
                return None;
            }
        },
        None => false,
    };
    // A connection bound to stay on TCP may have another writer already. So the server gets no
    // Decline: the first bytes show the server a client without a Proposal.
    let may_be_smc = descriptor.stream().is_some_and(|socket| socket.decision.begin_proposal());
    let session = if may_be_smc { session::current() } else { None };
    let Some(session) = session else {
        tcp_notes::note(fd, &if may_be_smc { session::no_device() } else { Fallback::Asked });
        stay_on_tcp();
        return None;
    };
    if let Some(client) = descriptor.stream().and_then(|socket| socket.side.client()) {
        client.set_awaited(awaited);
    }
    pending::go_on(descriptor, fd, session.outgoing(tcp, awaited), step)
}

/// Whether the server is this process. The connecting thread could then not accept.
fn connects_to_itself(tcp: &TcpStream) -> bool {
    if !listening_ports::any() {
        return false;
    }
    let (Ok(local), Ok(peer)) = (tcp.local_addr(), tcp.peer_addr()) else { return true };
    local.ip() == peer.ip() && listening_ports::listens_on(peer.port())
}

/// Whether TCP's handshake is over.
fn is_connected(tcp: &TcpStream) -> bool {
    let found = pending::poll(tcp);
    found.contains(PollFlags::OUT) && !found.intersects(PollFlags::ERR | PollFlags::HUP)
}
