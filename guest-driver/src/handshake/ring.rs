// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The handshake for a new ring of a connection that is on TCP: the messages come in CLC records,
//! and each step is the one of the handshake on the stream.
//!
//! Each step may take device commands, so no lock is held meanwhile.

use std::sync::Arc;
use std::time::Duration;

use smc_core::handshake::{
    AwaitAccept, AwaitProposal, ClientStep, Config, DeclineReason, Route, SendDecline, ServerStep,
    start_on,
};
use smc_core::time::Tick;

use super::client::{self, ClientParams};
use super::server::{self, AcceptOutcome, Accepted, ServerParams};
use crate::smcd::{Fabrics, SmcdConn};

/// What both ends use for a new ring.
pub(crate) struct RingParams {
    /// What this end offers: its device, and nothing else.
    pub(crate) config: Arc<Config>,
    /// The fabric of its device, if it is open.
    pub(crate) fabrics: Fabrics,
    /// Bytes of the own DMB.
    pub(crate) buffer: u32,
}

/// A handshake between two messages.
pub(crate) enum Stage {
    /// Client: the Proposal was sent.
    Proposed(Box<AwaitAccept>),
    /// Server: the Accept was sent.
    Accepted(Box<Offer>),
}

/// What a server has offered.
pub(crate) struct Offer(Accepted);

/// Why there is no new ring this time.
pub(crate) enum NoRing {
    /// The message to send says so.
    Decline(Vec<u8>),
    /// The peer breaks the protocol.
    Violated,
}

impl NoRing {
    fn declined(decline: SendDecline) -> NoRing {
        tracing::debug!(reason = %decline.reason, "no new ring");
        NoRing::Decline(decline.message)
    }
}

impl RingParams {
    /// Whether the device is open.
    pub(crate) fn has_device(&self) -> bool {
        !self.fabrics.0.is_empty()
    }

    /// The Decline of an end that has no device now.
    pub(crate) fn decline(&self) -> NoRing {
        NoRing::declined(SendDecline::opening(&self.config, DeclineReason::NoIsmDevice))
    }

    fn client(&self) -> ClientParams<'_> {
        let Self { config, fabrics, buffer } = self;
        ClientParams { config, fabrics, rdma: None, buffer: *buffer }
    }

    fn server(&self) -> ServerParams<'_> {
        let Self { config, fabrics, buffer } = self;
        let message_timeout = Duration::ZERO;
        ServerParams { config, fabrics, rdma: None, buffer: *buffer, message_timeout }
    }

    /// Client: what waits for the answer, and the Proposal to send. `None`: there is nothing to
    /// propose.
    pub(crate) fn propose(&self) -> Option<(Stage, Vec<u8>)> {
        let (awaiting, proposal) = start_on(self.config.clone(), Route::default(), Tick(0)).ok()?;
        Some((Stage::Proposed(Box::new(awaiting)), proposal))
    }

    /// Server: what waits for the answer, and the Accept to send.
    ///
    /// # Errors
    /// There will be no ring.
    pub(crate) fn accept(&self, proposal: &[u8]) -> Result<(Stage, Vec<u8>), NoRing> {
        let awaiting = AwaitProposal::new(self.config.clone(), Tick(0));
        match awaiting.handle_on(proposal, Route::default) {
            ServerStep::Eligible(selection) => {
                let (accepted, message) = server::accept_on_device(&self.server(), selection)
                    .map_err(NoRing::declined)?;
                Ok((Stage::Accepted(Box::new(Offer(*accepted))), message))
            }
            ServerStep::Decline(decline) => Err(NoRing::declined(decline)),
            ServerStep::PeerDeclined(_) | ServerStep::Fail(_) => Err(NoRing::Violated),
        }
    }

    /// Client: the new ring, and the Confirm to send.
    ///
    /// # Errors
    /// There will be no ring.
    pub(crate) fn confirm(
        &self,
        awaiting: AwaitAccept,
        accept: &[u8],
    ) -> Result<(Box<SmcdConn>, Vec<u8>), NoRing> {
        match awaiting.handle(accept, |chid, gid| self.fabrics.terms(chid, gid)) {
            ClientStep::Offered(accepted) => {
                let (conn, message) =
                    client::prepare(&self.client(), accepted).map_err(NoRing::declined)?;
                conn.note_terms();
                Ok((conn, message))
            }
            ClientStep::OfferedR(accepted) => {
                Err(NoRing::declined(accepted.decline(DeclineReason::NoRnic)))
            }
            ClientStep::Decline(decline) => Err(NoRing::declined(decline)),
            ClientStep::PeerDeclined(_) | ClientStep::Fail(_) => Err(NoRing::Violated),
        }
    }

    /// Server: the new ring.
    ///
    /// # Errors
    /// There will be no ring.
    pub(crate) fn attach(&self, offer: Offer, confirm: &[u8]) -> Result<Box<SmcdConn>, NoRing> {
        match server::attach(offer.0, confirm) {
            AcceptOutcome::Smc(conn) => Ok(conn),
            AcceptOutcome::NotAttached(reason) => {
                Err(NoRing::declined(SendDecline::opening(&self.config, reason)))
            }
            AcceptOutcome::Decline(decline) => Err(NoRing::declined(decline)),
            AcceptOutcome::PeerDeclined(_) | AcceptOutcome::Fail(_) => Err(NoRing::Violated),
        }
    }
}
