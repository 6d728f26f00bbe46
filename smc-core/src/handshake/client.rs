// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The client's side of the handshake: Proposal out, Accept in, Confirm out.

use std::num::NonZeroU16;
use std::sync::Arc;

use super::client_r::AcceptedR;
use super::config::Config;
use super::decline::{DeclineReason, PeerDecline};
use super::error::{Awaited, HandshakeError};
use super::negotiate::{
    Agreed, Candidate, Offer, Refusal, Terms, check_accept, check_accept_r, check_accept_v1, offer,
};
use super::outcome::{
    Answer, Dmbe, Established, Received, dmbe_of, kind_of, message_r, parse, widen,
};
use super::peer_host::PeerHost;
use super::reader::ClcReader;
use super::route::Route;
use super::send_decline::{AfterDecline, SendDecline};
use super::smcr::{KnownLink, PeerLink};
use crate::time::Tick;
use crate::wire::clc::{Message, SmcdV2, Version};
use crate::wire::ids::{Chid, Eid, Gid, LinkId};

/// Begins a handshake without knowledge of the TCP connection's route, so only SMC-Dv2 can be
/// offered; see [`start_on`].
///
/// # Errors
///
/// See [`start_on`].
pub fn start(config: Arc<Config>, now: Tick) -> Result<(AwaitAccept, Vec<u8>), SendDecline> {
    start_on(config, Route::default(), now)
}

/// Begins a handshake: returns the Proposal to send, and the state waiting for its answer (CLC-1,
/// CLC-9).
///
/// # Errors
///
/// If there is nothing to offer. The Decline in the error replaces the Proposal when the server
/// expects one, that is, when both ends announced SMC in TCP option 254 (CLC-51); otherwise the
/// connection simply goes on as TCP and the message is dropped.
pub fn start_on(
    config: Arc<Config>,
    route: Route,
    now: Tick,
) -> Result<(AwaitAccept, Vec<u8>), SendDecline> {
    start_claiming(config, route, None, now)
}

/// Begins a handshake as [`start_on`] does, with the number of a claim in the Proposal
/// ([`crate::wire::claim`]).
///
/// # Errors
///
/// See [`start_on`].
pub fn start_claiming(
    config: Arc<Config>,
    route: Route,
    claim: Option<NonZeroU16>,
    now: Tick,
) -> Result<(AwaitAccept, Vec<u8>), SendDecline> {
    match offer(&config, &route) {
        Ok(mut offer) => {
            if let Some(v2) = &mut offer.proposal.v2
                && let Some(carriers) = config.carriers_at(v2.release)
            {
                v2.vendor = Some(carriers.offer(claim));
            }
            let deadline = now.after(config.wait);
            let bytes = Message::Proposal(offer.proposal).emit();
            Ok((AwaitAccept { config, route, offer, deadline }, bytes))
        }
        Err(reason) => Err(SendDecline::opening(&config, reason)),
    }
}

/// The client has sent its Proposal.
#[derive(Clone, Debug)]
pub struct AwaitAccept {
    config: Arc<Config>,
    route: Route,
    offer: Offer,
    deadline: Tick,
}

/// The caller's next step after the server's answer.
#[expect(
    clippy::large_enum_variant,
    reason = "one lives at a time, for as long as a handshake step"
)]
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ClientStep {
    /// The server accepts with SMC-D: bring a DMB and confirm, or decline.
    Offered(Accepted),
    /// The server accepts with the offered SMC-R: bring a link and an element, and confirm, or
    /// decline.
    OfferedR(AcceptedR),
    /// Send this Decline, then go on as TCP.
    Decline(SendDecline),
    /// The server declined: go on as TCP.
    PeerDeclined(PeerDecline),
    /// Break the TCP connection.
    Fail(HandshakeError),
}

impl AwaitAccept {
    /// A reader for the awaited message.
    pub fn reader(&self) -> ClcReader {
        ClcReader::new(Awaited::Accept)
    }

    /// When waiting ends.
    pub fn deadline(&self) -> Tick {
        self.deadline
    }

    /// The error to end with if the deadline has passed: the application sees `ETIMEDOUT`, nothing
    /// falls back (ERR-7, ERR-8).
    pub fn timed_out(&self, now: Tick) -> Option<HandshakeError> {
        let awaited = Awaited::Accept;
        self.deadline.has_passed(now).then_some(HandshakeError::TimedOut { awaited })
    }

    /// Takes the server's answer, a whole message, at a client without link groups of SMC-R: every
    /// contact over SMC-R has to be the first.
    ///
    /// `known` returns the terms agreed earlier with a peer of this CHID and GID, and is called
    /// only if the server denies a first contact.
    pub fn handle(
        self,
        message: &[u8],
        known: impl FnOnce(Chid, Gid) -> Option<Terms>,
    ) -> ClientStep {
        self.handle_with(message, known, |_| KnownLink::NoGroup)
    }

    /// Takes the server's answer, a whole message.
    ///
    /// If the server denies a first contact, `known` is asked for the terms agreed earlier with an
    /// SMC-D peer of this CHID and GID, or `known_link` for the state of the link named by an SMC-R
    /// peer.
    pub fn handle_with(
        self,
        message: &[u8],
        known: impl FnOnce(Chid, Gid) -> Option<Terms>,
        known_link: impl FnOnce(&PeerLink) -> KnownLink,
    ) -> ClientStep {
        let AwaitAccept { config, route, offer, .. } = self;
        let decline = |version, reason| {
            let then = AfterDecline::FallBack;
            ClientStep::Decline(SendDecline::plain(&config, version, reason, then))
        };
        let parsed = match parse(message, Awaited::Accept, &config.tolerance.sizes) {
            Ok(parsed) => parsed,
            Err(Received::Decline(peer)) => return ClientStep::PeerDeclined(peer),
            Err(Received::Reserved(reason)) => return decline(stated_version(message), reason),
            Err(Received::Fail(error)) => return ClientStep::Fail(error),
        };
        let not_offered = kind_of(&parsed).filter(|kind| !offer.has(*kind));
        if let Some(kind) = not_offered {
            return decline(stated_version(message), DeclineReason::NotOffered(kind));
        }
        let (version, judged) = match &parsed {
            Message::AcceptD2(accept) => {
                let judged = check_accept(&config, &offer.devices, accept, known);
                (Version::V2, judged.map(|agreed| (agreed, *accept)))
            }
            Message::AcceptD1(accept) => {
                let judged = check_accept_v1(offer.ism_v1, accept, known).map_err(Refusal::Decline);
                let wide = |agreed: Agreed| (agreed, widen(accept, agreed.devices.chid));
                (Version::V1, judged.map(wide))
            }
            other => {
                let Some(accept) = message_r(other) else {
                    return decline(Version::V2, DeclineReason::Internal);
                };
                let version = accept.version;
                return match check_accept_r(&config, &route, &offer, &accept, known_link) {
                    Ok(terms) => {
                        ClientStep::OfferedR(AcceptedR::new(config, route, &offer, accept, terms))
                    }
                    Err(Refusal::Decline(reason)) => decline(version, reason),
                    Err(Refusal::Fail(error)) => ClientStep::Fail(error),
                };
            }
        };
        match judged {
            Ok((agreed, accept)) => {
                ClientStep::Offered(Accepted { config, version, accept, agreed })
            }
            Err(Refusal::Decline(reason)) => decline(version, reason),
            Err(Refusal::Fail(error)) => ClientStep::Fail(error),
        }
    }
}

/// The version of an unusable message: the answer has the same version (CLCV2-1).
fn stated_version(message: &[u8]) -> Version {
    match message.get(7) {
        Some(byte) if byte >> 4 == 1 => Version::V1,
        _ => Version::V2,
    }
}

/// The server's offer, checked and not yet answered.
///
/// The client may still decline, but only until Confirm is sent (CLC-52, CLC-53).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Accepted {
    config: Arc<Config>,
    version: Version,
    accept: SmcdV2,
    agreed: Agreed,
}

impl Accepted {
    /// Version of SMC-D chosen by the server.
    pub fn version(&self) -> Version {
        self.version
    }

    /// The fabric, the own GID on it and the server's.
    pub fn devices(&self) -> Candidate {
        self.agreed.devices
    }

    /// The server's receive element: attach it before confirming.
    pub fn peer(&self) -> Dmbe {
        dmbe_of(&self.accept)
    }

    /// The EID the server chose; [`Eid::ZERO`] in version 1.
    pub fn eid(&self) -> Eid {
        self.agreed.eid
    }

    /// Whether a new logical link begins. Earlier knowledge of this peer is then void (CLC-34).
    pub fn first_contact(&self) -> bool {
        self.accept.first_contact.is_some()
    }

    /// Release and features in force with this peer.
    pub fn terms(&self) -> Terms {
        self.agreed.terms
    }

    /// The server's number of the logical link.
    pub fn peer_link(&self) -> LinkId {
        self.accept.link_id
    }

    /// The server's host; at first contact of version 2 only.
    pub fn peer_host(&self) -> Option<PeerHost> {
        let extension = self.accept.first_contact.as_ref();
        extension.filter(|_| self.version == Version::V2).map(PeerHost::from)
    }

    /// Agrees: returns the bytes of Confirm to send. The own receive element is ready for the peer
    /// before this, because the server may write as soon as it has read Confirm (CLC-42, CLC-44).
    ///
    /// Confirm repeats CHID, EID, first-contact flag, release and vendor options of Accept and
    /// carries the common features (CLCV2-17, CLCV2-44, CLCV2-61, CLCV2-64, CLCV2-86).
    pub fn confirm(self, own: Dmbe, link: LinkId) -> (Established, Vec<u8>) {
        let answer = Answer {
            config: &self.config,
            version: self.version,
            devices: self.agreed.devices,
            eid: self.agreed.eid,
            own,
            link,
            first_contact: self.first_contact().then_some(self.agreed.terms),
            vendor: self.accept.first_contact.map_or([0; 4], |extension| extension.vendor),
        };
        let bytes = answer.confirm().emit();
        (self.without_confirm(own, link), bytes)
    }

    /// Agrees without a Confirm: the server has taken the claim of the own receive element.
    pub fn without_confirm(self, own: Dmbe, link: LinkId) -> Established {
        Established {
            version: self.version,
            devices: self.agreed.devices,
            eid: self.agreed.eid,
            first_contact: self.first_contact(),
            terms: self.agreed.terms,
            own,
            peer: self.peer(),
            own_link: link,
            peer_link: self.accept.link_id,
            peer_host: self.peer_host(),
        }
    }

    /// Declines instead, for a local reason: no DMB, no memory, a peer forgotten meanwhile
    /// ([`DeclineReason::OutOfSync`]).
    pub fn decline(self, reason: DeclineReason) -> SendDecline {
        SendDecline::plain(&self.config, self.version, reason, AfterDecline::FallBack)
    }
}
