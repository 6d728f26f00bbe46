// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Checks of the other side's answer in SMC-R.

use super::limits::final_limits;
use super::matches::SmcrMatch;
use super::offer::Offer;
use super::refusal::Refusal;
use super::select_route::terms_v1;
use super::terms::{Terms, answered_carriers, check_vendor};
use crate::handshake::config::Config;
use crate::handshake::decline::{DeclineReason, SmcKind};
use crate::handshake::error::HandshakeError;
use crate::handshake::route::Route;
use crate::handshake::smcr::{KnownLink, PeerLink, TermsR};
use crate::wire::clc::{SmcrFce, SmcrLink, Version};
use crate::wire::ids::{Eid, Gid, Mac};

/// The server's Accept, or the client's Confirm, in the form both versions have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MessageR {
    /// Version of SMC-R.
    pub version: Version,
    /// The sender's end of the link and its element.
    pub link: SmcrLink,
    /// The EID; `None` in version 1.
    pub eid: Option<Eid>,
    /// First contact, as far as the message says so: a version 1 Confirm does not (CLC-25).
    pub first_contact: bool,
    /// The first contact extension of version 2.
    pub extension: Option<SmcrFce>,
}

/// A client's check of an SMC-R Accept; returns the terms of the link group.
///
/// - The version was offered (CLCV2-89), and so was the EID, a user EID (CLCV2-64, EID-15).
/// - The address is not zero, and belongs to the connection's IP family (CLCV2-68).
/// - At first contact, the release is not above the proposed one and the limits are in the range
///   (CLCV2-36, CLCV2-57, CLCV2-58, CLCV2-85); the limits are final, so a server may raise the
///   proposed ones (CLCV2-41, CLCV2-59). Features are the common ones (CLCV2-61).
/// - Otherwise the link has to be `known` (CLC-33, CLC-35, ERR-6); the RMB may be new (CLC-36). A
///   server that lost its group names an unknown link (LG-61).
///
/// # Errors
///
/// [`Refusal`] says whether to decline or to break the connection.
pub fn check_accept_r(
    config: &Config,
    route: &Route,
    offer: &Offer,
    accept: &MessageR,
    known: impl FnOnce(&PeerLink) -> KnownLink,
) -> Result<TermsR, Refusal> {
    let version = accept.version;
    let kind = kind_r(version);
    if !offer.has(kind) {
        return Err(DeclineReason::NotOffered(kind).into());
    }
    let gid = accept.link.gid;
    if let Some(eid) = accept.eid {
        if !config.offered_ueids().contains(&eid) {
            return Err(HandshakeError::EidNotOffered(eid).into());
        }
        if !route.fits_family(gid) {
            return Err(DeclineReason::GidFamily(gid).into());
        }
    } else if gid.is_none() {
        return Err(DeclineReason::NoRoute(gid).into());
    }
    if !accept.first_contact {
        return match known(&PeerLink::of(version, &accept.link)) {
            KnownLink::Link(terms) => Ok(terms),
            KnownLink::NoGroup => Err(DeclineReason::OutOfSync.into()),
            KnownLink::NoLink => Err(DeclineReason::UnknownLink(accept.link.qpn).into()),
        };
    }
    let Some(extension) = &accept.extension else { return Ok(terms_v1(config, route)) };
    let (agreed, got) = (config.stated_release(), extension.common.release);
    if got > agreed {
        return Err(DeclineReason::Release { agreed, got }.into());
    }
    let limits = match got.has_v2_1_fields() {
        true => final_limits(extension.limits)?,
        false => config.limits_on(route),
    };
    let features = extension.common.features & config.stated_features();
    let carriers = answered_carriers(config, got, extension.common.vendor)?;
    Ok(TermsR { version, release: got, features, limits, carriers })
}

/// A server's check of a client's SMC-R Confirm against Accept and Proposal.
///
/// - Version 2 repeats the EID and the first-contact flag (CLCV2-44, EID-15).
/// - At first contact Confirm comes from the proposed address, the target of the server's
///   connection. On a direct link the MAC is the proposed one too, unless none was proposed
///   (CLCV2-55, D-14).
/// - At first contact of version 2 Confirm repeats the final values; others are declined (CLCV2-57,
///   CLCV2-58, CLCV2-60), and so are other vendor options if any were accepted (CLCV2-17, B-12).
/// - At a subsequent contact Confirm names an active link, perhaps another than Accept's (CLC-46);
///   `is_link` knows the active links.
///
/// # Errors
///
/// [`Refusal`] says whether to decline or to break the connection.
pub fn check_confirm_r(
    found: &SmcrMatch,
    first_contact: bool,
    confirm: &MessageR,
    is_link: impl FnOnce(&PeerLink) -> bool,
) -> Result<(), Refusal> {
    let link = &confirm.link;
    if let (Some(accepted), Some(got)) = (found.eid, confirm.eid)
        && accepted != got
    {
        return Err(HandshakeError::ConfirmEid { accepted, got }.into());
    }
    if confirm.version == Version::V2 && confirm.first_contact != first_contact {
        let (accepted, got) = (first_contact, confirm.first_contact);
        return Err(HandshakeError::ConfirmContact { accepted, got }.into());
    }
    if !first_contact {
        let key = PeerLink::of(confirm.version, link);
        let error = HandshakeError::ConfirmLink { gid: link.gid, qpn: link.qpn };
        return if is_link(&key) { Ok(()) } else { Err(error.into()) };
    }
    let (gid, mac) = found.proposed;
    if !same_gid(confirm.version, gid, link.gid) {
        return Err(HandshakeError::ConfirmGid { proposed: gid, got: link.gid }.into());
    }
    let direct = confirm.extension.is_none_or(|extension| extension.direct);
    if direct && mac != Mac::NONE && mac != link.mac {
        return Err(HandshakeError::ConfirmMac { proposed: mac, got: link.mac }.into());
    }
    let Some(extension) = &confirm.extension else { return Ok(()) };
    let TermsR { release, features, limits, carriers, .. } = found.terms;
    same_terms(Terms { release, features, carriers }, extension)?;
    if release.has_v2_1_fields() {
        let got = extension.limits;
        if got.max_conns != limits.max_conns {
            return Err(DeclineReason::MaxConnections(got.max_conns).into());
        }
        if got.max_links != limits.max_links {
            return Err(DeclineReason::MaxLinks(got.max_links).into());
        }
    }
    Ok(())
}

fn same_terms(agreed: Terms, extension: &SmcrFce) -> Result<(), DeclineReason> {
    let got = &extension.common;
    if got.release != agreed.release {
        return Err(DeclineReason::Release { agreed: agreed.release, got: got.release });
    }
    if got.features != agreed.features {
        return Err(DeclineReason::Features { agreed: agreed.features, got: got.features });
    }
    check_vendor(agreed.carriers, got.vendor)
}

fn same_gid(version: Version, a: Gid, b: Gid) -> bool {
    match version {
        Version::V1 => a == b,
        Version::V2 => a.same_address(b),
    }
}

/// The kind of SMC-R of a version.
pub(in crate::handshake) const fn kind_r(version: Version) -> SmcKind {
    match version {
        Version::V1 => SmcKind::SmcrV1,
        Version::V2 => SmcKind::SmcrV2,
    }
}
