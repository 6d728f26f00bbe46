// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `Poller`: readiness of many connections, looked up in shared memory.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustc_hash::FxHashMap;
use rustix::event::epoll;
use rustix::fd::OwnedFd;

use super::SmcStream;
use crate::conn::{Conn, LocalEnd};
use crate::reactor::Reactor;
use crate::reactor::poll_queue::{PollEntry, PollQueue};
use crate::reactor::spin::Spin;
use crate::reactor::wait::{RECHECK_INTERVAL, Waiter, WaiterNotifier};

/// The requested readiness.
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
    /// Reads and writes.
    pub const BOTH: Interest = Interest { readable: true, writable: true };
}

/// One ready connection or descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PollEvent {
    /// The key given to [`Poller::add`].
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
/// SMC connections are looked up in shared memory, without a system call while there is something to
/// do; listeners and TCP connections go through epoll. This is the fast way to serve many connections
/// from one thread. Programs with an event loop of their own use [`SmcStream::pollable`] instead.
///
/// An idle connection costs nothing in a wait, apart from one check a second. Connections by moves of
/// the device, or with peers that do not raise lines of slabs, cost a check at each wait.
#[derive(Debug)]
pub struct Poller {
    inner: Mutex<Inner>,
    epoll: OwnedFd,
    queue: Arc<PollQueue>,
    spin: Spin,
    /// Number of threads about to change the list of connections. A waiting thread releases the lock
    /// for them. SeqCst: counted before the wake-up; the waiting thread reads the count before its sleep.
    changing: AtomicUsize,
}

struct Inner {
    /// The connections, each at the number of its entry in the queue.
    conns: Vec<Option<Watched>>,
    /// Unused numbers.
    free: Vec<u32>,
    at: FxHashMap<u64, u32>,
    /// Numbers of connections with possible readiness, each once.
    candidates: VecDeque<u32>,
    /// Numbers of connections whose changes the queue does not report completely.
    scanned: Vec<u32>,
    /// The reactors of the connections, each with its number of connections. The poller handles the
    /// events of the first while it sleeps. Background threads handle the events of the others.
    reactors: Vec<(Arc<Reactor<Conn>>, usize)>,
    kernel: HashMap<u64, OwnedFd>,
    /// The time for asking epoll although SMC connections keep the thread busy.
    ask_kernel: Instant,
    /// The time of the next check of every connection.
    look_at_all: Instant,
}

struct Watched {
    key: u64,
    conn: Arc<Conn>,
    interest: Interest,
    entry: Arc<PollEntry>,
    /// The connection is among the candidates.
    is_candidate: bool,
    /// The state at the last check, if nothing was ready then.
    quiet: Option<([u64; 2], LocalEnd)>,
    /// The connection belongs to another reactor than the poller's first.
    foreign: bool,
}

impl Drop for Watched {
    fn drop(&mut self) {
        self.conn.remove_poller(&self.entry);
        if self.foreign {
            self.conn.reactor().remove_pollable();
        }
    }
}

impl std::fmt::Debug for Inner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Inner").field("conns", &self.at.len()).finish_non_exhaustive()
    }
}

/// The epoll key of the waiter's notifier.
const NOTIFIER: u64 = u64::MAX;
/// The longest time of a busy poller without asking the kernel.
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
            free: Vec::new(),
            at: FxHashMap::default(),
            candidates: VecDeque::new(),
            scanned: Vec::new(),
            reactors: Vec::new(),
            kernel: HashMap::new(),
            ask_kernel: Instant::now(),
            look_at_all: Instant::now(),
        };
        Ok(Poller {
            inner: Mutex::new(inner),
            epoll: set,
            queue: PollQueue::new(waiter),
            spin: Spin::new(spin),
            changing: AtomicUsize::new(0),
        })
    }

    /// The lock, taken from a thread in [`Poller::wait`] if need be.
    fn change(&self) -> MutexGuard<'_, Inner> {
        self.changing.fetch_add(1, Ordering::SeqCst);
        self.queue.waiter().wake();
        let inner = self.lock();
        self.changing.fetch_sub(1, Ordering::SeqCst);
        inner
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Watches a connection, which should be non-blocking.
    ///
    /// # Errors
    /// `AlreadyExists` if the key is in use, `InvalidInput` for the key `u64::MAX`; an error of epoll.
    pub fn add(&self, stream: &SmcStream, key: u64, interest: Interest) -> io::Result<()> {
        let mut inner = self.change();
        check_key(&inner, key)?;
        match stream.conn() {
            Some(conn) => inner.add(&self.queue, conn, key, interest),
            None => self.add_kernel(&mut inner, stream.pollable()?, key, interest)?,
        }
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

    /// Changes the requested readiness.
    ///
    /// # Errors
    /// `NotFound` if the key is not in use; an error of epoll.
    pub fn modify(&self, key: u64, interest: Interest) -> io::Result<()> {
        let mut inner = self.change();
        if let Some(fd) = inner.kernel.get(&key) {
            let data = epoll::EventData::new_u64(key);
            return Ok(epoll::modify(&self.epoll, fd, data, flags(interest))?);
        }
        let number = inner.at.get(&key).copied().ok_or(io::ErrorKind::NotFound)?;
        if let Some(watched) = inner.watched(number) {
            watched.interest = interest;
        }
        inner.add_candidate(number);
        Ok(())
    }

    /// Stops watching.
    ///
    /// # Errors
    /// `NotFound` if the key is not in use; an error of epoll.
    pub fn remove(&self, key: u64) -> io::Result<()> {
        let mut inner = self.change();
        if let Some(fd) = inner.kernel.remove(&key) {
            return Ok(epoll::delete(&self.epoll, &fd)?);
        }
        let number = inner.at.remove(&key).ok_or(io::ErrorKind::NotFound)?;
        inner.remove(number);
        Ok(())
    }

    /// Waits until something is ready, or for `timeout` (`None`: for ever), and puts up to `max`
    /// entries into `ready`, emptied first.
    ///
    /// # Errors
    /// An error of epoll.
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
            let now = Instant::now();
            inner.poll(&self.queue);
            inner.look_at_all(now);
            inner.check(ready, max);
            if ready.is_empty() || now >= inner.ask_kernel {
                if now >= inner.ask_kernel {
                    inner.ask_kernel = now + KERNEL_PAUSE;
                    inner.reactors.iter().for_each(|(reactor, _)| reactor.poll_idle_groups());
                }
                self.ask_kernel(ready, max)?;
            }
            if !ready.is_empty() || deadline.is_some_and(|deadline| now >= deadline) {
                return Ok(());
            }
            let changing = || self.changing.load(Ordering::SeqCst) > 0;
            if self.spin.until(|| inner.has_changes(&self.queue) || changing()) {
                continue;
            }
            let left = deadline.map_or(RECHECK_INTERVAL, |deadline| {
                deadline.saturating_duration_since(Instant::now()).min(RECHECK_INTERVAL)
            });
            self.sleep(&inner, left);
        }
    }

    /// Sleeps until there is news of a connection, a descriptor or the clock.
    fn sleep(&self, inner: &Inner, timeout: Duration) {
        let waiter = self.queue.waiter();
        let count = waiter.wake_count();
        let each = inner.reactors.iter().any(|(reactor, _)| reactor.arms_each(inner.at.len()));
        let mut armed = true;
        match each {
            true => {
                let arm = |watched: &Watched| watched.conn.arm_for_poller();
                armed &= inner.all().all(arm) && !inner.all().any(Watched::has_changed);
            }
            false => {
                // Every reactor is armed, because every one is disarmed later.
                inner.reactors.iter().for_each(|(reactor, _)| armed &= reactor.arm_lines());
                armed &= inner.scanned().all(|watched| watched.conn.arm_for_poller());
                armed &= !inner.has_scanned_changes();
            }
        }
        let changing = self.changing.load(Ordering::SeqCst) > 0;
        if armed && !changing && !self.queue.has_changes() {
            let ends = WaiterNotifier::Set(self.epoll.as_fd());
            match inner.reactors.first() {
                Some((reactor, _)) => {
                    let limit = Some((Instant::now(), timeout));
                    Reactor::sleep(reactor, waiter, count, limit, Some(ends));
                }
                None => waiter.sleep_on(ends, count, Some(timeout)),
            }
        }
        match each {
            true => inner.all().for_each(|watched| watched.conn.disarm_for_poller()),
            false => {
                inner.reactors.iter().for_each(|(reactor, _)| reactor.disarm_lines());
                inner.scanned().for_each(|watched| watched.conn.disarm_for_poller());
            }
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
                if let Some(notifier) = self.queue.waiter().notifier() {
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
    fn watched(&mut self, number: u32) -> Option<&mut Watched> {
        self.conns.get_mut(number as usize)?.as_mut()
    }

    fn all(&self) -> impl Iterator<Item = &Watched> {
        self.conns.iter().flatten()
    }

    /// The connections whose changes the queue does not report completely.
    fn scanned(&self) -> impl Iterator<Item = &Watched> {
        self.scanned.iter().filter_map(|number| self.conns.get(*number as usize)?.as_ref())
    }

    fn add(&mut self, queue: &Arc<PollQueue>, conn: &Arc<Conn>, key: u64, interest: Interest) {
        let number = self.free.pop().unwrap_or_else(|| {
            self.conns.push(None);
            self.conns.len() as u32 - 1
        });
        let entry = PollEntry::new(queue, number);
        if !conn.add_poller(&entry) {
            self.scanned.push(number);
        }
        let reactor = conn.reactor();
        match self.reactors.iter_mut().find(|(known, _)| Arc::ptr_eq(known, reactor)) {
            Some((_, count)) => *count += 1,
            None => {
                reactor.add_poller();
                self.reactors.push((reactor.clone(), 1));
            }
        }
        let foreign = self.reactors.first().is_some_and(|(first, _)| !Arc::ptr_eq(first, reactor));
        if foreign {
            reactor.add_pollable();
        }
        let conn = conn.clone();
        let (is_candidate, quiet) = (false, None);
        let watched = Watched { key, conn, interest, entry, is_candidate, quiet, foreign };
        if let Some(place) = self.conns.get_mut(number as usize) {
            *place = Some(watched);
        }
        self.at.insert(key, number);
        self.add_candidate(number);
    }

    fn remove(&mut self, number: u32) {
        let Some(watched) = self.conns.get_mut(number as usize).and_then(Option::take) else {
            return;
        };
        self.free.push(number);
        self.scanned.retain(|other| *other != number);
        if watched.is_candidate {
            self.candidates.retain(|other| *other != number);
        }
        let reactor = watched.conn.reactor();
        let at = self.reactors.iter().position(|(known, _)| Arc::ptr_eq(known, reactor));
        if let Some((at, (_, count))) = at.and_then(|at| Some((at, self.reactors.get_mut(at)?))) {
            *count -= 1;
            // The reactor may be gone by now. If it was the first, background threads continue with the
            // others.
            if *count == 0 {
                let (reactor, _) = self.reactors.remove(at);
                reactor.remove_poller();
            }
        }
    }

    fn add_candidate(&mut self, number: u32) {
        let Some(watched) = self.watched(number) else { return };
        if !std::mem::replace(&mut watched.is_candidate, true) {
            self.candidates.push_back(number);
        }
    }

    /// Takes in the reports of the reactors' events and lines.
    fn poll(&mut self, queue: &PollQueue) {
        self.poll_reactors();
        for number in queue.take() {
            if let Some(watched) = self.watched(number) {
                watched.entry.begin();
            }
            self.add_candidate(number);
        }
        for at in 0..self.scanned.len() {
            let Some(number) = self.scanned.get(at).copied() else { break };
            if self.watched(number).is_some_and(|watched| watched.has_changed()) {
                self.add_candidate(number);
            }
        }
    }

    /// Never rely only on a wake-up a peer can suppress: now and then every connection is a candidate.
    fn look_at_all(&mut self, now: Instant) {
        if now < self.look_at_all {
            return;
        }
        self.look_at_all = now + RECHECK_INTERVAL;
        self.reactors.iter().for_each(|(reactor, _)| reactor.recheck_lines());
        (0..self.conns.len() as u32).for_each(|number| self.add_candidate(number));
    }

    /// Checks every candidate once, beginning behind the last one of the former check.
    fn check(&mut self, ready: &mut Vec<PollEvent>, max: usize) {
        for _ in 0..self.candidates.len() {
            if ready.len() >= max {
                return;
            }
            let Some(number) = self.candidates.pop_front() else { return };
            let Some(watched) = self.watched(number) else { continue };
            let seen = (watched.conn.control_words(), watched.conn.local_end());
            let state = watched.conn.ready();
            let readable = watched.interest.readable && state.readable;
            let writable = watched.interest.writable && state.writable;
            if !readable && !writable && !state.hang_up {
                watched.quiet = Some(seen);
                watched.is_candidate = false;
                continue;
            }
            ready.push(PollEvent { key: watched.key, readable, writable, hang_up: state.hang_up });
            self.candidates.push_back(number);
        }
    }

    fn poll_reactors(&self) {
        for (reactor, _) in &self.reactors {
            reactor.poll();
            reactor.poll_lines();
        }
    }

    fn has_changes(&self, queue: &PollQueue) -> bool {
        self.poll_reactors();
        queue.has_changes() || self.has_scanned_changes()
    }

    fn has_scanned_changes(&self) -> bool {
        self.scanned().any(|watched| watched.has_changed())
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.reactors.iter().for_each(|(reactor, _)| reactor.remove_poller());
    }
}

impl Watched {
    /// Whether the connection may be ready since the last check without readiness.
    fn has_changed(&self) -> bool {
        let conn = &self.conn;
        self.quiet.is_none_or(|seen| seen != (conn.control_words(), conn.local_end()))
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
