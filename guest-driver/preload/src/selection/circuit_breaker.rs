// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A circuit breaker: skips attempts at an action after several failures in a row.
//!
//! The breaker only guesses whether an attempt is worthwhile, and nothing depends on a right guess.
//! So the words of a breaker are independent of each other.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Number of failures in a row after which the breaker skips attempts.
const FAILURE_THRESHOLD: u64 = 4;
/// One of so many attempts beyond the threshold is allowed as a probe.
const PROBE_INTERVAL: u64 = 64;
/// How long after the last failure the breaker allows attempts again.
const RESET_TIMEOUT: Duration = Duration::from_secs(1);

/// The results of the last attempts.
#[derive(Debug)]
pub(crate) struct CircuitBreaker {
    /// Failures in a row.
    failures: AtomicU64,
    /// Attempts since the threshold, allowed probes included.
    skipped: AtomicU64,
    /// Time of the last failure, microseconds of the caller's clock.
    last: AtomicU64,
}

impl CircuitBreaker {
    /// A breaker without failures.
    pub(crate) const fn new() -> CircuitBreaker {
        CircuitBreaker {
            failures: AtomicU64::new(0),
            skipped: AtomicU64::new(0),
            last: AtomicU64::new(0),
        }
    }

    /// Whether the caller should make an attempt at the time `now`.
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

    /// Records a failed attempt at the time `now`.
    pub(crate) fn failed(&self, now: u64) {
        self.failures.fetch_add(1, Ordering::Relaxed);
        self.last.store(now, Ordering::Relaxed);
    }

    /// Records a successful attempt.
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
    fn after_several_failures_attempts_are_skipped_but_for_probes() {
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
