// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Threads waiting for one event source, and their wake-ups.
//!
//! An event source ([`Source`]) has one descriptor, made readable by interrupts. The reactor follows
//! the Leader/Followers pattern (POSA2): one thread at a time, the *leader*, sleeps on that descriptor
//! and dispatches events to connections. A blocked caller becomes the leader if there is none, so an
//! interrupt wakes the waiting thread without a detour. Other blocked callers are *followers*: each
//! sleeps on a futex until the leader wakes it, or stops leading.
//!
//! The *background thread* ([`background`]) leads while the kernel must learn of readiness at once,
//! because connections have readiness descriptors.
//!
//! A caller woken by its peer without the source ([`Waiter::sleep_on_word`]) neither leads nor follows.
//! For the events of the source, the background thread leads while no caller does.
//!
//! A source that must be polled puts nothing into memory by itself. Callers that spin poll it
//! ([`Reactor::poll`]) beside the leader. The background thread leads when no caller has led or
//! polled for some time, and stops when a caller asks for the lead.
//!
//! A source may come to an end, and another one take its place ([`Reactor::renew`]), as that of a
//! device whose daemon was started again. Connections and event loops keep their reactor.
//!
//! The reactor knows neither what connections carry nor what a source is. Threads, locks and
//! wake-ups are described in docs/concurrency.md.

mod background;
mod leader;
pub(crate) mod poll_queue;
pub(crate) mod readiness_fd;
pub(crate) mod source;
pub(crate) mod spin;
pub(crate) mod tcp_watch;
#[cfg(test)]
mod tests;
pub(crate) mod wait;
pub(crate) mod watched_tcp;
pub(crate) mod word_state;
mod work;

use std::io;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use arc_swap::{ArcSwap, Guard};
use rustc_hash::{FxHashMap, FxHashSet};
use rustix::event::epoll;
use rustix::fd::{BorrowedFd, OwnedFd};

pub(crate) use self::background::Upkeep;
pub(crate) use self::source::PeerObserver;
use self::source::{
    LineName, Lines, PolledSource, REACTOR_NAME, ReactorEvent, Source, SourceParts, Tags,
};
use self::wait::Waiter;
use self::work::{PendingWork, Work};
use ism_sys::{EventFd, ForkLocks, is_free, lock, out_of_the_way};

/// The reactor's view of a connection. The reactor holds none of its locks during these calls.
pub(crate) trait ConnectionHandler: Send + Sync + 'static {
    /// Whether a thread or a poller waits for this connection.
    fn has_waiters(&self) -> bool;
    /// Whether the peer's words may differ from the words at the last call; remembers the new ones. An
    /// event of a wake group concerns few of its connections.
    fn take_change(&self) -> bool;
    /// The peer's words may be new: wakes the waiters.
    fn on_wake(&self);
    /// The peer's words are new, and no thread or poller waits for the connection.
    fn on_arrival(&self);
    /// Answers a request of the peer, although no caller does. The background thread calls this every
    /// 10 ms or so while other work wakes it.
    fn on_tick(&self);
    /// Wakes sleepers to check shared memory again, and asks the peer for updates held back. The
    /// background thread calls this every [`wait::RECHECK_INTERVAL`].
    fn on_recheck(&self);
    /// Sends an update announced by [`Reactor::schedule_update`], unless a later send is better.
    /// `read_before` is the position of the last [`DelayedUpdate::Since`].
    fn on_delayed_update(&self, read_before: Option<u64>) -> DelayedUpdate;
    /// The peer, its buffer, the way to the peer or the source is gone: the ring registered with this
    /// key can neither send nor receive any more. The connection may use another ring by now.
    fn on_lost(&self, key: u32);
    /// The source works and is about to go: a connection able to continue without the source leaves it,
    /// and then calls [`Reactor::wake_background`].
    fn on_leave(&self);
    /// The peer uses its buffer for another connection: as [`ConnectionHandler::on_lost`], and
    /// unread bytes count for nothing.
    fn on_taken(&self, key: u32);
}

/// The effect of [`ConnectionHandler::on_delayed_update`]. TCP calls this a delayed acknowledgement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DelayedUpdate {
    /// Nothing: the peer knows the application's read position.
    None,
    /// Nothing yet: the application has read up to this position. Further reads will update the peer,
    /// and otherwise the next call does.
    Since(u64),
    /// Sent an update that no call of the application would have sent.
    Sent,
}

/// The start of a sleep and its longest duration; `None`: without end.
pub(crate) type Limit = Option<(Instant, Duration)>;

/// The most connections of an event loop armed one by one, if there are other event loops.
const MAX_ARMED_EACH: usize = 128;

/// No thread leads.
const FREE: u32 = 0;
/// A blocked caller leads.
const CALLER: u32 = 1;
/// The background thread leads.
const BACKGROUND: u32 = 2;

/// [`Reactor::try_poll`] polls at most once in this time, microseconds.
const TRY_INTERVAL_US: u32 = 100;

/// The names by which events mean a connection.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Registration {
    /// The key, unique among the connections of the reactor.
    pub(crate) key: u32,
    /// The wake group; `None`: no event means more than one connection.
    pub(crate) group: Option<u32>,
    /// The line in the wake group, by which events of the group may name the connection.
    pub(crate) line: Option<u16>,
    /// The tags of its peer; `None`: the source reports the end of each connection by its key.
    pub(crate) tags: Option<Tags>,
}

struct Entry<C> {
    group: Option<u32>,
    line: Option<u16>,
    tags: Option<Tags>,
    connection: Weak<C>,
}

struct Table<C> {
    by_key: FxHashMap<u32, Entry<C>>,
    by_group: FxHashMap<u32, FxHashSet<u32>>,
    by_line: FxHashMap<LineName, Vec<u32>>,
}

impl<C> Table<C> {
    fn connection(&self, key: u32) -> Option<Arc<C>> {
        self.by_key.get(&key).and_then(|entry| entry.connection.upgrade())
    }
}

/// A source, from its beginning to its end.
struct Session {
    source: Arc<dyn Source>,
    lines: Option<Arc<dyn Lines>>,
    polled: Option<Arc<dyn PolledSource>>,
    /// An epoll set reporting edges of the reactor's interrupt and of the source. A leader sleeping on
    /// nothing else need not clear them, which saves a system call for each wake-up. `None`: the source
    /// has a set of its own, or must be polled.
    edges: Option<OwnedFd>,
    lost: AtomicBool,
    /// The source has asked its connections to leave it.
    leaving: AtomicBool,
}

impl Session {
    fn new(parts: SourceParts, interrupt: &EventFd) -> io::Result<Arc<Session>> {
        let SourceParts { source, lines, polled } = parts;
        let edges = match source.event_set() {
            None if polled.is_some() => None,
            None => Some(edges([source.event_fd(), interrupt.as_fd()])?),
            Some(set) => {
                let mut flags = epoll::EventFlags::IN;
                flags.set(epoll::EventFlags::ET, polled.is_none());
                epoll::add(set, interrupt, epoll::EventData::new_u64(REACTOR_NAME), flags)?;
                None
            }
        };
        let (lost, leaving) = (AtomicBool::new(false), AtomicBool::new(false));
        Ok(Arc::new(Session { source, lines, polled, edges, lost, leaving }))
    }

    fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Acquire)
    }
}

/// Numbers of connections with readiness to be shown to the kernel at once.
#[derive(Default)]
struct Pollables {
    /// SeqCst: counted before the interrupt; a caller takes the lead, then reads the count.
    all: AtomicUsize,
    /// With a line that the background thread watches by the line of its slab. SeqCst: counted before the
    /// interrupt; the thread notes its sleep, then reads the count.
    marked: AtomicUsize,
}

/// The state shared by the threads of one source. `C` is the type of the source's connections.
pub(crate) struct Reactor<C> {
    session: ArcSwap<Session>,
    /// The background thread of the present session has not ended, or is about to be started.
    runs: AtomicBool,
    /// Whether the source is a [`PolledSource`].
    polled: bool,
    /// The leader: [`FREE`], [`CALLER`] or [`BACKGROUND`]. SeqCst: the leader frees the lead, then reads
    /// `followers` and the wake mask; they are written before the lead is read.
    lead: AtomicU32,
    /// Changes whenever a caller leads or polls.
    activity: AtomicU32,
    /// Pending work of the background thread.
    work: PendingWork,
    /// Keys of connections with a delayed update that the background thread has not seen yet.
    delayed_updates: Mutex<Vec<u32>>,
    followers: Mutex<Vec<Arc<Waiter>>>,
    table: Mutex<Table<C>>,
    /// Ends the sleep of the leader.
    interrupt: EventFd,
    pollables: Pollables,
    /// Event loops that poll lines.
    pollers: AtomicUsize,
    /// Connections with threads asleep where the source does not wake them. SeqCst: counted before the wake
    /// mask is read; the background thread stores its mask, then reads the count.
    unwatched: AtomicUsize,
    background: Arc<Waiter>,
    epoch: Instant,
    /// When [`Reactor::try_poll`] polled last, microseconds since `epoch`.
    last_try_us: AtomicU32,
}

impl<C: ConnectionHandler> ForkLocks for Reactor<C> {
    fn is_unlocked(&self) -> bool {
        is_free(&self.delayed_updates) && is_free(&self.followers) && is_free(&self.table)
    }

    fn forget_threads(&self) {
        lock(&self.followers).clear();
        self.lead.store(FREE, Ordering::SeqCst);
        self.work.reset(Work::MAINTENANCE | Work::TIMERS | Work::UPDATES);
        // No event loop of the kernel is left to learn of readiness.
        self.pollables.all.store(0, Ordering::SeqCst);
        self.pollables.marked.store(0, Ordering::SeqCst);
        self.unwatched.store(0, Ordering::SeqCst);
        self.pollers.store(0, Ordering::Relaxed);
        self.runs.store(false, Ordering::Release);
    }

    fn descriptors(&self) -> Vec<RawFd> {
        let session = self.session();
        let edges = session.edges.as_ref().map(AsRawFd::as_raw_fd);
        edges.into_iter().chain([self.interrupt.as_fd().as_raw_fd()]).collect()
    }
}

impl<C: ConnectionHandler> Reactor<C> {
    /// A reactor for `source`. The caller starts [`Reactor::run`] on a thread of its own.
    ///
    /// # Errors
    /// No descriptor is left.
    pub(crate) fn new(source: impl Into<SourceParts>) -> io::Result<Arc<Reactor<C>>> {
        let interrupt = EventFd::new()?;
        let session = Session::new(source.into(), &interrupt)?;
        let (by_key, by_group, by_line) = Default::default();
        let table = Table { by_key, by_group, by_line };
        Ok(Arc::new(Reactor {
            polled: session.polled.is_some(),
            session: ArcSwap::new(session),
            runs: AtomicBool::new(true),
            lead: AtomicU32::new(FREE),
            activity: AtomicU32::new(0),
            work: PendingWork::new(Work::MAINTENANCE),
            delayed_updates: Mutex::default(),
            followers: Mutex::default(),
            table: Mutex::new(table),
            interrupt,
            pollables: Pollables::default(),
            pollers: AtomicUsize::new(0),
            unwatched: AtomicUsize::new(0),
            background: Arc::default(),
            epoch: Instant::now(),
            last_try_us: AtomicU32::new(0),
        }))
    }

    /// Whether connections learn of their peers' words only by [`Reactor::poll`].
    pub(crate) fn must_be_polled(&self) -> bool {
        self.polled
    }

    /// Replaces a lost source by another one. The caller starts [`Reactor::run`] again. Connections of
    /// the lost source are not registered any more.
    ///
    /// # Errors
    /// No descriptor is left. `ResourceBusy`: the last source is not gone, or its thread has not
    /// ended.
    pub(crate) fn renew(&self, source: impl Into<SourceParts>) -> io::Result<()> {
        let session = Session::new(source.into(), &self.interrupt)?;
        let mut table = lock(&self.table);
        if !self.is_free() {
            return Err(io::ErrorKind::ResourceBusy.into());
        }
        self.runs.store(true, Ordering::Release);
        table.by_key.clear();
        table.by_group.clear();
        table.by_line.clear();
        self.session.store(session);
        drop(table);
        lock(&self.delayed_updates).clear();
        self.post(Work::MAINTENANCE | Work::TIMERS);
        Ok(())
    }

    /// Whether the source is gone and no thread runs for it: another source may take its place.
    pub(crate) fn is_free(&self) -> bool {
        self.is_lost() && !self.runs.load(Ordering::Acquire)
    }

    /// Notes the end, or the failed start, of the thread of [`Reactor::run`].
    pub(crate) fn stopped(&self) {
        self.runs.store(false, Ordering::Release);
    }

    #[inline]
    fn session(&self) -> Guard<Arc<Session>> {
        self.session.load()
    }

    /// Whether the source is gone. Its connections have learnt of the loss, or are about to.
    pub(crate) fn is_lost(&self) -> bool {
        self.session().is_lost()
    }

    /// Whether the source is about to go. Its connections have learnt of this, or are about to.
    pub(crate) fn is_leaving(&self) -> bool {
        self.session().leaving.load(Ordering::Acquire)
    }

    /// Adds a connection, and calls its `on_lost` if the source is gone.
    pub(crate) fn register(&self, registration: Registration, connection: Weak<C>) {
        let key = registration.key;
        if !self.enter(registration, connection.clone())
            && let Some(connection) = connection.upgrade()
        {
            connection.on_lost(key);
        }
    }

    /// Adds a connection. `false`: the source is gone.
    #[must_use = "false means: nobody tells the connection that the source is gone"]
    pub(crate) fn enter(&self, registration: Registration, connection: Weak<C>) -> bool {
        let Registration { key, group, line, tags } = registration;
        let mut table = lock(&self.table);
        if let Some(group) = group {
            table.by_group.entry(group).or_default().insert(key);
        }
        if let Some(name) = group.zip(line) {
            table.by_line.entry(name).or_default().push(key);
        }
        table.by_key.insert(key, Entry { group, line, tags, connection });
        drop(table);
        !self.is_lost()
    }

    /// Removes a connection. Another one may have its key since the last [`Reactor::renew`].
    pub(crate) fn remove(&self, key: u32, connection: *const C) {
        let mut table = lock(&self.table);
        if table.by_key.get(&key).is_none_or(|entry| entry.connection.as_ptr() != connection) {
            return;
        }
        let Some(Entry { group, line, .. }) = table.by_key.remove(&key) else { return };
        if let Some(name) = group.zip(line)
            && let Some(keys) = table.by_line.get_mut(&name)
        {
            keys.retain(|other| *other != key);
            if keys.is_empty() {
                table.by_line.remove(&name);
            }
        }
        if let Some(group) = group
            && let Some(keys) = table.by_group.get_mut(&group)
        {
            keys.remove(&key);
            if keys.is_empty() {
                table.by_group.remove(&group);
            }
        }
    }

    /// The registered connections.
    pub(crate) fn connections(&self) -> Vec<Arc<C>> {
        lock(&self.table).by_key.values().filter_map(|entry| entry.connection.upgrade()).collect()
    }

    /// Wakes a thread asleep in [`Reactor::sleep`].
    pub(crate) fn wake(&self, waiter: &Waiter) {
        if waiter.wake() {
            self.interrupt.signal();
        }
    }

    /// The kernel must from now on learn of a connection's readiness at once.
    pub(crate) fn add_pollable(&self) {
        if self.pollables.all.fetch_add(1, Ordering::SeqCst) == 0 {
            // A leading caller stops, and the background thread takes the lead.
            self.interrupt.signal();
            self.post(Work::WATCH);
        }
    }

    /// Undoes one [`Reactor::add_pollable`].
    pub(crate) fn remove_pollable(&self) {
        let minus_one = |count: usize| count.checked_sub(1);
        let before = self.pollables.all.fetch_update(Ordering::SeqCst, Ordering::SeqCst, minus_one);
        if before == Ok(1) {
            self.interrupt.signal();
        }
    }

    /// Whether the background thread can watch lines by those of slabs. Beside an event loop it does not:
    /// the connections of the loop would wake it.
    pub(crate) fn may_watch_lines(&self) -> bool {
        self.session().lines.is_some() && self.pollers.load(Ordering::Relaxed) == 0
    }

    /// A connection of [`Reactor::add_pollable`] has a marked line from now on.
    pub(crate) fn add_marked(&self) {
        if self.pollables.marked.fetch_add(1, Ordering::SeqCst) == 0 {
            // The background thread may sleep without the lines.
            self.interrupt.signal();
            self.post(Work::WATCH);
        }
    }

    /// Undoes one [`Reactor::add_marked`].
    pub(crate) fn remove_marked(&self) {
        let minus_one = |count: usize| count.checked_sub(1);
        let _ = self.pollables.marked.fetch_update(Ordering::SeqCst, Ordering::SeqCst, minus_one);
    }

    /// Threads of a connection will sleep by [`Waiter::sleep_on_word`]. From now on the background
    /// thread leads while no caller does.
    pub(crate) fn add_unwatched(&self) {
        if self.unwatched.fetch_add(1, Ordering::SeqCst) == 0 {
            self.post(Work::WATCH);
        }
    }

    /// Undoes one [`Reactor::add_unwatched`]. The background thread notices later, so short
    /// connections do not wake it.
    pub(crate) fn remove_unwatched(&self) {
        let minus_one = |count: usize| count.checked_sub(1);
        let _ = self.unwatched.fetch_update(Ordering::SeqCst, Ordering::SeqCst, minus_one);
    }

    /// Polls a source that must be polled, whether a thread leads or not. Callers that spin or never
    /// wait use this, and hold no lock of a connection.
    pub(crate) fn poll(&self) {
        if !self.polled {
            return;
        }
        self.note_activity();
        // While the background thread leads, each event taken by this call would wake that thread, too.
        if self.lead.load(Ordering::Relaxed) == BACKGROUND {
            self.request_lead();
        }
        self.dispatch();
    }

    /// Polls a source that need not be polled, without sleeping, if no thread leads and no such poll
    /// was made lately. Callers that never wait use this, and hold no lock of a connection.
    pub(crate) fn try_poll(&self) {
        self.poll_without_sleep(|_| ());
    }

    fn poll_without_sleep(&self, prepare: impl FnOnce(&Self)) {
        let Some(now) = self.try_time() else { return };
        self.last_try_us.store(now, Ordering::Relaxed);
        if let Some(_leadership) = self.try_lead(CALLER) {
            prepare(self);
            self.dispatch();
        }
    }

    /// Wakes the waiters of connections with a line raised by the peer, of wake groups busy lately.
    /// Callers that spin or never wait use this, and hold no lock of a connection.
    #[inline]
    pub(crate) fn poll_lines(&self) {
        let mut raised = Vec::new();
        self.session().lines.iter().for_each(|lines| lines.poll_lines(&mut raised));
        raised.into_iter().for_each(|name| self.wake_line(name));
    }

    /// An event loop has connections of this reactor from now on.
    pub(crate) fn add_poller(&self) {
        self.pollers.fetch_add(1, Ordering::Relaxed);
    }

    /// Undoes one [`Reactor::add_poller`].
    pub(crate) fn remove_poller(&self) {
        // A child of a fork has forgotten the loops of its parent.
        let minus_one = |count: usize| count.checked_sub(1);
        let _ = self.pollers.fetch_update(Ordering::Relaxed, Ordering::Relaxed, minus_one);
    }

    /// Whether an event loop with `n` connections arms each of them before a sleep, instead of the
    /// lines of slabs, whose events would include the connections of others.
    pub(crate) fn arms_each(&self, n: usize) -> bool {
        n <= MAX_ARMED_EACH && self.pollers.load(Ordering::Relaxed) > 1
    }

    /// Asks for an event at the next raised line, for a thread about to sleep. `false`: a line is
    /// raised already, so the thread must not sleep. [`Reactor::disarm_lines`] follows in any case.
    #[must_use = "false means: do not sleep"]
    pub(crate) fn arm_lines(&self) -> bool {
        self.session().lines.as_ref().is_none_or(|lines| lines.arm_lines())
    }

    /// Undoes one [`Reactor::arm_lines`].
    pub(crate) fn disarm_lines(&self) {
        self.session().lines.iter().for_each(|lines| lines.disarm_lines());
    }

    /// Wakes the waiters of wake groups not busy lately, reported only by events. A caller of
    /// [`Reactor::poll_lines`] that does not sleep calls this every 200 us or so.
    pub(crate) fn poll_idle_groups(&self) {
        self.session().lines.iter().for_each(|lines| lines.age_lines());
        self.poll_without_sleep(|reactor| {
            reactor.wait_for_source(Some(Duration::ZERO), None);
        });
    }

    /// Checks wake groups again, in case an event of a peer was missed.
    pub(crate) fn recheck_lines(&self) {
        self.session().lines.iter().for_each(|lines| lines.recheck_lines());
    }

    /// Whether [`Reactor::try_poll`] would poll now, so that a caller releases its locks for it.
    pub(crate) fn is_try_due(&self) -> bool {
        self.try_time().is_some()
    }

    /// The present time, if [`Reactor::try_poll`] would poll now. This costs one read of the clock.
    fn try_time(&self) -> Option<u32> {
        if self.polled {
            return None;
        }
        let now = self.epoch.elapsed().as_micros() as u32;
        let last = self.last_try_us.load(Ordering::Relaxed);
        let due = now.wrapping_sub(last) >= TRY_INTERVAL_US;
        (due && self.lead.load(Ordering::Relaxed) == FREE).then_some(now)
    }

    /// Shows the background thread that a caller leads or polls.
    fn note_activity(&self) {
        // Threads may overwrite each other's increments, because any change will do.
        let activity = self.activity.load(Ordering::Relaxed);
        self.activity.store(activity.wrapping_add(1), Ordering::Relaxed);
    }

    /// Takes events from the source and passes them on. Only the leader may call this, and any
    /// thread if the source must be polled.
    fn dispatch(&self) {
        let session = self.session();
        while session.source.poll_events(&mut |event| self.handle(event)) {}
        if session.source.is_gone() && !session.is_lost() {
            self.fail(&session);
        }
    }

    fn handle(&self, event: ReactorEvent) {
        match event {
            ReactorEvent::WakeGroup(group) => self.each_in_group(group, |connection| {
                if connection.has_waiters() && connection.take_change() {
                    connection.on_wake();
                }
            }),
            ReactorEvent::WakeLine(group, line) => self.wake_line((group, line)),
            ReactorEvent::Wake(key) => {
                if let Some(connection) = self.connection(key)
                    && connection.has_waiters()
                {
                    connection.on_wake();
                }
            }
            ReactorEvent::Arrived(key) => match self.connection(key) {
                Some(connection) if connection.has_waiters() => connection.on_wake(),
                Some(connection) => connection.on_arrival(),
                // The connection is removed already, or will check by itself once registered.
                None => {}
            },
            ReactorEvent::Lost(key) => {
                if let Some(connection) = self.connection(key) {
                    connection.on_lost(key);
                }
            }
            ReactorEvent::Taken(key) => {
                if let Some(connection) = self.connection(key) {
                    connection.on_taken(key);
                }
            }
            ReactorEvent::PeerLost(peer) => self.fail_tagged(|tags| tags.peer == peer),
            ReactorEvent::BufferLost(buffer) => self.fail_tagged(|tags| tags.buffer == buffer),
            ReactorEvent::Leave => self.leave(),
            // A connection already leaving continues to do so, and comes back.
            ReactorEvent::Stay => self.session().leaving.store(false, Ordering::Release),
            ReactorEvent::Timers => self.post(Work::TIMERS),
        }
    }

    fn connection(&self, key: u32) -> Option<Arc<C>> {
        lock(&self.table).connection(key)
    }

    /// Wakes the waiters of the connections on a line.
    fn wake_line(&self, name: LineName) {
        let (first, others) = {
            let table = lock(&self.table);
            let Some(keys) = table.by_line.get(&name) else { return };
            let mut connections = keys.iter().filter_map(|key| table.connection(*key));
            // A line mostly has one connection, for which this allocates nothing.
            (connections.next(), connections.collect::<Vec<_>>())
        };
        for connection in first.into_iter().chain(others).filter(|one| one.has_waiters()) {
            connection.on_wake();
        }
    }

    // The lock of the table is not held during `f`, which may register, remove or wake.
    fn each_in_group(&self, group: u32, mut f: impl FnMut(&C)) {
        let (first, others) = {
            let table = lock(&self.table);
            let Some(keys) = table.by_group.get(&group) else { return };
            let mut connections =
                keys.iter().filter_map(|key| table.by_key.get(key)?.connection.upgrade());
            // Most groups have one connection, for which this allocates nothing.
            (connections.next(), connections.collect::<Vec<_>>())
        };
        for connection in first.into_iter().chain(others) {
            f(&*connection);
        }
    }

    fn each(&self, f: impl Fn(&C)) {
        for connection in self.connections() {
            f(&*connection);
        }
    }

    fn fail_tagged(&self, matches: impl Fn(&Tags) -> bool) {
        self.fail_those(|entry| entry.tags.as_ref().is_some_and(&matches));
    }

    fn fail_those(&self, matches: impl Fn(&Entry<C>) -> bool) {
        let connections: Vec<_> = lock(&self.table)
            .by_key
            .iter()
            .filter(|(_, entry)| matches(entry))
            .filter_map(|(key, entry)| Some((*key, entry.connection.upgrade()?)))
            .collect();
        connections.iter().for_each(|(key, connection)| connection.on_lost(*key));
    }

    /// The source is about to go: has all connections leave it, and then the background thread do its
    /// maintenance.
    fn leave(&self) {
        self.session().leaving.store(true, Ordering::Release);
        self.each(|connection| connection.on_leave());
        self.post(Work::MAINTENANCE);
    }

    /// The source is gone: fails all connections and wakes all followers.
    fn fail(&self, session: &Session) {
        session.lost.store(true, Ordering::Release);
        self.fail_those(|_| true);
        for waiter in std::mem::take(&mut *lock(&self.followers)) {
            self.wake(&waiter);
        }
        // No work is left for this source.
        self.wake_background_thread();
    }
}

/// An epoll set of the descriptors' edges.
fn edges<const N: usize>(fds: [BorrowedFd<'_>; N]) -> io::Result<OwnedFd> {
    let set = out_of_the_way(|| epoll::create(epoll::CreateFlags::CLOEXEC))?;
    for fd in fds {
        let data = epoll::EventData::new_u64(0);
        epoll::add(&set, fd, data, epoll::EventFlags::IN | epoll::EventFlags::ET)?;
    }
    Ok(set)
}
