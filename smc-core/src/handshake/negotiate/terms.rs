// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What two ends of SMC-D agree on at first contact.

use crate::handshake::config::Config;
use crate::wire::clc::OfferV2;
use crate::wire::ids::{Features, Release};

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

impl Terms {
    /// What SMC-D version 1 agrees on: nothing.
    pub const V1: Terms = Terms { release: Release::V2_0, features: Features::empty() };
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
