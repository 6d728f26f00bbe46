// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Addresses and identities: GIDs, CHIDs, peers, MACs, tokens.

use core::fmt;

/// A fabric id ("CHID"). 0xFF00 to 0xFFFE are virtio-ism, 0xFFFF is loopback (EISM-6, EISM-7).
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Chid(pub u16);

impl Chid {
    /// No CHID: the field of a Proposal without an associated ISM device.
    pub const NONE: Chid = Chid(0);
    /// Loopback: one operating system instance talks to itself.
    pub const LOOPBACK: Chid = Chid(0xffff);

    /// Whether the CHID is of the range reserved for emulated devices, loopback included (EISM-8).
    pub const fn is_emulated(self) -> bool {
        self.0 >= 0xff00
    }

    /// Whether this is the loopback CHID.
    pub const fn is_loopback(self) -> bool {
        self.0 == Self::LOOPBACK.0
    }
}

impl fmt::Display for Chid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04x}", self.0)
    }
}

impl fmt::Debug for Chid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Chid({self})")
    }
}

/// The 64-bit GID of a platform ISM device, or one half of a [`Gid`].
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GidV1(pub [u8; 8]);

impl GidV1 {
    /// Zero: no device.
    pub const NONE: GidV1 = GidV1([0; 8]);

    /// Whether this is [`GidV1::NONE`].
    pub fn is_none(self) -> bool {
        self == Self::NONE
    }
}

impl fmt::Display for GidV1 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", u64::from_be_bytes(self.0))
    }
}

impl fmt::Debug for GidV1 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "GidV1({self})")
    }
}

/// A 128-bit GID in wire order.
///
/// For an emulated ISM device a GID is a UUID, sent as two halves (EISM-9, EISM-11); for RoCE, an
/// IPv6-style GID (SMC-Rv1) or an IP address (SMC-Rv2).
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Gid(pub [u8; 16]);

impl Gid {
    /// Zero: no device.
    pub const NONE: Gid = Gid([0; 16]);

    /// Whether this is [`Gid::NONE`].
    pub fn is_none(self) -> bool {
        self == Self::NONE
    }

    /// Puts the two halves together.
    pub const fn from_parts(part1: GidV1, part2: GidV1) -> Gid {
        let [a, b, c, d, e, f, g, h] = part1.0;
        let [i, j, k, l, m, n, o, p] = part2.0;
        Gid([a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p])
    }

    /// Bytes 0 to 7, called the GID by SMC.
    pub const fn part1(self) -> GidV1 {
        let [a, b, c, d, e, f, g, h, ..] = self.0;
        GidV1([a, b, c, d, e, f, g, h])
    }

    /// Bytes 8 to 15, called the extended GID by SMC.
    pub const fn part2(self) -> GidV1 {
        let [.., a, b, c, d, e, f, g, h] = self.0;
        GidV1([a, b, c, d, e, f, g, h])
    }

    /// The RoCEv2 GID of an IPv4 address, in the mapped form (CLCV2-21).
    pub const fn from_ipv4(address: [u8; 4]) -> Gid {
        let [a, b, c, d] = address;
        Gid([0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, a, b, c, d])
    }

    /// The IPv4 address of a RoCEv2 GID: twelve zero bytes or `::ffff:` before it (CLCV2-21,
    /// LLCV2-16).
    pub const fn to_ipv4(self) -> Option<[u8; 4]> {
        match self.0 {
            [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, x, y, a, b, c, d]
                if (x == 0xff && y == 0xff) || (x == 0 && y == 0) =>
            {
                Some([a, b, c, d])
            }
            _ => None,
        }
    }

    /// Whether two RoCEv2 GIDs are one address, in any IPv4 form (CLCV2-21).
    pub fn same_address(self, other: Gid) -> bool {
        match (self.to_ipv4(), other.to_ipv4()) {
            (Some(a), Some(b)) => a == b,
            _ => self == other,
        }
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
        write!(f, "Gid({self})")
    }
}

/// An Ethernet address.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Mac(pub [u8; 6]);

impl Mac {
    /// Zero: not given (Linux in Proposals without SMC-Rv1).
    pub const NONE: Mac = Mac([0; 6]);
}

impl fmt::Display for Mac {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

impl fmt::Debug for Mac {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Mac({self})")
    }
}

/// An SMC-R stack instance: 2 bytes with a new value at each start, 6 bytes MAC (RFC 7609 A.2.1).
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PeerId(pub [u8; 8]);

impl PeerId {
    /// Zero: not given.
    pub const NONE: PeerId = PeerId([0; 8]);

    /// Builds the id of one stack instance (CLC-7, CLC-8).
    pub const fn new(instance: u16, mac: Mac) -> PeerId {
        let [i, j] = instance.to_be_bytes();
        let [a, b, c, d, e, f] = mac.0;
        PeerId([i, j, a, b, c, d, e, f])
    }

    /// The instance number, new at each start.
    pub const fn instance(self) -> u16 {
        let [i, j, ..] = self.0;
        u16::from_be_bytes([i, j])
    }

    /// The MAC of one of the host's adapters.
    pub const fn mac(self) -> Mac {
        let [_, _, a, b, c, d, e, f] = self.0;
        Mac([a, b, c, d, e, f])
    }
}

impl fmt::Display for PeerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04x}@{}", self.instance(), self.mac())
    }
}

impl fmt::Debug for PeerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PeerId({self})")
    }
}

/// The 64-bit right to write one DMB (EISM-27). A secret: `Debug` does not show it.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct DmbToken(pub u64);

impl fmt::Debug for DmbToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("DmbToken(..)")
    }
}

/// The sender's number of a logical link, in the sender's byte order (SMC-D Accept and Confirm
/// +28).
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct LinkId(pub [u8; 4]);

impl fmt::Debug for LinkId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LinkId({:08x})", u32::from_be_bytes(self.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const UUID: Gid = Gid([
        0x3f, 0x31, 0xe2, 0x2c, 0xf0, 0xfe, 0x4e, 0xbf, 0x8c, 0xb6, 0xe7, 0xfb, 0x5f, 0xa4, 0x37,
        0x3b,
    ]);

    // Shows: EISM-9.
    #[test]
    fn gid_splits_into_halves_and_prints_as_a_uuid() {
        assert_eq!(UUID.to_string(), "3f31e22c-f0fe-4ebf-8cb6-e7fb5fa4373b");
        assert_eq!(UUID.part1().to_string(), "3f31e22cf0fe4ebf");
        assert_eq!(Gid::from_parts(UUID.part1(), UUID.part2()), UUID);
    }

    // Shows: CLCV2-21, LLCV2-16.
    #[test]
    fn both_ipv4_forms_are_one_address() {
        let mapped = Gid::from_ipv4([10, 9, 0, 1]);
        let mut aligned = mapped;
        aligned.0[10] = 0;
        aligned.0[11] = 0;
        assert!(mapped.same_address(aligned));
        assert_ne!(mapped, aligned);
        let mut half = mapped;
        half.0[11] = 0;
        assert_eq!(half.to_ipv4(), None);
        assert!(!UUID.same_address(mapped));
    }

    // Shows: EISM-6, EISM-7, EISM-8.
    #[test]
    fn emulated_chids_have_the_bounds_of_the_specification() {
        assert!(!Chid(0xfeff).is_emulated());
        assert!(Chid(0xff00).is_emulated() && !Chid(0xfffe).is_loopback());
        assert!(Chid(0xffff).is_emulated() && Chid(0xffff).is_loopback());
    }

    // Shows: CLC-7.
    #[test]
    fn peer_id_is_instance_then_mac() {
        let id = PeerId::new(0x95ca, Mac([0x52, 0x54, 0, 0, 0, 1]));
        assert_eq!(id.0, [0x95, 0xca, 0x52, 0x54, 0, 0, 0, 1]);
        assert_eq!((id.instance(), id.mac()), (0x95ca, Mac([0x52, 0x54, 0, 0, 0, 1])));
    }

    #[test]
    fn debug_hides_the_token() {
        assert_eq!(format!("{:?}", DmbToken(0x1234_5678)), "DmbToken(..)");
    }
}
