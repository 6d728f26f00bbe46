// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The two reactions to a well-formed message without agreement.

use crate::handshake::decline::DeclineReason;
use crate::handshake::error::HandshakeError;

/// The refusal of a well-formed message.
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
