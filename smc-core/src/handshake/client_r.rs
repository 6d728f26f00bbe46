// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The client's answer to an Accept of SMC-R.

use std::sync::Arc;

use super::config::Config;
use super::decline::DeclineReason;
use super::negotiate::{MessageR, Offer};
use super::peer_host::PeerHost;
use super::route::Route;
use super::send_decline::{AfterDecline, SendDecline};
use super::smcr::{AnswerR, EstablishedR, LinkEnd, PeerLink, Role, TermsR, common_mtu};
use crate::wire::List;
use crate::wire::clc::{GidList, SmcrLink, Version};
use crate::wire::ids::{Eid, Gid, Mac};

/// The server's offer of SMC-R, checked and not yet answered.
///
/// At a subsequent contact the client may still decline, but only until Confirm is sent (CLC-52,
/// CLC-53). At first contact the client may also decline while the link comes up:
/// [`EstablishedR::decline`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AcceptedR {
    config: Arc<Config>,
    route: Route,
    /// The proposed address for this version, and the MAC.
    proposed: (Gid, Mac),
    accept: MessageR,
    terms: TermsR,
}

impl AcceptedR {
    pub(super) fn new(
        config: Arc<Config>,
        route: Route,
        offer: &Offer,
        accept: MessageR,
        terms: TermsR,
    ) -> AcceptedR {
        let gid = match accept.version {
            Version::V1 => offer.smcr_v1,
            Version::V2 => offer.smcr_v2,
        };
        let proposed = (gid.unwrap_or_default(), offer.proposal.mac);
        AcceptedR { config, route, proposed, accept, terms }
    }

    /// Version of SMC-R chosen by the server.
    pub fn version(&self) -> Version {
        self.accept.version
    }

    /// The server's own parameters. At first contact, the target of connection and writes; at a
    /// subsequent contact the element must not be in use by another connection of the group
    /// (CLC-37).
    pub fn peer(&self) -> &SmcrLink {
        &self.accept.link
    }

    /// The server's end of the link: the key of an existing link at a subsequent contact.
    pub fn peer_link(&self) -> PeerLink {
        PeerLink::of(self.accept.version, &self.accept.link)
    }

    /// Whether a new link group begins, even if one with this server exists (CLC-34).
    pub fn first_contact(&self) -> bool {
        self.accept.first_contact
    }

    /// The terms of the link group: new at first contact, else the known ones.
    pub fn terms(&self) -> TermsR {
        self.terms
    }

    /// The EID the server chose; `None` in version 1.
    pub fn eid(&self) -> Option<Eid> {
        self.accept.eid
    }

    /// `true`: no router lies between, and the server's MAC is the next hop (CLCV2-55). `false`: the
    /// client looks up the route to the server's address, and declines without one
    /// ([`DeclineReason::NoRoute`], [`DeclineReason::NotIndirect`], CLCV2-35, CLCV2-54, CLCV2-56).
    /// Version 1: always `true`.
    pub fn direct(&self) -> bool {
        self.accept.extension.is_none_or(|extension| extension.direct)
    }

    /// The server's host; at first contact of version 2 only.
    pub fn peer_host(&self) -> Option<PeerHost> {
        self.accept.extension.as_ref().map(|extension| PeerHost::from(&extension.common))
    }

    /// This end's resources for the connection.
    pub fn route(&self) -> &Route {
        &self.route
    }

    /// Agrees: returns the bytes of Confirm to send. Before sending, the own element is known to
    /// the peer on all links (CLC-48), and at first contact the queue pair can receive (CLC-38).
    ///
    /// At first contact Confirm repeats first-contact flag, release, limits and vendor options of
    /// Accept, states the common features and the smaller MTU, and lists the own addresses: the one
    /// in use, then up to seven of `alternates` in order of preference (CLCV2-44, CLCV2-57,
    /// CLCV2-58, CLCV2-61, EISM-23, CLCV2-70 to CLCV2-73, CLCV2-86, CLCV2-90). At a subsequent
    /// contact `own` is the end of the connection's link, any active one of the group (CLC-46).
    pub fn confirm(self, own: LinkEnd, alternates: &[Gid]) -> (EstablishedR, Vec<u8>) {
        let AcceptedR { config, proposed, accept, terms, .. } = self;
        let first_contact = accept.first_contact;
        let mtu = common_mtu(own.mtu, accept.link.mtu);
        let mut link = own.link(config.peer_id);
        if first_contact {
            (link.gid, link.mac) = proposed;
            link.mtu = mtu;
        }
        let extension = accept.extension;
        let answer = AnswerR {
            config: &config,
            link,
            terms,
            first_contact,
            eid: accept.eid,
            direct: own.direct,
            vendor: extension.map_or([0; 4], |extension| extension.common.vendor),
            // The message has them where its extension does.
            gids: Some(gid_list(link.gid, alternates)),
        };
        let established = EstablishedR {
            role: Role::Client,
            terms,
            first_contact,
            eid: accept.eid,
            own: link,
            peer: accept.link,
            peer_rnic: PeerLink::of(accept.version, &accept.link).rnic,
            mtu,
            direct: own.direct,
            peer_direct: extension.map_or(own.direct, |extension| extension.direct),
            peer_gids: None,
            peer_host: extension.as_ref().map(|extension| PeerHost::from(&extension.common)),
        };
        let bytes = answer.confirm().emit();
        (established, bytes)
    }

    /// Declines instead, for a local reason: no memory, no queue pair, no route, a link gone
    /// meanwhile.
    pub fn decline(self, reason: DeclineReason) -> SendDecline {
        SendDecline::plain(&self.config, self.accept.version, reason, AfterDecline::FallBack)
    }
}

/// The own addresses, each once (CLCV2-71, CLCV2-72, CLCV2-76).
fn gid_list(active: Gid, alternates: &[Gid]) -> GidList {
    let mut list = GidList { active, alternates: List::new() };
    for gid in alternates {
        let known = list.iter().any(|other| other.same_address(*gid));
        if !known && !gid.is_none() && list.alternates.push(*gid).is_err() {
            break;
        }
    }
    list
}
