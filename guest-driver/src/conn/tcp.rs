// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The TCP connection of the handshake, open and silent as long as SMC carries bytes.

use std::io;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, Weak};

use super::Conn;
use crate::reactor::tcp_watch::TcpWatch;
use crate::reactor::wait::Waiter;
use ism_sys::{is_free, lock, out_of_the_way};
use rustix::event::epoll;

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
    /// A call that sleeps for bytes takes them itself.
    reader: TcpReader,
}

/// The set for a call's sleep, if the call takes bytes out of the stream by itself: no other thread has
/// to be woken for them. One call at a time.
#[derive(Default)]
struct TcpReader {
    /// A set with the stream and the notifier of the waiter, while no call sleeps on it.
    sleeper: Mutex<Option<(OwnedFd, Arc<Waiter>)>>,
    /// The stack's set does not report bytes.
    leads: AtomicBool,
    /// A call sleeps, or has slept since the last check.
    sleeps: AtomicBool,
    has_slept: AtomicBool,
}

impl TcpReader {
    fn new_sleeper(stream: &TcpStream) -> io::Result<(OwnedFd, Arc<Waiter>)> {
        let waiter = Waiter::with_notifier()?;
        let set = out_of_the_way(epoll::create(epoll::CreateFlags::CLOEXEC)?);
        if let Some(notifier) = waiter.notifier() {
            let data = epoll::EventData::new_u64(Waiter::NOTIFIER);
            epoll::add(&set, notifier, data, epoll::EventFlags::IN)?;
        }
        let data = epoll::EventData::new_u64(Waiter::NOTIFIER + 1);
        epoll::add(&set, stream, data, epoll::EventFlags::IN | epoll::EventFlags::RDHUP)?;
        Ok((set, Arc::new(waiter)))
    }
}

impl HandshakeTcp {
    pub(super) fn new(stream: TcpStream) -> HandshakeTcp {
        HandshakeTcp {
            stream: Mutex::new(Some(stream)),
            addresses: OnceLock::new(),
            addresses_discarded: AtomicBool::new(false),
            watched: OnceLock::new(),
            reader: TcpReader::default(),
        }
    }

    /// Has a call take bytes itself. `sleep` gets a waiter, and a set with its notifier and the stream.
    /// `false`: another call does so, or there is no descriptor.
    pub(super) fn sleep_as_reader(&self, sleep: impl FnOnce(&Arc<Waiter>, BorrowedFd<'_>)) -> bool {
        let Some((set, name)) = self.watched.get() else { return false };
        let reader = &self.reader;
        if reader.sleeps.swap(true, Ordering::SeqCst) {
            return false;
        }
        // No lock is held during the sleep: a fork would wait for it.
        let known = lock(&reader.sleeper).take();
        let sleeper = known.or_else(|| self.with(TcpReader::new_sleeper).ok());
        let sleeps = sleeper.is_some();
        if let Some((fd, waiter)) = &sleeper {
            if !reader.leads.swap(true, Ordering::SeqCst) {
                let _ = self.with(|stream| set.leave_to_reader(stream.as_fd(), *name));
            }
            sleep(waiter, fd.as_fd());
        }
        *lock(&reader.sleeper) = sleeper;
        reader.has_slept.store(true, Ordering::SeqCst);
        reader.sleeps.store(false, Ordering::SeqCst);
        sleeps
    }

    /// Whether calls go on to take bytes themselves. If not, the stack's set tells of them again.
    pub(super) fn keep_reader(&self) -> bool {
        let reader = &self.reader;
        if reader.has_slept.swap(false, Ordering::SeqCst) || reader.sleeps.load(Ordering::SeqCst) {
            return true;
        }
        // A call beginning to sleep now is informed twice, without harm.
        reader.leads.store(false, Ordering::SeqCst);
        if self.is_open() {
            self.watch_room();
        }
        false
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

    /// Whether a set watches the stream, or will.
    #[inline]
    pub(super) fn is_watched(&self) -> bool {
        self.watched.get().is_some()
    }

    /// Has the set report room to write as well. Room already present is an event.
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

    /// Has the stack check for a possible return of the connection to a ring.
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

    /// Local and peer address. Only this call asks the kernel for them: a short connection need not pay
    /// for two system calls.
    pub(super) fn addresses(&self) -> io::Result<(SocketAddr, SocketAddr)> {
        if let Some(addresses) = self.addresses.get() {
            return Ok(*addresses);
        }
        let addresses = self.with(|tcp| Ok((tcp.local_addr()?, tcp.peer_addr()?)))?;
        Ok(*self.addresses.get_or_init(|| addresses))
    }

    /// Notes the end of queries for the addresses.
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
        is_free(&self.stream) && is_free(&self.reader.sleeper)
    }

    /// The descriptors of the stream, and of a reader's sleep.
    pub(super) fn descriptors(&self) -> Vec<RawFd> {
        let stream = self.stream().as_ref().map(|stream| stream.as_fd().as_raw_fd());
        let sleeper = lock(&self.reader.sleeper);
        let notifier =
            |waiter: &Waiter| waiter.notifier().map(|notifier| notifier.as_fd().as_raw_fd());
        let reader =
            sleeper.as_ref().map(|(set, waiter)| [Some(set.as_raw_fd()), notifier(waiter)]);
        stream.into_iter().chain(reader.into_iter().flatten().flatten()).collect()
    }

    /// Forgets the threads of the parent, in the child of a fork. The child takes over a lent number.
    pub(super) fn forget_threads(&self) {
        // The set is the parent's, too.
        drop(lock(&self.reader.sleeper).take());
        for flag in [&self.reader.leads, &self.reader.sleeps, &self.reader.has_slept] {
            flag.store(false, Ordering::SeqCst);
        }
    }
}

impl Drop for HandshakeTcp {
    fn drop(&mut self) {
        if let Some((set, name)) = self.watched.get() {
            set.remove(*name);
        }
    }
}
