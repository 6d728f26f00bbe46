//! SMC connections that a child inherits.
//!
//! A connection belongs to the process that has its session. What another process does with it goes
//! through a pair of Unix sockets and a thread of the owner's, which moves the bytes. Before a fork,
//! each SMC connection gets a pair; in the child, the descriptors of the connection become one end of
//! it, which the kernel lets it use like any socket. Most children never do (they save a database, or
//! execute a program), so nothing is moved until a child asks for it, by a byte in a pipe. From then on
//! the owner's descriptors are that same end, too: processes that take turns on a connection find
//! all its bytes in one place, whoever reads them.
//!
//! The connection ends with its owner. Programs that fork first and use connections then, as most
//! servers do, have the child's own session instead (see `selection`).

use std::ffi::c_int;
use std::io::Read;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Mutex;

use guest_driver::{Seen, SmcStream};
use rustix::event::{PollFd, PollFlags};

use crate::socket::stream::{Socket, State};
use crate::socket::table::{DESCRIPTORS, Descriptor, DescriptorRef};
use crate::socket::{owner_pipe, registrations};
use crate::sys::{STACK, lock, owned, raw};

/// Connections that one fork hands on at most. A program with more keeps them to itself: calls in the
/// child fail.
const MAX_CONNECTIONS: usize = 64;
/// Descriptors of ours begin here if the limit allows.
const HIGH_FDS: c_int = 700;

/// A connection that a child may ask for.
struct Offer {
    descriptor: DescriptorRef,
    /// The program's descriptors of it.
    fds: Vec<c_int>,
    /// Ours, and the one that becomes the program's.
    near: OwnedFd,
    far: OwnedFd,
    /// All descriptors are closed when a program is executed.
    cloexec: bool,
}

/// What one fork hands on.
struct Offers {
    list: Vec<Offer>,
    /// The child asks here; ends when it executes a program or exits.
    ask: (OwnedFd, OwnedFd),
    /// Ends when it exits.
    life: (OwnedFd, OwnedFd),
}

/// Made before a fork, taken by both sides after it.
static PREPARED: Mutex<Option<Offers>> = Mutex::new(None);
/// The same descriptor with a high number.
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

fn offer(descriptor: &DescriptorRef, fd: c_int) -> Option<Offer> {
    use rustix::net::{AddressFamily, SocketFlags, SocketType};
    let kind = (AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC);
    let (near, far) = rustix::net::socketpair(kind.0, kind.1, kind.2, None).ok()?;
    let (near, far) = (high(near), high(far));
    Some(Offer { descriptor: descriptor.clone(), fds: vec![fd], near, far, cloexec: true })
}

/// Before a fork.
pub(crate) fn prepare() {
    let mut list: Vec<Offer> = Vec::new();
    for fd in 0..=DESCRIPTORS.highest() {
        let Some(descriptor) = DESCRIPTORS.get(fd) else { continue };
        if descriptor.stream().and_then(Socket::smc).is_none() {
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
            list.push(Offer { cloexec, ..offer });
        }
    }
    if list.is_empty() {
        return;
    }
    if let (Some(ask), Some(life)) = (pipe(), pipe()) {
        // Inherited by programs that the child executes.
        let _ = raw::fcntl(life.1.as_raw_fd(), libc::F_SETFD, 0);
        *lock(&PREPARED) = Some(Offers { list, ask, life });
    }
}

/// After a fork, in the child: descriptors become ends of pairs.
pub(crate) fn in_child() {
    let Some(offers) = lock(&PREPARED).take() else { return };
    for offer in &offers.list {
        for &fd in &offer.fds {
            let flags = raw::fcntl(fd, libc::F_GETFL, 0).unwrap_or(0) as c_int;
            let cloexec = raw::fcntl(fd, libc::F_GETFD, 0).unwrap_or(0) as c_int;
            // Names and options are those of the TCP connection.
            let tcp_fd = raw::fcntl(fd, libc::F_DUPFD_CLOEXEC, HIGH_FDS);
            if let Some(socket) = offer.descriptor.stream() {
                socket.set_relayed(tcp_fd.map_or(-1, |fd| fd as c_int));
            }
            let flag = if cloexec != 0 { libc::O_CLOEXEC } else { 0 };
            let _ = raw::dup3(offer.far.as_raw_fd(), fd, flag);
            let _ = raw::fcntl(fd, libc::F_SETFL, flags);
        }
    }
    let Offers { list, ask, life } = offers;
    owner_pipe::set(ask.1);
    drop(ask.0);
    drop(life.0);
    // Open as long as this process lives.
    std::mem::forget(life.1);
    drop(list);
}

/// After a fork, in the owner: a thread waits for the child to ask.
pub(crate) fn in_parent() {
    let Some(Offers { list, ask, life }) = lock(&PREPARED).take() else { return };
    drop((ask.1, life.1));
    let (ask, life) = (ask.0, life.0);
    raw::without_signals(|| {
        // Without a thread the child's calls end with an end of data.
        let _ = std::thread::Builder::new()
            .name("smc-relay".into())
            .stack_size(STACK)
            .spawn(move || await_child(list, &ask, &life));
    });
}

fn await_child(list: Vec<Offer>, ask: &OwnedFd, life: &OwnedFd) {
    let mut word = [0u8; 1];
    let asked = loop {
        match rustix::io::read(ask, &mut word) {
            Ok(n) => break n > 0,
            Err(rustix::io::Errno::INTR) => {}
            Err(_) => break false,
        }
    };
    // It has executed a program that may use what it inherited, or it is gone.
    let mut alive = [PollFd::new(life, PollFlags::IN)];
    let zero = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
    let gone = !asked && rustix::event::poll(&mut alive, Some(&zero)).is_ok_and(|n| n > 0);
    for offer in list {
        if !gone && (asked || !offer.cloexec) {
            start(offer);
        }
    }
}

/// Moves the owner's descriptors to the pair, and the connection to a thread.
fn start(offer: Offer) {
    let Offer { descriptor, fds, near, far, .. } = offer;
    let Some(socket) = descriptor.stream() else { return };
    for fd in
        fds.into_iter().filter(|fd| DESCRIPTORS.get(*fd).is_some_and(|now| now.is(&descriptor)))
    {
        let flags = raw::fcntl(fd, libc::F_GETFL, 0).unwrap_or(0) as c_int;
        let cloexec = raw::fcntl(fd, libc::F_GETFD, 0).unwrap_or(0) as c_int;
        let tcp_fd = raw::fcntl(fd, libc::F_DUPFD_CLOEXEC, HIGH_FDS).map_or(-1, |fd| fd as c_int);
        registrations::detach(socket);
        let flag = if cloexec != 0 { libc::O_CLOEXEC } else { 0 };
        let _ = raw::dup3(far.as_raw_fd(), fd, flag);
        let _ = raw::fcntl(fd, libc::F_SETFL, flags);
        drop(DESCRIPTORS.remove(fd));
        let relayed = Socket::new(State::Relayed, socket.role(), false);
        relayed.set_relayed(tcp_fd);
        relayed.request_owner_once();
        drop(DESCRIPTORS.install(fd, Descriptor::Stream(relayed)));
        registrations::attach_to_kernel(socket, fd);
    }
    drop(far);
    let _ =
        std::thread::Builder::new().name("smc-relay".into()).stack_size(STACK).spawn(move || {
            if let Some(stream) = descriptor.stream().and_then(Socket::smc) {
                forward(&descriptor, stream, &near);
            }
        });
}

/// Bytes that are moved at a time.
const CHUNK: usize = 256 << 10;

/// Carries bytes both ways until both have ended. Each direction has a thread, because one that blocks
/// in the kernel for what it carries makes one system call for it; the processor is for those whose
/// bytes these are.
fn forward(descriptor: &DescriptorRef, stream: &SmcStream, near: &OwnedFd) {
    let (descriptor, inner) = (descriptor.clone(), near.try_clone());
    let made = inner.and_then(|inner| {
        let thread = std::thread::Builder::new().name("smc-relay-in".into()).stack_size(STACK);
        thread.spawn(move || {
            if let Some(stream) = descriptor.stream().and_then(Socket::smc) {
                forward_to_program(stream, &inner);
            }
        })
    });
    if made.is_ok() {
        forward_to_peer(stream, near);
    }
    // Whoever waits for the peer waits in vain now; who has closed already is not disturbed.
    let _ = stream.shutdown(std::net::Shutdown::Both);
}

/// From the program to the peer.
fn forward_to_peer(stream: &SmcStream, near: &OwnedFd) {
    use rustix::net::{RecvFlags, Shutdown};
    let mut bytes = vec![0u8; CHUNK];
    loop {
        let n = match rustix::net::recv(near, &mut bytes[..], RecvFlags::empty()) {
            Ok((n @ 1.., _)) => n,
            Err(rustix::io::Errno::INTR) => continue,
            Ok(_) | Err(_) => break,
        };
        if send_all(stream, bytes.get(..n).unwrap_or_default()).is_err() {
            // Writers are to hear of it.
            let _ = rustix::net::shutdown(near, Shutdown::Read);
            break;
        }
    }
    let _ = stream.shutdown(std::net::Shutdown::Write);
    await_hang_up(near);
}

fn send_all(stream: &SmcStream, mut bytes: &[u8]) -> std::io::Result<()> {
    while !bytes.is_empty() {
        let seen = stream.seen();
        match stream.send(bytes) {
            Ok(n) => bytes = bytes.get(n..).unwrap_or_default(),
            Err(error) if would_block(&error) => wait(stream, seen, true)?,
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// From the peer to the program.
fn forward_to_program(stream: &SmcStream, near: &OwnedFd) {
    use rustix::net::{SendFlags, Shutdown};
    let mut bytes = vec![0u8; CHUNK];
    loop {
        let seen = stream.seen();
        let mut rest = match (&mut &*stream).read(&mut bytes) {
            Ok(n @ 1..) => bytes.get(..n).unwrap_or_default(),
            Err(error) if would_block(&error) => match wait(stream, seen, false) {
                Ok(()) => continue,
                Err(_) => break,
            },
            Ok(_) | Err(_) => break,
        };
        while !rest.is_empty() {
            match rustix::net::send(near, rest, SendFlags::NOSIGNAL) {
                Ok(n) => rest = rest.get(n..).unwrap_or_default(),
                Err(rustix::io::Errno::INTR) => {}
                // Nobody reads any more.
                Err(_) => return,
            }
        }
    }
    let _ = rustix::net::shutdown(near, Shutdown::Write);
}

/// Waits for a change since `seen`.
fn wait(stream: &SmcStream, seen: Seen, write: bool) -> std::io::Result<()> {
    match stream.wait_for_news(seen, write, None) {
        Err(error) if !would_block(&error) => Err(error),
        _ => Ok(()),
    }
}

fn would_block(error: &std::io::Error) -> bool {
    matches!(error.kind(), std::io::ErrorKind::WouldBlock | std::io::ErrorKind::Interrupted)
}

/// Waits until nothing goes either way any more.
fn await_hang_up(near: &OwnedFd) {
    let mut fds = [PollFd::new(near, PollFlags::empty())];
    while rustix::event::poll(&mut fds, None) == Err(rustix::io::Errno::INTR) {}
}
