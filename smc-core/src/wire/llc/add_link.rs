// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Add Link and, in version 1, its continuation (RFC 7609 A.3.2, A.3.3; SMCv2 "Add Link").
//!
//! ```text
//!  4 MAC | 10 reserved | 12 GID | 28 QPN (3) | 31 link number | 32 MTU (low nibble) | 33 PSN (3)
//! 36 reserved | version 2 goes on:
//! 44 direct (bit 0) | 45 reserved | 46 client target GID | 62 reserved | 70 n
//! 72 n entries: RKey on this link, RKey on the new link, address on the new link (8)
//!
//! continuation:  4 link number | 5 RTokens left | 6 reserved | 8 entry | 24 entry | 40 reserved
//! ```
//!
//! RFC 7609 Fig 32 has no reserved bytes at 10, see [`AddLinkLayout`]. The reason of a refusal is in
//! the low nibble of byte 2 in version 1 and of byte 3 in version 2 (wire errata A-9).

use super::header::{self, Header, LLC_LEN, REJECTED, REPLY, flag};
use super::{AddLinkLayout, Dialect, Kind, RejectReason};
use crate::wire::clc::Version;
use crate::wire::codec::{Reader, Writer};
use crate::wire::ids::{Gid, Mac, Mtu, Psn, Qpn, Rkey};
use crate::wire::{List, WireError};

/// Bytes of a version 2 message before its entries (LLCV2-18).
const V2_LEN: usize = 72;
const PAIR_LEN: usize = 16;
const DIRECT: u8 = 0x80;

/// An RMB known on two links.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RkeyPair {
    /// RKey on the link carrying the message.
    pub reference: Rkey,
    /// RKey on the new link.
    pub new: Rkey,
    /// Virtual address on the new link.
    pub address: u64,
}

impl RkeyPair {
    fn parse(reader: &mut Reader<'_>) -> Result<RkeyPair, WireError> {
        Ok(RkeyPair {
            reference: Rkey(reader.u32("reference RKey")?),
            new: Rkey(reader.u32("new RKey")?),
            address: reader.u64("new address")?,
        })
    }

    fn emit(&self, writer: &mut Writer) {
        writer.u32(self.reference.0);
        writer.u32(self.new.0);
        writer.u64(self.address);
    }
}

/// Add Link, request or reply: the sender's end of a new link (LLC-19).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AddLink {
    /// Whether this is the reply.
    pub reply: bool,
    /// A refusal, with its reason.
    pub rejected: Option<RejectReason>,
    /// Sender's RNIC for the new link.
    pub mac: Mac,
    /// Sender's GID for the new link.
    pub gid: Gid,
    /// Sender's new queue pair.
    pub qpn: Qpn,
    /// Number of the new link.
    pub link_number: u8,
    /// MTU code; a reserved one is answered by a refusal (LLC-22).
    pub mtu: Mtu,
    /// First packet sequence number of the sender.
    pub psn: Psn,
    /// The fields of version 2; absent in a refusal of 44 bytes (LLCV2-41), too.
    pub v2: Option<AddLinkV2>,
}

/// The version 2 part of an Add Link.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AddLinkV2 {
    /// No router between; counts in the client's reply only (LLCV2-19).
    pub direct: bool,
    /// Address of the client preferred by the server; request only (LLCV2-20).
    pub target: Gid,
    /// The sender's RMBs, at most 255 (LLCV2-17); later ones are not sent.
    pub rkeys: Vec<RkeyPair>,
}

impl AddLink {
    pub(super) fn parse(
        header: &Header,
        bytes: &[u8],
        dialect: &Dialect,
    ) -> Result<AddLink, WireError> {
        let mut reader = header.body(bytes)?;
        let reason = match header.version {
            Version::V1 => header.byte2 & 0x0f,
            Version::V2 => header.flags & 0x0f,
        };
        let mac = Mac(reader.array("MAC")?);
        if padded(header.version, dialect) {
            reader.skip(2, "reserved")?;
        }
        let gid = Gid(reader.array("GID")?);
        let qpn = Qpn::from_be_bytes(reader.array("QPN")?);
        let link_number = reader.u8("link number")?;
        let mtu = Mtu::from_code(reader.u8("MTU")?);
        let psn = Psn::from_be_bytes(reader.array("PSN")?);
        let rejected = header.has(REJECTED).then_some(RejectReason(reason));
        let short_refusal = rejected.is_some() && header.length == LLC_LEN;
        let v2 = match header.version {
            Version::V2 if !short_refusal => Some(AddLinkV2::parse(header, bytes, dialect)?),
            _ => None,
        };
        Ok(AddLink { reply: header.reply(), rejected, mac, gid, qpn, link_number, mtu, psn, v2 })
    }

    pub(super) fn emit(&self, version: Version, dialect: &Dialect) -> Vec<u8> {
        let reason = self.rejected.map_or(0, |reason| reason.0 & 0x0f);
        let mut flags = flag(self.reply, REPLY) | flag(self.rejected.is_some(), REJECTED);
        if version == Version::V2 {
            // LLCV2-22.
            flags |= reason;
        }
        let mut writer = header::start(version, Kind::AddLink, reason, flags);
        writer.bytes(&self.mac.0);
        if padded(version, dialect) {
            writer.zeros(2);
        }
        writer.bytes(&self.gid.0);
        writer.bytes(&self.qpn.to_be_bytes());
        writer.u8(self.link_number);
        writer.u8(self.mtu.code());
        writer.bytes(&self.psn.to_be_bytes());
        if version == Version::V2 && (self.v2.is_some() || self.rejected.is_none()) {
            writer.zeros(LLC_LEN.saturating_sub(writer.len()));
            match &self.v2 {
                Some(v2) => v2.emit(&mut writer, dialect),
                None => AddLinkV2::default().emit(&mut writer, dialect),
            }
        }
        header::finish(writer, version, dialect)
    }
}

fn padded(version: Version, dialect: &Dialect) -> bool {
    version == Version::V2 || dialect.add_link == AddLinkLayout::Padded
}

impl AddLinkV2 {
    fn parse(header: &Header, bytes: &[u8], dialect: &Dialect) -> Result<AddLinkV2, WireError> {
        if header.length < V2_LEN {
            return Err(header.length_mismatch(V2_LEN));
        }
        let mut reader = Reader::new(bytes);
        reader.skip(LLC_LEN, "Add Link")?;
        let direct = reader.u8("link type")? & DIRECT != 0;
        reader.skip(1, "reserved")?;
        let target = Gid(reader.array("client target GID")?);
        reader.skip(8, "reserved")?;
        let declared = reader.u16("RKey count")?;
        let room = header.length - V2_LEN;
        let count =
            if dialect.goes_by_bytes_received() { room / PAIR_LEN } else { usize::from(declared) };
        if count > usize::from(u8::MAX) {
            let (got, max) = (u16::try_from(count).unwrap_or(u16::MAX), u16::from(u8::MAX));
            return Err(WireError::CountOutOfRange { field: "RKey count", got, min: 0, max });
        }
        if room != count * PAIR_LEN {
            return Err(header.length_mismatch(V2_LEN + count * PAIR_LEN));
        }
        let rkeys = (0..count).map(|_| RkeyPair::parse(&mut reader)).collect::<Result<_, _>>()?;
        Ok(AddLinkV2 { direct, target, rkeys })
    }

    fn emit(&self, writer: &mut Writer, dialect: &Dialect) {
        let count = self.rkeys.len().min(usize::from(u8::MAX));
        writer.u8(flag(self.direct, DIRECT));
        writer.zeros(1);
        writer.bytes(&self.target.0);
        writer.zeros(8);
        writer.bytes(&dialect.count.put(u16::try_from(count).unwrap_or(u16::MAX)));
        for pair in self.rkeys.iter().take(count) {
            pair.emit(writer);
        }
    }
}

/// Add Link Continuation, request or reply.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AddLinkCont {
    /// Whether this is the reply.
    pub reply: bool,
    /// Number of the new link.
    pub link_number: u8,
    /// RTokens still to come, this message's included (LLC-30).
    pub left: u8,
    /// RTokens of this message: two, or the remaining ones.
    pub rkeys: List<RkeyPair, 2>,
}

impl AddLinkCont {
    pub(super) fn parse(header: &Header, bytes: &[u8]) -> Result<AddLinkCont, WireError> {
        let mut reader = header.body(bytes)?;
        let link_number = reader.u8("link number")?;
        let left = reader.u8("RTokens left")?;
        reader.skip(2, "reserved")?;
        let mut rkeys = List::new();
        for _ in 0..left {
            if rkeys.push(RkeyPair::parse(&mut reader)?).is_err() || rkeys.len() == 2 {
                break;
            }
        }
        Ok(AddLinkCont { reply: header.reply(), link_number, left, rkeys })
    }

    pub(super) fn emit(&self, version: Version, dialect: &Dialect) -> Vec<u8> {
        let mut writer = header::start(version, Kind::AddLinkCont, 0, flag(self.reply, REPLY));
        writer.u8(self.link_number);
        writer.u8(self.left);
        writer.zeros(2);
        for pair in &self.rkeys {
            pair.emit(&mut writer);
        }
        header::finish(writer, version, dialect)
    }
}
