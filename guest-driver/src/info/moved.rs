// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What a connection has moved, as TCP_INFO tells of TCP.

use std::time::Duration;

/// What an SMC connection has moved since its start, and what is on its way. No number becomes less,
/// whatever carries the connection meanwhile, but for those that say so.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MovedCounts {
    /// Bytes sent: into the peer's receive buffer, or by TCP.
    pub sent: u64,
    /// As many of them are in the peer's receive buffer, or its kernel has them. Those that went to a
    /// device count at once.
    pub acknowledged: u64,
    /// Bytes that the program has written and that are not sent. This becomes less.
    pub unsent: u64,
    /// Bytes received, those that nobody has read among them.
    pub received: u64,
    /// How often bytes were sent.
    pub deliveries: u64,
    /// How often new bytes were found.
    pub arrivals: u64,
    /// The time since bytes were sent, or since the start if none were. `None`: TCP carries the
    /// connection, and the kernel knows. It may be too short, but is never too long: by a second
    /// before this is asked for the first time in a process, and by a few milliseconds afterwards.
    pub since_sent: Option<Duration>,
    /// The same for bytes received. Of bytes that no call has looked for it may be a second too short.
    pub since_received: Option<Duration>,
    /// Bytes for which the peer's receive buffer has room. This becomes less.
    pub send_window: u32,
    /// Bytes for which the own receive buffer has room. This becomes less.
    pub receive_window: u32,
    /// Bytes of the own receive buffer. This may become less with another carrier.
    pub receive_buffer: u32,
    /// How often the carrier has changed, or begun to.
    pub carrier_changes: u32,
    /// The peer was told that nothing follows.
    pub ended: bool,
    /// The peer has said that nothing follows, and all that it has sent is here.
    pub ended_by_peer: bool,
}
