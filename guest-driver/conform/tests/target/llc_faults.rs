// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Faults of a target's LLC, each breaking one rule.

use super::Fault;

const CONFIRM_LINK: u8 = 1;
const ADD_LINK: u8 = 2;
const DELETE_LINK: u8 = 4;
const CONFIRM_RKEY: u8 = 6;
const TEST_LINK: u8 = 7;
const DELETE_RKEY: u8 = 9;
const REPLY: u8 = 0x80;

fn is(message: &[u8], kind: u8) -> bool {
    message.first().is_some_and(|byte| byte >> 6 == 0 && byte & 0x0f == kind)
}

fn is_v2(message: &[u8]) -> bool {
    message.first().is_some_and(|byte| byte & 0x20 != 0)
}

fn is_reply(message: &[u8], kind: u8) -> bool {
    is(message, kind) && message[3] & REPLY != 0
}

type Change = fn(&mut Vec<u8>);

/// Changes of the messages sent by any target.
const OUTGOING: &[(&str, &str, Change)] = &[
    ("llc-test-data", "-test-text", |m| {
        if is_reply(m, TEST_LINK) {
            m[19] ^= 1;
        }
    }),
    ("llc-test-request", "-test-zeros", |m| {
        if is(m, TEST_LINK) && m[4] == 0 {
            m[3] &= !REPLY;
        }
    }),
    ("llc-test-reserved", "-test-ones", |m| {
        if is_reply(m, TEST_LINK) {
            m[43] = 1;
        }
    }),
    ("llc-test-length", "r2-test-length", |m| {
        if is_reply(m, TEST_LINK) && is_v2(m) {
            m.swap(1, 2);
        }
    }),
    ("llc-rkey-refused", "confirm-rkey-17254", |m| {
        if is_reply(m, CONFIRM_RKEY) {
            m[3] |= 0x20;
        }
    }),
    ("llc-rkey-other", "confirm-rkey-1", |m| {
        if is_reply(m, CONFIRM_RKEY) {
            m[8] ^= 1;
        }
    }),
    ("llc-rkey-address", "confirm-rkey-1", |m| {
        if is_reply(m, CONFIRM_RKEY) {
            m[16] ^= 1;
        }
    }),
    ("llc-delete-always-good", "delete-rkey-unknown", |m| {
        if is_reply(m, DELETE_RKEY) {
            m[3] &= !0x20;
        }
    }),
    ("llc-delete-mask", "r1-delete-rkey-mixed", |m| {
        if is_reply(m, DELETE_RKEY) && !is_v2(m) {
            m[5] = 0xff;
        }
    }),
    ("llc-delete-list", "r2-delete-rkey-mixed", |m| {
        if is_reply(m, DELETE_RKEY) && is_v2(m) {
            m[8..12].fill(0);
        }
    }),
    ("llc-unknown-link-reason", "delete-unknown-77", |m| {
        if is_reply(m, DELETE_LINK) {
            m[6] = 0;
        }
    }),
    ("llc-confirm-mac", "confirm-link-mac", |m| {
        if is(m, CONFIRM_LINK) {
            m[9] ^= 1;
        }
    }),
    ("llc-confirm-gid", "confirm-link-gid", |m| {
        if is(m, CONFIRM_LINK) {
            m[25] ^= 1;
        }
    }),
    ("llc-confirm-qpn", "confirm-link-qpn", |m| {
        if is(m, CONFIRM_LINK) {
            m[28] ^= 1;
        }
    }),
    ("llc-confirm-number", "confirm-link-number", |m| {
        if is(m, CONFIRM_LINK) {
            m[29] = 0;
        }
    }),
    ("llc-confirm-reserved", "confirm-link-reserved", |m| {
        if is(m, CONFIRM_LINK) {
            m[43] = 1;
        }
    }),
    ("llc-confirm-limits", "confirm-link-limits", |m| {
        if is(m, CONFIRM_LINK) {
            m[34] = 9;
        }
    }),
];

/// Changes of received messages; an empty message is ignored.
const INCOMING: &[(&str, &str, Change)] = &[
    ("llc-test-unanswered", "-test-twice", |m| {
        if is(m, TEST_LINK) && m[4] == 2 {
            m.clear();
        }
    }),
    ("llc-optional-type", "dropped-129", |m| {
        if m[0] == 0x81 {
            m[0] = 0x41;
        }
    }),
    ("llc-optional-answered", "r2-dropped-161", |m| {
        if m[0] == 0xa1 {
            m[0] = 0x27;
        }
    }),
    ("llc-unknown-type", "unknown-65", |m| {
        if m[0] == 0x41 {
            m.clear();
        }
    }),
    ("llc-continuation", "continuation-35", |m| {
        if m[0] == 0x23 {
            m.clear();
        }
    }),
    ("llc-other-version", "r2-other-version", |m| {
        if m[0] == 7 {
            (m[0], m[1], m[2]) = (0x27, 0, 44);
        }
    }),
    ("llc-any-length", "length-43", |m| {
        if is(m, TEST_LINK) {
            let [high, low] = if is_v2(m) { [0, 44] } else { [44, 0] };
            (m[1], m[2]) = (high, low);
        }
    }),
    ("llc-short", "truncated-43", |m| m.resize(44, 0)),
    ("llc-long", "-longer", |m| m.truncate(44)),
    ("llc-keeps-all", "-delete-all", |m| {
        if is(m, DELETE_LINK) && m[3] & 0x40 != 0 {
            m.clear();
        }
    }),
    ("llc-stray-ends", "stray-test-link", |m| {
        if is_reply(m, TEST_LINK) {
            m[0] = 0x41;
        }
    }),
];

/// Changes of the messages sent by a server, besides.
const OF_SERVER: &[(&str, &str, Change)] = &[
    ("llc-add-number", "r2-add-link-number", |m| {
        if is(m, ADD_LINK) {
            m[31] = 1;
        }
    }),
    ("llc-add-mtu", "add-link-mtu", |m| {
        if is(m, ADD_LINK) {
            m[32] = 0;
        }
    }),
    ("llc-add-key", "r2-add-link-key", |m| {
        if is(m, ADD_LINK) && m.len() > 72 {
            m[75] ^= 1;
        }
    }),
    ("llc-add-reserved", "add-link-reserved", |m| {
        if is(m, ADD_LINK) {
            m[10] = 1;
        }
    }),
];

/// Changes of the messages sent by a client, besides.
const OF_CLIENT: &[(&str, &str, Change)] = &[
    ("llc-add-accepted", "add-link-mtu", |m| {
        if is_reply(m, ADD_LINK) {
            m[3] &= !0x40;
        }
    }),
    ("llc-add-reason", "r1-add-link-same", |m| {
        if is_reply(m, ADD_LINK) {
            m[2] = 0;
        }
    }),
];

fn all(own: &'static [(&str, &str, Change)]) -> Vec<Fault> {
    let outgoing = OUTGOING.iter().chain(own).map(|(name, found_by, change)| Fault {
        name,
        found_by,
        llc_outgoing: *change,
        layer: "llc",
        ..Fault::NONE
    });
    let incoming = INCOMING.iter().map(|(name, found_by, change)| Fault {
        name,
        found_by,
        llc_incoming: *change,
        layer: "llc",
        ..Fault::NONE
    });
    let stays = Fault {
        name: "llc-stays",
        found_by: "-delete-all",
        llc_stays: true,
        layer: "llc",
        ..Fault::NONE
    };
    outgoing.chain(incoming).chain([stays]).collect()
}

/// Faults of a server, without `llc_stays`: a server reports the end of its links, and the suite as
/// client sees the report alone.
pub(crate) fn of_server() -> Vec<Fault> {
    all(OF_SERVER).into_iter().filter(|fault| !fault.llc_stays).collect()
}

/// Faults of a client.
pub(crate) fn of_client() -> Vec<Fault> {
    all(OF_CLIENT)
}
