// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Wakes the tasks of a tokio runtime with ready connections.
//!
//! Each runtime has one task of this module, the *watcher*. Whenever the runtime runs the watcher, it
//! checks shared memory, without a system call, and wakes the tasks whose connections have changed.
//! When nothing has changed for a while, the watcher arms the connections, as other event loops do, and
//! waits for one eventfd in tokio's reactor. Events of devices are left to the background threads: the
//! runtime may be busy with something else at the time.

use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use ::tokio::io::Interest;
use ::tokio::io::unix::AsyncFd;
use ::tokio::runtime::{Handle, Id};
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create,
    timerfd_settime,
};

use super::SmcStream;
use crate::reactor::spin::{Spin, SpinWait};
use crate::reactor::wait::RECHECK_INTERVAL;
use crate::socket::watch::{ArmedLines, Watch, WatchedStream};
use ism_sys::lock;

/// Interval of an awake watcher's checks for news of idle peers.
const IDLE_PEERS: Duration = Duration::from_micros(200);

/// The runtimes with watchers.
struct Runtimes(Mutex<Vec<Arc<RuntimeWatch>>>);

static RUNTIMES: Runtimes = Runtimes(Mutex::new(Vec::new()));

/// The direction awaited by a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Direction {
    Read,
    Write,
}

/// A connection among its runtime's, until dropped.
pub(super) struct Registration {
    runtime: Arc<RuntimeWatch>,
    member: Arc<Member>,
    number: u32,
}

/// The connections used by tasks of one runtime.
struct RuntimeWatch {
    id: Id,
    watch: Watch,
    members: Mutex<Members>,
    /// The runtime has shut down, so tasks are not woken any more. The lock of a member's tasks orders the
    /// word: a task that the watcher does not find there reads the word afterwards.
    is_over: AtomicBool,
}

#[derive(Default)]
struct Members {
    by_number: Vec<Option<Arc<Member>>>,
    free: Vec<u32>,
    /// Numbers of connections whose changes the watch does not report completely.
    scanned: Vec<u32>,
}

struct Member {
    watched: WatchedStream,
    tasks: Mutex<Tasks>,
}

/// The tasks waiting for a connection.
#[derive(Default)]
struct Tasks {
    reader: Option<Waker>,
    writer: Option<Waker>,
}

impl Registration {
    /// Registers a connection with the runtime of the caller. `None`: the connection is TCP.
    ///
    /// # Errors
    /// The caller is in no runtime; no descriptors are left.
    pub(super) fn new(stream: &SmcStream) -> io::Result<Option<Registration>> {
        if !stream.is_smc() {
            return Ok(None);
        }
        RuntimeWatch::of(&Handle::try_current().map_err(io::Error::other)?, stream)?.add(stream)
    }

    /// Has the task woken when the connection may be ready. The task checks the connection once more
    /// after this.
    ///
    /// # Errors
    /// The runtime has shut down.
    pub(super) fn wake_later(&self, cx: &Context<'_>, direction: Direction) -> io::Result<()> {
        let mut tasks = lock(&self.member.tasks);
        let place = match direction {
            Direction::Read => &mut tasks.reader,
            Direction::Write => &mut tasks.writer,
        };
        let before = match place {
            Some(waker) if waker.will_wake(cx.waker()) => None,
            _ => place.replace(cx.waker().clone()),
        };
        drop(tasks);
        // The drop of a task may drop other connections.
        drop(before);
        match self.runtime.is_over.load(Ordering::Acquire) {
            true => Err(io::Error::other("the tokio runtime of the connection has shut down")),
            false => Ok(()),
        }
    }
}

impl fmt::Debug for Registration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Registration").field("number", &self.number).finish_non_exhaustive()
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        let mut members = lock(&self.runtime.members);
        let gone = members.by_number.get_mut(self.number as usize).and_then(Option::take);
        members.scanned.retain(|number| *number != self.number);
        members.free.push(self.number);
        drop(members);
        drop(gone);
        self.member.take_tasks();
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        self.watched.conn().reactor().remove_pollable();
    }
}

impl Member {
    fn take_tasks(&self) -> Tasks {
        std::mem::take(&mut *lock(&self.tasks))
    }

    /// The waiting tasks able to continue.
    fn due(&self) -> [bool; 2] {
        let waiting = {
            let tasks = lock(&self.tasks);
            [tasks.reader.is_some(), tasks.writer.is_some()]
        };
        // A task beginning to wait from here on checks the connection itself.
        if waiting == [false, false] {
            return waiting;
        }
        let ready = self.watched.conn().ready();
        let can = [ready.readable || ready.hang_up, ready.writable || ready.hang_up];
        [waiting[0] && can[0], waiting[1] && can[1]]
    }

    fn is_due(&self) -> bool {
        self.due() != [false, false]
    }

    /// Takes the tasks able to continue.
    fn look(&self, woken: &mut Vec<Waker>) {
        let [read, write] = self.due();
        if read || write {
            let mut tasks = lock(&self.tasks);
            woken.extend(tasks.reader.take_if(|_| read));
            woken.extend(tasks.writer.take_if(|_| write));
        }
    }
}

impl Members {
    fn get(&self, number: u32) -> Option<&Arc<Member>> {
        self.by_number.get(number as usize)?.as_ref()
    }

    fn all(&self) -> impl Iterator<Item = &Arc<Member>> {
        self.by_number.iter().flatten()
    }

    fn scanned(&self) -> impl Iterator<Item = &Arc<Member>> {
        self.scanned.iter().filter_map(|number| self.get(*number))
    }

    fn len(&self) -> usize {
        self.by_number.len() - self.free.len()
    }
}

/// The state armed for the wake-up of a sleeping watcher.
enum Armed {
    /// The lines of slabs, and each connection without such a line.
    Lines(ArmedLines),
    /// Each connection.
    Each,
}

impl RuntimeWatch {
    /// The watch of a runtime, made by the runtime's first connection.
    fn of(handle: &Handle, stream: &SmcStream) -> io::Result<Arc<RuntimeWatch>> {
        let mut runtimes = lock(&RUNTIMES.0);
        if let Some(known) = runtimes.iter().find(|known| known.id == handle.id()) {
            return Ok(known.clone());
        }
        let runtime = Arc::new(RuntimeWatch {
            id: handle.id(),
            watch: Watch::new(Duration::ZERO)?,
            members: Mutex::default(),
            is_over: AtomicBool::new(false),
        });
        let mut watcher = Watcher::new(&runtime, Spin::of(&stream.stack().common().spin))?;
        runtimes.push(runtime.clone());
        // A runtime shutting down drops the task at once.
        drop(runtimes);
        handle.spawn(async move { std::future::poll_fn(|cx| watcher.poll(cx)).await });
        Ok(runtime)
    }

    fn is_empty(&self) -> bool {
        lock(&self.members).len() == 0
    }

    fn add(self: Arc<Self>, stream: &SmcStream) -> io::Result<Option<Registration>> {
        let mut members = lock(&self.members);
        let number = members.free.pop().unwrap_or_else(|| {
            members.by_number.push(None);
            members.by_number.len() as u32 - 1
        });
        let Some(watched) = self.watch.add(stream, number) else {
            members.free.push(number);
            return Ok(None);
        };
        watched.conn().reactor().add_pollable();
        if !watched.is_announced() {
            members.scanned.push(number);
        }
        let member = Arc::new(Member { watched, tasks: Mutex::default() });
        if let Some(place) = members.by_number.get_mut(number as usize) {
            *place = Some(member.clone());
        }
        drop(members);
        // A sleeping watcher has not armed this connection.
        self.watch.wake();
        Ok(Some(Registration { runtime: self, member, number }))
    }

    /// Finds the tasks of changed connections.
    fn look(&self, woken: &mut Vec<Waker>) {
        let has_changes = self.watch.has_changes();
        let members = lock(&self.members);
        if has_changes {
            for number in self.watch.take_changes() {
                let Some(member) = members.get(number) else { continue };
                member.watched.begin();
                member.look(woken);
            }
        }
        members.scanned().for_each(|member| member.look(woken));
    }

    /// Never rely only on a wake-up a peer can suppress: now and then the watcher checks every
    /// connection.
    fn look_at_all(&self, woken: &mut Vec<Waker>) {
        self.watch.recheck_lines();
        lock(&self.members).all().for_each(|member| member.look(woken));
    }

    /// Arms every connection. `None`: something has changed, so the watcher must not sleep.
    fn arm(&self) -> Option<Armed> {
        let members = lock(&self.members);
        let arm = |member: &Arc<Member>| member.watched.conn().arm_for_poller();
        let (armed, quiet) = match self.watch.arms_each(members.len()) {
            true => {
                let quiet = members.all().all(arm) && !members.all().any(|one| one.is_due());
                (Armed::Each, quiet)
            }
            false => {
                let lines = self.watch.arm_lines();
                let quiet = lines.is_quiet()
                    && members.scanned().all(arm)
                    && !members.scanned().any(|one| one.is_due());
                (Armed::Lines(lines), quiet)
            }
        };
        drop(members);
        if quiet && !self.watch.has_queued() {
            return Some(armed);
        }
        self.disarm(armed);
        None
    }

    fn disarm(&self, armed: Armed) {
        let members = lock(&self.members);
        let disarm = |member: &Arc<Member>| member.watched.conn().disarm_for_poller();
        match armed {
            Armed::Each => members.all().for_each(disarm),
            Armed::Lines(lines) => {
                members.scanned().for_each(disarm);
                drop(lines);
            }
        }
    }
}

/// The task watching the connections of a runtime.
struct Watcher {
    runtime: Arc<RuntimeWatch>,
    notifier: AsyncFd<OwnedFd>,
    timer: AsyncFd<OwnedFd>,
    /// The timer expires once in [`RECHECK_INTERVAL`].
    is_ticking: bool,
    spin: Spin,
    round: Option<SpinWait>,
    /// The watcher sleeps, since this time.
    asleep: Option<(Armed, Instant)>,
    /// The time of the next check of every connection.
    look_at_all: Instant,
    /// The time of the next check for news of idle peers.
    ask_idle: Instant,
    woken: Vec<Waker>,
}

impl Watcher {
    fn new(runtime: &Arc<RuntimeWatch>, spin: Spin) -> io::Result<Watcher> {
        let notifier = runtime.watch.notifier().try_clone_to_owned()?;
        let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
        let timer = timerfd_create(TimerfdClockId::Monotonic, flags)?;
        let now = Instant::now();
        Ok(Watcher {
            runtime: runtime.clone(),
            notifier: readable(notifier)?,
            timer: readable(timer)?,
            is_ticking: false,
            spin,
            round: None,
            asleep: None,
            look_at_all: now + RECHECK_INTERVAL,
            ask_idle: now,
            woken: Vec::new(),
        })
    }

    /// Wakes tasks, and returns at once until nothing has happened for a while. Ready: the runtime's
    /// reactor is gone.
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let now = Instant::now();
        self.wake_up(now);
        if now >= self.ask_idle {
            self.ask_idle = now + IDLE_PEERS;
            self.runtime.watch.poll_idle_peers();
        }
        self.runtime.look(&mut self.woken);
        if now >= self.look_at_all {
            self.look_at_all = now + RECHECK_INTERVAL;
            self.runtime.look_at_all(&mut self.woken);
        }
        if !self.woken.is_empty() {
            if let Some(round) = self.round.take() {
                self.spin.end(round, true);
            }
            // Without any lock: a task may be dropped here.
            self.woken.drain(..).for_each(Waker::wake);
            return again(cx);
        }
        if self.round.is_none() {
            self.round = self.spin.begin(now);
        }
        match self.round.take_if(|round| round.is_over(now)) {
            Some(round) => self.spin.end(round, false),
            None if self.round.is_some() => return again(cx),
            None => {}
        }
        self.sleep(now, cx)
    }

    /// Ends a sleep, if there is one.
    fn wake_up(&mut self, now: Instant) {
        if let Some((armed, since)) = self.asleep.take() {
            self.runtime.watch.end_sleep();
            self.runtime.disarm(armed);
            self.spin.note_sleep(now.saturating_duration_since(since));
        }
    }

    fn sleep(&mut self, now: Instant, cx: &mut Context<'_>) -> Poll<()> {
        let count = self.runtime.watch.count();
        let Some(armed) = self.runtime.arm() else { return again(cx) };
        self.set_ticking(!self.runtime.is_empty());
        match self.poll_descriptors(now, cx) {
            Poll::Pending if self.runtime.watch.begin_sleep(count) => {
                self.asleep = Some((armed, now));
                return Poll::Pending;
            }
            Poll::Ready(Err(_)) => {
                self.runtime.disarm(armed);
                return Poll::Ready(());
            }
            _ => self.runtime.disarm(armed),
        }
        again(cx)
    }

    /// Waits for the notifier and the timer. Ready: one of them was readable, and has been cleared.
    ///
    /// # Errors
    /// The runtime's reactor is gone.
    fn poll_descriptors(&mut self, now: Instant, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if let Poll::Ready(guard) = self.notifier.poll_read_ready(cx) {
            let mut guard = guard?;
            self.runtime.watch.clear_notifier();
            guard.clear_ready();
            return Poll::Ready(Ok(()));
        }
        if let Poll::Ready(guard) = self.timer.poll_read_ready(cx) {
            let mut guard = guard?;
            let _ = rustix::io::read(guard.get_inner(), &mut [0; 8]);
            guard.clear_ready();
            self.look_at_all = now;
            return Poll::Ready(Ok(()));
        }
        Poll::Pending
    }

    fn set_ticking(&mut self, on: bool) {
        if std::mem::replace(&mut self.is_ticking, on) != on {
            let zero = Timespec { tv_sec: 0, tv_nsec: 0 };
            let every = Timespec { tv_sec: RECHECK_INTERVAL.as_secs() as i64, tv_nsec: 0 };
            let it_interval = if on { every } else { zero };
            let times = Itimerspec { it_interval, it_value: it_interval };
            // These times are always valid.
            let _ = timerfd_settime(self.timer.get_ref(), TimerfdTimerFlags::empty(), &times);
        }
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        self.wake_up(Instant::now());
        self.runtime.is_over.store(true, Ordering::Release);
        lock(&RUNTIMES.0).retain(|other| !Arc::ptr_eq(other, &self.runtime));
        // Tasks of other runtimes may use these connections, and find out.
        let members: Vec<_> = lock(&self.runtime.members).all().cloned().collect();
        for tasks in members.iter().map(|member| member.take_tasks()) {
            tasks.reader.into_iter().chain(tasks.writer).for_each(Waker::wake);
        }
    }
}

/// Has the runtime return to the task after polling others.
fn again(cx: &Context<'_>) -> Poll<()> {
    cx.waker().wake_by_ref();
    Poll::Pending
}

/// A descriptor in the reactor of the caller's runtime.
fn readable(fd: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    // Deprecated in favour of an unsafe constructor for descriptors of unknown origin; an `OwnedFd`
    // keeps the required promise.
    #[allow(deprecated, reason = "see above")]
    AsyncFd::with_interest(fd, Interest::READABLE)
}
