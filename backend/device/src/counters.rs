// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What a device counts. Levels (DMBs, bytes, peers) are not here: they are read where they are.

use std::sync::atomic::{AtomicU64, Ordering};

use virtio_ism_abi::Status;

/// Events of a device since its front end joined. Relaxed: nothing is ordered by a count.
#[derive(Debug, Default)]
pub(super) struct Counters {
    pub(super) commands: Count,
    pub(super) refusals: ByStatus,
    pub(super) moves: Count,
    pub(super) move_bytes: Count,
    pub(super) move_refusals: ByStatus,
    pub(super) signals: Count,
    pub(super) kicks_saved: Count,
    pub(super) coalesced: Count,
    pub(super) wakes: Count,
    pub(super) sw_events: Count,
    pub(super) sw_events_lost: Count,
    pub(super) leaves_asked: Count,
    pub(super) leaves_done: Count,
}

#[derive(Debug, Default)]
pub(super) struct Count(AtomicU64);

impl Count {
    pub(super) fn add(&self, n: u64) {
        self.0.fetch_add(n, Ordering::Relaxed);
    }

    pub(super) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

#[derive(Debug, Default)]
pub(super) struct ByStatus([Count; Status::ALL.len()]);

impl ByStatus {
    pub(super) fn add(&self, status: Status) {
        if let Some(count) = self.0.get(usize::from(status.code())) {
            count.add(1);
        }
    }

    pub(super) fn get(&self) -> [u64; Status::ALL.len()] {
        std::array::from_fn(|i| self.0.get(i).map_or(0, Count::get))
    }

    fn sum(&self) -> u64 {
        self.get().iter().sum()
    }
}

/// The counters of a STATS reply, at one moment.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct CounterSnapshot([u64; CounterSnapshot::LEN]);

impl CounterSnapshot {
    /// The last ten of the sixteen counters of STATS, in its order.
    pub(super) const LEN: usize = 10;

    pub(super) fn of(counters: &Counters) -> CounterSnapshot {
        CounterSnapshot([
            counters.commands.get(),
            counters.refusals.sum(),
            counters.moves.get(),
            counters.move_bytes.get(),
            counters.move_refusals.sum(),
            counters.signals.get(),
            counters.wakes.get(),
            counters.coalesced.get(),
            counters.sw_events.get(),
            counters.sw_events_lost.get(),
        ])
    }

    /// What was counted since `earlier`.
    pub(super) fn since(self, earlier: CounterSnapshot) -> [u64; CounterSnapshot::LEN] {
        let mut grown = self.0;
        for (now, then) in grown.iter_mut().zip(earlier.0) {
            *now = now.saturating_sub(then);
        }
        grown
    }
}
