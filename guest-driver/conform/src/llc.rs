// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The layouts of LLC messages, as tables: RFC 7609 A.3, SMCv2.1 "LLC V2 messages". Like the tables
//! of CLC, the tables are written independently of other encoders.

use crate::layout::{FieldLayout, Plan, field, parts, reserved};

/// The messages, with the low half of the type byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Llc {
    ConfirmLink = 1,
    AddLink = 2,
    AddLinkCont = 3,
    DeleteLink = 4,
    RequestAddLink = 5,
    ConfirmRkey = 6,
    TestLink = 7,
    ConfirmRkeyCont = 8,
    DeleteRkey = 9,
}

const NAMES: [(Llc, &str); 9] = [
    (Llc::ConfirmLink, "llc-confirm-link"),
    (Llc::AddLink, "llc-add-link"),
    (Llc::AddLinkCont, "llc-add-link-cont"),
    (Llc::DeleteLink, "llc-delete-link"),
    (Llc::RequestAddLink, "llc-request-add-link"),
    (Llc::ConfirmRkey, "llc-confirm-rkey"),
    (Llc::TestLink, "llc-test-link"),
    (Llc::ConfirmRkeyCont, "llc-confirm-rkey-cont"),
    (Llc::DeleteRkey, "llc-delete-rkey"),
];

impl Llc {
    pub(crate) fn of_name(name: &str) -> Option<Llc> {
        NAMES.iter().find(|(_, other)| *other == name).map(|(kind, _)| *kind)
    }

    /// In messages for people, and in cases.
    pub(crate) fn name(self) -> &'static str {
        NAMES.iter().find(|(kind, _)| *kind == self).map_or("llc", |(_, name)| name)
    }
}

/// The variant of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MessageLayout {
    pub(crate) kind: Llc,
    pub(crate) is_v2: bool,
    /// Keys of a list of variable length: Add Link of version 2, and Delete RKey.
    pub(crate) keys: usize,
}

/// Bytes of every message of version 1, and of most of version 2.
pub(crate) const LEN: usize = 44;
/// Bytes of Add Link of version 2 before its keys, and of each key.
const ADD_HEAD: usize = 72;
const ADD_EACH: usize = 16;
/// The same of Delete RKey.
const DELETE_HEAD: usize = 8;
const DELETE_EACH: usize = 4;

const CONFIRM_FLAGS: &[FieldLayout] =
    &[parts(&[("reply", 7, 1), ("reserved", 4, 3), ("low_flags", 0, 4)])];
const ADD_FLAGS_V1: &[FieldLayout] = &[
    parts(&[("reserved", 4, 4), ("reason", 0, 4)]),
    parts(&[("reply", 7, 1), ("rejected", 6, 1), ("reserved", 0, 6)]),
];
const ADD_FLAGS_V2: &[FieldLayout] =
    &[parts(&[("reply", 7, 1), ("rejected", 6, 1), ("reserved", 4, 2), ("reason", 0, 4)])];
const DELETE_FLAGS: &[FieldLayout] =
    &[parts(&[("reply", 7, 1), ("all", 6, 1), ("orderly", 5, 1), ("reserved", 0, 5)])];
const KEY_FLAGS: &[FieldLayout] = &[parts(&[
    ("reply", 7, 1),
    ("reserved", 6, 1),
    ("negative", 5, 1),
    ("retry", 4, 1),
    ("reserved", 0, 4),
])];
const FLAGS: &[FieldLayout] = &[parts(&[("reply", 7, 1), ("reserved", 0, 7)])];

const CONFIRM: &[FieldLayout] = &[
    field("mac", 6),
    field("gid", 16),
    field("qpn", 3),
    field("link_number", 1),
    field("link_user_id", 4),
    field("max_links", 1),
];
const ADD: &[FieldLayout] = &[
    field("mac", 6),
    reserved(2),
    field("gid", 16),
    field("qpn", 3),
    field("link_number", 1),
    parts(&[("reserved", 4, 4), ("mtu", 0, 4)]),
    field("psn", 3),
];
const ADD_V2: &[FieldLayout] = &[
    reserved(8),
    parts(&[("direct", 7, 1), ("reserved", 0, 7)]),
    reserved(1),
    field("target", 16),
    reserved(8),
    field("key_count", 2),
];
const PAIR: &[FieldLayout] = &[field("reference", 4), field("new", 4), field("address", 8)];
const CONT: &[FieldLayout] = &[field("link_number", 1), field("left", 1), reserved(2)];
const DELETE: &[FieldLayout] = &[field("link_number", 1), field("reason", 4)];
const CONFIRM_KEY: &[FieldLayout] =
    &[field("other_links", 1), field("rkey", 4), field("address", 8)];
const OTHER: &[FieldLayout] = &[field("link_number", 1), field("rkey", 4), field("address", 8)];
const DELETE_KEY_V1: &[FieldLayout] = &[field("key_count", 1), field("error_mask", 1), reserved(2)];
const DELETE_KEY_V2: &[FieldLayout] =
    &[field("key_count", 1), field("not_deleted", 1), reserved(2)];
const KEY: &[FieldLayout] = &[field("", 4)];

/// Where the fields are.
pub(crate) fn plan(layout: MessageLayout) -> Plan {
    let MessageLayout { kind, is_v2, keys } = layout;
    let mut plan = Plan::default();
    plan.tables(&[&[field("type", 1)]]);
    match (is_v2, kind) {
        (true, _) => plan.tables(&[&[field("length", 2)]]),
        (false, Llc::AddLink) => plan.tables(&[&[field("length", 1)]]),
        (false, _) => plan.tables(&[&[field("length", 1), reserved(1)]]),
    }
    plan.tables(&[match kind {
        Llc::ConfirmLink => CONFIRM_FLAGS,
        Llc::AddLink if !is_v2 => ADD_FLAGS_V1,
        Llc::AddLink | Llc::RequestAddLink => ADD_FLAGS_V2,
        Llc::DeleteLink => DELETE_FLAGS,
        Llc::ConfirmRkey | Llc::ConfirmRkeyCont | Llc::DeleteRkey => KEY_FLAGS,
        Llc::TestLink | Llc::AddLinkCont => FLAGS,
    }]);
    match kind {
        Llc::ConfirmLink => {
            plan.tables(&[CONFIRM]);
            if is_v2 {
                plan.tables(&[&[field("max_conns", 1)]]);
            }
        }
        Llc::AddLink => {
            plan.tables(&[ADD]);
            if is_v2 {
                plan.tables(&[ADD_V2]);
                plan.list("pair", keys, PAIR);
            }
        }
        Llc::AddLinkCont => {
            plan.tables(&[CONT]);
            plan.list("pair", 2, PAIR);
        }
        Llc::DeleteLink => plan.tables(&[DELETE]),
        Llc::RequestAddLink => {
            plan.tables(&[&[reserved(20), field("gid_count", 1), reserved(3), field("gid", 16)]]);
        }
        Llc::ConfirmRkey => {
            plan.tables(&[CONFIRM_KEY]);
            plan.list("other", 2, OTHER);
        }
        Llc::ConfirmRkeyCont => {
            plan.tables(&[&[field("left", 1)]]);
            plan.list("other", 3, OTHER);
        }
        Llc::TestLink => plan.tables(&[&[field("data", 16)]]),
        Llc::DeleteRkey => {
            plan.tables(&[if is_v2 { DELETE_KEY_V2 } else { DELETE_KEY_V1 }]);
            plan.list("key", if is_v2 { keys.max(8) } else { 8 }, KEY);
        }
    }
    if plan.at < LEN {
        plan.tables(&[&[reserved(LEN - plan.at)]]);
    }
    plan
}

/// Values derived from the layout.
pub(crate) fn derived(layout: MessageLayout, len: usize) -> Vec<(String, i64)> {
    let MessageLayout { kind, is_v2, keys } = layout;
    let version = if is_v2 { 0x20 } else { 0 };
    let number = |n: usize| i64::try_from(n).unwrap_or(i64::MAX);
    let mut values = vec![("type".into(), version | kind as i64), ("length".into(), number(len))];
    if matches!(kind, Llc::DeleteRkey) || (is_v2 && kind == Llc::AddLink) {
        values.push(("key_count".into(), number(keys)));
    }
    values
}

/// The layout of a message of the target. The length field is left to the cases.
///
/// # Errors
/// The defect, as a sentence.
pub(crate) fn layout_of(bytes: &[u8]) -> Result<MessageLayout, String> {
    let byte = |at: usize| bytes.get(at).copied().unwrap_or(0);
    let (code, len) = (byte(0), bytes.len());
    let is_v2 = match code >> 4 {
        0 => false,
        2 => true,
        _ => return Err(format!("{code:#04x} is no type of LLC")),
    };
    let kind = NAMES.iter().map(|(kind, _)| *kind).find(|kind| *kind as u8 == code & 0x0f);
    let kind = kind.ok_or_else(|| format!("{code:#04x} is no type of LLC"))?;
    let members = |head: usize, each: usize| len.saturating_sub(head) / each;
    let keys = match kind {
        Llc::AddLink if is_v2 => members(ADD_HEAD, ADD_EACH),
        Llc::DeleteRkey if is_v2 && len > LEN => members(DELETE_HEAD, DELETE_EACH),
        // An answer of version 2 lists eight keys at most.
        Llc::DeleteRkey => usize::from(byte(4)).min(8),
        _ => 0,
    };
    Ok(MessageLayout { kind, is_v2, keys })
}

#[cfg(test)]
mod tests {
    use crate::message::{encode, parse_llc};
    use crate::value::{Scope, hex_of, to_hex};

    /// Confirm Link was sent by Linux 7.2; the others follow the figures of the specifications.
    #[test]
    fn messages_are_laid_out_as_the_specifications_say() {
        for (text, wire) in [
            (
                "message = 'llc-confirm-link'
                 version = 1
                 low_flags = 3
                 mac = 'hex:525400000001'
                 gid = 'hex:00*10 ffff 0a090001'
                 qpn = 0x11
                 link_number = 1
                 link_user_id = 0x101
                 max_links = 2",
                "01 2c 00 03 525400000001 00*10 ffff0a090001 000011 01 00000101 02 00*9",
            ),
            (
                "message = 'llc-test-link'\nversion = 2\nreply = 1\ndata = 'hex:0102 00*14'",
                "27 002c 80 0102 00*14 00*24",
            ),
            (
                "message = 'llc-delete-link'\nversion = 1\nall = 1\nreason = 0x30000",
                "04 2c 00 40 00 00030000 00*35",
            ),
            (
                "message = 'llc-confirm-rkey'\nversion = 1\nrkey = 7\naddress = 9",
                "06 2c 00 00 00 00000007 0000000000000009 00*27",
            ),
            (
                "message = 'llc-delete-rkey'\nversion = 1\nkeys = [7, 9]",
                "09 2c 00 00 02 00 0000 00000007 00000009 00*28",
            ),
        ] {
            let message = encode(&text.parse().unwrap(), &Scope::default()).unwrap();
            assert_eq!(to_hex(&message.bytes), to_hex(&hex_of(wire).unwrap()), "{text}");
            assert_eq!(parse_llc(&message.bytes).unwrap().spans, message.spans, "{text}");
        }
    }

    #[test]
    fn lengths_follow_the_tables_of_the_specifications() {
        for (text, len) in [
            ("message = 'llc-add-link'\nversion = 1", 44),
            ("message = 'llc-add-link'\nversion = 2", 72),
            ("message = 'llc-add-link'\nversion = 2\npairs = [[1, 2, 3], [4, 5, 6]]", 104),
            ("message = 'llc-add-link-cont'\nversion = 1", 44),
            ("message = 'llc-confirm-rkey-cont'\nversion = 1", 44),
            ("message = 'llc-request-add-link'\nversion = 2", 44),
            ("message = 'llc-delete-rkey'\nversion = 2\nkeys = [1]", 44),
        ] {
            let message = encode(&text.parse().unwrap(), &Scope::default()).unwrap();
            assert_eq!(message.bytes.len(), len, "{text}");
            assert_eq!(message.number("length"), len as u64, "{text}");
            assert_eq!(parse_llc(&message.bytes).unwrap().bytes, message.bytes);
        }
        assert!(parse_llc(&hex_of("07 2c 00*41").unwrap()).is_err());
        assert!(parse_llc(&hex_of("fe 2c 00*42").unwrap()).is_err());
    }
}
