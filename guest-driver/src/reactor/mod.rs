//! Who listens to a source's events, and who is told.
//!
//! A source (a device, or all RNICs) has one interrupt. One thread at a time, the *leader*, listens
//! to it. A blocked caller makes itself leader if nobody leads, so that a wake-up travels from the
//! source straight to the thread that wants it; other blocked callers sleep on their futex until
//! the leader wakes them or leaves. Where readiness must be passed on to the kernel (pollable
//! descriptors), the background thread leads instead.
//!
//! A source that must be polled (RDMA) moves nothing into memory by itself. Callers that spin poll
//! it ([`Reactor::look`]) beside whoever leads, and the background thread leads whenever no caller has
//! done so for a while, until one wants to ([`background`]).

mod background;
pub(crate) mod readiness;
pub(crate) mod source;
#[cfg(test)]
mod tests;
pub(crate) mod wait;

use std::io;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, epoll, eventfd};
use rustix::fd::{BorrowedFd, OwnedFd};

pub(crate) use self::source::Attend;
use self::source::{OTHER, ReactorEvent, Source, Tags};
use self::wait::{Waiter, clear_interrupted, note_interrupted, was_interrupted};
use crate::sys::{POLLED, poll_readable, wait_in_set};
use rustc_hash::FxHashMap;

/// A connection as the reactor sees it.
pub(crate) trait ConnectionHandler: Send + Sync + 'static {
    /// The peer's words may be new: wake whoever waits for them.
    fn on_wake(&self);
    /// Whether anybody waits at all; asked before `on_wake`.
    fn is_awaited(&self) -> bool;
    /// Whether they may be others than at the last call. A wake-up that comes for several connections
    /// is of use to few of them.
    fn has_news(&self) -> bool;
    /// The peer's words are new and nobody waits for them.
    fn on_unawaited(&self);
    /// Called now and then, whether anybody waits or not: answer a peer that waits for an answer.
    fn on_tick(&self);
    /// Called every [`wait::RECHECK_INTERVAL`]: whoever sleeps looks at shared memory again, and what a peer holds
    /// back is asked for.
    fn on_recheck(&self);
    /// Called soon after [`Reactor::schedule_update`]: tell the peer what it was not told yet.
    fn on_delayed_update(&self, read_before: Option<u64>) -> DelayedUpdate;
    /// The peer, its buffer, the way to it or the device is gone: nothing can be sent or received
    /// any more.
    fn on_lost(&self);
    /// The peer takes the connection for over: as [`ConnectionHandler::on_lost`], and the bytes that arrived
    /// count for nothing.
    fn on_taken(&self);
}

/// What a connection owes its peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DelayedUpdate {
    /// Nothing: the application has told it all.
    None,
    /// As much as it had read by now. To be asked again, with that, to see whether the application is
    /// still at it.
    Since(u64),
    /// Nothing any more: it was told just now, which nobody else would have done.
    Sent,
}

/// From when on and for how long a sleep lasts at most.
pub(crate) type Limit = Option<(Instant, Duration)>;

/// Longest single sleep.
const LONGEST: Duration = Duration::from_secs(3600);

/// Nobody leads.
const FREE: u32 = 0;
/// A blocked caller leads.
const CALLER: u32 = 1;
/// The background thread leads.
const BACKGROUND: u32 = 2;

/// How a connection registers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Registration {
    /// The key by which events name the connection.
    pub(crate) key: u32,
    /// The wake group that the connection is in; `None`: in none.
    pub(crate) group: Option<u32>,
    /// The tags by which events name the ends of several connections; `None`: there are no such events.
    pub(crate) tags: Option<Tags>,
}

struct Entry<C> {
    group: Option<u32>,
    tags: Option<Tags>,
    handler: Weak<C>,
}

struct Table<C> {
    by_key: FxHashMap<u32, Entry<C>>,
    by_group: FxHashMap<u32, Vec<u32>>,
}

/// The meeting point of the threads of one source, for connections of type `C`.
pub(crate) struct Reactor<C> {
    source: Arc<dyn Source>,
    /// The source must be polled.
    polled: bool,
    lead: AtomicU32,
    /// Changes whenever a caller leads or polls.
    led: AtomicU32,
    /// A caller wants the lead that the background thread has.
    wanted: AtomicBool,
    /// The background thread wants to know when the caller that leads leaves.
    relief: AtomicBool,
    /// The background thread sleeps for long: what is to be done soon must wake it.
    resting: AtomicBool,
    /// The background thread stays up for debts, and needs no wake-up for one.
    vigil: AtomicBool,
    /// The background thread listens to nobody, for there is nobody.
    idle: AtomicBool,
    /// Connections whose peers have not been told of all that was read.
    owing: Mutex<Vec<u32>>,
    followers: Mutex<Vec<Arc<Waiter>>>,
    table: Mutex<Table<C>>,
    /// Wakes a leader for a reason of this process's own.
    interrupt: OwnedFd,
    /// Reports interrupts and those of the source by their edges, so that a leader that sleeps on
    /// nothing else need not clear them: a system call less for each wake-up. `None`: the source must
    /// be polled, and is cleared.
    edges: Option<OwnedFd>,
    /// Members whose readiness the kernel must know at once.
    pollables: AtomicUsize,
    lost: AtomicBool,
    stop: AtomicBool,
    chores_due: AtomicBool,
    timers_due: AtomicBool,
    background: Arc<Waiter>,
    epoch: Instant,
    /// Microseconds since `epoch` of the last look at the events by `glance`.
    glanced: AtomicU32,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // The data is valid after every statement, so a panic elsewhere changes nothing.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<C: ConnectionHandler> Reactor<C> {
    /// A reactor for `source`. The caller starts [`Reactor::run`] on a thread of its own.
    pub(crate) fn new(source: Arc<dyn Source>) -> io::Result<Arc<Reactor<C>>> {
        let interrupt = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let polled = source.must_be_polled();
        let edges =
            if polled { None } else { Some(edges([source.event_fd(), interrupt.as_fd()])?) };
        if let Some(set) = source.event_set() {
            let data = epoll::EventData::new_u64(OTHER);
            epoll::add(set, &interrupt, data, epoll::EventFlags::IN)?;
        }
        Ok(Arc::new(Reactor {
            polled,
            source,
            lead: AtomicU32::new(FREE),
            led: AtomicU32::new(0),
            wanted: AtomicBool::new(false),
            relief: AtomicBool::new(false),
            resting: AtomicBool::new(false),
            vigil: AtomicBool::new(false),
            idle: AtomicBool::new(false),
            owing: Mutex::default(),
            followers: Mutex::default(),
            table: Mutex::new(Table {
                by_key: FxHashMap::default(),
                by_group: FxHashMap::default(),
            }),
            interrupt,
            edges,
            pollables: AtomicUsize::new(0),
            lost: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            chores_due: AtomicBool::new(true),
            timers_due: AtomicBool::new(false),
            background: Arc::default(),
            epoch: Instant::now(),
            glanced: AtomicU32::new(0),
        }))
    }

    /// Whether connections have to poll ([`Reactor::look`]) for what their peers say.
    pub(crate) fn must_be_polled(&self) -> bool {
        self.polled
    }

    /// Whether the source is gone; every member was told.
    pub(crate) fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Acquire)
    }

    /// Adds a connection.
    pub(crate) fn join(&self, registration: Registration, handler: Weak<C>) {
        let Registration { key, group, tags } = registration;
        let mut table = lock(&self.table);
        if let Some(group) = group {
            table.by_group.entry(group).or_default().push(key);
        }
        table.by_key.insert(key, Entry { group, tags, handler });
        drop(table);
        if self.is_lost() {
            self.lose();
        }
    }

    /// Removes a connection.
    pub(crate) fn leave(&self, key: u32) {
        let mut table = lock(&self.table);
        let Some(Entry { group, .. }) = table.by_key.remove(&key) else { return };
        if let Some(group) = group
            && let Some(list) = table.by_group.get_mut(&group)
        {
            list.retain(|member| *member != key);
            if list.is_empty() {
                table.by_group.remove(&group);
            }
        }
    }

    /// The registered connections.
    pub(crate) fn connections(&self) -> Vec<Arc<C>> {
        lock(&self.table).by_key.values().filter_map(|entry| entry.handler.upgrade()).collect()
    }

    /// Wakes a thread that sleeps in [`Reactor::sleep`].
    pub(crate) fn wake(&self, waiter: &Waiter) {
        if waiter.wake() {
            self.interrupt();
        }
    }

    fn interrupt(&self) {
        // Full (EAGAIN) means that an interrupt is pending already.
        let _ = rustix::io::write(&self.interrupt, &1u64.to_ne_bytes());
    }

    /// A member's readiness must from now on be passed to the kernel at once.
    pub(crate) fn add_pollable(&self) {
        if self.pollables.fetch_add(1, Ordering::SeqCst) == 0 {
            // A leading caller steps back; the background thread takes over.
            self.interrupt();
            self.background.wake();
        }
    }

    /// Undoes one [`Reactor::add_pollable`].
    pub(crate) fn remove_pollable(&self) {
        if self.pollables.fetch_sub(1, Ordering::SeqCst) == 1 {
            self.interrupt();
        }
    }

    /// Polls a source that must be polled, whoever leads: for callers that spin or only ever try. To
    /// be called without the locks of a connection.
    pub(crate) fn look(&self) {
        if !self.polled {
            return;
        }
        self.note_lead();
        // Or the background thread would be woken for everything that is taken here.
        if self.lead.load(Ordering::Relaxed) == BACKGROUND {
            self.want_lead();
        }
        self.dispatch();
    }

    /// Tells the background thread that somebody is at it.
    fn note_lead(&self) {
        // Threads may lose each other's increments: any change will do.
        let led = self.led.load(Ordering::Relaxed);
        self.led.store(led.wrapping_add(1), Ordering::Relaxed);
    }

    /// Looks at the events without sleeping, if nobody leads: for callers that only ever try.
    pub(crate) fn try_poll(&self) {
        if self.polled {
            return;
        }
        // Once in 100 us is enough, and keeps the cost of an empty try at a clock read.
        let now = self.epoch.elapsed().as_micros() as u32;
        let last = self.glanced.load(Ordering::Relaxed);
        if now.wrapping_sub(last) < 100 || self.lead.load(Ordering::Relaxed) != FREE {
            return;
        }
        self.glanced.store(now, Ordering::Relaxed);
        if self.try_lead(CALLER) {
            self.dispatch();
            self.stop_leading();
        }
    }

    fn try_lead(&self, who: u32) -> bool {
        if who == CALLER && self.pollables.load(Ordering::SeqCst) > 0 {
            return false;
        }
        self.lead.compare_exchange(FREE, who, Ordering::SeqCst, Ordering::SeqCst).is_ok()
    }

    fn stop_leading(&self) {
        self.note_lead();
        self.lead.store(FREE, Ordering::SeqCst);
        if self.relief.load(Ordering::SeqCst) && self.relief.swap(false, Ordering::SeqCst) {
            self.background.wake();
        }
        // Somebody else may be waiting for events: let it lead.
        let next = lock(&self.followers).pop();
        if let Some(next) = next {
            self.wake(&next);
        }
    }

    /// Sleeps until the waiter is woken after `seen`, or for a time from now on (`now` and how long;
    /// `None`: the background thread wakes those who sleep for a connection every [`wait::RECHECK_INTERVAL`]). With
    /// `extra`, also until that descriptor is readable; the waiter's bell must be part of it.
    pub(crate) fn sleep(
        &self,
        waiter: &Arc<Waiter>,
        seen: u32,
        limit: Limit,
        extra: Option<rustix::fd::BorrowedFd<'_>>,
    ) {
        clear_interrupted();
        if self.try_lead(CALLER) {
            self.lead_until(waiter, seen, limit, extra);
            return;
        }
        lock(&self.followers).push(waiter.clone());
        // The leader may have left between the two lines above, before it could see us.
        if self.try_lead(CALLER) {
            self.unfollow(waiter);
            self.lead_until(waiter, seen, limit, extra);
            return;
        }
        let timeout = limit.map(|(_, timeout)| timeout);
        if self.polled && self.lead.load(Ordering::SeqCst) == BACKGROUND {
            self.want_lead();
        }
        match extra {
            None => waiter.sleep(seen, timeout),
            // A waiter with other descriptors has its bell among them.
            Some(extra) => {
                waiter.polling(true);
                if !waiter.woken(seen) {
                    poll_for(&[extra], timeout);
                }
                waiter.polling(false);
            }
        }
        self.unfollow(waiter);
    }

    fn unfollow(&self, waiter: &Arc<Waiter>) {
        lock(&self.followers).retain(|other| !Arc::ptr_eq(other, waiter));
    }

    fn lead_until(
        &self,
        waiter: &Waiter,
        seen: u32,
        limit: Limit,
        extra: Option<rustix::fd::BorrowedFd<'_>>,
    ) {
        // The first sleep, which mostly is the only one, needs no look at the clock.
        let (mut left, mut slept) = (limit.map(|(_, timeout)| timeout), false);
        // Who sleeps on a polled source need not look first: it looks once it is armed.
        let (mut skip, mut looked) = (self.polled, false);
        loop {
            // What ended the sleep comes first.
            if slept && self.polled {
                while self.source.poll_arrivals(&mut |news| self.tell(news)) {}
                if waiter.woken(seen) {
                    break;
                }
            }
            if !std::mem::take(&mut skip) {
                self.dispatch();
                looked = true;
            }
            if waiter.woken(seen) || self.pollables.load(Ordering::SeqCst) > 0 {
                break;
            }
            if std::mem::take(&mut slept) {
                left = limit.map(|(start, timeout)| timeout.saturating_sub(start.elapsed()));
            }
            if left.is_some_and(|left| left.is_zero()) {
                break;
            }
            // Where others have armed it, what came before that may be unseen.
            if !self.source.arm_interrupts() || !looked {
                continue;
            }
            waiter.polling(true);
            let other = !waiter.woken(seen) && self.poll_once(left, extra);
            waiter.polling(false);
            if other || was_interrupted() {
                break;
            }
            slept = true;
        }
        self.source.suppress_interrupts();
        self.stop_leading();
    }

    /// Waits for the source or the interrupt. `true`: `extra` is readable.
    fn poll_once(
        &self,
        timeout: Option<Duration>,
        extra: Option<rustix::fd::BorrowedFd<'_>>,
    ) -> bool {
        let interrupt = self.interrupt.as_fd();
        let edges = self.edges.as_ref().map(AsFd::as_fd);
        if let (Some(set), None) = (edges.or_else(|| self.source.event_set()), extra) {
            note_error(wait_in_set(set, timeout, wait::mask()).map(|events| {
                // Edges need not be taken back.
                events.filter(|_| edges.is_none()).for_each(|event| match event {
                    OTHER => drop(rustix::io::read(interrupt, &mut [0u8; 8])),
                    name => self.source.reported(name),
                });
            }));
            return false;
        }
        let source = self.source.event_fd();
        let fds = [source, interrupt, extra.unwrap_or(interrupt)];
        let count = if extra.is_some() { 3 } else { 2 };
        let [by_source, by_interrupt, by_extra] = poll_for(&fds[..count], timeout);
        if by_source {
            self.source.clear_event_fd();
        }
        if by_interrupt {
            let _ = rustix::io::read(interrupt, &mut [0u8; 8]);
        }
        extra.is_some() && by_extra
    }

    /// Takes events and tells whom they concern. Where callers must poll, any thread may; else
    /// only the leader.
    fn dispatch(&self) {
        while self.source.poll_events(&mut |news| self.tell(news)) {}
        if self.source.is_gone() && !self.is_lost() {
            self.lose();
        }
    }

    fn tell(&self, event: ReactorEvent) {
        match event {
            ReactorEvent::WakeGroup(group) => self.each_of_group(group, |member| {
                if member.is_awaited() && member.has_news() {
                    member.on_wake();
                }
            }),
            ReactorEvent::Wake(key) => {
                if let Some(member) = self.member(key)
                    && member.is_awaited()
                {
                    member.on_wake();
                }
            }
            ReactorEvent::Arrived(key) => match self.member(key) {
                Some(member) if member.is_awaited() => member.on_wake(),
                Some(member) => member.on_unawaited(),
                // It has left, or has yet to join and will look by itself.
                None => {}
            },
            ReactorEvent::Lost(key) => {
                if let Some(member) = self.member(key) {
                    member.on_lost();
                }
            }
            ReactorEvent::Taken(key) => {
                if let Some(member) = self.member(key) {
                    member.on_taken();
                }
            }
            ReactorEvent::PeerLost(peer) => self.lose_tagged(|tags| tags.peer == peer),
            ReactorEvent::BufferLost(buffer) => self.lose_tagged(|tags| tags.buffer == buffer),
            ReactorEvent::Timers => {
                self.timers_due.store(true, Ordering::SeqCst);
                self.rouse();
            }
        }
    }

    fn member(&self, key: u32) -> Option<Arc<C>> {
        lock(&self.table).by_key.get(&key).and_then(|entry| entry.handler.upgrade())
    }

    // Members are called outside the table's lock: they may join, leave or wake.
    fn each_of_group(&self, group: u32, mut f: impl FnMut(&C)) {
        let (first, others) = {
            let table = lock(&self.table);
            let Some(list) = table.by_group.get(&group) else { return };
            let mut members =
                list.iter().filter_map(|key| table.by_key.get(key)?.handler.upgrade());
            // Mostly it is the only one: no allocation for it.
            (members.next(), members.collect::<Vec<_>>())
        };
        for member in first.into_iter().chain(others) {
            f(&*member);
        }
    }

    fn each(&self, f: impl Fn(&C)) {
        for member in self.connections() {
            f(&*member);
        }
    }

    fn lose_tagged(&self, is_meant: impl Fn(&Tags) -> bool) {
        let members: Vec<_> = lock(&self.table)
            .by_key
            .values()
            .filter(|entry| entry.tags.as_ref().is_some_and(&is_meant))
            .filter_map(|entry| entry.handler.upgrade())
            .collect();
        members.iter().for_each(|member| member.on_lost());
    }

    fn lose(&self) {
        self.lost.store(true, Ordering::Release);
        self.each(|member| member.on_lost());
        for waiter in std::mem::take(&mut *lock(&self.followers)) {
            self.wake(&waiter);
        }
    }
}

/// `ppoll` that tells which are readable, or nothing: not in time.
fn poll_for(fds: &[BorrowedFd<'_>], timeout: Option<Duration>) -> [bool; POLLED] {
    let timeout = timeout.map(|timeout| timeout.min(LONGEST));
    note_error(poll_readable(fds, timeout, wait::mask()))
}

/// What a wait found; nothing if a signal ended it, which is noted.
fn note_error<T: Default>(found: io::Result<T>) -> T {
    found.unwrap_or_else(|error| {
        if error.kind() == io::ErrorKind::Interrupted {
            note_interrupted();
        }
        T::default()
    })
}

/// Sleeps until the descriptor is readable, or for `timeout`.
pub(super) fn nap(fd: BorrowedFd<'_>, timeout: Duration) {
    poll_for(&[fd], Some(timeout));
}

/// An epoll set of the descriptors' edges.
fn edges<const N: usize>(fds: [BorrowedFd<'_>; N]) -> io::Result<OwnedFd> {
    let set = epoll::create(epoll::CreateFlags::CLOEXEC)?;
    for fd in fds {
        let data = epoll::EventData::new_u64(0);
        epoll::add(&set, fd, data, epoll::EventFlags::IN | epoll::EventFlags::ET)?;
    }
    Ok(set)
}
