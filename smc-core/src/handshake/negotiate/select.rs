//! The server's side: which of the offered types can be used, and how.

use super::Terms;
use super::select_route::{SmcrMatch, common_ueid, match_smcd_v1, match_smcr_v1, match_smcr_v2};
use crate::handshake::config::{Config, IsmDevice, Unpaired};
use crate::handshake::decline::{DeclineReason, SmcKind};
use crate::handshake::route::Route;
use crate::wire::WireError;
use crate::wire::clc::{Diagnosis, IsmOffer, OfferV2, Proposal, TypeReasons};
use crate::wire::ids::{Chid, Eid, Features, Gid, Release};

/// A pair of devices that may reach each other; whether they do, the local device has to be asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Candidate {
    /// The fabric both are on (EISM-29).
    pub chid: Chid,
    /// The server's device.
    pub local: Gid,
    /// The client's device. With the CHID it names the peer (EISM-21, CLCV2-49).
    pub peer: Gid,
}

/// SMC-D version 2 is possible.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SmcdMatch {
    /// Pairs of devices in the client's order of preference (EISM-17); at least one.
    pub candidates: Vec<Candidate>,
    /// The EID that goes into Accept (EID-15).
    pub eid: Eid,
    /// Release and features that a first contact agrees on.
    pub terms: Terms,
}

/// Why offered types are not used; `None` for a type that was not offered or that is possible.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Refusals {
    /// SMC-Dv2.
    pub smcd_v2: Option<DeclineReason>,
    /// SMC-Dv1.
    pub smcd_v1: Option<DeclineReason>,
    /// SMC-Rv2.
    pub smcr_v2: Option<DeclineReason>,
    /// SMC-Rv1.
    pub smcr_v1: Option<DeclineReason>,
}

impl Refusals {
    /// The refusal of one type.
    pub fn of(&self, kind: SmcKind) -> Option<DeclineReason> {
        match kind {
            SmcKind::SmcdV2 => self.smcd_v2,
            SmcKind::SmcdV1 => self.smcd_v1,
            SmcKind::SmcrV2 => self.smcr_v2,
            SmcKind::SmcrV1 => self.smcr_v1,
        }
    }

    /// Notes why a type is not used.
    pub fn set(&mut self, kind: SmcKind, reason: DeclineReason) {
        *match kind {
            SmcKind::SmcdV2 => &mut self.smcd_v2,
            SmcKind::SmcdV1 => &mut self.smcd_v1,
            SmcKind::SmcrV2 => &mut self.smcr_v2,
            SmcKind::SmcrV1 => &mut self.smcr_v1,
        } = Some(reason);
    }

    /// What was found, or a note why not.
    fn keep<T>(&mut self, kind: SmcKind, found: Result<T, DeclineReason>) -> Option<T> {
        found.map_err(|reason| self.set(kind, reason)).ok()
    }

    /// The diagnosis of the whole Proposal: types are dismissed from the least to the most
    /// preferred one, so the last reason is that of the best type offered (CLCV2-80).
    pub fn last(&self) -> DeclineReason {
        SmcKind::PREFERENCE
            .into_iter()
            .find_map(|kind| self.of(kind))
            .unwrap_or(DeclineReason::NothingOffered)
    }

    /// The reason per type as Decline carries it: zero where nothing was offered (CLCV2-79).
    pub fn type_reasons(&self) -> TypeReasons {
        let diagnosis = |reason: Option<DeclineReason>| {
            reason.map_or(Diagnosis::NONE, |reason| Diagnosis(reason.code().value()))
        };
        TypeReasons {
            smcd_v2: diagnosis(self.smcd_v2),
            smcd_v1: diagnosis(self.smcd_v1),
            smcr_v2: diagnosis(self.smcr_v2),
            smcr_v1: diagnosis(self.smcr_v1),
        }
    }
}

/// What a server makes of a Proposal: the types that are possible, in order of preference.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Evaluation {
    /// SMC-D version 2, the first choice (CLCV2-32), if it is possible.
    pub smcd_v2: Option<SmcdMatch>,
    /// SMC-D version 1.
    pub smcd_v1: Option<Candidate>,
    /// SMC-R version 2.
    pub smcr_v2: Option<SmcrMatch>,
    /// SMC-R version 1.
    pub smcr_v1: Option<SmcrMatch>,
    /// What stands in the way of each other type that was offered.
    pub refusals: Refusals,
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

/// Judges every type a Proposal offers (CLC-20, CLCV2-32, CLCV2-88), on a TCP connection of this
/// `route`.
///
/// One that is not possible stands in the way of no other (CLCV2-33). A GID or subnet of a type
/// that is not offered is not looked at (CLCV2-5, CLCV2-9), nor are subnets for version 2
/// (CLCV2-34), vendor options (CLCV2-15) and, without SMC-Rv2, link limits (CLCV2-25). Nothing is
/// refused for carrying a v2.1 feature (CLCV2-39).
pub fn evaluate(config: &Config, route: &Route, proposal: &Proposal) -> Evaluation {
    let mut refusals = Refusals::default();
    let (v1, v2) = (proposal.v1.as_ref(), proposal.v2.as_ref());
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
        refusals.keep(SmcKind::SmcdV2, found)
    });
    let smcd_v1 = v1(SmcKind::SmcdV1).and_then(|v1| {
        let found = match_smcd_v1(config, route, proposal, v1);
        refusals.keep(SmcKind::SmcdV1, found)
    });
    let smcr_v2 = v2(SmcKind::SmcrV2).and_then(|v2| {
        let found = match_smcr_v2(config, route, proposal, v2);
        refusals.keep(SmcKind::SmcrV2, found)
    });
    let smcr_v1 = v1(SmcKind::SmcrV1).and_then(|v1| {
        let found = match_smcr_v1(config, route, proposal, v1);
        refusals.keep(SmcKind::SmcrV1, found)
    });
    Evaluation { smcd_v2, smcd_v1, smcr_v2, smcr_v1, refusals }
}

/// Judges an offer of SMC-D version 2, in the order in which Linux does.
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
        return Err(DeclineReason::NoIsmDevice);
    }
    if v2.eids.is_empty() && v2.smcd.seid.is_none() {
        return Err(DeclineReason::NoEidOffered);
    }
    let terms = common_terms(config, v2);
    let candidates = match_devices(config, proposal, v2, &devices, terms)?;
    let eid = common_eid(config, v2)?;
    Ok(SmcdMatch { candidates, eid, terms })
}

/// The lower release, never above the known ones, and the features common to both ends
/// (CLCV2-36 to CLCV2-38, CLCV2-61, EISM-3).
pub(super) fn common_terms(config: &Config, v2: &OfferV2) -> Terms {
    let release: Release = config.stated_release().min(v2.release);
    let features = if release.has_v2_1_fields() {
        config.stated_features() & v2.features
    } else {
        Features::empty()
    };
    Terms { release, features }
}

/// Picks the EID: the system EID first, then the first user EID in the client's order (D-11).
///
/// An SEID counts only if its bit was set, which the parser has seen to (EID-13); it never matches
/// a user EID. One common EID is enough (EID-7, EID-8).
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
/// The associated device comes first, if it is offered for version 2 (CLCV2-11, CLCV2-28); a CHID
/// of the emulated range has no place there and is passed over (EISM-5). A lone entry of that range
/// is a violation only to a server with the feature in a v2.1 exchange; to others such CHIDs mean
/// nothing (EISM-14, EISM-15, EISM-22).
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

/// The rules for one fabric that hold at both ends: emulated devices need the feature at both, the
/// loopback device only reaches itself, nobody has the GID zero.
pub(super) fn may_use(
    chid: Chid,
    local: Gid,
    peer: Gid,
    terms: Terms,
) -> Result<(), DeclineReason> {
    if chid.is_emulated() && !terms.features.contains(Features::EMULATED_ISM) {
        return Err(DeclineReason::EmulatedNotShared(chid));
    }
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
