// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The layouts of CLC messages, as tables: RFC 7609 A.2, SMCv2.1 "CLC messages". The tables are
//! written independently of other encoders: a mistake of another encoder is not hidden by the same
//! mistake here.

/// A field: name, length in bytes, and parts smaller than a byte, if any.
pub(crate) struct FieldLayout(
    pub(crate) &'static str,
    pub(crate) usize,
    pub(crate) &'static [(&'static str, u8, u8)],
);

pub(crate) const fn field(name: &'static str, len: usize) -> FieldLayout {
    FieldLayout(name, len, &[])
}

pub(crate) const fn reserved(len: usize) -> FieldLayout {
    FieldLayout("reserved", len, &[])
}

/// One byte of parts: name, place of the lowest bit, number of bits.
pub(crate) const fn parts(parts: &'static [(&'static str, u8, u8)]) -> FieldLayout {
    FieldLayout("", 1, parts)
}

pub(crate) const START: &[FieldLayout] =
    &[field("eye_catcher", 4), field("type", 1), field("length", 2)];
pub(crate) const TRAILER: &[FieldLayout] = &[field("trailer", 4)];

/// Byte 7 of a message.
pub(crate) const PROPOSAL_FLAGS: &[FieldLayout] =
    &[parts(&[("version", 4, 4), ("v2_types", 2, 2), ("v1_types", 0, 2)])];
pub(crate) const ANSWER_FLAGS: &[FieldLayout] = &[parts(&[
    ("version", 4, 4),
    ("first_contact", 3, 1),
    ("reason_saved", 2, 1),
    ("smc_type", 0, 2),
])];
pub(crate) const DECLINE_FLAGS: &[FieldLayout] =
    &[parts(&[("version", 4, 4), ("out_of_sync", 3, 1), ("reserved", 0, 3)])];

/// Proposal, RFC 7609.
pub(crate) const PROPOSAL: &[FieldLayout] =
    &[field("peer_id", 8), field("gid", 16), field("mac", 6), field("subnet_offset", 2)];
/// The fields added by version 2.
pub(crate) const PROPOSAL_V2: &[FieldLayout] = &[
    field("ism_gid", 8),
    field("ism_chid", 2),
    field("v2_offset", 2),
    field("oui", 3),
    field("vendor", 5),
    reserved(20),
];
pub(crate) const SUBNET: &[FieldLayout] =
    &[field("network", 4), field("mask_bits", 1), reserved(2), field("prefix_count", 1)];
pub(crate) const PREFIX: &[FieldLayout] = &[field("address", 16), field("bits", 1)];
pub(crate) const V2_EXTENSION: &[FieldLayout] = &[
    field("eid_count", 1),
    field("entry_count", 1),
    reserved(1),
    parts(&[("release", 4, 4), ("reserved", 1, 3), ("seid_flag", 0, 1)]),
    reserved(2),
    field("smcd_offset", 2),
    field("roce_gid", 16),
    field("max_conns", 1),
    field("max_links", 1),
    field("features", 2),
    reserved(12),
];
pub(crate) const EID: &[FieldLayout] = &[field("", 32)];
pub(crate) const SMCD_EXTENSION: &[FieldLayout] = &[field("seid", 32), reserved(16)];
pub(crate) const ENTRY: &[FieldLayout] = &[field("gid", 8), field("chid", 2)];

/// Accept and Confirm of SMC-R.
pub(crate) const ANSWER_R: &[FieldLayout] = &[
    field("peer_id", 8),
    field("gid", 16),
    field("mac", 6),
    field("qpn", 3),
    field("rkey", 4),
    field("index", 1),
    field("token", 4),
    parts(&[("size", 4, 4), ("mtu", 0, 4)]),
    reserved(1),
    field("address", 8),
    reserved(1),
    field("psn", 3),
];
pub(crate) const ANSWER_R2: &[FieldLayout] = &[field("eid", 32), reserved(8)];
pub(crate) const EXTENSION_R: &[FieldLayout] = &[
    parts(&[("direct", 7, 1), ("reserved", 0, 7)]),
    parts(&[("os", 4, 4), ("release", 0, 4)]),
    reserved(2),
    field("hostname", 32),
    field("max_conns", 1),
    field("max_links", 1),
    field("features", 2),
    field("vendor", 4),
    reserved(8),
];
pub(crate) const GID_LIST: &[FieldLayout] = &[field("gid_count", 1), reserved(3)];
pub(crate) const LISTED_GID: &[FieldLayout] = &[field("", 16)];

/// Accept and Confirm of SMC-D.
pub(crate) const ANSWER_D: &[FieldLayout] = &[
    field("gid", 8),
    field("token", 8),
    field("index", 1),
    parts(&[("size", 4, 4), ("reserved", 0, 4)]),
    reserved(2),
    field("link_id", 4),
];
pub(crate) const ANSWER_D1: &[FieldLayout] = &[reserved(12)];
pub(crate) const ANSWER_D2: &[FieldLayout] =
    &[field("chid", 2), field("eid", 32), field("extended_gid", 8)];
pub(crate) const EXTENSION_D: &[FieldLayout] =
    &[reserved(1), parts(&[("os", 4, 4), ("release", 0, 4)]), reserved(2), field("hostname", 32)];
/// The extension of release 2.1.
pub(crate) const EXTENSION_D21: &[FieldLayout] =
    &[reserved(2), field("features", 2), field("vendor", 4), reserved(8)];

pub(crate) const DECLINE: &[FieldLayout] = &[field("peer_id", 8), field("diagnosis", 4)];
pub(crate) const DECLINE_V1: &[FieldLayout] = &[reserved(4)];
pub(crate) const DECLINE_V2: &[FieldLayout] = &[
    parts(&[("os", 4, 4), ("reserved", 0, 4)]),
    reserved(3),
    field("reason_d2", 4),
    field("reason_d1", 4),
    field("reason_r2", 4),
    field("reason_r1", 4),
];

/// Where a field is in a message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Span {
    pub(crate) name: String,
    pub(crate) at: usize,
    pub(crate) len: usize,
    /// Lowest bit and number of bits, if the field is a part of one byte.
    pub(crate) bits: Option<(u8, u8)>,
}

impl Span {
    /// The bytes of the field in a message; for a part of a byte its value, as one byte. `None`:
    /// beyond the message's end.
    pub(crate) fn read(&self, bytes: &[u8]) -> Option<Vec<u8>> {
        let own = bytes.get(self.at..self.at + self.len)?;
        Some(match (self.bits, own) {
            (Some((shift, bits)), [byte]) => vec![(byte >> shift) & mask(bits)],
            _ => own.to_vec(),
        })
    }

    /// Writes the field, cut at the message's end.
    pub(crate) fn write(&self, bytes: &mut [u8], value: &[u8]) {
        let Some(own) = bytes.get_mut(self.at..self.at + self.len) else { return };
        match (self.bits, own, value) {
            (Some((shift, bits)), [byte], [.., value]) => {
                *byte = *byte & !(mask(bits) << shift) | (value & mask(bits)) << shift;
            }
            (_, own, value) => {
                for (own, value) in own.iter_mut().zip(value) {
                    *own = *value;
                }
            }
        }
    }
}

fn mask(bits: u8) -> u8 {
    match bits {
        8.. => 0xff,
        bits => (1 << bits) - 1,
    }
}

/// The spans of tables one behind the other.
#[derive(Debug, Default)]
pub(crate) struct Plan {
    pub(crate) spans: Vec<Span>,
    /// Where the next table begins.
    pub(crate) at: usize,
}

impl Plan {
    /// The next table. `name` stands before the names of its fields: `eid[0]`, `entry[1].gid`.
    pub(crate) fn named(&mut self, name: &str, table: &[FieldLayout]) {
        for FieldLayout(field, len, parts) in table {
            let named = |own: &str| match (name, own) {
                ("", own) => own.to_owned(),
                (name, "") => name.to_owned(),
                // Every reserved field has the same name, so one check covers all.
                (_, "reserved") => "reserved".to_owned(),
                (name, own) => format!("{name}.{own}"),
            };
            let (at, len) = (self.at, *len);
            if parts.is_empty() {
                self.spans.push(Span { name: named(field), at, len, bits: None });
            }
            for (part, shift, bits) in *parts {
                self.spans.push(Span { name: named(part), at, len, bits: Some((*shift, *bits)) });
            }
            self.at += len;
        }
    }

    /// The next tables.
    pub(crate) fn tables(&mut self, tables: &[&[FieldLayout]]) {
        for table in tables {
            self.named("", table);
        }
    }

    /// A table per member of a list.
    pub(crate) fn list(&mut self, name: &str, count: usize, table: &[FieldLayout]) {
        for i in 0..count {
            self.named(&format!("{name}[{i}]"), table);
        }
    }
}
