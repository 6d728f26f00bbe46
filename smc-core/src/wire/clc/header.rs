// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The common header and trailer (RFC 7609 A.2), and a check of the first few bytes.
//!
//! ```text
//!  0 eye catcher | 4 type | 5 total length | 7 version (high nibble), flags (low nibble)
//!    ...
//!  length-4 eye catcher
//! ```

use crate::wire::WireError;
use crate::wire::codec::{Reader, Writer};

/// Bytes of the header.
pub const HEADER_LEN: usize = 8;
/// Bytes of the trailing eye catcher.
pub const TRAILER_LEN: usize = 4;
/// Longest accepted message. The longest with all known parts has 652 bytes; the rest is room for
/// parts inserted by later versions.
pub const MAX_LEN: usize = 4096;

/// CLC message type (CLC-2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// 1.
    Proposal,
    /// 2.
    Accept,
    /// 3.
    Confirm,
    /// 4.
    Decline,
}

impl Kind {
    const fn from_code(code: u8) -> Option<Kind> {
        match code {
            1 => Some(Kind::Proposal),
            2 => Some(Kind::Accept),
            3 => Some(Kind::Confirm),
            4 => Some(Kind::Decline),
            _ => None,
        }
    }

    /// The number in the type field.
    pub const fn code(self) -> u8 {
        match self {
            Kind::Proposal => 1,
            Kind::Accept => 2,
            Kind::Confirm => 3,
            Kind::Decline => 4,
        }
    }

    /// The name used in errors.
    pub const fn name(self) -> &'static str {
        match self {
            Kind::Proposal => "Proposal",
            Kind::Accept => "Accept",
            Kind::Confirm => "Confirm",
            Kind::Decline => "Decline",
        }
    }

    /// Shortest and longest total length over all SMC types and versions.
    const fn lengths(self) -> (usize, usize) {
        match self {
            Kind::Proposal => (52, MAX_LEN),
            Kind::Accept => (48, 160),
            Kind::Confirm => (48, 292),
            Kind::Decline => (28, 44),
        }
    }
}

/// The first eight bytes, checked without the rest of the message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) eye: EyeCatcher,
    pub(super) kind: Kind,
    pub(super) length: usize,
    /// Received version nibble, not 0.
    pub(super) version: u8,
    /// Low nibble of byte 7.
    pub(super) flags: u8,
}

/// First contact in Accept and Confirm, out of sync in Decline.
pub(super) const FLAG_BIT4: u8 = 0x08;
/// "Reason saved" in an SMC-Rv2 Accept.
pub(super) const FLAG_BIT5: u8 = 0x04;

impl Header {
    pub(super) fn parse(bytes: &[u8]) -> Result<Header, WireError> {
        let mut reader = Reader::new(bytes);
        let eye = match reader.array("leading eye catcher")? {
            eye if eye == EyeCatcher::Smcr.bytes() => EyeCatcher::Smcr,
            eye if eye == EyeCatcher::Smcd.bytes() => EyeCatcher::Smcd,
            other => return Err(WireError::BadLeadingEyeCatcher(other)),
        };
        let code = reader.u8("type")?;
        let kind = Kind::from_code(code).ok_or(WireError::UnknownClcType(code))?;
        let length = usize::from(reader.u16("length")?);
        let (min, max) = kind.lengths();
        if !(min..=max).contains(&length) {
            return Err(WireError::LengthOutOfRange {
                message: kind.name(),
                got: length,
                min,
                max,
            });
        }
        let byte7 = reader.u8("version and flags")?;
        let (version, flags) = (byte7 >> 4, byte7 & 0x0f);
        let later_versions = matches!(kind, Kind::Proposal | Kind::Decline);
        if version == 0 || (version > 2 && !later_versions) {
            return Err(WireError::BadVersion(version));
        }
        let header = Header { eye, kind, length, version, flags };
        if kind == Kind::Proposal && eye != EyeCatcher::Smcr {
            return Err(header.eye_mismatch());
        }
        Ok(header)
    }

    /// Checks that `bytes` contain exactly this message.
    pub(super) fn check_extent(&self, bytes: &[u8]) -> Result<(), WireError> {
        let have = bytes.len();
        if have < self.length {
            let field = self.kind.name();
            return Err(WireError::Truncated { field, at: 0, need: self.length, have });
        }
        if have > self.length {
            let extra = have - self.length;
            return Err(WireError::TrailingBytes { length: self.length, extra });
        }
        let at = self.end();
        match bytes.last_chunk::<TRAILER_LEN>() {
            Some(got) if *got == self.eye.bytes() => Ok(()),
            Some(got) => Err(WireError::BadTrailingEyeCatcher { at, got: *got }),
            None => Err(WireError::Truncated { field: "trailer", at, need: TRAILER_LEN, have }),
        }
    }

    /// Where the trailer starts.
    pub(super) fn end(&self) -> usize {
        self.length.saturating_sub(TRAILER_LEN)
    }

    /// The version to act on: nibbles above 2 are read as 2 (CLC-6).
    pub(super) fn version(&self) -> Version {
        if self.version == 1 { Version::V1 } else { Version::V2 }
    }

    /// Bits 6-7 of byte 7.
    pub(super) fn type_bits(&self) -> u8 {
        self.flags & 0x03
    }

    pub(super) fn eye_mismatch(&self) -> WireError {
        let (message, code) = (self.kind.code(), self.type_bits());
        WireError::EyeCatcherMismatch { eye: self.eye.bytes(), message, code }
    }

    pub(super) fn length_mismatch(&self, expected: usize) -> WireError {
        WireError::LengthMismatch { message: self.kind.name(), got: self.length, expected }
    }
}

/// A writer with the header already written; [`finish`] fills in the length.
pub(super) fn start(eye: EyeCatcher, kind: Kind, version: Version, flags: u8) -> Writer {
    let mut writer = Writer::with_capacity(256);
    writer.bytes(&eye.bytes());
    writer.u8(kind.code());
    writer.u16(0);
    writer.u8(version.number() << 4 | (flags & 0x0f));
    writer
}

/// Ends a message: trailer and length.
pub(super) fn finish(mut writer: Writer, eye: EyeCatcher) -> Vec<u8> {
    writer.bytes(&eye.bytes());
    let length = u16::try_from(writer.len()).unwrap_or(u16::MAX);
    writer.patch_u16(5, length);
    writer.into_vec()
}

/// Result of a look at the first bytes of a stream; see [`peek_header`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Peek {
    /// Nothing wrong so far, but this many bytes are needed to know the length.
    NeedMore(usize),
    /// A message of this many bytes, header included; later bytes are not part of the message.
    Message {
        /// Type of the message.
        kind: Kind,
        /// Total length of the message, bytes.
        length: usize,
    },
    /// Not CLC, and so a protocol error where CLC was expected (CLC-54).
    NotClc(WireError),
}

/// Returns the length of the message at the start of a stream, to be read without touching later
/// bytes (CLC-57). A wrong byte is found as soon as received.
pub fn peek_header(bytes: &[u8]) -> Peek {
    if let Some(wrong) = wrong_eye_catcher(bytes) {
        return Peek::NotClc(WireError::BadLeadingEyeCatcher(wrong));
    }
    match Header::parse(bytes) {
        Ok(Header { kind, length, .. }) => Peek::Message { kind, length },
        Err(WireError::Truncated { .. }) => Peek::NeedMore(HEADER_LEN),
        Err(error) => Peek::NotClc(error),
    }
}

/// The first up to four bytes, zero filled, unless an eye catcher begins so.
fn wrong_eye_catcher(bytes: &[u8]) -> Option<[u8; 4]> {
    let begins = |eye: EyeCatcher| bytes.iter().zip(eye.bytes()).all(|(got, want)| *got == want);
    if begins(EyeCatcher::Smcr) || begins(EyeCatcher::Smcd) {
        return None;
    }
    let mut got = [0; 4];
    for (slot, byte) in got.iter_mut().zip(bytes) {
        *slot = *byte;
    }
    Some(got)
}

/// A verdict on the first bytes of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Guess {
    /// A CLC message begins.
    Yes,
    /// No CLC message begins.
    No,
    /// Too few bytes to decide, no mismatch so far.
    NeedMore,
}

/// Whether a connection begins with a CLC message. Nothing is consumed: a server peeks, because its
/// client may be a plain TCP one (no TCP option distinguishes them).
///
/// A whole eye catcher means yes. An error behind the eye catcher is a protocol error, and not
/// taken for data (CLC-54, CLC-55).
pub fn looks_like_clc(prefix: &[u8]) -> Guess {
    match prefix {
        _ if wrong_eye_catcher(prefix).is_some() => Guess::No,
        [_, _, _, _, ..] => Guess::Yes,
        _ => Guess::NeedMore,
    }
}

/// SMC version of a CLC message.
///
/// Version nibbles above 2 are read as 2 where a later version may appear (CLC-6).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Version {
    /// RFC 7609.
    V1,
    /// SMCv2.0 or v2.1, told apart by the release.
    V2,
}

impl Version {
    /// The number in the version nibble.
    pub const fn number(self) -> u8 {
        match self {
            Version::V1 => 1,
            Version::V2 => 2,
        }
    }
}

/// The two eye catchers, in EBCDIC.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum EyeCatcher {
    /// "SMCR": all messages but SMC-D Accept and Confirm.
    #[default]
    Smcr,
    /// "SMCD": SMC-D Accept and Confirm; allowed in Decline (CLCV2-78).
    Smcd,
}

impl EyeCatcher {
    /// The four bytes.
    pub const fn bytes(self) -> [u8; 4] {
        match self {
            EyeCatcher::Smcr => [0xe2, 0xd4, 0xc3, 0xd9],
            EyeCatcher::Smcd => [0xe2, 0xd4, 0xc3, 0xc4],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PROPOSAL: [u8; 8] = [0xe2, 0xd4, 0xc3, 0xd9, 1, 0, 52, 0x10];

    #[test]
    fn length_is_known_after_eight_bytes_and_not_before() {
        for n in 0..8 {
            assert_eq!(peek_header(&PROPOSAL[..n]), Peek::NeedMore(8), "{n} bytes");
        }
        assert_eq!(peek_header(&PROPOSAL), Peek::Message { kind: Kind::Proposal, length: 52 });
    }

    // Shows: CLC-54, CLC-55.
    #[test]
    fn a_whole_eye_catcher_begins_a_clc_message_whatever_follows() {
        for eye in [EyeCatcher::Smcr, EyeCatcher::Smcd].map(EyeCatcher::bytes) {
            for n in 0..4 {
                assert_eq!(looks_like_clc(&eye[..n]), Guess::NeedMore, "{n} bytes");
            }
            for rest in [&b""[..], &[1], &[9], &[1, 0xff, 0xff, 0x26], b"data", &[0; 100]] {
                assert_eq!(looks_like_clc(&[&eye, rest].concat()), Guess::Yes, "{rest:x?}");
            }
        }
    }

    #[test]
    fn plain_data_is_known_at_its_first_byte() {
        let get = WireError::BadLeadingEyeCatcher([b'G', 0, 0, 0]);
        assert_eq!(peek_header(b"G"), Peek::NotClc(get));
        assert_eq!(looks_like_clc(b"G"), Guess::No);
        assert_eq!(looks_like_clc(b"GET / HTTP/1.1"), Guess::No);
        assert_eq!(looks_like_clc(&[0xe2, 0xd4, 0xc3, 0xd8]), Guess::No);
    }

    #[test]
    fn what_follows_the_header_does_not_matter_to_the_length() {
        let mut bytes = PROPOSAL.to_vec();
        bytes.extend([0xaa; 100]);
        assert_eq!(peek_header(&bytes), Peek::Message { kind: Kind::Proposal, length: 52 });
    }

    // Shows: CLC-5.
    #[test]
    fn a_message_of_another_extent_is_told_with_both_lengths() {
        let header = Header::parse(&PROPOSAL).unwrap();
        let short = WireError::Truncated { field: "Proposal", at: 0, need: 52, have: 8 };
        assert_eq!(header.check_extent(&PROPOSAL), Err(short));
        let long = WireError::TrailingBytes { length: 52, extra: 3 };
        assert_eq!(header.check_extent(&[0; 55]), Err(long));
    }

    // Shows: CLC-2.
    #[test]
    fn header_errors_have_names() {
        let with = |at: usize, value: u8| {
            let mut bytes = PROPOSAL;
            bytes[at] = value;
            Header::parse(&bytes).unwrap_err()
        };
        assert_eq!(with(4, 0), WireError::UnknownClcType(0));
        assert_eq!(with(4, 5), WireError::UnknownClcType(5));
        assert_eq!(with(7, 0x00), WireError::BadVersion(0));
        assert_eq!(with(0, 0xe3), WireError::BadLeadingEyeCatcher([0xe3, 0xd4, 0xc3, 0xd9]));
        let range =
            |got| WireError::LengthOutOfRange { message: "Proposal", got, min: 52, max: 4096 };
        assert_eq!(with(6, 51), range(51));
        assert_eq!(with(5, 0xff), range(0xff34));
        let eye = EyeCatcher::Smcd.bytes();
        let mismatch = WireError::EyeCatcherMismatch { eye, message: 1, code: 0 };
        assert_eq!(with(3, 0xc4), mismatch);
    }

    #[test]
    fn versions_above_two_are_read_as_two_where_a_later_one_may_appear() {
        let mut bytes = PROPOSAL;
        for nibble in 2..16 {
            bytes[7] = nibble << 4;
            assert_eq!(Header::parse(&bytes).unwrap().version(), Version::V2);
        }
        let mut accept = [0xe2, 0xd4, 0xc3, 0xd9, 2, 0, 68, 0x30];
        assert_eq!(Header::parse(&accept), Err(WireError::BadVersion(3)));
        accept[7] = 0x20;
        assert!(Header::parse(&accept).is_ok());
    }
}
