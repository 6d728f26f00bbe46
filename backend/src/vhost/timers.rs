// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Deadlines: the event loop calls expired timers.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use event_manager::{EventOps, EventSet, Events, MutEventSubscriber};
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create,
    timerfd_settime,
};

use super::waker::watch;
use ism_device::sync::lock;

/// Called after the deadline of a timer. Must not block.
type OnExpiry = Box<dyn FnOnce() + Send>;

/// The deadlines of an event loop.
#[derive(Clone)]
pub(crate) struct Timers {
    inner: Arc<Inner>,
}

/// The event loop's subscriber for expired deadlines.
pub(super) struct OnDeadline(Timers);

struct Inner {
    state: Mutex<State>,
    /// Expires at the nearest deadline.
    timer: OwnedFd,
}

#[derive(Default)]
struct State {
    entries: BinaryHeap<Reverse<Entry>>,
    closed: bool,
}

struct Entry {
    at: Instant,
    on_expiry: OnExpiry,
}

impl PartialEq for Entry {
    fn eq(&self, other: &Self) -> bool {
        self.at == other.at
    }
}
impl Eq for Entry {}
impl PartialOrd for Entry {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Entry {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.at.cmp(&other.at)
    }
}

impl Timers {
    /// Makes the timers and their subscriber.
    ///
    /// # Errors
    /// No descriptor is left.
    pub(super) fn new() -> io::Result<(Timers, OnDeadline)> {
        let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
        let timer = timerfd_create(TimerfdClockId::Monotonic, flags)?;
        let timers = Timers { inner: Arc::new(Inner { state: Mutex::default(), timer }) };
        Ok((timers.clone(), OnDeadline(timers)))
    }

    /// Calls `on_expiry` after `at`. The event loop runs `on_expiry`, so `on_expiry` must not block. A
    /// deadline cannot be cancelled, so the caller keeps the number of its deadlines small.
    pub(crate) fn call_at(&self, at: Instant, on_expiry: impl FnOnce() + Send + 'static) {
        let mut state = lock(&self.inner.state);
        if state.closed {
            return;
        }
        let is_nearest = state.entries.peek().is_none_or(|Reverse(entry)| at < entry.at);
        state.entries.push(Reverse(Entry { at, on_expiry: Box::new(on_expiry) }));
        if is_nearest {
            self.inner.set(at);
        }
    }

    /// Drops pending deadlines; ignores later ones.
    pub(crate) fn close(&self) {
        let mut state = lock(&self.inner.state);
        state.closed = true;
        let left = std::mem::take(&mut state.entries);
        drop(state);
        drop(left);
    }
}

impl Inner {
    /// Sets the timer. Called with the state locked, to make the nearest deadline win.
    fn set(&self, at: Instant) {
        // Zero would disarm the timer.
        let left = at.saturating_duration_since(Instant::now()).max(Duration::from_nanos(1));
        let none = Timespec { tv_sec: 0, tv_nsec: 0 };
        let Ok(it_value) = Timespec::try_from(left) else { return };
        let time = Itimerspec { it_interval: none, it_value };
        if let Err(error) = timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &time) {
            tracing::error!(%error, "no deadline can be set");
        }
    }

    /// Takes the next expired deadline, or sets the timer for the next future one.
    fn take_due(&self) -> Option<OnExpiry> {
        let mut state = lock(&self.state);
        let at = state.entries.peek().map(|Reverse(entry)| entry.at)?;
        if at > Instant::now() {
            self.set(at);
            return None;
        }
        state.entries.pop().map(|Reverse(entry)| entry.on_expiry)
    }
}

impl MutEventSubscriber for OnDeadline {
    fn init(&mut self, ops: &mut EventOps<'_>) {
        watch(&self.0.inner.timer, EventSet::IN, ops);
    }

    fn process(&mut self, _: Events, _: &mut EventOps<'_>) {
        let inner = &self.0.inner;
        let _ = rustix::io::read(&inner.timer, &mut [0; 8]);
        while let Some(on_expiry) = inner.take_due() {
            on_expiry();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::event_loop::EventLoop;
    use super::*;
    use std::sync::mpsc;

    #[test]
    fn calls_in_the_order_of_the_deadlines() {
        let (sender, receiver) = mpsc::channel();
        let events = EventLoop::start().unwrap();
        let now = Instant::now();
        // Holds the loop until all three are set.
        let (go_on, all_are_there) = mpsc::channel();
        events.handle().timers().call_at(now, move || all_are_there.recv().unwrap());
        for (number, delay) in [(0, 60), (1, 5), (2, 20)] {
            let sender = sender.clone();
            let send = move || sender.send(number).unwrap();
            events.handle().timers().call_at(now + Duration::from_millis(delay), send);
        }
        go_on.send(()).unwrap();
        let order: Vec<u8> = (0..3).map(|_| receiver.recv().unwrap()).collect();
        assert_eq!(order, [1, 2, 0]);
    }

    #[test]
    fn a_deadline_that_has_passed_already_is_due() {
        let (sender, receiver) = mpsc::channel();
        let events = EventLoop::start().unwrap();
        events.handle().timers().call_at(Instant::now(), move || sender.send(()).unwrap());
        assert_eq!(receiver.recv_timeout(smc_test_support::TIMEOUT), Ok(()));
    }

    #[test]
    fn closing_drops_the_deadlines_that_are_left() {
        let (sender, receiver) = mpsc::channel();
        let events = EventLoop::start().unwrap();
        let timers = events.handle().timers();
        timers.call_at(Instant::now() + Duration::from_secs(60), move || sender.send(()).unwrap());
        timers.close();
        assert!(receiver.recv().is_err());
    }
}
