// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Coded values: sizes, MTUs, releases, features, 24-bit numbers.

use core::fmt;

use crate::wire::WireError;

/// Size of an RMB or DMB element: code `n` is 16 KiB << n (CLC-30, RMB-31).
///
/// The four bits of the field hold 0 to 15. RFC 7609 stops at 5 (512 KiB), Linux uses up to 6 for
/// SMC-D and 15 for SMC-R; the limits of a parser are in [`crate::wire::clc::Limits`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SizeCode(u8);

impl SizeCode {
    /// 16 KiB, the smallest.
    pub const MIN: SizeCode = SizeCode(0);
    /// 512 KiB, the largest size defined by RFC 7609.
    pub const RFC_MAX: SizeCode = SizeCode(5);
    /// 1 MiB, Linux's largest SMC-D element.
    pub const SMCD_MAX: SizeCode = SizeCode(6);
    /// 512 MiB, the largest size in the range of the field.
    pub const FIELD_MAX: SizeCode = SizeCode(15);

    /// The code `n`, or `None` above 15.
    pub const fn new(n: u8) -> Option<SizeCode> {
        if n <= Self::FIELD_MAX.0 { Some(SizeCode(n)) } else { None }
    }

    /// The smallest code whose size is at least `bytes` (RMB-13), or `None` above 512 MiB.
    pub fn at_least(bytes: u64) -> Option<SizeCode> {
        (0..=Self::FIELD_MAX.0).map(SizeCode).find(|code| u64::from(code.bytes()) >= bytes)
    }

    /// The number in the field.
    pub const fn code(self) -> u8 {
        self.0
    }

    /// The size of the whole element, eye catcher or control block included, bytes.
    pub const fn bytes(self) -> u32 {
        16384 << self.0
    }
}

/// QP MTU as the four-bit code of the field, reserved codes included (CLC-27).
///
/// The MTU is meaningful at first contact only (CLC-28), so the value is kept unchecked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Mtu(u8);

impl Mtu {
    /// 1024 bytes.
    pub const B1024: Mtu = Mtu(3);
    /// 4096 bytes, the largest.
    pub const B4096: Mtu = Mtu(5);

    /// The low four bits of `code`.
    pub const fn from_code(code: u8) -> Mtu {
        Mtu(code & 0x0f)
    }

    /// The number in the field.
    pub const fn code(self) -> u8 {
        self.0
    }

    /// The MTU in bytes.
    ///
    /// # Errors
    /// [`WireError::ReservedValue`] for 0 and 6 to 15: Decline (CLC-29).
    pub const fn bytes(self) -> Result<u32, WireError> {
        match self.0 {
            1..=5 => Ok(128 << self.0),
            value => Err(WireError::ReservedValue { field: "MTU", value }),
        }
    }
}

macro_rules! bits24 {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(u32);

        impl $name {
            /// The low 24 bits of `value`.
            pub const fn new(value: u32) -> $name {
                $name(value & 0x00ff_ffff)
            }

            /// The number.
            pub const fn get(self) -> u32 {
                self.0
            }

            /// The three bytes of the field.
            pub const fn to_be_bytes(self) -> [u8; 3] {
                let [_, a, b, c] = self.0.to_be_bytes();
                [a, b, c]
            }

            /// The number in the three bytes of the field.
            pub const fn from_be_bytes(bytes: [u8; 3]) -> $name {
                let [a, b, c] = bytes;
                $name(u32::from_be_bytes([0, a, b, c]))
            }
        }
    };
}

bits24! {
    /// Queue pair number, 24 bits.
    Qpn
}
bits24! {
    /// First packet sequence number of the sender, 24 bits (CLC-31).
    Psn
}

/// Remote key of an RDMA memory region.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Rkey(pub u32);

/// Operating system code of a first contact extension or Decline, four bits (CLCV2-53).
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct OsType(u8);

impl OsType {
    /// z/OS.
    pub const ZOS: OsType = OsType(1);
    /// Linux.
    pub const LINUX: OsType = OsType(2);
    /// AIX.
    pub const AIX: OsType = OsType(3);
    /// Unknown.
    pub const UNKNOWN: OsType = OsType(15);

    /// The low four bits of `code`.
    pub const fn from_code(code: u8) -> OsType {
        OsType(code & 0x0f)
    }

    /// The number in the field.
    pub const fn code(self) -> u8 {
        self.0
    }
}

impl fmt::Display for OsType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            OsType::ZOS => f.write_str("z/OS"),
            OsType::LINUX => f.write_str("Linux"),
            OsType::AIX => f.write_str("AIX"),
            OsType::UNKNOWN => f.write_str("unknown"),
            OsType(other) => write!(f, "code {other}"),
        }
    }
}

impl fmt::Debug for OsType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "OsType({self})")
    }
}

/// Release of SMC version 2, four bits: 0 is v2.0, 1 is v2.1 (CLCV2-19).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Release(u8);

impl Release {
    /// SMCv2.0.
    pub const V2_0: Release = Release(0);
    /// SMCv2.1.
    pub const V2_1: Release = Release(1);

    /// The low four bits of `code`.
    pub const fn from_code(code: u8) -> Release {
        Release(code & 0x0f)
    }

    /// The number in the field.
    pub const fn code(self) -> u8 {
        self.0
    }

    /// Whether the fields added by v2.1 are defined.
    pub const fn has_v2_1_fields(self) -> bool {
        self.0 >= Self::V2_1.0
    }
}

impl fmt::Display for Release {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "v2.{}", self.0)
    }
}

bitflags::bitflags! {
    /// Supplemental features of SMCv2.1 (CLCV2-24). Undefined bits are dropped on parse.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct Features: u16 {
        /// Emulated-ISM devices are understood (EISM-1).
        const EMULATED_ISM = 0x0001;
    }
}

/// Connections and links per link group of SMC-Rv2.1 (CLCV2-22, CLCV2-23).
///
/// The values are kept unchecked: a Proposal has wishes, moved into the range by the server; the
/// values of an Accept are final (CLCV2-57, CLCV2-58).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct LinkLimits {
    /// Connections, 16 to 255; 0 if SMC-R is not offered.
    pub max_conns: u8,
    /// Links, 1 or 2; 0 where SMC-R is not offered.
    pub max_links: u8,
}

impl LinkLimits {
    /// Both zero: SMC-R is not offered, or release v2.0.
    pub const NONE: LinkLimits = LinkLimits { max_conns: 0, max_links: 0 };

    /// Limits valid for sending, or `None` if one is out of its range.
    pub const fn new(max_conns: u8, max_links: u8) -> Option<LinkLimits> {
        let limits = LinkLimits { max_conns, max_links };
        if limits.in_range() { Some(limits) } else { None }
    }

    /// Whether both values are in the range of the specification.
    pub const fn in_range(self) -> bool {
        self.max_conns >= 16 && matches!(self.max_links, 1 | 2)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // Shows: CLC-30, RMB-31.
    #[test]
    fn size_codes_follow_the_table() {
        let kib: Vec<u32> = (0..=6).map(|n| SizeCode::new(n).unwrap().bytes() / 1024).collect();
        assert_eq!(kib, [16, 32, 64, 128, 256, 512, 1024]);
        assert_eq!(SizeCode::FIELD_MAX.bytes(), 512 * 1024 * 1024);
        assert_eq!(SizeCode::new(16), None);
    }

    // Shows: RMB-13.
    #[test]
    fn smallest_code_that_holds_a_size() {
        assert_eq!(SizeCode::at_least(0), Some(SizeCode::MIN));
        assert_eq!(SizeCode::at_least(16384), Some(SizeCode::MIN));
        assert_eq!(SizeCode::at_least(16385), SizeCode::new(1));
        assert_eq!(SizeCode::at_least(u64::MAX), None);
    }

    // Shows: CLC-27.
    #[test]
    fn mtu_codes_follow_the_table_and_others_are_reserved() {
        let bytes: Vec<u32> = (1..=5).map(|n| Mtu::from_code(n).bytes().unwrap()).collect();
        assert_eq!(bytes, [256, 512, 1024, 2048, 4096]);
        for value in [0, 6, 7, 15] {
            let reserved = WireError::ReservedValue { field: "MTU", value };
            assert_eq!(Mtu::from_code(value).bytes(), Err(reserved));
        }
    }

    // Shows: CLC-31.
    #[test]
    fn numbers_of_24_bits_keep_to_them() {
        assert_eq!(Qpn::new(0xff12_3456).to_be_bytes(), [0x12, 0x34, 0x56]);
        assert_eq!(Psn::from_be_bytes([0x87, 0xe8, 0xec]).get(), 0x0087_e8ec);
    }

    // Shows: CLCV2-22, CLCV2-23.
    #[test]
    fn link_limits_to_send_are_in_range() {
        assert!(LinkLimits::new(16, 1).is_some() && LinkLimits::new(255, 2).is_some());
        for (conns, links) in [(0, 1), (15, 1), (16, 0), (16, 3)] {
            assert_eq!(LinkLimits::new(conns, links), None);
        }
    }
}
