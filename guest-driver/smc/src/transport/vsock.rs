//! Virtio sockets: streams between virtual machines and their host, or between siblings where the
//! host's device carries them (`vhost-device-vsock`).

use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd};

use socket2::{Domain, SockAddr, Socket, Type};

use super::sockets::Epoll;
use super::{Stream, Transport};

/// In an address to listen on: every CID of this machine, any free port.
pub(crate) const ANY_CID: u32 = u32::MAX;
/// The CID by which a machine reaches itself, if its kernel loops back.
#[cfg(test)]
pub(super) const LOCAL_CID: u32 = 1;

/// Virtio sockets.
pub(crate) struct Vsock {
    /// Under which clients find a server of this machine.
    pub(crate) cid: u32,
}

/// A connection.
pub(crate) struct VsockStream(Socket);

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
        Ok(VsockStream(listener.accept()?.0))
    }

    fn connect(&self, address: &str) -> io::Result<VsockStream> {
        let address = parse(address).ok_or(io::ErrorKind::InvalidInput)?;
        let socket = Socket::new(Domain::VSOCK, Type::STREAM, None)?;
        socket.connect(&address)?;
        Ok(VsockStream(socket))
    }

    fn poll(&self) -> io::Result<Epoll> {
        Epoll::new()
    }
}

impl Read for VsockStream {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        self.0.read(buf)
    }
}

impl Write for VsockStream {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        self.0.write(buf)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl AsFd for VsockStream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Stream for VsockStream {
    fn set_nonblocking(&self, nonblocking: bool) -> io::Result<()> {
        self.0.set_nonblocking(nonblocking)
    }

    fn send_at_once(&self) -> io::Result<()> {
        Ok(())
    }

    fn finish(&self) -> io::Result<()> {
        self.0.shutdown(Shutdown::Write)
    }
}
