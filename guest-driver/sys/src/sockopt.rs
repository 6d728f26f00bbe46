// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Properties of sockets, reported by the kernel.

use std::io;
use std::os::fd::{AsFd, AsRawFd};

/// Length of the kernel's `struct tcp_info` up to and including `tcpi_bytes_received`, in words of
/// eight bytes.
const WORDS: usize = 17;
/// Word of `tcpi_bytes_acked`.
const ACKED: usize = 15;
/// Word of `tcpi_bytes_received`.
const RECEIVED: usize = 16;

/// Counters of a TCP connection in the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TcpCounts {
    /// State, as in `include/net/tcp_states.h`: 1 is ESTABLISHED.
    pub state: u8,
    /// Bytes acknowledged by the peer's kernel.
    pub acknowledged: u64,
    /// Bytes received.
    pub received: u64,
}

/// Asks the kernel for a connection's counters (TCP_INFO).
///
/// # Errors
/// The socket is not a TCP socket, or the kernel is older than 4.1.
pub fn tcp_counts(socket: impl AsFd) -> io::Result<TcpCounts> {
    let mut words = [0u64; WORDS];
    let mut length = size_of_val(&words) as libc::socklen_t;
    // SAFETY: both addresses are of live variables, and the second holds the length of the first; any bytes
    // make an integer.
    let result = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            std::ptr::from_mut(&mut words).cast(),
            &mut length,
        )
    };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    if (length as usize) < size_of_val(&words) {
        return Err(io::ErrorKind::Unsupported.into());
    }
    let [state, ..] = words[0].to_ne_bytes();
    Ok(TcpCounts { state, acknowledged: words[ACKED], received: words[RECEIVED] })
}

/// Has the first write of a socket connect it, with the bytes in the SYN (TCP_FASTOPEN_CONNECT). A
/// connect(2) before that returns at once.
///
/// # Errors
/// The socket is not a TCP socket, or the kernel is older than 4.11.
pub fn set_fast_open_connect(socket: impl AsFd) -> io::Result<()> {
    let on: libc::c_int = 1;
    // SAFETY: the value lives and has the stated length.
    let result = unsafe {
        libc::setsockopt(
            socket.as_fd().as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_FASTOPEN_CONNECT,
            std::ptr::from_ref(&on).cast(),
            size_of_val(&on) as libc::socklen_t,
        )
    };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// The process at the other end of a Unix socket, at the time of its connect or listen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerProcess {
    /// The number in this PID namespace. `None`: the process is in another namespace.
    pub pid: Option<i32>,
    /// The effective user in this user namespace.
    pub uid: u32,
}

/// Asks the kernel for the process at the other end of a Unix socket (SO_PEERCRED).
///
/// # Errors
/// The socket is not a Unix socket.
pub fn peer_process(socket: impl AsFd) -> io::Result<PeerProcess> {
    let mut who = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut length = size_of_val(&who) as libc::socklen_t;
    // SAFETY: both addresses are of live variables, and the second holds the length of the first; any bytes
    // make three integers.
    let result = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            std::ptr::from_mut(&mut who).cast(),
            &mut length,
        )
    };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(PeerProcess { pid: (who.pid > 0).then_some(who.pid), uid: who.uid })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};

    #[test]
    fn bytes_of_both_directions_are_counted() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut server, _) = listener.accept().unwrap();
        client.write_all(&[7; 1000]).unwrap();
        server.read_exact(&mut [0; 1000]).unwrap();
        let counts = tcp_counts(&server).unwrap();
        assert_eq!((counts.state, counts.received), (1, 1000));
        assert_eq!(tcp_counts(&client).unwrap().received, 0);
        assert!(tcp_counts(std::os::unix::net::UnixStream::pair().unwrap().0).is_err());
    }

    #[test]
    fn the_other_end_of_a_pair_is_this_process() {
        let (one, _two) = std::os::unix::net::UnixStream::pair().unwrap();
        let this = i32::try_from(std::process::id()).unwrap();
        let uid = rustix::process::geteuid().as_raw();
        assert_eq!(peer_process(&one).unwrap(), PeerProcess { pid: Some(this), uid });
        assert!(peer_process(std::fs::File::open("/proc/self/stat").unwrap()).is_err());
    }
}
