// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The control connection: JSON lines with limits on length and time.

use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use serde::Serialize;
use serde::de::DeserializeOwned;
use socket2::{SockRef, TcpKeepalive};

/// Longest line, bytes.
const LINE: usize = 16 << 10;
/// How long a line may take to be taken over by the kernel.
const WRITE: Duration = Duration::from_secs(30);

/// One end of the control connection.
#[derive(Debug)]
pub(super) struct Control {
    stream: TcpStream,
    /// Bytes read after the last line.
    rest: Vec<u8>,
}

impl Control {
    /// Over a connection. A peer whose machine is gone is noticed after about half a minute.
    pub(super) fn new(stream: TcpStream) -> io::Result<Control> {
        stream.set_nodelay(true)?;
        stream.set_write_timeout(Some(WRITE))?;
        let second = Duration::from_secs(1);
        let alive = TcpKeepalive::new().with_time(10 * second).with_interval(5 * second);
        SockRef::from(&stream).set_tcp_keepalive(&alive.with_retries(4))?;
        Ok(Control { stream, rest: Vec::new() })
    }

    /// The own address, in IPv4 form for a connection over IPv4.
    pub(super) fn local(&self) -> io::Result<SocketAddr> {
        let local = self.stream.local_addr()?;
        match local.ip().to_canonical() {
            v4 @ IpAddr::V4(_) => Ok(SocketAddr::new(v4, local.port())),
            // Keep the scope: a link-local address is meaningless without its scope.
            IpAddr::V6(_) => Ok(local),
        }
    }

    /// The peer's address.
    pub(super) fn peer(&self) -> io::Result<SocketAddr> {
        self.stream.peer_addr()
    }

    /// Sends a line.
    pub(super) fn send(&mut self, what: &impl Serialize) -> io::Result<()> {
        let mut line = serde_json::to_vec(what)?;
        line.push(b'\n');
        self.stream.write_all(&line)
    }

    /// The next line; `None` after `timeout`.
    ///
    /// # Errors
    /// `UnexpectedEof`: the peer has closed. `InvalidData`: not an expected line.
    pub(super) fn receive<T: DeserializeOwned>(
        &mut self,
        timeout: Duration,
    ) -> io::Result<Option<T>> {
        let deadline = Instant::now() + timeout;
        let mut seen = 0;
        loop {
            if let Some(end) = self.rest.iter().skip(seen).position(|&byte| byte == b'\n') {
                let line: Vec<u8> = self.rest.drain(..=seen + end).collect();
                return Ok(Some(serde_json::from_slice(&line).map_err(io::Error::from)?));
            }
            seen = self.rest.len();
            if seen >= LINE {
                return Err(io::Error::new(io::ErrorKind::InvalidData, "a line has no end"));
            }
            let left = deadline.saturating_duration_since(Instant::now());
            // Zero would mean no timeout. Data already received is read in any case.
            self.stream.set_read_timeout(Some(left.max(Duration::from_millis(1))))?;
            let mut piece = [0u8; 4096];
            let room = (LINE - seen).min(piece.len());
            match self.stream.read(piece.get_mut(..room).unwrap_or_default()) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(n) => self.rest.extend_from_slice(piece.get(..n).unwrap_or_default()),
                Err(error) => match error.kind() {
                    io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut if left.is_zero() => {
                        return Ok(None);
                    }
                    io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => {}
                    _ => return Err(error),
                },
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    fn pair() -> (Control, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let peer = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (Control::new(listener.accept().unwrap().0).unwrap(), peer)
    }

    use smc_test_support::TIMEOUT as SOON;

    #[test]
    fn lines_are_heard_one_by_one_however_they_arrive() {
        let (mut control, mut peer) = pair();
        peer.write_all(b"1\n2\n3").unwrap();
        assert_eq!(control.receive(SOON).unwrap(), Some(1));
        assert_eq!(control.receive(SOON).unwrap(), Some(2));
        assert_eq!(control.receive::<i32>(Duration::ZERO).unwrap(), None);
        peer.write_all(b"4\n").unwrap();
        assert_eq!(control.receive(SOON).unwrap(), Some(34));
        drop(peer);
        let end = control.receive::<i32>(SOON).unwrap_err();
        assert_eq!(end.kind(), io::ErrorKind::UnexpectedEof);
    }

    #[test]
    fn refuses_lines_without_end_and_lines_that_mean_nothing() {
        let (mut control, mut peer) = pair();
        peer.write_all(&[b'1'; LINE]).unwrap();
        let error = control.receive::<i32>(SOON).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
        let (mut control, mut peer) = pair();
        peer.write_all(b"{\"x\n").unwrap();
        assert!(control.receive::<i32>(SOON).is_err());
    }
}
