// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A Decline of this side.

use super::config::Config;
use super::decline::{DeclineReason, FallbackReason};
use super::rejected_types::RejectedTypes;
use crate::wire::clc::{Decline, Diagnosis, TypeReasons, Version};

/// The state of the connection after a Decline of this side.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AfterDecline {
    /// TCP carries the data; the rest of the stream is data (CLC-23, CLC-51).
    FallBack,
    /// Close the TCP connection: the peer may already have written to the DMB, and data never flows
    /// on both paths (CLC-63). This is the late Decline of a server.
    Break,
}

/// A Decline this side sends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SendDecline {
    /// The Decline, ready to send.
    pub message: Vec<u8>,
    /// The reason.
    pub reason: DeclineReason,
    /// The next step after sending.
    pub then: AfterDecline,
}

impl SendDecline {
    /// Why this connection is TCP now.
    pub fn fallback(&self) -> FallbackReason {
        FallbackReason::DeclinedHere(self.reason)
    }

    /// A client's message in place of its Proposal, to refuse SMC on a connection although both
    /// ends announced SMC: local policy, IPsec, an option unsupported by SMC (CLC-51, ERR-1).
    pub fn opening(config: &Config, reason: DeclineReason) -> SendDecline {
        let version = if config.kinds.has_v2() { Version::V2 } else { Version::V1 };
        Self::plain(config, version, reason, AfterDecline::FallBack)
    }

    /// Answer to a Proposal: a reason for each offered type (CLCV2-79, CLCV2-80).
    pub(super) fn of_proposal(config: &Config, version: Version, rejected: &RejectedTypes) -> Self {
        let (reason, reasons) = (rejected.last(), rejected.type_reasons());
        Self::build(config, version, reason, reasons, AfterDecline::FallBack)
    }

    /// Any other Decline: the diagnosis only (CLCV2-81).
    pub(super) fn plain(
        config: &Config,
        version: Version,
        reason: DeclineReason,
        then: AfterDecline,
    ) -> Self {
        Self::build(config, version, reason, TypeReasons::default(), then)
    }

    fn build(
        config: &Config,
        version: Version,
        reason: DeclineReason,
        reasons: TypeReasons,
        then: AfterDecline,
    ) -> Self {
        let decline = Decline {
            version,
            out_of_sync: reason.out_of_sync(),
            peer_id: config.peer_id,
            diagnosis: Diagnosis(reason.code().value()),
            os: config.os,
            reasons,
        };
        SendDecline { message: decline.emit(), reason, then }
    }
}
