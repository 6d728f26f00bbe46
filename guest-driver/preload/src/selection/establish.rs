// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! How the library learns of sockets: `socket`, `connect`, `listen` and `accept`.

use std::ffi::c_int;
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use guest_driver::Fallback;
use guest_driver::interpose::FirstBytes;
use smc_core::handshake::FallbackReason;

use crate::selection::first_bytes::peek;
use crate::selection::option::AcceptAction;
use crate::selection::outcome::duplicate;
use crate::selection::transitions::{carry_out, delay_acks};
use crate::selection::{
    Wait, inherited_options, listening_ports, option, plain_servers, resolve, running, session,
    short_lived, worthwhile,
};
use crate::socket::smc_request::SmcRequest;
use crate::socket::states::{SocketEvent, SocketStage};
use crate::socket::stream::{RelayState, ServerSide, SocketRole, SocketState, StreamSocket};
use crate::socket::table::{DESCRIPTORS, Descriptor, DescriptorRef};
use crate::socket::{descriptors, pair};
use crate::sys::raw::{self, Errno, SysResult};
use crate::sys::{borrowed, local_address};
use crate::{config, fork, status};

/// How long a disconnect waits for the thread that does the handshake.
const DISCONNECT: Duration = Duration::from_secs(1);

/// Whether sockets of this kind can be on SMC.
pub(crate) fn is_tcp(domain: c_int, kind: c_int, protocol: c_int) -> bool {
    let kind = kind & !(libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK);
    (domain == libc::AF_INET || domain == libc::AF_INET6)
        && kind == libc::SOCK_STREAM
        && (protocol == 0 || protocol == libc::IPPROTO_TCP)
}

/// Makes the entry of a new socket, if it may be on SMC.
pub(crate) fn add_socket(fd: c_int, domain: c_int, kind: c_int, protocol: c_int) {
    if is_tcp(domain, kind, protocol) && !fork::shares_memory() && option::may_connect() {
        let nonblocking = kind & libc::SOCK_NONBLOCK != 0;
        DESCRIPTORS.install(fd, Descriptor::Stream(StreamSocket::unconnected(nonblocking)));
    }
}

/// Removes the entry of a socket that listens: the kernel carries out all its calls.
pub(crate) fn remove_listener(fd: c_int) {
    if !fork::shares_memory() {
        drop(DESCRIPTORS.remove(fd));
    }
    short_lived::share_with_children();
    if let Some(address) = local_address(fd) {
        listening_ports::add(address.port(), fd);
    }
}

/// `connect` on a known socket. `native` calls libc's function.
pub(crate) fn connect(
    fd: c_int,
    descriptor: &DescriptorRef,
    socket: &StreamSocket,
    to: Option<SocketAddr>,
    native: impl FnOnce() -> SysResult,
) -> SysResult {
    if socket.state() != SocketState::Unconnected {
        // The kernel knows how far TCP is.
        return match socket.state() {
            SocketState::Failed => match socket.end.take_error() {
                0 => native(),
                error => Err(Errno(error)),
            },
            // The kernel has been told to forget a connection that was reset.
            SocketState::Smc if socket.smc().is_some_and(|s| s.readiness(false).failed) => {
                Err(Errno(libc::EISCONN))
            }
            _ => native(),
        };
    }
    let stay_plain = || {
        carry_out(descriptor, fd, SocketEvent::Plain);
    };
    if socket.stage() == SocketStage::UnconnectedForTcp {
        let result = native();
        if matches!(result, Ok(_) | Err(Errno(libc::EINPROGRESS | libc::EINTR))) {
            stay_plain();
        }
        return result;
    }
    if let Some(tcp) = to.as_ref().and_then(worthwhile::choose_tcp) {
        let result = native();
        if matches!(result, Ok(_) | Err(Errno(libc::EINPROGRESS | libc::EINTR))) {
            let not_smc = FallbackReason::PeerNotSmc.into();
            let why = if tcp.by_server { not_smc } else { Fallback::TooShort };
            status::client_stays_on_tcp(borrowed(fd), why);
            stay_plain();
            tcp.connected(fd);
        }
        return result;
    }
    if to.is_some_and(|to| plain_servers::is_paused(&to)) {
        let result = native();
        if matches!(result, Ok(_) | Err(Errno(libc::EINPROGRESS | libc::EINTR))) {
            status::client_stays_on_tcp(borrowed(fd), FallbackReason::PeerNotSmc.into());
            stay_plain();
        }
        return result;
    }
    let seems_plain = to.is_some_and(|to| plain_servers::contains(&to));
    // The handshake takes a descriptor.
    let copy = if seems_plain { None } else { duplicate(fd).ok() };
    let may_ask = seems_plain || copy.is_some();
    let asked = to.filter(|_| may_ask).and_then(|to| Some((to, option::before_connect(fd, &to)?)));
    let Some((to, mut request)) = asked else {
        let result = native();
        if matches!(result, Ok(_) | Err(Errno(libc::EINPROGRESS | libc::EINTR))) {
            // TCP carries it. After a failure the program may try another address, so the entry
            // stays.
            stay_plain();
        }
        return result;
    };
    if request.listed {
        // The server waits for a Proposal only for a short time, and opening a device takes long.
        let _ = session::current();
    }
    if !seems_plain {
        delay_acks(fd, true);
    }
    let result = native();
    let answer = match result {
        Ok(_) => Some(option::after_connect(request, borrowed(fd))),
        Err(Errno(libc::EINPROGRESS)) => option::during_connect(request, borrowed(fd)),
        _ => None,
    };
    if let Some(answer) = answer {
        plain_servers::note(&to, answer.is_ok());
        match answer {
            // An answer shows that TCP is connected, whatever the call returns.
            Ok(awaited) => request.awaited = Some(awaited),
            Err(why) => {
                if !seems_plain {
                    delay_acks(fd, false);
                }
                status::client_stays_on_tcp(borrowed(fd), why);
                stay_plain();
                return result;
            }
        }
    }
    if let Some(client) = socket.side.client() {
        *client.lock_request() = Some(request);
    }
    match result {
        Ok(_) => {
            carry_out(descriptor, fd, SocketEvent::Connect);
            let wait = if socket.options.is_nonblocking() { Wait::Short } else { Wait::Block };
            resolve::start(descriptor, fd, wait, copy);
            match socket.state() {
                SocketState::Failed => match socket.end.take_error() {
                    0 => Ok(0),
                    error @ libc::ECONNRESET => {
                        // TCP was connected when the call returned.
                        socket.end.set_error(error);
                        Ok(0)
                    }
                    error => Err(Errno(error)),
                },
                _ => Ok(0),
            }
        }
        Err(Errno(libc::EINPROGRESS)) => {
            carry_out(descriptor, fd, SocketEvent::Connect);
            resolve::start(descriptor, fd, Wait::Short, copy);
            result
        }
        // Interrupted: the kernel goes on connecting, and the program polls for the result.
        Err(Errno(libc::EINTR)) => {
            carry_out(descriptor, fd, SocketEvent::Connect);
            resolve::start(descriptor, fd, Wait::Short, copy);
            result
        }
        error => {
            // The program may use the socket for something else.
            take_request(socket);
            option::after_failed_connect(request, borrowed(fd));
            if !seems_plain {
                delay_acks(fd, false);
            }
            error
        }
    }
}

/// `connect` to no address (AF_UNSPEC): the kernel disconnects the socket, and serves it from then
/// on. `native` calls libc's function.
pub(crate) fn disconnect(
    fd: c_int,
    descriptor: &DescriptorRef,
    native: impl FnOnce() -> SysResult,
) -> SysResult {
    let Some(socket) = descriptor.stream() else { return native() };
    if !matches!(socket.state(), SocketState::Undecided | SocketState::Deciding) {
        let was_over = descriptors::disconnect(descriptor);
        let result = native();
        if was_over {
            // The kernel has reset a connection that TCP would not have any more, and says so.
            let _ = rustix::net::sockopt::socket_error(borrowed(fd));
        }
        return result;
    }
    socket.decision.forbid_proposal();
    // The thread must not connect it again, or has done so by now.
    take_request(socket);
    let result = native();
    // A thread that does the handshake finds the socket disconnected. It must not find the next
    // connection.
    let end = Instant::now() + DISCONNECT;
    while socket.state() == SocketState::Deciding && Instant::now() < end {
        let _ = socket.decision.wait(Duration::from_millis(10));
    }
    if socket.state() == SocketState::Deciding {
        running::take_socket_away(fd, socket);
    }
    if let Some(request) = take_request(socket) {
        option::after_failed_connect(request, borrowed(fd));
    }
    descriptors::release(descriptor);
    result
}

fn take_request(socket: &StreamSocket) -> Option<SmcRequest> {
    socket.side.client()?.lock_request().take()
}

/// Makes the entry of an accepted connection, if it may be on SMC. `client`: the address of the
/// client, if the call has told it and the listener is one of
/// [`answering_listeners`](crate::selection::answering_listeners).
pub(crate) fn add_accepted(fd: c_int, nonblocking: bool, client: Option<SocketAddr>) {
    let Some(config) = config::get() else { return };
    if config.accept.is_empty() || fork::shares_memory() {
        return;
    }
    let mut local = None;
    // Only IPv4 and IPv6 sockets have such an address.
    if client.is_none() || !config.accepts_all() {
        let Some(found) = local_address(fd) else { return };
        let ip: Option<IpAddr> = match client {
            _ if !config.depends_on_client() => Some(found.ip()),
            Some(client) => Some(client.ip()),
            None => {
                let name = rustix::net::getpeername(borrowed(fd)).ok();
                name.flatten().and_then(|name| SocketAddr::try_from(name).ok()).map(|to| to.ip())
            }
        };
        if !ip.is_some_and(|ip| config.accepts(ip, found.port())) {
            return;
        }
        local = Some(found);
    }
    let known = client.and_then(|client| option::after_accept_from(&client));
    match known.unwrap_or_else(|| option::after_accept(borrowed(fd))) {
        AcceptAction::Tcp => {
            if let Some(local) = local.or_else(|| local_address(fd)) {
                worthwhile::count_tcp(&local);
            }
            status::server_stays_on_tcp(borrowed(fd));
        }
        AcceptAction::Peek { timeout, announced } => {
            if announced {
                local = local.or_else(|| local_address(fd));
            }
            let server = ServerSide::new(local, announced, timeout);
            let socket = StreamSocket::accepted(server, nonblocking);
            if inherited_options::may_be_zerocopy()
                && raw::socket_option(fd, libc::SOL_SOCKET, libc::SO_ZEROCOPY) != Ok(0)
            {
                socket.decision.forbid_proposal();
            }
            DESCRIPTORS.install(fd, Descriptor::Stream(socket));
        }
    }
}

/// Makes the entry of an end of a pair that another process has made in the place of a connection.
pub(crate) fn add_relayed(fd: c_int) {
    if config::get().is_none() || fork::shares_memory() {
        return;
    }
    if raw::socket_option(fd, libc::SOL_SOCKET, libc::SO_DOMAIN) != Ok(libc::AF_UNIX) {
        return;
    }
    if let Some(names) = pair::names_of(borrowed(fd)) {
        let socket = StreamSocket::relayed(SocketRole::Server, RelayState::named(names));
        DESCRIPTORS.install(fd, Descriptor::Stream(socket));
    }
}

/// Finds connections that the process had before the library was loaded. A server that executes a
/// program for each client leaves the handshake to that program.
pub(crate) fn add_inherited() {
    let Ok(fds) = std::fs::read_dir("/proc/self/fd") else { return };
    let fds: Vec<c_int> =
        fds.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect();
    let mut known: Vec<(u64, c_int)> = Vec::new();
    for fd in fds.into_iter().filter(|fd| !option::is_reserved(*fd)) {
        match raw::socket_option(fd, libc::SOL_SOCKET, libc::SO_PROTOCOL) {
            Ok(libc::IPPROTO_TCP) => {}
            Ok(_) => {
                add_relayed(fd);
                continue;
            }
            Err(_) => continue,
        }
        inherited_options::note_foreign(fd);
        if raw::socket_option(fd, libc::SOL_SOCKET, libc::SO_ACCEPTCONN) != Ok(0) {
            option::note_inherited_listener(fd);
            continue;
        }
        // Standard input and output may be the same connection.
        let cookie = rustix::net::sockopt::socket_cookie(borrowed(fd)).unwrap_or(0);
        if let Some((_, first)) = known.iter().find(|(known, _)| *known == cookie) {
            if let Some(descriptor) = DESCRIPTORS.get(*first) {
                DESCRIPTORS.share(&descriptor, fd);
            }
            continue;
        }
        known.push((cookie, fd));
        let first = peek(borrowed(fd));
        let untouched = || raw::has_moved_bytes(fd) == Some(false);
        if first.is_smc() || first == FirstBytes::Incomplete && untouched() {
            let flags = raw::fcntl(fd, libc::F_GETFL, 0).unwrap_or(0) as c_int;
            add_accepted(fd, flags & libc::O_NONBLOCK != 0, None);
        }
    }
}
