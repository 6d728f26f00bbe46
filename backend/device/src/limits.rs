// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Quotas of a device, caps of a fabric, and the clock for rates.

use std::time::Instant;

use super::rate::Rate;
use virtio_ism_abi::config::{DMB_MAX, DMB_MIN, MAX_MOVE, SLAB_ALIGN};

/// Limits of one device. Counts and bytes; for the defaults see docs/virtio-ism.md, "Limits and quotas".
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// DMBs; also the bound of `idx`.
    pub max_dmbs: u32,
    /// Bytes of all DMBs.
    pub dmb_bytes: u64,
    /// Bytes of owned slabs, each counted whole.
    pub slab_bytes: u64,
    /// Bytes of attached slabs, each counted whole.
    pub attached_slab_bytes: u64,
    /// DMBs attached at a time.
    pub max_attach: u32,
    /// Related peers at a time.
    pub max_peers: u32,
    /// Mapping slots of a front end without a number of its own.
    pub max_maps: u32,
    /// Smallest DMB in bytes, a power of two.
    pub dmb_min: u32,
    /// Largest DMB in bytes, a power of two.
    pub dmb_max: u32,
    /// Alignment of scatter-gather entries in bytes, a power of two.
    pub dmb_align: u32,
    /// Scatter-gather entries of one REGISTER.
    pub max_sg: u16,
    /// Segments of one MOVE.
    pub max_segs: u16,
    /// Payload bytes of one MOVE.
    pub max_move: u32,
    /// Bytes of all regions of the guest's memory, mapped by the daemon.
    pub guest_memory: u64,
    /// Bytes of the guest's memory the daemon may allocate by first touches.
    pub touched_memory: u64,
    /// Alignment of slabs in the window in bytes, a power of two.
    pub slab_align: u32,
    /// Control commands per second.
    pub commands_per_second: u32,
    /// QUERY_GID per second.
    pub queries_per_second: u32,
    /// SLAB_WAKE per slab, DMB_SIGNAL per DMB, and second.
    pub wakes_per_second: u32,
}

impl Default for Limits {
    fn default() -> Self {
        Limits {
            max_dmbs: 16_384,
            dmb_bytes: 1 << 30,
            slab_bytes: 2 << 30,
            attached_slab_bytes: 2 << 30,
            max_attach: 16_384,
            max_peers: 256,
            max_maps: 512,
            dmb_min: DMB_MIN,
            dmb_max: DMB_MAX,
            dmb_align: 4096,
            max_sg: 512,
            max_segs: 32,
            max_move: MAX_MOVE,
            // A hundred such guests fit into an address space of 47 bits.
            guest_memory: 1 << 40,
            // Drivers write memory before giving it to the device, so nearly all pages are present.
            touched_memory: 256 << 20,
            slab_align: SLAB_ALIGN,
            commands_per_second: 20_000,
            queries_per_second: 1_000,
            wakes_per_second: 50_000,
        }
    }
}

impl Limits {
    /// Whether the limits agree with each other and with this revision; otherwise the reason.
    pub(super) fn check(&self) -> Result<(), &'static str> {
        let dmb_sizes = self.dmb_min.is_power_of_two()
            && self.dmb_max.is_power_of_two()
            && (DMB_MIN..=DMB_MAX).contains(&self.dmb_min)
            && (self.dmb_min..=DMB_MAX).contains(&self.dmb_max);
        let aligned =
            self.dmb_align.is_power_of_two() && (PAGE..=self.dmb_min).contains(&self.dmb_align);
        // Front ends map in steps of 64 KiB.
        let slabs = self.slab_align.is_power_of_two() && self.slab_align >= 64 << 10;
        let moves = self.max_segs >= 1 && (1..=MAX_MOVE).contains(&self.max_move);
        let rates = self.commands_per_second > 0
            && self.queries_per_second > 0
            && self.wakes_per_second > 0;
        [
            (dmb_sizes, "dmb_min and dmb_max: powers of two, 16 KiB to 32 MiB, in order"),
            (aligned, "dmb_align: a power of two, 4 KiB to dmb_min"),
            (slabs, "slab_align: a power of two, at least 64 KiB"),
            (self.max_dmbs > 0, "max_dmbs: at least 1"),
            (self.max_sg > 0, "max_sg: at least 1"),
            (moves, "max_segs and max_move: at least 1, max_move at most 1 MiB"),
            (rates, "rates: at least 1 per second"),
        ]
        .into_iter()
        .find(|(fine, _)| !fine)
        .map_or(Ok(()), |(_, what)| Err(what))
    }

    /// Control commands: bursts of a tenth of a second.
    pub(super) fn command_rate(&self) -> Rate {
        Rate::new(self.commands_per_second, self.commands_per_second / 10)
    }

    /// QUERY_GID: bursts of a tenth of a second.
    pub(super) fn query_rate(&self) -> Rate {
        Rate::new(self.queries_per_second, self.queries_per_second / 10)
    }

    /// SLAB_WAKE of one slab, DMB_SIGNAL of one DMB.
    pub(super) fn wake_rate(&self) -> Rate {
        Rate::new(self.wakes_per_second, WAKE_BURST)
    }
}

/// Smallest alignment of guest memory, bytes.
const PAGE: u32 = 4096;
/// Records of one slab or DMB allowed in immediate succession.
const WAKE_BURST: u32 = 64;

/// Caps for the devices of a fabric together. A device taking a sum of limits above a cap cannot join, so no
/// quota is ever overcommitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FabricCaps {
    /// Devices.
    pub devices: u32,
    /// Sum of `max_dmbs`.
    pub dmbs: u64,
    /// Sum of `dmb_bytes`.
    pub dmb_bytes: u64,
    /// Sum of `slab_bytes`.
    pub slab_bytes: u64,
}

impl Default for FabricCaps {
    fn default() -> Self {
        FabricCaps { devices: 1024, dmbs: u64::MAX, dmb_bytes: u64::MAX, slab_bytes: u64::MAX }
    }
}

/// A monotonic clock. Nanoseconds since an arbitrary point.
pub trait Clock: Send + Sync {
    /// Now, nanoseconds.
    fn now_ns(&self) -> u64;

    /// Like [`now_ns`](Self::now_ns), with its own epoch and a precision of some milliseconds. For use with
    /// every message.
    fn coarse_ns(&self) -> u64 {
        self.now_ns()
    }
}

/// The clock of the host.
#[derive(Debug)]
pub struct MonotonicClock(Instant);

impl Default for MonotonicClock {
    fn default() -> Self {
        MonotonicClock(Instant::now())
    }
}

impl Clock for MonotonicClock {
    fn now_ns(&self) -> u64 {
        u64::try_from(self.0.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    fn coarse_ns(&self) -> u64 {
        let now = rustix::time::clock_gettime(rustix::time::ClockId::MonotonicCoarse);
        now.tv_sec.cast_unsigned() * 1_000_000_000 + now.tv_nsec.cast_unsigned()
    }
}
