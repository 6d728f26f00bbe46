//! `SmcListener`: accepts SMC and plain TCP clients on one port.
//!
//! Rules kept here: OPT-8.

use std::collections::VecDeque;
use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, epoll};
use rustix::fd::OwnedFd;
use rustix::time::{Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags};
use smc_core::handshake::FallbackReason;

use super::stream::{SmcStream, break_off};
use super::{Stack, stack::Current};
use crate::handshake::{self, Broken, Outcome, server};
use crate::rendezvous::ServerAction;
use rustc_hash::FxHashMap;

/// Handshakes under way at most; more clients wait in TCP's own queue.
const MAX_PENDING: usize = 256;
/// Handshakes that a thread watches by itself while it sleeps, at most; epoll is for more of them.
const MAX_WATCHED: usize = 8;

/// The epoll key of the TCP listener; handshakes have smaller ones.
const LISTENER: u64 = u64::MAX;
/// The epoll key of the timer.
const TIMER: u64 = u64::MAX - 1;

/// A listening socket with the behaviour of [`std::net::TcpListener`].
///
/// A client that proposes SMC is recognised by its first bytes; any other is an ordinary TCP client.
/// One that stays silent is taken for an ordinary one after a while
/// ([`Config::detect_timeout`](super::Config::detect_timeout)). Handshakes go on side by side while
/// some thread is in [`SmcListener::accept`]; a client that is slow, or means ill, holds up nobody.
#[derive(Debug)]
pub struct SmcListener {
    stack: Arc<Stack>,
    tcp: TcpListener,
    epoll: OwnedFd,
    timer: OwnedFd,
    nonblocking: AtomicBool,
    pending: Mutex<Pending>,
}

#[derive(Default)]
struct Pending {
    handshakes: FxHashMap<u64, Entry>,
    /// Handshakes that epoll does not know: most are over before it is worth telling it.
    hot: Vec<u64>,
    /// Handshakes that sleeping threads have taken along.
    away: usize,
    /// Threads that sleep.
    sleepers: usize,
    /// No more clients are taken for now.
    full: bool,
    next: u64,
    ready: VecDeque<(SmcStream, SocketAddr)>,
    /// What the timer is set to.
    alarm: Option<Instant>,
}

struct Entry {
    tcp: TcpStream,
    addr: SocketAddr,
    handshake: server::Handshake,
    registered: bool,
    /// The thread that watched it was told that there is nothing new.
    silent: bool,
    /// The other descriptor of the handshake is registered, too.
    both: bool,
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
    /// Those of [`TcpListener::bind`].
    pub fn bind(stack: &Arc<Stack>, addr: impl ToSocketAddrs) -> io::Result<SmcListener> {
        let mut result = Err(io::Error::new(io::ErrorKind::InvalidInput, "no address"));
        for addr in addr.to_socket_addrs()? {
            result = stack.peer_discovery().bind(&addr);
            if result.is_ok() {
                break;
            }
        }
        Self::of_tcp(stack, result?)
    }

    /// Takes over a listening TCP socket.
    ///
    /// # Errors
    /// No descriptors are left.
    pub fn new(stack: &Arc<Stack>, tcp: TcpListener) -> io::Result<SmcListener> {
        stack.peer_discovery().listen(&tcp);
        Self::of_tcp(stack, tcp)
    }

    fn of_tcp(stack: &Arc<Stack>, tcp: TcpListener) -> io::Result<SmcListener> {
        tcp.set_nonblocking(true)?;
        // Accepted sockets inherit it.
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
            epoll: set,
            timer,
            nonblocking: AtomicBool::new(false),
            pending: Mutex::default(),
        })
    }

    /// The address that is listened on.
    ///
    /// # Errors
    /// Those of [`TcpListener::local_addr`].
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

    /// A descriptor for poll, select and epoll: readable when [`SmcListener::accept`] has something
    /// to do (which may be a step of a handshake, after which it returns `WouldBlock`).
    pub fn pollable(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }

    /// Takes the next connection: SMC or TCP, see [`SmcStream::info`].
    ///
    /// A handshake that fails is nobody's connection: it is counted and the next one is taken.
    ///
    /// # Errors
    /// Those of [`TcpListener::accept`]; `WouldBlock` if non-blocking.
    pub fn accept(&self) -> io::Result<(SmcStream, SocketAddr)> {
        // Whether TCP's queue is worth a look, and whether epoll had something to tell.
        let (mut queue, mut told) = (true, false);
        self.stack.sweep();
        let mut pending = self.lock();
        loop {
            let current = self.stack.current();
            let taken = self.try_once(&mut pending, &current, queue)?;
            if pending.ready.is_empty() && !self.nonblocking() {
                // A client in the middle of a handshake answers soon: look for a while.
                self.look_for_a_while(&mut pending, &current)?;
            }
            // Without a client and without a connection it was something else that epoll told of.
            told &= !taken && pending.ready.is_empty();
            self.take_events(&mut pending, &current, told)?;
            if !pending.ready.is_empty() {
                self.leave_to_others(&mut pending)?;
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
            let mut watched = pending.take_along();
            let mut slept = self.register(&mut pending).map(|()| false);
            if slept.is_ok() {
                pending.sleepers += 1;
                drop(pending);
                let next = next.map(|next| next.saturating_duration_since(Instant::now()));
                slept = self.sleep(&mut watched, next);
                pending = self.lock();
                pending.sleepers -= 1;
            }
            pending.bring_back(watched);
            told = slept?;
            queue = told;
        }
    }

    /// Connections one after the other, for ever.
    pub fn incoming(&self) -> impl Iterator<Item = io::Result<SmcStream>> + '_ {
        std::iter::repeat_with(|| self.accept().map(|(stream, _)| stream))
    }

    /// The stack its connections belong to.
    pub fn stack(&self) -> &Arc<Stack> {
        &self.stack
    }

    fn lock(&self) -> MutexGuard<'_, Pending> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sleeps until there is something new, and notes of which handshakes. `true`: epoll tells.
    fn sleep(&self, watched: &mut [(u64, Entry)], timeout: Option<Duration>) -> io::Result<bool> {
        let timeout = timeout.map(timespec);
        let mut fds = Vec::with_capacity(1 + watched.len());
        fds.push(PollFd::new(&self.epoll, PollFlags::IN));
        fds.extend(watched.iter().map(|(_, entry)| PollFd::new(&entry.tcp, PollFlags::IN)));
        match rustix::event::poll(&mut fds, timeout.as_ref()) {
            // A signal: nothing is said of any of them.
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        let mut told = fds.iter().map(|fd| !fd.revents().is_empty());
        let by_epoll = told.next().unwrap_or_default();
        let told: Vec<_> = told.collect();
        for ((_, entry), told) in watched.iter_mut().zip(told) {
            entry.silent = !told;
        }
        Ok(by_epoll)
    }

    /// Before this thread goes away with a connection: what it leaves behind must reach those who sleep.
    fn leave_to_others(&self, pending: &mut Pending) -> io::Result<()> {
        if pending.sleepers == 0 {
            return Ok(());
        }
        self.register(pending)?;
        if pending.ready.len() > 1 {
            self.ring(Duration::from_nanos(1))?;
            pending.alarm = None;
        }
        Ok(())
    }

    fn nonblocking(&self) -> bool {
        self.nonblocking.load(Ordering::Relaxed)
    }

    /// Tries the handshakes that epoll does not know, if they may have something new, and takes a new
    /// client from the `queue`. `true`: there was one.
    fn try_once(&self, pending: &mut Pending, current: &Current, queue: bool) -> io::Result<bool> {
        // A step may take its handshake off the list.
        for key in pending.hot.clone() {
            let Some(entry) = pending.handshakes.get_mut(&key) else { continue };
            if !std::mem::take(&mut entry.silent) {
                self.step(pending, current, key);
            }
        }
        Ok(queue && pending.ready.is_empty() && self.take_client(pending, current)?)
    }

    /// Tries again and again for as long as that is worth it.
    fn look_for_a_while(&self, pending: &mut Pending, current: &Current) -> io::Result<()> {
        if pending.hot.is_empty() {
            return Ok(());
        }
        let mut tried = Ok(false);
        self.stack.spin().until_asked(|| {
            tried = self.try_once(pending, current, true);
            // Nothing left to look at counts as an end, too.
            tried.is_err() || !pending.ready.is_empty() || pending.hot.is_empty()
        });
        tried.map(|_| ())
    }

    /// Gives epoll what it does not know yet.
    fn register(&self, pending: &mut Pending) -> io::Result<()> {
        for key in std::mem::take(&mut pending.hot) {
            let Some(entry) = pending.handshakes.get_mut(&key) else { continue };
            let data = epoll::EventData::new_u64(key);
            // Edge triggered: a peek leaves the bytes, and the client may send no more of them.
            let flags = epoll::EventFlags::IN | epoll::EventFlags::RDHUP | epoll::EventFlags::ET;
            epoll::add(&self.epoll, &entry.tcp, data, flags)?;
            entry.registered = true;
            self.register_other(entry, key)?;
        }
        // With as many handshakes as are allowed, clients wait in TCP's queue, and must not keep this
        // thread awake.
        let full = pending.is_full();
        if full != pending.full {
            let flags = if full { epoll::EventFlags::empty() } else { epoll::EventFlags::IN };
            epoll::modify(&self.epoll, &self.tcp, epoll::EventData::new_u64(LISTENER), flags)?;
            pending.full = full;
        }
        Ok(())
    }

    /// Gives epoll the descriptor that LLC has beside TCP.
    fn register_other(&self, entry: &mut Entry, key: u64) -> io::Result<()> {
        if let Some(fd) = entry.handshake.fd()
            && entry.registered
            && !entry.both
        {
            let flags = epoll::EventFlags::IN | epoll::EventFlags::ET;
            epoll::add(&self.epoll, fd, epoll::EventData::new_u64(key), flags)?;
            entry.both = true;
        }
        Ok(())
    }

    /// Goes on with what epoll reports, if it has something to (`told`) or may have, and with what has
    /// run out of time.
    fn take_events(&self, pending: &mut Pending, current: &Current, told: bool) -> io::Result<()> {
        if told || pending.handshakes.len() > pending.hot.len() || self.nonblocking() {
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
        let late: Vec<u64> = pending
            .handshakes
            .iter()
            .filter(|(_, entry)| entry.handshake.deadline() <= now)
            .map(|(key, _)| *key)
            .collect();
        for key in late {
            self.step_with(pending, key, |entry| {
                entry.handshake.expire(&entry.tcp, &self.terms(current))
            });
        }
        Ok(())
    }

    /// Takes one client from TCP's queue, if there is one.
    fn take_client(&self, pending: &mut Pending, current: &Current) -> io::Result<bool> {
        if pending.is_full() {
            return Ok(false);
        }
        let (tcp, addr) = loop {
            match self.tcp.accept() {
                Ok(accepted) => break accepted,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                // The client has gone again; that is no error of ours.
                Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        };
        let handshake = match self.stack.peer_discovery().accepted(&tcp) {
            ServerAction::AwaitProposal => server::Handshake::awaited(&self.terms(current)),
            ServerAction::Peek => server::Handshake::new(&self.terms(current)),
            ServerAction::UseTcp => {
                let plain = Outcome::Tcp(FallbackReason::PeerNotSmc.into());
                self.finish(pending, tcp, addr, Ok(plain));
                return Ok(true);
            }
        };
        let key = pending.next;
        pending.next = (pending.next + 1) % TIMER;
        let (registered, silent, both) = Default::default();
        let entry = Entry { tcp, addr, handshake, registered, silent, both };
        pending.handshakes.insert(key, entry);
        pending.hot.push(key);
        self.step(pending, current, key);
        Ok(true)
    }

    fn terms<'a>(&self, current: &'a Current) -> server::Terms<'a> {
        server::Terms {
            config: &current.config,
            fabrics: &current.fabrics,
            rdma: current.rdma(),
            buffer: self.stack.buffer_len(),
            detect: self.stack.config().detect_timeout,
            patience: self.stack.config().clc_timeout,
        }
    }

    fn step(&self, pending: &mut Pending, current: &Current, key: u64) {
        self.step_with(pending, key, |entry| {
            // Epoll reports edges.
            let drain = entry.registered;
            entry.handshake.advance(&entry.tcp, &self.terms(current), drain)
        });
    }

    fn step_with(
        &self,
        pending: &mut Pending,
        key: u64,
        step: impl FnOnce(&mut Entry) -> Result<Option<Outcome>, Broken>,
    ) {
        let Some(entry) = pending.handshakes.get_mut(&key) else { return };
        let outcome = match step(entry) {
            Ok(None) => match self.register_other(entry, key) {
                Ok(()) => return,
                Err(error) => Err(error.into()),
            },
            Ok(Some(outcome)) => Ok(outcome),
            Err(broken) => Err(broken),
        };
        if let Some(entry) = self.remove(pending, key) {
            self.finish(pending, entry.tcp, entry.addr, outcome);
        }
    }

    fn remove(&self, pending: &mut Pending, key: u64) -> Option<Entry> {
        let removed = pending.handshakes.remove(&key)?;
        pending.hot.retain(|hot| *hot != key);
        if removed.registered
            && let Err(error) = epoll::delete(&self.epoll, &removed.tcp)
        {
            tracing::debug!(%error, "epoll");
        }
        Some(removed)
    }

    fn finish(
        &self,
        pending: &mut Pending,
        tcp: TcpStream,
        addr: SocketAddr,
        outcome: Result<Outcome, Broken>,
    ) {
        let stream = match outcome {
            Ok(Outcome::Smc(link)) => SmcStream::of_established(&self.stack, tcp, link),
            Ok(Outcome::Tcp(why)) => SmcStream::of_tcp(&self.stack, tcp, why),
            Err(broken) => {
                tracing::debug!(%addr, %broken, "handshake failed");
                self.stack.count_broken();
                break_off(tcp, &broken);
                return;
            }
        };
        match stream {
            Ok(stream) => pending.ready.push_back((stream, addr)),
            Err(error) => tracing::debug!(%addr, %error, "connection lost after its handshake"),
        }
    }

    /// Has the pollable descriptor become readable when the next handshake runs out of time.
    fn set_alarm(&self, pending: &mut Pending) -> io::Result<()> {
        let next = pending.next_deadline();
        if next == pending.alarm {
            return Ok(());
        }
        let left = next.map_or(Duration::ZERO, |next| {
            next.saturating_duration_since(Instant::now()).max(Duration::from_micros(1))
        });
        self.ring(left)?;
        pending.alarm = next;
        Ok(())
    }

    /// Has the timer wake whoever waits after a while; zero: never.
    fn ring(&self, after: Duration) -> io::Result<()> {
        let once = timespec(Duration::ZERO);
        let spec = Itimerspec { it_interval: once, it_value: timespec(after) };
        rustix::time::timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &spec)?;
        Ok(())
    }
}

impl Pending {
    fn is_full(&self) -> bool {
        self.handshakes.len() + self.away >= MAX_PENDING
    }

    /// Those that a thread can watch without epoll while it sleeps. Nobody else goes on with them.
    fn take_along(&mut self) -> Vec<(u64, Entry)> {
        let mut along = Vec::new();
        for key in std::mem::take(&mut self.hot) {
            let waits = |entry: &Entry| entry.handshake.awaits_confirm();
            match self.handshakes.remove(&key) {
                Some(entry) if waits(&entry) && along.len() < MAX_WATCHED => {
                    along.push((key, entry))
                }
                Some(entry) => {
                    self.handshakes.insert(key, entry);
                    self.hot.push(key);
                }
                None => {}
            }
        }
        self.away += along.len();
        along
    }

    /// Undoes [`Pending::take_along`].
    fn bring_back(&mut self, along: Vec<(u64, Entry)>) {
        self.away -= along.len();
        for (key, entry) in along {
            self.handshakes.insert(key, entry);
            self.hot.push(key);
        }
    }

    fn next_deadline(&self) -> Option<Instant> {
        self.handshakes.values().map(|entry| entry.handshake.deadline()).min()
    }
}

fn timespec(timeout: Duration) -> rustix::event::Timespec {
    rustix::event::Timespec {
        tv_sec: timeout.as_secs().min(3600) as i64,
        tv_nsec: i64::from(timeout.subsec_nanos()),
    }
}
