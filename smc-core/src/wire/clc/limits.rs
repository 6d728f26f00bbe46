// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A receiver's limits for enumerated values with a difference between the specifications and
//! Linux.

use crate::wire::ids::SizeCode;

/// Largest element sizes taken from a peer; a larger one is a reserved value (wire errata A-14).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Largest DMB element of SMC-D.
    pub smcd_size: SizeCode,
    /// Largest RMB element of SMC-R.
    pub smcr_size: SizeCode,
}

impl Limits {
    /// Linux's limits: 1 MiB for SMC-D, any code for SMC-R.
    pub const LINUX: Limits =
        Limits { smcd_size: SizeCode::SMCD_MAX, smcr_size: SizeCode::FIELD_MAX };
    /// RFC 7609's limit: 512 KiB (CLC-30).
    pub const RFC: Limits = Limits { smcd_size: SizeCode::RFC_MAX, smcr_size: SizeCode::RFC_MAX };
}

impl Default for Limits {
    fn default() -> Self {
        Limits::LINUX
    }
}

/// Most EIDs, GID-CHID entries, IPv6 prefixes and GID list entries in a message.
pub const MAX_ENTRIES: usize = 8;
