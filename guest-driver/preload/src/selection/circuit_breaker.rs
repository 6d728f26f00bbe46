//! Whether to try once more what has failed several times in a row.
//!
//! All of it is a guess about what is worthwhile. Nothing depends on it being right, so its words are
//! independent of each other.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// So many failures in a row, and the next attempts are skipped.
const FAILURE_THRESHOLD: u64 = 4;
/// Of so many that would be skipped, one is made.
const PROBE_INTERVAL: u64 = 64;
/// What was learned holds for so long.
const RESET_TIMEOUT: Duration = Duration::from_secs(1);

/// What came of the last attempts at something.
#[derive(Debug)]
pub(crate) struct CircuitBreaker {
    /// Failures in a row.
    failures: AtomicU64,
    /// Attempts that were skipped, or would have been.
    skipped: AtomicU64,
    /// When the last failure was, microseconds of some clock.
    last: AtomicU64,
}

impl CircuitBreaker {
    /// For statics.
    pub(crate) const fn new() -> CircuitBreaker {
        CircuitBreaker {
            failures: AtomicU64::new(0),
            skipped: AtomicU64::new(0),
            last: AtomicU64::new(0),
        }
    }

    /// Whether an attempt is worthwhile.
    pub(crate) fn allows(&self, now: u64) -> bool {
        if self.failures.load(Ordering::Relaxed) < FAILURE_THRESHOLD {
            return true;
        }
        let age = now.saturating_sub(self.last.load(Ordering::Relaxed));
        if Duration::from_micros(age) > RESET_TIMEOUT {
            self.failures.store(0, Ordering::Relaxed);
            return true;
        }
        self.skipped.fetch_add(1, Ordering::Relaxed) % PROBE_INTERVAL == PROBE_INTERVAL - 1
    }

    /// An attempt has failed.
    pub(crate) fn failed(&self, now: u64) {
        self.failures.fetch_add(1, Ordering::Relaxed);
        self.last.store(now, Ordering::Relaxed);
    }

    /// An attempt was worthwhile.
    pub(crate) fn succeeded(&self) {
        self.failures.store(0, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after_failures() -> CircuitBreaker {
        let breaker = CircuitBreaker::new();
        for n in 0..FAILURE_THRESHOLD {
            assert!(breaker.allows(n));
            breaker.failed(n);
        }
        breaker
    }

    #[test]
    fn after_several_failures_the_next_attempts_are_spared_but_for_trials() {
        let breaker = after_failures();
        let allowed = (0..2 * PROBE_INTERVAL).filter(|_| breaker.allows(10)).count();
        assert_eq!(allowed, 2);
    }

    #[test]
    fn a_success_or_a_pause_ends_that() {
        let breaker = after_failures();
        assert!(!breaker.allows(10));
        breaker.succeeded();
        assert!(breaker.allows(10));
        let breaker = after_failures();
        assert!(breaker.allows(10 + RESET_TIMEOUT.as_micros() as u64 * 2));
    }

    #[test]
    fn single_failures_in_between_change_nothing() {
        let breaker = CircuitBreaker::new();
        for n in 0..100 {
            assert!(breaker.allows(n));
            if n % 3 == 0 { breaker.succeeded() } else { breaker.failed(n) }
        }
    }
}
