// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Link Layer Control of SMC-R: messages over the RDMA link (RFC 7609 A.3; SMCv2 "LLC V2 messages").
//!
//! A version 1 message always has 44 bytes, a version 2 message 44 or, for a few types, more:
//!
//! ```text
//! v1:  0 type | 1 length 2C | 2 reserved (ADD LINK: reject reason) | 3 flags
//! v2:  0 type |20           | 1 length (2)                         | 3 flags
//! ```
//!
//! Request and reply share the type; bit 0 of the flags marks the reply (LLC-3). The type byte
//! shows the message's version; a link group only ever uses one version (LLCV2-2).

mod add_link;
mod confirm_link;
mod delete_link;
mod dialect;
mod header;
mod reject_reason;
mod request_add_link;
mod rkey;
mod test_link;

pub use add_link::{AddLink, AddLinkCont, AddLinkV2, RkeyPair};
pub use confirm_link::ConfirmLink;
pub use delete_link::{DeleteLink, DeleteReason};
pub use dialect::{AddLinkLayout, ByteOrder, Dialect};
pub use header::{Kind, LLC_LEN, LLC_MAX_LEN};
pub use reject_reason::RejectReason;
pub use request_add_link::RequestAddLink;
pub use rkey::{ConfirmRkey, ConfirmRkeyCont, DeleteRkey, DeleteRkeyReply, LinkRkey};
pub use test_link::TestLink;

use super::WireError;
use super::clc::Version;
use header::Header;

/// Any LLC message, with its version.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Llc {
    /// Version of the type byte.
    pub version: Version,
    /// The message with its fields.
    pub message: Message,
}

/// Any LLC message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Message {
    /// 1.
    ConfirmLink(ConfirmLink),
    /// 2.
    AddLink(AddLink),
    /// 3, version 1 only.
    AddLinkCont(AddLinkCont),
    /// 4.
    DeleteLink(DeleteLink),
    /// 5, version 2 only.
    RequestAddLink(RequestAddLink),
    /// 6.
    ConfirmRkey(ConfirmRkey),
    /// 7.
    TestLink(TestLink),
    /// 8, version 1 only.
    ConfirmRkeyCont(ConfirmRkeyCont),
    /// 9; in version 2 the request only.
    DeleteRkey(DeleteRkey),
    /// 9, the reply of version 2.
    DeleteRkeyReply(DeleteRkeyReply),
}

impl Llc {
    /// Reads one message filling `bytes`, the bytes of one receive completion.
    ///
    /// # Errors
    /// [`WireError`]: [`WireError::CdcNotLlc`] goes to the CDC path,
    /// [`WireError::IgnorableLlcType`] is dropped, after any other error the link is treated as
    /// down (RFC 7609 C.7.1).
    pub fn parse(bytes: &[u8], dialect: &Dialect) -> Result<Llc, WireError> {
        let header = Header::parse(bytes, dialect)?;
        let message = match header.kind {
            Kind::ConfirmLink => Message::ConfirmLink(ConfirmLink::parse(&header, bytes)?),
            Kind::AddLink => Message::AddLink(AddLink::parse(&header, bytes, dialect)?),
            Kind::AddLinkCont => Message::AddLinkCont(AddLinkCont::parse(&header, bytes)?),
            Kind::DeleteLink => Message::DeleteLink(DeleteLink::parse(&header, bytes)?),
            Kind::RequestAddLink => Message::RequestAddLink(RequestAddLink::parse(&header, bytes)?),
            Kind::ConfirmRkey => Message::ConfirmRkey(ConfirmRkey::parse(&header, bytes)?),
            Kind::TestLink => Message::TestLink(TestLink::parse(&header, bytes)?),
            Kind::ConfirmRkeyCont => {
                Message::ConfirmRkeyCont(ConfirmRkeyCont::parse(&header, bytes)?)
            }
            Kind::DeleteRkey if header.version == Version::V2 && header.reply() => {
                Message::DeleteRkeyReply(DeleteRkeyReply::parse(&header, bytes)?)
            }
            Kind::DeleteRkey => Message::DeleteRkey(DeleteRkey::parse(&header, bytes, dialect)?),
        };
        Ok(Llc { version: header.version, message })
    }

    /// The bytes of the message.
    ///
    /// A type missing in the message's version (a continuation in version 2, say) is still written
    /// with the type byte of the version; no receiver accepts such a message.
    pub fn emit(&self, dialect: &Dialect) -> Vec<u8> {
        let version = self.version;
        match &self.message {
            Message::ConfirmLink(message) => message.emit(version, dialect),
            Message::AddLink(message) => message.emit(version, dialect),
            Message::AddLinkCont(message) => message.emit(version, dialect),
            Message::DeleteLink(message) => message.emit(version, dialect),
            Message::RequestAddLink(message) => message.emit(version, dialect),
            Message::ConfirmRkey(message) => message.emit(version, dialect),
            Message::TestLink(message) => message.emit(version, dialect),
            Message::ConfirmRkeyCont(message) => message.emit(version, dialect),
            Message::DeleteRkey(message) => message.emit(version, dialect),
            Message::DeleteRkeyReply(message) => message.emit(version, dialect),
        }
    }
}

#[cfg(test)]
mod tests;
