// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Confirm Link: the first message on every new link (RFC 7609 A.3.1; SMCv2 "Confirm Link").
//!
//! ```text
//! 4 MAC | 10 GID | 26 QPN (3) | 29 link number | 30 link user id | 34 max links
//! 35 v2: max connections | reserved to 44
//! ```

use super::header::{self, Header, REPLY, flag};
use super::{Dialect, Kind};
use crate::wire::WireError;
use crate::wire::clc::Version;
use crate::wire::ids::{Gid, Mac, Qpn};

/// Confirm Link, request or reply: the sender's end of the link (LLC-12).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ConfirmLink {
    /// Whether this is the reply.
    pub reply: bool,
    /// Bits 4-7 of the flags. Version 2 has the sender's cache size there (LLCV2-13); Linux sets
    /// the two low bits in either version: its elements have no eye catcher (wire errata D-3).
    pub low_flags: u8,
    /// Sender's RNIC.
    pub mac: Mac,
    /// Sender's GID.
    pub gid: Gid,
    /// Sender's queue pair.
    pub qpn: Qpn,
    /// Assigned by the server, repeated by the client (LLC-15).
    pub link_number: u8,
    /// Sender's own number of the link, for display (LLC-16).
    pub link_user_id: u32,
    /// Links of the group; 0 from a client accepts the server's (LLC-17).
    pub max_links: u8,
    /// Connections of the group, version 2 only (LLCV2-10).
    pub max_conns: u8,
}

impl ConfirmLink {
    /// Both low bits: the sender's elements have no eye catcher.
    pub const NO_EYE_CATCHER: u8 = 0x03;

    pub(super) fn parse(header: &Header, bytes: &[u8]) -> Result<ConfirmLink, WireError> {
        let mut reader = header.body(bytes)?;
        let mut message = ConfirmLink {
            reply: header.reply(),
            low_flags: header.flags & 0x0f,
            mac: Mac(reader.array("MAC")?),
            gid: Gid(reader.array("GID")?),
            qpn: Qpn::from_be_bytes(reader.array("QPN")?),
            link_number: reader.u8("link number")?,
            link_user_id: reader.u32("link user id")?,
            max_links: reader.u8("max links")?,
            max_conns: 0,
        };
        if header.version == Version::V2 {
            message.max_conns = reader.u8("max connections")?;
        }
        Ok(message)
    }

    pub(super) fn emit(&self, version: Version, dialect: &Dialect) -> Vec<u8> {
        let flags = flag(self.reply, REPLY) | (self.low_flags & 0x0f);
        let mut writer = header::start(version, Kind::ConfirmLink, 0, flags);
        writer.bytes(&self.mac.0);
        writer.bytes(&self.gid.0);
        writer.bytes(&self.qpn.to_be_bytes());
        writer.u8(self.link_number);
        writer.u32(self.link_user_id);
        writer.u8(self.max_links);
        if version == Version::V2 {
            writer.u8(self.max_conns);
        }
        header::finish(writer, version, dialect)
    }
}
