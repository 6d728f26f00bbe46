// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A TCP connection under other carriers: open and silent as long as they carry the bytes, and watched
//! from then on.

use std::io;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};

use rustix::event::epoll;
use rustix::net::{self, sockopt};

use crate::reactor::tcp_watch::{self, TcpHandler, TcpWatch};
use crate::reactor::wait::Waiter;
use ism_sys::{HeldTcp, OnceBox, is_free, lock, out_of_the_way};

/// The TCP connection under a connection.
pub(crate) struct WatchedTcp<C: TcpHandler> {
    /// Lent as long as the caller of [`WatchedTcp::lend`] keeps its descriptor open.
    stream: Mutex<Option<HeldTcp>>,
    /// Local and peer address, kept when the TCP connection ends before the application does.
    addresses: OnceBox<(SocketAddr, SocketAddr)>,
    /// No call will ask for the addresses any more.
    addresses_discarded: AtomicBool,
    /// The set for the stream, and its name there, if the connection may outlive its carrier.
    watch: OnceBox<(Arc<TcpWatch<C>>, u64)>,
    /// The events reported by the set, in bits of epoll; 0: the stream is not in the set yet. Changes under
    /// the lock of the stream.
    events: AtomicU32,
    /// The call taking bytes by itself after a sleep.
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
    /// A call sleeps, or has slept since the last check. The three words are set in an order and read in
    /// reverse (Release, Acquire); a late view of them informs a call and the thread alike.
    sleeps: AtomicBool,
    has_slept: AtomicBool,
}

impl TcpReader {
    fn new_sleeper(stream: BorrowedFd<'_>) -> io::Result<(OwnedFd, Arc<Waiter>)> {
        let waiter = Waiter::with_notifier()?;
        let set = out_of_the_way(|| epoll::create(epoll::CreateFlags::CLOEXEC))?;
        if let Some(notifier) = waiter.notifier() {
            let data = epoll::EventData::new_u64(Waiter::NOTIFIER);
            epoll::add(&set, notifier, data, epoll::EventFlags::IN)?;
        }
        let data = epoll::EventData::new_u64(Waiter::NOTIFIER + 1);
        epoll::add(&set, stream, data, epoll::EventFlags::IN | epoll::EventFlags::RDHUP)?;
        Ok((set, Arc::new(waiter)))
    }
}

impl<C: TcpHandler> WatchedTcp<C> {
    pub(crate) fn new(stream: TcpStream) -> WatchedTcp<C> {
        WatchedTcp {
            stream: Mutex::new(Some(OwnedFd::from(stream).into())),
            addresses: OnceBox::new(),
            addresses_discarded: AtomicBool::new(false),
            watch: OnceBox::new(),
            events: AtomicU32::new(0),
            reader: TcpReader::default(),
        }
    }

    /// Has a call take bytes itself. `sleep` gets a waiter, and a set with its notifier and the stream.
    /// `false`: another call does so, or there is no descriptor.
    pub(crate) fn sleep_as_reader(&self, sleep: impl FnOnce(&Arc<Waiter>, BorrowedFd<'_>)) -> bool {
        let Some((set, name)) = self.watch.get() else { return false };
        let reader = &self.reader;
        if reader.sleeps.swap(true, Ordering::AcqRel) {
            return false;
        }
        // No lock is held during the sleep: a fork would wait for it.
        let known = lock(&reader.sleeper).take();
        let sleeper = known.or_else(|| self.with(TcpReader::new_sleeper).ok());
        let sleeps = sleeper.is_some();
        if let Some((fd, waiter)) = &sleeper {
            if !reader.leads.swap(true, Ordering::AcqRel) {
                let _ = self.watch(tcp_watch::ROOM);
                set.visit_soon(*name);
            }
            sleep(waiter, fd.as_fd());
        }
        *lock(&reader.sleeper) = sleeper;
        reader.has_slept.store(true, Ordering::Release);
        reader.sleeps.store(false, Ordering::Release);
        sleeps
    }

    /// Whether calls continue to take bytes themselves. If not, the stack's set reports them again.
    fn keep_reader(&self) -> bool {
        let reader = &self.reader;
        if reader.has_slept.swap(false, Ordering::AcqRel) || reader.sleeps.load(Ordering::Acquire) {
            return true;
        }
        // A call beginning to sleep now is informed twice, without harm.
        reader.leads.store(false, Ordering::Release);
        if self.is_open() {
            self.watch_room();
        }
        false
    }

    /// A visit of the thread for TCP. `true`: there is to be another one.
    pub(crate) fn visit(&self) -> bool {
        if self.reader.leads.load(Ordering::Acquire) {
            return self.keep_reader();
        }
        if self.is_open()
            && let Err(error) = self.watch_bytes()
        {
            tracing::warn!(%error, "the end of a TCP connection is not watched for");
        }
        false
    }

    /// Enters the connection in the set that is to watch the stream.
    pub(crate) fn enter(&self, set: Arc<TcpWatch<C>>, conn: Weak<C>) {
        let name = set.enter(conn);
        let _ = self.watch.set((set, name));
    }

    /// Whether a set watches the stream, or will.
    #[inline]
    pub(crate) fn has_watch(&self) -> bool {
        self.watch.get().is_some()
    }

    /// Has the set report bytes at least.
    ///
    /// # Errors
    /// The stream has ended, or the kernel has no memory or no watch left.
    pub(crate) fn watch_bytes(&self) -> io::Result<()> {
        match self.events.load(Ordering::Relaxed) {
            0 => self.watch(tcp_watch::BYTES),
            _ => Ok(()),
        }
    }

    /// Has the set report room to write as well. Room already present is an event.
    pub(crate) fn watch_room(&self) {
        // A TCP connection that has ended has no room.
        if let Err(error) = self.watch(tcp_watch::BYTES_AND_ROOM)
            && error.kind() != io::ErrorKind::NotConnected
        {
            tracing::warn!(%error, "room on a TCP connection is not watched for");
        }
    }

    fn watch(&self, events: epoll::EventFlags) -> io::Result<()> {
        let Some((set, name)) = self.watch.get() else { return Ok(()) };
        self.with(|stream| {
            let last = epoll::EventFlags::from_bits_retain(self.events.load(Ordering::Relaxed));
            set.watch(stream, *name, last, events)?;
            self.events.store(events.bits(), Ordering::Relaxed);
            Ok(())
        })
    }

    /// Has the kernel send the bytes of the stream at once, and from now on each write. Nagle's
    /// algorithm and TCP_CORK would keep a record from a waiting peer.
    pub(crate) fn push(&self) {
        // Without a stream there is nothing to send.
        let _ = self.with(|stream| Ok(sockopt::set_tcp_nodelay(stream, true)?));
    }

    /// Has the stack check for a possible return of the connection to a ring.
    pub(crate) fn want_return(&self) {
        if let Some((set, _)) = self.watch.get() {
            set.want_return();
        }
    }

    /// Whether the stream is there.
    pub(crate) fn is_open(&self) -> bool {
        self.stream().is_some()
    }

    /// The stream; `None`: it has ended.
    pub(crate) fn stream(&self) -> MutexGuard<'_, Option<HeldTcp>> {
        let mut stream = lock(&self.stream);
        if stream.as_ref().is_some_and(|stream| !stream.is_there()) {
            // The number was closed unnoticed, and may be another file's.
            *stream = None;
        }
        stream
    }

    /// From now on the stream is the same socket by a lent number, and the own descriptor is closed.
    pub(crate) fn lend(&self, fd: RawFd) {
        let mut stream = self.stream();
        let Some(now) = stream.as_ref() else { return };
        let Some(lent) = now.lent(fd) else { return };
        self.exchange(&mut stream, lent);
    }

    /// From now on the stream has a descriptor of its own, instead of a lent number. Without one the
    /// stream ends here, with its remaining work undone.
    pub(crate) fn own(&self, copy: Option<OwnedFd>) {
        let mut stream = self.stream();
        match copy {
            Some(copy) if stream.is_some() => self.exchange(&mut stream, copy.into()),
            _ => *stream = None,
        }
    }

    pub(crate) fn lent_number(&self) -> Option<RawFd> {
        lock(&self.stream).as_ref().and_then(HeldTcp::lent_number)
    }

    fn exchange(&self, stream: &mut Option<HeldTcp>, new: HeldTcp) {
        let events = epoll::EventFlags::from_bits_retain(self.events.load(Ordering::Relaxed));
        if let (Some((set, name)), Some(old)) = (self.watch.get(), stream.as_ref())
            && !events.is_empty()
        {
            set.forget_number(old.as_fd());
            let none = epoll::EventFlags::empty();
            if let Err(error) = set.watch(new.as_fd(), *name, none, events) {
                tracing::warn!(%error, "a TCP connection is not watched any more");
                self.events.store(0, Ordering::Relaxed);
            }
        }
        *stream = Some(new);
    }

    /// Runs `f` on the stream.
    ///
    /// # Errors
    /// `NotConnected`: the TCP connection has ended; or the error of `f`.
    pub(crate) fn with<T>(&self, f: impl FnOnce(BorrowedFd<'_>) -> io::Result<T>) -> io::Result<T> {
        match &*self.stream() {
            Some(stream) => f(stream.as_fd()),
            None => Err(io::ErrorKind::NotConnected.into()),
        }
    }

    /// Local and peer address. Only this call asks the kernel for them: a short connection need not pay
    /// for two system calls.
    pub(crate) fn addresses(&self) -> io::Result<(SocketAddr, SocketAddr)> {
        if let Some(addresses) = self.addresses.get() {
            return Ok(*addresses);
        }
        let addresses = self.with(|tcp| {
            let peer = net::getpeername(tcp)?.ok_or(io::ErrorKind::NotConnected)?;
            Ok((net::getsockname(tcp)?.try_into()?, peer.try_into()?))
        })?;
        Ok(*self.addresses.get_or_init(|| addresses))
    }

    /// Notes the end of queries for the addresses.
    pub(crate) fn discard_addresses(&self) {
        self.addresses_discarded.store(true, Ordering::Relaxed);
    }

    /// Whether no call will ask for the addresses any more: the program has closed the connection.
    pub(crate) fn is_discarded(&self) -> bool {
        self.addresses_discarded.load(Ordering::Relaxed)
    }

    /// Takes the stream, and keeps the addresses if a call may ask for them.
    pub(crate) fn take(&self) -> Option<HeldTcp> {
        if !self.is_discarded()
            && let Ok(addresses) = self.addresses()
        {
            let _ = self.addresses.set(addresses);
        }
        self.stream().take()
    }

    /// Whether no thread holds the lock.
    pub(crate) fn is_unlocked(&self) -> bool {
        is_free(&self.stream) && is_free(&self.reader.sleeper)
    }

    /// The descriptors of the stream, and of a reader's sleep.
    pub(crate) fn descriptors(&self) -> Vec<RawFd> {
        let stream = self.stream().as_ref().map(|stream| stream.as_fd().as_raw_fd());
        let sleeper = lock(&self.reader.sleeper);
        let notifier =
            |waiter: &Waiter| waiter.notifier().map(|notifier| notifier.as_fd().as_raw_fd());
        let reader =
            sleeper.as_ref().map(|(set, waiter)| [Some(set.as_raw_fd()), notifier(waiter)]);
        stream.into_iter().chain(reader.into_iter().flatten().flatten()).collect()
    }

    /// Forgets the threads of the parent, in the child of a fork. The child takes over a lent number.
    pub(crate) fn forget_threads(&self) {
        lock(&self.stream).as_mut().into_iter().for_each(HeldTcp::adopt);
        // The set is the parent's, too.
        drop(lock(&self.reader.sleeper).take());
        for flag in [&self.reader.leads, &self.reader.sleeps, &self.reader.has_slept] {
            flag.store(false, Ordering::Release);
        }
    }
}

impl<C: TcpHandler> Drop for WatchedTcp<C> {
    fn drop(&mut self) {
        if let Some((set, name)) = self.watch.get() {
            set.remove(*name);
        }
    }
}
