//! The client's side of the handshake: Proposal out, Accept in, Confirm out.

use std::sync::Arc;

use super::config::{Config, IsmDevice};
use super::decline::{DeclineReason, PeerDecline};
use super::error::{Awaited, HandshakeError};
use super::negotiate::{Agreed, Candidate, Refusal, Terms, check_accept, offer};
use super::outcome::{
    AfterDecline, Answer, Dmbe, Established, PeerHost, Received, SendDecline, dmbe_of, kind_of,
    parse,
};
use super::reader::ClcReader;
use super::time::Instant;
use crate::wire::clc::{Message, SmcdV2, Version};
use crate::wire::ids::{Chid, Eid, Gid, LinkId};

/// Begins a handshake: the Proposal to send, and what waits for its answer (CLC-1, CLC-9).
///
/// # Errors
///
/// If there is nothing to offer. The Decline in the error replaces the Proposal when the server
/// expects one, that is, when both ends announced SMC in TCP option 254 (CLC-51); otherwise the
/// connection simply goes on as TCP and the message is dropped.
pub fn start(config: Arc<Config>, now: Instant) -> Result<(AwaitAccept, Vec<u8>), SendDecline> {
    match offer(&config) {
        Ok((proposal, offered)) => {
            let deadline = now.after(config.wait);
            let bytes = Message::Proposal(proposal).emit();
            Ok((AwaitAccept { config, offered, deadline }, bytes))
        }
        Err(reason) => Err(SendDecline::opening(&config, reason)),
    }
}

/// The client has sent its Proposal.
#[derive(Clone, Debug)]
pub struct AwaitAccept {
    config: Arc<Config>,
    offered: Vec<IsmDevice>,
    deadline: Instant,
}

/// What the server's answer asks of the caller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ClientStep {
    /// The server accepts: bring a DMB and confirm, or decline.
    Offered(Accepted),
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
    pub fn deadline(&self) -> Instant {
        self.deadline
    }

    /// The error to end with if the deadline has passed: the application sees `ETIMEDOUT`, nothing
    /// falls back (ERR-7, ERR-8).
    pub fn timed_out(&self, now: Instant) -> Option<HandshakeError> {
        let awaited = Awaited::Accept;
        self.deadline.has_passed(now).then_some(HandshakeError::TimedOut { awaited })
    }

    /// Takes the server's answer, a whole message.
    ///
    /// `known` tells the terms agreed earlier with a peer of this CHID and GID; it is asked if the
    /// server says that this is not the first contact.
    pub fn handle(
        self,
        message: &[u8],
        known: impl FnOnce(Chid, Gid) -> Option<Terms>,
    ) -> ClientStep {
        let decline = |reason| {
            let message =
                SendDecline::plain(&self.config, Version::V2, reason, AfterDecline::FallBack);
            ClientStep::Decline(message)
        };
        let parsed = match parse(message, Awaited::Accept, &self.config.tolerance.sizes) {
            Ok(parsed) => parsed,
            Err(Received::Decline(peer)) => return ClientStep::PeerDeclined(peer),
            Err(Received::Reserved(reason)) => return decline(reason),
            Err(Received::Fail(error)) => return ClientStep::Fail(error),
        };
        let Message::AcceptD2(accept) = parsed else {
            // Only SMC-Dv2 was offered (CLCV2-89).
            let reason =
                kind_of(&parsed).map_or(DeclineReason::Internal, DeclineReason::NotOffered);
            return decline(reason);
        };
        match check_accept(&self.config, &self.offered, &accept, known) {
            Ok(agreed) => ClientStep::Offered(Accepted { config: self.config, accept, agreed }),
            Err(Refusal::Decline(reason)) => decline(reason),
            Err(Refusal::Fail(error)) => ClientStep::Fail(error),
        }
    }
}

/// The server's offer, checked and not yet answered.
///
/// The client may still decline, and only now: once Confirm is sent it may not (CLC-52, CLC-53).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Accepted {
    config: Arc<Config>,
    accept: SmcdV2,
    agreed: Agreed,
}

impl Accepted {
    /// The fabric, the own GID on it and the server's.
    pub fn devices(&self) -> Candidate {
        self.agreed.devices
    }

    /// The server's receive element: attach it before confirming.
    pub fn peer(&self) -> Dmbe {
        dmbe_of(&self.accept)
    }

    /// The EID the server chose.
    pub fn eid(&self) -> Eid {
        self.agreed.eid
    }

    /// Whether a new logical link begins. Then what was known of this peer no longer holds
    /// (CLC-34).
    pub fn first_contact(&self) -> bool {
        self.accept.first_contact.is_some()
    }

    /// Release and features that will hold with this peer.
    pub fn terms(&self) -> Terms {
        self.agreed.terms
    }

    /// The server's number of the logical link.
    pub fn peer_link(&self) -> LinkId {
        self.accept.link_id
    }

    /// The server's host; at first contact only.
    pub fn peer_host(&self) -> Option<PeerHost> {
        self.accept.first_contact.as_ref().map(PeerHost::from)
    }

    /// Agrees: the bytes of Confirm to send. The own receive element is ready for the peer before
    /// this, because the server may write as soon as it has read Confirm (CLC-42, CLC-44).
    ///
    /// Confirm repeats CHID, EID, first-contact flag and release of Accept and carries the common
    /// features (CLCV2-44, CLCV2-61, CLCV2-64, CLCV2-86).
    pub fn confirm(self, own: Dmbe, link: LinkId) -> (Established, Vec<u8>) {
        let first_contact = self.first_contact();
        let answer = Answer {
            config: &self.config,
            devices: self.agreed.devices,
            eid: self.agreed.eid,
            own,
            link,
            first_contact: first_contact.then_some(self.agreed.terms),
        };
        let bytes = Message::ConfirmD2(answer.message()).emit();
        let established = Established {
            devices: self.agreed.devices,
            eid: self.agreed.eid,
            first_contact,
            terms: self.agreed.terms,
            own,
            peer: self.peer(),
            own_link: link,
            peer_link: self.accept.link_id,
            peer_host: self.peer_host(),
        };
        (established, bytes)
    }

    /// Declines instead, for a reason that came up here: no DMB, no memory, a peer that has
    /// meanwhile been forgotten ([`DeclineReason::OutOfSync`]).
    pub fn decline(self, reason: DeclineReason) -> SendDecline {
        SendDecline::plain(&self.config, Version::V2, reason, AfterDecline::FallBack)
    }
}
