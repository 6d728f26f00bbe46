//! Who may talk to whom, and on what terms: values in, values out, nothing remembered.
//!
//! - [`offer`]: what a client puts into its Proposal;
//! - [`evaluate`]: what a server makes of a Proposal, type by type;
//! - [`check_accept`]: what a client thinks of the server's choice;
//! - [`check_confirm`]: whether a client repeats what the server chose.
//!
//! The structs that await a message, such as [`AwaitAccept`](super::AwaitAccept), put these in
//! order.

mod agree;
mod limits;
mod select;

pub use agree::{Agreed, Refusal, check_accept, check_confirm};
pub use limits::{final_limits, negotiate_limits};
pub use select::{Candidate, Evaluation, Refusals, SmcdMatch, evaluate};

use super::config::{Config, IsmDevice};
use super::decline::DeclineReason;
use crate::wire::List;
use crate::wire::clc::{
    AssociatedIsm, IsmOffer, OfferV2, Proposal, SmcTypes, SmcdV2Offer, Version,
};
use crate::wire::ids::{Features, Gid, LinkLimits, Mac, Release};

/// What holds between two ends for as long as they know each other (CLCV2-50).
///
/// Agreed at first contact and kept by the caller per (CHID, GID); later handshakes do not carry
/// it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Terms {
    /// The lower of the two releases (CLCV2-36, CLCV2-86).
    pub release: Release,
    /// The features that both ends announced (CLCV2-61).
    pub features: Features,
}

/// What this host offers as a client: SMC-D version 2 on its devices and EIDs.
///
/// The result is the same for every connection (CLC-9) and binds no resource (CLC-11). The field
/// for an associated ISM GID stays zero: version 1 is not offered, emulated devices must not stand
/// there (EISM-4, EISM-5), and Linux misreads other values there (D-7). Without SMC-R there are no
/// link limits to wish for (CLCV2-25, CLCV2-95), and vendor options are not offered (CLCV2-13,
/// CLCV2-41).
///
/// # Errors
///
/// [`DeclineReason::NoDevice`] or [`DeclineReason::NoEidConfigured`] if there is nothing to offer.
pub fn offer(config: &Config) -> Result<(Proposal, Vec<IsmDevice>), DeclineReason> {
    let devices = config.offered_devices();
    if devices.is_empty() {
        return Err(DeclineReason::NoDevice);
    }
    let ueids = config.offered_ueids();
    if ueids.is_empty() && config.system_eid().is_none() {
        return Err(DeclineReason::NoEidConfigured);
    }
    let mut entries = List::new();
    for device in &devices {
        let (first, second) = IsmOffer { gid: device.gid, chid: device.chid }.entries();
        // `offered_devices` leaves out what does not fit, so no entry is lost here.
        for entry in [Some(first), second].into_iter().flatten() {
            if entries.push(entry).is_err() {
                return Err(DeclineReason::Internal);
            }
        }
    }
    let v2 = OfferV2 {
        types: SmcTypes::D,
        release: config.stated_release(),
        eids: List::from_slice(ueids).unwrap_or_default(),
        roce_gid: Gid::NONE,
        limits: LinkLimits::NONE,
        features: config.stated_features(),
        vendor: None,
        smcd: SmcdV2Offer { seid: config.system_eid(), entries },
    };
    let proposal = Proposal {
        version: Version::V2,
        peer_id: config.peer_id,
        gid: Gid::NONE,
        mac: Mac::NONE,
        ism: AssociatedIsm::default(),
        v1: None,
        v2: Some(v2),
    };
    Ok((proposal, devices))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::clc::GidChid;
    use crate::wire::ids::{Chid, Eid, GidV1, PeerId};

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
        let (proposal, devices) = offer(&config()).unwrap();
        let half = GidChid { gid: GidV1([0xab; 8]), chid: Chid(0xff01) };
        let platform = GidChid { gid: GidV1([7; 8]), chid: Chid(7) };
        let v2 = proposal.v2.unwrap();
        assert_eq!(v2.smcd.entries.as_slice(), [half, half, platform]);
        assert_eq!(devices, config().devices);
        assert_eq!(v2.features, Features::EMULATED_ISM);
        assert_eq!(proposal.ism, AssociatedIsm::default());
        assert_eq!(proposal.v1, None);
    }

    #[test]
    fn announces_the_feature_with_platform_devices_only() {
        let mut config = config();
        config.devices.remove(0);
        let (proposal, _) = offer(&config).unwrap();
        assert_eq!(proposal.v2.unwrap().features, Features::EMULATED_ISM);
    }

    #[test]
    fn has_nothing_to_offer_without_device_or_eid() {
        let mut no_device = config();
        no_device.devices.clear();
        assert_eq!(offer(&no_device), Err(DeclineReason::NoDevice));
        let mut no_eid = config();
        no_eid.ueids.clear();
        assert_eq!(offer(&no_eid), Err(DeclineReason::NoEidConfigured));
        no_eid.seid = Some(Eid::new("SYSTEM").unwrap());
        assert!(offer(&no_eid).is_ok());
        let mut old = config();
        old.release = Release::V2_0;
        old.devices.truncate(1);
        assert_eq!(offer(&old), Err(DeclineReason::NoDevice), "emulated devices need v2.1");
    }
}
