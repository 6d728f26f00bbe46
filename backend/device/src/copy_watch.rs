// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Finds the cause of a slow copy.
//!
//! The owner of a memory can delay an access for seconds, for example while removing gigabytes of memory. The
//! copying worker belongs to another device, and cannot serve its other connections meanwhile. So copies into
//! guest memory are timed. After a slow copy, the device touches the pages before copying into them: the time
//! of the touch, and whether the thread waited, depend only on the owner's memory.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::shm::PageWaits;

/// A copy of `max_move` bytes takes less than a millisecond. Nanoseconds.
const SLOW_COPY: u64 = 50_000_000;
/// How long the memory is watched, nanoseconds.
const WATCH: u64 = 60_000_000_000;

/// Copies into the memory of one device.
#[derive(Debug, Default)]
pub(super) struct CopyWatch {
    watched_until: AtomicU64,
}

impl CopyWatch {
    /// Whether to touch the pages before a copy.
    pub(super) fn is_watched(&self, now: u64) -> bool {
        now < self.watched_until.load(Ordering::Relaxed)
    }

    /// A copy took from `start` to `end`.
    pub(super) fn copied(&self, start: u64, end: u64) {
        if end.saturating_sub(start) > SLOW_COPY {
            self.watched_until.store(end.saturating_add(WATCH), Ordering::Relaxed);
        }
    }
}

/// Whether the owner delayed a touch of its pages taking `took` nanoseconds. A thread without waits only
/// lacked a processor. A thread waiting for a disk met the host's swap.
pub(super) fn is_owners_doing(took: u64, before: PageWaits, after: PageWaits) -> bool {
    took > SLOW_COPY && after.waits > before.waits && after.from_disk == before.from_disk
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_memory_is_watched_after_a_long_copy() {
        let watch = CopyWatch::default();
        watch.copied(1_000, 1_000 + SLOW_COPY);
        assert!(!watch.is_watched(0));
        watch.copied(1_000, 2_000 + SLOW_COPY);
        assert!(watch.is_watched(2_000 + SLOW_COPY));
        assert!(!watch.is_watched(2_000 + SLOW_COPY + WATCH));
    }

    #[test]
    fn neither_a_busy_machine_nor_swap_is_the_owners_doing() {
        let at = |waits, from_disk| PageWaits { waits, from_disk };
        assert!(is_owners_doing(SLOW_COPY + 1, at(5, 5), at(6, 5)));
        assert!(!is_owners_doing(SLOW_COPY, at(5, 5), at(6, 5)), "not long");
        assert!(!is_owners_doing(SLOW_COPY + 1, at(5, 5), at(5, 5)), "no processor");
        assert!(!is_owners_doing(SLOW_COPY + 1, at(5, 5), at(6, 6)), "swap");
    }
}
