//! `Poller`: readiness of many connections, looked up in shared memory.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::epoll;
use rustix::fd::OwnedFd;

use super::SmcStream;
use crate::conn::Conn;
use crate::reactor::Reactor;
use crate::reactor::spin::Spin;
use crate::reactor::wait::{RECHECK_INTERVAL, Waiter};

/// Which readiness is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Interest {
    /// Report when a read would not block.
    pub readable: bool,
    /// Report when a write would not block.
    pub writable: bool,
}

impl Interest {
    /// Reads only.
    pub const READ: Interest = Interest { readable: true, writable: false };
    /// Writes only.
    pub const WRITE: Interest = Interest { readable: false, writable: true };
    /// Both.
    pub const BOTH: Interest = Interest { readable: true, writable: true };
}

/// One thing that is ready.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PollEvent {
    /// The key it was added with.
    pub key: u64,
    /// A read would not block (there are bytes, an end of data, or an error).
    pub readable: bool,
    /// A write would not block.
    pub writable: bool,
    /// The connection is over in both directions, or failed.
    pub hang_up: bool,
}

/// Level-triggered readiness of many connections.
///
/// SMC connections are looked up in shared memory, without a system call while there is something
/// to do; listeners and connections that are TCP go through epoll. This is the fast way to serve
/// many connections from one thread. Programs that have an event loop of their own use
/// [`SmcStream::pollable`] instead.
#[derive(Debug)]
pub struct Poller {
    inner: Mutex<Inner>,
    epoll: OwnedFd,
    waiter: Arc<Waiter>,
    spin: Spin,
    /// Number of threads that want to change the list of connections. A waiting thread releases the
    /// lock for them.
    changing: AtomicUsize,
}

struct Inner {
    conns: Vec<Watched>,
    at: HashMap<u64, usize>,
    /// The reactor whose events this poller handles while it sleeps. Background threads handle those
    /// of other reactors.
    reactor: Option<Arc<Reactor<Conn>>>,
    /// Number of connections of that reactor.
    ours: usize,
    /// A reactor that has to be polled, because its RNICs store nothing into memory by themselves.
    polled: Option<Arc<Reactor<Conn>>>,
    /// The connection that the next round checks first, so that none starves.
    first: usize,
    kernel: HashMap<u64, OwnedFd>,
    /// When the poller asks epoll although SMC connections keep the thread busy.
    ask_kernel: Instant,
}

struct Watched {
    key: u64,
    conn: Arc<Conn>,
    interest: Interest,
    /// Control words at the last check, if nothing was ready then.
    quiet: Option<[u64; 2]>,
    /// It belongs to another reactor than the poller's.
    foreign: bool,
}

impl Drop for Watched {
    fn drop(&mut self) {
        self.conn.set_poller(None);
        if self.foreign {
            self.conn.reactor().remove_pollable();
        }
    }
}

impl std::fmt::Debug for Inner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Inner").field("conns", &self.conns.len()).finish_non_exhaustive()
    }
}

/// The epoll key of the waiter's notifier.
const NOTIFIER: u64 = u64::MAX;
/// How long a busy poller does not ask the kernel.
const KERNEL_PAUSE: Duration = Duration::from_micros(200);

impl Poller {
    /// A poller that spins for at most `spin` before it sleeps.
    ///
    /// # Errors
    /// No descriptors are left.
    pub fn new(spin: Duration) -> io::Result<Poller> {
        let set = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let waiter = Arc::new(Waiter::with_notifier()?);
        if let Some(notifier) = waiter.notifier() {
            epoll::add(&set, notifier, epoll::EventData::new_u64(NOTIFIER), epoll::EventFlags::IN)?;
        }
        let inner = Inner {
            conns: Vec::new(),
            at: HashMap::new(),
            reactor: None,
            ours: 0,
            polled: None,
            first: 0,
            kernel: HashMap::new(),
            ask_kernel: Instant::now(),
        };
        Ok(Poller {
            inner: Mutex::new(inner),
            epoll: set,
            waiter,
            spin: Spin::new(spin),
            changing: AtomicUsize::new(0),
        })
    }

    /// The lock, from a thread that waits in [`Poller::wait`] with it if need be.
    fn change(&self) -> MutexGuard<'_, Inner> {
        // SeqCst, as the count of wake-ups: a thread that goes to sleep sees one or the other.
        self.changing.fetch_add(1, Ordering::SeqCst);
        self.waiter.wake();
        let inner = self.lock();
        self.changing.fetch_sub(1, Ordering::SeqCst);
        inner
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Watches a connection, which should be non-blocking. A connection belongs to one poller at a
    /// time.
    ///
    /// # Errors
    /// `AlreadyExists` if the key is in use, `InvalidInput` for the key `u64::MAX`; those of epoll.
    pub fn add(&self, stream: &SmcStream, key: u64, interest: Interest) -> io::Result<()> {
        let mut inner = self.change();
        check_key(&inner, key)?;
        let Some(conn) = stream.conn() else {
            return self.add_kernel(&mut inner, stream.pollable()?, key, interest);
        };
        conn.set_poller(Some(self.waiter.clone()));
        let ours = inner.reactor.get_or_insert_with(|| conn.reactor().clone());
        let foreign = !Arc::ptr_eq(ours, conn.reactor());
        if foreign {
            conn.reactor().add_pollable();
        } else {
            inner.ours += 1;
        }
        if conn.reactor().must_be_polled() {
            inner.polled = Some(conn.reactor().clone());
        }
        let at = inner.conns.len();
        inner.at.insert(key, at);
        inner.conns.push(Watched { key, conn: conn.clone(), interest, quiet: None, foreign });
        Ok(())
    }

    /// Watches any other descriptor.
    ///
    /// # Errors
    /// As [`Poller::add`].
    pub fn add_fd(&self, fd: BorrowedFd<'_>, key: u64, interest: Interest) -> io::Result<()> {
        let mut inner = self.change();
        check_key(&inner, key)?;
        self.add_kernel(&mut inner, fd, key, interest)
    }

    fn add_kernel(
        &self,
        inner: &mut Inner,
        fd: BorrowedFd<'_>,
        key: u64,
        interest: Interest,
    ) -> io::Result<()> {
        let fd = fd.try_clone_to_owned()?;
        epoll::add(&self.epoll, &fd, epoll::EventData::new_u64(key), flags(interest))?;
        inner.kernel.insert(key, fd);
        Ok(())
    }

    /// Changes what is asked for.
    ///
    /// # Errors
    /// `NotFound` if the key is not in use; those of epoll.
    pub fn modify(&self, key: u64, interest: Interest) -> io::Result<()> {
        let mut inner = self.change();
        if let Some(fd) = inner.kernel.get(&key) {
            let data = epoll::EventData::new_u64(key);
            return Ok(epoll::modify(&self.epoll, fd, data, flags(interest))?);
        }
        let at = inner.at.get(&key).copied().ok_or(io::ErrorKind::NotFound)?;
        if let Some(watched) = inner.conns.get_mut(at) {
            watched.interest = interest;
            watched.quiet = None;
        }
        Ok(())
    }

    /// Stops watching.
    ///
    /// # Errors
    /// `NotFound` if the key is not in use; those of epoll.
    pub fn remove(&self, key: u64) -> io::Result<()> {
        let mut inner = self.change();
        if let Some(fd) = inner.kernel.remove(&key) {
            return Ok(epoll::delete(&self.epoll, &fd)?);
        }
        let at = inner.at.remove(&key).ok_or(io::ErrorKind::NotFound)?;
        let foreign = inner.conns.swap_remove(at).foreign;
        if let Some(moved) = inner.conns.get(at).map(|watched| watched.key) {
            inner.at.insert(moved, at);
        }
        inner.ours -= usize::from(!foreign);
        if inner.ours == 0 {
            // It may be gone by now; others go on with their background threads.
            inner.reactor = None;
        }
        if inner.conns.is_empty() {
            inner.polled = None;
        }
        Ok(())
    }

    /// Waits until something is ready, or for `timeout` (`None`: for ever), and puts up to `max`
    /// entries into `ready`, which is emptied first.
    ///
    /// # Errors
    /// Those of epoll.
    pub fn wait(
        &self,
        ready: &mut Vec<PollEvent>,
        max: usize,
        timeout: Option<Duration>,
    ) -> io::Result<()> {
        ready.clear();
        let deadline = timeout.map(|timeout| Instant::now() + timeout);
        loop {
            while self.changing.load(Ordering::SeqCst) > 0 {
                std::thread::yield_now();
            }
            let mut inner = self.lock();
            inner.poll();
            inner.check_all(ready, max);
            let now = Instant::now();
            if ready.is_empty() || now >= inner.ask_kernel {
                inner.ask_kernel = now + KERNEL_PAUSE;
                self.ask_kernel(ready, max)?;
            }
            if !ready.is_empty() || deadline.is_some_and(|deadline| now >= deadline) {
                return Ok(());
            }
            let changing = || self.changing.load(Ordering::SeqCst) > 0;
            if self.spin.until(|| inner.has_news() || changing()) {
                continue;
            }
            let left = deadline.map_or(RECHECK_INTERVAL, |deadline| {
                deadline.saturating_duration_since(Instant::now()).min(RECHECK_INTERVAL)
            });
            self.sleep(&inner, left);
        }
    }

    /// Sleeps until a connection, a descriptor or the clock has something.
    fn sleep(&self, inner: &Inner, timeout: Duration) {
        let count = self.waiter.wake_count();
        let armed = inner.conns.iter().all(|watched| watched.conn.arm_for_poller());
        if armed && !inner.has_news() && self.changing.load(Ordering::SeqCst) == 0 {
            match &inner.reactor {
                Some(reactor) => {
                    let limit = Some((Instant::now(), timeout));
                    Reactor::sleep(reactor, &self.waiter, count, limit, Some(self.epoll.as_fd()));
                }
                None => self.waiter.sleep_on(self.epoll.as_fd(), count, Some(timeout)),
            }
        }
        for watched in &inner.conns {
            watched.conn.disarm_for_poller();
        }
    }

    fn ask_kernel(&self, ready: &mut Vec<PollEvent>, max: usize) -> io::Result<()> {
        let room = max.saturating_sub(ready.len()).min(256);
        if room == 0 {
            return Ok(());
        }
        let mut events = [const { std::mem::MaybeUninit::<epoll::Event>::uninit() }; 256];
        let zero = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
        let events = match epoll::wait(&self.epoll, &mut events[..room], Some(&zero)) {
            Ok((events, _)) => events,
            Err(rustix::io::Errno::INTR) => return Ok(()),
            Err(error) => return Err(error.into()),
        };
        for event in events.iter() {
            if event.data.u64() == NOTIFIER {
                if let Some(notifier) = self.waiter.notifier() {
                    notifier.clear();
                }
                continue;
            }
            use epoll::EventFlags as E;
            let flags = event.flags;
            let hang_up = flags.intersects(E::HUP | E::ERR);
            ready.push(PollEvent {
                key: event.data.u64(),
                readable: flags.intersects(E::IN | E::RDHUP) || hang_up,
                writable: flags.contains(E::OUT) || hang_up,
                hang_up,
            });
        }
        Ok(())
    }
}

impl Inner {
    /// Looks at every connection once, beginning behind the one that came last.
    fn check_all(&mut self, ready: &mut Vec<PollEvent>, max: usize) {
        let n = self.conns.len();
        let start = if self.first < n { self.first } else { 0 };
        for step in 0..n {
            let at = if start + step < n { start + step } else { start + step - n };
            let Some(watched) = self.conns.get_mut(at) else { return };
            if watched.quiet.is_some_and(|words| !watched.conn.may_have_changed(words)) {
                continue;
            }
            let words = watched.conn.control_words();
            let state = watched.conn.ready();
            let readable = watched.interest.readable && state.readable;
            let writable = watched.interest.writable && state.writable;
            if !readable && !writable && !state.hang_up {
                watched.quiet = Some(words);
                continue;
            }
            watched.quiet = None;
            ready.push(PollEvent { key: watched.key, readable, writable, hang_up: state.hang_up });
            if ready.len() >= max {
                self.first = at + 1;
                return;
            }
        }
    }

    fn poll(&self) {
        if let Some(reactor) = &self.polled {
            reactor.poll();
        }
    }

    fn has_news(&self) -> bool {
        self.poll();
        self.conns
            .iter()
            .any(|watched| watched.quiet.is_none_or(|words| watched.conn.may_have_changed(words)))
    }
}

fn check_key(inner: &Inner, key: u64) -> io::Result<()> {
    if key == NOTIFIER {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    if inner.at.contains_key(&key) || inner.kernel.contains_key(&key) {
        return Err(io::ErrorKind::AlreadyExists.into());
    }
    Ok(())
}

fn flags(interest: Interest) -> epoll::EventFlags {
    let mut flags = epoll::EventFlags::empty();
    flags.set(epoll::EventFlags::IN | epoll::EventFlags::RDHUP, interest.readable);
    flags.set(epoll::EventFlags::OUT, interest.writable);
    flags
}
