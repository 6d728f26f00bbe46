// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Connections to Unix sockets.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};

use super::process::effective_user;
use super::{out_of_the_way, peer_process};

/// Connects to a Unix socket. If the queue of the socket is full, the call waits for `timeout`.
///
/// # Errors
/// [`io::ErrorKind::WouldBlock`]: the queue is full. [`io::ErrorKind::PermissionDenied`]: this user may not
/// connect, or the socket is in a directory of this user and its maker is neither this user nor root.
/// Others: no program listens there.
pub fn connect_unix(path: &Path, timeout: Duration) -> io::Result<OwnedFd> {
    connect_kind(path, timeout, SocketType::STREAM)
}

/// Variant of [`connect_unix`] for a socket of packets.
///
/// # Errors
/// The errors of [`connect_unix`].
pub fn connect_unix_packets(path: &Path, timeout: Duration) -> io::Result<OwnedFd> {
    connect_kind(path, timeout, SocketType::SEQPACKET)
}

/// Whether an error of [`connect_unix`] means a socket of packets.
pub fn is_other_kind(error: &io::Error) -> bool {
    error.raw_os_error() == Some(libc::EPROTOTYPE)
}

fn connect_kind(path: &Path, timeout: Duration, kind: SocketType) -> io::Result<OwnedFd> {
    let deadline = Instant::now() + timeout;
    let address = SocketAddrUnix::new(path)?;
    let socket =
        out_of_the_way(|| socket_with(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None))?;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        // For the socket, a time-out of zero would be none.
        rustix::io::ioctl_fionbio(&socket, left.is_zero())?;
        set_socket_timeout(&socket, Timeout::Send, Some(left).filter(|left| !left.is_zero()))?;
        match connect(&socket, &address) {
            Err(Errno::INTR) => {}
            result => {
                result?;
                break;
            }
        }
    }
    rustix::io::ioctl_fionbio(&socket, false)?;
    set_socket_timeout(&socket, Timeout::Send, None)?;
    let listener = peer_process(&socket)?.uid;
    if may_listen(listener, owner_of_directory(path)?, effective_user()) {
        return Ok(socket);
    }
    let message = format!("user {listener} listens there, in a directory of your own");
    Err(io::Error::new(io::ErrorKind::PermissionDenied, message))
}

fn owner_of_directory(path: &Path) -> io::Result<u32> {
    let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    Ok(std::fs::metadata(directory.unwrap_or(Path::new(".")))?.uid())
}

/// Whether a process of the user `listener` may have made a socket in a directory of `owner`, for `user` to
/// connect to. In another user's directory the owner decides.
fn may_listen(listener: u32, owner: u32, user: u32) -> bool {
    owner != user || listener == user || listener == 0
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on may stop")]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;

    #[test]
    fn in_an_own_directory_only_the_user_and_root_may_listen() {
        let (user, other) = (1000, 1001);
        assert!(may_listen(user, user, user));
        assert!(may_listen(0, user, user));
        assert!(!may_listen(other, user, user));
        assert!(!may_listen(other, 0, 0), "nor in one of root's, for root");
        assert!(may_listen(other, 0, user), "root has let it");
        assert!(may_listen(other, other, user), "the user has named that directory");
    }

    #[test]
    fn tells_a_socket_of_packets_from_one_of_bytes() {
        let own = smc_test_support::TestDir::new();
        let path = own.path("packets.sock");
        let listener =
            socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None);
        let listener = listener.unwrap();
        rustix::net::bind(&listener, &SocketAddrUnix::new(&path).unwrap()).unwrap();
        rustix::net::listen(&listener, 1).unwrap();
        assert!(is_other_kind(&connect_unix(&path, Duration::ZERO).unwrap_err()));
        connect_unix_packets(&path, Duration::ZERO).unwrap();
    }

    #[test]
    fn waits_for_room_in_the_queue_as_long_as_it_may() {
        let own = smc_test_support::TestDir::new();
        let path = own.path("bytes.sock");
        let listener = UnixListener::bind(&path).unwrap();
        rustix::net::listen(&listener, 0).unwrap();
        let first = connect_unix(&path, Duration::ZERO).unwrap();
        let full = |timeout| connect_unix(&path, timeout).unwrap_err().kind();
        assert_eq!(full(Duration::ZERO), io::ErrorKind::WouldBlock);
        let start = Instant::now();
        assert_eq!(full(Duration::from_millis(30)), io::ErrorKind::WouldBlock);
        assert!(start.elapsed() >= Duration::from_millis(30));
        std::thread::scope(|scope| {
            scope.spawn(|| connect_unix(&path, Duration::from_secs(60)).unwrap());
            std::thread::sleep(Duration::from_millis(20));
            listener.accept().unwrap();
        });
        drop((first, listener));
        let gone = connect_unix(&path, Duration::ZERO).unwrap_err();
        assert_eq!(gone.kind(), io::ErrorKind::ConnectionRefused);
    }
}
