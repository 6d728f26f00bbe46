// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Names of things on a fabric: CHID, GID, token.

use core::fmt;

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// A fabric id (SMCv2.1 "CHID").
///
/// 0xFF00 to 0xFFFE are virtio-ism fabrics, 0xFFFF is loopback (EISM-6, EISM-7).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Chid(pub u16);

impl Chid {
    /// Loopback: all members are one operating system instance and share one GID.
    pub const LOOPBACK: Chid = Chid(0xffff);
    /// First CHID of the virtio-ism range.
    pub const VIRTIO_FIRST: Chid = Chid(0xff00);
    /// Last CHID of the virtio-ism range.
    pub const VIRTIO_LAST: Chid = Chid(0xfffe);

    /// Whether this is the loopback CHID.
    pub const fn is_loopback(self) -> bool {
        self.0 == Self::LOOPBACK.0
    }

    /// Whether this CHID is reserved for emulated devices (loopback included).
    pub const fn is_emulated(self) -> bool {
        self.0 >= Self::VIRTIO_FIRST.0
    }
}

impl fmt::Display for Chid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04x}", self.0)
    }
}

/// A 128-bit extended GID: the 16 bytes of a version 4 UUID in wire order (EISM-9, EISM-10).
#[derive(
    Clone,
    Copy,
    Default,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    FromBytes,
    IntoBytes,
    KnownLayout,
    Immutable,
    Unaligned,
)]
#[repr(transparent)]
pub struct Gid(pub [u8; 16]);

impl Gid {
    /// The all-zero GID: no device.
    pub const NONE: Gid = Gid([0; 16]);

    /// Bytes 0 to 7, called "GID" by SMC.
    pub fn part1(self) -> [u8; 8] {
        let [a, b, c, d, e, f, g, h, ..] = self.0;
        [a, b, c, d, e, f, g, h]
    }

    /// Bytes 8 to 15, called "extended GID" by SMC.
    pub fn part2(self) -> [u8; 8] {
        let [.., a, b, c, d, e, f, g, h] = self.0;
        [a, b, c, d, e, f, g, h]
    }
}

impl fmt::Display for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, byte) in self.0.iter().enumerate() {
            if matches!(i, 4 | 6 | 8 | 10) {
                f.write_str("-")?;
            }
            write!(f, "{byte:02x}")?;
        }
        Ok(())
    }
}

impl fmt::Debug for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The 64-bit right to write one DMB. Secret: `Debug` does not show it.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Token(pub u64);

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(..)")
    }
}

#[cfg(test)]
mod tests {
    extern crate std;
    use super::*;
    use std::string::ToString;

    #[test]
    fn gid_prints_as_a_uuid_and_splits_in_wire_order() {
        let gid = Gid([
            0x3f, 0x31, 0xe2, 0x2c, 0xf0, 0xfe, 0x4e, 0xbf, 0x8c, 0xb6, 0xe7, 0xfb, 0x5f, 0xa4,
            0x37, 0x3b,
        ]);
        assert_eq!(gid.to_string(), "3f31e22c-f0fe-4ebf-8cb6-e7fb5fa4373b");
        assert_eq!(gid.part1(), [0x3f, 0x31, 0xe2, 0x2c, 0xf0, 0xfe, 0x4e, 0xbf]);
        assert_eq!(gid.part2(), [0x8c, 0xb6, 0xe7, 0xfb, 0x5f, 0xa4, 0x37, 0x3b]);
    }

    #[test]
    fn emulated_range_has_the_bounds_of_the_specification() {
        assert!(!Chid(0xfeff).is_emulated());
        assert!(Chid(0xff00).is_emulated() && !Chid(0xff00).is_loopback());
        assert!(Chid(0xffff).is_emulated() && Chid(0xffff).is_loopback());
    }
}
