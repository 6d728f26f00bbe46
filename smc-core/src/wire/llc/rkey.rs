// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Confirm RKey, its continuation in version 1, and Delete RKey (RFC 7609 A.3.5 to A.3.7; SMCv2
//! "Confirm RKey", "Delete RKey").
//!
//! ```text
//! Confirm RKey:   4 n other links | 5 RKey | 9 address (8) | 17 entry | 30 entry | 43 reserved
//! Continuation:   4 entries left | 5 entry | 18 entry | 31 entry
//!   entry:        0 link number | 1 RKey | 5 address (8)
//! Delete RKey:    4 n | 5 v1: error mask | 6 reserved | 8 n RKeys | zero to 44
//! its v2 reply:   4 n of the request | 5 not deleted | 6 reserved | 8 up to 8 RKeys | 40 reserved
//! ```

use super::header::{self, Header, LLC_LEN, NEGATIVE, REPLY, RETRY, flag};
use super::{Dialect, Kind};
use crate::wire::clc::Version;
use crate::wire::codec::{Reader, Writer};
use crate::wire::ids::Rkey;
use crate::wire::{List, WireError};

/// An RMB on another link than the message's own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LinkRkey {
    /// The link.
    pub link_number: u8,
    /// RKey on the link.
    pub rkey: Rkey,
    /// Virtual address on the link.
    pub address: u64,
}

impl LinkRkey {
    fn parse(reader: &mut Reader<'_>) -> Result<LinkRkey, WireError> {
        Ok(LinkRkey {
            link_number: reader.u8("link number")?,
            rkey: Rkey(reader.u32("RKey")?),
            address: reader.u64("address")?,
        })
    }

    fn emit(&self, writer: &mut Writer) {
        writer.u8(self.link_number);
        writer.u32(self.rkey.0);
        writer.u64(self.address);
    }
}

fn parse_entries<const N: usize>(
    reader: &mut Reader<'_>,
    count: usize,
) -> Result<List<LinkRkey, N>, WireError> {
    let mut entries = List::new();
    for _ in 0..count.min(N) {
        if entries.push(LinkRkey::parse(reader)?).is_err() {
            break;
        }
    }
    Ok(entries)
}

/// Confirm RKey, request or reply.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ConfirmRkey {
    /// Whether this is the reply.
    pub reply: bool,
    /// A negative reply: the sender of the request starts over (LLC-50).
    pub negative: bool,
    /// With a negative reply: start over right after the configuration change (LLCV2-33).
    pub retry: bool,
    /// Other links of the whole exchange: 0 to 8 in version 1, where continuations follow for more
    /// than two, 0 to 2 in version 2 (wire errata A-3).
    pub other_links: u8,
    /// RKey of the new RMB on this link.
    pub rkey: Rkey,
    /// Virtual address of the RMB on this link.
    pub address: u64,
    /// The first two other links.
    pub others: List<LinkRkey, 2>,
}

impl ConfirmRkey {
    pub(super) fn parse(header: &Header, bytes: &[u8]) -> Result<ConfirmRkey, WireError> {
        let mut reader = header.body(bytes)?;
        let other_links = reader.u8("other links")?;
        let max = match header.version {
            Version::V1 => 8,
            // LLCV2-32.
            Version::V2 => 2,
        };
        let count = Header::count("other links", other_links, (0, max))?;
        Ok(ConfirmRkey {
            reply: header.reply(),
            negative: header.has(NEGATIVE),
            retry: header.has(RETRY),
            other_links,
            rkey: Rkey(reader.u32("RKey")?),
            address: reader.u64("address")?,
            others: parse_entries(&mut reader, count)?,
        })
    }

    pub(super) fn emit(&self, version: Version, dialect: &Dialect) -> Vec<u8> {
        let flags =
            flag(self.reply, REPLY) | flag(self.negative, NEGATIVE) | flag(self.retry, RETRY);
        let mut writer = header::start(version, Kind::ConfirmRkey, 0, flags);
        writer.u8(self.other_links);
        writer.u32(self.rkey.0);
        writer.u64(self.address);
        for entry in &self.others {
            entry.emit(&mut writer);
        }
        header::finish(writer, version, dialect)
    }
}

/// Confirm RKey Continuation, request or reply.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ConfirmRkeyCont {
    /// Whether this is the reply.
    pub reply: bool,
    /// A negative reply.
    pub negative: bool,
    /// Entries still to come, this message's included; up to 3 are the last (LLC-48).
    pub left: u8,
    /// Entries of this message: three, or the remaining ones.
    pub entries: List<LinkRkey, 3>,
}

impl ConfirmRkeyCont {
    pub(super) fn parse(header: &Header, bytes: &[u8]) -> Result<ConfirmRkeyCont, WireError> {
        let mut reader = header.body(bytes)?;
        let left = reader.u8("entries left")?;
        Ok(ConfirmRkeyCont {
            reply: header.reply(),
            negative: header.has(NEGATIVE),
            left,
            entries: parse_entries(&mut reader, usize::from(left))?,
        })
    }

    pub(super) fn emit(&self, version: Version, dialect: &Dialect) -> Vec<u8> {
        let flags = flag(self.reply, REPLY) | flag(self.negative, NEGATIVE);
        let mut writer = header::start(version, Kind::ConfirmRkeyCont, 0, flags);
        writer.u8(self.left);
        for entry in &self.entries {
            entry.emit(&mut writer);
        }
        header::finish(writer, version, dialect)
    }
}

/// Delete RKey: request and reply of version 1, request of version 2.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeleteRkey {
    /// Whether this is the reply; version 1 only.
    pub reply: bool,
    /// A negative reply; version 1 only.
    pub negative: bool,
    /// Mask of unknown RKeys: bit 0 (0x80) is the first; version 1 replies only (LLC-55).
    pub error_mask: u8,
    /// The RKeys on this link: 1 to 8 in version 1, 1 to 255 in version 2; later ones are not sent.
    pub rkeys: Vec<Rkey>,
}

/// Bytes before the RKeys.
const DELETE_HEAD: usize = 8;
const RKEY_LEN: usize = 4;

const fn most_rkeys(version: Version) -> u16 {
    match version {
        Version::V1 => 8,
        // LLCV2-34.
        Version::V2 => 255,
    }
}

impl DeleteRkey {
    pub(super) fn parse(
        header: &Header,
        bytes: &[u8],
        dialect: &Dialect,
    ) -> Result<DeleteRkey, WireError> {
        let mut reader = header.body(bytes)?;
        let declared = reader.u8("RKey count")?;
        let mut count = Header::count("RKey count", declared, (1, most_rkeys(header.version)))?;
        if header.version == Version::V2 {
            if dialect.goes_by_bytes_received() {
                count = count.min((header.length - DELETE_HEAD) / RKEY_LEN);
            }
            let expected = LLC_LEN.max(DELETE_HEAD + count * RKEY_LEN);
            if header.length != expected {
                return Err(header.length_mismatch(expected));
            }
        }
        let error_mask = reader.u8("error mask")?;
        reader.skip(2, "reserved")?;
        let rkeys = (0..count).map(|_| reader.u32("RKey").map(Rkey)).collect::<Result<_, _>>()?;
        let v1 = header.version == Version::V1;
        Ok(DeleteRkey {
            reply: header.reply(),
            negative: v1 && header.has(NEGATIVE),
            error_mask: if v1 { error_mask } else { 0 },
            rkeys,
        })
    }

    pub(super) fn emit(&self, version: Version, dialect: &Dialect) -> Vec<u8> {
        let v1 = version == Version::V1;
        let flags = flag(v1 && self.reply, REPLY) | flag(v1 && self.negative, NEGATIVE);
        let count = self.rkeys.len().min(usize::from(most_rkeys(version)));
        let mut writer = header::start(version, Kind::DeleteRkey, 0, flags);
        writer.count(count);
        writer.u8(if v1 { self.error_mask } else { 0 });
        writer.zeros(2);
        for rkey in self.rkeys.iter().take(count) {
            writer.u32(rkey.0);
        }
        header::finish(writer, version, dialect)
    }
}

/// Reply to a version 2 Delete RKey.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeleteRkeyReply {
    /// Whether RKeys were left.
    pub negative: bool,
    /// Count of the request.
    pub count: u8,
    /// How many were not deleted; may be more than are listed (LLCV2-37).
    pub not_deleted: u8,
    /// The first eight refused RKeys, or all (LLCV2-35). Zeros from Linux, which lists none (wire
    /// errata D-15).
    pub rkeys: List<Rkey, 8>,
}

impl DeleteRkeyReply {
    pub(super) fn parse(header: &Header, bytes: &[u8]) -> Result<DeleteRkeyReply, WireError> {
        if header.length != LLC_LEN {
            return Err(header.length_mismatch(LLC_LEN));
        }
        let mut reader = header.body(bytes)?;
        let count = reader.u8("RKey count")?;
        let not_deleted = reader.u8("RKeys not deleted")?;
        reader.skip(2, "reserved")?;
        let negative = header.has(NEGATIVE);
        let mut rkeys = List::new();
        if negative {
            for _ in 0..not_deleted.min(8) {
                if rkeys.push(Rkey(reader.u32("RKey")?)).is_err() {
                    break;
                }
            }
        }
        Ok(DeleteRkeyReply { negative, count, not_deleted, rkeys })
    }

    pub(super) fn emit(&self, version: Version, dialect: &Dialect) -> Vec<u8> {
        let flags = REPLY | flag(self.negative, NEGATIVE);
        let mut writer = header::start(version, Kind::DeleteRkey, 0, flags);
        writer.u8(self.count);
        writer.u8(self.not_deleted);
        writer.zeros(2);
        for rkey in &self.rkeys {
            writer.u32(rkey.0);
        }
        header::finish(writer, version, dialect)
    }
}
