// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The agreement of two ends of SMC-D at first contact.

use crate::handshake::config::Config;
use crate::handshake::decline::DeclineReason;
use crate::wire::clc::{CarrierOptions, OfferV2};
use crate::wire::ids::{Features, Release};

/// Terms in force between two ends for the life of the logical link (CLCV2-50).
///
/// Agreed at first contact and kept by the caller per (CHID, GID); later handshakes do not repeat
/// the terms.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Terms {
    /// The lower of the two releases (CLCV2-36, CLCV2-86).
    pub release: Release,
    /// The features announced by both ends (CLCV2-61).
    pub features: Features,
    /// Records on TCP; `None` unless both ends have announced them (CLCV2-15).
    pub carriers: Option<CarrierOptions>,
}

impl Terms {
    /// The terms of SMC-D version 1, which agrees on nothing.
    pub const V1: Terms =
        Terms { release: Release::V2_0, features: Features::empty(), carriers: None };
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
    Terms { release, features, carriers: common_carriers(config, release, v2) }
}

/// The server's part of a client's options for records (CLCV2-16). Another vendor's options, and
/// invalid ones, count as none (CLCV2-15).
fn common_carriers(config: &Config, release: Release, v2: &OfferV2) -> Option<CarrierOptions> {
    let offered = v2.vendor.and_then(|offer| CarrierOptions::from_offer(&offer).ok().flatten())?;
    config.carriers_at(release).map(|own| own.common(offered))
}

/// The options for records in the `answer` of Accept, at the release of Accept.
///
/// # Errors
/// The answer does not match the offer: the server would send records unknown to this end.
pub(super) fn answered_carriers(
    config: &Config,
    release: Release,
    answer: [u8; 4],
) -> Result<Option<CarrierOptions>, DeclineReason> {
    match config.carriers_at(release) {
        // Nothing was offered, so nothing is meant (CLCV2-15).
        None => Ok(None),
        Some(offered) => CarrierOptions::from_answer(offered, answer)
            .map_err(|_| DeclineReason::Vendor { agreed: offered.answer(), got: answer }),
    }
}

/// Whether Confirm repeats the vendor options of Accept (CLCV2-17). A server without accepted
/// options ignores Confirm's options (B-12).
///
/// # Errors
/// [`DeclineReason::Vendor`].
pub(super) fn check_vendor(
    accepted: Option<CarrierOptions>,
    got: [u8; 4],
) -> Result<(), DeclineReason> {
    match accepted.map(CarrierOptions::answer) {
        Some(agreed) if agreed != got => Err(DeclineReason::Vendor { agreed, got }),
        _ => Ok(()),
    }
}
