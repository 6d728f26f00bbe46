// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The two ways in which a well-formed message is not agreed to.

use crate::handshake::decline::DeclineReason;
use crate::handshake::error::HandshakeError;

/// A message that is well formed but cannot be agreed to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// Send Decline.
    Decline(DeclineReason),
    /// Break the connection.
    Fail(HandshakeError),
}

impl From<DeclineReason> for Refusal {
    fn from(reason: DeclineReason) -> Refusal {
        Refusal::Decline(reason)
    }
}

impl From<HandshakeError> for Refusal {
    fn from(error: HandshakeError) -> Refusal {
        Refusal::Fail(error)
    }
}
