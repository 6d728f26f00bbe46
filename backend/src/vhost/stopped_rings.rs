// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Running rings of a connection, the time without any, and the armed deadline.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use ism_device::sync::lock;

/// The time since the last ring's stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stopped {
    /// A ring runs, or the end of the time was reported already.
    No,
    /// The time ends then.
    Until(Instant),
    /// The time has passed.
    TooLong,
}

/// Time of the last ring's stop, and the armed deadline.
#[derive(Default)]
pub(super) struct StoppedRings(Mutex<State>);

#[derive(Default)]
struct State {
    running: u64,
    since: Option<Instant>,
    armed: Option<Instant>,
}

impl StoppedRings {
    /// A ring runs, or has stopped. Returns the time of the stop of the last one.
    pub(super) fn ring_changed(&self, queue: usize, running: bool) -> Option<Instant> {
        let mut state = lock(&self.0);
        let (before, bit) = (state.running, 1 << queue);
        state.running = if running { before | bit } else { before & !bit };
        if state.running != 0 {
            state.since = None;
        } else if before != 0 {
            state.since = Some(Instant::now());
            return state.since;
        }
        None
    }

    /// Whether all rings are stopped for longer than `grace`.
    pub(super) fn check(&self, grace: Duration) -> Stopped {
        let mut state = lock(&self.0);
        let Some(since) = state.since else { return Stopped::No };
        if Instant::now() < since + grace {
            return Stopped::Until(since + grace);
        }
        state.since = None;
        Stopped::TooLong
    }

    /// Notes a deadline about to be set. `false`: a nearer deadline is set.
    pub(super) fn arm(&self, at: Instant) -> bool {
        let mut state = lock(&self.0);
        let is_nearer = state.armed.is_none_or(|armed| at < armed);
        if is_nearer {
            state.armed = Some(at);
        }
        is_nearer
    }

    /// Notes that the deadline is here.
    pub(super) fn disarm(&self) {
        lock(&self.0).armed = None;
    }
}
