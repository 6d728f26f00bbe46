// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `SmcStream`: a connection, over SMC-D, SMC-R or TCP.

use std::fmt;
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ism_sys::OnceBox;
use rustix::net::{RecvFlags, SendFlags, sockopt};
use smc_core::carrier::Role;
use smc_core::handshake::{Awaited, HandshakeError};

use super::statistics::TcpSocket;
use super::{ConnectionInfo, KeepAlive, Stack};
use crate::conn::{Carrier, Conn};
use crate::handshake::{self, Broken, EstablishedConn, Outcome};
use crate::reactor::wait::Deadline;
use crate::traffic::ConnectionObserver;
use smc_info::Fallback;

/// A connection between two programs, with the behaviour of [`std::net::TcpStream`] (SOCK-1,
/// SOCK-3).
///
/// The connection starts as TCP. If both ends speak SMC and share a virtio-ism fabric or a RoCE
/// network, bytes travel through shared memory or RDMA from then on. [`SmcStream::info`] returns the
/// carrier.
///
/// Clones made by [`SmcStream::try_clone`] are the same connection, closed when the last one is
/// dropped. If unread data is left then, the connection is reset, as TCP is.
pub struct SmcStream {
    shared: Arc<Shared>,
}

struct Shared {
    kind: Kind,
    stack: Arc<Stack>,
    /// Microseconds; 0: none.
    read_timeout: AtomicU64,
    write_timeout: AtomicU64,
    linger: Mutex<Option<Duration>>,
    keepalive: Mutex<Option<KeepAlive>>,
    observer: OnceBox<ConnectionObserver>,
}

enum Kind {
    Smc(Arc<Conn>),
    Tcp(TcpStream, Fallback),
}

impl SmcStream {
    /// The connection made by a handshake, at the end with this role.
    pub(super) fn of_handshake(
        stack: &Arc<Stack>,
        tcp: TcpStream,
        result: Result<Outcome, Broken>,
        role: Role,
    ) -> io::Result<SmcStream> {
        match result {
            Ok(Outcome::Smc(established)) => Self::of_established(stack, tcp, established, role),
            Ok(Outcome::Tcp(why)) => Self::of_tcp(stack, tcp, why),
            Err(broken) => {
                if !broken.is_departure() {
                    stack.counters().count_broken();
                }
                match &broken {
                    // A client may have confirmed just now: then SMC carries the connection for it.
                    Broken::Handshake(HandshakeError::TimedOut { awaited: Awaited::Confirm }) => {
                        ism_sys::reset_tcp(tcp);
                    }
                    // The peer sent nothing: an orderly close. Anything else resets the connection.
                    Broken::Handshake(error) if error.is_timeout() => drop(tcp),
                    // The program may continue with the socket, and reads the end of data.
                    broken if broken.is_end() => drop(tcp),
                    // A reset could overtake the peer's read of the Decline.
                    Broken::Declined(_) => drop(tcp),
                    _ => ism_sys::reset_tcp(tcp),
                }
                Err(broken.into())
            }
        }
    }

    /// An SMC connection of a completed handshake.
    fn of_established(
        stack: &Arc<Stack>,
        tcp: TcpStream,
        established: EstablishedConn,
        role: Role,
    ) -> io::Result<SmcStream> {
        let current = stack.current();
        let Some(reactor) = current.reactor(&established) else {
            ism_sys::reset_tcp(tcp);
            return Err(io::ErrorKind::ConnectionReset.into());
        };
        stack.counters().count_smc(&established);
        let carrier = match established {
            EstablishedConn::D(parts) => Carrier::smcd(*parts),
            EstablishedConn::R(parts) => Carrier::smcr(*parts),
        };
        let conn =
            Conn::new(carrier, tcp, reactor.clone(), stack.common(), stack.tcp_watch(), role)?;
        Ok(Self::new(stack, Kind::Smc(conn)))
    }

    /// A connection continuing as TCP.
    pub(super) fn of_tcp(
        stack: &Arc<Stack>,
        tcp: TcpStream,
        why: Fallback,
    ) -> io::Result<SmcStream> {
        stack.counters().count_tcp(&why);
        if why != Fallback::Asked {
            handshake::acknowledge_lazily(&tcp, false);
        }
        tracing::debug!(%why, "connection is TCP");
        Ok(Self::new(stack, Kind::Tcp(tcp, why)))
    }

    fn new(stack: &Arc<Stack>, kind: Kind) -> SmcStream {
        let shared = Shared {
            kind,
            stack: stack.clone(),
            read_timeout: AtomicU64::new(0),
            write_timeout: AtomicU64::new(0),
            linger: Mutex::new(None),
            keepalive: Mutex::new(None),
            observer: OnceBox::new(),
        };
        let shared = Arc::new(shared);
        if matches!(shared.kind, Kind::Tcp(..)) && stack.config().statistics.is_some() {
            let entry: Arc<dyn TcpSocket> = shared.clone();
            stack.tcp_connections().enter(Arc::downgrade(&entry));
        }
        SmcStream { shared }
    }

    /// The negotiated values.
    pub fn info(&self) -> ConnectionInfo {
        match &self.shared.kind {
            Kind::Smc(conn) => conn.info(),
            Kind::Tcp(_, why) => ConnectionInfo::Tcp(why.clone()),
        }
    }

    /// Whether SMC carries the connection.
    pub fn is_smc(&self) -> bool {
        matches!(self.shared.kind, Kind::Smc(_))
    }

    /// Has the close wait for the peer no more, as in an ending process. A close that resets the
    /// connection still does so.
    #[doc(hidden)]
    pub fn linger_no_more(&self) {
        let mut linger = self.shared.linger.lock().unwrap_or_else(PoisonError::into_inner);
        *linger = linger.filter(Duration::is_zero);
    }

    /// Has an observer learn the connection's counts at its end. Only the first call has an effect.
    #[doc(hidden)]
    pub fn observe(&self, observer: ConnectionObserver) {
        let _ = self.shared.observer.set(observer);
    }

    /// The local address of the TCP connection (SOCK-2).
    ///
    /// # Errors
    /// An error of the system call.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        match &self.shared.kind {
            Kind::Smc(conn) => Ok(conn.addresses()?.0),
            Kind::Tcp(tcp, _) => tcp.local_addr(),
        }
    }

    /// The peer's address of the TCP connection (SOCK-2).
    ///
    /// # Errors
    /// An error of the system call.
    pub fn peer_addr(&self) -> io::Result<SocketAddr> {
        match &self.shared.kind {
            Kind::Smc(conn) => Ok(conn.addresses()?.1),
            Kind::Tcp(tcp, _) => tcp.peer_addr(),
        }
    }

    /// Another handle of the same connection.
    ///
    /// # Errors
    /// None today; as in `std`.
    pub fn try_clone(&self) -> io::Result<SmcStream> {
        Ok(SmcStream { shared: self.shared.clone() })
    }

    /// Reads into one buffer; 0 is end of data.
    ///
    /// # Errors
    /// `WouldBlock` (non-blocking, or the read timeout passed), `ConnectionReset`,
    /// `ConnectionAborted`.
    pub fn recv(&self, buf: &mut [u8]) -> io::Result<usize> {
        match &self.shared.kind {
            Kind::Smc(conn) => conn.recv(
                &mut [IoSliceMut::new(buf)],
                false,
                &self.deadline(&self.shared.read_timeout),
            ),
            Kind::Tcp(tcp, _) => (&mut &*tcp).read(buf),
        }
    }

    /// Writes one buffer.
    ///
    /// # Errors
    /// `WouldBlock` (non-blocking, or the write timeout passed), `BrokenPipe` after a shutdown or
    /// the peer's close, `ConnectionReset`, `ConnectionAborted`.
    pub fn send(&self, buf: &[u8]) -> io::Result<usize> {
        match &self.shared.kind {
            Kind::Smc(conn) => {
                conn.send(&[IoSlice::new(buf)], &self.deadline(&self.shared.write_timeout))
            }
            Kind::Tcp(tcp, _) => (&mut &*tcp).write(buf),
        }
    }

    /// Reads, but leaves the bytes in the stream (MSG_PEEK).
    ///
    /// # Errors
    /// As [`SmcStream::recv`].
    pub fn peek(&self, buf: &mut [u8]) -> io::Result<usize> {
        match &self.shared.kind {
            Kind::Smc(conn) => conn.recv(
                &mut [IoSliceMut::new(buf)],
                true,
                &self.deadline(&self.shared.read_timeout),
            ),
            Kind::Tcp(tcp, _) => tcp.peek(buf),
        }
    }

    /// Like [`SmcStream::peek`], into several buffers. On TCP only the first buffer is filled.
    ///
    /// # Errors
    /// As [`SmcStream::peek`].
    pub fn peek_vectored(&self, bufs: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        match &self.shared.kind {
            Kind::Smc(conn) => conn.recv(bufs, true, &self.deadline(&self.shared.read_timeout)),
            Kind::Tcp(tcp, _) => match bufs.iter_mut().find(|buf| !buf.is_empty()) {
                Some(buf) => tcp.peek(buf),
                None => Ok(0),
            },
        }
    }

    /// Sends one byte of urgent data (MSG_OOB; SOCK-8). Later bytes go out when the peer's reader has
    /// reached the urgent byte.
    ///
    /// # Errors
    /// As [`SmcStream::send`].
    pub fn send_urgent(&self, byte: u8) -> io::Result<()> {
        match &self.shared.kind {
            Kind::Smc(conn) => conn.send_urgent(byte, &self.deadline(&self.shared.write_timeout)),
            Kind::Tcp(tcp, _) => {
                rustix::net::send(tcp, &[byte], SendFlags::OOB | SendFlags::NOSIGNAL)?;
                Ok(())
            }
        }
    }

    /// Takes the peer's urgent byte (MSG_OOB).
    ///
    /// # Errors
    /// `WouldBlock`: the byte is announced but has not arrived. `InvalidInput`: there is none, or the
    /// byte stays in the stream ([`SmcStream::set_oob_inline`]).
    pub fn recv_urgent(&self) -> io::Result<u8> {
        match &self.shared.kind {
            Kind::Smc(conn) => conn.recv_urgent(false),
            Kind::Tcp(tcp, _) => {
                let mut byte = [0u8; 1];
                rustix::net::recv(tcp, &mut byte[..], RecvFlags::OOB)?;
                Ok(byte[0])
            }
        }
    }

    /// Like [`SmcStream::recv_urgent`], but leaves the byte.
    ///
    /// # Errors
    /// As [`SmcStream::recv_urgent`].
    pub fn peek_urgent(&self) -> io::Result<u8> {
        match &self.shared.kind {
            Kind::Smc(conn) => conn.recv_urgent(true),
            Kind::Tcp(tcp, _) => {
                let mut byte = [0u8; 1];
                rustix::net::recv(tcp, &mut byte[..], RecvFlags::OOB | RecvFlags::PEEK)?;
                Ok(byte[0])
            }
        }
    }

    /// Whether urgent data is announced or has arrived (POLLPRI).
    ///
    /// # Errors
    /// The connection ended abnormally.
    pub fn has_urgent(&self) -> io::Result<bool> {
        match &self.shared.kind {
            Kind::Smc(conn) => conn.has_urgent(),
            Kind::Tcp(tcp, _) => {
                let mut fds = [rustix::event::PollFd::new(tcp, rustix::event::PollFlags::PRI)];
                let zero = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
                Ok(rustix::event::poll(&mut fds, Some(&zero))? > 0)
            }
        }
    }

    /// Whether the next read starts at the urgent mark (SIOCATMARK). SMC only; `None` for TCP.
    ///
    /// # Errors
    /// The connection ended abnormally.
    pub fn at_mark(&self) -> io::Result<Option<bool>> {
        match &self.shared.kind {
            Kind::Smc(conn) => conn.at_mark().map(Some),
            Kind::Tcp(..) => Ok(None),
        }
    }

    /// Leaves urgent bytes in the stream (SO_OOBINLINE).
    ///
    /// # Errors
    /// An error of the socket option, for TCP.
    pub fn set_oob_inline(&self, inline: bool) -> io::Result<()> {
        match &self.shared.kind {
            Kind::Smc(conn) => {
                conn.set_oob_inline(inline);
                Ok(())
            }
            Kind::Tcp(tcp, _) => Ok(sockopt::set_socket_oobinline(tcp, inline)?),
        }
    }

    /// Bytes readable without waiting (FIONREAD).
    ///
    /// # Errors
    /// The connection ended abnormally.
    pub fn readable(&self) -> io::Result<usize> {
        match &self.shared.kind {
            Kind::Smc(conn) => conn.readable(),
            Kind::Tcp(tcp, _) => {
                let n = rustix::io::ioctl_fionread(tcp)?;
                Ok(usize::try_from(n).unwrap_or(usize::MAX))
            }
        }
    }

    /// Bytes written but not read by the peer (SMC only; `None` for TCP).
    pub fn unread_by_peer(&self) -> Option<usize> {
        match &self.shared.kind {
            Kind::Smc(conn) => Some(conn.unread_by_peer()),
            Kind::Tcp(..) => None,
        }
    }

    /// Ends one half of the connection, or both.
    ///
    /// # Errors
    /// The connection ended abnormally.
    pub fn shutdown(&self, how: Shutdown) -> io::Result<()> {
        match &self.shared.kind {
            Kind::Smc(conn) => conn.shutdown(how),
            Kind::Tcp(tcp, _) => tcp.shutdown(how),
        }
    }

    /// Resets the connection, as a close with a linger time of zero does. SMC only: nothing happens to
    /// a TCP connection.
    pub fn reset(&self) {
        if let Kind::Smc(conn) = &self.shared.kind {
            conn.close(true);
        }
    }

    /// Whether calls return `WouldBlock` instead of waiting.
    ///
    /// # Errors
    /// An error of the system call, for TCP.
    pub fn set_nonblocking(&self, nonblocking: bool) -> io::Result<()> {
        match &self.shared.kind {
            Kind::Smc(conn) => {
                conn.set_nonblocking(nonblocking);
                Ok(())
            }
            Kind::Tcp(tcp, _) => tcp.set_nonblocking(nonblocking),
        }
    }

    /// The longest wait of a read; `None`: for ever.
    ///
    /// # Errors
    /// `InvalidInput` for zero.
    pub fn set_read_timeout(&self, timeout: Option<Duration>) -> io::Result<()> {
        self.shared.read_timeout.store(micros(timeout)?, Ordering::Relaxed);
        match &self.shared.kind {
            Kind::Smc(_) => Ok(()),
            Kind::Tcp(tcp, _) => tcp.set_read_timeout(timeout),
        }
    }

    /// The longest wait of a write; `None`: for ever.
    ///
    /// # Errors
    /// `InvalidInput` for zero.
    pub fn set_write_timeout(&self, timeout: Option<Duration>) -> io::Result<()> {
        self.shared.write_timeout.store(micros(timeout)?, Ordering::Relaxed);
        match &self.shared.kind {
            Kind::Smc(_) => Ok(()),
            Kind::Tcp(tcp, _) => tcp.set_write_timeout(timeout),
        }
    }

    /// The read timeout.
    ///
    /// # Errors
    /// None today; as in `std`.
    pub fn read_timeout(&self) -> io::Result<Option<Duration>> {
        Ok(duration(&self.shared.read_timeout))
    }

    /// The write timeout.
    ///
    /// # Errors
    /// None today; as in `std`.
    pub fn write_timeout(&self) -> io::Result<Option<Duration>> {
        Ok(duration(&self.shared.write_timeout))
    }

    /// The behaviour of close (SO_LINGER): zero resets the connection; more waits this long for the
    /// peer to read everything, or until a signal; `None` closes in the background.
    ///
    /// # Errors
    /// An error of the socket option, for TCP.
    pub fn set_linger(&self, linger: Option<Duration>) -> io::Result<()> {
        *self.shared.linger.lock().unwrap_or_else(PoisonError::into_inner) = linger;
        match &self.shared.kind {
            Kind::Smc(conn) => {
                conn.follow_linger(linger);
                Ok(())
            }
            Kind::Tcp(tcp, _) => Ok(sockopt::set_socket_linger(tcp, linger)?),
        }
    }

    /// Waits until the peer has read everything, like a close with SO_LINGER, and returns the outcome.
    /// Returns at once for TCP, where the outcome is unknown.
    ///
    /// # Errors
    /// The connection ended abnormally. `TimedOut`: bytes are left after `timeout`.
    pub fn linger(&self, timeout: Duration) -> io::Result<()> {
        match &self.shared.kind {
            Kind::Smc(conn) => conn.linger_to_end(timeout),
            Kind::Tcp(..) => Ok(()),
        }
    }

    /// Whether [`SmcStream::set_linger`] has set a time.
    pub(super) fn has_linger(&self) -> bool {
        self.shared.linger.lock().unwrap_or_else(PoisonError::into_inner).is_some()
    }

    /// The pending error, once (SO_ERROR).
    ///
    /// # Errors
    /// An error of the socket option, for TCP.
    pub fn take_error(&self) -> io::Result<Option<io::Error>> {
        match &self.shared.kind {
            Kind::Smc(conn) => Ok(conn.take_error()),
            Kind::Tcp(tcp, _) => tcp.take_error(),
        }
    }

    /// A descriptor for poll, select and epoll, level or edge triggered. For SMC the descriptor is only
    /// the readiness of the connection: do not read or write it.
    ///
    /// # Errors
    /// No descriptors are left.
    pub fn pollable(&self) -> io::Result<BorrowedFd<'_>> {
        match &self.shared.kind {
            Kind::Smc(conn) => conn.pollable(),
            Kind::Tcp(tcp, _) => Ok(tcp.as_fd()),
        }
    }

    /// The keepalive times set last.
    pub(super) fn keepalive_slot(&self) -> MutexGuard<'_, Option<KeepAlive>> {
        self.shared.keepalive.lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[cfg(feature = "tokio")]
    pub(super) fn stack(&self) -> &Arc<Stack> {
        &self.shared.stack
    }

    pub(super) fn conn(&self) -> Option<&Arc<Conn>> {
        match &self.shared.kind {
            Kind::Smc(conn) => Some(conn),
            Kind::Tcp(..) => None,
        }
    }

    /// Calls `f` with the TCP connection, used for options of TCP and IP even while SMC carries the
    /// bytes (SOCK-6, SOCK-9).
    pub(super) fn with_tcp<T>(
        &self,
        f: impl FnOnce(BorrowedFd<'_>) -> io::Result<T>,
    ) -> io::Result<T> {
        match &self.shared.kind {
            Kind::Smc(conn) => conn.with_tcp(f),
            Kind::Tcp(tcp, _) => f(tcp.as_fd()),
        }
    }

    fn deadline(&self, timeout: &AtomicU64) -> Deadline {
        Deadline::after(duration(timeout))
    }
}

fn micros(timeout: Option<Duration>) -> io::Result<u64> {
    match timeout {
        None => Ok(0),
        Some(Duration::ZERO) => {
            Err(io::Error::new(io::ErrorKind::InvalidInput, "a timeout of zero"))
        }
        Some(timeout) => Ok(u64::try_from(timeout.as_micros()).unwrap_or(u64::MAX).max(1)),
    }
}

fn duration(micros: &AtomicU64) -> Option<Duration> {
    match micros.load(Ordering::Relaxed) {
        0 => None,
        micros => Some(Duration::from_micros(micros)),
    }
}

/// The TCP stream of a connection on TCP, for code without SMC. The error is the unchanged connection: on SMC
/// (the stream of TCP is then SMC's own), or without a free descriptor.
impl TryFrom<SmcStream> for TcpStream {
    type Error = SmcStream;

    fn try_from(stream: SmcStream) -> Result<TcpStream, SmcStream> {
        let tcp = match &stream.shared.kind {
            Kind::Smc(_) => None,
            Kind::Tcp(tcp, _) => tcp.try_clone().ok(),
        };
        tcp.ok_or(stream)
    }
}

impl TcpSocket for Shared {
    fn tcp(&self) -> Option<(&TcpStream, &Fallback)> {
        match &self.kind {
            Kind::Smc(_) => None,
            Kind::Tcp(tcp, why) => Some((tcp, why)),
        }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        let Kind::Smc(conn) = &self.kind else { return };
        if let Some(observer) = self.observer.take() {
            observer.ended(conn.traffic(), self.stack.cost_model());
        }
        conn.discard_addresses();
        let linger = *self.linger.get_mut().unwrap_or_else(PoisonError::into_inner);
        if let Some(linger) = linger
            && !linger.is_zero()
        {
            conn.linger(linger);
        }
        conn.close(linger == Some(Duration::ZERO));
        self.stack.adopt(conn.clone());
    }
}

impl Read for &SmcStream {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        self.recv(buf)
    }

    fn read_vectored(&mut self, bufs: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        match &self.shared.kind {
            Kind::Smc(conn) => conn.recv(bufs, false, &self.deadline(&self.shared.read_timeout)),
            Kind::Tcp(tcp, _) => (&mut &*tcp).read_vectored(bufs),
        }
    }
}

impl Write for &SmcStream {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        self.send(buf)
    }

    fn write_vectored(&mut self, bufs: &[IoSlice<'_>]) -> io::Result<usize> {
        match &self.shared.kind {
            Kind::Smc(conn) => conn.send(bufs, &self.deadline(&self.shared.write_timeout)),
            Kind::Tcp(tcp, _) => (&mut &*tcp).write_vectored(bufs),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Read for SmcStream {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        (&mut &*self).read(buf)
    }

    fn read_vectored(&mut self, bufs: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        (&mut &*self).read_vectored(bufs)
    }
}

impl Write for SmcStream {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        (&mut &*self).write(buf)
    }

    fn write_vectored(&mut self, bufs: &[IoSlice<'_>]) -> io::Result<usize> {
        (&mut &*self).write_vectored(bufs)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl fmt::Debug for SmcStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut debug = f.debug_struct("SmcStream");
        debug.field("local", &self.local_addr().ok()).field("peer", &self.peer_addr().ok());
        match &self.shared.kind {
            Kind::Smc(conn) => debug.field("smc", &conn.info()).field("state", &conn.state()),
            Kind::Tcp(_, why) => debug.field("tcp", why),
        };
        debug.finish_non_exhaustive()
    }
}
