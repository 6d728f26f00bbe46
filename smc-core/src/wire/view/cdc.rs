// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! CDC messages and control blocks.

use super::walk::Walk;
use super::{View, words};
use crate::wire::WireError;
use crate::wire::cdc::{CDC_LEN, CDC_TYPE, CONTROL_BLOCK_LEN, Cdc};

const PRODUCER: [(u8, &str); 5] = [
    (0x80, "writer blocked"),
    (0x40, "urgent data pending"),
    (0x20, "urgent data present"),
    (0x10, "cursor update requested"),
    (0x08, "failover validation"),
];
const STATE: [(u8, &str); 3] =
    [(0x80, "sending done"), (0x40, "connection closed"), (0x20, "abnormal close")];

fn type_byte(walk: &mut Walk<'_>) {
    let kind = walk.u8("type", |byte| match byte {
        CDC_TYPE => "fe (CDC)".into(),
        0 => "00 (nothing written yet)".into(),
        _ => format!("{byte:02x}"),
    });
    if !matches!(kind, None | Some(CDC_TYPE | 0)) {
        walk.problem("not CDC");
    }
}

fn flags(walk: &mut Walk<'_>) {
    walk.u8("producer flags", |byte| words::flags(byte, &PRODUCER));
    walk.u8("state flags", |byte| words::flags(byte, &STATE));
}

pub(super) fn message(bytes: &[u8]) -> View {
    let mut walk = Walk::new(bytes);
    walk.set_end(CDC_LEN);
    type_byte(&mut walk);
    let length = walk.u8("length", |length| length.to_string());
    if length.is_some_and(|length| usize::from(length) != CDC_LEN) {
        walk.problem("must be 44");
    }
    walk.u16("sequence number", |number| number.to_string());
    walk.u32("alert token", |token| format!("{token:08x}"));
    for (wrap, count) in
        [("producer wrap", "producer cursor"), ("consumer wrap", "consumer cursor")]
    {
        walk.reserved::<2>();
        walk.u16(wrap, |wrap| wrap.to_string());
        walk.u32(count, |count| count.to_string());
    }
    flags(&mut walk);
    walk.reserved::<18>();
    walk.finish("SMC-R CDC".into(), Cdc::parse(bytes).err())
}

pub(super) fn control_block(bytes: &[u8]) -> View {
    let mut walk = Walk::new(bytes);
    walk.set_end(CONTROL_BLOCK_LEN);
    type_byte(&mut walk);
    walk.reserved::<7>();
    walk.take("producer wrap", |wrap| u16::from_ne_bytes(wrap).to_string());
    walk.take("producer cursor", |count| u32::from_ne_bytes(count).to_string());
    walk.reserved::<2>();
    walk.take("consumer wrap", |wrap| u16::from_ne_bytes(wrap).to_string());
    walk.take("consumer cursor", |count| u32::from_ne_bytes(count).to_string());
    flags(&mut walk);
    walk.reserved::<8>();
    let have = bytes.len();
    let error = (have < CONTROL_BLOCK_LEN).then_some(WireError::Truncated {
        field: "control block",
        at: 0,
        need: CONTROL_BLOCK_LEN,
        have,
    });
    walk.finish("SMC-D control block (host byte order)".into(), error)
}
