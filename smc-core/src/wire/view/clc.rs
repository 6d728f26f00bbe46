// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! CLC messages.

use super::walk::{Mark, Walk};
use super::{View, words};
use crate::wire::clc::{HEADER_LEN, Kind, MAX_ENTRIES, Message, SmcTypes, TRAILER_LEN};
use crate::wire::ids::{Chid, Mac, PeerId};

/// The form of a message, decided by byte 7 and the eye catcher.
struct Form {
    kind: Option<Kind>,
    smcd: bool,
    v1: bool,
    byte7: u8,
    byte7_field: Option<Mark>,
    /// Whether the input has the announced length, trailer included.
    complete: bool,
}

impl Form {
    fn bit4(&self) -> bool {
        self.byte7 & 0x08 != 0
    }
}

pub(super) fn view(bytes: &[u8]) -> View {
    let mut walk = Walk::new(bytes);
    let (form, title) = header(&mut walk, bytes.len());
    if let Some(form) = form {
        match (form.kind, form.smcd, form.v1) {
            (Some(Kind::Proposal), ..) => proposal(&mut walk, &form),
            (Some(Kind::Accept | Kind::Confirm), true, v1) => smcd(&mut walk, &form, v1),
            (Some(Kind::Accept | Kind::Confirm), false, v1) => smcr(&mut walk, &form, v1),
            (Some(Kind::Decline), ..) => decline(&mut walk),
            (None, ..) => {}
        }
        if form.complete {
            trailer(&mut walk, &form);
        }
    }
    walk.finish(title, Message::parse(bytes).err())
}

fn trailer(walk: &mut Walk<'_>, form: &Form) {
    walk.leftover();
    walk.set_end(walk.at() + TRAILER_LEN);
    let Some(eye) = walk.take("eye catcher", words::eye_catcher) else { return };
    if !words::is_eye_catcher(eye) {
        walk.problem("neither SMCR nor SMCD");
    } else if (eye[3] == 0xc4) != form.smcd {
        walk.problem("not the one the message begins with");
    }
}

/// Walks the header and moves the end to the trailer, by the header's length.
fn header(walk: &mut Walk<'_>, have: usize) -> (Option<Form>, String) {
    let eye = walk.take("eye catcher", words::eye_catcher);
    if eye.is_some_and(|eye| !words::is_eye_catcher(eye)) {
        walk.problem("neither SMCR nor SMCD: not CLC");
    }
    let code = walk.u8("type", |code| match kind_of(code) {
        Some(kind) => format!("{code} ({})", kind.name()),
        None => code.to_string(),
    });
    let kind = code.and_then(kind_of);
    if code.is_some() && kind.is_none() {
        walk.problem("not a CLC message type");
    }
    let length = walk.u16("length", |length| format!("{length} bytes")).map(usize::from);
    if length.is_some_and(|length| length != have) {
        walk.problem(format!("{have} bytes are here"));
    }
    // A length of nothing, or of more than is there, leaves the end where the input ends.
    let length = length.filter(|length| (HEADER_LEN + TRAILER_LEN..=have).contains(length));
    if let Some(length) = length {
        walk.set_end(length - TRAILER_LEN);
    }
    let smcd = eye.is_some_and(|eye| eye[3] == 0xc4);
    let byte7 = walk.u8("version and flags", |byte| version_and_flags(kind, smcd, byte));
    if byte7.is_some_and(|byte| byte >> 4 == 0) {
        walk.problem("version 0");
    }
    let byte7_field = walk.last();
    let name = kind.map_or("message of unknown type", Kind::name);
    let title = match (kind, byte7) {
        (Some(Kind::Proposal | Kind::Decline), Some(byte)) => {
            format!("CLC {name}, version {}", byte >> 4)
        }
        (Some(_), Some(byte)) => {
            let smc = if smcd { "SMC-D" } else { "SMC-R" };
            format!("CLC {name}, {smc} version {}", byte >> 4)
        }
        _ => format!("CLC {name}"),
    };
    let complete = length.is_some();
    let form =
        byte7.map(|byte7| Form { kind, smcd, v1: byte7 >> 4 == 1, byte7, byte7_field, complete });
    (form, title)
}

fn kind_of(code: u8) -> Option<Kind> {
    [Kind::Proposal, Kind::Accept, Kind::Confirm, Kind::Decline]
        .into_iter()
        .find(|kind| kind.code() == code)
}

fn version_and_flags(kind: Option<Kind>, smcd: bool, byte: u8) -> String {
    let version = byte >> 4;
    let bit4 = byte & 0x08 != 0;
    match kind {
        Some(Kind::Proposal) if version == 1 => {
            format!("version 1, offers {}", words::types(SmcTypes::from_bits(byte)))
        }
        Some(Kind::Proposal) => format!(
            "version {version}, offers v1: {}, v2: {}",
            words::types(SmcTypes::from_bits(byte)),
            words::types(SmcTypes::from_bits(byte >> 2)),
        ),
        Some(Kind::Accept | Kind::Confirm) => {
            let contact = if bit4 { ", first contact" } else { "" };
            let saved = if !smcd && byte & 0x04 != 0 { ", reason saved" } else { "" };
            format!("version {version}, type bits {:02b}{contact}{saved}", byte & 0x03)
        }
        Some(Kind::Decline) => {
            format!("version {version}{}", if bit4 { ", out of sync" } else { "" })
        }
        None => format!("{byte:02x}"),
    }
}

fn peer_id(walk: &mut Walk<'_>) {
    walk.take("peer id", |bytes| match PeerId(bytes) {
        PeerId::NONE => "none".into(),
        id => id.to_string(),
    });
}

fn mac(walk: &mut Walk<'_>) {
    walk.take("MAC", |bytes| match Mac(bytes) {
        Mac::NONE => "none".into(),
        mac => mac.to_string(),
    });
}

fn proposal(walk: &mut Walk<'_>, form: &Form) {
    let types_v1 = SmcTypes::from_bits(form.byte7);
    let types_v2 = SmcTypes::from_bits(form.byte7 >> 2).filter(|_| !form.v1);
    let any_d = types_v1.is_some_and(SmcTypes::has_d) || types_v2.is_some_and(SmcTypes::has_d);
    peer_id(walk);
    walk.take("GID", words::gid);
    mac(walk);
    let subnet_offset = offset(walk, "offset of subnet", 40);
    let mut v2_offset = None;
    if !form.v1 || any_d {
        walk.hex::<8>("associated ISM GID");
        walk.u16("its CHID", words::chid);
        v2_offset = offset(walk, "offset of V2 extension", 52);
        let oui = walk.take("vendor OUI", words::vendor);
        walk.take("vendor options", |options| words::vendor_options(oui, options));
        walk.reserved::<20>();
    }
    if let (Some(_), Some((mark, target, _))) = (types_v1, subnet_offset)
        && walk.follow(mark, target)
    {
        walk.area("IP subnet extension", subnet);
    }
    let (Some(types), Some((mark, target, skip))) = (types_v2, v2_offset) else { return };
    if skip == 0 {
        if let Some(mark) = mark {
            walk.note(mark, "version 2 is offered and has no extension");
        }
    } else if walk.follow(mark, target) {
        v2_extension(walk, types);
    }
}

/// An offset field: its place in the list, its target, and the number of bytes skipped.
fn offset(
    walk: &mut Walk<'_>,
    name: &'static str,
    from: usize,
) -> Option<(Option<Mark>, usize, u16)> {
    let skip = walk.u16(name, |skip| match skip {
        0 => "0".into(),
        _ => format!("{skip}: at {}", from + usize::from(skip)),
    })?;
    Some((walk.last(), from + usize::from(skip), skip))
}

/// A count, walked up to its limit only.
fn count(walk: &mut Walk<'_>, name: &'static str) -> usize {
    let count = walk.u8(name, |count| count.to_string()).map_or(0, usize::from);
    if count > MAX_ENTRIES {
        walk.problem("at most 8 are allowed");
    }
    count.min(MAX_ENTRIES)
}

fn subnet(walk: &mut Walk<'_>) {
    walk.take("IPv4 subnet", |bytes: [u8; 4]| core::net::Ipv4Addr::from(bytes).to_string());
    if walk.u8("significant bits", |bits| bits.to_string()).is_some_and(|bits| bits > 32) {
        walk.problem("at most 32");
    }
    walk.reserved::<2>();
    for _ in 0..count(walk, "IPv6 prefixes") {
        walk.take("prefix", |bytes: [u8; 16]| core::net::Ipv6Addr::from(bytes).to_string());
        if walk.u8("prefix length", |bits| bits.to_string()).is_some_and(|bits| bits > 128) {
            walk.problem("at most 128");
        }
    }
}

fn v2_extension(walk: &mut Walk<'_>, types: SmcTypes) {
    let start = walk.at();
    let (mut eids, mut entries, mut smcd_offset, mut seid) = (0, 0, None, false);
    walk.area("V2 extension", |walk| {
        eids = count(walk, "EIDs");
        entries = count(walk, "GID-CHID entries");
        walk.reserved::<1>();
        let flags = walk.u8("release and flags", |byte| {
            let seid = if byte & 1 != 0 { ", system EID offered" } else { "" };
            format!("{}{seid}", words::release(byte >> 4))
        });
        seid = flags.is_some_and(|byte| byte & 1 != 0);
        walk.reserved::<2>();
        smcd_offset = offset(walk, "offset of SMC-Dv2 extension", start + 8);
        walk.take("RoCEv2 GID", words::gid);
        walk.u8("max connections", |n| n.to_string());
        walk.u8("max links", |n| n.to_string());
        walk.u16("features", words::features);
        walk.reserved::<12>();
        for _ in 0..eids {
            user_eid(walk);
        }
    });
    let Some((mark, target, skip)) = smcd_offset.filter(|_| types.has_d()) else { return };
    if skip == 0 {
        if let Some(mark) = mark.filter(|_| seid || entries > 0) {
            walk.note(mark, "a system EID or entries are announced and not there");
        }
    } else if walk.follow(mark, target) {
        walk.area("SMC-Dv2 extension", |walk| {
            walk.take("system EID", words::eid);
            walk.reserved::<16>();
            gid_chid_entries(walk, entries);
        });
    }
}

fn user_eid(walk: &mut Walk<'_>) {
    let eid = walk.take("EID", words::eid);
    if eid.is_some_and(|eid| !words::eid_is_valid(&eid)) {
        walk.problem("breaks the rules for EIDs");
    }
}

/// Marks emulated CHIDs without a repetition in the next entry.
fn gid_chid_entries(walk: &mut Walk<'_>, entries: usize) {
    let mut open: Option<(u16, Option<Mark>)> = None;
    let mut unpaired = Vec::new();
    for _ in 0..entries {
        let half = if open.is_some() { "GID, second half" } else { "GID" };
        walk.hex::<8>(half);
        let Some(chid) = walk.u16("CHID", words::chid) else { break };
        open = match open.take() {
            Some((first, _)) if first == chid => None,
            before => {
                unpaired.extend(before);
                Chid(chid).is_emulated().then(|| (chid, walk.last()))
            }
        };
    }
    unpaired.extend(open);
    for (_, mark) in unpaired {
        if let Some(mark) = mark {
            walk.note(mark, "emulated, and the next entry does not repeat it");
        }
    }
}

fn smcd(walk: &mut Walk<'_>, form: &Form, v1: bool) {
    walk.hex::<8>("GID");
    walk.hex::<8>("DMB token");
    walk.u8("DMBE index", |index| index.to_string());
    walk.u8("DMBE size", |byte| words::size(byte >> 4));
    walk.reserved::<2>();
    walk.hex::<4>("link id");
    if v1 {
        walk.reserved::<12>();
        return;
    }
    walk.u16("CHID", words::chid);
    user_eid(walk);
    walk.hex::<8>("GID, second half");
    extension(walk, form, |walk| {
        walk.reserved::<1>();
        fce_base(walk);
        if walk.left() > 0 {
            walk.reserved::<2>();
            fce_v2_1(walk);
        }
    });
}

fn smcr(walk: &mut Walk<'_>, form: &Form, v1: bool) {
    peer_id(walk);
    walk.take("GID", words::gid);
    mac(walk);
    walk.hex::<3>("QPN");
    walk.hex::<4>("RKey");
    if walk.u8("RMBE index", |index| index.to_string()) == Some(0) {
        walk.problem("counts from 1");
    }
    walk.hex::<4>("alert token");
    walk.u8("RMBE size and MTU", |byte| {
        format!("{}, {}", words::size(byte >> 4), words::mtu(byte & 0x0f))
    });
    walk.reserved::<1>();
    walk.hex::<8>("RMB address");
    walk.reserved::<1>();
    walk.hex::<3>("PSN");
    if v1 {
        return;
    }
    user_eid(walk);
    walk.reserved::<8>();
    extension(walk, form, |walk| {
        walk.u8("link type", |byte| if byte & 0x80 != 0 { "direct" } else { "indirect" }.into());
        fce_base(walk);
        walk.u8("max connections", |n| n.to_string());
        walk.u8("max links", |n| n.to_string());
        fce_v2_1(walk);
        if form.kind == Some(Kind::Confirm) {
            gid_list(walk);
        }
    });
}

/// The first contact extension, present along with its flag.
fn extension(walk: &mut Walk<'_>, form: &Form, inside: impl FnOnce(&mut Walk<'_>)) {
    match (form.bit4(), walk.left()) {
        (false, 0) => {}
        (true, 0) => {
            if let Some(mark) = form.byte7_field {
                walk.note(mark, "first contact without its extension");
            }
        }
        (true, _) => walk.area("first contact extension", inside),
        (false, _) => walk.area("extension without first contact (ignored)", inside),
    }
}

fn fce_base(walk: &mut Walk<'_>) {
    walk.u8("system and release", |byte| {
        format!("{}, {}", words::os(byte >> 4), words::release(byte))
    });
    walk.reserved::<2>();
    walk.take("host name", words::hostname);
}

fn fce_v2_1(walk: &mut Walk<'_>) {
    walk.u16("features", words::features);
    walk.take("vendor options", words::vendor_answer);
    walk.reserved::<8>();
}

/// A client's RoCEv2 GID list.
pub(super) fn gid_list(walk: &mut Walk<'_>) {
    walk.area("RoCEv2 GID list", |walk| {
        let count = count(walk, "entries");
        if count == 0 {
            walk.problem("1 to 8 are allowed");
        }
        walk.reserved::<3>();
        for i in 0..count {
            walk.take(if i == 0 { "active link" } else { "alternate" }, words::gid);
        }
    });
}

fn decline(walk: &mut Walk<'_>) {
    peer_id(walk);
    walk.u32("diagnosis", words::diagnosis);
    if walk.left() <= 4 {
        walk.reserved::<4>();
        return;
    }
    walk.u8("operating system", |byte| words::os(byte >> 4));
    walk.reserved::<3>();
    for name in
        ["reason for SMC-Dv2", "reason for SMC-Dv1", "reason for SMC-Rv2", "reason for SMC-Rv1"]
    {
        walk.u32(name, words::diagnosis);
    }
}
