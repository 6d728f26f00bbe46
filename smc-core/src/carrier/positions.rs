// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! How far both directions are.

use crate::wire::cdc::StateFlags;

/// Where both directions are, for a step; each is a count of bytes since the connection was
/// established.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Positions {
    /// Bytes of the own direction that were given to its carrier: written to the ring, or to TCP as
    /// DATA whose header has been written.
    pub sent: u64,
    /// From here on, copies of what was written to the ring are in memory that does not go with the
    /// device: a send buffer of SMC-R, moves that have not been completed. `sent` if there are none.
    /// They are kept until [`Action::SendTcp`](super::Action::SendTcp).
    pub kept: u64,
    /// The program has been told that more bytes are sent: the send queue has some.
    pub unsent: bool,
    /// An urgent mark of the own direction that the peer may not have read.
    pub urgent: Option<u64>,
    /// What the own direction has said: done, closed.
    pub said: StateFlags,
    /// Bytes of the peer's direction that the own ring has received. With [`Input::RingGone`](super::Input::RingGone):
    /// those of them that are in memory that stays, or have been read.
    pub arrived: u64,
}
