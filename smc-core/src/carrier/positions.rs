// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! How far both directions are.

use crate::wire::cdc::StateFlags;

/// Where both directions are, for a step; each is a count of bytes since the connection was
/// established.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Positions {
    /// Bytes of the own direction given to its carrier: written to the ring, or to TCP as DATA with
    /// a written header.
    pub sent: u64,
    /// Bytes written to the ring from this position on have copies in memory independent of the
    /// device: a send buffer of SMC-R, or moves not completed. `sent` if there are no copies. Kept
    /// until [`Action::SendTcp`](super::Action::SendTcp).
    pub kept: u64,
    /// Writes of the program have succeeded for more bytes, still in the send queue.
    pub unsent: bool,
    /// An urgent mark of the own direction, perhaps unread by the peer.
    pub urgent: Option<u64>,
    /// The state flags of the own direction: done, closed.
    pub said: StateFlags,
    /// Bytes of the peer's direction received by the own ring. With
    /// [`Input::RingGone`](super::Input::RingGone): only bytes in permanent memory, or already
    /// read.
    pub arrived: u64,
}
