//! Descriptors as such: close, dup, shutdown, fcntl, ioctl.

use std::ffi::c_int;
use std::net::Shutdown;

use crate::fork;
use crate::selection::handshake::{Patience, Verdict, settle};
use crate::selection::short_lived;
use crate::socket::stream::{Sock, Socket, State};
use crate::socket::{epoll_set, registrations};
use crate::sys::raw::{self, Errno, Sys};
use crate::sys::table::{self, Ref};

/// A descriptor is about to be closed.
pub(crate) fn closing(fd: c_int) {
    if !table::has(fd) || fork::borrows_memory() {
        return;
    }
    let Some(sock) = table::remove(fd) else { return };
    if sock.handles() > 0 {
        return;
    }
    match &*sock {
        Sock::Stream(socket) => {
            registrations::forget(socket);
            // A call of another thread still refers to it, and the process may end before that does:
            // the peer has to hear of the end all the same.
            if sock.is_in_use()
                && let Some(stream) = socket.smc()
            {
                let _ = stream.shutdown(Shutdown::Both);
            }
        }
        Sock::Set(set) => epoll_set::forget_set(set, fd),
    }
}

/// Descriptors of a range are about to be closed.
pub(crate) fn closing_range(first: c_int, last: c_int) {
    let last = last.min(table::highest());
    if first >= 0 && !fork::borrows_memory() {
        (first..=last).for_each(closing);
    }
}

/// `new` is now what `old` is.
pub(crate) fn duplicated(old: c_int, new: c_int) {
    if old == new || fork::borrows_memory() {
        return;
    }
    if let Some(sock) = table::get(old) {
        table::share(&sock, new);
    }
}

/// A new descriptor that is nothing of ours: an entry would be a leftover.
#[inline]
pub(crate) fn fresh(fd: c_int) {
    if table::has(fd) {
        closing(fd);
    }
}

/// An epoll set was made.
pub(crate) fn set_made(fd: c_int) {
    if crate::selection::session::config().is_some() && !fork::borrows_memory() {
        table::install(fd, Sock::Set(epoll_set::Set::new()));
    }
}

/// The program ends: connections close as the kernel would close them.
pub(crate) fn end() {
    if fork::borrows_memory() {
        return;
    }
    short_lived::end();
    for fd in 0..=table::highest() {
        if table::get(fd).is_some_and(|sock| sock.stream().is_some()) {
            closing(fd);
        }
    }
}

/// `shutdown` on an entry. `None`: the kernel's affair.
pub(crate) fn shutdown(fd: c_int, sock: &Ref, how: c_int) -> Option<Sys> {
    let socket = sock.stream()?;
    socket.speak();
    if settle(sock, fd, Patience::Forever) != Verdict::Smc {
        return None;
    }
    let stream = socket.smc()?;
    let how = match how {
        libc::SHUT_RD => Shutdown::Read,
        libc::SHUT_WR => Shutdown::Write,
        libc::SHUT_RDWR => Shutdown::Both,
        _ => return Some(Err(Errno(libc::EINVAL))),
    };
    Some(stream.shutdown(how).map(|()| 0).map_err(Errno::from))
}

/// `fcntl(F_SETFL)` or `ioctl(FIONBIO)` took place.
pub(crate) fn blocking_changed(fd: c_int, socket: &Socket) {
    if let Ok(flags) = raw::fcntl(fd, libc::F_GETFL, 0) {
        socket.set_nonblocking(flags as c_int & libc::O_NONBLOCK != 0);
    }
}

/// Numbers that `ioctl` asks for, on an SMC connection. `None`: the kernel's affair.
pub(crate) fn ioctl(fd: c_int, sock: &Ref, request: u64) -> Option<Result<c_int, Errno>> {
    let socket = sock.stream()?;
    // SIOCOUTQ is TIOCOUTQ, SIOCINQ is FIONREAD.
    if !matches!(request, libc::FIONREAD | libc::TIOCOUTQ | SIOCATMARK) {
        return None;
    }
    if matches!(socket.state(), State::Undecided | State::Deciding) {
        match settle(sock, fd, Patience::Moment) {
            Verdict::Smc => {}
            Verdict::NotYet => return Some(Ok(0)),
            _ => return None,
        }
    }
    let stream = socket.smc()?;
    let number = |n: usize| c_int::try_from(n).unwrap_or(c_int::MAX);
    Some(Ok(match request {
        libc::FIONREAD => number(stream.readable().unwrap_or(0)),
        libc::TIOCOUTQ => number(stream.unread_by_peer().unwrap_or(0)),
        _ => c_int::from(stream.at_mark().ok().flatten().unwrap_or(false)),
    }))
}

/// Whether the reader stands at the urgent mark.
pub(crate) const SIOCATMARK: u64 = 0x8905;
