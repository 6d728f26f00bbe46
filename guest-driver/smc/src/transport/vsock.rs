// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Virtio sockets: streams between virtual machines and their host, or between siblings if the
//! host's device supports siblings (`vhost-device-vsock`). A guest needs nothing special for
//! siblings, unless the guest is itself a host of guests.

use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd};

use socket2::{Domain, SockAddr, Socket, Type};

use super::sockets::Epoll;
use super::{AsyncStream, Stream, Transport};

/// In an address to listen on: every CID of this machine, any free port.
pub(crate) const ANY_CID: u32 = u32::MAX;
/// The CID of the own machine, if the kernel has loopback.
#[cfg(test)]
pub(super) const LOCAL_CID: u32 = 1;

/// Virtio sockets.
pub(crate) struct Vsock {
    /// The CID for clients to find a server of this machine.
    pub(crate) cid: u32,
}

/// The CID of every host; larger CIDs belong to guests.
const HOST_CID: u32 = 2;
/// Limit of a single write, in bytes, if the peer is a guest. Between siblings,
/// `vhost-device-vsock` passes packets on unchanged, and the receive buffers of a Linux guest hold
/// 3732 bytes after the header: the rest of a longer packet is lost, and the connection stalls.
const PIECE: usize = 3584;

/// A connection.
pub(crate) struct VsockStream {
    socket: Socket,
    /// Limit of a write, bytes.
    piece: usize,
}

impl VsockStream {
    fn new(socket: Socket, peer: &SockAddr) -> VsockStream {
        let guest = peer.as_vsock_address().is_some_and(|(cid, _)| cid > HOST_CID);
        VsockStream { socket, piece: if guest { PIECE } else { usize::MAX } }
    }
}

fn bind(cid: u32) -> io::Result<Socket> {
    let socket = Socket::new(Domain::VSOCK, Type::STREAM, None)?;
    socket.bind(&SockAddr::vsock(cid, ANY_CID))?;
    Ok(socket)
}

/// Whether [`LOCAL_CID`] is this machine; nothing is sent to find out.
#[cfg(test)]
pub(super) fn has_loopback() -> bool {
    bind(LOCAL_CID).is_ok()
}

/// `CID:PORT`.
fn parse(address: &str) -> Option<SockAddr> {
    let (cid, port) = address.split_once(':')?;
    Some(SockAddr::vsock(cid.parse().ok()?, port.parse().ok()?))
}

impl Transport for Vsock {
    type Listener = Socket;
    type Stream = VsockStream;
    type Poll = Epoll;

    fn listen(&self) -> io::Result<(Socket, String)> {
        let socket = bind(ANY_CID)?;
        socket.listen(128)?;
        let port = socket.local_addr()?.as_vsock_address().map(|(_, port)| port);
        let port = port.ok_or_else(|| io::Error::other("a virtio socket without a port"))?;
        Ok((socket, format!("{}:{port}", self.cid)))
    }

    fn accept(&self, listener: &Socket) -> io::Result<VsockStream> {
        let (socket, peer) = listener.accept()?;
        Ok(VsockStream::new(socket, &peer))
    }

    fn connect(&self, address: &str) -> io::Result<VsockStream> {
        let address = parse(address).ok_or(io::ErrorKind::InvalidInput)?;
        let socket = Socket::new(Domain::VSOCK, Type::STREAM, None)?;
        socket.connect(&address)?;
        Ok(VsockStream::new(socket, &address))
    }

    fn poll(&self) -> io::Result<Epoll> {
        Epoll::new()
    }
}

impl Read for VsockStream {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        self.socket.read(buf)
    }
}

impl Write for VsockStream {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        self.socket.write(buf.get(..self.piece).unwrap_or(buf))
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Stream for VsockStream {
    fn set_nonblocking(&self, nonblocking: bool) -> io::Result<()> {
        self.socket.set_nonblocking(nonblocking)
    }

    fn send_at_once(&self) -> io::Result<()> {
        Ok(())
    }

    fn finish(&self) -> io::Result<()> {
        self.socket.shutdown(Shutdown::Write)
    }

    fn readiness_fd(&self) -> io::Result<BorrowedFd<'_>> {
        Ok(self.socket.as_fd())
    }

    fn into_tokio(self) -> io::Result<Box<dyn AsyncStream>> {
        Err(io::ErrorKind::Unsupported.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn siblings_get_packets_that_fit_into_their_buffers() {
        for (cid, piece) in [(1, usize::MAX), (2, usize::MAX), (3, PIECE), (4_000_000, PIECE)] {
            let (socket, _) = Socket::pair(Domain::UNIX, Type::STREAM, None).unwrap();
            assert_eq!(VsockStream::new(socket, &SockAddr::vsock(cid, 1)).piece, piece, "{cid}");
        }
        let (near, far) = Socket::pair(Domain::UNIX, Type::STREAM, None).unwrap();
        let mut stream = VsockStream::new(near, &SockAddr::vsock(3, 1));
        assert_eq!(stream.write(&[7; 4096]).unwrap(), PIECE);
        assert_eq!(stream.write(&[7; 100]).unwrap(), 100);
        stream.finish().unwrap();
        let mut got = Vec::new();
        (&far).read_to_end(&mut got).unwrap();
        assert_eq!(got.len(), PIECE + 100);
    }
}
