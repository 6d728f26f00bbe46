// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The client's side: the contents of the Proposal.

use crate::handshake::config::{Config, Kinds};
use crate::handshake::decline::{DeclineReason, SmcKind};
use crate::handshake::ism_device::IsmDevice;
use crate::handshake::route::Route;
use crate::wire::List;
use crate::wire::clc::{
    AssociatedIsm, IsmOffer, OfferV1, OfferV2, Proposal, SmcTypes, SmcdV2Offer, Subnet, Version,
};
use crate::wire::ids::{Chid, Gid, GidV1, LinkLimits, Mac, PeerId};

/// A Proposal with the offered devices and addresses of this host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Offer {
    /// The message.
    pub proposal: Proposal,
    /// Devices of SMC-Dv2, the associated one first; empty without an offer of SMC-Dv2.
    pub devices: Vec<IsmDevice>,
    /// Device of SMC-Dv1, if offered.
    pub ism_v1: Option<IsmDevice>,
    /// Address of SMC-Rv2, if offered.
    pub smcr_v2: Option<Gid>,
    /// GID of SMC-Rv1, if offered.
    pub smcr_v1: Option<Gid>,
}

impl Offer {
    /// Whether a type is offered (CLCV2-89).
    pub fn has(&self, kind: SmcKind) -> bool {
        match kind {
            SmcKind::SmcdV2 => !self.devices.is_empty(),
            SmcKind::SmcdV1 => self.ism_v1.is_some(),
            SmcKind::SmcrV2 => self.smcr_v2.is_some(),
            SmcKind::SmcrV1 => self.smcr_v1.is_some(),
        }
    }

    fn types(&self, r: SmcKind, d: SmcKind) -> Option<SmcTypes> {
        match (self.has(r), self.has(d)) {
            (true, true) => Some(SmcTypes::Both),
            (true, false) => Some(SmcTypes::R),
            (false, true) => Some(SmcTypes::D),
            (false, false) => None,
        }
    }
}

/// This host's offer as a client on a connection of this `route`: every type in use with its
/// resources present (CLCV2-88).
///
/// The result is the same for every connection of a route (CLC-9) and binds no resource (CLC-11).
/// The field for an associated ISM GID stays zero unless SMC-Dv1 is offered: emulated devices must
/// not stand there (EISM-4, EISM-5), and Linux misreads other values there (D-7). MAC and peer id
/// are always there with SMC-R (CLCV2-12). The fields of v2.1 depend on the offered types
/// (CLCV2-25, CLCV2-95).
///
/// # Errors
///
/// [`DeclineReason::NoDevice`] or [`DeclineReason::NoEidConfigured`] if there is nothing to offer.
pub fn offer(config: &Config, route: &Route) -> Result<Offer, DeclineReason> {
    let subnet = route.proposed_subnet();
    let ism_v1 = route.ism_v1().filter(|_| config.kinds.has(SmcKind::SmcdV1) && subnet.is_some());
    let devices = devices(config, ism_v1);
    let rnic_v2 = route.rnic_v2().filter(|_| config.kinds.has(SmcKind::SmcrV2));
    let nameless = config.offered_ueids().is_empty();
    let mut offer = Offer {
        proposal: empty(config),
        devices: devices.clone(),
        ism_v1,
        // SMC-R has no use for a system EID (CLCV2-26), and needs one of a user (EID-14).
        smcr_v2: rnic_v2.filter(|_| !nameless).map(|(_, gid)| gid),
        smcr_v1: smcr_v1(config, route, subnet.as_ref()),
    };
    // SMC-Dv2 needs an EID of either kind (CLCV2-27).
    if nameless && config.system_eid().is_none() {
        offer.devices.clear();
    }
    let v1 = offer.types(SmcKind::SmcrV1, SmcKind::SmcdV1);
    let v2 = offer.types(SmcKind::SmcrV2, SmcKind::SmcdV2);
    if v1.is_none() && v2.is_none() {
        let wanting = !devices.is_empty() || rnic_v2.is_some();
        return Err(match wanting {
            true => DeclineReason::NoEidConfigured,
            false => DeclineReason::NoDevice,
        });
    }
    let proposal = &mut offer.proposal;
    proposal.gid = offer.smcr_v1.unwrap_or_default();
    if let Some(rnic) = route.rnic.filter(|_| offer.smcr_v1.is_some() || offer.smcr_v2.is_some()) {
        proposal.mac = rnic.mac;
    }
    if let Some(ism) = ism_v1 {
        proposal.ism.gid = ism.gid.part1();
        let in_v2 = offer.devices.first() == Some(&ism);
        proposal.ism.chid = if in_v2 { ism.chid } else { Chid::NONE };
    }
    proposal.v1 = v1.zip(subnet).map(|(types, subnet)| OfferV1 { types, subnet });
    if let Some(types) = v2 {
        let gid = offer.smcr_v2.unwrap_or_default();
        // The associated device has its own field.
        let listed = offer.devices.iter().filter(|device| Some(**device) != ism_v1);
        proposal.v2 = Some(offer_v2(config, route, types, gid, listed)?);
    }
    Ok(offer)
}

/// A Proposal without any offer.
fn empty(config: &Config) -> Proposal {
    let version = if config.kinds.has_v2() { Version::V2 } else { Version::V1 };
    Proposal {
        version,
        peer_id: config.peer_id,
        gid: Gid::NONE,
        mac: Mac::NONE,
        ism: AssociatedIsm { gid: GidV1::NONE, chid: Chid::NONE },
        v1: None,
        v2: None,
    }
}

/// The devices of SMC-Dv2, the associated one first.
fn devices(config: &Config, associated: Option<IsmDevice>) -> Vec<IsmDevice> {
    if !config.kinds.has(SmcKind::SmcdV2) {
        return Vec::new();
    }
    let associated = associated.filter(|ism| config.usable_devices().contains(ism));
    let mut devices = config.offered_devices(associated);
    if let Some(associated) = associated {
        devices.insert(0, associated);
    }
    devices
}

/// The GID of SMC-Rv1. The type needs a subnet as proof and a peer id as identity (CLC-7, CLC-10).
fn smcr_v1(config: &Config, route: &Route, subnet: Option<&Subnet>) -> Option<Gid> {
    let may =
        config.kinds.contains(Kinds::SMCR_V1) && config.peer_id != PeerId::NONE && subnet.is_some();
    route.rnic_v1().filter(|_| may).map(|(_, gid)| gid)
}

fn offer_v2<'a>(
    config: &Config,
    route: &Route,
    types: SmcTypes,
    roce_gid: Gid,
    devices: impl Iterator<Item = &'a IsmDevice>,
) -> Result<OfferV2, DeclineReason> {
    let mut entries = List::new();
    for device in devices.filter(|_| types.has_d()) {
        let (first, second) = IsmOffer { gid: device.gid, chid: device.chid }.entries();
        // `offered_devices` returns no more devices than fit, so no entry is lost here.
        for entry in [Some(first), second].into_iter().flatten() {
            if entries.push(entry).is_err() {
                return Err(DeclineReason::Internal);
            }
        }
    }
    let v2_1 = config.stated_release().has_v2_1_fields();
    Ok(OfferV2 {
        types,
        release: config.stated_release(),
        eids: List::from_slice(config.offered_ueids()).unwrap_or_default(),
        roce_gid,
        limits: match types.has_r() && v2_1 {
            true => config.limits_on(route),
            false => LinkLimits::NONE,
        },
        features: config.stated_features(),
        vendor: config.carriers.filter(|_| v2_1).map(|carriers| carriers.offer(None)),
        smcd: SmcdV2Offer { seid: config.system_eid().filter(|_| types.has_d()), entries },
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::clc::GidChid;
    use crate::wire::ids::{Eid, Features, Release};

    fn config() -> Config {
        let mut config = Config::new(PeerId([9; 8]));
        config.ueids = vec![Eid::new("ALPHA").unwrap()];
        config.devices = vec![
            IsmDevice { chid: Chid(0xff01), gid: Gid([0xab; 16]) },
            IsmDevice { chid: Chid(7), gid: Gid::from_parts(GidV1([7; 8]), GidV1::NONE) },
        ];
        config
    }

    #[test]
    fn offers_emulated_and_platform_devices_in_order() {
        let (proposal, devices) = offer(&config(), &Route::default())
            .map(|offer| (offer.proposal, offer.devices))
            .unwrap();
        let half = GidChid { gid: GidV1([0xab; 8]), chid: Chid(0xff01) };
        let platform = GidChid { gid: GidV1([7; 8]), chid: Chid(7) };
        let v2 = proposal.v2.unwrap();
        assert_eq!(v2.smcd.entries.as_slice(), [half, half, platform]);
        assert_eq!(devices, config().devices);
        assert_eq!(v2.features, Features::EMULATED_ISM);
        assert_eq!(v2.limits, LinkLimits::NONE, "they are for SMC-R");
        assert_eq!(proposal.ism, AssociatedIsm::default());
        assert_eq!(proposal.v1, None);
    }

    // Shows: CLCV2-62.
    #[test]
    fn announces_the_feature_with_platform_devices_only() {
        let mut config = config();
        config.devices.remove(0);
        let (proposal, _) =
            offer(&config, &Route::default()).map(|offer| (offer.proposal, offer.devices)).unwrap();
        assert_eq!(proposal.v2.unwrap().features, Features::EMULATED_ISM);
    }

    #[test]
    fn has_nothing_to_offer_without_device_or_eid() {
        let mut no_device = config();
        no_device.devices.clear();
        assert_eq!(offer(&no_device, &Route::default()), Err(DeclineReason::NoDevice));
        let mut no_eid = config();
        no_eid.ueids.clear();
        assert_eq!(offer(&no_eid, &Route::default()), Err(DeclineReason::NoEidConfigured));
        no_eid.seid = Some(Eid::new("SYSTEM").unwrap());
        assert!(offer(&no_eid, &Route::default()).is_ok());
        let mut old = config();
        old.release = Release::V2_0;
        old.devices.truncate(1);
        assert_eq!(
            offer(&old, &Route::default()),
            Err(DeclineReason::NoDevice),
            "emulated devices need v2.1"
        );
    }
}
