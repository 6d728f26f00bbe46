// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Request Add Link: a client has a new address (SMCv2 "Request Add Link"). Version 2 only.
//!
//! ```text
//! 4 reserved | 24 GID list, request only | reply: zero to 44
//! ```

use super::header::{self, Header, LLC_LEN, REJECTED, REPLY, flag};
use super::{Dialect, Kind, RejectReason};
use crate::wire::WireError;
use crate::wire::clc::{GidList, Version};

/// Request Add Link, request or reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequestAddLink {
    /// The client's addresses (LLCV2-25).
    Request(GidList),
    /// Acknowledged, or refused as invalid (LLCV2-28).
    Reply(Option<RejectReason>),
}

impl RequestAddLink {
    pub(super) fn parse(header: &Header, bytes: &[u8]) -> Result<RequestAddLink, WireError> {
        if header.reply() {
            // LLCV2-26.
            if header.length != LLC_LEN {
                return Err(header.length_mismatch(LLC_LEN));
            }
            let rejected = header.has(REJECTED).then_some(RejectReason(header.flags & 0x0f));
            return Ok(RequestAddLink::Reply(rejected));
        }
        let mut reader = header.body(bytes)?;
        reader.skip(20, "reserved")?;
        // ERR-45.
        let gids = GidList::parse(&mut reader)?;
        if reader.at() != header.length {
            return Err(header.length_mismatch(reader.at()));
        }
        Ok(RequestAddLink::Request(gids))
    }

    pub(super) fn emit(&self, version: Version, dialect: &Dialect) -> Vec<u8> {
        let flags = match self {
            RequestAddLink::Request(_) => 0,
            RequestAddLink::Reply(None) => REPLY,
            RequestAddLink::Reply(Some(reason)) => REPLY | flag(true, REJECTED) | (reason.0 & 0x0f),
        };
        let mut writer = header::start(version, Kind::RequestAddLink, 0, flags);
        if let RequestAddLink::Request(gids) = self {
            writer.zeros(20);
            gids.emit(&mut writer);
        }
        header::finish(writer, version, dialect)
    }
}
