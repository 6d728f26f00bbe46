// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The handshake for a new ring of a connection on TCP: the messages come in CLC records, and each step
//! is the same as in the handshake on the stream.
//!
//! Each step may take device commands, so no lock is held meanwhile.

use std::sync::Arc;
use std::time::Duration;

use smc_core::handshake::{
    AwaitAccept, AwaitProposal, ClientStep, Config, DeclineReason, Route, SendDecline, ServerStep,
    start_on,
};
use smc_core::time::Tick;

use super::client;
use super::link::{LinkHandshake, LinkStep, RingRdma};
use super::server::{self, AcceptOutcome, AcceptStep, Accepted};
use super::smcr::Connecting;
use super::{EstablishedConn, Params};
use crate::smcd::Fabrics;

/// The time for which a server keeps the link for a Confirm, after its Accept with an RNIC.
const CONFIRM_TIMEOUT: Duration = Duration::from_secs(20);

/// The resources of both ends for a new ring.
pub(crate) struct RingParams {
    /// The offer of this end: its device, and nothing else.
    pub(crate) config: Arc<Config>,
    /// The fabric of its device, if it is open.
    pub(crate) fabrics: Fabrics,
    /// The RNICs of this end, for a connection formerly on SMC-R.
    pub(crate) rdma: Option<RingRdma>,
    /// Bytes of the own DMB or element.
    pub(crate) buffer: u32,
}

/// A handshake between two messages.
pub(crate) enum Stage {
    /// Client: the Proposal was sent.
    Proposed(Box<AwaitAccept>),
    /// Server: the Accept was sent.
    Accepted(Box<Offer>),
    /// Either, behind the Proposal: a link is brought up, or joined.
    Linking(Box<LinkHandshake>),
}

/// The result of a step.
pub(crate) enum RingStep {
    /// The message to send, and the stage awaiting the answer.
    Message(Stage, Vec<u8>),
    /// The next turn continues.
    Later(Stage),
    /// The new ring, and the message to send before its first use, if any.
    Ring(EstablishedConn, Vec<u8>),
    /// There is no new ring this time.
    No(NoRing),
}

/// The offer of a server.
pub(crate) struct Offer(Accepted);

/// The reason for no new ring this time.
pub(crate) enum NoRing {
    /// The Decline to send.
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
    /// Whether the device is open, or an RNIC is up.
    pub(crate) fn has_device(&self) -> bool {
        !self.fabrics.0.is_empty() || self.rdma.as_ref().is_some_and(RingRdma::is_up)
    }

    /// The Decline of an end without a device now.
    pub(crate) fn decline(&self) -> NoRing {
        let reason = match self.rdma {
            Some(_) => DeclineReason::NoRnic,
            None => DeclineReason::NoIsmDevice,
        };
        NoRing::declined(SendDecline::opening(&self.config, reason))
    }

    fn route(&self) -> Route {
        self.rdma.as_ref().map(|rdma| rdma.route.clone()).unwrap_or_default()
    }

    fn params(&self) -> Params<'_> {
        let Self { config, fabrics, rdma, buffer } = self;
        let rdma = rdma.as_ref().map(RingRdma::by_rdma);
        let message_timeout = CONFIRM_TIMEOUT;
        Params { config, fabrics, rdma, buffer: *buffer, message_timeout }
    }

    /// Client: the Proposal to send.
    pub(crate) fn propose(&self) -> RingStep {
        match start_on(self.config.clone(), self.route(), Tick(0)) {
            Ok((awaiting, proposal)) => {
                RingStep::Message(Stage::Proposed(Box::new(awaiting)), proposal)
            }
            Err(decline) => RingStep::No(NoRing::declined(decline)),
        }
    }

    /// Server: the Accept to send.
    pub(crate) fn accept(&self, proposal: &[u8]) -> RingStep {
        let awaiting = AwaitProposal::new(self.config.clone(), Tick(0));
        let selection = match awaiting.handle_on(proposal, || self.route()) {
            ServerStep::Eligible(selection) => selection,
            ServerStep::Decline(decline) => return RingStep::No(NoRing::declined(decline)),
            ServerStep::PeerDeclined(_) | ServerStep::Fail(_) => {
                return RingStep::No(NoRing::Violated);
            }
        };
        match (server::take(&self.params(), selection), &self.rdma) {
            (Ok(AcceptStep::D(accepted, message)), _) => {
                RingStep::Message(Stage::Accepted(Box::new(Offer(*accepted))), message)
            }
            (Ok(AcceptStep::R(accepting)), Some(rdma)) => {
                match LinkHandshake::accepting(rdma, *accepting) {
                    Ok(link) => self.link(Box::new(link), &[]),
                    Err(_) => RingStep::No(self.decline()),
                }
            }
            (Ok(AcceptStep::R(_)), None) => RingStep::No(self.decline()),
            (Err(decline), _) => RingStep::No(NoRing::declined(decline)),
        }
    }

    /// Client: the new ring, and the Confirm to send.
    pub(crate) fn confirm(&self, awaiting: AwaitAccept, accept: &[u8]) -> RingStep {
        let known = |chid, gid| self.fabrics.terms(chid, gid);
        let rdma = self.rdma.as_ref();
        let known_link = |peer: &_| client::known_link(rdma.map(RingRdma::by_rdma), peer);
        match awaiting.handle_with(accept, known, known_link) {
            ClientStep::Offered(accepted) => match client::prepare(&self.params(), accepted) {
                Ok((conn, message)) => {
                    conn.note_terms();
                    RingStep::Ring(EstablishedConn::D(conn), message)
                }
                Err(decline) => RingStep::No(NoRing::declined(decline)),
            },
            ClientStep::OfferedR(accepted) => {
                let Some(rdma) = rdma else {
                    let decline = accepted.decline(DeclineReason::NoRnic);
                    return RingStep::No(NoRing::declined(decline));
                };
                match Connecting::new(&rdma.host, &self.config, accepted, self.buffer) {
                    Ok(connecting) => match LinkHandshake::connecting(rdma, connecting) {
                        Ok(link) => self.link(Box::new(link), &[]),
                        Err(_) => RingStep::No(self.decline()),
                    },
                    Err(decline) => RingStep::No(NoRing::declined(decline)),
                }
            }
            ClientStep::Decline(decline) => RingStep::No(NoRing::declined(decline)),
            ClientStep::PeerDeclined(_) | ClientStep::Fail(_) => RingStep::No(NoRing::Violated),
        }
    }

    /// Server: the new ring.
    pub(crate) fn attach(&self, offer: Offer, confirm: &[u8]) -> RingStep {
        match server::attach(offer.0, confirm) {
            AcceptOutcome::Smc(conn) => RingStep::Ring(EstablishedConn::D(conn), Vec::new()),
            AcceptOutcome::NotAttached(reason) => {
                RingStep::No(NoRing::declined(SendDecline::opening(&self.config, reason)))
            }
            AcceptOutcome::Decline(decline) => RingStep::No(NoRing::declined(decline)),
            AcceptOutcome::PeerDeclined(_) | AcceptOutcome::Fail(_) => {
                RingStep::No(NoRing::Violated)
            }
        }
    }

    /// Continues with a link. `message`: the peer's answer, if new.
    pub(crate) fn link(&self, mut link: Box<LinkHandshake>, message: &[u8]) -> RingStep {
        match link.advance(message) {
            LinkStep::Later => RingStep::Later(Stage::Linking(link)),
            LinkStep::Message(message) => RingStep::Message(Stage::Linking(link), message),
            LinkStep::Done(conn, message) => RingStep::Ring(EstablishedConn::R(conn), message),
            LinkStep::Declined(message) if message.is_empty() => RingStep::No(self.decline()),
            LinkStep::Declined(message) => RingStep::No(NoRing::Decline(message)),
            LinkStep::Violated => RingStep::No(NoRing::Violated),
        }
    }
}
