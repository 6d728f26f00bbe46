// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `shutdown`, `ioctl`, `fcntl` and socket options.

use std::ffi::c_int;
use std::net::{Shutdown, SocketAddr};
use std::sync::atomic::{AtomicBool, Ordering};

use crate::selection::inherited_options::{send_buffer, unsent_limit, user_timeout};
use crate::selection::options::{self, OptionKind};
use crate::selection::resolve::resolve;
use crate::selection::{Selected, Wait, inherited_options};
use crate::socket::stream::{SocketState, StreamSocket};
use crate::socket::table::DescriptorRef;
use crate::sys::borrowed;
use crate::sys::raw::{self, Errno, SysResult};
use crate::sys::user_memory::TCP_INQ;

/// `shutdown` on a known descriptor. `None`: the kernel carries out the call.
pub(crate) fn shutdown(fd: c_int, descriptor: &DescriptorRef, how: c_int) -> Option<SysResult> {
    let socket = descriptor.stream()?;
    socket.undecided.note_write();
    // A signal does not interrupt this call.
    let selected = std::iter::repeat_with(|| resolve(descriptor, fd, Wait::Block));
    if selected.into_iter().find(|one| *one != Selected::Pending) != Some(Selected::Smc) {
        return None;
    }
    let stream = socket.smc()?;
    let was_over = is_over(descriptor);
    let done = match how {
        libc::SHUT_RD => stream.shutdown(Shutdown::Read),
        libc::SHUT_WR | libc::SHUT_RDWR => {
            socket.end.set_write_shut();
            match how {
                libc::SHUT_WR => stream.shutdown(Shutdown::Write),
                _ => stream.shutdown_both(),
            }
        }
        _ => return Some(Err(Errno(libc::EINVAL))),
    };
    Some(match done {
        Ok(()) if !was_over => Ok(0),
        _ => Err(Errno(libc::ENOTCONN)),
    })
}

/// Whether an SMC connection has ended, in the sense of TCP's "not connected".
pub(crate) fn is_over(descriptor: &DescriptorRef) -> bool {
    tcp_state(descriptor) == Some(CLOSE)
}

/// Whether SMC carries the connection of a descriptor.
pub(crate) fn is_on_smc(descriptor: &DescriptorRef) -> bool {
    descriptor.stream().is_some_and(|socket| socket.smc().is_some())
}

/// The local address of a reset SMC connection: the kernel has forgotten the address with the TCP
/// connection. `None`: the kernel still has the address.
pub(crate) fn name_of_reset(descriptor: &DescriptorRef) -> Option<SocketAddr> {
    let stream = descriptor.stream()?.smc()?;
    if stream.readiness(false).failed { stream.local_addr().ok() } else { None }
}

/// Stores whether the socket is non-blocking, after `ioctl(FIONBIO)`.
pub(crate) fn update_nonblocking(fd: c_int, socket: &StreamSocket) {
    if let Ok(flags) = raw::fcntl(fd, libc::F_GETFL, 0) {
        socket.options.set_nonblocking(flags as c_int & libc::O_NONBLOCK != 0);
    }
}

/// The answer to an `ioctl` with a number, for an SMC connection. `None`: the kernel carries out the
/// call.
pub(crate) fn ioctl(
    fd: c_int,
    descriptor: &DescriptorRef,
    request: u64,
) -> Option<Result<c_int, Errno>> {
    let socket = descriptor.stream()?;
    // SIOCOUTQ is TIOCOUTQ, SIOCINQ is FIONREAD.
    if !matches!(request, libc::FIONREAD | libc::TIOCOUTQ | SIOCOUTQNSD | SIOCATMARK) {
        return None;
    }
    let number = |n: usize| c_int::try_from(n).unwrap_or(c_int::MAX);
    if matches!(socket.state(), SocketState::Undecided | SocketState::Deciding) {
        match resolve(descriptor, fd, Wait::Short) {
            Selected::Smc => {}
            Selected::Pending if matches!(request, libc::TIOCOUTQ | SIOCOUTQNSD) => {
                return Some(Ok(number(socket.undecided.early().len())));
            }
            Selected::Pending => return Some(Ok(0)),
            _ => return None,
        }
    }
    let stream = socket.smc()?;
    Some(Ok(match request {
        libc::FIONREAD => number(stream.readable().unwrap_or(0)),
        libc::TIOCOUTQ => number(stream.outstanding()[0]),
        SIOCOUTQNSD => number(stream.outstanding()[1]),
        _ => c_int::from(stream.at_mark().ok().flatten().unwrap_or(false)),
    }))
}

/// Request of `ioctl`: number of unsent bytes of TCP.
const SIOCOUTQNSD: u64 = 0x894b;
/// Request of `ioctl`: whether the next byte to read is at the urgent mark.
pub(crate) const SIOCATMARK: u64 = 0x8905;

/// The answer to `getsockopt` with a number, for an SMC connection. `None`: the kernel carries out the
/// call.
pub(crate) fn get_option(
    descriptor: &DescriptorRef,
    fd: c_int,
    level: c_int,
    name: c_int,
) -> Option<c_int> {
    let socket = descriptor.stream()?;
    if socket.state() == SocketState::Relayed {
        return relayed_option(socket, level, name);
    }
    if (level, name) == (libc::IPPROTO_TCP, libc::TCP_QUICKACK)
        && socket.smc().is_some()
        && !inherited_options::may_have_quickack()
    {
        // The handshake has changed the option of the TCP socket; the default is on.
        return Some(1);
    }
    if (level, name) == (libc::IPPROTO_TCP, libc::TCP_NODELAY) {
        // After leaving the device a connection has set the TCP socket's option.
        return socket.smc()?.nodelay().ok().map(c_int::from);
    }
    if (level, name) != (libc::SOL_SOCKET, libc::SO_ERROR) {
        return None;
    }
    match socket.state() {
        SocketState::Undecided | SocketState::Deciding => {
            match resolve(descriptor, fd, Wait::Short) {
                Selected::Smc => Some(0),
                Selected::Failed => Some(socket.end.take_error()),
                // The kernel knows whether TCP has failed meanwhile.
                Selected::Pending | Selected::Tcp => None,
            }
        }
        SocketState::Smc => take_error(socket),
        SocketState::Failed => Some(socket.end.take_error()).filter(|error| *error != 0),
        SocketState::Unconnected | SocketState::Tcp | SocketState::Relayed => None,
    }
}

/// The program's SO_LINGER, `l_onoff` and `l_linger`, if the TCP socket has another value.
pub(crate) fn programs_linger(descriptor: &DescriptorRef) -> Option<[c_int; 2]> {
    let linger = descriptor.stream()?.smc()?.programs_linger()?;
    let seconds =
        linger.map_or(0, |linger| c_int::try_from(linger.as_secs()).unwrap_or(c_int::MAX));
    Some([c_int::from(linger.is_some()), seconds])
}

/// The error of an SMC connection, once.
pub(crate) fn take_error(socket: &StreamSocket) -> Option<c_int> {
    let stream = socket.smc()?;
    match socket.end.take_reset(stream) {
        0 => Some(socket.end.take_epipe()),
        error => Some(error),
    }
}

/// The answer for a Unix socket in the place of a connection.
fn relayed_option(socket: &StreamSocket, level: c_int, name: c_int) -> Option<c_int> {
    match (level, name) {
        (libc::SOL_SOCKET, libc::SO_DOMAIN) => match (socket.tcp_fd(), socket.relayed.names()) {
            (Some(tcp), _) => raw::socket_option(tcp, level, name).ok(),
            (None, Some((local, _))) if local.is_ipv6() => Some(libc::AF_INET6),
            (None, Some(_)) => Some(libc::AF_INET),
            (None, None) => None,
        },
        (libc::SOL_SOCKET, libc::SO_PROTOCOL) => Some(libc::IPPROTO_TCP),
        // Default value of an unchanged connection.
        (libc::IPPROTO_TCP, _) if socket.relayed.names().is_some() => Some(0),
        _ => None,
    }
}

/// Whether an option is about the pair in the place of a connection, instead of the TCP socket.
pub(crate) fn is_of_descriptor(level: c_int, name: c_int) -> bool {
    (level, name) == (libc::SOL_SOCKET, libc::SO_ERROR)
}

/// Whether an option changes calls to move bytes.
pub(crate) fn is_of_transfer(level: c_int, name: c_int) -> bool {
    level == libc::SOL_SOCKET
        && matches!(
            name,
            libc::SO_RCVTIMEO | libc::SO_SNDTIMEO | libc::SO_RCVLOWAT | libc::SO_OOBINLINE
        )
}

/// Applies a changed option of the TCP socket to the SMC connection.
pub(crate) fn follow_option(fd: c_int, socket: &StreamSocket, level: c_int, name: c_int) {
    if level == libc::IPPROTO_TCP {
        return follow_option_of_tcp(fd, socket, name);
    }
    if level != libc::SOL_SOCKET {
        return;
    }
    match name {
        libc::SO_RCVTIMEO => socket.options.set_timeouts(Some(raw::timeout_of(fd, name)), None),
        libc::SO_SNDTIMEO => socket.options.set_timeouts(None, Some(raw::timeout_of(fd, name))),
        libc::SO_SNDBUF | libc::SO_SNDBUFFORCE => {
            if let (Some(stream), Some(bytes)) = (socket.smc(), send_buffer(fd)) {
                stream.set_send_buffer(bytes);
            }
        }
        libc::SO_RCVLOWAT => {
            let bytes = raw::socket_option(fd, level, name).unwrap_or(0);
            socket.options.set_low_water(u32::try_from(bytes).unwrap_or(0));
        }
        libc::SO_OOBINLINE => {
            let on = raw::socket_option(fd, level, name).is_ok_and(|on| on != 0);
            if let Some(stream) = socket.smc() {
                let _ = stream.set_oob_inline(on);
            }
        }
        libc::SO_LINGER => {
            let linger = rustix::net::sockopt::socket_linger(borrowed(fd));
            if let (Some(stream), Ok(linger)) = (socket.smc(), linger) {
                let _ = stream.set_linger(linger);
            }
        }
        _ => {}
    }
}

fn follow_option_of_tcp(fd: c_int, socket: &StreamSocket, name: c_int) {
    let is_on = || raw::socket_option(fd, libc::IPPROTO_TCP, name).is_ok_and(|on| on != 0);
    if name == TCP_INQ {
        socket.options.set_queue_size_wanted(is_on());
        QUEUE_SIZE_WANTED.store(true, Ordering::Relaxed);
    }
    let Some(stream) = socket.smc() else { return };
    match name {
        libc::TCP_NOTSENT_LOWAT => {
            unsent_limit(fd).into_iter().for_each(|bytes| stream.set_unsent_limit(bytes));
        }
        libc::TCP_USER_TIMEOUT => {
            user_timeout(fd).into_iter().for_each(|limit| stream.set_user_timeout(limit));
        }
        libc::TCP_NODELAY if stream.remembers_nodelay() => {
            let _ = stream.set_nodelay(is_on());
        }
        _ => {}
    }
}

/// Whether any socket of the process has TCP_INQ.
static QUEUE_SIZE_WANTED: AtomicBool = AtomicBool::new(false);

/// Whether a socket of this process may want control messages with the size of its queue.
#[inline]
pub(crate) fn is_queue_size_wanted() -> bool {
    QUEUE_SIZE_WANTED.load(Ordering::Relaxed)
}

/// The size of the queue, if the socket wants control messages with the size.
pub(crate) fn queue_size(descriptor: &DescriptorRef) -> Option<c_int> {
    let socket = descriptor.stream().filter(|socket| socket.options.is_queue_size_wanted())?;
    let stream = socket.smc()?;
    let queued = stream.readable().unwrap_or(0);
    // As in the kernel, one more until the program has read the end of data.
    let more = queued == 0 && stream.readiness(false).read_closed;
    Some(c_int::try_from(queued).unwrap_or(c_int::MAX) + c_int::from(more))
}

// States of TCP, as in TCP_INFO.
const ESTABLISHED: u8 = 1;
const FIN_WAIT2: u8 = 5;
const CLOSE: u8 = 7;
const CLOSE_WAIT: u8 = 8;

/// The state for TCP_INFO of an SMC connection: the state of TCP after the same calls. The TCP socket
/// underneath stays open.
pub(crate) fn tcp_state(descriptor: &DescriptorRef) -> Option<u8> {
    let socket = descriptor.stream()?;
    let stream = socket.smc()?;
    if stream.readiness(false).failed || socket.end.has_written_after_close() {
        return Some(CLOSE);
    }
    Some(match (socket.end.is_write_shut(), stream.peer_has_ended() == Some(true)) {
        (false, false) => ESTABLISHED,
        (true, false) => FIN_WAIT2,
        (false, true) => CLOSE_WAIT,
        (true, true) => CLOSE,
    })
}

/// Whether a connection cannot support an option. An undecided connection stays on TCP to support the
/// option.
pub(crate) fn refuses_option(socket: &StreamSocket, level: c_int, name: c_int) -> bool {
    if options::kind(level, name) != OptionKind::TcpOnly {
        return false;
    }
    match socket.state() {
        SocketState::Tcp | SocketState::Failed | SocketState::Relayed => false,
        _ => !socket.decision.forbid_proposal(),
    }
}
