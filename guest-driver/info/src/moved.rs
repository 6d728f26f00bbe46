// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The counts of a connection's bytes, the counterpart of TCP_INFO.

use std::time::Duration;

/// The bytes moved by an SMC connection since its start, and the bytes under way. A number never
/// decreases, even with another carrier, unless noted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MovedCounts {
    /// Bytes sent: into the peer's receive buffer, or by TCP.
    pub sent: u64,
    /// Bytes among them already in the peer's receive buffer, or received by its kernel. Bytes sent
    /// through a device count at once.
    pub acknowledged: u64,
    /// Bytes written by the program and not yet sent. May decrease.
    pub unsent: u64,
    /// Bytes received, unread ones included.
    pub received: u64,
    /// Number of sends.
    pub deliveries: u64,
    /// Number of arrivals found.
    pub arrivals: u64,
    /// The time since the last send, or since the start if there was none. `None`: TCP carries the
    /// connection, and the kernel has the time. The value may be too short, but is never too long: by a
    /// second before the first query in a process, and by a few milliseconds afterwards.
    pub since_sent: Option<Duration>,
    /// The same for bytes received. For bytes not yet seen by a call, the value may be a second too
    /// short.
    pub since_received: Option<Duration>,
    /// Bytes of room in the peer's receive buffer. May decrease.
    pub send_window: u32,
    /// Bytes of room in the own receive buffer. May decrease.
    pub receive_window: u32,
    /// Bytes of the own receive buffer. May decrease with another carrier.
    pub receive_buffer: u32,
    /// Number of changes of the carrier, a change in progress included.
    pub carrier_changes: u32,
    /// The end of the data was announced to the peer.
    pub ended: bool,
    /// The peer has announced the end of its data, and every byte of it is here.
    pub ended_by_peer: bool,
}
