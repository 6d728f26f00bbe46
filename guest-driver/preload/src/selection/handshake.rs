//! SMC or TCP: who finds out, and when.
//!
//! A connection that was accepted, or that a program is making, is *undecided* until a call needs to
//! know. So a server that forks for each client leaves the handshake to the child, which opens a
//! session of its own; and a program that accepts from an event loop finds the client's message
//! waiting, so that the handshake is over in a moment. What takes longer goes on in a thread of its
//! own, and the program is told when it is over.

use std::ffi::c_int;
use std::io;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use guest_driver::{Facts, Fallback, Greeting, SmcStream};
use smc_core::handshake::{DeclineCode, FallbackReason};
use smc_core::wire::clc::{Guess, looks_like_opening};

use crate::selection::declined_servers;
use crate::selection::option::Proposal;
use crate::selection::session;
use crate::socket::registrations;
use crate::socket::stream::{Role, Socket, State};
use crate::sys::raw::{self, Errno};
use crate::sys::table::{self, Ref};
use crate::{relay, status};

/// What carries a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// SMC.
    Smc,
    /// TCP, or it is not connected: the kernel knows.
    Tcp,
    /// Nothing any more.
    Broken,
    /// It is not known yet.
    NotYet,
}

/// How long a call may wait for a verdict.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Patience {
    /// As long as it takes.
    Forever,
    /// So long that a peer that is awake can answer.
    Moment,
}

/// How long a moment is.
const MOMENT: Duration = Duration::from_millis(2);
/// How often a thread that waits for a verdict looks by itself.
const LOOK: Duration = Duration::from_secs(1);
/// A client that says nothing for so long has nothing to do with SMC, even if its server only listens.
const SILENCE: Duration = Duration::from_secs(5);
/// How often it is looked whether the program is to speak first, or has closed the connection.
const GLANCE: Duration = Duration::from_millis(50);
/// Descriptors of ours begin here if the limit allows, out of the way of the program's.
const FLOOR: [c_int; 3] = [60_000, 4_000, 700];

/// Finds out what carries a connection.
pub(crate) fn settle(sock: &Ref, fd: c_int, patience: Patience) -> Verdict {
    let Some(socket) = sock.stream() else { return Verdict::Tcp };
    let mut waited = false;
    loop {
        match socket.state() {
            State::Fresh | State::Tcp => return Verdict::Tcp,
            State::Relayed => {
                relay::ask(socket);
                return Verdict::Tcp;
            }
            State::Smc => return Verdict::Smc,
            State::Broken => return Verdict::Broken,
            State::Undecided => {
                if socket.advance(State::Undecided, State::Deciding) {
                    raw::without_signals(|| begin(sock, socket, fd, patience));
                }
            }
            State::Deciding => match patience {
                Patience::Forever => socket.await_decision(LOOK),
                Patience::Moment if waited => return Verdict::NotYet,
                Patience::Moment => {
                    waited = true;
                    socket.await_decision(MOMENT);
                }
            },
        }
    }
}

/// Begins the handshake, if nobody has, and does not wait.
pub(crate) fn start(sock: &Ref, fd: c_int) {
    if let Some(socket) = sock.stream()
        && socket.advance(State::Undecided, State::Deciding)
    {
        raw::without_signals(|| begin(sock, socket, fd, Patience::Moment));
    }
}

/// Finds connections that the program had before this library was in it: a server that executes a
/// program for each client leaves the handshake to that program.
pub(crate) fn inherit() {
    let Ok(fds) = std::fs::read_dir("/proc/self/fd") else { return };
    let fds: Vec<c_int> =
        fds.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect();
    let mut known: Vec<(u64, c_int)> = Vec::new();
    for fd in fds {
        if raw::option(fd, libc::SOL_SOCKET, libc::SO_PROTOCOL) != Ok(libc::IPPROTO_TCP) {
            continue;
        }
        if raw::option(fd, libc::SOL_SOCKET, libc::SO_ACCEPTCONN) != Ok(0) {
            // Best effort: one that listens already takes a recent kernel, and rights.
            crate::selection::option::listen(fd);
            continue;
        }
        // Standard input and output may be the same connection.
        let cookie = rustix::net::sockopt::socket_cookie(crate::sys::borrowed(fd)).unwrap_or(0);
        if let Some((_, first)) = known.iter().find(|(known, _)| *known == cookie) {
            if let Some(sock) = table::get(*first) {
                table::share(&sock, fd);
            }
            continue;
        }
        known.push((cookie, fd));
        let first = opening(crate::sys::borrowed(fd));
        let untouched = || raw::has_moved_bytes(fd) == Some(false);
        if first == Opening::Smc || first == Opening::Silence && untouched() {
            let flags = raw::fcntl(fd, libc::F_GETFL, 0).unwrap_or(0) as c_int;
            crate::selection::establish::accepted(fd, flags & libc::O_NONBLOCK != 0);
        }
    }
}

/// A second descriptor of the TCP connection, out of the program's way.
fn second(fd: c_int) -> Result<OwnedFd, Errno> {
    let tried = FLOOR.iter().find_map(|&floor| raw::fcntl(fd, libc::F_DUPFD_CLOEXEC, floor).ok());
    let copy = match tried {
        Some(copy) => copy,
        None => raw::fcntl(fd, libc::F_DUPFD_CLOEXEC, 3)?,
    };
    Ok(crate::sys::owned(copy as c_int))
}

fn begin(sock: &Ref, socket: &Socket, fd: c_int, patience: Patience) {
    let Ok(tcp) = second(fd) else {
        // Without descriptors there is no SMC; a client's Proposal could not even be declined.
        return finish(sock, fd, Err(io::Error::from_raw_os_error(libc::EMFILE)));
    };
    let tcp = TcpStream::from(tcp);
    if socket.role() == Role::Client {
        if is_connected(&tcp)
            && let Some(Err(why)) = lock(&socket.ask).map(|ask| ask.connected(&tcp))
        {
            status::stays(&tcp, why);
            return finish_tcp(sock, fd);
        }
        return hand_over(sock, fd, move |sock, fd| propose(sock, fd, tcp));
    }
    match patience {
        Patience::Forever => {
            let limit = Some(raw::timeout_of(fd, libc::SO_RCVTIMEO)).filter(|limit| *limit > 0);
            let limit = limit.map_or(SILENCE, Duration::from_micros);
            let opening = await_opening(sock, socket, &tcp, limit);
            answer(sock, fd, tcp, opening, true);
        }
        // The client's message may be there already, or come at any moment.
        Patience::Moment => match opening(&tcp) {
            Opening::Silence => hand_over(sock, fd, move |sock, fd| {
                let Some(socket) = sock.stream() else { return };
                let opening = await_opening(sock, socket, &tcp, SILENCE);
                answer(sock, fd, tcp, opening, true);
            }),
            opening => answer(sock, fd, tcp, opening, false),
        },
    }
}

/// Whether TCP's handshake is over.
fn is_connected(tcp: &TcpStream) -> bool {
    use rustix::event::{PollFd, PollFlags};
    let mut fds = [PollFd::new(tcp, PollFlags::OUT)];
    let zero = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
    rustix::event::poll(&mut fds, Some(&zero)).is_ok()
        && fds[0].revents().contains(PollFlags::OUT)
        && !fds[0].revents().intersects(PollFlags::ERR | PollFlags::HUP)
}

/// What a client said first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Opening {
    /// Nothing, or not enough to know.
    Silence,
    /// A message of SMC.
    Smc,
    /// Something else.
    Other,
}

/// Looks at a client's first bytes without taking them. An ordinary client costs no more than that:
/// no device is opened for it.
fn opening(tcp: impl AsFd) -> Opening {
    use rustix::net::RecvFlags;
    let mut bytes = [0u8; 8];
    match rustix::net::recv(tcp, &mut bytes[..], RecvFlags::PEEK | RecvFlags::DONTWAIT) {
        Err(rustix::io::Errno::WOULDBLOCK | rustix::io::Errno::INTR) => Opening::Silence,
        Err(_) | Ok((0, _)) => Opening::Other,
        Ok((n, _)) => match looks_like_opening(bytes.get(..n).unwrap_or_default()) {
            Guess::Yes => Opening::Smc,
            Guess::NeedMore => Opening::Silence,
            Guess::No => Opening::Other,
        },
    }
}

/// Waits for a client's first bytes. One that stays silent is taken for one without SMC: after a short
/// while if the program is to speak first, else not before `limit`. For a Proposal that comes later would
/// be data of the program.
fn await_opening(sock: &Ref, socket: &Socket, tcp: &TcpStream, limit: Duration) -> Opening {
    let begun = Instant::now();
    let limit = limit.max(socket.patience());
    loop {
        let found = opening(tcp);
        let left = if socket.speaks() { socket.patience() } else { limit };
        let left = left.saturating_sub(begun.elapsed());
        if found != Opening::Silence || left.is_zero() || sock.handles() == 0 {
            return found;
        }
        nap(&[Some(tcp.as_fd())], left.min(GLANCE));
    }
}

/// Sleeps until one of the descriptors is readable.
fn nap(fds: &[Option<BorrowedFd<'_>>], timeout: Duration) {
    use rustix::event::{PollFd, PollFlags};
    let mut fds: Vec<_> = fds.iter().flatten().map(|fd| PollFd::new(fd, PollFlags::IN)).collect();
    let timeout = rustix::event::Timespec {
        tv_sec: timeout.as_secs() as i64,
        tv_nsec: i64::from(timeout.subsec_nanos()),
    };
    let _ = rustix::event::poll(&mut fds, Some(&timeout));
}

/// The server's half, after the client's first bytes.
fn answer(sock: &Ref, fd: c_int, tcp: TcpStream, opening: Opening, patient: bool) {
    if opening != Opening::Smc {
        status::plain(&tcp);
        return finish_tcp(sock, fd);
    }
    let Some(session) = session::for_client() else { return finish_tcp(sock, fd) };
    let mut greeting = session.greet(tcp);
    let result = if patient { attend(&mut greeting).map(Some) } else { greeting.advance_soon() };
    match result {
        Ok(Some(stream)) => finish(sock, fd, Ok(stream)),
        Err(error) => finish(sock, fd, Err(error)),
        Ok(None) => hand_over(sock, fd, move |sock, fd| {
            let result = attend(&mut greeting);
            finish(sock, fd, result);
        }),
    }
}

/// Stack of the library's own threads, bytes. The first of them opens the device; without
/// optimisation its queues go through many large frames.
pub(crate) const STACK: usize = 8 << 20;

/// Goes on in a thread of its own.
fn hand_over(sock: &Ref, fd: c_int, job: impl FnOnce(&Ref, c_int) + Send + 'static) {
    let theirs = sock.clone();
    let made = std::thread::Builder::new()
        .name("smc-handshake".into())
        .stack_size(STACK)
        .spawn(move || job(&theirs, fd));
    if let Err(error) = made {
        finish(sock, fd, Err(error));
    }
}

/// The client's half; waits for TCP first if need be.
fn propose(sock: &Ref, fd: c_int, tcp: TcpStream) {
    use rustix::event::{PollFd, PollFlags};
    loop {
        let mut fds = [PollFd::new(&tcp, PollFlags::OUT)];
        match rustix::event::poll(&mut fds, None) {
            Err(rustix::io::Errno::INTR) => continue,
            Ok(_) if !fds[0].revents().intersects(PollFlags::ERR | PollFlags::HUP) => break,
            // The kernel has the error, and tells it to the program.
            _ => return finish_tcp(sock, fd),
        }
    }
    if connects_to_itself(&tcp) {
        return finish_tcp(sock, fd);
    }
    let ask = sock.stream().and_then(|socket| *lock(&socket.ask));
    let proposal = match ask.map(|ask| ask.connected(&tcp)) {
        Some(Ok(proposal)) => proposal,
        Some(Err(why)) => {
            status::stays(&tcp, why);
            return finish_tcp(sock, fd);
        }
        None => Proposal { awaited: false },
    };
    let Some(session) = session::current() else { return finish_tcp(sock, fd) };
    finish(sock, fd, session.propose(tcp, proposal));
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether the server is this very process: it would have to accept while it connects.
fn connects_to_itself(tcp: &TcpStream) -> bool {
    let (Ok(local), Ok(peer)) = (tcp.local_addr(), tcp.peer_addr()) else { return true };
    local.ip() == peer.ip() && crate::selection::establish::listens_on(peer.port())
}

/// Waits for the client's messages.
fn attend(greeting: &mut Greeting) -> io::Result<SmcStream> {
    if let Some(stream) = greeting.advance_soon()? {
        return Ok(stream);
    }
    loop {
        if let Some(stream) = greeting.advance()? {
            return Ok(stream);
        }
        let left = greeting.deadline().map(|end| end.saturating_duration_since(Instant::now()));
        nap(&greeting.fds(), left.unwrap_or_default() + Duration::from_millis(1));
    }
}

fn finish_tcp(sock: &Ref, fd: c_int) {
    let Some(socket) = sock.stream() else { return };
    if socket.role() == Role::Client && table::get(fd).is_some_and(|now| now.is(sock)) {
        crate::selection::establish::acknowledge_lazily(fd, false);
    }
    registrations::moved(sock, socket, State::Tcp);
    socket.decide(State::Tcp);
    table::remove_if(fd, sock);
}

/// Notes how a server has answered a Proposal.
fn remember(socket: impl AsFd, facts: &Facts) {
    let server = rustix::net::getpeername(socket).ok().flatten();
    let Some(server) = server.and_then(|name| SocketAddr::try_from(name).ok()) else { return };
    match facts {
        Facts::Tcp(Fallback::Handshake(FallbackReason::DeclinedByPeer(peer)))
            if peer.code == DeclineCode::NoIsm2Support =>
        {
            declined_servers::declined(&server);
        }
        Facts::Tcp(_) => {}
        _ => declined_servers::accepted(&server),
    }
}

fn finish(sock: &Ref, fd: c_int, result: io::Result<SmcStream>) {
    let Some(socket) = sock.stream() else { return };
    let role = match socket.role() {
        Role::Client => "client",
        Role::Server => "server",
    };
    match result {
        Ok(stream) => {
            let facts = stream.facts();
            status::decided(crate::sys::borrowed(fd), role, &facts);
            if socket.role() == Role::Client {
                remember(crate::sys::borrowed(fd), &facts);
            }
            if matches!(facts, Facts::Tcp(_)) {
                drop(stream);
                return finish_tcp(sock, fd);
            }
            // Waiting is this library's affair.
            let _ = stream.set_nonblocking(true);
            socket.set_timeouts(
                Some(raw::timeout_of(fd, libc::SO_RCVTIMEO)),
                Some(raw::timeout_of(fd, libc::SO_SNDTIMEO)),
            );
            if raw::option(fd, libc::SOL_SOCKET, libc::SO_OOBINLINE).is_ok_and(|on| on != 0) {
                let _ = stream.set_oob_inline(true);
            }
            socket.set_stream(stream);
            registrations::moved(sock, socket, State::Smc);
            socket.decide(State::Smc);
        }
        Err(error) => {
            status::broken(role, &error);
            socket.set_error(Errno::from(error).0);
            if table::get(fd).is_some_and(|now| now.is(sock)) {
                raw::disconnect(fd);
            }
            registrations::moved(sock, socket, State::Broken);
            socket.decide(State::Broken);
        }
    }
}
