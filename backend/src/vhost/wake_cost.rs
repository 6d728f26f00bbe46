// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Cost of one front end's wakes to the threads of other devices.
//!
//! A front end can make wakes slow: by thousands of watchers on its call eventfd, run by the kernel in the
//! signalling thread, or by an event queue in memory with slow pages. So each wake is timed. After a slow
//! wake, the front end's own worker does the wakes, for a time in proportion.
//!
//! A slow signal may only have lost the processor to the woken driver, through no fault of the front end. A
//! signal never waits, so processor time tells the two cases apart. Reading processor time takes system
//! calls, so a signal slow by the clock only starts such readings, for a time in proportion. Other devices
//! spend at most a thirty-second of their time on wakes.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::processor_account::thread_time;

/// A wake takes a few microseconds. After a wake over this limit, other devices do no wakes for a while.
const SLOW_WAKE: Duration = Duration::from_micros(100);
/// Length of this pause, as a multiple of the wake's time.
const FACTOR: u32 = 64;
/// Longest pause.
const MAX_PAUSE: Duration = Duration::from_secs(10);

/// The cost of one front end's wakes to the threads of other devices.
#[derive(Debug)]
pub(super) struct WakeCost {
    epoch: Instant,
    /// When other devices may do this front end's wakes again, nanoseconds after `epoch`.
    paused_until: AtomicU64,
    /// When to stop measuring the processor time of signals, nanoseconds after `epoch`.
    watched_until: AtomicU64,
}

impl Default for WakeCost {
    fn default() -> Self {
        WakeCost {
            epoch: Instant::now(),
            paused_until: AtomicU64::new(0),
            watched_until: AtomicU64::new(0),
        }
    }
}

impl WakeCost {
    /// Whether a thread of another device may do a wake at `now`.
    pub(super) fn allows(&self, now: Instant) -> bool {
        self.since_epoch(now) >= self.paused_until.load(Ordering::Relaxed)
    }

    /// A thread of another device took from `start` to `end` to put an event into the queue.
    pub(super) fn took(&self, start: Instant, end: Instant) {
        self.extend(&self.paused_until, end, end.saturating_duration_since(start));
    }

    /// Has a thread of another device signal the driver, from `start` on.
    pub(super) fn signal<R>(&self, start: Instant, signal: impl FnOnce() -> R) -> R {
        let is_watched = self.since_epoch(start) < self.watched_until.load(Ordering::Relaxed);
        let before = is_watched.then(thread_time);
        let done = signal();
        let end = Instant::now();
        if end.saturating_duration_since(start) > SLOW_WAKE {
            self.signalled(start, end, before.map(|before| thread_time().saturating_sub(before)));
        }
        done
    }

    /// A signal took from `start` to `end`, and `used` processor time if measured.
    fn signalled(&self, start: Instant, end: Instant, used: Option<Duration>) {
        self.extend(&self.watched_until, end, end.saturating_duration_since(start));
        self.extend(&self.paused_until, end, used.unwrap_or_default());
    }

    /// Sets `until` to a time after `end`, in proportion to a slow operation.
    fn extend(&self, until: &AtomicU64, end: Instant, took: Duration) {
        if took > SLOW_WAKE {
            let pause = took.saturating_mul(FACTOR).min(MAX_PAUSE);
            until.store(self.since_epoch(end + pause), Ordering::Relaxed);
        }
    }

    fn since_epoch(&self, at: Instant) -> u64 {
        let since = at.saturating_duration_since(self.epoch);
        u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signal_that_loses_the_processor_costs_its_front_end_nothing() {
        let (cost, start) = (WakeCost::default(), Instant::now());
        let after = |micros| start + Duration::from_micros(micros);
        let quick = Some(Duration::from_micros(20));
        cost.signalled(start, after(1_000), None);
        assert!(cost.allows(after(1_000)), "it is looked at from now on");
        cost.signalled(after(1_000), after(3_000), quick);
        assert!(cost.allows(after(3_000)), "the driver ran meanwhile");
        cost.signalled(after(3_000), after(5_000), Some(Duration::from_micros(1_000)));
        assert!(!cost.allows(after(68_000)) && cost.allows(after(69_000)), "64 times as long");
    }

    #[test]
    fn a_signal_that_lasts_is_seen() {
        let cost = WakeCost::default();
        let signal = || {
            let began = thread_time();
            while thread_time() - began < Duration::from_millis(2) {}
        };
        cost.signal(Instant::now(), signal);
        assert!(cost.allows(Instant::now()), "the first one is a reason to look");
        // A thread without a processor for 128 ms misses the time.
        let is_paused = || {
            cost.signal(Instant::now(), signal);
            !cost.allows(Instant::now())
        };
        assert!((0..20).any(|_| is_paused()));
    }

    #[test]
    fn who_makes_wakes_last_does_them_itself_for_a_time() {
        let cost = WakeCost::default();
        let start = Instant::now();
        let after = |micros| start + Duration::from_micros(micros);
        cost.took(start, after(100));
        assert!(cost.allows(after(100)), "as usual");
        cost.took(start, after(1_000));
        assert!(!cost.allows(after(1_000)));
        assert!(!cost.allows(after(64_999)));
        assert!(cost.allows(after(65_000)), "one in 64 is bearable");
        cost.took(start, after(60_000_000));
        assert!(cost.allows(after(70_000_000)));
    }
}
