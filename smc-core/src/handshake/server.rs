//! The server's side of the handshake: Proposal in, Accept out, Confirm in.

use std::sync::Arc;

use super::config::Config;
use super::decline::{DeclineReason, PeerDecline};
use super::error::{Awaited, HandshakeError};
use super::negotiate::{
    Candidate, Evaluation, Refusal, Refusals, SmcdMatch, Terms, check_confirm, evaluate,
};
use super::outcome::{
    AfterDecline, Answer, Dmbe, Established, PeerHost, Received, SendDecline, dmbe_of, parse,
};
use super::reader::ClcReader;
use super::time::Instant;
use crate::wire::clc::{Message, SmcdV2, Version};
use crate::wire::ids::{Eid, LinkId};

/// The server waits for the first message.
#[derive(Clone, Debug)]
pub struct AwaitProposal {
    config: Arc<Config>,
    deadline: Instant,
}

/// What the client's first message asks of the caller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ServerStep {
    /// SMC-D is possible: find the device that reaches the client and accept, or decline.
    Eligible(Selection),
    /// Send this Decline, then go on as TCP.
    Decline(SendDecline),
    /// The client declined before it proposed anything: go on as TCP.
    PeerDeclined(PeerDecline),
    /// Break the TCP connection.
    Fail(HandshakeError),
}

impl AwaitProposal {
    /// Begins to wait, once TCP is connected.
    pub fn new(config: Arc<Config>, now: Instant) -> AwaitProposal {
        let deadline = now.after(config.wait);
        AwaitProposal { config, deadline }
    }

    /// A reader for the awaited message.
    pub fn reader(&self) -> ClcReader {
        ClcReader::new(Awaited::Proposal)
    }

    /// When waiting ends.
    pub fn deadline(&self) -> Instant {
        self.deadline
    }

    /// The error to end with if the deadline has passed: the server closes the connection and
    /// nothing falls back (ERR-7, ERR-8).
    pub fn timed_out(&self, now: Instant) -> Option<HandshakeError> {
        let awaited = Awaited::Proposal;
        self.deadline.has_passed(now).then_some(HandshakeError::TimedOut { awaited })
    }

    /// Takes the client's first message, whole.
    pub fn handle(self, message: &[u8]) -> ServerStep {
        let config = self.config;
        let parsed = match parse(message, Awaited::Proposal, &config.tolerance.sizes) {
            Ok(parsed) => parsed,
            Err(Received::Decline(peer)) => return ServerStep::PeerDeclined(peer),
            Err(Received::Reserved(reason)) => {
                let then = AfterDecline::FallBack;
                let decline = SendDecline::plain(&config, Version::V2, reason, then);
                return ServerStep::Decline(decline);
            }
            Err(Received::Fail(error)) => return ServerStep::Fail(error),
        };
        let Message::Proposal(proposal) = parsed else {
            let (awaited, got) = (Awaited::Proposal, parsed.kind());
            return ServerStep::Fail(HandshakeError::OutOfTurn { awaited, got });
        };
        let Evaluation { smcd_v2, refusals } = evaluate(&config, &proposal);
        match smcd_v2 {
            Some(found) => ServerStep::Eligible(Selection { config, found, refusals }),
            // The answer is of the client's version, so that a version 1 client can read it
            // (CLC-6).
            None => {
                ServerStep::Decline(SendDecline::of_proposal(&config, proposal.version, &refusals))
            }
        }
    }
}

/// A Proposal that SMC-D can serve; nothing is promised yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Selection {
    config: Arc<Config>,
    found: SmcdMatch,
    refusals: Refusals,
}

impl Selection {
    /// Pairs of devices, best first; at least one. Take the first whose local device reaches `peer`
    /// and gives a DMB.
    pub fn candidates(&self) -> &[Candidate] {
        &self.found.candidates
    }

    /// The EID that will be used.
    pub fn eid(&self) -> Eid {
        self.found.eid
    }

    /// Release and features that a first contact will agree on.
    pub fn terms(&self) -> Terms {
        self.found.terms
    }

    /// Why the other types that were offered are not used.
    pub fn refusals(&self) -> &Refusals {
        &self.refusals
    }

    /// Accepts with one of the [`candidates`](Selection::candidates): the bytes to send, and what
    /// waits for Confirm.
    ///
    /// `known` are the terms agreed earlier with this peer (CHID and GID); without them this is a
    /// first contact, with flag and extension (CLCV2-44, CLCV2-49). The own element is completely
    /// ready before this: the client may write as soon as it has confirmed (CLC-32, CLC-41).
    ///
    /// Accept states the server's own features, not only the common ones (CLCV2-61, EISM-1).
    pub fn accept(
        self,
        devices: Candidate,
        known: Option<Terms>,
        own: Dmbe,
        link: LinkId,
        now: Instant,
    ) -> (AwaitConfirm, Vec<u8>) {
        let config = self.config;
        let agreed = self.found.terms;
        let stated = Terms {
            release: agreed.release,
            features: match agreed.release.has_v2_1_fields() {
                true => config.stated_features(),
                false => agreed.features,
            },
        };
        let eid = self.found.eid;
        let first_contact = known.is_none().then_some(stated);
        let answer = Answer { config: &config, devices, eid, own, link, first_contact };
        let accept = answer.message();
        let bytes = Message::AcceptD2(accept).emit();
        let deadline = now.after(config.wait);
        let terms = known.unwrap_or(agreed);
        (AwaitConfirm { config, accept, devices, terms, deadline }, bytes)
    }

    /// Declines instead, for a reason that came up here: no device reaches the client
    /// ([`DeclineReason::Unreachable`]), no DMB, local policy.
    pub fn decline(mut self, reason: DeclineReason) -> SendDecline {
        self.refusals.smcd_v2 = Some(reason);
        SendDecline::of_proposal(&self.config, Version::V2, &self.refusals)
    }
}

/// The server has sent its Accept.
#[derive(Clone, Debug)]
pub struct AwaitConfirm {
    config: Arc<Config>,
    accept: SmcdV2,
    devices: Candidate,
    terms: Terms,
    deadline: Instant,
}

/// What the client's last message asks of the caller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ConfirmStep {
    /// The connection is SMC.
    Established(Established),
    /// Send this late Decline, then break the TCP connection.
    Decline(SendDecline),
    /// The client declined: go on as TCP. If it is out of sync, forget this peer (CLC-50).
    PeerDeclined(PeerDecline),
    /// Break the TCP connection.
    Fail(HandshakeError),
}

impl AwaitConfirm {
    /// A reader for the awaited message.
    pub fn reader(&self) -> ClcReader {
        ClcReader::new(Awaited::Confirm)
    }

    /// When waiting ends.
    pub fn deadline(&self) -> Instant {
        self.deadline
    }

    /// The error to end with if the deadline has passed: the server closes the connection and
    /// nothing falls back (ERR-7, ERR-8).
    pub fn timed_out(&self, now: Instant) -> Option<HandshakeError> {
        let awaited = Awaited::Confirm;
        self.deadline.has_passed(now).then_some(HandshakeError::TimedOut { awaited })
    }

    /// Takes the client's answer, a whole message.
    ///
    /// A client that sent Confirm may have written to the DMB already, so a Decline from here is
    /// late: it tells why and the connection is broken, it does not become TCP (CLC-53, CLC-63).
    pub fn handle(self, message: &[u8]) -> ConfirmStep {
        let late = |reason| {
            let decline =
                SendDecline::plain(&self.config, Version::V2, reason, AfterDecline::Break);
            ConfirmStep::Decline(decline)
        };
        let parsed = match parse(message, Awaited::Confirm, &self.config.tolerance.sizes) {
            Ok(parsed) => parsed,
            Err(Received::Decline(peer)) => return ConfirmStep::PeerDeclined(peer),
            Err(Received::Reserved(reason)) => return late(reason),
            Err(Received::Fail(error)) => return ConfirmStep::Fail(error),
        };
        let Message::ConfirmD2(confirm) = parsed else {
            return ConfirmStep::Fail(HandshakeError::ConfirmType);
        };
        match check_confirm(&self.accept, self.devices.peer, self.terms, &confirm) {
            Ok(()) => ConfirmStep::Established(Established {
                devices: self.devices,
                eid: self.accept.eid,
                first_contact: self.accept.first_contact.is_some(),
                terms: self.terms,
                own: dmbe_of(&self.accept),
                peer: dmbe_of(&confirm),
                own_link: self.accept.link_id,
                peer_link: confirm.link_id,
                peer_host: confirm.first_contact.as_ref().map(PeerHost::from),
            }),
            Err(Refusal::Decline(reason)) => late(reason),
            Err(Refusal::Fail(error)) => ConfirmStep::Fail(error),
        }
    }
}
