// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Proposal bytes to [`Proposal`]: following offsets.

use super::{
    AFTER_SMCD_OFFSET, AFTER_SUBNET_OFFSET, AFTER_V2_OFFSET, AssociatedIsm, BASE_V1, BASE_V2,
    EID_LEN, ENTRY_LEN, IpPrefix, OfferV1, OfferV2, PREFIX_LEN, Proposal, SEID_OFFERED,
    SMCD_EXT_LEN, SUBNET_LEN, SmcTypes, SmcdV2Offer, Subnet, V2_EXT_LEN, VendorOffer,
};
use crate::wire::clc::header::{self, Header};
use crate::wire::clc::{GidChid, MAX_ENTRIES, Version};
use crate::wire::codec::Reader;
use crate::wire::ids::{Chid, Eid, Features, Gid, GidV1, LinkLimits, Mac, PeerId, Release};
use crate::wire::{List, WireError};

/// Follows the offsets of a Proposal. Areas stand in the order of the specification and do not
/// overlap; bytes between areas are skipped.
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

    /// Ends the area at `at` with `need` bytes in all.
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

    /// Optional if empty (CLCV2-29).
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
    pub(in crate::wire::clc) fn parse_body(
        header: &Header,
        body: &[u8],
    ) -> Result<Proposal, WireError> {
        let version = header.version();
        let types_v1 = SmcTypes::from_bits(header.flags);
        let types_v2 = match version {
            Version::V1 => None,
            Version::V2 => SmcTypes::from_bits(header.flags >> 2),
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
            // An OUI of zero means "no options", for any option bytes.
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
}
