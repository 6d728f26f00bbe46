// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Type, length and flags.

use super::Dialect;
use crate::wire::WireError;
use crate::wire::clc::Version;
use crate::wire::codec::{Reader, Writer};

/// Bytes of every version 1 message and of the shortest version 2 message (LLC-1).
pub const LLC_LEN: usize = 44;
/// Bytes of the longest version 2 message (LLCV2-4).
pub const LLC_MAX_LEN: usize = 8192;

/// The reply to a request of the same type (LLC-3).
pub(super) const REPLY: u8 = 0x80;
/// Refused: Add Link, Request Add Link.
pub(super) const REJECTED: u8 = 0x40;
/// Delete Link: all links.
pub(super) const ALL: u8 = 0x40;
/// Delete Link: orderly.
pub(super) const ORDERLY: u8 = 0x20;
/// Negative reply: Confirm RKey and its continuation, Delete RKey.
pub(super) const NEGATIVE: u8 = 0x20;
/// To be tried again after a configuration change: Confirm RKey.
pub(super) const RETRY: u8 = 0x10;

/// LLC message type, the low nibble of the type byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// 1.
    ConfirmLink,
    /// 2.
    AddLink,
    /// 3, version 1 only.
    AddLinkCont,
    /// 4.
    DeleteLink,
    /// 5, version 2 only.
    RequestAddLink,
    /// 6.
    ConfirmRkey,
    /// 7.
    TestLink,
    /// 8, version 1 only.
    ConfirmRkeyCont,
    /// 9.
    DeleteRkey,
}

impl Kind {
    /// Type and version of a type byte (LLCV2-1).
    ///
    /// # Errors
    /// [`WireError::CdcNotLlc`], [`WireError::IgnorableLlcType`] or [`WireError::UnknownLlcType`].
    pub const fn from_type_byte(byte: u8) -> Result<(Version, Kind), WireError> {
        let kind = match byte & 0x0f {
            1 => Kind::ConfirmLink,
            2 => Kind::AddLink,
            3 => Kind::AddLinkCont,
            4 => Kind::DeleteLink,
            5 => Kind::RequestAddLink,
            6 => Kind::ConfirmRkey,
            7 => Kind::TestLink,
            8 => Kind::ConfirmRkeyCont,
            9 => Kind::DeleteRkey,
            _ => return Err(unknown(byte)),
        };
        match (byte >> 4, kind) {
            // Version 2 has no continuations (LLCV2-6).
            (0, Kind::RequestAddLink) | (2, Kind::AddLinkCont | Kind::ConfirmRkeyCont) => {
                Err(unknown(byte))
            }
            (0, kind) => Ok((Version::V1, kind)),
            (2, kind) => Ok((Version::V2, kind)),
            _ => Err(unknown(byte)),
        }
    }

    pub(super) const fn type_byte(self, version: Version) -> u8 {
        let code = match self {
            Kind::ConfirmLink => 1,
            Kind::AddLink => 2,
            Kind::AddLinkCont => 3,
            Kind::DeleteLink => 4,
            Kind::RequestAddLink => 5,
            Kind::ConfirmRkey => 6,
            Kind::TestLink => 7,
            Kind::ConfirmRkeyCont => 8,
            Kind::DeleteRkey => 9,
        };
        match version {
            Version::V1 => code,
            Version::V2 => 0x20 | code,
        }
    }

    /// The name used in errors.
    pub const fn name(self) -> &'static str {
        match self {
            Kind::ConfirmLink => "Confirm Link",
            Kind::AddLink => "Add Link",
            Kind::AddLinkCont => "Add Link Continuation",
            Kind::DeleteLink => "Delete Link",
            Kind::RequestAddLink => "Request Add Link",
            Kind::ConfirmRkey => "Confirm RKey",
            Kind::TestLink => "Test Link",
            Kind::ConfirmRkeyCont => "Confirm RKey Continuation",
            Kind::DeleteRkey => "Delete RKey",
        }
    }

    /// Whether version 2 has a form of more than 44 bytes (LLCV2-5).
    const fn may_be_long(self) -> bool {
        matches!(self, Kind::AddLink | Kind::RequestAddLink | Kind::DeleteRkey)
    }
}

/// The two high bits decide on the treatment of an unknown type (RFC 7609 A.3).
const fn unknown(byte: u8) -> WireError {
    match byte >> 6 {
        0b11 => WireError::CdcNotLlc(byte),
        0b10 => WireError::IgnorableLlcType(byte),
        _ => WireError::UnknownLlcType(byte),
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) version: Version,
    pub(super) kind: Kind,
    /// Bytes received, checked against the length field.
    pub(super) length: usize,
    /// Reserved in version 1 but for the reject reason of Add Link.
    pub(super) byte2: u8,
    pub(super) flags: u8,
}

impl Header {
    pub(super) fn parse(bytes: &[u8], dialect: &Dialect) -> Result<Header, WireError> {
        let mut reader = Reader::new(bytes);
        let (version, kind) = Kind::from_type_byte(reader.u8("LLC type")?)?;
        let have = bytes.len();
        if have < LLC_LEN {
            let field = kind.name();
            return Err(WireError::Truncated { field, at: 0, need: LLC_LEN, have });
        }
        let [byte1, byte2] = reader.array("length")?;
        let header = Header { version, kind, length: have, byte2, flags: reader.u8("flags")? };
        match version {
            Version::V1 => header.check_v1_length(byte1)?,
            Version::V2 => header.check_v2_length([byte1, byte2], dialect)?,
        }
        Ok(header)
    }

    fn check_v1_length(&self, declared: u8) -> Result<(), WireError> {
        let declared = usize::from(declared);
        if declared != LLC_LEN {
            let message = self.kind.name();
            return Err(WireError::LengthMismatch { message, got: declared, expected: LLC_LEN });
        }
        self.check_extra(LLC_LEN)
    }

    /// Version 2 has two bytes of length at offset 1 (LLCV2-3).
    fn check_v2_length(&self, field: [u8; 2], dialect: &Dialect) -> Result<(), WireError> {
        let (have, message) = (self.length, self.kind.name());
        let declared = usize::from(u16::from_be_bytes(field));
        let swapped = usize::from(u16::from_le_bytes(field));
        if dialect.goes_by_bytes_received() {
            if have != declared && have != swapped {
                return Err(WireError::LengthMismatch { message, got: swapped, expected: have });
            }
        } else if !(LLC_LEN..=LLC_MAX_LEN).contains(&declared) {
            let (min, max) = (LLC_LEN, LLC_MAX_LEN);
            return Err(WireError::LengthOutOfRange { message, got: declared, min, max });
        } else if have < declared {
            return Err(WireError::Truncated { field: message, at: 0, need: declared, have });
        } else {
            self.check_extra(declared)?;
        }
        if have > LLC_MAX_LEN {
            let (min, max) = (LLC_LEN, LLC_MAX_LEN);
            return Err(WireError::LengthOutOfRange { message, got: have, min, max });
        }
        if have > LLC_LEN && !self.kind.may_be_long() {
            return Err(self.length_mismatch(LLC_LEN));
        }
        Ok(())
    }

    fn check_extra(&self, length: usize) -> Result<(), WireError> {
        match self.length.saturating_sub(length) {
            0 => Ok(()),
            extra => Err(WireError::TrailingBytes { length, extra }),
        }
    }

    pub(super) fn reply(&self) -> bool {
        self.has(REPLY)
    }

    pub(super) fn has(&self, flag: u8) -> bool {
        self.flags & flag != 0
    }

    pub(super) fn length_mismatch(&self, expected: usize) -> WireError {
        WireError::LengthMismatch { message: self.kind.name(), got: self.length, expected }
    }

    /// A reader behind the header.
    pub(super) fn body<'a>(&self, bytes: &'a [u8]) -> Result<Reader<'a>, WireError> {
        let mut reader = Reader::new(bytes);
        reader.skip(4, "LLC header")?;
        Ok(reader)
    }

    /// Refuses a count outside `min..=max`.
    pub(super) fn count(
        field: &'static str,
        got: u8,
        (min, max): (u16, u16),
    ) -> Result<usize, WireError> {
        let got = u16::from(got);
        if (min..=max).contains(&got) {
            Ok(usize::from(got))
        } else {
            Err(WireError::CountOutOfRange { field, got, min, max })
        }
    }
}

/// The flag if the condition holds.
pub(super) fn flag(on: bool, flag: u8) -> u8 {
    if on { flag } else { 0 }
}

/// A writer behind a header; `byte2` is for version 1 only.
pub(super) fn start(version: Version, kind: Kind, byte2: u8, flags: u8) -> Writer {
    let mut writer = Writer::with_capacity(LLC_LEN);
    writer.u8(kind.type_byte(version));
    writer.u8(LLC_LEN as u8);
    writer.u8(byte2);
    writer.u8(flags);
    writer
}

/// Pads to 44 bytes and, in version 2, fills in the length.
pub(super) fn finish(mut writer: Writer, version: Version, dialect: &Dialect) -> Vec<u8> {
    writer.zeros(LLC_LEN.saturating_sub(writer.len()));
    if version == Version::V2 {
        let length = u16::try_from(writer.len()).unwrap_or(u16::MAX);
        writer.patch_u16(1, u16::from_be_bytes(dialect.length.put(length)));
    }
    writer.into_vec()
}
