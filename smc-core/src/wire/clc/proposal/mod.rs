// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Proposal: a client's offer (RFC 7609 A.2.2; SMCv2 "CLC Proposal base message").
//!
//! Version 1, 52 bytes for IPv4 and 52 + 17n for n IPv6 prefixes:
//!
//! ```text
//!  0 header SMCR | 8 peer id | 16 GID | 32 MAC | 38 offset o to the subnet extension, from 40
//! 40 + o: 0 IPv4 subnet | 4 mask bits | 5 reserved | 7 n | 8 n prefixes of 16 + 1 bytes
//! ```
//!
//! Version 2, and version 1 with SMC-D, have an area of 40 bytes between, then extensions in this
//! order. An offset counts from behind its own field:
//!
//! ```text
//! 40 ISM GID | 48 CHID | 50 offset to the V2 extension, from 52 | 52 OUI (3), options (5) | 60 res
//! 80 IP subnet extension, if a version 1 type is offered
//!    V2 extension, if a version 2 type is offered:
//!       0 e EIDs | 1 g entries | 2 res | 3 release (high nibble), 01 SEID offered | 4 reserved
//!       6 offset to the SMC-Dv2 extension, from 8 | 8 RoCEv2 GID | 24 max connections, max links
//!      26 features | 28 reserved | 40 e EIDs of 32 bytes
//!    SMC-Dv2 extension:  0 SEID | 32 reserved | 48 g entries of 8 + 2 bytes
//!    trailer
//! ```
//!
//! Parsing takes any offsets to areas in this order without overlap (CLC-14, CLCV2-7); emitting
//! puts every area directly behind the one before.

mod emit;
mod parse;

use super::{GidChid, IsmOffers, MAX_ENTRIES, Version};
use crate::wire::ids::{Chid, Eid, Features, Gid, GidV1, LinkLimits, Mac, PeerId, Release};
use crate::wire::{List, WireError};

/// Offered SMC types of one version. "None" is the absence of the offer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SmcTypes {
    /// SMC-R only.
    R,
    /// SMC-D only.
    D,
    /// Both.
    Both,
}

impl SmcTypes {
    /// The types said by two bits of byte 7; 10 is "none" (CLCV2-2).
    pub(in crate::wire) fn from_bits(bits: u8) -> Option<SmcTypes> {
        match bits & 0b11 {
            0b00 => Some(SmcTypes::R),
            0b01 => Some(SmcTypes::D),
            0b11 => Some(SmcTypes::Both),
            _ => None,
        }
    }

    /// The two bits for an offer, or for the absence of one.
    fn to_bits(types: Option<SmcTypes>) -> u8 {
        match types {
            Some(SmcTypes::R) => 0b00,
            Some(SmcTypes::D) => 0b01,
            None => 0b10,
            Some(SmcTypes::Both) => 0b11,
        }
    }

    /// Whether SMC-R is offered.
    pub const fn has_r(self) -> bool {
        matches!(self, SmcTypes::R | SmcTypes::Both)
    }

    /// Whether SMC-D is offered.
    pub const fn has_d(self) -> bool {
        matches!(self, SmcTypes::D | SmcTypes::Both)
    }
}

/// An IPv6 prefix.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct IpPrefix {
    /// Prefix, the rest zero.
    pub address: [u8; 16],
    /// Significant bits, 0 to 128.
    pub bits: u8,
}

/// The client's IP subnet (RFC 7609 A.2.2, CLC-15, CLC-16).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Subnet {
    /// IPv4 subnet.
    V4 {
        /// Network number: the interface's address with the host part zero (wire errata A-1).
        network: [u8; 4],
        /// Significant bits, 0 to 32.
        bits: u8,
    },
    /// IPv6 prefixes, 1 to 8. An empty list looks like `V4` on the wire.
    V6(List<IpPrefix, MAX_ENTRIES>),
}

/// Offer of SMC version 1 types.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OfferV1 {
    /// The types.
    pub types: SmcTypes,
    /// Subnet shared by server and client.
    pub subnet: Subnet,
}

/// The ISM device associated with the client's IP interface; serves SMC-Dv1 and, with a CHID,
/// SMC-Dv2 (CLCV2-11). Never an emulated device (EISM-5).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AssociatedIsm {
    /// 64-bit GID.
    pub gid: GidV1,
    /// The device's fabric; [`Chid::NONE`] unless SMC-Dv2 is offered with the device.
    pub chid: Chid,
}

/// Vendor experimental options of v2.1: the vendor, and five bytes of its own (CLCV2-13).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct VendorOffer {
    pub(super) oui: [u8; 3],
    pub(super) options: [u8; 5],
}

impl VendorOffer {
    /// Options of the vendor `oui`.
    ///
    /// # Errors
    /// [`WireError::VendorOptionsWithoutOui`] for OUI zero, meaning "no options" (CLCV2-14).
    pub const fn new(oui: [u8; 3], options: [u8; 5]) -> Result<VendorOffer, WireError> {
        match oui {
            [0, 0, 0] => Err(WireError::VendorOptionsWithoutOui(options)),
            _ => Ok(VendorOffer { oui, options }),
        }
    }

    /// The vendor.
    pub const fn oui(&self) -> [u8; 3] {
        self.oui
    }

    /// The vendor's options.
    pub const fn options(&self) -> [u8; 5] {
        self.options
    }
}

/// The SMC-D part of a version 2 offer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SmcdV2Offer {
    /// System EID, if offered (EID-13).
    pub seid: Option<Eid>,
    /// Unassociated devices, raw; see [`SmcdV2Offer::devices`].
    pub entries: List<GidChid, MAX_ENTRIES>,
}

impl SmcdV2Offer {
    /// The unassociated devices in the client's order.
    pub fn devices(&self) -> IsmOffers<'_> {
        IsmOffers::new(&self.entries)
    }
}

/// Offer of SMC version 2 types (SMCv2 "V2 extension").
///
/// Fields without a meaning for the offered types or the release are empty and not sent; such
/// fields of a received message are ignored (CLCV2-5, CLCV2-25).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OfferV2 {
    /// The types.
    pub types: SmcTypes,
    /// Release of the client.
    pub release: Release,
    /// User EIDs.
    pub eids: List<Eid, MAX_ENTRIES>,
    /// RoCEv2 address; SMC-R only.
    pub roce_gid: Gid,
    /// Wishes for the link group; SMC-R of v2.1 only.
    pub limits: LinkLimits,
    /// Supplemental features; v2.1 only.
    pub features: Features,
    /// Vendor options; v2.1 only.
    pub vendor: Option<VendorOffer>,
    /// SMC-D part; empty unless `types` has SMC-D.
    pub smcd: SmcdV2Offer,
}

/// A Proposal message.
///
/// Version 1 is sent in the form of RFC 7609 (52 bytes for IPv4), with the SMC-D area in the middle
/// if SMC-Dv1 is offered (92 bytes); version 2 always has the base of 80 bytes, with the fields of
/// version 1 at the places expected by version 1 servers (CLCV2-3).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Proposal {
    /// Highest version of the client.
    pub version: Version,
    /// SMC-R stack instance; zero in Linux without SMC-Rv1 (wire errata D-14, CLCV2-96).
    pub peer_id: PeerId,
    /// Preferred RoCE GID of SMC-Rv1.
    pub gid: Gid,
    /// Preferred RNIC; zero in Linux without SMC-Rv1.
    pub mac: Mac,
    /// Associated ISM device, all zero if there is none; not in the RFC 7609 form without SMC-D.
    pub ism: AssociatedIsm,
    /// Version 1 types.
    pub v1: Option<OfferV1>,
    /// Version 2 types; version 2 only.
    pub v2: Option<OfferV2>,
}

/// Bytes in front of the IP subnet extension in the form of RFC 7609. With the extension and the
/// trailer, a Proposal over IPv4 has 52 bytes (CLC-12).
const BASE_V1: usize = 40;
/// Bytes in front of the extension in the longer form of version 2 and SMC-Dv1 (CLC-59, CLCV2-6).
const BASE_V2: usize = 80;
/// Bytes of the IP subnet extension without prefixes.
const SUBNET_LEN: usize = 8;
/// Bytes of an IPv6 prefix (CLC-13).
const PREFIX_LEN: usize = 17;
/// Bytes of the V2 extension without EIDs.
const V2_EXT_LEN: usize = 40;
const EID_LEN: usize = 32;
/// Bytes of the SMC-Dv2 extension without entries.
const SMCD_EXT_LEN: usize = 48;
const ENTRY_LEN: usize = 10;
/// Offsets count from behind their own field; these are the places behind them.
const AFTER_SUBNET_OFFSET: usize = 40;
const AFTER_V2_OFFSET: usize = 52;
const AFTER_SMCD_OFFSET: usize = 8;
const SEID_OFFERED: u8 = 0x01;

#[cfg(test)]
mod tests;
