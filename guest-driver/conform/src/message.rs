// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! CLC messages: from named fields to bytes, and back. Both ways use the tables of [`layout`], and
//! nothing of smc-core.
//!
//! [`layout`]: crate::layout

use toml::{Table, Value};

use crate::layout::{self as l, Plan, Span};
use crate::llc::{self, Llc, MessageLayout};
use crate::value::{Scope, as_number, bytes_of};

const SMCR: [u8; 4] = [0xe2, 0xd4, 0xc3, 0xd9];
const SMCD: [u8; 4] = [0xe2, 0xd4, 0xc3, 0xc4];
/// Code of "none" in the type bits of a Proposal.
const NONE: u64 = 2;

/// The four messages of CLC, and the messages of LLC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Proposal,
    Accept,
    Confirm,
    Decline,
    Llc(Llc),
}

/// The messages of CLC, in the order of their types from 1.
const OF_CLC: [Kind; 4] = [Kind::Proposal, Kind::Accept, Kind::Confirm, Kind::Decline];

impl Kind {
    /// A message of CLC by its type.
    pub(crate) fn of(code: u8) -> Option<Kind> {
        OF_CLC.get(usize::from(code.checked_sub(1)?)).copied()
    }

    /// In messages for people, and in cases.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Kind::Proposal => "proposal",
            Kind::Accept => "accept",
            Kind::Confirm => "confirm",
            Kind::Decline => "decline",
            Kind::Llc(kind) => kind.name(),
        }
    }
}

/// The variant of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    Proposal {
        /// Whether the fields of version 2 are present.
        long: bool,
        /// Start of each area, and its number of members.
        subnet: Option<(usize, usize)>,
        v2: Option<(usize, usize)>,
        smcd: Option<(usize, usize)>,
    },
    R1,
    R2 {
        extension: bool,
        gids: Option<usize>,
    },
    D1,
    /// With the extension of this release, if any.
    D2(Option<u8>),
    Decline {
        long: bool,
    },
    Llc(MessageLayout),
}

/// A message with the places of its fields.
#[derive(Clone, Debug)]
pub(crate) struct Message {
    pub(crate) kind: Kind,
    pub(crate) bytes: Vec<u8>,
    pub(crate) spans: Vec<Span>,
}

fn plan(form: Form) -> Plan {
    let mut plan = Plan::default();
    plan.tables(&[l::START]);
    match form {
        Form::Llc(layout) => return llc::plan(layout),
        Form::Proposal { long, subnet, v2, smcd } => {
            plan.tables(&[l::PROPOSAL_FLAGS, l::PROPOSAL]);
            if long {
                plan.tables(&[l::PROPOSAL_V2]);
            }
            if let Some((at, prefixes)) = subnet {
                plan.at = at;
                plan.tables(&[l::SUBNET]);
                plan.list("prefix", prefixes, l::PREFIX);
            }
            if let Some((at, eids)) = v2 {
                plan.at = at;
                plan.tables(&[l::V2_EXTENSION]);
                plan.list("eid", eids, l::EID);
            }
            if let Some((at, entries)) = smcd {
                plan.at = at;
                plan.tables(&[l::SMCD_EXTENSION]);
                plan.list("entry", entries, l::ENTRY);
            }
        }
        Form::R1 => plan.tables(&[l::ANSWER_FLAGS, l::ANSWER_R]),
        Form::R2 { extension, gids } => {
            plan.tables(&[l::ANSWER_FLAGS, l::ANSWER_R, l::ANSWER_R2]);
            if extension {
                plan.named("", l::EXTENSION_R);
            }
            if let Some(gids) = gids {
                plan.named("", l::GID_LIST);
                plan.list("gid_list", gids, l::LISTED_GID);
            }
        }
        Form::D1 => plan.tables(&[l::ANSWER_FLAGS, l::ANSWER_D, l::ANSWER_D1]),
        Form::D2(release) => {
            plan.tables(&[l::ANSWER_FLAGS, l::ANSWER_D, l::ANSWER_D2]);
            if release.is_some() {
                plan.named("", l::EXTENSION_D);
            }
            if release.is_some_and(|release| release > 0) {
                plan.named("", l::EXTENSION_D21);
            }
        }
        Form::Decline { long } => {
            let rest = if long { l::DECLINE_V2 } else { l::DECLINE_V1 };
            plan.tables(&[l::DECLINE_FLAGS, l::DECLINE, rest]);
        }
    }
    plan.tables(&[l::TRAILER]);
    plan
}

impl Message {
    /// Every span of a name; `[*]` in the name stands for every member of a list.
    pub(crate) fn named<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a Span> {
        let all = name.split_once("[*]");
        self.spans.iter().filter(move |span| match all {
            Some((start, end)) => {
                let rest = span.name.strip_prefix(start).and_then(|rest| rest.strip_suffix(end));
                rest.is_some_and(|rest| rest.starts_with('[') && rest.ends_with(']'))
            }
            None => span.name == name,
        })
    }

    /// The value of the first field of a name.
    pub(crate) fn value(&self, name: &str) -> Option<Vec<u8>> {
        self.named(name).next().and_then(|span| span.read(&self.bytes))
    }

    /// The same as a number; 0 if there is none.
    pub(crate) fn number(&self, name: &str) -> u64 {
        self.value(name).map_or(0, |bytes| as_number(&bytes))
    }

    /// Gives `scope` the fields as `proposal.eid[0]` and so on.
    pub(crate) fn publish(&self, scope: &mut Scope) {
        let kind = self.kind.name();
        scope.forget(&format!("{kind}."));
        for span in &self.spans {
            if let Some(value) = span.read(&self.bytes) {
                scope.set(format!("{kind}.{}", span.name), value);
            }
        }
    }
}

/// Fields selecting the form of a message, without bytes of their own.
const STRUCTURE: &[&str] = &[
    "message",
    "form",
    "subnet",
    "prefixes",
    "eids",
    "entries",
    "smcd",
    "extension",
    "gid_list",
    "keys",
    "pairs",
];

/// The fields of a base, overridden by the fields of a case.
struct Fields<'a> {
    table: &'a Table,
    scope: &'a Scope,
}

impl Fields<'_> {
    fn number(&self, name: &str, default: u64) -> Result<u64, String> {
        match self.table.get(name) {
            None => Ok(default),
            Some(value) => {
                let bytes = bytes_of(value, None, self.scope);
                let bytes = match value {
                    Value::Integer(_) => bytes_of(value, Some(8), self.scope),
                    _ => bytes,
                };
                bytes.map(|bytes| as_number(&bytes)).map_err(|why| format!("{name}: {why}"))
            }
        }
    }

    fn list(&self, name: &str) -> Result<Vec<Value>, String> {
        match self.table.get(name) {
            None => Ok(Vec::new()),
            Some(Value::Array(list)) => Ok(list.clone()),
            Some(other) => Err(format!("{name}: {other} is no list")),
        }
    }

    fn form(&self, message: &str) -> Result<(Kind, Form), String> {
        if let Some(kind) = Llc::of_name(message) {
            let agreed = self.scope.get("llc_version").map_or(2, as_number);
            let is_v2 = self.number("version", agreed)? >= 2;
            let keys = self.list("keys")?.len() + self.list("pairs")?.len();
            return Ok((Kind::Llc(kind), Form::Llc(MessageLayout { kind, is_v2, keys })));
        }
        let (kind, smc_type) = match message.split_once('-') {
            Some(("accept", smc_type)) => (Kind::Accept, smc_type),
            Some(("confirm", smc_type)) => (Kind::Confirm, smc_type),
            None if message == "proposal" => return Ok((Kind::Proposal, self.proposal()?)),
            None if message == "decline" => {
                let long = self.number("form", self.number("version", 2)?)? >= 2;
                return Ok((Kind::Decline, Form::Decline { long }));
            }
            _ => return Err(format!("no message is called {message:?}")),
        };
        let first = self.number("first_contact", 0)? == 1;
        let extension = self.number("extension", u64::from(first))? == 1;
        let gids = self.list("gid_list")?.len();
        let form = match smc_type {
            "r1" => Form::R1,
            "d1" => Form::D1,
            "r2" => {
                let gids = (kind == Kind::Confirm && extension).then_some(gids);
                Form::R2 { extension, gids }
            }
            "d2" => {
                let release = self.number("form", self.number("release", 1)?)?;
                Form::D2(extension.then_some(u8::from(release > 0)))
            }
            _ => return Err(format!("no message is called {message:?}")),
        };
        Ok((kind, form))
    }

    fn proposal(&self) -> Result<Form, String> {
        let long = self.number("form", 2)? >= 2;
        let (v1, v2) = (self.number("v1_types", NONE)?, self.number("v2_types", NONE)?);
        let prefixes = self.list("prefixes")?.len();
        let (eids, entries) = (self.list("eids")?.len(), self.list("entries")?.len());
        let mut at = if long { 80 } else { 40 };
        let mut area = |present: bool, members: usize, fixed: usize, each: usize| {
            present.then(|| {
                let from = at;
                at += fixed + each * members;
                (from, members)
            })
        };
        let subnet = self.number("subnet", u64::from(v1 != NONE))? == 1;
        let subnet = area(subnet, prefixes, 8, 17);
        let has_v2 = long && self.number("extension", u64::from(v2 != NONE))? == 1;
        let has_d = has_v2 && self.number("smcd", u64::from(v2 != NONE && v2 != 0))? == 1;
        let v2 = area(has_v2, eids, 40, 32);
        let smcd = area(has_d, entries, 48, 10);
        Ok(Form::Proposal { long, subnet, v2, smcd })
    }
}

/// Encodes the message described by the fields. Lengths, counts, offsets and eye catchers are
/// correct by default; the fields may override them.
///
/// # Errors
/// A sentence for the author of the case.
pub(crate) fn encode(table: &Table, scope: &Scope) -> Result<Message, String> {
    let fields = Fields { table, scope };
    let name = table.get("message").and_then(Value::as_str).ok_or("a base has no message")?;
    let (kind, form) = fields.form(name)?;
    let Plan { spans, at } = plan(form);
    let mut message = Message { kind, bytes: vec![0; at], spans };
    let mut values: Vec<(String, Value)> = derived(kind, form, at);
    for (list, member) in [("eids", "eid"), ("gid_list", "gid_list"), ("keys", "key")] {
        for (i, value) in fields.list(list)?.into_iter().enumerate() {
            values.push((format!("{member}[{i}]"), value));
        }
    }
    let of_parts: [(&str, &str, &[&str]); 3] = [
        ("entries", "entry", &["gid", "chid"]),
        ("prefixes", "prefix", &["address", "bits"]),
        ("pairs", "pair", &["reference", "new", "address"]),
    ];
    for (list, member, parts) in of_parts {
        for (i, value) in fields.list(list)?.into_iter().enumerate() {
            let Value::Array(values_of) = value else { return Err(format!("{list}: no list")) };
            for (part, value) in parts.iter().zip(values_of) {
                values.push((format!("{member}[{i}].{part}"), value));
            }
        }
    }
    let is_llc = matches!(kind, Kind::Llc(_));
    let own = table.iter().filter(|(name, _)| {
        !(STRUCTURE.contains(&name.as_str()) || is_llc && name.as_str() == "version")
    });
    values.extend(own.map(|(name, value)| (name.clone(), value.clone())));
    for (name, value) in values {
        let span = message.named(&name).next().cloned();
        let Some(span) = span else {
            // Optional fields without a place in the form are left out.
            if name.contains('[') || OPTIONAL.contains(&name.as_str()) {
                continue;
            }
            return Err(format!("the message has no field {name:?}"));
        };
        let bytes = bytes_of(&value, Some(span.len), scope);
        span.write(&mut message.bytes, &bytes.map_err(|why| format!("{name}: {why}"))?);
    }
    Ok(message)
}

/// Fields missing in some forms of a message, so a base can name them for every form.
const OPTIONAL: &[&str] = &[
    "eid_count",
    "entry_count",
    "prefix_count",
    "gid_count",
    "network",
    "mask_bits",
    "max_conns",
    "max_links",
];

fn derived(kind: Kind, form: Form, len: usize) -> Vec<(String, Value)> {
    if let Form::Llc(layout) = form {
        let values = llc::derived(layout, len).into_iter();
        return values.map(|(name, value)| (name, Value::Integer(value))).collect();
    }
    let code = OF_CLC.iter().position(|other| *other == kind).map_or(0, |at| at + 1);
    let eye = match form {
        Form::D1 | Form::D2(_) => SMCD,
        _ => SMCR,
    };
    let version = match form {
        Form::R1 | Form::D1 | Form::Decline { long: false } => 1,
        Form::Proposal { long: false, .. } => 1,
        _ => 2,
    };
    let mut values: Vec<(String, i64)> = vec![
        ("eye_catcher".into(), i64::from(u32::from_be_bytes(eye))),
        ("trailer".into(), i64::from(u32::from_be_bytes(eye))),
        ("type".into(), as_i64(code)),
        ("length".into(), as_i64(len)),
        ("version".into(), version),
    ];
    match form {
        Form::D1 | Form::D2(_) => values.push(("smc_type".into(), 1)),
        Form::R2 { gids: Some(gids), .. } => values.push(("gid_count".into(), as_i64(gids))),
        Form::Proposal { long, subnet, v2, smcd } => {
            if long {
                values.push(("v1_types".into(), 2));
                values.push(("v2_types".into(), 2));
            }
            if let Some((at, prefixes)) = subnet {
                values.push(("subnet_offset".into(), as_i64(at - 40)));
                values.push(("prefix_count".into(), as_i64(prefixes)));
            }
            if let Some((at, eids)) = v2 {
                values.push(("v2_offset".into(), as_i64(at - 52)));
                values.push(("eid_count".into(), as_i64(eids)));
                let (offset, entries) = smcd.map_or((0, 0), |(smcd, n)| (smcd - at - 8, n));
                values.push(("smcd_offset".into(), as_i64(offset)));
                values.push(("entry_count".into(), as_i64(entries)));
            }
        }
        _ => {}
    }
    values.into_iter().map(|(name, value)| (name, Value::Integer(value))).collect()
}

fn as_i64(n: usize) -> i64 {
    i64::try_from(n).unwrap_or(i64::MAX)
}

/// Parses a whole message of the target, by the letter of the specifications.
///
/// # Errors
/// The defect, as a sentence.
pub(crate) fn parse(bytes: &[u8]) -> Result<Message, String> {
    let byte = |at: usize| bytes.get(at).copied().unwrap_or(0);
    let word = |at: usize| usize::from(u16::from_be_bytes([byte(at), byte(at + 1)]));
    let kind = Kind::of(byte(4)).ok_or_else(|| format!("{} is no type of a message", byte(4)))?;
    let (version, flags, len) = (byte(7) >> 4, byte(7) & 0x0f, bytes.len());
    let is_d = bytes.get(..4) == Some(&SMCD);
    let first = flags & 8 != 0;
    let form = match kind {
        Kind::Proposal => {
            let long = version >= 2 || len >= 92;
            let (v1, v2) = (flags & 3, if version >= 2 { flags >> 2 } else { 2 });
            let subnet = (v1 != 2).then(|| 40 + word(38));
            let v2_at = (v2 != 2).then(|| 52 + word(50));
            let smcd = v2_at.filter(|at| v2 & 1 == 1 && word(at + 6) != 0);
            Form::Proposal {
                long,
                subnet: subnet.map(|at| (at, usize::from(byte(at + 7)))),
                v2: v2_at.map(|at| (at, usize::from(byte(at)))),
                smcd: smcd.map(|at| (at + 8 + word(at + 6), usize::from(byte(at + 1)))),
            }
        }
        Kind::Decline => Form::Decline { long: len != 28 },
        _ => match (is_d, version) {
            (true, 1) => Form::D1,
            (true, 2) => Form::D2(first.then_some(byte(75) & 0x0f)),
            (false, 1) => Form::R1,
            (false, 2) => {
                let gids = (kind == Kind::Confirm && first).then(|| usize::from(byte(156)));
                Form::R2 { extension: first, gids }
            }
            _ => return Err(format!("version {version} in {}", kind.name())),
        },
    };
    let Plan { spans, at } = plan(form);
    let message = Message { kind, bytes: bytes.to_vec(), spans };
    if at != len {
        return Err(format!("{} has {len} bytes, by its contents it has {at}", kind.name()));
    }
    let trailer = bytes.get(len.saturating_sub(4)..).unwrap_or_default();
    if bytes.get(..4) != Some(trailer) {
        return Err(format!("{} does not end with the eye catcher it begins with", kind.name()));
    }
    if is_d && matches!(kind, Kind::Proposal) {
        return Err("a proposal begins with SMCD".into());
    }
    Ok(message)
}

/// Parses a whole LLC message of the target.
///
/// # Errors
/// The defect, as a sentence.
pub(crate) fn parse_llc(bytes: &[u8]) -> Result<Message, String> {
    let layout = llc::layout_of(bytes)?;
    let Plan { spans, at } = plan(Form::Llc(layout));
    // A refusal of Add Link may end after 44 bytes, as in version 1.
    let is_good = at == bytes.len() || (layout.kind == Llc::AddLink && bytes.len() == llc::LEN);
    match is_good {
        true => Ok(Message { kind: Kind::Llc(layout.kind), bytes: bytes.to_vec(), spans }),
        false => Err(format!("{} has {} bytes, not {at}", layout.kind.name(), bytes.len())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::value::{hex_of, to_hex};

    fn encoded(text: &str) -> Message {
        encode(&text.parse().unwrap(), &Scope::default()).unwrap()
    }

    /// The Proposal sent by Linux 7.2: SMC-R and SMC-D version 2 with the loopback device.
    #[test]
    fn a_proposal_is_that_of_linux_with_the_same_contents() {
        let message = encoded(
            "message = 'proposal'
             v2_types = 3
             release = 1
             roce_gid = 'hex:00*10 ffff 0a090002'
             max_conns = 255
             max_links = 2
             features = 1
             eids = ['text:SMCPROBE-EID1']
             entries = [['hex:f6d0053b4904446f', 0xffff], ['hex:934f97c2936239e7', 0xffff]]",
        );
        let mut linux = hex_of("e2d4c3d9 0100e02e 00*8 00*16 00*6 0000 00*8 0000 001c 00*8 00*20 01 02 00 10 0000 0040 00*10 ffff 0a090002 ff 02 0001 00*12").unwrap();
        linux.extend(b"SMCPROBE-EID1                   ");
        linux.extend(
            hex_of("00*32 00*16 f6d0053b4904446f ffff 934f97c2936239e7 ffff e2d4c3d9").unwrap(),
        );
        assert_eq!(to_hex(&message.bytes), to_hex(&linux));
        let read = parse(&message.bytes).unwrap();
        assert_eq!(read.spans, message.spans);
        assert_eq!(read.value("entry[1].gid"), Some(hex_of("934f97c2936239e7").unwrap()));
    }

    #[test]
    fn an_accept_of_smc_d_is_that_of_linux_with_the_same_contents() {
        let message = encoded(
            "message = 'accept-d2'
             first_contact = 1
             gid = 'hex:3f31e22cf0fe4ebf'
             token = 'hex:4a431356208c140a'
             size = 2
             link_id = 'hex:00010000'
             chid = 0xffff
             eid = 'text:SMCPROBE-EID1'
             extended_gid = 'hex:8cb6e7fb5fa4373b'
             os = 2
             release = 1
             hostname = 'text:(none)'
             features = 1",
        );
        let mut linux =
            hex_of("e2d4c3c4 02008229 3f31e22cf0fe4ebf 4a431356208c140a 00 20 0000 00010000 ffff")
                .unwrap();
        linux.extend(b"SMCPROBE-EID1                   ");
        linux.extend(hex_of("8cb6e7fb5fa4373b 00 21 0000").unwrap());
        linux.extend(b"(none)                          ");
        linux.extend(hex_of("0000 0001 00000000 0000000000000000 e2d4c3c4").unwrap());
        assert_eq!(to_hex(&message.bytes), to_hex(&linux));
        assert_eq!(parse(&message.bytes).unwrap().spans, message.spans);
    }

    /// Messages sent by Linux 7.2 at a first contact of SMC-R, in either version.
    #[test]
    fn accept_and_confirm_of_smc_r_are_those_of_linux() {
        let link = "first_contact = 1
             peer_id = 'hex:95ca525400000001'
             gid = 'hex:00*10 ffff 0a090001'
             mac = 'hex:525400000001'
             qpn = 0x11
             rkey = 0x3e0
             index = 1
             token = 1
             size = 2
             mtu = 3
             address = 'hex:ff11000000d90000'
             psn = 0x87e8ec";
        let extension = "eid = 'text:SMCPROBE-EID1'
             direct = 1
             os = 2
             release = 1
             hostname = 'text:(none)'
             max_conns = 255
             max_links = 2
             features = 1";
        let wire_link = "95ca525400000001 00*10 ffff0a090001 525400000001 000011 000003e0 01 \
                         00000001 23 00 ff11000000d90000 00 87e8ec";
        let wire = |start: &str, end: &str| {
            let mut bytes = hex_of(&format!("{start} {wire_link}")).unwrap();
            bytes.extend(b"SMCPROBE-EID1                   ");
            bytes.extend(hex_of("00*8 80 21 0000").unwrap());
            bytes.extend(b"(none)                          ");
            bytes.extend(hex_of(&format!("ff 02 0001 00*12 {end} e2d4c3d9")).unwrap());
            bytes
        };
        let accept = encoded(&format!("message = 'accept-r2'\n{link}\n{extension}"));
        assert_eq!(to_hex(&accept.bytes), to_hex(&wire("e2d4c3d9 0200a028", "")));
        let gids = "gid_list = ['hex:00*10 ffff 0a090001']";
        let confirm = encoded(&format!("message = 'confirm-r2'\n{link}\n{extension}\n{gids}"));
        let list = "01 000000 00*10 ffff0a090001";
        assert_eq!(to_hex(&confirm.bytes), to_hex(&wire("e2d4c3d9 0300b428", list)));
        let v1 = encoded(&format!("message = 'accept-r1'\n{link}"));
        let linux = hex_of(&format!("e2d4c3d9 02004418 {wire_link} e2d4c3d9")).unwrap();
        assert_eq!(to_hex(&v1.bytes), to_hex(&linux));
    }

    #[test]
    fn lengths_follow_the_table_of_the_specification() {
        for (text, len) in [
            ("message = 'proposal'\nform = 1\nv1_types = 0", 52),
            ("message = 'proposal'\nform = 1\nv1_types = 0\nprefixes = [['hex:00*16', 64]]", 69),
            ("message = 'proposal'\nv1_types = 3", 92),
            ("message = 'proposal'\nv2_types = 0\neids = ['text:A']", 156),
            ("message = 'proposal'\nv2_types = 1\nseid_flag = 1", 172),
            ("message = 'accept-r1'", 68),
            ("message = 'confirm-d1'", 48),
            ("message = 'accept-d2'", 78),
            ("message = 'accept-d2'\nfirst_contact = 1\nrelease = 0", 114),
            ("message = 'accept-r2'", 108),
            ("message = 'accept-r2'\nfirst_contact = 1", 160),
            ("message = 'confirm-r2'\nfirst_contact = 1\ngid_list = ['hex:00*16']", 180),
            ("message = 'decline'\nversion = 1", 28),
            ("message = 'decline'", 44),
        ] {
            let message = encoded(text);
            assert_eq!(message.bytes.len(), len, "{text}");
            assert_eq!(message.number("length"), len as u64);
            assert_eq!(parse(&message.bytes).unwrap().spans, message.spans, "{text}");
        }
    }

    #[test]
    fn every_byte_of_a_message_belongs_to_a_field() {
        let message =
            encoded("message = 'proposal'\nv1_types = 3\nv2_types = 3\neids = ['text:A']");
        for at in 0..message.bytes.len() {
            let of =
                message.spans.iter().filter(|span| (span.at..span.at + span.len).contains(&at));
            assert!(of.clone().count() >= 1, "byte {at}");
            assert!(of.clone().count() == 1 || of.clone().all(|span| span.bits.is_some()), "{at}");
        }
    }

    #[test]
    fn an_unknown_field_is_the_authors_mistake() {
        let table = "message = 'decline'\nreasons = 1".parse().unwrap();
        let error = encode(&table, &Scope::default()).unwrap_err();
        assert_eq!(error, "the message has no field \"reasons\"");
    }
}
