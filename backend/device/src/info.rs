// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! State and counters for operators.

use virtio_ism_abi::{Chid, Gid, Status};

use super::counters::Counts;

/// One device, as counted now.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Name of the port.
    pub name: String,
    /// GID of the session, if any.
    pub gid: Option<Gid>,
    /// Number of the session, from 1; 0 before the first HELLO.
    pub session: u32,
    /// Window in bytes; 0 for a front end unable to map.
    pub window_size: u64,
    /// DMBs registered.
    pub dmbs: u64,
    /// Bytes of registered DMBs.
    pub dmb_bytes: u64,
    /// DMBs attached.
    pub attached: u64,
    /// Slabs mapped, or being mapped, in the window.
    pub slabs: u64,
    /// Bytes of slabs owned, each counted whole.
    pub slab_bytes: u64,
    /// Bytes of peers' slabs mapped, each counted whole.
    pub attached_slab_bytes: u64,
    /// Mapping slots in use, including reservations.
    pub map_slots: u64,
    /// Window ranges possibly left mapped by a past session.
    pub stale_maps: u64,
    /// Peers related.
    pub peers: u64,
    /// Events counted.
    pub counts: Counts,
    /// Commands refused, by status code.
    pub refusals: [u64; Status::ALL.len()],
    /// Moves refused, by status code.
    pub move_refusals: [u64; Status::ALL.len()],
    /// Whether the driver was asked to leave; then the device takes on nothing new.
    pub is_leaving: bool,
}

impl DeviceInfo {
    /// Adds the counters of another device, without its present levels.
    pub fn add_counters(&mut self, other: &DeviceInfo) {
        self.counts.add(&other.counts);
        let refused = self.refusals.iter_mut().zip(other.refusals);
        let moves_refused = self.move_refusals.iter_mut().zip(other.move_refusals);
        for (sum, n) in refused.chain(moves_refused) {
            *sum = sum.saturating_add(n);
        }
    }
}

/// A fabric and its devices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FabricInfo {
    /// The fabric's CHID.
    pub chid: Chid,
    /// Number of valid tokens.
    pub tokens: u64,
    /// Slabs with existing memory, including past owners' slabs.
    pub slabs: u64,
    /// Bytes of these slabs.
    pub slab_bytes: u64,
    /// Joined devices.
    pub devices: Vec<DeviceInfo>,
}
