// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The TCP connections of connections able to outlive their carrier.
//!
//! One thread waits for all of them in an edge-triggered epoll set, asleep while the carriers work and
//! TCP is silent. The thread is no leader of a reactor: a reactor ends with its device, and bytes on
//! TCP are needed then.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use rustc_hash::FxHashMap;
use rustix::event::epoll;

use ism_sys::{EventFd, is_free, lock, out_of_the_way, wait_in_set};

/// The name of the descriptor that ends a wait.
const WAKE: u64 = u64::MAX;

/// The watch's view of a connection. The watch holds none of its locks during these calls.
pub(crate) trait TcpHandler {
    /// The TCP connection underneath has bytes, room, or an end.
    fn on_tcp(&self);
    /// Whether the TCP connection underneath is to send more.
    fn is_sending(&self) -> bool;
    /// Soon after the connection was entered, and as long as this returns `true`.
    fn on_visit(&self) -> bool;
}

/// The TCP connections of one stack.
pub(crate) struct TcpWatch<C> {
    set: OwnedFd,
    /// Signalled behind a store to the words below: the thread takes their values behind its wait.
    wake: EventFd,
    stopped: AtomicBool,
    /// The thread is to call every connection.
    again: AtomicBool,
    /// A connection can do a step of its way back to a ring.
    returns: AtomicBool,
    next: AtomicU64,
    connections: Mutex<FxHashMap<u64, Weak<C>>>,
    /// The last connections of a stopped watch.
    last: Mutex<Vec<Arc<C>>>,
    /// Connections to visit soon.
    visits: Mutex<Vec<u64>>,
    /// The set is a parent's: this process, the child of a fork, calls its connections in turns.
    is_inherited: AtomicBool,
}

/// Time from the first entry in an empty list of visits to the visits, and between visits.
const VISIT_PAUSE: Duration = Duration::from_millis(50);

/// The events of a TCP connection: bytes and its end.
pub(crate) const BYTES: epoll::EventFlags =
    epoll::EventFlags::IN.union(epoll::EventFlags::RDHUP).union(epoll::EventFlags::ET);
/// The same, and room to write. Room already present is an event.
pub(crate) const BYTES_AND_ROOM: epoll::EventFlags = BYTES.union(epoll::EventFlags::OUT);
/// Room and the end: a reader of the connection takes the bytes itself, and wakes waiters for them.
pub(crate) const ROOM: epoll::EventFlags = BYTES_AND_ROOM.difference(epoll::EventFlags::IN);

/// Interval of a stopped watch's checks for failed last connections.
const LAST_PAUSE: Duration = Duration::from_secs(1);

impl<C: TcpHandler> TcpWatch<C> {
    /// An empty set. The caller starts [`TcpWatch::run`] on a thread of its own.
    ///
    /// # Errors
    /// No descriptor is left.
    pub(crate) fn new() -> io::Result<Arc<TcpWatch<C>>> {
        let set = out_of_the_way(|| epoll::create(epoll::CreateFlags::CLOEXEC))?;
        let wake = EventFd::new()?;
        let flags = epoll::EventFlags::IN | epoll::EventFlags::ET;
        epoll::add(&set, &wake, epoll::EventData::new_u64(WAKE), flags)?;
        let [stopped, again, returns, is_inherited] =
            std::array::from_fn(|_| AtomicBool::new(false));
        let (next, connections, last) = (AtomicU64::new(0), Mutex::default(), Mutex::default());
        let visits = Mutex::default();
        Ok(Arc::new(TcpWatch {
            set,
            wake,
            stopped,
            again,
            returns,
            next,
            connections,
            last,
            visits,
            is_inherited,
        }))
    }

    /// Enters a connection, and returns its name in the set. The thread visits the connection soon, which
    /// then has its TCP connection watched: a connection that has ended by then costs no system call.
    pub(crate) fn enter(&self, connection: Weak<C>) -> u64 {
        let name = self.next.fetch_add(1, Ordering::Relaxed);
        lock(&self.connections).insert(name, connection);
        self.visit_soon(name);
        name
    }

    /// Has the thread call [`TcpHandler::on_visit`].
    pub(crate) fn visit_soon(&self, name: u64) {
        let is_first = {
            let mut visits = lock(&self.visits);
            visits.push(name);
            visits.len() == 1
        };
        if is_first {
            // The thread's next wait has a limit.
            self.wake();
        }
    }

    /// Watches a TCP connection for events. `last`: the events so far; without any, the set does not have
    /// the TCP connection yet. An event that is there already is reported again.
    ///
    /// # Errors
    /// The kernel has no memory or no watch left.
    pub(crate) fn watch(
        &self,
        tcp: BorrowedFd<'_>,
        name: u64,
        last: epoll::EventFlags,
        events: epoll::EventFlags,
    ) -> io::Result<()> {
        if self.is_inherited() {
            return Ok(());
        }
        let data = epoll::EventData::new_u64(name);
        match last.is_empty() {
            true => epoll::add(&self.set, tcp, data, events)?,
            false => epoll::modify(&self.set, tcp, data, events)?,
        }
        Ok(())
    }

    /// Watches a TCP connection no more by this number. The set would keep the file under the number as
    /// long as the file is open.
    pub(crate) fn forget_number(&self, tcp: BorrowedFd<'_>) {
        if !self.is_inherited() {
            let _ = epoll::delete(&self.set, tcp);
        }
    }

    /// Leaves the set to the parent of this process, whose thread may still change the set.
    pub(crate) fn leave_to_parent(&self) {
        self.is_inherited.store(true, Ordering::Relaxed);
    }

    fn is_inherited(&self) -> bool {
        self.is_inherited.load(Ordering::Relaxed)
    }

    /// Visits connections if their time has come. Returns the limit of the next wait.
    fn visit(&self, next: &mut Option<Instant>) -> Option<Duration> {
        let now = Instant::now();
        if next.is_some_and(|at| now >= at) {
            let mut names = std::mem::take(&mut *lock(&self.visits));
            names.retain(|name| {
                let connection = lock(&self.connections).get(name).and_then(Weak::upgrade);
                connection.is_some_and(|connection| connection.on_visit())
            });
            lock(&self.visits).append(&mut names);
            *next = None;
        }
        if next.is_none() && !lock(&self.visits).is_empty() {
            *next = Some(now + VISIT_PAUSE);
        }
        next.map(|at| at.saturating_duration_since(now))
    }

    /// Forgets a connection. Its descriptor leaves the set when closed.
    pub(crate) fn remove(&self, name: u64) {
        lock(&self.connections).remove(&name);
    }

    /// The connections, with or without a carrier.
    pub(crate) fn connections(&self) -> Vec<Arc<C>> {
        lock(&self.connections).values().filter_map(Weak::upgrade).collect()
    }

    /// Ends [`TcpWatch::run`] when these connections have sent their queued bytes, without upkeep
    /// meanwhile.
    pub(crate) fn stop_after(&self, last: Vec<Arc<C>>) {
        *lock(&self.last) = last;
        self.stopped.store(true, Ordering::Release);
        self.wake();
    }

    /// Has the thread do its upkeep now.
    pub(crate) fn wake(&self) {
        self.wake.signal();
    }

    /// Has the upkeep of the thread look for connections able to come back to a ring.
    pub(crate) fn want_return(&self) {
        if !self.returns.swap(true, Ordering::AcqRel) {
            self.wake();
        }
    }

    /// Whether [`TcpWatch::want_return`] was called since the last call of this function.
    pub(crate) fn take_wish(&self) -> bool {
        self.returns.swap(false, Ordering::AcqRel)
    }

    /// Has the thread call every connection, because events may have had no effect.
    pub(crate) fn look_again(&self) {
        self.again.store(true, Ordering::Release);
        self.wake();
    }

    /// The descriptors of the set.
    pub(crate) fn descriptors(&self) -> [RawFd; 2] {
        [self.set.as_raw_fd(), self.wake.as_fd().as_raw_fd()]
    }

    /// Whether no thread holds the lock.
    pub(crate) fn is_unlocked(&self) -> bool {
        is_free(&self.connections) && is_free(&self.last) && is_free(&self.visits)
    }

    /// Drops the last connections with nothing more to send. `true`: none is left.
    fn is_idle(&self) -> bool {
        let mut last = std::mem::take(&mut *lock(&self.last));
        last.retain(|connection| connection.is_sending());
        let is_idle = last.is_empty();
        *lock(&self.last) = last;
        is_idle
    }

    /// The thread of the set: calls connections whose TCP connection has an event, and `upkeep` after
    /// each wait and each [`TcpWatch::want_return`]. `upkeep` returns the limit of the next wait;
    /// `None`: without end.
    pub(crate) fn run(&self, mut upkeep: impl FnMut() -> Option<Duration>) {
        let (mut pause, mut next_visit) = (None, None);
        loop {
            let names: Vec<u64> = match wait_in_set(self.set.as_fd(), pause, None) {
                Ok(names) => names.collect(),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => {
                    tracing::error!(%error, "TCP connections are not watched any more");
                    return;
                }
            };
            if self.again.swap(false, Ordering::AcqRel) {
                self.connections().iter().for_each(|connection| connection.on_tcp());
            }
            for name in names {
                let connection = lock(&self.connections).get(&name).and_then(Weak::upgrade);
                if let Some(connection) = connection {
                    connection.on_tcp();
                }
                // A step towards a ring does not wait for the bytes of all other connections.
                if self.returns.load(Ordering::Relaxed) && !self.stopped.load(Ordering::Relaxed) {
                    upkeep();
                }
            }
            pause = match self.stopped.load(Ordering::Acquire) {
                false => upkeep(),
                true if self.is_idle() => return,
                true => Some(LAST_PAUSE),
            };
            pause = pause.into_iter().chain(self.visit(&mut next_visit)).min();
        }
    }
}

#[cfg(test)]
#[path = "tcp_watch_tests.rs"]
mod tests;
