// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Faults of a target's LLC, each breaking one rule.

use super::Fault;
use super::faults::{Change, changes};

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

/// Changes of the messages sent by any target.
const OUTGOING: &[(&str, &str, Change)] = changes! { m;
    "llc-test-data" by "-test-text": is_reply(m, TEST_LINK) => m[19] ^= 1,
    "llc-test-request" by "-test-zeros": is(m, TEST_LINK) && m[4] == 0 => m[3] &= !REPLY,
    "llc-test-reserved" by "-test-ones": is_reply(m, TEST_LINK) => m[43] = 1,
    "llc-test-length" by "r2-test-length": is_reply(m, TEST_LINK) && is_v2(m) => m.swap(1, 2),
    "llc-rkey-refused" by "confirm-rkey-17254": is_reply(m, CONFIRM_RKEY) => m[3] |= 0x20,
    "llc-rkey-other" by "confirm-rkey-1": is_reply(m, CONFIRM_RKEY) => m[8] ^= 1,
    "llc-rkey-address" by "confirm-rkey-1": is_reply(m, CONFIRM_RKEY) => m[16] ^= 1,
    "llc-delete-always-good" by "delete-rkey-unknown": is_reply(m, DELETE_RKEY) => m[3] &= !0x20,
    "llc-delete-mask" by "r1-delete-rkey-mixed":
        is_reply(m, DELETE_RKEY) && !is_v2(m) => m[5] = 0xff,
    "llc-delete-list" by "r2-delete-rkey-mixed":
        is_reply(m, DELETE_RKEY) && is_v2(m) => m[8..12].fill(0),
    "llc-unknown-link-reason" by "delete-unknown-77": is_reply(m, DELETE_LINK) => m[6] = 0,
    "llc-confirm-mac" by "confirm-link-mac": is(m, CONFIRM_LINK) => m[9] ^= 1,
    "llc-confirm-gid" by "confirm-link-gid": is(m, CONFIRM_LINK) => m[25] ^= 1,
    "llc-confirm-qpn" by "confirm-link-qpn": is(m, CONFIRM_LINK) => m[28] ^= 1,
    "llc-confirm-number" by "confirm-link-number": is(m, CONFIRM_LINK) => m[29] = 0,
    "llc-confirm-reserved" by "confirm-link-reserved": is(m, CONFIRM_LINK) => m[43] = 1,
    "llc-confirm-limits" by "confirm-link-limits": is(m, CONFIRM_LINK) => m[34] = 9,
};

/// Changes of received messages; an empty message is ignored.
const INCOMING: &[(&str, &str, Change)] = changes! { m;
    "llc-test-unanswered" by "-test-twice": is(m, TEST_LINK) && m[4] == 2 => m.clear(),
    "llc-optional-type" by "dropped-129": m[0] == 0x81 => m[0] = 0x41,
    "llc-optional-answered" by "r2-dropped-161": m[0] == 0xa1 => m[0] = 0x27,
    "llc-unknown-type" by "unknown-65": m[0] == 0x41 => m.clear(),
    "llc-continuation" by "continuation-35": m[0] == 0x23 => m.clear(),
    "llc-other-version" by "r2-other-version": m[0] == 7 => (m[0], m[1], m[2]) = (0x27, 0, 44),
    "llc-any-length" by "length-43":
        is(m, TEST_LINK) => {
            let [high, low] = if is_v2(m) { [0, 44] } else { [44, 0] };
            (m[1], m[2]) = (high, low);
        },
    "llc-short" by "truncated-43": true => m.resize(44, 0),
    "llc-long" by "-longer": true => m.truncate(44),
    "llc-keeps-all" by "-delete-all": is(m, DELETE_LINK) && m[3] & 0x40 != 0 => m.clear(),
    "llc-stray-ends" by "stray-test-link": is_reply(m, TEST_LINK) => m[0] = 0x41,
};

/// Changes of the messages sent by a server, besides.
const OF_SERVER: &[(&str, &str, Change)] = changes! { m;
    "llc-add-number" by "r2-add-link-number": is(m, ADD_LINK) => m[31] = 1,
    "llc-add-mtu" by "add-link-mtu": is(m, ADD_LINK) => m[32] = 0,
    "llc-add-key" by "r2-add-link-key": is(m, ADD_LINK) && m.len() > 72 => m[75] ^= 1,
    "llc-add-reserved" by "add-link-reserved": is(m, ADD_LINK) => m[10] = 1,
};

/// Changes of the messages sent by a client, besides.
const OF_CLIENT: &[(&str, &str, Change)] = changes! { m;
    "llc-add-accepted" by "add-link-mtu": is_reply(m, ADD_LINK) => m[3] &= !0x40,
    "llc-add-reason" by "r1-add-link-same": is_reply(m, ADD_LINK) => m[2] = 0,
};

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
