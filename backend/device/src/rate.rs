// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Rate limits: a token bucket in a single number.

/// A bucket with a capacity of `burst` and a refill rate.
///
/// Instead of a fill level, the state is the time of the next full bucket ("theoretical arrival time"), so no
/// work is needed between two uses.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rate {
    /// Refill time of one piece, nanoseconds.
    interval: u64,
    /// Refill time of a whole bucket less one piece, nanoseconds.
    slack: u64,
}

impl Rate {
    /// `per_second` pieces per second (0 counts as 1), `burst` at once.
    pub(super) fn new(per_second: u32, burst: u32) -> Rate {
        let interval = 1_000_000_000 / u64::from(per_second.max(1));
        Rate { interval, slack: interval.saturating_mul(u64::from(burst.max(1)) - 1) }
    }

    /// Nanoseconds from `now` until a piece can be taken; 0: at once.
    pub(super) fn wait(self, full_at: u64, now: u64) -> u64 {
        full_at.saturating_sub(now).saturating_sub(self.slack)
    }

    /// Takes a piece if available.
    pub(super) fn take(self, full_at: &mut u64, now: u64) -> bool {
        if self.wait(*full_at, now) > 0 {
            return false;
        }
        *full_at = (*full_at).max(now).saturating_add(self.interval);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_passes_and_then_the_rate_holds() {
        let rate = Rate::new(1_000, 3);
        let mut full_at = 0;
        let now = 5_000_000_000;
        assert!((0..3).all(|_| rate.take(&mut full_at, now)));
        assert!(!rate.take(&mut full_at, now));
        assert_eq!(rate.wait(full_at, now), 1_000_000, "a piece per millisecond");
        assert!(!rate.take(&mut full_at, now + 999_999));
        assert!(rate.take(&mut full_at, now + 1_000_000));
        assert!(!rate.take(&mut full_at, now + 1_000_000));
    }

    #[test]
    fn a_long_silence_saves_no_more_than_a_burst() {
        let rate = Rate::new(1_000, 3);
        let mut full_at = 0;
        let passed = (0..10).filter(|_| rate.take(&mut full_at, u64::MAX / 2)).count();
        assert_eq!(passed, 3);
    }
}
