// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A temporary relay, and when its holders are checked.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::socket::stream::TemporaryRelay;

/// Pause between the beginning of a temporary relay and the first check.
const FIRST_PAUSE: Duration = Duration::from_millis(20);
/// Longest pause between two checks.
const LONGEST_PAUSE: Duration = Duration::from_secs(60);
/// Ratio of a pause to the duration of a check.
const PAUSE_PER_LOOK: u32 = 50;
/// A temporary relay, and the time of the next check for other processes.
pub(super) struct RunningTemporary {
    temporary: Arc<TemporaryRelay>,
    next: Instant,
    pause: Duration,
}

impl RunningTemporary {
    pub(super) fn new(temporary: Arc<TemporaryRelay>) -> RunningTemporary {
        RunningTemporary { temporary, next: Instant::now() + FIRST_PAUSE, pause: FIRST_PAUSE }
    }

    /// The relay.
    pub(super) fn relay(&self) -> &Arc<TemporaryRelay> {
        &self.temporary
    }

    /// Whether no other process had the end at the last check.
    pub(super) fn is_alone(&self) -> bool {
        self.temporary.was_alone()
    }

    /// Time of the next check; `None`: no other process had the end.
    pub(super) fn next(&self) -> Option<Instant> {
        (!self.is_alone()).then_some(self.next)
    }

    /// Whether the time of the next check has come.
    pub(super) fn is_due(&self, now: Instant) -> bool {
        self.next().is_some_and(|next| next <= now)
    }

    /// Sets the time of the next check, after a check that began `now` and took so long.
    pub(super) fn checked(&mut self, now: Instant, took: Duration) {
        let doubled = self.pause.max(took * PAUSE_PER_LOOK).saturating_mul(2);
        self.pause = doubled.min(LONGEST_PAUSE);
        self.next = now + self.pause;
    }

    /// Has the next check come as soon as the first one.
    pub(super) fn check_soon(&mut self) {
        (self.next, self.pause) = (Instant::now() + FIRST_PAUSE, FIRST_PAUSE);
    }
}
