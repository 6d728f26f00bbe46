// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Common operations on a TCP socket.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::ioctl::{Getter, ioctl};

use rustix::net::{connect_unspec, getpeername, sockopt};

/// Breaks a TCP connection by RST, at once.
///
/// The program may have descriptors of the same socket, and go on using the socket. So no option is set:
/// connect(2) to no address resets the connection and leaves the options unchanged. A socket reset by the
/// peer stays as it is: calls on the socket return the same as on TCP.
pub fn reset_tcp(tcp: impl AsFd) {
    if getpeername(&tcp).is_err() {
        return;
    }
    let Err(error) = connect_unspec(&tcp) else { return };
    // A filter of the process's system calls may forbid the call. A close with a linger time of zero sends
    // RST as well.
    tracing::debug!(%error, "connect to no address");
    if let Err(error) = sockopt::set_socket_linger(&tcp, Some(Duration::ZERO)) {
        tracing::debug!(%error, "SO_LINGER");
    }
}

/// Written bytes not acknowledged by the peer's kernel (SIOCOUTQ).
///
/// # Errors
/// The socket is not a TCP socket, or listens.
pub fn unacknowledged(tcp: BorrowedFd<'_>) -> io::Result<usize> {
    // SIOCOUTQ is TIOCOUTQ.
    // SAFETY: the request writes one int.
    bytes(unsafe { ioctl(tcp, Getter::<{ libc::TIOCOUTQ as _ }, libc::c_int>::new()) })
}

/// Written bytes not sent by the kernel (SIOCOUTQNSD).
///
/// # Errors
/// The socket is not a TCP socket, or listens.
pub fn unsent(tcp: BorrowedFd<'_>) -> io::Result<usize> {
    // SAFETY: the request writes one int.
    bytes(unsafe { ioctl(tcp, Getter::<SIOCOUTQNSD, libc::c_int>::new()) })
}

const SIOCOUTQNSD: rustix::ioctl::Opcode = 0x894b;

fn bytes(found: rustix::io::Result<libc::c_int>) -> io::Result<usize> {
    usize::try_from(found?).map_err(|_| io::ErrorKind::InvalidData.into())
}

/// Whether the peer of a connected TCP socket has sent a FIN, and no RST.
pub fn has_fin(tcp: impl AsFd) -> bool {
    let mut fds = [PollFd::new(&tcp, PollFlags::RDHUP)];
    let zero = Timespec { tv_sec: 0, tv_nsec: 0 };
    // The kernel reports a reset socket as hung up as well.
    poll(&mut fds, Some(&zero)).is_ok()
        && fds[0].revents().contains(PollFlags::RDHUP)
        && !fds[0].revents().contains(PollFlags::HUP)
}

/// Whether a socket has a pending error. The error stays.
pub fn has_error(socket: impl AsFd) -> bool {
    let mut fds = [PollFd::new(&socket, PollFlags::empty())];
    let zero = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut fds, Some(&zero)).is_ok() && fds[0].revents().contains(PollFlags::ERR)
}

/// A TCP socket by a descriptor of its own, or by a *lent* number, closed by the number's owner.
///
/// The type shows only a descriptor. The methods of `std` go through functions of libc, possibly replaced
/// by the owner of the number.
#[derive(Debug)]
pub struct HeldTcp(Holding);

#[derive(Debug)]
enum Holding {
    Own(OwnedFd),
    /// With the kernel's number of the socket.
    Lent(BorrowedFd<'static>, u64),
}

impl From<OwnedFd> for HeldTcp {
    fn from(fd: OwnedFd) -> HeldTcp {
        HeldTcp(Holding::Own(fd))
    }
}

impl HeldTcp {
    /// The same socket by a lent number. `None`: the number is another file's.
    pub fn lent(&self, fd: RawFd) -> Option<HeldTcp> {
        if fd < 0 {
            return None;
        }
        // SAFETY: the number is not -1. No memory depends on the number: calls on a closed number fail, and
        // `is_there` finds out whether the number is another file's by now.
        let lent = unsafe { BorrowedFd::borrow_raw(fd) };
        let cookie = sockopt::socket_cookie(lent).ok()?;
        let is_same = sockopt::socket_cookie(self) == Ok(cookie);
        is_same.then_some(HeldTcp(Holding::Lent(lent, cookie)))
    }

    /// The number, if lent.
    pub fn lent_number(&self) -> Option<RawFd> {
        match &self.0 {
            Holding::Own(_) => None,
            Holding::Lent(lent, _) => Some(lent.as_raw_fd()),
        }
    }

    /// Whether the number is still the socket's. The owner of a lent number may have closed the number.
    pub fn is_there(&self) -> bool {
        match &self.0 {
            Holding::Own(_) => true,
            Holding::Lent(lent, cookie) => sockopt::socket_cookie(lent) == Ok(*cookie),
        }
    }

    /// Takes over a lent number. From now on the owner does not close the number.
    pub fn adopt(&mut self) {
        if let Holding::Lent(lent, _) = &self.0
            && self.is_there()
        {
            // SAFETY: the number is open, and by the caller's word the owner leaves the close to this
            // value.
            self.0 = Holding::Own(unsafe { OwnedFd::from_raw_fd(lent.as_raw_fd()) });
        }
    }
}

impl AsFd for HeldTcp {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match &self.0 {
            Holding::Own(own) => own.as_fd(),
            Holding::Lent(lent, _) => *lent,
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on may stop")]
mod tests {
    use super::*;
    use std::io::Read;
    use std::net::{Shutdown, TcpListener, TcpStream};

    fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (client, listener.accept().unwrap().0)
    }

    fn held(stream: &TcpStream) -> HeldTcp {
        OwnedFd::from(stream.try_clone().unwrap()).into()
    }

    #[test]
    fn a_lent_number_is_not_closed_and_an_own_one_is() {
        let (client, mut server) = pair();
        let own = held(&client);
        let lent = own.lent(client.as_raw_fd()).unwrap();
        assert_eq!(lent.lent_number(), Some(client.as_raw_fd()));
        assert_eq!(own.lent_number(), None);
        drop((own, lent));
        assert!(client.peer_addr().is_ok());
        drop(HeldTcp::from(OwnedFd::from(client)));
        assert_eq!(server.read(&mut [0]).unwrap(), 0);
    }

    #[test]
    fn a_number_that_is_taken_over_is_closed() {
        let (client, mut server) = pair();
        let mut lent = held(&client).lent(client.as_raw_fd()).unwrap();
        std::mem::forget(client);
        lent.adopt();
        assert_eq!(lent.lent_number(), None);
        drop(lent);
        assert_eq!(server.read(&mut [0]).unwrap(), 0);
    }

    #[test]
    fn a_number_of_another_file_is_neither_lent_nor_there() {
        let (client, server) = pair();
        let own = held(&client);
        assert!(own.lent(server.as_raw_fd()).is_none() && own.lent(-1).is_none());
        let lent = own.lent(client.as_raw_fd()).unwrap();
        assert!(lent.is_there() && own.is_there());
        rustix::io::dup2(&server, &mut std::mem::ManuallyDrop::new(OwnedFd::from(client))).unwrap();
        assert!(!lent.is_there() && own.is_there());
    }

    #[test]
    fn a_fin_is_told_from_a_reset() {
        let (client, server) = pair();
        assert!(!has_fin(&server));
        client.shutdown(Shutdown::Write).unwrap();
        assert_eq!((&server).read(&mut [0]).unwrap(), 0);
        assert!(has_fin(&server));
        reset_tcp(&client);
        // The reset is on its way.
        while has_fin(&server) {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}
