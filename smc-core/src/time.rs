// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Time as a plain number. The caller owns the clock and hands in the current [`Tick`].

use core::time::Duration;

/// A moment, in microseconds since a start chosen by the caller. Only the difference between two
/// ticks has a meaning.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Tick(pub u64);

impl Tick {
    /// Returns this moment plus `wait`. A sum beyond `u64` becomes `Tick(u64::MAX)`.
    pub fn after(self, wait: Duration) -> Tick {
        let micros = u64::try_from(wait.as_micros()).unwrap_or(u64::MAX);
        Tick(self.0.saturating_add(micros))
    }

    /// Returns the time from `now` until this moment, or zero when this moment has passed.
    pub fn remaining(self, now: Tick) -> Duration {
        Duration::from_micros(self.0.saturating_sub(now.0))
    }

    /// Returns true when this moment is at or before `now`.
    pub fn has_passed(self, now: Tick) -> bool {
        now >= self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn deadline_is_reached_at_its_exact_microsecond() {
        let deadline = Tick(5).after(Duration::from_micros(10));
        assert!(!deadline.has_passed(Tick(14)));
        assert!(deadline.has_passed(Tick(15)));
        assert_eq!(deadline.remaining(Tick(12)), Duration::from_micros(3));
        assert_eq!(deadline.remaining(Tick(99)), Duration::ZERO);
    }

    #[test]
    fn endless_wait_does_not_wrap() {
        assert_eq!(Tick(1).after(Duration::MAX), Tick(u64::MAX));
    }
}
