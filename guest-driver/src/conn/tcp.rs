// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The TCP connection of the handshake, which stays open and silent as long as SMC carries bytes.

use std::io;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, Weak};

use super::Conn;
use crate::reactor::tcp_watch::TcpWatch;
use ism_sys::{is_free, lock};

/// The TCP connection of one SMC connection.
pub(super) struct HandshakeTcp {
    stream: Mutex<Option<TcpStream>>,
    /// Local and peer address, kept when the TCP connection ends before the application does.
    addresses: OnceLock<(SocketAddr, SocketAddr)>,
    /// No call will ask for the addresses any more.
    addresses_discarded: AtomicBool,
    /// The set in which the stream is watched, and its name there, if the connection may outlive its
    /// carrier.
    watched: OnceLock<(Arc<TcpWatch<Conn>>, u64)>,
}

impl HandshakeTcp {
    pub(super) fn new(stream: TcpStream) -> HandshakeTcp {
        HandshakeTcp {
            stream: Mutex::new(Some(stream)),
            addresses: OnceLock::new(),
            addresses_discarded: AtomicBool::new(false),
            watched: OnceLock::new(),
        }
    }

    /// Has the set tell the connection what comes on the stream.
    ///
    /// # Errors
    /// The kernel has no memory or no watch left.
    pub(super) fn watch(&self, set: Arc<TcpWatch<Conn>>, conn: Weak<Conn>) -> io::Result<()> {
        let name = self.with(|stream| set.add(stream.as_fd(), conn))?;
        let _ = self.watched.set((set, name));
        Ok(())
    }

    /// Whether a set tells the connection what comes on the stream.
    #[inline]
    pub(super) fn is_watched(&self) -> bool {
        self.watched.get().is_some()
    }

    /// Has the set tell of room to write as well.
    pub(super) fn watch_room(&self) {
        if let Some((set, name)) = self.watched.get() {
            let watched = self.with(|stream| set.watch_room(stream.as_fd(), *name));
            if let Err(error) = watched {
                tracing::warn!(%error, "room on a TCP connection is not watched for");
            }
        }
    }

    /// Has the kernel send at once what the stream has taken, and from now on each write. Nagle's
    /// algorithm and TCP_CORK would keep a record from a peer that waits for it.
    pub(super) fn push(&self) {
        // Without a stream there is nothing to send.
        let _ = self.with(|stream| stream.set_nodelay(true));
    }

    /// Has the stack look whether the connection can come back to a ring.
    pub(super) fn want_return(&self) {
        if let Some((set, _)) = self.watched.get() {
            set.want_return();
        }
    }

    /// Whether the stream is there.
    pub(super) fn is_open(&self) -> bool {
        self.stream().is_some()
    }

    /// The stream; `None`: it has ended.
    pub(super) fn stream(&self) -> MutexGuard<'_, Option<TcpStream>> {
        lock(&self.stream)
    }

    /// Runs `f` on the stream.
    ///
    /// # Errors
    /// `NotConnected`: the TCP connection has ended; or the error of `f`.
    pub(super) fn with<T>(&self, f: impl FnOnce(&TcpStream) -> io::Result<T>) -> io::Result<T> {
        match &*self.stream() {
            Some(stream) => f(stream),
            None => Err(io::ErrorKind::NotConnected.into()),
        }
    }

    /// Local and peer address. Only this call asks the kernel for them, because a short connection
    /// need not pay for two system calls.
    pub(super) fn addresses(&self) -> io::Result<(SocketAddr, SocketAddr)> {
        if let Some(addresses) = self.addresses.get() {
            return Ok(*addresses);
        }
        let addresses = self.with(|tcp| Ok((tcp.local_addr()?, tcp.peer_addr()?)))?;
        Ok(*self.addresses.get_or_init(|| addresses))
    }

    /// Says that no call will ask for the addresses any more.
    pub(super) fn discard_addresses(&self) {
        self.addresses_discarded.store(true, Ordering::Relaxed);
    }

    /// Takes the stream, and keeps the addresses if a call may ask for them.
    pub(super) fn take(&self) -> Option<TcpStream> {
        if !self.addresses_discarded.load(Ordering::Relaxed)
            && let Ok(addresses) = self.addresses()
        {
            let _ = self.addresses.set(addresses);
        }
        self.stream().take()
    }

    /// Whether no thread holds the lock.
    pub(super) fn is_unlocked(&self) -> bool {
        is_free(&self.stream)
    }

    /// The descriptor of the stream.
    pub(super) fn descriptor(&self) -> Option<RawFd> {
        self.stream().as_ref().map(|stream| stream.as_fd().as_raw_fd())
    }
}

impl Drop for HandshakeTcp {
    fn drop(&mut self) {
        if let Some((set, name)) = self.watched.get() {
            set.remove(*name);
        }
    }
}
