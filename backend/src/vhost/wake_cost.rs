// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What the wakes of one front end cost the threads of other devices.
//!
//! A front end can make them last: with thousands of watchers on its call eventfd, which the kernel
//! runs in the thread that signals, or with an event queue in memory whose pages take long to come.
//! So each wake is timed. After one that took long, the front end's own worker does them, for a
//! time in proportion: others spend a sixty-fourth of their time on it at most.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// A wake takes a few microseconds. One that takes longer than this is not done by others for a
/// while.
const SLOW_WAKE: Duration = Duration::from_micros(100);
/// How many times as long as the wake took.
const FACTOR: u32 = 64;
/// But no longer than this.
const MAX_PAUSE: Duration = Duration::from_secs(10);

/// The cost of one front end's wakes to the threads of other devices.
#[derive(Debug)]
pub(super) struct WakeCost {
    epoch: Instant,
    /// When others may do its wakes again, nanoseconds after `epoch`.
    paused_until: AtomicU64,
}

impl Default for WakeCost {
    fn default() -> Self {
        WakeCost { epoch: Instant::now(), paused_until: AtomicU64::new(0) }
    }
}

impl WakeCost {
    /// Whether a thread of another device may do a wake that begins at `now`.
    pub(super) fn allows(&self, now: Instant) -> bool {
        self.since_epoch(now) >= self.paused_until.load(Ordering::Relaxed)
    }

    /// A wake by a thread of another device has taken from `start` to `end`.
    pub(super) fn took(&self, start: Instant, end: Instant) {
        let took = end.saturating_duration_since(start);
        if took > SLOW_WAKE {
            let pause = took.saturating_mul(FACTOR).min(MAX_PAUSE);
            self.paused_until.store(self.since_epoch(end + pause), Ordering::Relaxed);
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
