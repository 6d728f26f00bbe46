// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A call descriptor: the device's signal to the driver for used elements.
//!
//! An eventfd, or a socket of a pair: user-mode Linux has no interrupts by eventfds.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;

use rustix::net::sockopt::{socket_domain, socket_type};
use rustix::net::{AddressFamily, SendFlags, SocketType};

use super::eventfd::is_eventfd;
use ism_device::shm::Kicker;

/// Written to both kinds: an eventfd adds 1, and user-mode Linux reads words of 8 bytes.
const ONE: [u8; 8] = 1u64.to_ne_bytes();

/// A checked call descriptor.
#[derive(Debug)]
pub(super) enum Call {
    /// An eventfd. The front end controls the counter and the flags.
    Eventfd(File),
    /// One end of `socketpair(AF_UNIX, SOCK_STREAM)`.
    Socket(UnixStream),
}

impl Call {
    /// Checks a descriptor. `None`: not usable as a call descriptor.
    pub(super) fn new(file: File) -> Option<Call> {
        if is_eventfd(&file) {
            return Some(Call::Eventfd(file));
        }
        let is_stream = socket_domain(&file) == Ok(AddressFamily::UNIX)
            && socket_type(&file) == Ok(SocketType::STREAM);
        let socket = is_stream.then(|| UnixStream::from(OwnedFd::from(file)))?;
        is_of_a_pair(&socket).then_some(Call::Socket(socket))
    }

    /// Signals the driver. Only for the device's own threads: the write may block, because the front end
    /// controls an eventfd's counter and flags.
    pub(super) fn signal(&self) {
        match self {
            Call::Eventfd(file) => {
                let _ = rustix::io::write(file, &ONE);
            }
            Call::Socket(socket) => send(socket),
        }
    }

    /// Like [`Call::signal`], for a thread of another device. `false`: the driver was not signalled.
    pub(super) fn signal_nonblocking(&self, kicker: &mut Kicker) -> bool {
        match self {
            Call::Eventfd(file) => kicker.kick(file.as_fd()).is_ok(),
            Call::Socket(socket) => {
                send(socket);
                true
            }
        }
    }
}

/// Sends a word without blocking. A full socket holds unread words, so the driver is signalled already.
fn send(socket: &UnixStream) {
    let _ = rustix::net::send(socket, &ONE, SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
}

/// Whether this socket is connected, with no name at either end.
///
/// Only the front end, or a process it passed the socket to, has the other end of such a socket. A named
/// socket leads to a service, and the service would see the daemon's credentials. The answer never changes: a
/// connected stream socket cannot be connected again.
fn is_of_a_pair(socket: &UnixStream) -> bool {
    let ends = [socket.local_addr(), socket.peer_addr()];
    ends.iter().all(|end| end.as_ref().is_ok_and(|name| name.is_unnamed()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::net::{TcpListener, TcpStream};
    use std::os::linux::net::SocketAddrExt;
    use std::os::unix::net::{SocketAddr, UnixDatagram, UnixListener};

    fn accepted(end: impl Into<OwnedFd>) -> bool {
        Call::new(File::from(end.into())).is_some()
    }

    #[test]
    fn takes_eventfds_and_sockets_of_a_pair_only() {
        let flags = rustix::event::EventfdFlags::empty();
        assert!(accepted(rustix::event::eventfd(0, flags).unwrap()));
        let (a, _b) = UnixStream::pair().unwrap();
        assert!(accepted(a));

        let (a, _b) = UnixDatagram::pair().unwrap();
        assert!(!accepted(a), "a message that does not fit could be any size of somebody else");
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        assert!(!accepted(TcpStream::connect(listener.local_addr().unwrap()).unwrap()));
        let (pipe, _) = std::io::pipe().unwrap();
        assert!(!accepted(pipe));
    }

    #[test]
    fn takes_no_socket_that_leads_to_a_service() {
        let name = format!("virtio-ism-call-{}", std::process::id());
        let address = SocketAddr::from_abstract_name(name).unwrap();
        let listener = UnixListener::bind_addr(&address).unwrap();
        assert!(!accepted(listener.try_clone().unwrap()), "a listener");
        let client = UnixStream::connect_addr(&address).unwrap();
        let (server, _) = listener.accept().unwrap();
        assert!(!accepted(client), "the other end is a service");
        assert!(!accepted(server), "the other end is somebody's client");
    }

    #[test]
    fn a_full_or_closed_socket_neither_blocks_nor_fails() {
        let (call, mut driver) = UnixStream::pair().unwrap();
        let call = Call::new(File::from(OwnedFd::from(call))).unwrap();
        let mut kicker = Kicker::new().unwrap();
        for _ in 0..10_000 {
            call.signal();
            assert!(call.signal_nonblocking(&mut kicker));
        }
        let mut word = [0; 8];
        driver.read_exact(&mut word).unwrap();
        assert_eq!(word, ONE);
        drop(driver);
        call.signal(); // would raise SIGPIPE
    }
}
