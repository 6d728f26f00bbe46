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
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::event::{PollFd, PollFlags};

use super::forward::{put_pair, replace, start};
use crate::socket::owner_pipe;
use crate::socket::pair::{SocketPair, high};
use crate::socket::stream::StreamSocket;
use crate::socket::table::{DESCRIPTORS, DescriptorRef, NUMBERS};
use crate::sys::fork_lock::ForkMutex;
use crate::sys::{STACK, raw};

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
    /// The sockets at which the child asks. They end when the child executes a program or exits.
    request: (OwnedFd, OwnedFd),
    /// A pipe that ends when the child exits.
    lifetime: (OwnedFd, OwnedFd),
}

/// The offers between the fork's first and last handler. Parent and child each take their copy.
static PREPARED: ForkMutex<Option<RelayOffers>> = ForkMutex::new(None);

/// Offers that a child may still take up.
struct Outstanding {
    id: u64,
    list: Vec<RelayOffer>,
    lifetime: OwnedFd,
}

/// The offers to all children. Whoever changes the list holds [`NUMBERS`].
static OUTSTANDING: ForkMutex<Vec<Outstanding>> = ForkMutex::new(Vec::new());

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
    match (sockets(), pipe()) {
        (Some(request), Some(lifetime)) => {
            // A program that the child executes keeps this end open.
            let _ = raw::fcntl(lifetime.1.as_raw_fd(), libc::F_SETFD, 0);
            *PREPARED.lock() = Some(RelayOffers { list, request, lifetime });
        }
        _ => list.into_iter().for_each(|offer| drop(offer.end())),
    }
}

/// Replaces the descriptors by ends of the pairs, after a fork, in the child.
pub(crate) fn in_child() {
    // Offers to other children: who has the other ends must learn when the owner ends.
    drop(std::mem::take(&mut *OUTSTANDING.lock()));
    let Some(offers) = PREPARED.lock().take() else { return };
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
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let Some(RelayOffers { list, request, lifetime }) = PREPARED.lock().take() else { return };
    drop((request.1, lifetime.1));
    let (request, lifetime) = (request.0, lifetime.0);
    let id = NEXT.fetch_add(1, Ordering::Relaxed);
    OUTSTANDING.lock().push(Outstanding { id, list, lifetime });
    raw::without_signals(|| {
        // If there can be no thread, the child's calls return an end of data.
        let _ = std::thread::Builder::new()
            .name("smc-relay".into())
            .stack_size(STACK)
            .spawn(move || await_child(id, &request));
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
    let found = {
        let mut all = OUTSTANDING.lock();
        let at = all.iter().position(|offers| offers.id == id);
        at.map(|at| all.swap_remove(at))
    };
    if let Some(offers) = found {
        // The sockets have ended: the child has exited, or has executed a program that may use the
        // connections.
        let alive = asked || is_alive(&offers);
        settle(offers, |offer| alive && (asked || !offer.cloexec));
    }
}

/// Whether the child has not exited, nor has a program that it has executed.
fn is_alive(offers: &Outstanding) -> bool {
    let mut alive = [PollFd::new(&offers.lifetime, PollFlags::IN)];
    let zero = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
    !rustix::event::poll(&mut alive, Some(&zero)).is_ok_and(|n| n > 0)
}

/// Starts relays for the offers that are taken up, and ends the others. The caller holds
/// [`NUMBERS`].
fn settle(offers: Outstanding, is_taken: impl Fn(&RelayOffer) -> bool) {
    for offer in offers.list {
        let is_taken = is_taken(&offer);
        if is_taken {
            // The parent may have closed its descriptors by now; the child's relay works all the
            // same.
            replace(&offer.descriptor, &offer.fds, &offer.pair.program_end);
        }
        let (descriptor, pair) = offer.end();
        if is_taken {
            start(descriptor, pair);
        }
    }
}

/// Starts relays for all connections that living children may use, because this process is about to
/// end or to execute a program.
pub(crate) fn settle_all() {
    if OUTSTANDING.lock().is_empty() {
        return;
    }
    let _numbers = NUMBERS.lock();
    let all = std::mem::take(&mut *OUTSTANDING.lock());
    for offers in all {
        let alive = is_alive(&offers);
        settle(offers, |_| alive);
    }
}
