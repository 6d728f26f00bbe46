//! Whether to try once more what has failed several times in a row.
//!
//! All of it is a guess about what is worthwhile. Nothing depends on it being right, so its words are
//! independent of each other.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// So many failures in a row, and the next attempts are spared.
const IN_A_ROW: u64 = 4;
/// Of so many that would be spared, one is made.
const TRIAL: u64 = 64;
/// What was learned holds for so long.
const MEMORY: Duration = Duration::from_secs(1);

/// What came of the last attempts at something.
#[derive(Debug)]
pub(crate) struct Tally {
    /// Failures in a row.
    failures: AtomicU64,
    /// Attempts that were spared, or would have been.
    spared: AtomicU64,
    /// When the last failure was, microseconds of some clock.
    last: AtomicU64,
}

impl Tally {
    /// For statics.
    pub(crate) const fn new() -> Tally {
        Tally { failures: AtomicU64::new(0), spared: AtomicU64::new(0), last: AtomicU64::new(0) }
    }

    /// Whether an attempt is worthwhile.
    pub(crate) fn allows(&self, now: u64) -> bool {
        if self.failures.load(Ordering::Relaxed) < IN_A_ROW {
            return true;
        }
        let age = now.saturating_sub(self.last.load(Ordering::Relaxed));
        if Duration::from_micros(age) > MEMORY {
            self.failures.store(0, Ordering::Relaxed);
            return true;
        }
        self.spared.fetch_add(1, Ordering::Relaxed) % TRIAL == TRIAL - 1
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

    fn after_failures() -> Tally {
        let tally = Tally::new();
        for n in 0..IN_A_ROW {
            assert!(tally.allows(n));
            tally.failed(n);
        }
        tally
    }

    #[test]
    fn after_several_failures_the_next_attempts_are_spared_but_for_trials() {
        let tally = after_failures();
        let allowed = (0..2 * TRIAL).filter(|_| tally.allows(10)).count();
        assert_eq!(allowed, 2);
    }

    #[test]
    fn a_success_or_a_pause_ends_that() {
        let tally = after_failures();
        assert!(!tally.allows(10));
        tally.succeeded();
        assert!(tally.allows(10));
        let tally = after_failures();
        assert!(tally.allows(10 + MEMORY.as_micros() as u64 * 2));
    }

    #[test]
    fn single_failures_in_between_change_nothing() {
        let tally = Tally::new();
        for n in 0..100 {
            assert!(tally.allows(n));
            if n % 3 == 0 { tally.succeeded() } else { tally.failed(n) }
        }
    }
}
