// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What an operator may see.

use virtio_ism_abi::{Chid, Gid};

/// One device, as counted now.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Name of the port.
    pub name: String,
    /// GID of the session, if there is one.
    pub gid: Option<Gid>,
    /// Number of the session, from 1; 0 before the first HELLO.
    pub session: u32,
    /// Window in bytes; 0 if the front end cannot map.
    pub window_size: u64,
    /// DMBs registered.
    pub dmbs: u64,
    /// Bytes of them.
    pub dmb_bytes: u64,
    /// DMBs attached.
    pub attached: u64,
    /// Slabs mapped, or being mapped, in the window.
    pub slabs: u64,
    /// Bytes of slabs owned, each counted whole.
    pub slab_bytes: u64,
    /// Bytes of peers' slabs mapped, each counted whole.
    pub attached_slab_bytes: u64,
    /// Mapping slots in use, reservations included.
    pub map_slots: u64,
    /// Window ranges that a past session may have left mapped.
    pub stale_maps: u64,
    /// Peers related.
    pub peers: u64,
    /// Commands done.
    pub commands: u64,
    /// Commands refused, by status code.
    pub refusals: [u64; 12],
    /// Moves done.
    pub moves: u64,
    /// Payload bytes moved.
    pub move_bytes: u64,
    /// Moves refused, by status code.
    pub move_refusals: [u64; 12],
    /// Signals asked for.
    pub signals: u64,
    /// Kicks that the armed word saved: signals for owners that were awake.
    pub kicks_saved: u64,
    /// Signals that needed no record because one was pending.
    pub coalesced: u64,
    /// Wake records posted to this device.
    pub wakes: u64,
    /// Software events delivered to this device.
    pub sw_events: u64,
    /// Software events lost by this device.
    pub sw_events_lost: u64,
    /// Whether its driver was asked to leave, so that it takes on nothing new.
    pub is_leaving: bool,
    /// Times that a driver with DMBs was asked to leave.
    pub leaves_asked: u64,
    /// Times that it has left.
    pub leaves_done: u64,
}

impl DeviceInfo {
    /// Adds what another device has counted, and nothing of what it has now.
    pub fn add_counters(&mut self, other: &DeviceInfo) {
        let add = |sum: &mut u64, n: u64| *sum = sum.saturating_add(n);
        add(&mut self.commands, other.commands);
        add(&mut self.moves, other.moves);
        add(&mut self.move_bytes, other.move_bytes);
        add(&mut self.signals, other.signals);
        add(&mut self.kicks_saved, other.kicks_saved);
        add(&mut self.coalesced, other.coalesced);
        add(&mut self.wakes, other.wakes);
        add(&mut self.sw_events, other.sw_events);
        add(&mut self.sw_events_lost, other.sw_events_lost);
        add(&mut self.leaves_asked, other.leaves_asked);
        add(&mut self.leaves_done, other.leaves_done);
        let refused = self.refusals.iter_mut().zip(other.refusals);
        let moves_refused = self.move_refusals.iter_mut().zip(other.move_refusals);
        for (sum, n) in refused.chain(moves_refused) {
            add(sum, n);
        }
    }
}

/// A fabric and its devices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FabricInfo {
    /// Its CHID.
    pub chid: Chid,
    /// Tokens that are valid now.
    pub tokens: u64,
    /// Slabs whose memory exists, those of past owners included.
    pub slabs: u64,
    /// Bytes of them.
    pub slab_bytes: u64,
    /// Devices that have joined and not left.
    pub devices: Vec<DeviceInfo>,
}
