// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Accept and Confirm of SMC-R.
//!
//! Version 1, 68 bytes (RFC 7609 A.2.3, A.2.4):
//!
//! ```text
//!  0 header SMCR | 8 peer id | 16 GID | 32 MAC | 38 QPN (3) | 41 RKey | 45 RMBE index
//! 46 alert token | 50 size (high nibble), MTU (low) | 51 reserved | 52 virtual address
//! 60 reserved | 61 PSN (3) | 64 trailer
//! ```
//!
//! Version 2 (SMCv2 "CLC Accept SMC-Rv2.1") goes on from byte 64: 108 bytes, 160 with first contact
//! extension, 164 + 16n in a Confirm with it and `n` GIDs:
//!
//! ```text
//! 64 EID | 96 reserved | 104 FCE of 52 bytes | 156 Confirm: n, 3 reserved, n GIDs | trailer
//! ```

use super::accept_confirm::{FCE_V2_1_LEN, TYPE_R, size_code};
use super::header::{self, FLAG_BIT4, FLAG_BIT5, Header, TRAILER_LEN};
use super::{EyeCatcher, Fce, Kind, Limits, MAX_ENTRIES, Version};
use crate::wire::codec::{Reader, Writer};
use crate::wire::ids::{Eid, Gid, LinkLimits, Mac, Mtu, PeerId, Psn, Qpn, Rkey, SizeCode};
use crate::wire::{List, WireError};

/// Total length of version 1, Accept or Confirm (CLC-24).
const V1_LEN: usize = 68;
/// Total length of version 2 without extension (CLCV2-67).
const V2_LEN: usize = 108;
/// Total length of a version 2 Accept with extension.
const V2_FCE_LEN: usize = V2_LEN + FCE_V2_1_LEN;
/// Bytes of a GID list before its entries.
const GID_LIST_HEAD: usize = 4;
/// Link type bit of an extension: same subnet.
const DIRECT: u8 = 0x80;

/// How to write to the sender of an SMC-R Accept or Confirm; bytes 8 to 63 of v1 and v2.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SmcrLink {
    /// Sender's stack instance.
    pub peer_id: PeerId,
    /// Sender's GID; an IP address in v2.
    pub gid: Gid,
    /// Sender's RNIC.
    pub mac: Mac,
    /// Queue pair.
    pub qpn: Qpn,
    /// Key of the RMB.
    pub rkey: Rkey,
    /// Element of the RMB, from 1 (CLCV2-66, RMB-2).
    pub index: u8,
    /// Alert token for CDC messages to the sender.
    pub token: u32,
    /// Size of an element.
    pub size: SizeCode,
    /// MTU code; parsing refuses a reserved one when the first contact flag is on. A v1 Confirm has
    /// no flag: ask [`Mtu::bytes`] at first contact.
    pub mtu: Mtu,
    /// Virtual address of the start of the RMB.
    pub address: u64,
    /// First packet sequence number of the sender.
    pub psn: Psn,
}

/// SMC-Rv1 Accept or Confirm.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SmcrV1 {
    /// A new link group begins. Accept only: the flag is neither sent nor read in Confirm (CLC-25).
    pub first_contact: bool,
    /// The sender's parameters for writes by the peer.
    pub link: SmcrLink,
}

/// First contact extension of SMC-R.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SmcrFce {
    /// The fields shared with SMC-D.
    pub common: Fce,
    /// Same subnet, no router in between (CLCV2-54).
    pub direct: bool,
    /// Final limits of the link group; v2.1 only (CLCV2-57, CLCV2-58).
    pub limits: LinkLimits,
    /// Confirm only: the client's addresses. If absent there, the one GID of the message is sent.
    pub gids: Option<GidList>,
}

/// A client's RoCEv2 addresses: the active link's, then alternates in order of preference, 1 to 8
/// in all (CLCV2-71, CLCV2-72).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GidList {
    /// Address of the active link.
    pub active: Gid,
    /// Other addresses.
    pub alternates: List<Gid, { MAX_ENTRIES - 1 }>,
}

/// SMC-Rv2 Accept or Confirm.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SmcrV2 {
    /// Accept only: the server has stored why SMC-D was not chosen (CLCV2-69).
    pub reason_saved: bool,
    /// How to write to the sender.
    pub link: SmcrLink,
    /// Negotiated EID.
    pub eid: Eid,
    /// First contact flag and extension: both or neither (CLCV2-44).
    pub first_contact: Option<SmcrFce>,
}

impl SmcrLink {
    /// Reads bytes 8 to 63; `size` and `mtu` are judged by [`SmcrLink::judge`] once the rest of the
    /// message is known to be in order.
    fn parse(reader: &mut Reader<'_>) -> Result<SmcrLink, WireError> {
        reader.skip(header::HEADER_LEN, "header")?;
        let peer_id = PeerId(reader.array("peer id")?);
        let gid = Gid(reader.array("GID")?);
        let mac = Mac(reader.array("MAC")?);
        let qpn = Qpn::from_be_bytes(reader.array("QPN")?);
        let rkey = Rkey(reader.u32("RKey")?);
        let index = reader.u8("RMBE index")?;
        if index == 0 {
            return Err(WireError::RmbIndexZero);
        }
        let token = reader.u32("alert token")?;
        let size_and_mtu = reader.u8("RMBE size and MTU")?;
        let size = size_code(size_and_mtu, SizeCode::FIELD_MAX, "RMBE size")?;
        reader.skip(1, "reserved")?;
        let address = reader.u64("RMB address")?;
        reader.skip(1, "reserved")?;
        let psn = Psn::from_be_bytes(reader.array("PSN")?);
        let mtu = Mtu::from_code(size_and_mtu);
        Ok(SmcrLink { peer_id, gid, mac, qpn, rkey, index, token, size, mtu, address, psn })
    }

    /// Refuses reserved values; a reserved MTU counts at first contact only (CLC-28, CLC-29).
    fn judge(&self, first_contact: bool, limits: &Limits) -> Result<(), WireError> {
        size_code(self.size.code() << 4, limits.smcr_size, "RMBE size")?;
        if first_contact {
            self.mtu.bytes()?;
        }
        Ok(())
    }

    fn emit(&self, writer: &mut Writer) {
        writer.bytes(&self.peer_id.0);
        writer.bytes(&self.gid.0);
        writer.bytes(&self.mac.0);
        writer.bytes(&self.qpn.to_be_bytes());
        writer.u32(self.rkey.0);
        writer.u8(self.index);
        writer.u32(self.token);
        writer.u8(self.size.code() << 4 | self.mtu.code());
        writer.zeros(1);
        writer.u64(self.address);
        writer.zeros(1);
        writer.bytes(&self.psn.to_be_bytes());
    }
}

impl SmcrV1 {
    pub(super) fn parse_body(
        header: &Header,
        body: &[u8],
        limits: &Limits,
    ) -> Result<SmcrV1, WireError> {
        if header.length != V1_LEN {
            return Err(header.length_mismatch(V1_LEN));
        }
        let link = SmcrLink::parse(&mut Reader::new(body))?;
        let first_contact = header.kind == Kind::Accept && header.flags & FLAG_BIT4 != 0;
        link.judge(first_contact, limits)?;
        Ok(SmcrV1 { first_contact, link })
    }

    /// The bytes of the message; `kind` is Accept or Confirm.
    pub(super) fn emit(&self, kind: Kind) -> Vec<u8> {
        let flag = self.first_contact && kind == Kind::Accept;
        let flags = TYPE_R | if flag { FLAG_BIT4 } else { 0 };
        let mut writer = header::start(EyeCatcher::Smcr, kind, Version::V1, flags);
        self.link.emit(&mut writer);
        header::finish(writer, EyeCatcher::Smcr)
    }
}

impl SmcrV2 {
    pub(super) fn parse_body(
        header: &Header,
        body: &[u8],
        limits: &Limits,
    ) -> Result<SmcrV2, WireError> {
        if header.length < V2_LEN {
            return Err(header.length_mismatch(V2_LEN));
        }
        let mut reader = Reader::new(body);
        let link = SmcrLink::parse(&mut reader)?;
        let eid = Eid::from_wire(reader.array("EID")?);
        reader.skip(8, "reserved")?;
        let first_contact = parse_extension(header, reader)?;
        link.judge(first_contact.is_some(), limits)?;
        let reason_saved = header.kind == Kind::Accept && header.flags & FLAG_BIT5 != 0;
        Ok(SmcrV2 { reason_saved, link, eid, first_contact })
    }

    /// The bytes of the message; `kind` is Accept or Confirm.
    pub(super) fn emit(&self, kind: Kind) -> Vec<u8> {
        let mut flags = TYPE_R;
        if self.first_contact.is_some() {
            flags |= FLAG_BIT4;
        }
        if self.reason_saved && kind == Kind::Accept {
            flags |= FLAG_BIT5;
        }
        let mut writer = header::start(EyeCatcher::Smcr, kind, Version::V2, flags);
        self.link.emit(&mut writer);
        writer.bytes(self.eid.as_bytes());
        writer.zeros(8);
        if let Some(fce) = &self.first_contact {
            fce.emit(&mut writer);
            if kind == Kind::Confirm {
                let own = GidList { active: self.link.gid, alternates: List::new() };
                fce.gids.unwrap_or(own).emit(&mut writer);
            }
        }
        header::finish(writer, EyeCatcher::Smcr)
    }
}

/// The extension goes with the flag; one without the flag is skipped (CLCV2-45, CLCV2-46).
fn parse_extension(header: &Header, mut reader: Reader<'_>) -> Result<Option<SmcrFce>, WireError> {
    let shortest = match header.kind {
        Kind::Confirm => V2_FCE_LEN + GID_LIST_HEAD,
        _ => V2_FCE_LEN,
    };
    let flag = header.flags & FLAG_BIT4 != 0;
    match header.length {
        V2_LEN if flag => return Err(WireError::FirstContactWithoutExtension),
        V2_LEN => return Ok(None),
        length if length < shortest => {
            return Err(header.length_mismatch(if flag { shortest } else { V2_LEN }));
        }
        _ => {}
    }
    let direct = reader.u8("link type")? & DIRECT != 0;
    let mut common = Fce::parse_base(&mut reader)?;
    let mut limits =
        LinkLimits { max_conns: reader.u8("max connections")?, max_links: reader.u8("max links")? };
    if common.release.has_v2_1_fields() {
        common.parse_v2_1(&mut reader)?;
    } else {
        limits = LinkLimits::NONE;
        reader.skip(14, "reserved")?;
    }
    let gids = match header.kind {
        Kind::Confirm => Some(GidList::parse(&mut reader)?),
        _ => None,
    };
    let expected = reader.at() + TRAILER_LEN;
    if header.length != expected {
        return Err(header.length_mismatch(expected));
    }
    Ok(flag.then_some(SmcrFce { common, direct, limits, gids }))
}

impl SmcrFce {
    fn emit(&self, writer: &mut Writer) {
        writer.u8(if self.direct { DIRECT } else { 0 });
        self.common.emit_base(writer);
        if self.common.release.has_v2_1_fields() {
            writer.u8(self.limits.max_conns);
            writer.u8(self.limits.max_links);
        } else {
            writer.zeros(2);
        }
        self.common.emit_v2_1(writer);
    }
}

impl GidList {
    /// The active link's address, then the alternates.
    pub fn iter(&self) -> impl Iterator<Item = Gid> + '_ {
        core::iter::once(self.active).chain(self.alternates.iter().copied())
    }

    /// Reads count, reserved bytes and entries (SMCv2 "Client RoCEv2 GID list"). A wrong count
    /// spoils the message (ERR-45).
    pub(in crate::wire) fn parse(reader: &mut Reader<'_>) -> Result<GidList, WireError> {
        let count = reader.u8("GID count")?;
        if !(1..=MAX_ENTRIES).contains(&usize::from(count)) {
            return Err(WireError::GidListCount(count));
        }
        reader.skip(3, "reserved")?;
        let active = Gid(reader.array("GID list entry")?);
        let mut alternates = List::new();
        for _ in 1..count {
            let gid = Gid(reader.array("GID list entry")?);
            alternates.push(gid).map_err(|_| WireError::GidListCount(count))?;
        }
        Ok(GidList { active, alternates })
    }

    /// Writes count, reserved bytes and entries.
    pub(in crate::wire) fn emit(&self, writer: &mut Writer) {
        writer.count(1 + self.alternates.len());
        writer.zeros(3);
        for gid in self.iter() {
            writer.bytes(&gid.0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::Message;
    use super::*;
    use crate::wire::Reaction;
    use crate::wire::ids::{Features, OsType, Release};

    fn link() -> SmcrLink {
        SmcrLink {
            peer_id: PeerId([1; 8]),
            gid: Gid::from_ipv4([10, 9, 0, 1]),
            mac: Mac([2; 6]),
            qpn: Qpn::new(0x11),
            rkey: Rkey(0x3e0),
            index: 1,
            token: 1,
            size: SizeCode::RFC_MAX,
            mtu: Mtu::B1024,
            address: 0xff11_0000_00d9_0000,
            psn: Psn::new(0x87_e8ec),
        }
    }

    fn smcr_v2(first_contact: Option<SmcrFce>) -> SmcrV2 {
        let eid = Eid::new("LAB").unwrap();
        SmcrV2 { reason_saved: false, link: link(), eid, first_contact }
    }

    fn fce(alternates: Option<usize>) -> SmcrFce {
        let others = [Gid::from_ipv4([10, 9, 0, 9]); 7];
        let common = Fce {
            os: OsType::LINUX,
            release: Release::V2_1,
            features: Features::EMULATED_ISM,
            ..Fce::default()
        };
        let gids = alternates.map(|n| GidList {
            active: link().gid,
            alternates: List::from_slice(&others[..n]).unwrap(),
        });
        let limits = LinkLimits { max_conns: 255, max_links: 2 };
        SmcrFce { common, direct: true, limits, gids }
    }

    fn refusal(bytes: &[u8]) -> WireError {
        Message::parse(bytes).unwrap_err()
    }

    // Shows: CLC-24, CLCV2-46, CLCV2-67.
    #[test]
    fn accept_lengths() {
        for (first_contact, length) in [(None, 108), (Some(fce(None)), 160)] {
            let message = smcr_v2(first_contact);
            let bytes = message.emit(Kind::Accept);
            assert_eq!(bytes.len(), length);
            assert_eq!(Message::parse(&bytes), Ok(Message::AcceptR2(message)));
        }
    }

    // Shows: CLCV2-46, CLCV2-70.
    #[test]
    fn confirm_lengths_for_every_gid_list() {
        for n in 1..=8 {
            let message = smcr_v2(Some(fce(Some(n - 1))));
            let bytes = message.emit(Kind::Confirm);
            assert_eq!(bytes.len(), 164 + 16 * n);
            assert_eq!(Message::parse(&bytes), Ok(Message::ConfirmR2(message)));
        }
    }

    #[test]
    fn confirm_without_list_sends_its_own_gid() {
        let bytes = smcr_v2(Some(fce(None))).emit(Kind::Confirm);
        assert_eq!(Message::parse(&bytes), Ok(Message::ConfirmR2(smcr_v2(Some(fce(Some(0)))))));
    }

    // Shows: CLCV2-71, ERR-45.
    #[test]
    fn gid_count_must_be_1_to_8_and_fit() {
        let mut bytes = smcr_v2(Some(fce(Some(1)))).emit(Kind::Confirm);
        for count in [0, 9, 255] {
            bytes[156] = count;
            assert_eq!(refusal(&bytes), WireError::GidListCount(count));
        }
        bytes[156] = 1;
        let mismatch = WireError::LengthMismatch { message: "Confirm", got: 196, expected: 180 };
        assert_eq!(refusal(&bytes), mismatch);
        bytes[156] = 3;
        let field = "GID list entry";
        assert_eq!(refusal(&bytes), WireError::Truncated { field, at: 192, need: 16, have: 0 });
    }

    // Shows: CLCV2-45.
    #[test]
    fn extension_without_flag_is_skipped() {
        let mut bytes = smcr_v2(Some(fce(None))).emit(Kind::Accept);
        bytes[7] &= !FLAG_BIT4;
        assert_eq!(Message::parse(&bytes), Ok(Message::AcceptR2(smcr_v2(None))));
    }

    // Shows: CLCV2-44.
    #[test]
    fn flag_without_extension_is_a_protocol_error() {
        for kind in [Kind::Accept, Kind::Confirm] {
            let mut bytes = smcr_v2(None).emit(kind);
            bytes[7] |= FLAG_BIT4;
            assert_eq!(refusal(&bytes), WireError::FirstContactWithoutExtension);
        }
    }

    // Shows: CLCV2-13.
    #[test]
    fn fields_of_v2_1_are_not_looked_at_in_v2_0() {
        let mut bytes = smcr_v2(Some(fce(None))).emit(Kind::Accept);
        bytes[105] = 0x20;
        let Ok(Message::AcceptR2(accept)) = Message::parse(&bytes) else { panic!() };
        let got = accept.first_contact.unwrap();
        assert_eq!(got.limits, LinkLimits::NONE);
        assert_eq!(got.common.features, Features::empty());
        assert_eq!(accept.emit(Kind::Accept)[140..156], [0; 16]);
    }

    // Shows: CLC-28.
    #[test]
    fn reserved_mtu_is_declined_at_first_contact_only() {
        for code in [0, 6, 15] {
            let mtu = Mtu::from_code(code);
            let odd = SmcrV2 { link: SmcrLink { mtu, ..link() }, ..smcr_v2(None) };
            assert_eq!(Message::parse(&odd.emit(Kind::Accept)), Ok(Message::AcceptR2(odd)));
            let first = SmcrV2 { first_contact: Some(fce(None)), ..odd };
            let error = refusal(&first.emit(Kind::Accept));
            assert_eq!(error, WireError::ReservedValue { field: "MTU", value: code });
            assert_eq!(error.reaction(), Reaction::Decline);
        }
    }

    // Shows: CLCV2-66, RMB-2.
    #[test]
    fn element_index_counts_from_one() {
        let mut bytes = smcr_v2(None).emit(Kind::Accept);
        bytes[45] = 0;
        assert_eq!(refusal(&bytes), WireError::RmbIndexZero);
    }

    // Shows: CLCV2-69.
    #[test]
    fn reason_saved_is_bit_5_of_accept() {
        let message = SmcrV2 { reason_saved: true, ..smcr_v2(None) };
        let bytes = message.emit(Kind::Accept);
        assert_eq!(bytes[7], 0x24);
        assert_eq!(Message::parse(&bytes), Ok(Message::AcceptR2(message)));
        assert_eq!(message.emit(Kind::Confirm)[7], 0x20);
    }

    // Shows: CLC-25.
    #[test]
    fn version_1_confirm_has_no_flag() {
        let message = SmcrV1 { first_contact: true, link: link() };
        let accept = message.emit(Kind::Accept);
        assert_eq!((accept.len(), accept[7]), (68, 0x18));
        assert_eq!(Message::parse(&accept), Ok(Message::AcceptR1(message)));
        let mut confirm = message.emit(Kind::Confirm);
        assert_eq!(confirm[7], 0x10);
        confirm[7] = 0x18;
        let received = SmcrV1 { first_contact: false, ..message };
        assert_eq!(Message::parse(&confirm), Ok(Message::ConfirmR1(received)));
    }

    #[test]
    fn version_1_type_bits_are_reserved_and_version_2_ones_are_not() {
        let message = SmcrV1 { first_contact: false, link: link() };
        let mut bytes = message.emit(Kind::Accept);
        bytes[7] |= 0x03;
        assert_eq!(Message::parse(&bytes), Ok(Message::AcceptR1(message)));
        let mut bytes = smcr_v2(None).emit(Kind::Accept);
        bytes[7] |= 0x01;
        let eye = EyeCatcher::Smcr.bytes();
        assert_eq!(refusal(&bytes), WireError::EyeCatcherMismatch { eye, message: 2, code: 1 });
    }
}
