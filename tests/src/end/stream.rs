// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `End`: a stream here or elsewhere.

use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::net::{Shutdown, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use guest_driver::SmcStream;
use serde::de::DeserializeOwned;

use crate::agent::far::Far;
use crate::agent::wire::{Call, Failure, Nature, Op};

/// Longest piece of a whole buffer, bytes.
const PIECE: usize = 256 << 10;

/// One end of a connection, with the calls of [`SmcStream`].
#[derive(Debug)]
pub struct End(Kind);

#[derive(Debug)]
enum Kind {
    Here(SmcStream),
    There(Remote),
}

#[derive(Debug)]
struct Remote {
    far: Arc<Far>,
    stream: u64,
}

impl Remote {
    #[track_caller]
    fn ask<T: DeserializeOwned>(&self, op: Op) -> io::Result<T> {
        self.send(op, &[])
    }

    #[track_caller]
    fn send<T: DeserializeOwned>(&self, op: Op, bytes: &[u8]) -> io::Result<T> {
        Ok(self.far.call(&Call::Stream { stream: self.stream, op }, bytes)?.0)
    }

    #[track_caller]
    fn receive(&self, op: Op) -> io::Result<Vec<u8>> {
        Ok(self.far.call::<usize>(&Call::Stream { stream: self.stream, op }, &[])?.1)
    }
}

impl Drop for Remote {
    fn drop(&mut self) {
        self.far.release(self.stream);
    }
}

/// The same call here or there.
macro_rules! either {
    ($self:ident, $stream:ident => $here:expr, $op:expr) => {
        match &$self.0 {
            Kind::Here($stream) => $here,
            Kind::There(remote) => remote.ask($op),
        }
    };
}

/// See the calls of the same names of [`SmcStream`] for errors.
#[allow(clippy::missing_errors_doc, reason = "they are those of SmcStream")]
impl End {
    pub(super) fn here(stream: SmcStream) -> End {
        End(Kind::Here(stream))
    }

    pub(super) fn there(far: &Arc<Far>, stream: u64) -> End {
        End(Kind::There(Remote { far: far.clone(), stream }))
    }

    /// The stream itself, for tests in need of a descriptor. Panics for an end elsewhere.
    #[track_caller]
    pub fn stream(&self) -> &SmcStream {
        match &self.0 {
            Kind::Here(stream) => stream,
            Kind::There(_) => panic!("a test that polls the far end's descriptors"),
        }
    }

    /// The negotiated carrier.
    #[track_caller]
    pub fn nature(&self) -> Nature {
        match &self.0 {
            Kind::Here(stream) => stream.info().into(),
            Kind::There(remote) => remote.ask(Op::ConnectionInfo).unwrap(),
        }
    }

    /// Whether SMC carries the connection.
    #[track_caller]
    pub fn is_smc(&self) -> bool {
        self.nature().is_smc()
    }

    /// The local address.
    #[track_caller]
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        either!(self, stream => stream.local_addr(), Op::LocalAddr)
    }

    /// The peer's address.
    #[track_caller]
    pub fn peer_addr(&self) -> io::Result<SocketAddr> {
        either!(self, stream => stream.peer_addr(), Op::PeerAddr)
    }

    /// Another handle of the same connection.
    #[track_caller]
    pub fn try_clone(&self) -> io::Result<End> {
        match &self.0 {
            Kind::Here(stream) => Ok(End::here(stream.try_clone()?)),
            Kind::There(remote) => Ok(End::there(&remote.far, remote.ask(Op::Clone)?)),
        }
    }

    /// Reads.
    #[track_caller]
    pub fn recv(&self, buf: &mut [u8]) -> io::Result<usize> {
        match &self.0 {
            Kind::Here(stream) => stream.recv(buf),
            Kind::There(remote) => Ok(copy(&remote.receive(Op::Recv(buf.len()))?, buf)),
        }
    }

    /// Writes.
    #[track_caller]
    pub fn send(&self, buf: &[u8]) -> io::Result<usize> {
        match &self.0 {
            Kind::Here(stream) => stream.send(buf),
            Kind::There(remote) => remote.send(Op::Send, buf),
        }
    }

    /// Reads without taking.
    #[track_caller]
    pub fn peek(&self, buf: &mut [u8]) -> io::Result<usize> {
        match &self.0 {
            Kind::Here(stream) => stream.peek(buf),
            Kind::There(remote) => Ok(copy(&remote.receive(Op::Peek(buf.len()))?, buf)),
        }
    }

    /// Sends a byte of urgent data.
    #[track_caller]
    pub fn send_urgent(&self, byte: u8) -> io::Result<()> {
        either!(self, stream => stream.send_urgent(byte), Op::SendUrgent(byte))
    }

    /// Takes the peer's urgent byte.
    #[track_caller]
    pub fn recv_urgent(&self) -> io::Result<u8> {
        either!(self, stream => stream.recv_urgent(), Op::RecvUrgent)
    }

    /// Whether urgent data is announced or there.
    #[track_caller]
    pub fn has_urgent(&self) -> io::Result<bool> {
        either!(self, stream => stream.has_urgent(), Op::HasUrgent)
    }

    /// Whether the next read starts at the urgent mark.
    #[track_caller]
    pub fn at_mark(&self) -> io::Result<Option<bool>> {
        either!(self, stream => stream.at_mark(), Op::AtMark)
    }

    /// Leaves urgent bytes in the stream.
    #[track_caller]
    pub fn set_oob_inline(&self, inline: bool) -> io::Result<()> {
        either!(self, stream => stream.set_oob_inline(inline), Op::SetOobInline(inline))
    }

    /// Bytes readable without waiting.
    #[track_caller]
    pub fn readable(&self) -> io::Result<usize> {
        either!(self, stream => stream.readable(), Op::Readable)
    }

    /// Bytes written but not yet read by the peer.
    #[track_caller]
    pub fn unread_by_peer(&self) -> Option<usize> {
        match &self.0 {
            Kind::Here(stream) => stream.unread_by_peer(),
            Kind::There(remote) => remote.ask(Op::UnreadByPeer).unwrap(),
        }
    }

    /// Ends one half of the connection, or both.
    #[track_caller]
    pub fn shutdown(&self, how: Shutdown) -> io::Result<()> {
        either!(self, stream => stream.shutdown(how), Op::shutdown(how))
    }

    /// Whether calls return `WouldBlock` instead of waiting.
    #[track_caller]
    pub fn set_nonblocking(&self, nonblocking: bool) -> io::Result<()> {
        either!(self, stream => stream.set_nonblocking(nonblocking),
            Op::SetNonblocking(nonblocking))
    }

    /// How long a read waits.
    #[track_caller]
    pub fn set_read_timeout(&self, limit: Option<Duration>) -> io::Result<()> {
        either!(self, stream => stream.set_read_timeout(limit), Op::SetReadTimeout(limit))
    }

    /// How long a write waits.
    #[track_caller]
    pub fn set_write_timeout(&self, limit: Option<Duration>) -> io::Result<()> {
        either!(self, stream => stream.set_write_timeout(limit), Op::SetWriteTimeout(limit))
    }

    /// The read timeout.
    #[track_caller]
    pub fn read_timeout(&self) -> io::Result<Option<Duration>> {
        either!(self, stream => stream.read_timeout(), Op::ReadTimeout)
    }

    /// The write timeout.
    #[track_caller]
    pub fn write_timeout(&self) -> io::Result<Option<Duration>> {
        either!(self, stream => stream.write_timeout(), Op::WriteTimeout)
    }

    /// Sets the behaviour at close.
    #[track_caller]
    pub fn set_linger(&self, linger: Option<Duration>) -> io::Result<()> {
        either!(self, stream => stream.set_linger(linger), Op::SetLinger(linger))
    }

    /// TCP_NODELAY.
    #[track_caller]
    pub fn set_nodelay(&self, nodelay: bool) -> io::Result<()> {
        either!(self, stream => stream.set_nodelay(nodelay), Op::SetNodelay(nodelay))
    }

    /// TCP_NODELAY.
    #[track_caller]
    pub fn nodelay(&self) -> io::Result<bool> {
        either!(self, stream => stream.nodelay(), Op::Nodelay)
    }

    /// Time to live of packets.
    #[track_caller]
    pub fn set_ttl(&self, ttl: u32) -> io::Result<()> {
        either!(self, stream => stream.set_ttl(ttl), Op::SetTtl(ttl))
    }

    /// Time to live of packets.
    #[track_caller]
    pub fn ttl(&self) -> io::Result<u32> {
        either!(self, stream => stream.ttl(), Op::Ttl)
    }

    /// The pending error, once.
    #[track_caller]
    pub fn take_error(&self) -> io::Result<Option<io::Error>> {
        match &self.0 {
            Kind::Here(stream) => stream.take_error(),
            Kind::There(remote) => {
                Ok(remote.ask::<Option<Failure>>(Op::TakeError)?.map(io::Error::from))
            }
        }
    }
}

fn copy(from: &[u8], to: &mut [u8]) -> usize {
    to[..from.len()].copy_from_slice(from);
    from.len()
}

impl Read for &End {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        self.recv(buf)
    }

    fn read_vectored(&mut self, bufs: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        match &self.0 {
            Kind::Here(stream) => (&mut &*stream).read_vectored(bufs),
            Kind::There(remote) => {
                let lens = bufs.iter().map(|buf| buf.len()).collect();
                let bytes = remote.receive(Op::ReadVectored(lens))?;
                let mut rest = bytes.as_slice();
                for buf in bufs {
                    let (part, more) = rest.split_at(buf.len().min(rest.len()));
                    copy(part, buf);
                    rest = more;
                }
                Ok(bytes.len())
            }
        }
    }
}

impl Write for &End {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        self.send(buf)
    }

    fn write_vectored(&mut self, bufs: &[IoSlice<'_>]) -> io::Result<usize> {
        match &self.0 {
            Kind::Here(stream) => (&mut &*stream).write_vectored(bufs),
            Kind::There(remote) => {
                let lens = bufs.iter().map(|buf| buf.len()).collect();
                let bytes: Vec<u8> = bufs.iter().flat_map(|buf| buf.iter().copied()).collect();
                remote.send(Op::WriteVectored(lens), &bytes)
            }
        }
    }

    fn write_all(&mut self, buf: &[u8]) -> io::Result<()> {
        match &self.0 {
            Kind::Here(stream) => (&mut &*stream).write_all(buf),
            // By `write` the rest would travel to the far end again and again.
            Kind::There(remote) => {
                buf.chunks(PIECE).try_for_each(|piece| remote.send(Op::WriteAll, piece))
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Read for End {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        (&mut &*self).read(buf)
    }

    fn read_vectored(&mut self, bufs: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        (&mut &*self).read_vectored(bufs)
    }
}

impl Write for End {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        (&mut &*self).write(buf)
    }

    fn write_vectored(&mut self, bufs: &[IoSlice<'_>]) -> io::Result<usize> {
        (&mut &*self).write_vectored(bufs)
    }

    fn write_all(&mut self, buf: &[u8]) -> io::Result<()> {
        (&mut &*self).write_all(buf)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
