//! SMC connections that a child of a fork inherits.
//!
//! Before a fork the owner makes a pair for each SMC connection. In the child one end of the pair
//! replaces the descriptors of the connection.
//!
//! Most children never use the connection: they save a database, or execute a program. So the owner
//! forwards nothing until the child asks for it, by a byte in a pipe (`socket/owner_pipe.rs`), or
//! has executed a program that may use the connection. From then on the same end of the pair
//! replaces the owner's descriptors as well. Processes that take turns on a connection thus find
//! all its bytes in one place.
//!
//! Most servers fork first and use the connection in the child only; there the child does the
//! handshake in a session of its own (see `selection`).

use std::ffi::c_int;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Mutex;

use rustix::event::{PollFd, PollFlags};

use super::forward::{put_pair, replace, start};
use crate::socket::owner_pipe;
use crate::socket::pair::{SocketPair, high};
use crate::socket::stream::StreamSocket;
use crate::socket::table::{DESCRIPTORS, DescriptorRef, NUMBERS};
use crate::sys::{STACK, lock, raw};

/// Number of connections that a child inherits at most. In a program with more, the child's calls
/// on the others fail.
const MAX_CONNECTIONS: usize = 64;

/// A connection that the child may ask for.
struct RelayOffer {
    descriptor: DescriptorRef,
    /// The program's descriptors of the connection.
    fds: Vec<c_int>,
    pair: SocketPair,
    /// Whether the kernel closes all the descriptors when the child executes a program.
    cloexec: bool,
}

impl RelayOffer {
    fn new(descriptor: DescriptorRef, fd: c_int) -> Option<RelayOffer> {
        let pair = SocketPair::new(fd)?;
        if let Some(socket) = descriptor.stream() {
            socket.add_offer();
        }
        Some(RelayOffer { descriptor, fds: vec![fd], pair, cloexec: true })
    }

    /// The child will not ask, or is served from now on.
    fn end(self) -> (DescriptorRef, SocketPair) {
        if let Some(socket) = self.descriptor.stream() {
            socket.remove_offer();
        }
        (self.descriptor, self.pair)
    }
}

/// The connections that one fork offers to its child.
struct RelayOffers {
    list: Vec<RelayOffer>,
    /// The pipe at which the child asks. It ends when the child executes a program or exits.
    request: (OwnedFd, OwnedFd),
    /// A pipe that ends when the child exits.
    lifetime: (OwnedFd, OwnedFd),
}

/// The offers between the fork's first and last handler. Parent and child each take their copy.
static PREPARED: Mutex<Option<RelayOffers>> = Mutex::new(None);

fn pipe() -> Option<(OwnedFd, OwnedFd)> {
    let (reader, writer) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).ok()?;
    Some((high(reader), high(writer)))
}

/// Prepares the offers, before a fork. The caller holds [`NUMBERS`].
pub(crate) fn prepare() {
    let mut list: Vec<RelayOffer> = Vec::new();
    for fd in 0..=DESCRIPTORS.highest() {
        let Some(descriptor) = DESCRIPTORS.get(fd) else { continue };
        if descriptor.stream().and_then(StreamSocket::smc).is_none() {
            continue;
        }
        let cloexec = raw::fcntl(fd, libc::F_GETFD, 0).is_ok_and(|flags| flags != 0);
        let known = list.iter_mut().find(|offer| offer.descriptor.is(&descriptor));
        if let Some(offer) = known {
            offer.fds.push(fd);
            offer.cloexec &= cloexec;
        } else if list.len() < MAX_CONNECTIONS
            && let Some(offer) = RelayOffer::new(descriptor, fd)
        {
            list.push(RelayOffer { cloexec, ..offer });
        }
    }
    if list.is_empty() {
        return;
    }
    match (pipe(), pipe()) {
        (Some(request), Some(lifetime)) => {
            // A program that the child executes keeps this end open.
            let _ = raw::fcntl(lifetime.1.as_raw_fd(), libc::F_SETFD, 0);
            *lock(&PREPARED) = Some(RelayOffers { list, request, lifetime });
        }
        _ => list.into_iter().for_each(|offer| drop(offer.end())),
    }
}

/// Replaces the descriptors by ends of the pairs, after a fork, in the child.
pub(crate) fn in_child() {
    let Some(offers) = lock(&PREPARED).take() else { return };
    for offer in &offers.list {
        for &fd in &offer.fds {
            put_pair(fd, &offer.pair.program_end, |tcp_fd| {
                if let Some(socket) = offer.descriptor.stream() {
                    socket.set_relayed(tcp_fd);
                }
            });
        }
    }
    let RelayOffers { list, request, lifetime } = offers;
    owner_pipe::set(request.1);
    drop(request.0);
    drop(lifetime.0);
    // This end stays open as long as the process lives.
    std::mem::forget(lifetime.1);
    drop(list);
}

/// Starts a thread that waits for the child to ask, after a fork, in the owner.
pub(crate) fn in_parent() {
    let Some(RelayOffers { list, request, lifetime }) = lock(&PREPARED).take() else { return };
    drop((request.1, lifetime.1));
    let (request, lifetime) = (request.0, lifetime.0);
    raw::without_signals(|| {
        // If there can be no thread, the child's calls return an end of data.
        let _ = std::thread::Builder::new()
            .name("smc-relay".into())
            .stack_size(STACK)
            .spawn(move || await_child(list, &request, &lifetime));
    });
}

fn await_child(list: Vec<RelayOffer>, request: &OwnedFd, lifetime: &OwnedFd) {
    let mut word = [0u8; 1];
    let asked = loop {
        match rustix::io::read(request, &mut word) {
            Ok(n) => break n > 0,
            Err(rustix::io::Errno::INTR) => {}
            Err(_) => break false,
        }
    };
    // The pipe has ended: the child has exited, or has executed a program that may use the
    // connections.
    let mut alive = [PollFd::new(lifetime, PollFlags::IN)];
    let zero = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
    let gone = !asked && rustix::event::poll(&mut alive, Some(&zero)).is_ok_and(|n| n > 0);
    let _numbers = NUMBERS.lock();
    for offer in list {
        let serve = !gone && (asked || !offer.cloexec);
        if serve {
            // The parent may have closed its descriptors by now; the child's relay works all the
            // same.
            replace(&offer.descriptor, &offer.fds, &offer.pair.program_end);
        }
        let (descriptor, pair) = offer.end();
        if serve {
            start(descriptor, pair);
        }
    }
}
