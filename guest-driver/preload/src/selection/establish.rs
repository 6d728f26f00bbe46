//! Sockets as they come to be: socket, connect, accept; and their options.

use std::ffi::c_int;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use crate::selection::handshake::{Patience, Verdict, settle};
use crate::selection::option;
use crate::selection::option::Reception;
use crate::selection::session;
use crate::socket::registrations;
use crate::socket::stream::{Role, Sock, Socket, State};
use crate::sys::raw::{self, Errno, Sys};
use crate::sys::table::{self, Ref};
use crate::{fork, status};

/// How long `connect` of a blocking socket waits for the server's program. If that takes longer the
/// connection stays undecided: TCP would have accepted it as well.
const CONNECT: Duration = Duration::from_millis(50);

/// Ports that this process listens on.
static LISTENING: Mutex<Vec<u16>> = Mutex::new(Vec::new());

/// Whether this process listens on a port.
pub(crate) fn listens_on(port: u16) -> bool {
    LISTENING.lock().unwrap_or_else(PoisonError::into_inner).contains(&port)
}

/// Whether sockets of this kind can be on SMC.
fn is_tcp(domain: c_int, kind: c_int, protocol: c_int) -> bool {
    let kind = kind & !(libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK);
    (domain == libc::AF_INET || domain == libc::AF_INET6)
        && kind == libc::SOCK_STREAM
        && (protocol == 0 || protocol == libc::IPPROTO_TCP)
}

/// A socket was made.
pub(crate) fn made(fd: c_int, domain: c_int, kind: c_int, protocol: c_int) {
    if option::may_connect() && is_tcp(domain, kind, protocol) && !fork::borrows_memory() {
        let nonblocking = kind & libc::SOCK_NONBLOCK != 0;
        table::install(fd, Sock::Stream(Socket::new(State::Fresh, Role::Client, nonblocking)));
    }
}

/// A socket listens now: it is the kernel's.
pub(crate) fn listening(fd: c_int) {
    if !fork::borrows_memory() {
        drop(table::remove(fd));
    }
    crate::selection::short_lived::share();
    if let Some(address) = local_address(fd) {
        let mut ports = LISTENING.lock().unwrap_or_else(PoisonError::into_inner);
        if !ports.contains(&address.port()) {
            ports.push(address.port());
        }
    }
}

/// The address that a socket is bound to.
pub(crate) fn local_address(fd: c_int) -> Option<SocketAddr> {
    let name = rustix::net::getsockname(crate::sys::borrowed(fd)).ok()?;
    SocketAddr::try_from(name).ok()
}

/// `connect` on a socket of ours. `native` makes the system call.
pub(crate) fn connect(
    fd: c_int,
    sock: &Ref,
    socket: &Socket,
    to: Option<SocketAddr>,
    native: impl FnOnce() -> Sys,
) -> Sys {
    if socket.state() != State::Fresh {
        return match socket.state() {
            State::Undecided | State::Deciding if socket.is_nonblocking() => {
                Err(Errno(libc::EALREADY))
            }
            State::Broken => match socket.take_error() {
                0 => native(),
                error => Err(Errno(error)),
            },
            _ => native(),
        };
    }
    let fast = raw::option(fd, libc::IPPROTO_TCP, libc::TCP_FASTOPEN_CONNECT).unwrap_or(0) != 0;
    let ask = to.filter(|_| !fast).and_then(|to| option::before_connect(fd, &to));
    let Some(ask) = ask else {
        let result = native();
        let failed = !matches!(result, Ok(_) | Err(Errno(libc::EINPROGRESS | libc::EINTR)));
        if fast || !failed {
            // Decided: TCP. After a failure the program may try another address.
            table::remove_if(fd, sock);
        }
        return result;
    };
    if ask.proposes_unasked() {
        // A server that looks for a Proposal does not look for long, and opening a device takes a while.
        let _ = session::current();
    }
    *socket.ask.lock().unwrap_or_else(PoisonError::into_inner) = Some(ask);
    acknowledge_lazily(fd, true);
    let result = native();
    match result {
        Ok(_) => {
            if let Err(why) = ask.connected(crate::sys::borrowed(fd)) {
                acknowledge_lazily(fd, false);
                status::stays(crate::sys::borrowed(fd), why);
                table::remove_if(fd, sock);
                return Ok(0);
            }
            start(sock, socket);
            settle_for(sock, fd, socket);
            match socket.state() {
                State::Broken => match socket.take_error() {
                    0 => Ok(0),
                    error => Err(Errno(error)),
                },
                _ => Ok(0),
            }
        }
        Err(Errno(libc::EINPROGRESS)) => {
            start(sock, socket);
            begin(sock, fd);
            result
        }
        // Interrupted: it goes on, and the program polls for its end.
        Err(Errno(libc::EINTR)) => {
            start(sock, socket);
            begin(sock, fd);
            result
        }
        error => error,
    }
}

/// Whether acknowledgements wait for something to ride on, also the last one of the three-way handshake:
/// the Proposal follows at once. On TCP they must not, or a server that is to speak first would hear of
/// its client a good while later.
pub(crate) fn acknowledge_lazily(fd: c_int, lazily: bool) {
    let _ = rustix::net::sockopt::set_tcp_quickack(crate::sys::borrowed(fd), !lazily);
}

fn start(sock: &Ref, socket: &Socket) {
    registrations::moved(sock, socket, State::Undecided);
    socket.advance(State::Fresh, State::Undecided);
}

/// Begins the handshake without waiting for anything.
fn begin(sock: &Ref, fd: c_int) {
    crate::selection::handshake::start(sock, fd);
}

/// Waits for the verdict, but not long.
fn settle_for(sock: &Ref, fd: c_int, socket: &Socket) {
    begin(sock, fd);
    if socket.state() == State::Deciding && !socket.is_nonblocking() {
        socket.await_decision(CONNECT);
    }
}

/// A connection was accepted.
pub(crate) fn accepted(fd: c_int, nonblocking: bool) {
    let Some(config) = session::config() else { return };
    if config.accept.is_empty() || fork::borrows_memory() {
        return;
    }
    // Sockets of other families have no such addresses.
    let Some(local) = local_address(fd) else { return };
    let client: Option<IpAddr> = if !config.looks_at_clients() {
        Some(local.ip())
    } else {
        let name = rustix::net::getpeername(crate::sys::borrowed(fd)).ok();
        name.flatten().and_then(|name| SocketAddr::try_from(name).ok()).map(|addr| addr.ip())
    };
    if !client.is_some_and(|client| config.accepts(client, local.port())) {
        return;
    }
    match option::accepted(crate::sys::borrowed(fd)) {
        Reception::Plain => status::plain(crate::sys::borrowed(fd)),
        Reception::Look(patience) => {
            let socket = Socket::new(State::Undecided, Role::Server, nonblocking);
            socket.set_patience(patience);
            table::install(fd, Sock::Stream(socket));
        }
    }
}

/// `getsockopt` answers of our own: a number.
pub(crate) fn own_option(sock: &Ref, fd: c_int, level: c_int, name: c_int) -> Option<c_int> {
    let socket = sock.stream()?;
    if (level, name) != (libc::SOL_SOCKET, libc::SO_ERROR) {
        return None;
    }
    match socket.state() {
        State::Undecided | State::Deciding => match settle(sock, fd, Patience::Moment) {
            Verdict::NotYet | Verdict::Smc => Some(0),
            Verdict::Broken => Some(socket.take_error()),
            Verdict::Tcp => None,
        },
        State::Smc => {
            let error = socket.smc().and_then(|stream| stream.take_error().ok().flatten());
            Some(error.map_or(0, |error| Errno::from(error).0))
        }
        State::Broken => Some(socket.take_error()).filter(|error| *error != 0),
        State::Fresh | State::Tcp | State::Relayed => None,
    }
}

/// An option was set on the TCP socket: what concerns the SMC connection follows.
pub(crate) fn option_set(fd: c_int, socket: &Socket, level: c_int, name: c_int) {
    if level != libc::SOL_SOCKET {
        return;
    }
    match name {
        libc::SO_RCVTIMEO => socket.set_timeouts(Some(raw::timeout_of(fd, name)), None),
        libc::SO_SNDTIMEO => socket.set_timeouts(None, Some(raw::timeout_of(fd, name))),
        libc::SO_OOBINLINE => {
            let on = raw::option(fd, level, name).is_ok_and(|on| on != 0);
            if let Some(stream) = socket.smc() {
                let _ = stream.set_oob_inline(on);
            }
        }
        libc::SO_LINGER => {
            let linger = rustix::net::sockopt::socket_linger(crate::sys::borrowed(fd));
            if let (Some(stream), Ok(linger)) = (socket.smc(), linger) {
                let _ = stream.set_linger(linger);
            }
        }
        _ => {}
    }
}

/// Whether an option cannot be had on an SMC connection; the program then does without.
pub(crate) fn refuses_option(socket: &Socket, level: c_int, name: c_int) -> bool {
    socket.state() == State::Smc
        && match level {
            libc::IPPROTO_TCP => {
                matches!(
                    name,
                    libc::TCP_ULP
                        | libc::TCP_FASTOPEN
                        | libc::TCP_FASTOPEN_CONNECT
                        | libc::TCP_REPAIR
                )
            }
            libc::SOL_SOCKET => {
                matches!(name, libc::SO_ZEROCOPY | libc::SO_ATTACH_FILTER | libc::SO_ATTACH_BPF)
            }
            _ => false,
        }
}
