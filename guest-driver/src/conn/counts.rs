// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Counts of a connection's bytes, and the times of the last moves.
//!
//! Bytes are counted under the locks in any case. A time of each message would cost more than the rest
//! of the counting: the coarse clock alone takes 7 ns. So before the first query of the process, only
//! the background thread checks, once a second, for changed counts. From the first query on, each
//! message stores its time. A time is never too early: a program closing connections idle for too long
//! must not close one in use.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::time::ClockId;

use ism_sys::read_clock;

/// Whether messages store their times, after the first query in this process.
pub(super) static STORED: AtomicBool = AtomicBool::new(false);

/// Whether messages store their times.
#[inline]
pub(super) fn times_are_stored() -> bool {
    STORED.load(Ordering::Relaxed)
}

/// Milliseconds of the clock used by the kernel for the times of TCP_INFO, too.
fn now() -> u64 {
    let time = read_clock(ClockId::MonotonicCoarse);
    time.tv_sec as u64 * 1000 + time.tv_nsec as u64 / 1_000_000
}

/// The time of a direction's last move, as far as checked: after the last different position.
#[derive(Clone, Copy, Debug)]
pub(super) struct MovedTime {
    position: u64,
    at: u64,
}

impl MovedTime {
    /// The position is this one now.
    pub(super) fn new(position: u64) -> MovedTime {
        MovedTime { position, at: now() }
    }

    /// Checks the position.
    #[inline]
    pub(super) fn note(&mut self, position: u64) {
        if self.position != position {
            *self = MovedTime::new(position);
        }
    }

    pub(super) fn elapsed(&self) -> Duration {
        Duration::from_millis(now().saturating_sub(self.at))
    }
}
