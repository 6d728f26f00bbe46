// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Records on TCP.

use super::walk::Walk;
use super::{View, words};
use crate::wire::WireError;
use crate::wire::record::{HEADER_LEN, Kind, Reason, Record};

pub(super) fn view(bytes: &[u8]) -> View {
    let mut walk = Walk::new(bytes);
    let code = walk.u8("type", |code| match Kind::from_code(code) {
        Some(kind) => format!("{code:02x} ({})", kind.name()),
        None => format!("{code:02x}"),
    });
    let kind = code.and_then(Kind::from_code);
    if code.is_some() && kind.is_none() {
        walk.problem("not a record");
    }
    walk.u8("flags", |byte| flags(kind, byte));
    walk.u16("reserved", |bytes| if bytes == 0 { String::new() } else { format!("{bytes:04x}") });
    let length = walk.u32("length of the body", |length| format!("{length} bytes"));
    walk.take("position", |at: [u8; 8]| u64::from_be_bytes(at).to_string());
    // A CLC message is explained by itself, so a CLC message may stand behind its record.
    let body = if kind == Some(Kind::Clc) { 0 } else { length.unwrap_or(0) as usize };
    walk.raw_until("body", HEADER_LEN.saturating_add(body));
    let error = match bytes.first_chunk() {
        Some(header) => Record::parse(header).err().map(WireError::Record),
        None => {
            let (need, have) = (HEADER_LEN, bytes.len());
            Some(WireError::Truncated { field: "record", at: 0, need, have })
        }
    };
    let have = bytes.len().saturating_sub(HEADER_LEN);
    let cut = (have < body).then_some(WireError::Truncated {
        field: "body",
        at: HEADER_LEN,
        need: body,
        have,
    });
    let name = kind.map_or("of unknown type", Kind::name);
    walk.finish(format!("Record {name}"), error.or(cut))
}

fn flags(kind: Option<Kind>, byte: u8) -> String {
    match kind {
        Some(Kind::Leave) => {
            let reason = Reason::ALL.into_iter().find(|reason| reason.code() == byte & 0x0f);
            let reason = reason.map_or("unknown reason", Reason::name);
            format!("{}, {reason}", words::flags(byte, &[(0x80, "more bytes are held")]))
        }
        Some(Kind::Data) => words::flags(byte, &[(0x80, "more bytes are held")]),
        Some(Kind::End) => words::flags(byte, &[(0x80, "sending done"), (0x40, "closed")]),
        _ => format!("{byte:02x}"),
    }
}
