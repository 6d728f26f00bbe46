// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! An ISM device of this host.

use crate::wire::ids::{Chid, Gid};

/// An ISM device of this host: its fabric and its address there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct IsmDevice {
    /// The fabric. A device with the CHID of an earlier one is not used: Accept identifies the
    /// device by the CHID alone.
    pub chid: Chid,
    /// The address: 128 bits for an emulated device; for a platform device the second half is zero
    /// (EISM-9).
    pub gid: Gid,
}

impl IsmDevice {
    /// Entries of the GID/CHID array this device takes (EISM-11, EISM-12).
    pub const fn entries(self) -> usize {
        if self.chid.is_emulated() { 2 } else { 1 }
    }
}
