// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Connections in use inherited by a child of a fork.
//!
//! Before a fork the owner makes a pair for each connection on SMC, or with a handshake under way: no
//! other process can continue such a connection. In the child one end of the pair replaces the
//! descriptors of the connection.
//!
//! Most children never use the connection: they save a database, or execute a program. So the owner
//! forwards nothing until the child asks for the connection by a byte in a pipe
//! (`socket/owner_pipe.rs`), or has executed a program with access to the connection. From then on the
//! same end of the pair replaces the owner's descriptors as well. Processes taking turns on a
//! connection thus find all its bytes in one place.
//!
//! Most servers fork first and use the connection in the child only; there the child does the handshake
//! in a session of its own (see `selection`).

use std::ffi::c_int;
use std::os::fd::{AsRawFd, IntoRawFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags};

use super::forward::{give_options, install_relayed, put_pair, replace, start, start_undecided};
use super::hand_over::{is_in_use, temporary_relay_of};
use super::offers::{OUTSTANDING, Outstanding, RelayOffer, SharedPair, take};
use crate::socket::owner_pipe;
use crate::socket::pair::{HIGH_FDS, high};
use crate::socket::stream::{RelayState, SocketState};
use crate::socket::table::{DESCRIPTORS, DescriptorRef, NUMBERS};
use crate::sys::fork_lock::ForkMutex;
use crate::sys::{STACK, own_numbers, owned, raw};

/// Maximum number of inherited connections. In a program with more, the child's calls on the others
/// fail.
const MAX_CONNECTIONS: usize = 64;

/// Offers a connection to the child of a fork.
fn offer(descriptor: DescriptorRef, fd: c_int) -> Option<RelayOffer> {
    let pair = SharedPair::of(&descriptor, fd)?;
    let socket = descriptor.stream()?;
    let tcp = match socket.state() {
        SocketState::Smc => None,
        _ => Some(owned(raw::fcntl(fd, libc::F_DUPFD_CLOEXEC, HIGH_FDS).ok()? as c_int)),
    };
    socket.undecided.add_offer();
    Some(RelayOffer { descriptor, fds: vec![fd], pair, cloexec: true, tcp })
}

/// Ends the offer: the child will not ask.
fn end(offer: RelayOffer) {
    if let Some(socket) = offer.descriptor.stream() {
        socket.undecided.remove_offer();
    }
}

/// Serves the child from now on.
fn serve(offer: RelayOffer) {
    let Some(pair) = offer.pair.0.lock().take() else {
        // A child forked before has asked already.
        return end(offer);
    };
    // The program may have closed its descriptors by now; the child's relay works all the same.
    let fds: Vec<c_int> = offer.fds.iter().copied().filter(|fd| offer.has(*fd)).collect();
    let temporary = offer.tcp.is_none().then(|| temporary_relay_of(&fds, &pair)).flatten();
    replace(&offer.descriptor, &fds, &pair.program_end, temporary.as_ref());
    match offer.tcp {
        // The offer stays counted: the handshake goes on although the program has no descriptor of
        // the connection any more.
        Some(tcp) => {
            let _ = start_undecided(offer.descriptor, pair, tcp);
        }
        None => {
            if let Some(socket) = offer.descriptor.stream() {
                socket.undecided.remove_offer();
            }
            start(offer.descriptor, pair, temporary);
        }
    }
}

/// The connections offered by one fork to its child.
struct RelayOffers {
    list: Vec<RelayOffer>,
    /// The sockets for the child's request. They end when the child executes a program or exits.
    request: (OwnedFd, OwnedFd),
    /// A pipe with its end at the child's exit.
    lifetime: (OwnedFd, OwnedFd),
}

/// The offers between the fork's first and last handler. Parent and child each take their copy.
static PREPARED: ForkMutex<Option<RelayOffers>> = ForkMutex::new(None);

fn pipe() -> Option<(OwnedFd, OwnedFd)> {
    let (reader, writer) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).ok()?;
    Some((high(reader), high(writer)))
}

fn sockets() -> Option<(OwnedFd, OwnedFd)> {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
    let (unix, stream) = (AddressFamily::UNIX, SocketType::STREAM);
    let (ours, theirs) = socketpair(unix, stream, SocketFlags::CLOEXEC, None).ok()?;
    Some((high(ours), high(theirs)))
}

/// Whether a fork can take the locks of the offers within `limit`.
pub(crate) fn comes_free(limit: Duration) -> bool {
    OUTSTANDING.comes_free(limit) && PREPARED.comes_free(limit)
}

/// Prepares the offers, before a fork. The caller holds [`NUMBERS`].
pub(crate) fn prepare() {
    let mut list: Vec<RelayOffer> = Vec::new();
    for fd in 0..=DESCRIPTORS.highest() {
        let Some(descriptor) = DESCRIPTORS.get(fd) else { continue };
        if !descriptor.stream().is_some_and(is_in_use) {
            continue;
        }
        let cloexec = raw::fcntl(fd, libc::F_GETFD, 0).is_ok_and(|flags| flags != 0);
        let known = list.iter_mut().find(|offer| offer.descriptor.is(&descriptor));
        if let Some(offer) = known {
            offer.fds.push(fd);
            offer.cloexec &= cloexec;
        } else if list.len() < MAX_CONNECTIONS
            && let Some(offer) = offer(descriptor, fd)
        {
            list.push(RelayOffer { cloexec, ..offer });
        }
    }
    if list.is_empty() {
        return;
    }
    match (sockets(), pipe()) {
        (Some(request), Some(lifetime)) => {
            // A program executed by the child keeps this end open.
            let _ = raw::fcntl(lifetime.1.as_raw_fd(), libc::F_SETFD, 0);
            *PREPARED.lock() = Some(RelayOffers { list, request, lifetime });
        }
        _ => list.into_iter().for_each(end),
    }
}

/// Replaces the descriptors by ends of the pairs, after a fork, in the child.
pub(crate) fn in_child() {
    let others = std::mem::take(&mut *OUTSTANDING.lock());
    let prepared = PREPARED.lock().take();
    for offer in prepared.iter().flat_map(|offers| &offers.list) {
        let pair = offer.pair.0.lock();
        let (Some(pair), Some(socket)) = (&*pair, offer.descriptor.stream()) else { continue };
        give_options(socket, offer.fds.first().copied(), &pair.program_end);
        for &fd in &offer.fds {
            put_pair(fd, &pair.program_end, |tcp_fd| match offer.tcp {
                None => socket.set_relayed(tcp_fd),
                // The state of the old entry, changed by the parent's thread, does not matter.
                Some(_) => install_relayed(fd, socket.role(), RelayState::new(tcp_fd)),
            });
        }
    }
    // Offers to other children are dropped, too: holders of the other ends must see the owner's end.
    drop(others);
    let Some(RelayOffers { list, request, lifetime }) = prepared else { return };
    owner_pipe::set(request.1);
    drop(request.0);
    drop(lifetime.0);
    // This end stays open as long as the process lives.
    own_numbers::enter(lifetime.1.into_raw_fd());
    drop(list);
}

/// Starts a thread in the owner after a fork, to wait for the child's request.
pub(crate) fn in_parent() {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let Some(RelayOffers { list, request, lifetime }) = PREPARED.lock().take() else { return };
    drop((request.1, lifetime.1));
    let (request, lifetime) = (request.0, lifetime.0);
    let id = NEXT.fetch_add(1, Ordering::Relaxed);
    let number = request.as_raw_fd();
    OUTSTANDING.lock().push(Outstanding { id, list, lifetime, request: number });
    raw::without_signals(|| {
        let started = ism_sys::start_thread("smc-relay", STACK, move || await_child(id, &request));
        if started.is_err() {
            // The child's calls return an end of data.
            take(id).into_iter().for_each(|offers| settle(offers, |_| false));
        }
    });
}

fn await_child(id: u64, request: &OwnedFd) {
    let mut word = [0u8; 1];
    let asked = loop {
        match rustix::io::read(request, &mut word) {
            Ok(n) => break n > 0,
            Err(rustix::io::Errno::INTR) => {}
            Err(_) => break false,
        }
    };
    let _numbers = NUMBERS.lock();
    if let Some(offers) = take(id) {
        // The sockets have ended: the child has exited, or has executed a program with access to the
        // connections.
        let alive = asked || is_alive(&offers);
        settle(offers, |offer| alive && (asked || !offer.cloexec));
    }
}

/// Whether the child, or a program executed by the child, still runs.
fn is_alive(offers: &Outstanding) -> bool {
    let mut alive = [PollFd::new(&offers.lifetime, PollFlags::IN)];
    let zero = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
    !rustix::event::poll(&mut alive, Some(&zero)).is_ok_and(|n| n > 0)
}

/// Starts relays for the accepted offers, and ends the others. The caller holds [`NUMBERS`].
fn settle(offers: Outstanding, is_taken: impl Fn(&RelayOffer) -> bool) {
    for offer in offers.list {
        match is_taken(&offer) {
            true => serve(offer),
            false => end(offer),
        }
    }
}

/// Starts relays for all connections offered to living children, because this process is about to end
/// or to execute a program.
pub(crate) fn settle_all() {
    // Held by a thread that ends offers of a child: each offer has a reference to its connection,
    // maybe the last one, and its drop closes the connection.
    let _numbers = NUMBERS.lock();
    let all = std::mem::take(&mut *OUTSTANDING.lock());
    for offers in all {
        let alive = is_alive(&offers);
        settle(offers, |_| alive);
    }
}
