//! Proposal: what a client offers (RFC 7609 A.2.2; SMCv2 "CLC Proposal base message").

use super::header::{self, Header};
use super::{EyeCatcher, GidChid, IsmOffers, Kind, MAX_ENTRIES, Version};
use crate::wire::codec::{Reader, Writer};
use crate::wire::ids::{Chid, Eid, Features, Gid, GidV1, LinkLimits, Mac, PeerId, Release};
use crate::wire::{List, WireError};

/// SMC types of one version that are offered. "None" is the absence of the offer.
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
    /// IPv6 prefixes, 1 to 8. An empty list cannot be told from `V4` on the wire.
    V6(List<IpPrefix, MAX_ENTRIES>),
}

/// Offer of SMC version 1 types.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OfferV1 {
    /// Which types.
    pub types: SmcTypes,
    /// Subnet that server and client must share.
    pub subnet: Subnet,
}

/// The ISM device that goes with the client's IP interface; serves SMC-Dv1 and, with a CHID,
/// SMC-Dv2 (CLCV2-11). Never an emulated one (EISM-5).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AssociatedIsm {
    /// 64-bit GID.
    pub gid: GidV1,
    /// Its fabric; [`Chid::NONE`] unless SMC-Dv2 is offered with it.
    pub chid: Chid,
}

/// Vendor experimental options of v2.1: who, and five bytes of their own (CLCV2-13).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct VendorOffer {
    oui: [u8; 3],
    options: [u8; 5],
}

impl VendorOffer {
    /// Options of the vendor `oui`.
    ///
    /// # Errors
    /// [`WireError::VendorOptionsWithoutOui`] for OUI zero, which means "no options" (CLCV2-14).
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
/// Fields that do not go with the offered types or the release are not looked at in a received
/// message and come out empty (CLCV2-5, CLCV2-25); they are not sent either.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OfferV2 {
    /// Which types.
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
/// if SMC-Dv1 is offered (92 bytes); version 2 always has the base of 80 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Proposal {
    /// Highest version of the client.
    pub version: Version,
    /// SMC-R stack instance; zero in Linux without SMC-Rv1 (wire errata D-14).
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

const BASE_V1: usize = 40;
const BASE_V2: usize = 80;
/// Bytes of the IP subnet extension without prefixes.
const SUBNET_LEN: usize = 8;
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

/// The two type bits; 10 is "none".
fn types_from_bits(bits: u8) -> Option<SmcTypes> {
    match bits & 0b11 {
        0b00 => Some(SmcTypes::R),
        0b01 => Some(SmcTypes::D),
        0b11 => Some(SmcTypes::Both),
        _ => None,
    }
}

fn types_to_bits(types: Option<SmcTypes>) -> u8 {
    match types {
        Some(SmcTypes::R) => 0b00,
        Some(SmcTypes::D) => 0b01,
        None => 0b10,
        Some(SmcTypes::Both) => 0b11,
    }
}

/// Follows the offsets of a Proposal. Areas stand in the order of the specification and do not
/// overlap; bytes between them belong to nobody and are skipped.
struct Areas<'a> {
    /// The message up to its trailer.
    body: &'a [u8],
    /// Where the last area ended.
    free_from: usize,
}

impl<'a> Areas<'a> {
    fn open(&self, area: &'static str, at: usize, fixed: usize) -> Result<Reader<'a>, WireError> {
        if at < self.free_from {
            return Err(WireError::Overlap { area, at, free_from: self.free_from });
        }
        Reader::area(self.body, area, at, fixed)
    }

    /// Says that the area at `at` has `need` bytes in all.
    fn close(&mut self, area: &'static str, at: usize, need: usize) -> Result<(), WireError> {
        Reader::area(self.body, area, at, need)?;
        self.free_from = at + need;
        Ok(())
    }

    fn subnet(&mut self, at: usize) -> Result<Subnet, WireError> {
        const AREA: &str = "IP subnet extension";
        let mut reader = self.open(AREA, at, SUBNET_LEN)?;
        let network = reader.array(AREA)?;
        let bits = reader.u8(AREA)?;
        reader.skip(2, AREA)?;
        let count = reader.u8(AREA)?;
        if usize::from(count) > MAX_ENTRIES {
            return Err(WireError::TooManyPrefixes(count));
        }
        self.close(AREA, at, SUBNET_LEN + PREFIX_LEN * usize::from(count))?;
        if count == 0 {
            return match bits {
                0..=32 => Ok(Subnet::V4 { network, bits }),
                _ => Err(WireError::PrefixTooLong { bits, max: 32 }),
            };
        }
        let mut prefixes = List::new();
        for _ in 0..count {
            let prefix = IpPrefix { address: reader.array(AREA)?, bits: reader.u8(AREA)? };
            if prefix.bits > 128 {
                return Err(WireError::PrefixTooLong { bits: prefix.bits, max: 128 });
            }
            prefixes.push(prefix).map_err(|_| WireError::TooManyPrefixes(count))?;
        }
        Ok(Subnet::V6(prefixes))
    }

    fn v2(&mut self, types: SmcTypes, offset: u16) -> Result<OfferV2, WireError> {
        const AREA: &str = "V2 extension";
        if offset == 0 {
            return Err(WireError::MissingExtension(AREA));
        }
        let at = AFTER_V2_OFFSET + usize::from(offset);
        let mut reader = self.open(AREA, at, V2_EXT_LEN)?;
        let eid_count = reader.u8(AREA)?;
        if usize::from(eid_count) > MAX_ENTRIES {
            return Err(WireError::TooManyEids(eid_count));
        }
        let entry_count = reader.u8(AREA)?;
        if usize::from(entry_count) > MAX_ENTRIES {
            return Err(WireError::TooManyGidEntries(entry_count));
        }
        self.close(AREA, at, V2_EXT_LEN + EID_LEN * usize::from(eid_count))?;
        reader.skip(1, AREA)?;
        let flags = reader.u8(AREA)?;
        reader.skip(2, AREA)?;
        let smcd_offset = reader.u16(AREA)?;
        let roce_gid = Gid(reader.array(AREA)?);
        let limits = LinkLimits { max_conns: reader.u8(AREA)?, max_links: reader.u8(AREA)? };
        let features = Features::from_bits_truncate(reader.u16(AREA)?);
        reader.skip(12, AREA)?;
        let mut eids = List::new();
        for _ in 0..eid_count {
            let eid = Eid::from_wire(reader.array(AREA)?);
            eids.push(eid).map_err(|_| WireError::TooManyEids(eid_count))?;
        }
        let smcd = if types.has_d() {
            let seid = flags & SEID_OFFERED != 0;
            let place = (at + AFTER_SMCD_OFFSET, smcd_offset);
            self.smcd(place, seid, entry_count)?
        } else {
            SmcdV2Offer::default()
        };
        let release = Release::from_code(flags >> 4);
        let v2_1 = release.has_v2_1_fields();
        Ok(OfferV2 {
            types,
            release,
            eids,
            roce_gid: if types.has_r() { roce_gid } else { Gid::NONE },
            limits: if types.has_r() && v2_1 { limits } else { LinkLimits::NONE },
            features: if v2_1 { features } else { Features::empty() },
            vendor: None,
            smcd,
        })
    }

    /// May be absent if it has nothing to say (CLCV2-29).
    fn smcd(
        &mut self,
        (from, offset): (usize, u16),
        seid_offered: bool,
        entry_count: u8,
    ) -> Result<SmcdV2Offer, WireError> {
        const AREA: &str = "SMC-Dv2 extension";
        if offset == 0 {
            return match (seid_offered, entry_count) {
                (false, 0) => Ok(SmcdV2Offer::default()),
                _ => Err(WireError::MissingExtension(AREA)),
            };
        }
        let at = from + usize::from(offset);
        let mut reader = self.open(AREA, at, SMCD_EXT_LEN)?;
        self.close(AREA, at, SMCD_EXT_LEN + ENTRY_LEN * usize::from(entry_count))?;
        let seid = Eid::from_wire(reader.array(AREA)?);
        reader.skip(16, AREA)?;
        let mut entries = List::new();
        for _ in 0..entry_count {
            let entry = GidChid { gid: GidV1(reader.array(AREA)?), chid: Chid(reader.u16(AREA)?) };
            entries.push(entry).map_err(|_| WireError::TooManyGidEntries(entry_count))?;
        }
        Ok(SmcdV2Offer { seid: seid_offered.then_some(seid), entries })
    }
}

impl Proposal {
    pub(super) fn parse_body(header: &Header, body: &[u8]) -> Result<Proposal, WireError> {
        let version = header.version();
        let types_v1 = types_from_bits(header.flags);
        let types_v2 = match version {
            Version::V1 => None,
            Version::V2 => types_from_bits(header.flags >> 2),
        };
        if version == Version::V1 && types_v1.is_none() {
            return Err(WireError::NothingOffered);
        }
        let v1_has_r = types_v1.is_some_and(SmcTypes::has_r);
        let v2_has_d = types_v2.is_some_and(SmcTypes::has_d);
        let any_d = v2_has_d || types_v1.is_some_and(SmcTypes::has_d);

        let mut reader = Reader::new(body);
        reader.skip(header::HEADER_LEN, "header")?;
        let peer_id = PeerId(reader.array("peer id")?);
        let gid = Gid(reader.array("GID")?);
        let mac = Mac(reader.array("MAC")?);
        let subnet_offset = usize::from(reader.u16("IP subnet offset")?);
        let mut areas = Areas { body, free_from: BASE_V1 };
        let mut ism = AssociatedIsm::default();
        let (mut v2_offset, mut vendor) = (0, None);
        if version == Version::V2 || any_d {
            let ism_gid = GidV1(reader.array("ISM GID")?);
            let chid = Chid(reader.u16("ISM CHID")?);
            v2_offset = reader.u16("V2 extension offset")?;
            // An OUI of zero says that there are none, whatever the option bytes hold.
            vendor = VendorOffer::new(reader.array("OUI")?, reader.array("vendor options")?).ok();
            reader.skip(20, "reserved")?;
            areas.free_from = BASE_V2;
            ism.gid = if any_d { ism_gid } else { GidV1::NONE };
            ism.chid = if v2_has_d { chid } else { Chid::NONE };
        }
        let mut v1 = None;
        if let Some(types) = types_v1 {
            let subnet = areas.subnet(AFTER_SUBNET_OFFSET + subnet_offset)?;
            v1 = Some(OfferV1 { types, subnet });
        }
        let mut v2 = None;
        if let Some(types) = types_v2 {
            let offer = areas.v2(types, v2_offset)?;
            let vendor = vendor.filter(|_| offer.release.has_v2_1_fields());
            v2 = Some(OfferV2 { vendor, ..offer });
        }
        if areas.free_from != body.len() {
            return Err(header.length_mismatch(areas.free_from + header::TRAILER_LEN));
        }
        let gid = if v1_has_r { gid } else { Gid::NONE };
        Ok(Proposal { version, peer_id, gid, mac, ism, v1, v2 })
    }

    /// The bytes of the message, every area at the place that the specification gives it.
    ///
    /// A version 1 Proposal without `v1` offers nothing, and no receiver takes it.
    pub fn emit(&self) -> Vec<u8> {
        let types_v1 = self.v1.map(|offer| offer.types);
        let v2 = self.v2.filter(|_| self.version == Version::V2);
        let types_v2 = v2.map(|offer| offer.types);
        let v2_has_d = types_v2.is_some_and(SmcTypes::has_d);
        let any_d = v2_has_d || types_v1.is_some_and(SmcTypes::has_d);
        let long_base = self.version == Version::V2 || any_d;
        let subnet_len = self.v1.map_or(0, |offer| offer.subnet.wire_len());

        let mut flags = types_to_bits(types_v1);
        if self.version == Version::V2 {
            flags |= types_to_bits(types_v2) << 2;
        }
        let mut writer = header::start(EyeCatcher::Smcr, Kind::Proposal, self.version, flags);
        writer.bytes(&self.peer_id.0);
        let gid = if types_v1.is_some_and(SmcTypes::has_r) { self.gid } else { Gid::NONE };
        writer.bytes(&gid.0);
        writer.bytes(&self.mac.0);
        let skip_base =
            if long_base && self.v1.is_some() { BASE_V2 - AFTER_SUBNET_OFFSET } else { 0 };
        put_offset(&mut writer, skip_base);
        if long_base {
            let gid = if any_d { self.ism.gid } else { GidV1::NONE };
            writer.bytes(&gid.0);
            writer.u16(if v2_has_d { self.ism.chid.0 } else { 0 });
            let skip_subnet = BASE_V2 - AFTER_V2_OFFSET + subnet_len;
            put_offset(&mut writer, if v2.is_some() { skip_subnet } else { 0 });
            match v2.filter(|offer| offer.release.has_v2_1_fields()).and_then(|v2| v2.vendor) {
                Some(vendor) => {
                    writer.bytes(&vendor.oui);
                    writer.bytes(&vendor.options);
                }
                None => writer.zeros(8),
            }
            writer.zeros(20);
        }
        if let Some(offer) = &self.v1 {
            offer.subnet.emit(&mut writer);
        }
        if let Some(offer) = &v2 {
            offer.emit(&mut writer);
        }
        header::finish(writer, EyeCatcher::Smcr)
    }
}

/// Offsets are sums of constants and counts of at most eight, far below 2^16.
fn put_offset(writer: &mut Writer, offset: usize) {
    writer.u16(u16::try_from(offset).unwrap_or(u16::MAX));
}

impl Subnet {
    fn wire_len(&self) -> usize {
        match self {
            Subnet::V4 { .. } => SUBNET_LEN,
            Subnet::V6(prefixes) => SUBNET_LEN + PREFIX_LEN * prefixes.len(),
        }
    }

    fn emit(&self, writer: &mut Writer) {
        match self {
            Subnet::V4 { network, bits } => {
                writer.bytes(network);
                writer.u8(*bits);
                writer.zeros(3);
            }
            Subnet::V6(prefixes) => {
                writer.zeros(7);
                writer.count(prefixes.len());
                for prefix in prefixes {
                    writer.bytes(&prefix.address);
                    writer.u8(prefix.bits);
                }
            }
        }
    }
}

impl OfferV2 {
    fn emit(&self, writer: &mut Writer) {
        let v2_1 = self.release.has_v2_1_fields();
        let smcd = self.types.has_d().then_some(&self.smcd);
        let seid = smcd.and_then(|smcd| smcd.seid);
        writer.count(self.eids.len());
        writer.count(smcd.map_or(0, |smcd| smcd.entries.len()));
        writer.zeros(1);
        writer.u8(self.release.code() << 4 | if seid.is_some() { SEID_OFFERED } else { 0 });
        writer.zeros(2);
        let skip_eids = V2_EXT_LEN - AFTER_SMCD_OFFSET + EID_LEN * self.eids.len();
        put_offset(writer, if smcd.is_some() { skip_eids } else { 0 });
        let limits = if v2_1 { self.limits } else { LinkLimits::NONE };
        if self.types.has_r() {
            writer.bytes(&self.roce_gid.0);
            writer.u8(limits.max_conns);
            writer.u8(limits.max_links);
        } else {
            writer.zeros(18);
        }
        writer.u16(if v2_1 { self.features.bits() } else { 0 });
        writer.zeros(12);
        for eid in &self.eids {
            writer.bytes(eid.as_bytes());
        }
        if let Some(smcd) = smcd {
            writer.bytes(seid.unwrap_or(Eid::ZERO).as_bytes());
            writer.zeros(16);
            for entry in &smcd.entries {
                writer.bytes(&entry.gid.0);
                writer.u16(entry.chid.0);
            }
        }
    }
}
