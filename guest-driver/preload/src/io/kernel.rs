// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Descriptors passed to where the library cannot follow: stdio, another process, io_uring. From then
//! on the kernel carries out all calls on such descriptors.

use std::ffi::c_int;
use std::mem::ManuallyDrop;
use std::time::{Duration, Instant};

use guest_driver::SmcStream;

use crate::relay::hand_over::{EndPair, cut_off};
use crate::relay::{holders, take_back};
use crate::selection::resolve::resolve;
use crate::selection::{Selected, Wait, handshake, session, waiting};
use crate::socket::stream::{SocketRole, SocketState, StreamSocket};
use crate::socket::table::{DESCRIPTORS, DescriptorRef};
use crate::socket::{descriptors, owner_pipe};
use crate::sys::raw;
use crate::{fork, relay};

/// Limit for a descriptor about to be handed over to wait for a handshake.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(30);

/// Leaves a descriptor to the kernel. An undecided connection stays on TCP, and a connection on SMC
/// gets a relay, for good. The call may wait for a handshake.
pub(crate) fn leave_to_kernel(fd: c_int) {
    let Some(descriptor) = take_back::hold(fd) else { return };
    if let Some(temporary) = descriptor.stream().and_then(StreamSocket::temporary_relay) {
        // No thread takes the relay back as long as this thread has the entry.
        temporary.keep();
    }
    leave(descriptor, fd, false);
}

/// Leaves a descriptor to the kernel. `is_temporary`: the relay is a temporary relay, because another
/// process may use the connection.
fn leave(descriptor: DescriptorRef, fd: c_int, is_temporary: bool) {
    raw::without_signals(|| {
        let socket = descriptor.stream();
        let relayed = socket.and_then(|socket| leave_socket(&descriptor, socket, fd, is_temporary));
        drop(descriptor);
        relayed.into_iter().for_each(relay::hand_over::await_first);
    });
}

fn leave_socket(
    descriptor: &DescriptorRef,
    socket: &StreamSocket,
    fd: c_int,
    is_temporary: bool,
) -> Option<c_int> {
    match socket.state() {
        SocketState::Unconnected => {
            socket.decision.forbid_proposal();
        }
        SocketState::Undecided | SocketState::Deciding => decide(descriptor, socket, fd),
        SocketState::Relayed => owner_pipe::request(socket),
        SocketState::Smc | SocketState::Tcp | SocketState::Failed => {}
    }
    // Without free descriptors for a pair the connection stays with the library, unusable by the
    // program where the library cannot follow.
    let is_smc = socket.state() == SocketState::Smc;
    is_smc.then(|| relay::hand_over::hand_over(descriptor, is_temporary)).flatten()
}

/// Decides a connection for TCP, unless a handshake has begun and may end with SMC.
fn decide(descriptor: &DescriptorRef, socket: &StreamSocket, fd: c_int) {
    let stays_on_tcp = socket.decision.forbid_proposal();
    if stays_on_tcp && socket.role() == SocketRole::Client {
        // The handshake's thread proposes nothing, so the program's bytes may go at once: after earlier
        // bytes of the program. And after a Decline, if the server awaits one.
        if socket.undecided.has_early() || crate::sys::is_writable(fd) {
            waiting::watch(descriptor);
            let _ = socket.decision.wait(HANDSHAKE_TIMEOUT);
        }
        return;
    }
    if socket.role() == SocketRole::Client && relay::hand_over::hand_over_undecided(descriptor) {
        return;
    }
    // A server takes a Proposal out of the stream and declines the Proposal. The program does not wait
    // for a silent client.
    socket.undecided.note_write();
    if resolve(descriptor, fd, Wait::Block) == Selected::Pending {
        waiting::watch(descriptor);
        let _ = socket.decision.wait(HANDSHAKE_TIMEOUT);
    }
}

/// Finishes the library's work on descriptors while their entries exist. May wait.
pub(crate) fn before_close(first: c_int, last: c_int) {
    for fd in first.max(0)..=last.min(DESCRIPTORS.highest()) {
        if let Some(descriptor) = DESCRIPTORS.get(fd)
            && descriptor.handles() == 1
            && !fork::shares_memory()
        {
            handshake::before_close(&descriptor, fd, holders::is_elsewhere);
        }
    }
}

/// Closes descriptors by `native`, with the library's work before and afterwards.
pub(crate) fn close<T>(first: c_int, last: c_int, native: impl FnOnce() -> T) -> T {
    before_close(first, last);
    let numbers = descriptors::lock_numbers(first, last);
    let closed = descriptors::close(first, last);
    // The kernel may wait for the peer of a TCP socket, without holding up other threads.
    let numbers = numbers.filter(|_| descriptors::may_be_replaced(&closed));
    let result = native();
    drop(numbers);
    drop(closed);
    result
}

/// Closes all connections at the end of the program, as the kernel would, and waits for all work due
/// before the end of the process.
pub(crate) fn close_all() {
    // Until the end of the process.
    let mut pair = ManuallyDrop::new(EndPair::default());
    for fd in 0..=DESCRIPTORS.highest() {
        let look = |socket: &StreamSocket| {
            socket.smc().into_iter().for_each(SmcStream::linger_no_more);
            socket.state()
        };
        let state = DESCRIPTORS.get(fd).and_then(|found| found.stream().map(look));
        match state {
            None => {}
            Some(SocketState::Undecided | SocketState::Deciding) => end(fd, false, &mut pair),
            Some(SocketState::Smc) => end(fd, true, &mut pair),
            // The relay then sees the end of the program's data.
            Some(SocketState::Relayed) => close(fd, fd, || {
                let _ = raw::close(fd);
            }),
            Some(_) => close(fd, fd, || ()),
        }
    }
    leave_closed();
    waiting::finish(false);
}

/// Closes a connection at the end of the program. Until the process is gone, other threads, and
/// destructors in this thread, may still use the number. Their bytes would be in the middle of a
/// handshake, or beside SMC. From here on nothing reaches the peer by the number.
fn end(fd: c_int, is_smc: bool, pair: &mut EndPair) {
    before_close(fd, fd);
    let pair = pair.of(fd);
    let numbers = descriptors::lock_numbers(fd, fd);
    // Before the entry is gone: a call without an entry goes to the kernel.
    if let Some(pair) = pair {
        cut_off(fd, pair, is_smc);
    }
    let closed = descriptors::close(fd, fd);
    drop(numbers);
    drop(closed);
}

/// Waits until send queues are empty, for at most `limit`. Without `all`, only for queues that a keeper
/// cannot empty.
pub(crate) fn await_sent(all: bool, limit: Duration) {
    let begun = Instant::now();
    let is_unsent = || {
        if let Some(open) = session::opened() {
            open.stack().check_closed();
        }
        let [inheritable, others] = SmcStream::any_has_unsent_bytes();
        others || all && inheritable
    };
    while is_unsent() && begun.elapsed() < limit {
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Gives relays to closed connections still waiting for their server with bytes of the program: a
/// keeper continues these.
pub(crate) fn leave_closed() {
    for (descriptor, tcp) in waiting::written_clients() {
        relay::hand_over::hand_over_closed(descriptor, tcp);
    }
}

/// Leaves all connections inherited by the next executed program to the kernel. `named`: whether the
/// program gets a descriptor in spite of close-on-exec. `has_library`: the program can decide an unused
/// connection.
pub(crate) fn leave_inherited(named: impl Fn(c_int) -> bool, has_library: bool) {
    for fd in 0..=DESCRIPTORS.highest() {
        if !DESCRIPTORS.has(fd) {
            continue;
        }
        let Some(descriptor) = DESCRIPTORS.get(fd) else { continue };
        let is_left = |socket: &&StreamSocket| {
            let is_unused = socket.state() == SocketState::Undecided;
            relay::hand_over::must_be_left(socket) || is_unused && !has_library
        };
        let Some(socket) = descriptor.stream().filter(is_left) else { continue };
        // Bytes waiting for the end of a handshake go out although the descriptor is closed.
        if named(fd) || stays_open(fd) || socket.undecided.has_early() {
            leave(descriptor, fd, true);
        }
    }
}

fn stays_open(fd: c_int) -> bool {
    raw::fcntl(fd, libc::F_GETFD, 0).is_ok_and(|flags| flags == 0)
}
