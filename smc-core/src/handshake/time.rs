//! Time as a plain number: the caller owns the clock.

use core::time::Duration;

/// A moment in microseconds since a start the caller chose; only differences mean something.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Instant(pub u64);

impl Instant {
    /// This moment plus `wait`; a sum beyond the end of time is the end of time.
    pub fn after(self, wait: Duration) -> Instant {
        let micros = u64::try_from(wait.as_micros()).unwrap_or(u64::MAX);
        Instant(self.0.saturating_add(micros))
    }

    /// How long it is from `now` to this moment; zero when it has passed.
    pub fn remaining(self, now: Instant) -> Duration {
        Duration::from_micros(self.0.saturating_sub(now.0))
    }

    /// Whether this moment has been reached at `now`.
    pub fn has_passed(self, now: Instant) -> bool {
        now >= self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn deadline_is_reached_at_its_exact_microsecond() {
        let deadline = Instant(5).after(Duration::from_micros(10));
        assert!(!deadline.has_passed(Instant(14)));
        assert!(deadline.has_passed(Instant(15)));
        assert_eq!(deadline.remaining(Instant(12)), Duration::from_micros(3));
        assert_eq!(deadline.remaining(Instant(99)), Duration::ZERO);
    }

    #[test]
    fn endless_wait_does_not_wrap() {
        assert_eq!(Instant(1).after(Duration::MAX), Instant(u64::MAX));
    }
}
