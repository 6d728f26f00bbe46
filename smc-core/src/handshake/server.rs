// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The server's side of the handshake: Proposal in, Accept out, Confirm in.

use std::num::NonZeroU16;
use std::sync::Arc;

use super::config::Config;
use super::decline::{DeclineReason, PeerDecline, SmcKind};
use super::error::{Awaited, HandshakeError};
use super::negotiate::{
    Candidate, Evaluation, Refusal, RejectedTypes, SmcrMatch, Terms, check_confirm, evaluate,
    kind_r,
};
use super::outcome::{Answer, Dmbe, Established, Received, dmbe_of, parse, vendor_of, widen};
use super::peer_host::PeerHost;
use super::reader::ClcReader;
use super::route::Route;
use super::send_decline::{AfterDecline, SendDecline};
use super::server_r::{self, AwaitConfirmR};
use super::smcr::{LinkEnd, PeerRnic, TermsR};
use crate::time::Tick;
use crate::wire::clc::{CarrierOptions, Message, Proposal, SmcdV2, Version};
use crate::wire::ids::{Eid, LinkId};

/// The server waits for the first message.
#[derive(Clone, Debug)]
pub struct AwaitProposal {
    config: Arc<Config>,
    deadline: Tick,
}

/// The caller's next step after the client's first message.
#[expect(
    clippy::large_enum_variant,
    reason = "one lives at a time, for as long as a handshake step"
)]
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ServerStep {
    /// SMC is possible: find the device or adapter with a path to the client and accept, or
    /// decline.
    Eligible(Selection),
    /// Send this Decline, then go on as TCP.
    Decline(SendDecline),
    /// The client declined instead of proposing: go on as TCP.
    PeerDeclined(PeerDecline),
    /// Break the TCP connection.
    Fail(HandshakeError),
}

impl AwaitProposal {
    /// Begins to wait, once TCP is connected.
    pub fn new(config: Arc<Config>, now: Tick) -> AwaitProposal {
        let deadline = now.after(config.wait);
        AwaitProposal { config, deadline }
    }

    /// A reader for the awaited message.
    pub fn reader(&self) -> ClcReader {
        ClcReader::new(Awaited::Proposal)
    }

    /// When waiting ends.
    pub fn deadline(&self) -> Tick {
        self.deadline
    }

    /// The error to end with if the deadline has passed: the server closes the connection and
    /// nothing falls back (ERR-7, ERR-8).
    pub fn timed_out(&self, now: Tick) -> Option<HandshakeError> {
        let awaited = Awaited::Proposal;
        self.deadline.has_passed(now).then_some(HandshakeError::TimedOut { awaited })
    }

    /// Takes the client's first message, whole, without knowledge of the TCP connection's route, so
    /// only SMC-Dv2 is possible.
    pub fn handle(self, message: &[u8]) -> ServerStep {
        self.handle_on(message, Route::default)
    }

    /// Takes the client's first message, whole. The `route` is asked for only if a type depending
    /// on the route is offered and in use here.
    pub fn handle_on(self, message: &[u8], route: impl FnOnce() -> Route) -> ServerStep {
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
        let route = match needs_route(&config, &proposal) {
            true => route(),
            false => Route::default(),
        };
        Selection::step(config, route, &proposal)
    }
}

/// Whether a type other than SMC-Dv2 is offered and in use here.
fn needs_route(config: &Config, proposal: &Proposal) -> bool {
    let both = [
        (SmcKind::SmcdV1, proposal.v1.is_some_and(|v1| v1.types.has_d())),
        (SmcKind::SmcrV2, proposal.v2.is_some_and(|v2| v2.types.has_r())),
        (SmcKind::SmcrV1, proposal.v1.is_some_and(|v1| v1.types.has_r())),
    ];
    both.into_iter().any(|(kind, offered)| offered && config.kinds.has(kind))
}

/// One way to accept a Proposal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Choice {
    /// SMC-D of this version, with this pair of devices: [`Selection::accept`].
    D(Version, Candidate),
    /// SMC-R of the version in [`PeerRnic::version`], with this adapter of the client:
    /// [`Selection::accept_r`].
    R(PeerRnic),
}

impl Choice {
    /// The type of SMC.
    pub const fn kind(&self) -> SmcKind {
        match self {
            Choice::D(Version::V2, _) => SmcKind::SmcdV2,
            Choice::D(Version::V1, _) => SmcKind::SmcdV1,
            Choice::R(rnic) => kind_r(rnic.version()),
        }
    }
}

/// A Proposal with at least one possible type; nothing is promised yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Selection {
    config: Arc<Config>,
    route: Route,
    version: Version,
    candidates: Vec<Candidate>,
    found: Evaluation,
    claim: Option<NonZeroU16>,
}

impl Selection {
    fn step(config: Arc<Config>, route: Route, proposal: &Proposal) -> ServerStep {
        let found = evaluate(&config, &route, proposal);
        // The answer is of the client's version, so a version 1 client can read the answer (CLC-6).
        let version = proposal.version;
        if !SmcKind::PREFERENCE.into_iter().any(|kind| found.has(kind)) {
            let decline = SendDecline::of_proposal(&config, version, &found.rejected);
            return ServerStep::Decline(decline);
        }
        let mut candidates = Vec::new();
        if let Some(found) = &found.smcd_v2 {
            candidates.clone_from(&found.candidates);
        }
        // The same pair in both versions is one candidate: both versions fail alike.
        candidates.extend(found.smcd_v1.filter(|pair| !candidates.contains(pair)));
        let vendor = proposal.v2.and_then(|v2| v2.vendor);
        let claim = vendor.and_then(|offer| CarrierOptions::claim_in(&offer));
        ServerStep::Eligible(Selection { config, route, version, candidates, found, claim })
    }

    /// The possible choices, best first; at least one. Take the first working one: its device or
    /// adapter reaches the client and has memory (CLCV2-32, CLCV2-35).
    pub fn choices(&self) -> impl Iterator<Item = Choice> + '_ {
        let d = self.candidates.iter().map(|pair| Choice::D(self.version_of(pair), *pair));
        let r = [self.found.smcr_v2, self.found.smcr_v1];
        d.chain(r.into_iter().flatten().map(|found| Choice::R(found.peer)))
    }

    /// The choices of SMC-D: pairs of devices, best first; none if only SMC-R is possible. Take the
    /// first whose local device reaches `peer` and gives a DMB.
    pub fn candidates(&self) -> &[Candidate] {
        &self.candidates
    }

    /// Version 2 for pairs possible in version 2, else version 1.
    fn version_of(&self, pair: &Candidate) -> Version {
        let v2 = self.found.smcd_v2.as_ref();
        match v2.is_some_and(|found| found.candidates.contains(pair)) {
            true => Version::V2,
            false => Version::V1,
        }
    }

    /// The EID for SMC-Dv2, or else for SMC-Rv2; [`Eid::ZERO`] if only version 1 is possible.
    pub fn eid(&self) -> Eid {
        let r = self.found.smcr_v2.and_then(|found| found.eid);
        self.found.smcd_v2.as_ref().map(|found| found.eid).or(r).unwrap_or_default()
    }

    /// Release and features agreed by a first contact over SMC-D.
    pub fn terms(&self) -> Terms {
        self.found.smcd_v2.as_ref().map_or(Terms::V1, |found| found.terms)
    }

    /// The terms of a first contact over SMC-R of a version; `None` if SMC-R is not possible.
    pub fn terms_r(&self, version: Version) -> Option<TermsR> {
        self.smcr(version).map(|found| found.terms)
    }

    fn smcr(&self, version: Version) -> Option<SmcrMatch> {
        match version {
            Version::V1 => self.found.smcr_v1,
            Version::V2 => self.found.smcr_v2,
        }
    }

    /// The number of the client's claim ([`crate::wire::claim`]).
    pub fn claim(&self) -> Option<NonZeroU16> {
        self.claim
    }

    /// This end's resources for the connection.
    pub fn route(&self) -> &Route {
        &self.route
    }

    /// The reasons against the other offered types.
    pub fn rejected(&self) -> &RejectedTypes {
        &self.found.rejected
    }

    /// Accepts with one of the [`candidates`](Selection::candidates): returns the bytes to send,
    /// and the state waiting for Confirm.
    ///
    /// `known` are the terms agreed earlier with this peer (CHID and GID); without terms this is a
    /// first contact, with flag and, in version 2, extension (CLCV2-44, CLCV2-49). The own element
    /// is completely ready before this: the client may write right after Confirm (CLC-32, CLC-41).
    ///
    /// Accept states the server's own features, not only the common ones (CLCV2-61, EISM-1).
    pub fn accept(
        self,
        devices: Candidate,
        known: Option<Terms>,
        own: Dmbe,
        link: LinkId,
        now: Tick,
    ) -> (AwaitConfirm, Vec<u8>) {
        let version = self.version_of(&devices);
        let (agreed, eid) = match version {
            Version::V2 => (self.terms(), self.eid()),
            Version::V1 => (Terms::V1, Eid::ZERO),
        };
        let config = self.config;
        let stated = Terms {
            release: agreed.release,
            features: match agreed.release.has_v2_1_fields() {
                true => config.stated_features(),
                false => agreed.features,
            },
            carriers: agreed.carriers,
        };
        let first_contact = known.is_none().then_some(stated);
        let vendor = vendor_of(agreed.carriers);
        let answer =
            Answer { config: &config, version, devices, eid, own, link, first_contact, vendor };
        let (accept, bytes) = (answer.message(), answer.accept().emit());
        let deadline = now.after(config.wait);
        let terms = known.unwrap_or(agreed);
        (AwaitConfirm { config, version, accept, devices, terms, deadline }, bytes)
    }

    /// Accepts with SMC-R of a `version` among the [`choices`](Selection::choices): returns the
    /// bytes to send, and the state waiting for Confirm. `None` if the version is not among the
    /// choices.
    ///
    /// `known` are the terms of the link group for the connection; without terms this is a first
    /// contact (CLC-20, CLC-26). `own` is the server's end of the link. At a subsequent contact the
    /// link belongs to the group, and the client knows the element. The element must be ready
    /// before this call, because the client may write right after Confirm (CLC-21, CLC-32, CLC-48).
    pub fn accept_r(
        self,
        version: Version,
        known: Option<TermsR>,
        own: LinkEnd,
        now: Tick,
    ) -> Option<(AwaitConfirmR, Vec<u8>)> {
        let found = self.smcr(version)?;
        let deadline = now.after(self.config.wait);
        Some(server_r::accept(self.config, found, known, own, deadline))
    }

    /// Notes the reason for a failed choice, for the [Decline](Selection::decline) after a failure
    /// of all others.
    pub fn refuse(&mut self, kind: SmcKind, reason: DeclineReason) {
        self.found.rejected.set(kind, reason);
    }

    /// Declines instead, for a local reason: no device reaches the client
    /// ([`DeclineReason::Unreachable`]), no DMB, no route, local policy. The reason counts for
    /// every possible type without a [noted](Selection::refuse) reason (CLCV2-79).
    pub fn decline(self, reason: DeclineReason) -> SendDecline {
        let mut rejected = self.found.rejected;
        for kind in SmcKind::PREFERENCE {
            if self.found.has(kind) && rejected.of(kind).is_none() {
                rejected.set(kind, reason);
            }
        }
        SendDecline::of_proposal(&self.config, self.version, &rejected)
    }
}

/// The server has sent an Accept of SMC-D.
#[derive(Clone, Debug)]
pub struct AwaitConfirm {
    config: Arc<Config>,
    version: Version,
    accept: SmcdV2,
    devices: Candidate,
    terms: Terms,
    deadline: Tick,
}

/// The caller's next step after the client's last message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ConfirmStep {
    /// The connection is SMC.
    Established(Established),
    /// Send this late Decline, then break the TCP connection.
    Decline(SendDecline),
    /// The client declined: go on as TCP. If the peer is out of sync, forget this peer (CLC-50).
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
    pub fn deadline(&self) -> Tick {
        self.deadline
    }

    /// The error to end with if the deadline has passed: the server closes the connection and
    /// nothing falls back (ERR-7, ERR-8).
    pub fn timed_out(&self, now: Tick) -> Option<HandshakeError> {
        let awaited = Awaited::Confirm;
        self.deadline.has_passed(now).then_some(HandshakeError::TimedOut { awaited })
    }

    /// The terms of an earlier contact, if a claim may replace Confirm.
    pub fn claim_terms(&self) -> Option<Terms> {
        let is_known = self.version == Version::V2 && self.accept.first_contact.is_none();
        let has_claims = self.terms.carriers.is_some_and(|carriers| carriers.has_claims());
        (is_known && has_claims).then_some(self.terms)
    }

    /// Goes on without Confirm: the server has taken the claim of the client's element. `peer_link`
    /// is of the earlier contact. `None`: only Confirm establishes this connection.
    pub fn without_confirm(&self, peer: Dmbe, peer_link: LinkId) -> Option<Established> {
        let terms = self.claim_terms()?;
        Some(Established {
            version: self.version,
            devices: self.devices,
            eid: self.accept.eid,
            first_contact: false,
            terms,
            own: dmbe_of(&self.accept),
            peer,
            own_link: self.accept.link_id,
            peer_link,
            peer_host: None,
        })
    }

    /// Takes the client's answer, a whole message.
    ///
    /// A client may have written to the DMB right after Confirm, so a Decline from here is late:
    /// the Decline gives the reason, the connection is broken and does not become TCP (CLC-53,
    /// CLC-63).
    pub fn handle(self, message: &[u8]) -> ConfirmStep {
        let late = |reason| {
            let decline =
                SendDecline::plain(&self.config, self.version, reason, AfterDecline::Break);
            ConfirmStep::Decline(decline)
        };
        let parsed = match parse(message, Awaited::Confirm, &self.config.tolerance.sizes) {
            Ok(parsed) => parsed,
            Err(Received::Decline(peer)) => return ConfirmStep::PeerDeclined(peer),
            Err(Received::Reserved(reason)) => return late(reason),
            Err(Received::Fail(error)) => return ConfirmStep::Fail(error),
        };
        let confirm = match (self.version, &parsed) {
            (Version::V2, Message::ConfirmD2(confirm)) => *confirm,
            // Fields missing in version 1 are as in Accept; its flag is ignored.
            (Version::V1, Message::ConfirmD1(confirm)) => SmcdV2 {
                first_contact: self.accept.first_contact,
                ..widen(confirm, self.accept.chid)
            },
            _ => return ConfirmStep::Fail(HandshakeError::ConfirmType),
        };
        match check_confirm(&self.accept, self.devices.peer, self.terms, &confirm) {
            Ok(()) => ConfirmStep::Established(Established {
                version: self.version,
                devices: self.devices,
                eid: self.accept.eid,
                first_contact: self.accept.first_contact.is_some(),
                terms: self.terms,
                own: dmbe_of(&self.accept),
                peer: dmbe_of(&confirm),
                own_link: self.accept.link_id,
                peer_link: confirm.link_id,
                peer_host: match self.version {
                    Version::V1 => None,
                    Version::V2 => confirm.first_contact.as_ref().map(PeerHost::from),
                },
            }),
            Err(Refusal::Decline(reason)) => late(reason),
            Err(Refusal::Fail(error)) => ConfirmStep::Fail(error),
        }
    }
}
