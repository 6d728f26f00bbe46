// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Counters of a device. Levels (DMBs, bytes, peers) are not here; readers take them at their source.

use std::sync::atomic::{AtomicU64, Ordering};

use serde::{Deserialize, Serialize};
use virtio_ism_abi::Status;

/// The one list of counters. A row makes the counter of the device, its field of [`Counts`] and its row of
/// [`Counts::ALL`], the source of the daemon's JSON, its metrics and `smc stat`.
macro_rules! counters {
    ($($name:ident, $metric:literal, $help:literal;)*) => {
        /// Events of a device since its front end joined. Relaxed: nothing is ordered by a count.
        #[derive(Debug, Default)]
        pub(super) struct Counters {
            $(pub(super) $name: Count,)*
            pub(super) refusals: ByStatus,
            pub(super) move_refusals: ByStatus,
        }

        impl Counters {
            /// The present values of the counters other than refusals.
            pub(super) fn get(&self) -> Counts {
                Counts { $($name: self.$name.get(),)* }
            }
        }

        /// Events counted by a device.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
        #[serde(default)]
        pub struct Counts {
            $(#[doc = concat!($help, ".")] pub $name: u64,)*
        }

        impl Counts {
            /// The counters in display order.
            pub const ALL: &[Counter] = &[$(Counter {
                name: stringify!($name),
                metric: $metric,
                help: $help,
                get: |counts| counts.$name,
            },)*];

            /// Adds the counts of another device.
            pub fn add(&mut self, other: &Counts) {
                $(self.$name = self.$name.saturating_add(other.$name);)*
            }
        }
    };
}

counters! {
    commands, "commands", "Control commands done";
    moves, "moves", "Moves done";
    move_bytes, "move_bytes", "Payload bytes moved";
    signals, "signals", "Signals asked for";
    kicks_saved, "kicks_saved", "Signals that needed no kick because the owner was awake";
    coalesced, "signals_coalesced", "Signals that needed no record because one was pending";
    wakes, "wakes", "Wake records posted to this device";
    sw_events, "sw_events", "Software events delivered to this device";
    sw_events_lost, "sw_events_lost", "Software events lost by this device";
    leaves_asked, "leaves_asked", "Times that a driver with DMBs was asked to leave";
    leaves_done, "leaves_done", "Times that a driver has left that was asked to";
}

/// A row of [`Counts::ALL`].
#[derive(Clone, Copy, Debug)]
pub struct Counter {
    /// Name of the field, and of the key in JSON.
    pub name: &'static str,
    /// Name of the metric, without prefix and suffix.
    pub metric: &'static str,
    /// The counted events, in words.
    pub help: &'static str,
    /// The count.
    pub get: fn(&Counts) -> u64,
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

    /// Counts since `earlier`.
    pub(super) fn since(self, earlier: CounterSnapshot) -> [u64; CounterSnapshot::LEN] {
        let mut grown = self.0;
        for (now, then) in grown.iter_mut().zip(earlier.0) {
            *now = now.saturating_sub(then);
        }
        grown
    }
}
