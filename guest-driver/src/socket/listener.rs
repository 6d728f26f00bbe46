// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `SmcListener`: accepts SMC clients and ordinary TCP clients on one port.

use std::collections::VecDeque;
use std::io;
use std::net::{Shutdown, SocketAddr, TcpListener, ToSocketAddrs};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rustc_hash::FxHashMap;
use rustix::event::{PollFd, PollFlags, epoll};
use rustix::fd::OwnedFd;
use rustix::time::{Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags};

use super::incoming::Incoming;
use super::offers::Source;
use super::stream::SmcStream;
use super::{Stack, devices::Current};
use crate::handshake::{self, Broken, EstablishedConn, Outcome};
use ism_sys::{lock, timespec};

/// The most handshakes under way. Beyond, a new client evicts another one.
const MAX_PENDING: usize = 1024;
/// The most handshakes checked out by a sleeping thread. The others are registered with epoll.
const MAX_CHECKED_OUT: usize = 8;
/// The most connections by claims ahead of the program's calls of `accept`.
const MAX_READY: usize = 8;

/// The epoll key of the TCP listener; handshakes have smaller ones.
const LISTENER: u64 = u64::MAX;
/// The epoll key of the timer.
const TIMER: u64 = u64::MAX - 1;

/// A listening socket with the behaviour of [`std::net::TcpListener`].
///
/// The listener recognises a client that proposes SMC by its first bytes. Any other client is an
/// ordinary TCP client, and so is a client that sends nothing for
/// [`Config::detect_timeout`](super::Config::detect_timeout). Handshakes run side by side while any
/// thread is in [`SmcListener::accept`]. A slow or hostile client delays no other client.
///
/// If 1,024 handshakes are under way, a further client in need of one evicts the oldest of the address
/// with the most: a client that has sent nothing is an ordinary TCP client then, and any other is
/// reset. So stalling clients of one address pay for each other. An address with 512 accepted clients
/// without a Confirm gets Declines until some of them confirm.
///
/// A thread in `accept` first spins for handshakes that began a moment ago: most are complete before
/// registering them with epoll pays. Before a sleep, the thread registers them, or checks a few of them
/// out of the table and polls their TCP streams itself, which costs no call of epoll.
#[derive(Debug)]
pub struct SmcListener {
    stack: Arc<Stack>,
    tcp: TcpListener,
    /// No other process takes clients from TCP's queue.
    is_own: bool,
    epoll: OwnedFd,
    timer: OwnedFd,
    nonblocking: AtomicBool,
    pending: Mutex<Pending>,
}

#[derive(Default)]
struct Pending {
    handshakes: FxHashMap<u64, Entry>,
    /// Keys of the handshakes not watched by epoll.
    unregistered: Vec<u64>,
    /// Number of handshakes checked out of the table by sleeping threads.
    checked_out: usize,
    /// Number of sleeping threads.
    sleepers: usize,
    /// The key of the next handshake.
    next: u64,
    /// Connections to be returned next by `accept`.
    ready: VecDeque<(SmcStream, SocketAddr)>,
    /// The last client's connection was there with its Proposal, by a claim.
    claims: bool,
    /// The program waits by the pollable descriptor.
    polled: bool,
    /// The time for which the timer is set.
    alarm: Option<Instant>,
}

struct Entry {
    incoming: Incoming,
    addr: SocketAddr,
    /// The source charged with the handshake.
    source: Source,
    /// Epoll watches the TCP stream.
    registered: bool,
    /// Epoll watches the descriptor for LLC messages, too.
    llc_registered: bool,
    /// The thread that had checked the handshake out found nothing to read.
    no_changes: bool,
}

impl std::fmt::Debug for Pending {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pending")
            .field("handshakes", &self.handshakes.len())
            .finish_non_exhaustive()
    }
}

impl SmcListener {
    /// Listens on an address.
    ///
    /// # Errors
    /// An error of [`TcpListener::bind`].
    pub fn bind(stack: &Arc<Stack>, addr: impl ToSocketAddrs) -> io::Result<SmcListener> {
        let mut result = Err(io::Error::new(io::ErrorKind::InvalidInput, "no address"));
        for addr in addr.to_socket_addrs()? {
            result = stack.peer_discovery().bind(&addr);
            if result.is_ok() {
                break;
            }
        }
        Self::of_tcp(stack, result?, true)
    }

    /// Takes over a listening TCP socket.
    ///
    /// # Errors
    /// No descriptors are left.
    pub fn new(stack: &Arc<Stack>, tcp: TcpListener) -> io::Result<SmcListener> {
        stack.peer_discovery().listen(&tcp);
        // The workers of a server may share the socket. A client taken ahead of the program's call would wait
        // for a busy worker while others are idle.
        Self::of_tcp(stack, tcp, false)
    }

    fn of_tcp(stack: &Arc<Stack>, tcp: TcpListener, is_own: bool) -> io::Result<SmcListener> {
        tcp.set_nonblocking(true)?;
        // Accepted sockets inherit this option.
        handshake::acknowledge_lazily(&tcp, true);
        let set = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
        let timer = rustix::time::timerfd_create(TimerfdClockId::Monotonic, flags)?;
        let add = |fd: BorrowedFd<'_>, key| {
            epoll::add(&set, fd, epoll::EventData::new_u64(key), epoll::EventFlags::IN)
        };
        add(tcp.as_fd(), LISTENER)?;
        add(timer.as_fd(), TIMER)?;
        Ok(SmcListener {
            stack: stack.clone(),
            tcp,
            is_own,
            epoll: set,
            timer,
            nonblocking: AtomicBool::new(false),
            pending: Mutex::default(),
        })
    }

    /// The listening address.
    ///
    /// # Errors
    /// An error of [`TcpListener::local_addr`].
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.tcp.local_addr()
    }

    /// Whether [`SmcListener::accept`] returns `WouldBlock` instead of waiting.
    ///
    /// # Errors
    /// None today; as in `std`.
    pub fn set_nonblocking(&self, nonblocking: bool) -> io::Result<()> {
        self.nonblocking.store(nonblocking, Ordering::Relaxed);
        Ok(())
    }

    /// Ends listening by [`Shutdown::Read`] or [`Shutdown::Both`], as shutdown(2) of a listening socket
    /// does on Linux: calls of [`SmcListener::accept`] fail, also waiting calls of other threads, and
    /// clients are refused or reset. `Shutdown::Write` does nothing.
    ///
    /// # Errors
    /// `NotConnected`: listening has ended already.
    pub fn shutdown(&self, how: Shutdown) -> io::Result<()> {
        // This wakes waiting threads: epoll reports EPOLLHUP, and accept(2) fails with EINVAL.
        let how = match how {
            Shutdown::Read => rustix::net::Shutdown::Read,
            Shutdown::Write => rustix::net::Shutdown::Write,
            Shutdown::Both => rustix::net::Shutdown::Both,
        };
        Ok(rustix::net::shutdown(&self.tcp, how)?)
    }

    /// A descriptor for poll, select and epoll: readable when [`SmcListener::accept`] has something to
    /// do (possibly a step of a handshake, followed by `WouldBlock`).
    pub fn pollable(&self) -> BorrowedFd<'_> {
        let mut pending = lock(&self.pending);
        let is_first = !std::mem::replace(&mut pending.polled, true);
        let left = pending.ready.len();
        if is_first && let Err(error) = self.hand_over(&mut pending, left) {
            tracing::debug!(%error, "pollable");
        }
        self.epoll.as_fd()
    }

    /// Takes the next connection: SMC or TCP, see [`SmcStream::info`]. Its handshake is over
    /// (OPT-8, SOCK-19).
    ///
    /// The listener counts handshakes that fail, and continues with the next client.
    ///
    /// # Errors
    /// An error of [`TcpListener::accept`]; `WouldBlock` if non-blocking; `InvalidInput` after
    /// [`SmcListener::shutdown`].
    pub fn accept(&self) -> io::Result<(SmcStream, SocketAddr)> {
        // Whether TCP's queue may hold a client, and whether epoll has events.
        let (mut check_queue, mut has_events) = (true, false);
        // Clients found without a wait may be several.
        let mut has_waited = false;
        self.stack.sweep();
        let mut pending = lock(&self.pending);
        loop {
            let current = self.stack.current();
            let taken = self.try_once(&mut pending, &current, check_queue, !has_waited)?;
            has_waited = true;
            if pending.ready.is_empty() && !self.nonblocking() {
                // A client in the middle of a handshake answers soon.
                self.spin(&mut pending, &current)?;
            }
            // A client in the queue explains the thread's wake-up by epoll; so does a connection.
            has_events &= !taken && pending.ready.is_empty();
            self.take_events(&mut pending, &current, has_events)?;
            if let Some(left) = pending.ready.len().checked_sub(1) {
                self.hand_over(&mut pending, left)?;
                if let Some(accepted) = pending.ready.pop_front() {
                    return Ok(accepted);
                }
            }
            if self.nonblocking() {
                self.register(&mut pending)?;
                self.set_alarm(&mut pending)?;
                return Err(io::ErrorKind::WouldBlock.into());
            }
            let next = pending.next_deadline();
            let mut checked_out = pending.check_out();
            let mut slept = self.register(&mut pending).map(|()| false);
            if slept.is_ok() {
                pending.sleepers += 1;
                drop(pending);
                let next = next.map(|next| next.saturating_duration_since(Instant::now()));
                slept = self.sleep(&mut checked_out, next);
                pending = lock(&self.pending);
                pending.sleepers -= 1;
            }
            pending.check_in(checked_out);
            has_events = slept?;
            check_queue = has_events;
        }
    }

    /// An endless iterator over accepted connections.
    pub fn incoming(&self) -> impl Iterator<Item = io::Result<SmcStream>> + '_ {
        std::iter::repeat_with(|| self.accept().map(|(stream, _)| stream))
    }

    /// The stack of the listener's connections.
    pub fn stack(&self) -> &Arc<Stack> {
        &self.stack
    }

    /// Sleeps until epoll or one of the handshakes may have news, and marks handshakes without any.
    /// `true`: epoll has events.
    fn sleep(
        &self,
        checked_out: &mut [(u64, Entry)],
        timeout: Option<Duration>,
    ) -> io::Result<bool> {
        let timeout = timeout.map(timespec);
        let mut fds = Vec::with_capacity(1 + checked_out.len());
        fds.push(PollFd::new(&self.epoll, PollFlags::IN));
        fds.extend(checked_out.iter().filter_map(|(_, entry)| {
            let [tcp, _] = entry.incoming.fds();
            tcp.map(|tcp| PollFd::from_borrowed_fd(tcp, PollFlags::IN))
        }));
        match rustix::event::poll(&mut fds, timeout.as_ref()) {
            // After a signal no descriptor has results, so no handshake is tried.
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        let mut results = fds.iter().map(|fd| !fd.revents().is_empty());
        let has_events = results.next().unwrap_or_default();
        let results: Vec<_> = results.collect();
        for ((_, entry), has_changes) in checked_out.iter_mut().zip(results) {
            entry.no_changes = !has_changes;
        }
        Ok(has_events)
    }

    /// Before this thread returns with a connection: registers the handshakes, and wakes another thread
    /// or a program in `poll` if connections are `left`.
    fn hand_over(&self, pending: &mut Pending, left: usize) -> io::Result<()> {
        if pending.sleepers == 0 && !pending.polled {
            return Ok(());
        }
        self.register(pending)?;
        if left > 0 {
            self.set_timer(Duration::from_nanos(1))?;
            pending.alarm = Some(Instant::now());
        } else if pending.polled {
            self.set_alarm(pending)?;
        }
        Ok(())
    }

    fn nonblocking(&self) -> bool {
        self.nonblocking.load(Ordering::Relaxed)
    }

    /// Advances the handshakes not watched by epoll, if they may have news, and with `check_queue`
    /// takes a new client from TCP's queue, or `several` with claims. `true`: there was a client.
    fn try_once(
        &self,
        pending: &mut Pending,
        current: &Current,
        check_queue: bool,
        several: bool,
    ) -> io::Result<bool> {
        // A step may remove its handshake from the list.
        for key in pending.unregistered.clone() {
            let Some(entry) = pending.handshakes.get_mut(&key) else { continue };
            if !std::mem::take(&mut entry.no_changes) {
                self.step(pending, current, key);
            }
        }
        let mut taken = false;
        let most = if check_queue { pending.room(several && self.is_own) } else { 0 };
        for _ in 0..most {
            match self.take_client(pending, current) {
                Ok(true) => taken = true,
                // The next call finds the error again.
                Err(error) if pending.ready.is_empty() => return Err(error),
                Ok(false) | Err(_) => break,
            }
        }
        Ok(taken)
    }

    /// Calls [`SmcListener::try_once`] for as long as spinning is worthwhile.
    fn spin(&self, pending: &mut Pending, current: &Current) -> io::Result<()> {
        if pending.unregistered.is_empty() {
            return Ok(());
        }
        let mut tried = Ok(false);
        self.stack.common().spin.until_asked(|| {
            tried = self.try_once(pending, current, true, false);
            // Without unregistered handshakes there is nothing left to spin for.
            tried.is_err() || !pending.ready.is_empty() || pending.unregistered.is_empty()
        });
        tried.map(|_| ())
    }

    /// Registers the handshakes with epoll.
    fn register(&self, pending: &mut Pending) -> io::Result<()> {
        for key in std::mem::take(&mut pending.unregistered) {
            let Some(entry) = pending.handshakes.get_mut(&key) else { continue };
            let [Some(tcp), _] = entry.incoming.fds() else { continue };
            let data = epoll::EventData::new_u64(key);
            // Edge triggered: a peek leaves the bytes in the stream, and the client may send no more.
            let flags = epoll::EventFlags::IN | epoll::EventFlags::RDHUP | epoll::EventFlags::ET;
            epoll::add(&self.epoll, tcp, data, flags)?;
            entry.registered = true;
            self.register_llc(entry, key)?;
        }
        Ok(())
    }

    /// Registers the descriptor for LLC messages with epoll, once the handshake has one.
    fn register_llc(&self, entry: &mut Entry, key: u64) -> io::Result<()> {
        if let [_, Some(fd)] = entry.incoming.fds()
            && entry.registered
            && !entry.llc_registered
        {
            let flags = epoll::EventFlags::IN | epoll::EventFlags::ET;
            epoll::add(&self.epoll, fd, epoll::EventData::new_u64(key), flags)?;
            entry.llc_registered = true;
        }
        Ok(())
    }

    /// Advances the handshakes reported by epoll, and handshakes past their deadline. Asks epoll if it
    /// `has_events` or may have some.
    fn take_events(
        &self,
        pending: &mut Pending,
        current: &Current,
        has_events: bool,
    ) -> io::Result<()> {
        let any_registered = pending.handshakes.len() > pending.unregistered.len();
        if has_events || any_registered || self.nonblocking() {
            let mut events = [const { std::mem::MaybeUninit::<epoll::Event>::uninit() }; 64];
            let timeout = timespec(Duration::ZERO);
            let events = match epoll::wait(&self.epoll, &mut events, Some(&timeout)) {
                Ok((events, _)) => events,
                Err(rustix::io::Errno::INTR) => return Ok(()),
                Err(error) => return Err(error.into()),
            };
            for event in events.iter() {
                match event.data.u64() {
                    LISTENER => {}
                    TIMER => {
                        let _ = rustix::io::read(&self.timer, &mut [0u8; 8]);
                        pending.alarm = None;
                    }
                    key => self.step(pending, current, key),
                }
            }
        }
        if pending.handshakes.is_empty() {
            return Ok(());
        }
        let now = Instant::now();
        let is_late = |entry: &Entry| entry.incoming.deadline().is_some_and(|end| end <= now);
        let handshakes = pending.handshakes.iter();
        let late: Vec<u64> =
            handshakes.filter(|(_, entry)| is_late(entry)).map(|(key, _)| *key).collect();
        for key in late {
            self.step(pending, current, key);
        }
        Ok(())
    }

    /// Takes one client from TCP's queue, if there is one.
    fn take_client(&self, pending: &mut Pending, current: &Current) -> io::Result<bool> {
        let (tcp, addr) = loop {
            match self.tcp.accept() {
                Ok(accepted) => break accepted,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                // The client has closed the connection already; another one may be in the queue.
                Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // Handshakes must not take the last descriptors.
                Err(error) if is_out_of_descriptors(&error) && self.evict(pending) => {}
                Err(error) => return Err(error),
            }
        };
        let key = pending.next;
        pending.next = (pending.next + 1) % TIMER;
        let (registered, llc_registered, no_changes) = Default::default();
        let source = Source::of(addr.ip());
        let incoming = Incoming::accepted(&self.stack, tcp, source);
        let entry = Entry { incoming, addr, source, registered, llc_registered, no_changes };
        pending.handshakes.insert(key, entry);
        pending.unregistered.push(key);
        self.step(pending, current, key);
        if pending.is_over_full() {
            self.evict(pending);
        }
        Ok(true)
    }

    /// Ends one handshake to make room for others; `false` if there is none.
    fn evict(&self, pending: &mut Pending) -> bool {
        let Some(key) = pending.oldest_of_the_busiest() else { return false };
        let Some(mut entry) = self.remove(pending, key) else { return false };
        match entry.incoming.evict() {
            Ok(stream) => pending.ready.push_back((stream, entry.addr)),
            Err(error) => tracing::debug!(addr = %entry.addr, %error, "handshake evicted"),
        }
        true
    }

    /// Advances one handshake. At its end, the connection is ready.
    fn step(&self, pending: &mut Pending, current: &Current, key: u64) {
        let Some(entry) = pending.handshakes.get_mut(&key) else { return };
        // Epoll reports edges, so a registered stream has to be read until it is empty.
        let drain = entry.registered;
        let awaited_confirm = entry.incoming.awaits_confirm();
        let result = match entry.incoming.step(current, drain) {
            None => match self.register_llc(entry, key) {
                Ok(()) => return,
                Err(error) => Err(Broken::Io(error)),
            },
            Some(result) => result,
        };
        let is_smcd = matches!(result, Ok(Outcome::Smc(EstablishedConn::D(_))));
        pending.claims = is_smcd && !awaited_confirm;
        let Some(mut entry) = self.remove(pending, key) else { return };
        match entry.incoming.finish(result) {
            Ok(stream) => pending.ready.push_back((stream, entry.addr)),
            Err(error) => tracing::debug!(addr = %entry.addr, %error, "handshake failed"),
        }
    }

    /// Removes a handshake from the table and from epoll.
    fn remove(&self, pending: &mut Pending, key: u64) -> Option<Entry> {
        let removed = pending.handshakes.remove(&key)?;
        pending.unregistered.retain(|unregistered| *unregistered != key);
        if removed.registered
            && let [Some(tcp), _] = removed.incoming.fds()
            && let Err(error) = epoll::delete(&self.epoll, tcp)
        {
            tracing::debug!(%error, "epoll");
        }
        Some(removed)
    }

    /// Sets the timer: the pollable descriptor becomes readable at the next deadline of a handshake.
    fn set_alarm(&self, pending: &mut Pending) -> io::Result<()> {
        let next = pending.next_deadline();
        if next == pending.alarm {
            return Ok(());
        }
        let left = next.map_or(Duration::ZERO, |next| {
            next.saturating_duration_since(Instant::now()).max(Duration::from_micros(1))
        });
        self.set_timer(left)?;
        pending.alarm = next;
        Ok(())
    }

    /// Makes epoll report the timer after a while; zero: never.
    fn set_timer(&self, after: Duration) -> io::Result<()> {
        let once = timespec(Duration::ZERO);
        let spec = Itimerspec { it_interval: once, it_value: timespec(after) };
        rustix::time::timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &spec)?;
        Ok(())
    }
}

fn is_out_of_descriptors(error: &io::Error) -> bool {
    use rustix::io::Errno;
    [Errno::MFILE, Errno::NFILE]
        .iter()
        .any(|errno| error.raw_os_error() == Some(errno.raw_os_error()))
}

impl Pending {
    /// The number of clients for `accept` to take from TCP's queue. A client with a claim sends its first
    /// bytes behind Accept, and no Confirm. So `several` such clients get their Accepts at once, and
    /// their bytes are under way while the program serves the first one. A program in `poll` is told of TCP's
    /// queue by its descriptor, and calls again.
    fn room(&self, several: bool) -> usize {
        match self.claims && several && !self.polled {
            true => MAX_READY.saturating_sub(self.ready.len()),
            false => usize::from(self.ready.is_empty()),
        }
    }

    fn is_over_full(&self) -> bool {
        self.handshakes.len() + self.checked_out > MAX_PENDING
    }

    /// The oldest handshake of the source with the most handshakes.
    fn oldest_of_the_busiest(&self) -> Option<u64> {
        let mut sources: FxHashMap<Source, (usize, u64)> = FxHashMap::default();
        for (key, entry) in &self.handshakes {
            let (count, oldest) = sources.entry(entry.source).or_insert((0, *key));
            *count += 1;
            *oldest = (*oldest).min(*key);
        }
        sources.into_values().max_by_key(|(count, _)| *count).map(|(_, oldest)| oldest)
    }

    /// Takes handshakes out of the table, to be polled by a sleeping thread itself. No other thread
    /// advances them meanwhile.
    fn check_out(&mut self) -> Vec<(u64, Entry)> {
        let mut checked_out = Vec::new();
        for key in std::mem::take(&mut self.unregistered) {
            match self.handshakes.remove(&key) {
                Some(entry)
                    if entry.incoming.awaits_confirm() && checked_out.len() < MAX_CHECKED_OUT =>
                {
                    checked_out.push((key, entry))
                }
                Some(entry) => {
                    self.handshakes.insert(key, entry);
                    self.unregistered.push(key);
                }
                None => {}
            }
        }
        self.checked_out += checked_out.len();
        checked_out
    }

    /// Undoes [`Pending::check_out`].
    fn check_in(&mut self, checked_out: Vec<(u64, Entry)>) {
        self.checked_out -= checked_out.len();
        for (key, entry) in checked_out {
            self.handshakes.insert(key, entry);
            self.unregistered.push(key);
        }
    }

    fn next_deadline(&self) -> Option<Instant> {
        self.handshakes.values().filter_map(|entry| entry.incoming.deadline()).min()
    }
}
