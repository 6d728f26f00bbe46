// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The ports of this process's listeners. A thread connecting to such a port must not wait for a
//! handshake: the same thread may have to accept the connection.

use std::ffi::c_int;

use crate::selection::kernel_sockets;
use crate::sys::fork_lock::ForkMutex;
use crate::sys::{local_address, raw};

/// Ports of this process's listeners, each with the last known descriptor of its listener.
static LISTENING: ForkMutex<Vec<(u16, c_int)>> = ForkMutex::new(Vec::new());

/// Whether this process has listened at all.
pub(crate) fn any() -> bool {
    !LISTENING.lock().is_empty()
}

/// Whether this process has listened on a port.
pub(crate) fn has_listened_on(port: u16) -> bool {
    LISTENING.lock().iter().any(|(known, _)| *known == port)
}

/// Whether this process listens on a port. The program may have closed the listener, or passed it
/// to another descriptor, unseen by the library.
pub(crate) fn listens_on(port: u16) -> bool {
    let known = LISTENING.lock().iter().find(|(known, _)| *known == port).copied();
    let Some((_, fd)) = known else { return false };
    if is_listener(fd, port) {
        return true;
    }
    let found = kernel_sockets::open_descriptors().into_iter().find(|fd| is_listener(*fd, port));
    match found {
        Some(fd) => add(port, fd),
        None => LISTENING.lock().retain(|(known, _)| *known != port),
    }
    found.is_some()
}

fn is_listener(fd: c_int, port: u16) -> bool {
    raw::socket_option(fd, libc::SOL_SOCKET, libc::SO_ACCEPTCONN) == Ok(1)
        && local_address(fd).is_some_and(|address| address.port() == port)
}

/// Stores a port of a listener.
pub(crate) fn add(port: u16, fd: c_int) {
    let mut ports = LISTENING.lock();
    match ports.iter_mut().find(|(known, _)| *known == port) {
        Some((_, known)) => *known = fd,
        None => ports.push((port, fd)),
    }
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, SocketAddrV4, TcpListener};
    use std::os::fd::AsRawFd;

    use rustix::net::{AddressFamily, SocketType};

    use super::*;

    /// A listener not seen by the hooks of this program.
    fn listener() -> TcpListener {
        let socket = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
        rustix::net::bind(&socket, &SocketAddrV4::new(Ipv4Addr::LOCALHOST, 0)).unwrap();
        rustix::net::listen(&socket, 1).unwrap();
        socket.into()
    }

    #[test]
    fn a_port_is_listened_on_until_its_last_listener_is_closed() {
        let listener = listener();
        let port = listener.local_addr().unwrap().port();
        assert!(!has_listened_on(port) && !listens_on(port));
        add(port, listener.as_raw_fd());
        assert!(listens_on(port));
        let copy = listener.try_clone().unwrap();
        drop(listener);
        assert!(listens_on(port), "by a copy of the descriptor");
        drop(copy);
        assert!(!listens_on(port) && !has_listened_on(port));
    }
}
