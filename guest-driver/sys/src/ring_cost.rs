// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Cost of the rings of one doorbell for the ringing thread.
//!
//! The peer behind a doorbell can make its rings slow: with thousands of watchers on the eventfd, run by
//! the kernel in the ringing thread. So some rings are timed. After two slow rings in a row the peer is
//! woken by the device, for a time in proportion: the rings take at most a sixty-fourth of the thread's
//! time.
//!
//! A thread preempted in the middle of a ring has not spent the time on the ring. So wall-clock time only
//! makes a doorbell suspect, and the rings of a suspect are timed by the processor time of the thread. The
//! processor time takes a system call; the wall clock takes none.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::time::ClockId;

use super::OnceBox;
use super::read_clock;

/// Limit of a normal ring of a few microseconds.
const LONG: Duration = Duration::from_micros(100);
/// One of this many rings of an unsuspected doorbell is timed.
const SAMPLE: u32 = 8;
/// Number of fast rings before a suspect is cleared.
const SUSPECT: u32 = 8;
/// Ratio of the pause to the duration of a ring.
const FACTOR: u32 = 64;
/// Upper limit of the pause.
const MAX_PAUSE: Duration = Duration::from_secs(10);

/// Times of the rings of one doorbell, and the end of the present pause.
#[derive(Debug, Default)]
pub(super) struct RingCost {
    rings: AtomicU32,
    /// Number of further rings timed by the thread's processor time.
    suspect: AtomicU32,
    /// Whether the last one of these was slow.
    was_long: AtomicU32,
    /// End of the pause, in nanoseconds of [`since_start`]; 0: no pause.
    paused_until: AtomicU64,
}

/// When a ring has begun.
#[derive(Clone, Copy, Debug)]
pub(super) enum RingClock {
    /// An untimed ring.
    Untimed,
    /// By the clock of the wall.
    Wall(Instant),
    /// By the processor time of the thread.
    Processor(Duration),
}

impl RingCost {
    /// The begin of a ring; `None`: the doorbell may not be rung now.
    pub(super) fn begin(&self) -> Option<RingClock> {
        let until = self.paused_until.load(Ordering::Relaxed);
        if until != 0 {
            if since_start(Instant::now()) < until {
                return None;
            }
            self.paused_until.store(0, Ordering::Relaxed);
        }
        if self.suspect.load(Ordering::Relaxed) > 0 {
            return Some(RingClock::Processor(processor_time()));
        }
        let is_timed = self.rings.fetch_add(1, Ordering::Relaxed).is_multiple_of(SAMPLE);
        Some(if is_timed { RingClock::Wall(Instant::now()) } else { RingClock::Untimed })
    }

    /// The end of a ring.
    pub(super) fn end(&self, begin: RingClock) {
        match begin {
            RingClock::Untimed => {}
            RingClock::Wall(begin) => self.took(begin.elapsed(), None),
            RingClock::Processor(begin) => {
                let took = processor_time().saturating_sub(begin);
                self.took(took, Some(Instant::now()));
            }
        }
    }

    /// Notes the duration of a ring: processor time if there is an `end`.
    fn took(&self, took: Duration, end: Option<Instant>) {
        match end {
            None if took > LONG => self.suspect.store(SUSPECT, Ordering::Relaxed),
            None => {}
            Some(end) if took > LONG => {
                self.suspect.store(SUSPECT, Ordering::Relaxed);
                if self.was_long.swap(1, Ordering::Relaxed) == 1 {
                    let pause = took.saturating_mul(FACTOR).min(MAX_PAUSE);
                    self.paused_until.store(since_start(end + pause), Ordering::Relaxed);
                }
            }
            Some(_) => {
                self.was_long.store(0, Ordering::Relaxed);
                let left = self.suspect.load(Ordering::Relaxed).saturating_sub(1);
                self.suspect.store(left, Ordering::Relaxed);
            }
        }
    }
}

fn processor_time() -> Duration {
    let now = read_clock(ClockId::ThreadCPUTime);
    let (seconds, nanoseconds) = (now.tv_sec.cast_unsigned(), now.tv_nsec.cast_unsigned());
    Duration::from_secs(seconds) + Duration::from_nanos(nanoseconds)
}

/// Nanoseconds since the first call, plus one: never 0.
fn since_start(at: Instant) -> u64 {
    static START: OnceBox<Instant> = OnceBox::new();
    let since = at.saturating_duration_since(*START.get_or_init(Instant::now));
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX).saturating_add(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    const RING: Duration = Duration::from_micros(3);

    #[test]
    fn a_thread_that_loses_its_processor_keeps_the_doorbell() {
        let cost = RingCost::default();
        assert!(matches!(cost.begin(), Some(RingClock::Wall(_))), "the first one is timed");
        assert!((1..SAMPLE).all(|_| matches!(cost.begin(), Some(RingClock::Untimed))));
        assert!(matches!(cost.begin(), Some(RingClock::Wall(_))));
        cost.took(Duration::from_millis(9), None);
        for _ in 0..SUSPECT {
            assert!(matches!(cost.begin(), Some(RingClock::Processor(_))));
            cost.took(RING, Some(Instant::now()));
        }
        assert!(
            !matches!(cost.begin(), Some(RingClock::Processor(_)) | None),
            "no suspect any more"
        );
    }

    #[test]
    fn a_doorbell_whose_rings_last_pauses_in_proportion() {
        let cost = RingCost::default();
        cost.took(Duration::from_millis(1), None);
        let at = |millis| Some(Instant::now() + Duration::from_millis(millis));
        cost.took(Duration::from_millis(1), at(0));
        assert!(cost.begin().is_some(), "one may be chance");
        cost.took(RING, at(0));
        cost.took(Duration::from_millis(1), at(0));
        assert!(cost.begin().is_some(), "not one after the other");
        cost.took(Duration::from_secs(60), at(0));
        assert!(cost.begin().is_none());
        let until = cost.paused_until.load(Ordering::Relaxed);
        let pause = until - since_start(Instant::now());
        assert!(pause <= MAX_PAUSE.as_nanos() as u64);
        // When the pause is over, one long ring is enough for the next.
        cost.paused_until.store(1, Ordering::Relaxed);
        assert!(matches!(cost.begin(), Some(RingClock::Processor(_))));
        cost.took(Duration::from_millis(100), at(0));
        assert!(cost.begin().is_none());
    }
}
