//! SMC connections that a child of a fork inherits.
//!
//! The process that opened the session of a connection owns the connection. Another process uses it
//! through a pair of Unix sockets, and a thread of the owner moves the bytes between the pair and
//! the connection. Before a fork the owner makes a pair for each SMC connection. In the child one
//! end of the pair replaces the descriptors of the connection, so the child can use it like any
//! socket.
//!
//! Most children never use the connection: they save a database, or execute a program. So the owner
//! moves nothing until the child asks for it, by a byte in a pipe (`socket/owner_pipe.rs`). From
//! then on the same end of the pair replaces the owner's descriptors as well. Processes that take
//! turns on a connection thus find all its bytes in one place.
//!
//! The connection ends with its owner. Most servers fork first and use the connection in the child
//! only; there the child does the handshake in a session of its own (see `selection`).
//!
//! Rules kept here: SOCK-21.

use std::ffi::c_int;
use std::io::Read;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Mutex;

use guest_driver::{ChangeToken, SmcStream};
use rustix::event::{PollFd, PollFlags};

use crate::socket::stream::{SocketState, StreamSocket};
use crate::socket::table::{DESCRIPTORS, Descriptor, DescriptorRef};
use crate::socket::{owner_pipe, registrations};
use crate::sys::{STACK, lock, owned, raw};

/// Number of connections that a child inherits at most. In a program with more, the child's calls
/// on the others fail.
const MAX_CONNECTIONS: usize = 64;
/// Lowest number of the library's own descriptors, if the limit of the process allows.
const HIGH_FDS: c_int = 700;

/// A connection that the child may ask for.
struct RelayOffer {
    descriptor: DescriptorRef,
    /// The program's descriptors of the connection.
    fds: Vec<c_int>,
    /// The end of the pair at which the owner's threads read and write.
    owner_end: OwnedFd,
    /// The end that replaces the program's descriptors.
    program_end: OwnedFd,
    /// Whether the kernel closes all the descriptors when the child executes a program.
    cloexec: bool,
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

/// Moves a descriptor to a high number, out of the program's way.
fn high(fd: OwnedFd) -> OwnedFd {
    match raw::fcntl(fd.as_raw_fd(), libc::F_DUPFD_CLOEXEC, HIGH_FDS) {
        Ok(moved) => owned(moved as c_int),
        Err(_) => fd,
    }
}

fn pipe() -> Option<(OwnedFd, OwnedFd)> {
    let (reader, writer) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).ok()?;
    Some((high(reader), high(writer)))
}

fn offer(descriptor: &DescriptorRef, fd: c_int) -> Option<RelayOffer> {
    use rustix::net::{AddressFamily, SocketFlags, SocketType};
    let kind = (AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC);
    let (owner_end, program_end) = rustix::net::socketpair(kind.0, kind.1, kind.2, None).ok()?;
    let (owner_end, program_end) = (high(owner_end), high(program_end));
    Some(RelayOffer {
        descriptor: descriptor.clone(),
        fds: vec![fd],
        owner_end,
        program_end,
        cloexec: true,
    })
}

/// Prepares the offers, before a fork.
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
            && let Some(offer) = offer(&descriptor, fd)
        {
            list.push(RelayOffer { cloexec, ..offer });
        }
    }
    if list.is_empty() {
        return;
    }
    if let (Some(request), Some(lifetime)) = (pipe(), pipe()) {
        // A program that the child executes keeps this end open.
        let _ = raw::fcntl(lifetime.1.as_raw_fd(), libc::F_SETFD, 0);
        *lock(&PREPARED) = Some(RelayOffers { list, request, lifetime });
    }
}

/// Replaces the descriptors by ends of the pairs, after a fork, in the child.
pub(crate) fn in_child() {
    let Some(offers) = lock(&PREPARED).take() else { return };
    for offer in &offers.list {
        for &fd in &offer.fds {
            let flags = raw::fcntl(fd, libc::F_GETFL, 0).unwrap_or(0) as c_int;
            let cloexec = raw::fcntl(fd, libc::F_GETFD, 0).unwrap_or(0) as c_int;
            // The TCP socket goes on to provide names and options.
            let tcp_fd = raw::fcntl(fd, libc::F_DUPFD_CLOEXEC, HIGH_FDS);
            if let Some(socket) = offer.descriptor.stream() {
                socket.set_relayed(tcp_fd.map_or(-1, |fd| fd as c_int));
            }
            let flag = if cloexec != 0 { libc::O_CLOEXEC } else { 0 };
            let _ = raw::dup3(offer.program_end.as_raw_fd(), fd, flag);
            let _ = raw::fcntl(fd, libc::F_SETFL, flags);
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
    for offer in list {
        if !gone && (asked || !offer.cloexec) {
            start(offer);
        }
    }
}

/// Replaces the owner's descriptors by the pair, and starts the thread that forwards the bytes.
fn start(offer: RelayOffer) {
    let RelayOffer { descriptor, fds, owner_end, program_end, .. } = offer;
    let Some(socket) = descriptor.stream() else { return };
    for fd in
        fds.into_iter().filter(|fd| DESCRIPTORS.get(*fd).is_some_and(|now| now.is(&descriptor)))
    {
        let flags = raw::fcntl(fd, libc::F_GETFL, 0).unwrap_or(0) as c_int;
        let cloexec = raw::fcntl(fd, libc::F_GETFD, 0).unwrap_or(0) as c_int;
        let tcp_fd = raw::fcntl(fd, libc::F_DUPFD_CLOEXEC, HIGH_FDS).map_or(-1, |fd| fd as c_int);
        registrations::detach(socket);
        let flag = if cloexec != 0 { libc::O_CLOEXEC } else { 0 };
        let _ = raw::dup3(program_end.as_raw_fd(), fd, flag);
        let _ = raw::fcntl(fd, libc::F_SETFL, flags);
        drop(DESCRIPTORS.remove(fd));
        let relayed = StreamSocket::new(SocketState::Relayed, socket.role(), false);
        relayed.set_relayed(tcp_fd);
        relayed.request_owner_once();
        drop(DESCRIPTORS.install(fd, Descriptor::Stream(relayed)));
        registrations::attach_to_kernel(socket, fd);
    }
    drop(program_end);
    let _ =
        std::thread::Builder::new().name("smc-relay".into()).stack_size(STACK).spawn(move || {
            if let Some(stream) = descriptor.stream().and_then(StreamSocket::smc) {
                forward(&descriptor, stream, &owner_end);
            }
        });
}

/// Bytes that a thread forwards at a time.
const CHUNK: usize = 256 << 10;

/// Forwards bytes both ways until both have ended. Each direction has a thread. A thread that
/// blocks in the kernel makes one system call per chunk, which leaves the processor to the program.
fn forward(descriptor: &DescriptorRef, stream: &SmcStream, owner_end: &OwnedFd) {
    let (descriptor, inner) = (descriptor.clone(), owner_end.try_clone());
    let made = inner.and_then(|inner| {
        let thread = std::thread::Builder::new().name("smc-relay-in".into()).stack_size(STACK);
        thread.spawn(move || {
            if let Some(stream) = descriptor.stream().and_then(StreamSocket::smc) {
                forward_to_program(stream, &inner);
            }
        })
    });
    if made.is_ok() {
        forward_to_peer(stream, owner_end);
    }
    // Threads that wait for the peer would wait for ever now. A peer that has closed already does
    // not notice.
    let _ = stream.shutdown(std::net::Shutdown::Both);
}

/// Forwards from the program to the peer.
fn forward_to_peer(stream: &SmcStream, owner_end: &OwnedFd) {
    use rustix::net::{RecvFlags, Shutdown};
    let mut bytes = vec![0u8; CHUNK];
    loop {
        let n = match rustix::net::recv(owner_end, &mut bytes[..], RecvFlags::empty()) {
            Ok((n @ 1.., _)) => n,
            Err(rustix::io::Errno::INTR) => continue,
            Ok(_) | Err(_) => break,
        };
        if send_all(stream, bytes.get(..n).unwrap_or_default()).is_err() {
            // The program's writes fail from now on.
            let _ = rustix::net::shutdown(owner_end, Shutdown::Read);
            break;
        }
    }
    let _ = stream.shutdown(std::net::Shutdown::Write);
    await_hang_up(owner_end);
}

fn send_all(stream: &SmcStream, mut bytes: &[u8]) -> std::io::Result<()> {
    while !bytes.is_empty() {
        let token = stream.change_token();
        match stream.send(bytes) {
            Ok(n) => bytes = bytes.get(n..).unwrap_or_default(),
            Err(error) if would_block(&error) => wait(stream, token, true)?,
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Forwards from the peer to the program.
fn forward_to_program(stream: &SmcStream, owner_end: &OwnedFd) {
    use rustix::net::{SendFlags, Shutdown};
    let mut bytes = vec![0u8; CHUNK];
    loop {
        let token = stream.change_token();
        let mut rest = match (&mut &*stream).read(&mut bytes) {
            Ok(n @ 1..) => bytes.get(..n).unwrap_or_default(),
            Err(error) if would_block(&error) => match wait(stream, token, false) {
                Ok(()) => continue,
                Err(_) => break,
            },
            Ok(_) | Err(_) => break,
        };
        while !rest.is_empty() {
            match rustix::net::send(owner_end, rest, SendFlags::NOSIGNAL) {
                Ok(n) => rest = rest.get(n..).unwrap_or_default(),
                Err(rustix::io::Errno::INTR) => {}
                // The program has closed its end.
                Err(_) => return,
            }
        }
    }
    let _ = rustix::net::shutdown(owner_end, Shutdown::Write);
}

/// Waits until the stream has changed since `token`.
fn wait(stream: &SmcStream, token: ChangeToken, write: bool) -> std::io::Result<()> {
    match stream.wait_for_change(token, write, None) {
        Err(error) if !would_block(&error) => Err(error),
        _ => Ok(()),
    }
}

fn would_block(error: &std::io::Error) -> bool {
    matches!(error.kind(), std::io::ErrorKind::WouldBlock | std::io::ErrorKind::Interrupted)
}

/// Waits until both directions of the pair are shut down.
fn await_hang_up(owner_end: &OwnedFd) {
    let mut fds = [PollFd::new(owner_end, PollFlags::empty())];
    while rustix::event::poll(&mut fds, None) == Err(rustix::io::Errno::INTR) {}
}
