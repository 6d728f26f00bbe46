// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Delete Link (RFC 7609 A.3.4; SMCv2 "Delete Link").
//!
//! ```text
//! 4 link number, 0 with "all" | 5 reason | 9 reserved
//! ```

use super::header::{self, ALL, Header, ORDERLY, REPLY, flag};
use super::{Dialect, Kind};
use crate::wire::WireError;
use crate::wire::clc::Version;

/// Why a link is deleted (LLC-35).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct DeleteReason(pub u32);

impl DeleteReason {
    /// Lost path.
    pub const LOST_PATH: DeleteReason = DeleteReason(0x0001_0000);
    /// Operator.
    pub const OPERATOR: DeleteReason = DeleteReason(0x0002_0000);
    /// Program, as after inactivity.
    pub const PROGRAM: DeleteReason = DeleteReason(0x0003_0000);
    /// LLC protocol violation.
    pub const VIOLATION: DeleteReason = DeleteReason(0x0004_0000);
    /// An asymmetric link no longer needed.
    pub const ASYMMETRIC: DeleteReason = DeleteReason(0x0005_0000);
    /// In a reply: no such link.
    pub const UNKNOWN_LINK: DeleteReason = DeleteReason(0x0010_0000);
}

/// Delete Link, request or reply (LLC-34).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeleteLink {
    /// Whether this is the reply.
    pub reply: bool,
    /// Deletes the whole group's links.
    pub all: bool,
    /// The link may be drained first (LLC-41).
    pub orderly: bool,
    /// Number of the link.
    pub link_number: u8,
    /// The reason, or in a reply the reason for the failure.
    pub reason: DeleteReason,
}

impl DeleteLink {
    pub(super) fn parse(header: &Header, bytes: &[u8]) -> Result<DeleteLink, WireError> {
        let mut reader = header.body(bytes)?;
        Ok(DeleteLink {
            reply: header.reply(),
            all: header.has(ALL),
            orderly: header.has(ORDERLY),
            link_number: reader.u8("link number")?,
            reason: DeleteReason(reader.u32("reason")?),
        })
    }

    pub(super) fn emit(&self, version: Version, dialect: &Dialect) -> Vec<u8> {
        let flags = flag(self.reply, REPLY) | flag(self.all, ALL) | flag(self.orderly, ORDERLY);
        let mut writer = header::start(version, Kind::DeleteLink, 0, flags);
        writer.u8(self.link_number);
        writer.u32(self.reason.0);
        // 44 bytes in both versions (LLCV2-31).
        header::finish(writer, version, dialect)
    }
}
