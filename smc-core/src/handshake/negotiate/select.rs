// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The server's side: the usable ones of the offered types, with their parameters.

use super::matches::{Candidate, SmcdMatch, SmcrMatch};
use super::select_route::{common_ueid, match_smcd_v1, match_smcr_v1, match_smcr_v2};
use super::terms::{Terms, common_terms};
use crate::handshake::config::{Config, Unpaired};
use crate::handshake::decline::{DeclineReason, SmcKind};
use crate::handshake::ism_device::IsmDevice;
use crate::handshake::rejected_types::RejectedTypes;
use crate::handshake::route::Route;
use crate::wire::WireError;
use crate::wire::clc::{IsmOffer, OfferV2, Proposal};
use crate::wire::ids::{Chid, Eid, Features, Gid};

/// A server's evaluation of a Proposal: the possible types, in order of preference.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Evaluation {
    /// SMC-D version 2, the first choice (CLCV2-32), if possible.
    pub smcd_v2: Option<SmcdMatch>,
    /// SMC-D version 1.
    pub smcd_v1: Option<Candidate>,
    /// SMC-R version 2.
    pub smcr_v2: Option<SmcrMatch>,
    /// SMC-R version 1.
    pub smcr_v1: Option<SmcrMatch>,
    /// The reason why each other offered type is not possible (CLCV2-79, CLCV2-80).
    pub rejected: RejectedTypes,
}

impl Evaluation {
    /// Whether a type is possible.
    pub fn has(&self, kind: SmcKind) -> bool {
        match kind {
            SmcKind::SmcdV2 => self.smcd_v2.is_some(),
            SmcKind::SmcdV1 => self.smcd_v1.is_some(),
            SmcKind::SmcrV2 => self.smcr_v2.is_some(),
            SmcKind::SmcrV1 => self.smcr_v1.is_some(),
        }
    }
}

/// Judges every type of a Proposal (CLC-20, CLCV2-32, CLCV2-88), on a TCP connection of this
/// `route`.
///
/// An impossible type does not hinder another (CLCV2-33). A GID or subnet of a type not offered is
/// ignored (CLCV2-5, CLCV2-9), so are subnets for version 2 (CLCV2-34), vendor options (CLCV2-15)
/// and, without SMC-Rv2, link limits (CLCV2-25). Nothing is refused for carrying a v2.1 feature
/// (CLCV2-39), nor the part of version 1 for another of version 2 (CLCV2-4).
pub fn evaluate(config: &Config, route: &Route, proposal: &Proposal) -> Evaluation {
    let mut rejected = RejectedTypes::default();
    let (v1, v2) = (proposal.v1.as_ref(), proposal.v2.as_ref());
    // CLCV2-2.
    let offered = |kind| match kind {
        SmcKind::SmcdV2 => v2.is_some_and(|v2| v2.types.has_d()),
        SmcKind::SmcdV1 => v1.is_some_and(|v1| v1.types.has_d()),
        SmcKind::SmcrV2 => v2.is_some_and(|v2| v2.types.has_r()),
        SmcKind::SmcrV1 => v1.is_some_and(|v1| v1.types.has_r()),
    };
    let v1 = |kind| v1.filter(|_| offered(kind));
    let v2 = |kind| v2.filter(|_| offered(kind));
    let smcd_v2 = v2(SmcKind::SmcdV2).and_then(|v2| {
        let found = match_smcd_v2(config, proposal, v2);
        rejected.keep(SmcKind::SmcdV2, found)
    });
    let smcd_v1 = v1(SmcKind::SmcdV1).and_then(|v1| {
        let found = match_smcd_v1(config, route, proposal, v1);
        rejected.keep(SmcKind::SmcdV1, found)
    });
    let smcr_v2 = v2(SmcKind::SmcrV2).and_then(|v2| {
        let found = match_smcr_v2(config, route, proposal, v2);
        rejected.keep(SmcKind::SmcrV2, found)
    });
    let smcr_v1 = v1(SmcKind::SmcrV1).and_then(|v1| {
        let found = match_smcr_v1(config, route, proposal, v1);
        rejected.keep(SmcKind::SmcrV1, found)
    });
    Evaluation { smcd_v2, smcd_v1, smcr_v2, smcr_v1, rejected }
}

/// Judges an offer of SMC-D version 2, in Linux's order.
fn match_smcd_v2(
    config: &Config,
    proposal: &Proposal,
    v2: &OfferV2,
) -> Result<SmcdMatch, DeclineReason> {
    if !config.kinds.has(SmcKind::SmcdV2) {
        return Err(DeclineReason::NotConfigured(SmcKind::SmcdV2));
    }
    let devices = config.usable_devices();
    if devices.is_empty() {
        return Err(config.without_device);
    }
    if v2.eids.is_empty() && v2.smcd.seid.is_none() {
        return Err(DeclineReason::NoEidOffered);
    }
    // CLCV2-36.
    let terms = common_terms(config, v2);
    let candidates = match_devices(config, proposal, v2, &devices, terms)?;
    let eid = common_eid(config, v2)?;
    Ok(SmcdMatch { candidates, eid, terms })
}

/// Picks the EID: the system EID first (SMC-D only, EID-10), then the first user EID in the
/// client's order (D-11). Without a common one there is no version 2 (SEC-13).
///
/// An SEID counts only with its bit set, as the parser has checked (EID-13). An SEID never matches
/// a user EID. One common EID is enough (EID-7, EID-8). Emulated devices change nothing (EID-18).
fn common_eid(config: &Config, v2: &OfferV2) -> Result<Eid, DeclineReason> {
    let own = config.system_eid();
    if config.ueids.is_empty() && own.is_none() {
        return Err(DeclineReason::NoEidConfigured);
    }
    if let Some(seid) = own.filter(|seid| v2.smcd.seid == Some(*seid)) {
        return Ok(seid);
    }
    common_ueid(config, v2).ok_or(DeclineReason::NoCommonEid)
}

/// Pairs the client's devices with local ones of the same CHID.
///
/// The associated device comes first, if offered for version 2 (CLCV2-11, CLCV2-28); a CHID of the
/// emulated range has no place there and is passed over (EISM-5). A lone entry of that range is a
/// violation only to a server with the feature in a v2.1 exchange; to others such CHIDs mean
/// nothing (EISM-14, EISM-15, EISM-16, EISM-22).
fn match_devices(
    config: &Config,
    proposal: &Proposal,
    v2: &OfferV2,
    devices: &[IsmDevice],
    terms: Terms,
) -> Result<Vec<Candidate>, DeclineReason> {
    let announced = config.stated_features().contains(Features::EMULATED_ISM);
    let judges_pairs = announced
        && terms.release.has_v2_1_fields()
        && config.tolerance.unpaired == Unpaired::Decline;
    let mut candidates: Vec<Candidate> = Vec::new();
    let mut hindrance = DeclineReason::NoCommonChid;
    let base = proposal.ism;
    let associated = (base.chid != Chid::NONE && !base.chid.is_emulated()).then(|| {
        Ok(IsmOffer { chid: base.chid, gid: Gid::from_parts(base.gid, Default::default()) })
    });
    for offered in associated.into_iter().chain(v2.smcd.devices()) {
        let offered = match offered {
            Ok(offered) => offered,
            Err(WireError::UnpairedChid { chid, .. }) if judges_pairs => {
                return Err(DeclineReason::UnpairedChid(Chid(chid)));
            }
            Err(_) => continue,
        };
        let Some(local) = devices.iter().find(|device| device.chid == offered.chid) else {
            continue;
        };
        match pair(offered, *local, terms) {
            Ok(candidate) if !candidates.contains(&candidate) => candidates.push(candidate),
            Ok(_) => {}
            Err(reason) => hindrance = reason,
        }
    }
    if candidates.is_empty() { Err(hindrance) } else { Ok(candidates) }
}

/// Whether two devices of one CHID may talk (EISM-3, EISM-22, EISM-25).
fn pair(offered: IsmOffer, local: IsmDevice, terms: Terms) -> Result<Candidate, DeclineReason> {
    may_use(offered.chid, local.gid, offered.gid, terms)?;
    Ok(Candidate { chid: offered.chid, local: local.gid, peer: offered.gid })
}

/// The rules for one fabric at both ends: emulated devices need the feature at both, the loopback
/// device only reaches itself, a GID of zero is no device.
pub(super) fn may_use(
    chid: Chid,
    local: Gid,
    peer: Gid,
    terms: Terms,
) -> Result<(), DeclineReason> {
    if chid.is_emulated() && !terms.features.contains(Features::EMULATED_ISM) {
        return Err(DeclineReason::EmulatedNotShared(chid));
    }
    // SEC-14.
    if chid.is_loopback() && local != peer {
        return Err(DeclineReason::ForeignLoopback);
    }
    if peer.is_none() {
        return Err(DeclineReason::Unreachable);
    }
    Ok(())
}

#[cfg(test)]
mod tests;
