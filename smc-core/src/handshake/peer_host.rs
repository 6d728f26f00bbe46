// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The peer's description of its host.

use crate::wire::clc::Fce;
use crate::wire::ids::{Hostname, OsType};

/// The peer's description of its host at first contact (CLCV2-51 to -53). The operating system
/// decides on the LLC dialect; the rest is for people.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerHost {
    /// Operating system.
    pub os: OsType,
    /// Host name; [`Hostname::text`] is `None` for an invalid name (CLCV2-52).
    pub hostname: Hostname,
    /// Answer to the offered vendor options; zero without one (CLCV2-15, CLCV2-16).
    pub vendor: [u8; 4],
}

impl From<&Fce> for PeerHost {
    fn from(fce: &Fce) -> PeerHost {
        PeerHost { os: fce.os, hostname: fce.hostname, vendor: fce.vendor }
    }
}
