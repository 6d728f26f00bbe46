// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Accept and Confirm of SMC-D.
//!
//! Version 1, 48 bytes (in no specification: as Linux has it, wire errata D-1):
//!
//! ```text
//!  0 header SMCD | 8 GID | 16 DMB token | 24 DMBE index | 25 size (high nibble) | 26 reserved
//! 28 link id | 32 reserved | 44 trailer
//! ```
//!
//! Version 2, 78 bytes, 114 or 130 with first contact extension (SMCv2 "CLC Accept SMC-Dv2.1"):
//!
//! ```text
//!  0 header SMCD | 8 GID | 16 DMB token | 24 DMBE index | 25 size (high nibble) | 26 reserved
//! 28 link id | 32 CHID | 34 EID | 66 extended GID part 2 | 74 FCE of 36 or 52 bytes, or trailer
//! ```

use super::accept_confirm::{FCE_V2_0_LEN, FCE_V2_1_LEN, TYPE_D, size_code};
use super::header::{self, FLAG_BIT4, Header, TRAILER_LEN};
use super::{EyeCatcher, Fce, Kind, Limits, Version};
use crate::wire::WireError;
use crate::wire::codec::{Reader, Writer};
use crate::wire::ids::{Chid, DmbToken, Eid, Gid, GidV1, LinkId, SizeCode};

/// Total length of version 1 (CLC-62).
const V1_LEN: usize = 48;
const V2_FIXED: usize = 74;
/// Total length of version 2 without extension (CLCV2-63).
const V2_LEN: usize = V2_FIXED + TRAILER_LEN;

/// SMC-Dv1 Accept or Confirm. A DMB is announced as an RMB is, with the same size codes (RMB-31).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SmcdV1 {
    /// The server takes the client for a new peer; Confirm repeats it.
    pub first_contact: bool,
    /// Sender's ISM GID.
    pub gid: GidV1,
    /// Right to write the sender's DMB.
    pub token: DmbToken,
    /// Element of the DMB, from 0 (CLCV2-66).
    pub index: u8,
    /// Size of an element.
    pub size: SizeCode,
    /// Sender's logical link.
    pub link_id: LinkId,
}

/// SMC-Dv2 Accept or Confirm.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SmcdV2 {
    /// Sender's GID. Part 2 is sent, and looked at, only if the CHID is an emulated one (EISM-18 to
    /// EISM-20).
    pub gid: Gid,
    /// Right to write the sender's DMB.
    pub token: DmbToken,
    /// Element of the DMB, from 0 (CLCV2-66).
    pub index: u8,
    /// Size of an element.
    pub size: SizeCode,
    /// Sender's logical link.
    pub link_id: LinkId,
    /// Fabric of both ends (CLCV2-64).
    pub chid: Chid,
    /// Negotiated EID.
    pub eid: Eid,
    /// First contact flag and extension: both or neither (CLCV2-44).
    pub first_contact: Option<Fce>,
}

fn flags(first_contact: bool) -> u8 {
    TYPE_D | if first_contact { FLAG_BIT4 } else { 0 }
}

impl SmcdV1 {
    pub(super) fn parse_body(
        header: &Header,
        body: &[u8],
        limits: &Limits,
    ) -> Result<SmcdV1, WireError> {
        if header.length != V1_LEN {
            return Err(header.length_mismatch(V1_LEN));
        }
        let mut reader = Reader::new(body);
        reader.skip(header::HEADER_LEN, "header")?;
        let gid = GidV1(reader.array("GID")?);
        let token = DmbToken(reader.u64("DMB token")?);
        let index = reader.u8("DMBE index")?;
        let size = size_code(reader.u8("DMBE size")?, limits.smcd_size, "DMBE size")?;
        reader.skip(2, "reserved")?;
        let link_id = LinkId(reader.array("link id")?);
        let first_contact = header.flags & FLAG_BIT4 != 0;
        Ok(SmcdV1 { first_contact, gid, token, index, size, link_id })
    }

    /// The bytes of the message; `kind` is Accept or Confirm.
    pub(super) fn emit(&self, kind: Kind) -> Vec<u8> {
        let mut writer =
            header::start(EyeCatcher::Smcd, kind, Version::V1, flags(self.first_contact));
        let SmcdV1 { gid, token, index, size, link_id, .. } = *self;
        emit_buffer(&mut writer, gid, token, index, size, link_id);
        writer.zeros(12);
        header::finish(writer, EyeCatcher::Smcd)
    }
}

/// Bytes 8 to 31.
fn emit_buffer(
    writer: &mut Writer,
    gid: GidV1,
    token: DmbToken,
    index: u8,
    size: SizeCode,
    link_id: LinkId,
) {
    writer.bytes(&gid.0);
    writer.u64(token.0);
    writer.u8(index);
    writer.u8(size.code() << 4);
    writer.zeros(2);
    writer.bytes(&link_id.0);
}

impl SmcdV2 {
    pub(super) fn parse_body(
        header: &Header,
        body: &[u8],
        limits: &Limits,
    ) -> Result<SmcdV2, WireError> {
        if header.length < V2_LEN {
            return Err(header.length_mismatch(V2_LEN));
        }
        let mut reader = Reader::new(body);
        reader.skip(header::HEADER_LEN, "header")?;
        let part1 = GidV1(reader.array("GID")?);
        let token = DmbToken(reader.u64("DMB token")?);
        let index = reader.u8("DMBE index")?;
        let size = reader.u8("DMBE size")?;
        reader.skip(2, "reserved")?;
        let link_id = LinkId(reader.array("link id")?);
        let chid = Chid(reader.u16("CHID")?);
        let eid = Eid::from_wire(reader.array("EID")?);
        let part2 = match GidV1(reader.array("extended GID")?) {
            part2 if chid.is_emulated() => part2,
            _ => GidV1::NONE,
        };
        let first_contact = parse_extension(header, reader)?;
        // Last, so a message with several errors is a protocol error, and no Decline answers it.
        let size = size_code(size, limits.smcd_size, "DMBE size")?;
        let gid = Gid::from_parts(part1, part2);
        Ok(SmcdV2 { gid, token, index, size, link_id, chid, eid, first_contact })
    }

    /// The bytes of the message; `kind` is Accept or Confirm.
    pub(super) fn emit(&self, kind: Kind) -> Vec<u8> {
        let flags = flags(self.first_contact.is_some());
        let mut writer = header::start(EyeCatcher::Smcd, kind, Version::V2, flags);
        let SmcdV2 { gid, token, index, size, link_id, chid, .. } = *self;
        emit_buffer(&mut writer, gid.part1(), token, index, size, link_id);
        writer.u16(chid.0);
        writer.bytes(self.eid.as_bytes());
        writer.bytes(&if chid.is_emulated() { gid.part2().0 } else { GidV1::NONE.0 });
        if let Some(fce) = &self.first_contact {
            writer.zeros(1);
            fce.emit_base(&mut writer);
            if fce.release.has_v2_1_fields() {
                writer.zeros(2);
                fce.emit_v2_1(&mut writer);
            }
        }
        header::finish(writer, EyeCatcher::Smcd)
    }
}

/// The extension goes with the flag; one without the flag is skipped (CLCV2-45, CLCV2-46).
fn parse_extension(header: &Header, mut reader: Reader<'_>) -> Result<Option<Fce>, WireError> {
    const WITH_V2_0: usize = V2_LEN + FCE_V2_0_LEN;
    const WITH_V2_1: usize = V2_LEN + FCE_V2_1_LEN;
    if header.flags & FLAG_BIT4 == 0 {
        return match header.length {
            V2_LEN | WITH_V2_0 | WITH_V2_1 => Ok(None),
            _ => Err(header.length_mismatch(V2_LEN)),
        };
    }
    if header.length == V2_LEN {
        return Err(WireError::FirstContactWithoutExtension);
    }
    if header.length < WITH_V2_0 {
        return Err(header.length_mismatch(WITH_V2_0));
    }
    reader.skip(1, "reserved")?;
    let mut fce = Fce::parse_base(&mut reader)?;
    let expected = if fce.release.has_v2_1_fields() { WITH_V2_1 } else { WITH_V2_0 };
    if header.length != expected {
        return Err(header.length_mismatch(expected));
    }
    if fce.release.has_v2_1_fields() {
        reader.skip(2, "reserved")?;
        fce.parse_v2_1(&mut reader)?;
    }
    Ok(Some(fce))
}

#[cfg(test)]
mod tests {
    use super::super::Message;
    use super::*;
    use crate::wire::Reaction;
    use crate::wire::ids::{Features, Release};

    fn smcd_v2(first_contact: Option<Fce>) -> SmcdV2 {
        SmcdV2 {
            gid: Gid([7; 16]),
            token: DmbToken(0x4a43_1356_208c_140a),
            index: 0,
            size: SizeCode::RFC_MAX,
            link_id: LinkId([0, 1, 0, 0]),
            chid: Chid(0xff01),
            eid: Eid::new("LAB").unwrap(),
            first_contact,
        }
    }

    fn fce(release: Release) -> Fce {
        let features = match release {
            Release::V2_0 => Features::empty(),
            _ => Features::EMULATED_ISM,
        };
        Fce { release, features, ..Fce::default() }
    }

    fn refusal(bytes: &[u8]) -> WireError {
        Message::parse(bytes).unwrap_err()
    }

    // Shows: CLCV2-46, CLCV2-63.
    #[test]
    fn lengths_follow_flag_and_release() {
        for (first_contact, length) in
            [(None, 78), (Some(fce(Release::V2_0)), 114), (Some(fce(Release::V2_1)), 130)]
        {
            let message = smcd_v2(first_contact);
            let bytes = message.emit(Kind::Accept);
            assert_eq!(bytes.len(), length);
            assert_eq!(Message::parse(&bytes), Ok(Message::AcceptD2(message)));
            let confirm = message.emit(Kind::Confirm);
            assert_eq!(Message::parse(&confirm), Ok(Message::ConfirmD2(message)));
        }
    }

    // Shows: CLCV2-45.
    #[test]
    fn extension_without_flag_is_skipped() {
        for release in [Release::V2_0, Release::V2_1] {
            let mut bytes = smcd_v2(Some(fce(release))).emit(Kind::Accept);
            bytes[7] &= !FLAG_BIT4;
            assert_eq!(Message::parse(&bytes), Ok(Message::AcceptD2(smcd_v2(None))));
        }
    }

    // Shows: CLCV2-44.
    #[test]
    fn flag_without_extension_is_a_protocol_error() {
        let mut bytes = smcd_v2(None).emit(Kind::Accept);
        bytes[7] |= FLAG_BIT4;
        assert_eq!(refusal(&bytes), WireError::FirstContactWithoutExtension);
        assert_eq!(refusal(&bytes).reaction(), Reaction::Break);
    }

    #[test]
    fn extension_length_must_match_its_release() {
        let mut bytes = smcd_v2(Some(fce(Release::V2_1))).emit(Kind::Accept);
        bytes[75] &= 0xf0;
        let mismatch = WireError::LengthMismatch { message: "Accept", got: 130, expected: 114 };
        assert_eq!(refusal(&bytes), mismatch);
        let mut bytes = smcd_v2(Some(fce(Release::V2_0))).emit(Kind::Accept);
        bytes[75] |= 0x05;
        let mismatch = WireError::LengthMismatch { message: "Accept", got: 114, expected: 130 };
        assert_eq!(refusal(&bytes), mismatch);
    }

    #[test]
    fn later_releases_keep_the_layout_of_v2_1() {
        let message = smcd_v2(Some(fce(Release::from_code(5))));
        let bytes = message.emit(Kind::Accept);
        assert_eq!(Message::parse(&bytes), Ok(Message::AcceptD2(message)));
    }

    #[test]
    fn extended_gid_means_something_for_emulated_chids_only() {
        let platform = SmcdV2 { chid: Chid(7), ..smcd_v2(None) };
        let mut bytes = platform.emit(Kind::Accept);
        assert_eq!(bytes[66..74], [0; 8]);
        bytes[66..74].fill(0xaa);
        let gid = Gid::from_parts(platform.gid.part1(), GidV1::NONE);
        let received = SmcdV2 { gid, ..platform };
        assert_eq!(Message::parse(&bytes), Ok(Message::AcceptD2(received)));
    }

    // Shows: RMB-31.
    #[test]
    fn element_size_above_the_limit_is_answered_by_decline() {
        let mut bytes = smcd_v2(None).emit(Kind::Accept);
        bytes[25] = 0x60;
        assert!(Message::parse(&bytes).is_ok());
        let error = Message::parse_with(&bytes, &Limits::RFC).unwrap_err();
        assert_eq!(error, WireError::ReservedValue { field: "DMBE size", value: 6 });
        bytes[25] = 0x70;
        assert_eq!(refusal(&bytes), WireError::ReservedValue { field: "DMBE size", value: 7 });
        assert_eq!(refusal(&bytes).reaction(), Reaction::Decline);
    }

    #[test]
    fn type_bits_must_agree_with_the_eye_catcher() {
        let mut bytes = smcd_v2(None).emit(Kind::Accept);
        for code in [0, 2, 3] {
            bytes[7] = 0x20 | code;
            let eye = EyeCatcher::Smcd.bytes();
            assert_eq!(refusal(&bytes), WireError::EyeCatcherMismatch { eye, message: 2, code });
        }
    }

    // Shows: CLC-62.
    #[test]
    fn version_1_is_48_bytes_with_the_flag_in_both_messages() {
        let message = SmcdV1 {
            first_contact: true,
            gid: GidV1([3; 8]),
            token: DmbToken(1),
            index: 0,
            size: SizeCode::MIN,
            link_id: LinkId([0, 1, 0, 0]),
        };
        let accept = message.emit(Kind::Accept);
        assert_eq!((accept.len(), accept[7]), (48, 0x19));
        assert_eq!(Message::parse(&accept), Ok(Message::AcceptD1(message)));
        let confirm = SmcdV1 { first_contact: false, ..message };
        let bytes = confirm.emit(Kind::Confirm);
        assert_eq!((bytes.len(), bytes[7]), (48, 0x11));
        assert_eq!(Message::parse(&bytes), Ok(Message::ConfirmD1(confirm)));
    }
}
