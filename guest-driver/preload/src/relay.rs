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
//! servers do, have the child's own session instead (see `decide`).

use std::ffi::c_int;
use std::io::Read;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use guest_driver::SmcStream;
use rustix::event::{PollFd, PollFlags};

use crate::decide::STACK;
use crate::epoll::Sleeper;
use crate::registrations;
use crate::sock::{Socket, State};
use crate::sys::raw;
use crate::sys::table::{self, Ref};

/// Connections that one fork hands on at most. A program with more keeps them to itself: calls in the
/// child fail.
const MOST: usize = 64;
/// Descriptors of ours begin here if the limit allows.
const FLOOR: c_int = 700;

/// A connection that a child may ask for.
struct Offer {
    sock: Ref,
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
/// In a child: how to ask the owner.
static ASK: Mutex<Option<OwnedFd>> = Mutex::new(None);

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The same descriptor with a high number.
fn high(fd: OwnedFd) -> OwnedFd {
    match raw::fcntl(fd.as_raw_fd(), libc::F_DUPFD_CLOEXEC, FLOOR) {
        Ok(moved) => crate::sys::owned(moved as c_int),
        Err(_) => fd,
    }
}

fn pipe() -> Option<(OwnedFd, OwnedFd)> {
    let (reader, writer) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).ok()?;
    Some((high(reader), high(writer)))
}

fn offer(sock: &Ref, fd: c_int) -> Option<Offer> {
    use rustix::net::{AddressFamily, SocketFlags, SocketType};
    let kind = (AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC);
    let (near, far) = rustix::net::socketpair(kind.0, kind.1, kind.2, None).ok()?;
    let (near, far) = (high(near), high(far));
    Some(Offer { sock: sock.clone(), fds: vec![fd], near, far, cloexec: true })
}

/// Before a fork.
pub(crate) fn prepare() {
    let mut list: Vec<Offer> = Vec::new();
    for fd in 0..=table::highest() {
        let Some(sock) = table::get(fd) else { continue };
        if sock.stream().and_then(Socket::smc).is_none() {
            continue;
        }
        let cloexec = raw::fcntl(fd, libc::F_GETFD, 0).is_ok_and(|flags| flags != 0);
        let known = list.iter_mut().find(|offer| offer.sock.is(&sock));
        if let Some(offer) = known {
            offer.fds.push(fd);
            offer.cloexec &= cloexec;
        } else if list.len() < MOST
            && let Some(offer) = offer(&sock, fd)
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
            let names = raw::fcntl(fd, libc::F_DUPFD_CLOEXEC, FLOOR);
            if let Some(socket) = offer.sock.stream() {
                socket.relay(names.map_or(-1, |fd| fd as c_int));
            }
            let flag = if cloexec != 0 { libc::O_CLOEXEC } else { 0 };
            let _ = raw::dup3(offer.far.as_raw_fd(), fd, flag);
            let _ = raw::fcntl(fd, libc::F_SETFL, flags);
        }
    }
    let Offers { list, ask, life } = offers;
    *lock(&ASK) = Some(ask.1);
    drop(ask.0);
    drop(life.0);
    // Open as long as this process lives.
    std::mem::forget(life.1);
    drop(list);
}

/// In a child: the program uses an inherited connection.
pub(crate) fn ask(socket: &Socket) {
    if socket.ask_once()
        && let Some(ask) = &*lock(&ASK)
    {
        let _ = raw::write(ask.as_raw_fd(), b"!");
    }
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
    let Offer { sock, fds, near, far, .. } = offer;
    let Some(socket) = sock.stream() else { return };
    for fd in fds.into_iter().filter(|fd| table::get(*fd).is_some_and(|now| now.is(&sock))) {
        let flags = raw::fcntl(fd, libc::F_GETFL, 0).unwrap_or(0) as c_int;
        let cloexec = raw::fcntl(fd, libc::F_GETFD, 0).unwrap_or(0) as c_int;
        let names = raw::fcntl(fd, libc::F_DUPFD_CLOEXEC, FLOOR).map_or(-1, |fd| fd as c_int);
        registrations::leave(socket);
        let flag = if cloexec != 0 { libc::O_CLOEXEC } else { 0 };
        let _ = raw::dup3(far.as_raw_fd(), fd, flag);
        let _ = raw::fcntl(fd, libc::F_SETFL, flags);
        drop(table::remove(fd));
        let relayed = Socket::new(State::Relayed, socket.role(), false);
        relayed.relay(names);
        relayed.ask_once();
        drop(table::install(fd, crate::sock::Sock::Stream(relayed)));
        registrations::enter(socket, fd);
    }
    drop(far);
    let _ =
        std::thread::Builder::new().name("smc-relay".into()).stack_size(STACK).spawn(move || {
            if let Some(stream) = sock.stream().and_then(Socket::smc) {
                let _ = carry(stream, &near);
            }
        });
}

/// Bytes in one direction that wait for room.
struct Way {
    bytes: Vec<u8>,
    from: usize,
    to: usize,
    ended: bool,
}

impl Way {
    fn new() -> Way {
        Way { bytes: vec![0; 64 << 10], from: 0, to: 0, ended: false }
    }

    /// Reads if there is nothing. `true`: something happened.
    fn fill(&mut self, read: impl FnOnce(&mut [u8]) -> std::io::Result<usize>) -> bool {
        if self.ended || self.from < self.to {
            return false;
        }
        match read(&mut self.bytes) {
            Ok(n) => {
                (self.from, self.to, self.ended) = (0, n, n == 0);
                true
            }
            Err(error) if would_block(&error) => false,
            Err(_) => {
                self.ended = true;
                true
            }
        }
    }

    /// Writes what there is. `true`: something happened.
    fn empty(&mut self, write: impl FnOnce(&[u8]) -> std::io::Result<usize>) -> bool {
        let Some(bytes) = self.bytes.get(self.from..self.to).filter(|bytes| !bytes.is_empty())
        else {
            return false;
        };
        match write(bytes) {
            Ok(n) => {
                self.from += n;
                n > 0
            }
            Err(error) if would_block(&error) => false,
            Err(_) => {
                // Nobody reads any more.
                (self.from, self.ended) = (self.to, true);
                true
            }
        }
    }
}

fn would_block(error: &std::io::Error) -> bool {
    matches!(error.kind(), std::io::ErrorKind::WouldBlock | std::io::ErrorKind::Interrupted)
}

/// Carries bytes both ways until both have ended.
fn carry(stream: &SmcStream, near: &OwnedFd) -> std::io::Result<()> {
    use rustix::net::{RecvFlags, SendFlags, Shutdown};
    // The processor is for those whose bytes these are.
    let sleeper = Sleeper::that_spins(Duration::ZERO)?;
    stream.watch(&sleeper.watch);
    let edge = libc::EPOLLIN | libc::EPOLLOUT | libc::EPOLLRDHUP | libc::EPOLLET;
    let _ = sleeper.add(near.as_raw_fd(), edge as u32);
    let (mut out, mut back) = (Way::new(), Way::new());
    let (mut out_told, mut back_told) = (false, false);
    loop {
        let count = sleeper.watch.count();
        let seen = stream.seen();
        let mut busy = back.fill(|buf| (&mut &*stream).read(buf));
        busy |= back.empty(|buf| {
            Ok(rustix::net::send(near, buf, SendFlags::DONTWAIT | SendFlags::NOSIGNAL)?)
        });
        busy |= out.fill(|buf| Ok(rustix::net::recv(near, buf, RecvFlags::DONTWAIT)?.0));
        busy |= out.empty(|buf| stream.send(buf));
        if back.ended && back.from == back.to && !back_told {
            back_told = true;
            let _ = rustix::net::shutdown(near, Shutdown::Write);
        }
        if out.ended && out.from == out.to && !out_told {
            out_told = true;
            let mut hup = [PollFd::new(near, PollFlags::empty())];
            let zero = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
            let _ = rustix::event::poll(&mut hup, Some(&zero));
            if hup[0].revents().contains(PollFlags::HUP) && !back_told {
                break;
            }
            let _ = stream.shutdown(std::net::Shutdown::Write);
        }
        if out_told && back_told {
            break;
        }
        if busy || sleeper.watch.spin_until(|| stream.news_since(seen)) {
            continue;
        }
        if stream.arm() && !stream.news_since(seen) {
            let pause = Duration::from_secs(1);
            sleeper.watch.sleep(Some(stream), count, pause, sleeper.outer.as_fd());
        }
        stream.disarm();
        sleeper.watch.clear_bell();
        if out_told && hung_up(near) {
            break;
        }
    }
    stream.unwatch(&sleeper.watch);
    Ok(())
}

fn hung_up(near: &OwnedFd) -> bool {
    let mut fds = [PollFd::new(near, PollFlags::empty())];
    let zero = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
    let _ = rustix::event::poll(&mut fds, Some(&zero));
    fds[0].revents().contains(PollFlags::HUP)
}
