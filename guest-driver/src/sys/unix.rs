//! Connections to Unix sockets.

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};

/// Connects to a Unix socket. If the queue of the socket is full, the call waits for `timeout`.
///
/// # Errors
/// [`io::ErrorKind::WouldBlock`]: the queue is full. Others: no program listens there, or this user
/// may not connect.
pub fn connect_unix(path: &Path, timeout: Duration) -> io::Result<OwnedFd> {
    let deadline = Instant::now() + timeout;
    let address = SocketAddrUnix::new(path)?;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
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
    Ok(socket)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on may stop")]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;

    #[test]
    fn waits_for_room_in_the_queue_as_long_as_it_may() {
        let path = std::env::temp_dir().join(format!("smc-unix-{}.sock", std::process::id()));
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
        std::fs::remove_file(&path).unwrap();
    }
}
