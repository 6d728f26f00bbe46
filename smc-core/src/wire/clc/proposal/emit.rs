// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! [`Proposal`] to bytes.

use super::{
    AFTER_SMCD_OFFSET, AFTER_SUBNET_OFFSET, AFTER_V2_OFFSET, BASE_V2, EID_LEN, OfferV2, PREFIX_LEN,
    Proposal, SEID_OFFERED, SUBNET_LEN, SmcTypes, Subnet, V2_EXT_LEN,
};
use crate::wire::clc::Version;
use crate::wire::clc::{EyeCatcher, Kind, header};
use crate::wire::codec::Writer;
use crate::wire::ids::{Eid, Gid, GidV1, LinkLimits};

impl Proposal {
    /// The bytes of the message, every area at its specified place.
    ///
    /// A version 1 Proposal without `v1` offers nothing, and no receiver accepts such a message.
    pub fn emit(&self) -> Vec<u8> {
        let types_v1 = self.v1.map(|offer| offer.types);
        let v2 = self.v2.filter(|_| self.version == Version::V2);
        let types_v2 = v2.map(|offer| offer.types);
        let v2_has_d = types_v2.is_some_and(SmcTypes::has_d);
        let any_d = v2_has_d || types_v1.is_some_and(SmcTypes::has_d);
        let long_base = self.version == Version::V2 || any_d;
        let subnet_len = self.v1.map_or(0, |offer| offer.subnet.wire_len());

        let mut flags = SmcTypes::to_bits(types_v1);
        if self.version == Version::V2 {
            flags |= SmcTypes::to_bits(types_v2) << 2;
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
            // The subnet extension of version 1 is in front (CLCV2-8).
            let skip_subnet = BASE_V2 - AFTER_V2_OFFSET + subnet_len;
            // A Proposal of version 2 always has its extension (CLCV2-10).
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
