// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The entries of sockets, made at `socket`, `listen` and `accept`.

use std::ffi::c_int;
use std::net::{IpAddr, SocketAddr};

use guest_driver::Fallback;
use guest_driver::interpose::FirstBytes;

use crate::selection::first_bytes::peek;
use crate::selection::option::AcceptAction;
use crate::selection::{
    filters, inherited_options, listening_ports, option, options, short_lived, worthwhile,
};
use crate::socket::pair;
use crate::socket::stream::{RelayState, ServerSide, SocketRole, StreamSocket};
use crate::socket::table::{DESCRIPTORS, Descriptor};
use crate::status::{self, KnownNames};
use crate::sys::{borrowed, local_address, open_numbers, raw};
use crate::{config, fork, tcp_notes};

/// Whether sockets of this kind can be on SMC.
pub(crate) fn is_tcp(domain: c_int, kind: c_int, protocol: c_int) -> bool {
    let kind = kind & !(libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK);
    (domain == libc::AF_INET || domain == libc::AF_INET6)
        && kind == libc::SOCK_STREAM
        && (protocol == 0 || protocol == libc::IPPROTO_TCP)
}

/// Makes the entry of a new socket, if SMC may carry its connection.
pub(crate) fn add_socket(fd: c_int, domain: c_int, kind: c_int, protocol: c_int) {
    tcp_notes::forget(fd);
    if !is_tcp(domain, kind, protocol) {
        return;
    }
    filters::look();
    if !fork::shares_memory() && option::may_connect() {
        let nonblocking = kind & libc::SOCK_NONBLOCK != 0;
        DESCRIPTORS.install(fd, Descriptor::Stream(StreamSocket::unconnected(nonblocking)));
    }
}

/// Notes why TCP carries a connection made by the program on a socket without an entry.
pub(crate) fn note_connected(fd: c_int) {
    let why = tcp_notes::of_all().cloned().or_else(option::why_none_connects);
    why.iter().for_each(|why| tcp_notes::note_unseen(fd, why));
}

/// Removes the entry of a listening socket: the kernel carries out all its calls.
pub(crate) fn remove_listener(fd: c_int) {
    if !fork::shares_memory() {
        drop(DESCRIPTORS.remove(fd));
    }
    short_lived::share_with_children();
    if let Some(address) = local_address(fd) {
        listening_ports::add(address.port(), fd);
    }
}

/// Makes the entry of an accepted connection, if SMC may carry the connection. `client`: the
/// address of the client, if known from the call and if the listener is one of
/// [`answering_listeners`](crate::selection::answering_listeners).
pub(crate) fn add_accepted(fd: c_int, nonblocking: bool, client: Option<SocketAddr>) {
    filters::look();
    if fork::shares_memory() {
        return;
    }
    tcp_notes::forget(fd);
    option::refresh_policy();
    let Some(config) = config::get().filter(|config| !config.accept.is_empty()) else {
        let why =
            if config::get().is_some() { Some(&Fallback::NoRule) } else { tcp_notes::of_all() };
        why.into_iter().for_each(|why| tcp_notes::note_unseen(fd, why));
        return;
    };
    let (mut local, mut left_by_policy) = (None, false);
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
        let is_accepted = ip.is_some_and(|ip| config.accepts(ip, found.port()));
        // The client may expect SMC, by an answer or rule older than the policy in force.
        left_by_policy = !is_accepted && ip.is_some_and(|ip| config.has_accepted(ip, found.port()));
        if !is_accepted && !left_by_policy {
            let named = ip.is_some_and(|ip| config.names_client(ip, found.port()));
            tcp_notes::note(fd, if named { &Fallback::Policy } else { &Fallback::NoRule });
            return;
        }
        local = Some(found);
    }
    let known = client.and_then(|client| option::after_accept_from(&client));
    match known.unwrap_or_else(|| option::after_accept(borrowed(fd))) {
        AcceptAction::Tcp => {
            let local = local.or_else(|| local_address(fd));
            local.iter().for_each(worthwhile::count_tcp);
            let names = KnownNames { local, peer: client };
            let why = if left_by_policy { Fallback::Policy } else { option::why_not_proposed() };
            status::accepted_on_tcp(fd, borrowed(fd), names, why);
        }
        AcceptAction::Peek { timeout, announced } => {
            if announced {
                local = local.or_else(|| local_address(fd));
            }
            let mut server = ServerSide::new(local, announced, timeout);
            server.left_by_policy = left_by_policy;
            let socket = StreamSocket::accepted(server, nonblocking);
            if left_by_policy || options::has_inherited(fd) {
                socket.decision.forbid_proposal();
            }
            DESCRIPTORS.install(fd, Descriptor::Stream(socket));
        }
    }
}

/// Makes the entry of an end of a pair, made by another process in the place of a connection.
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

/// Finds connections of the process older than the library. A server executing a program for each
/// client leaves the handshake to that program.
pub(crate) fn add_inherited() {
    let fds = open_numbers();
    let mut known: Vec<(u64, c_int)> = Vec::new();
    for fd in fds.into_iter().filter(|fd| !option::is_reserved(*fd)) {
        match raw::socket_option(fd, libc::SOL_SOCKET, libc::SO_PROTOCOL) {
            Ok(libc::IPPROTO_TCP) => {
                filters::look();
                if config::get().is_none() {
                    return;
                }
            }
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
        // The connection may also be a client's in the middle of a handshake, made by another
        // thread of the process which has started this program.
        if first.is_proposal() || first == FirstBytes::Incomplete && untouched() {
            let flags = raw::fcntl(fd, libc::F_GETFL, 0).unwrap_or(0) as c_int;
            add_accepted(fd, flags & libc::O_NONBLOCK != 0, None);
            if let Some(descriptor) = DESCRIPTORS.get(fd)
                && let Some(socket) = descriptor.stream()
            {
                socket.owner.set_handed_on();
            }
        }
    }
}
