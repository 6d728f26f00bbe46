//! TCP as the handshake uses it.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use rustix::net::sockopt;
use smc_core::handshake::ClcReader;

/// Reads what `reader` awaits from a non-blocking stream. `false`: more has to come.
///
/// Nothing behind the message is taken from the stream (CLC-57).
pub(super) fn fill(mut tcp: &TcpStream, reader: &mut ClcReader) -> Result<bool, super::Broken> {
    while reader.message().is_none() {
        match tcp.read(reader.space()) {
            Ok(n) => reader.filled(n)?,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(true)
}

/// Sends a whole CLC message on a non-blocking stream. Messages are small and the send buffer of
/// a fresh connection is empty, so waiting is the exception.
pub(super) fn send(tcp: &TcpStream, message: &[u8]) -> io::Result<()> {
    let mut rest = message;
    while !rest.is_empty() {
        match (&mut &*tcp).write(rest) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(n) => rest = rest.get(n..).unwrap_or_default(),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                wait(tcp, rustix::event::PollFlags::OUT, Duration::from_secs(1))?;
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Waits until the stream is readable, until `deadline` at most.
pub(super) fn wait_readable(tcp: &TcpStream, deadline: Instant) -> io::Result<()> {
    let left = deadline.saturating_duration_since(Instant::now());
    wait(tcp, rustix::event::PollFlags::IN, left)
}

fn wait(tcp: &TcpStream, flags: rustix::event::PollFlags, timeout: Duration) -> io::Result<()> {
    let mut fds = [rustix::event::PollFd::new(tcp, flags)];
    let timeout = rustix::event::Timespec {
        tv_sec: timeout.as_secs().min(3600) as i64,
        tv_nsec: i64::from(timeout.subsec_nanos()),
    };
    match rustix::event::poll(&mut fds, Some(&timeout)) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Breaks a TCP connection by RST.
pub(crate) fn reset(tcp: TcpStream) {
    // Closing with a linger time of zero sends RST.
    if let Err(error) = sockopt::set_socket_linger(&tcp, Some(Duration::ZERO)) {
        tracing::debug!(%error, "SO_LINGER");
    }
    drop(tcp);
}
