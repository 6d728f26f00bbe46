// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The server's side of the types depending on the TCP connection's route: SMC-Dv1, SMC-Rv2 and
//! SMC-Rv1.

use super::limits::negotiate_limits;
use super::matches::{Candidate, SmcrMatch};
use super::terms::{Terms, common_terms};
use crate::handshake::config::Config;
use crate::handshake::decline::{DeclineReason, SmcKind};
use crate::handshake::route::Route;
use crate::handshake::smcr::{PeerRnic, TermsR};
use crate::wire::clc::{OfferV1, OfferV2, Proposal, Version};
use crate::wire::ids::{Chid, Eid, Features, Gid, GidV1, PeerId, Release};

/// Judges an offer of SMC-D version 1: one fabric, one subnet (CLC-60, CLC-61, SEC-2).
pub(super) fn match_smcd_v1(
    config: &Config,
    route: &Route,
    proposal: &Proposal,
    v1: &OfferV1,
) -> Result<Candidate, DeclineReason> {
    configured(config, SmcKind::SmcdV1)?;
    let local = route.ism_v1().ok_or(DeclineReason::NoAssociatedIsm)?;
    if !route.shares(&v1.subnet) {
        return Err(DeclineReason::DifferentSubnet);
    }
    // The fabric is announced only if the device is offered for version 2 as well.
    if proposal.ism.chid != Chid::NONE && proposal.ism.chid != local.chid {
        return Err(DeclineReason::NoCommonChid);
    }
    if proposal.ism.gid.is_none() {
        return Err(DeclineReason::Unreachable);
    }
    let peer = Gid::from_parts(proposal.ism.gid, GidV1::NONE);
    Ok(Candidate { chid: local.chid, local: local.gid, peer })
}

/// Judges an offer of SMC-R version 2: a common user EID (EID-14) and an address of the connection's
/// IP family; subnets do not matter (CLCV2-20, CLCV2-26, CLCV2-34).
///
/// Whether there is a route to the client's address, the caller finds out (CLCV2-35).
pub(super) fn match_smcr_v2(
    config: &Config,
    route: &Route,
    proposal: &Proposal,
    v2: &OfferV2,
) -> Result<SmcrMatch, DeclineReason> {
    configured(config, SmcKind::SmcrV2)?;
    if v2.eids.is_empty() {
        return Err(DeclineReason::NoEidOffered);
    }
    if config.ueids.is_empty() {
        return Err(DeclineReason::NoEidConfigured);
    }
    let eid = common_ueid(config, v2).ok_or(DeclineReason::NoCommonUeid)?;
    route.rnic_v2().ok_or(DeclineReason::NoRnic)?;
    if !route.fits_family(v2.roce_gid) {
        return Err(DeclineReason::GidFamily(v2.roce_gid));
    }
    let common = common_terms(config, v2);
    let own = config.limits_on(route);
    let limits = match common.release.has_v2_1_fields() {
        true => negotiate_limits(v2.limits, own),
        false => own,
    };
    let Terms { release, features, carriers } = common;
    let version = Version::V2;
    Ok(SmcrMatch {
        peer: PeerRnic::new(version, proposal.peer_id, v2.roce_gid, proposal.mac),
        proposed: (v2.roce_gid, proposal.mac),
        eid: Some(eid),
        terms: TermsR { version, release, features, limits, carriers },
    })
}

/// Judges an offer of SMC-R version 1: one subnet (CLC-17, CLC-18, SEC-2).
pub(super) fn match_smcr_v1(
    config: &Config,
    route: &Route,
    proposal: &Proposal,
    v1: &OfferV1,
) -> Result<SmcrMatch, DeclineReason> {
    configured(config, SmcKind::SmcrV1)?;
    if route.rnic_v1().is_none() || config.peer_id == PeerId::NONE {
        return Err(DeclineReason::NoRnic);
    }
    if !route.shares(&v1.subnet) {
        return Err(DeclineReason::DifferentSubnet);
    }
    if proposal.gid.is_none() {
        return Err(DeclineReason::NoRoute(proposal.gid));
    }
    Ok(SmcrMatch {
        peer: PeerRnic::new(Version::V1, proposal.peer_id, proposal.gid, proposal.mac),
        proposed: (proposal.gid, proposal.mac),
        eid: None,
        terms: terms_v1(config, route),
    })
}

/// The terms of a link group of version 1, without any agreement in CLC.
pub(super) fn terms_v1(config: &Config, route: &Route) -> TermsR {
    TermsR {
        version: Version::V1,
        release: Release::V2_0,
        features: Features::empty(),
        limits: config.limits_on(route),
        carriers: None,
    }
}

fn configured(config: &Config, kind: SmcKind) -> Result<(), DeclineReason> {
    config.kinds.has(kind).then_some(()).ok_or(DeclineReason::NotConfigured(kind))
}

/// The first user EID in the client's order known to this host too (EID-7, EID-8).
pub(super) fn common_ueid(config: &Config, v2: &OfferV2) -> Option<Eid> {
    v2.eids.iter().find(|eid| **eid != Eid::ZERO && config.ueids.contains(eid)).copied()
}
