// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Faults of a target, each breaking one rule.

use smc_core::handshake::Kinds;

/// One fault of a target.
#[derive(Clone)]
pub(crate) struct Fault {
    pub(crate) name: &'static str,
    /// Part of the id of the case expected to find the fault.
    pub(crate) found_by: &'static str,
    /// Level of the case.
    pub(crate) layer: &'static str,
    /// Changes a message before the target sends it.
    pub(crate) outgoing: fn(&mut Vec<u8>),
    /// Changes a received message before the target judges it.
    pub(crate) incoming: fn(&mut Vec<u8>),
    /// Changes received bytes.
    pub(crate) segment: fn(&mut [u8]),
    /// Refuses a well-formed first message.
    pub(crate) refuses: fn(&[u8]) -> bool,
    /// Goes on as TCP after a protocol error.
    pub(crate) falls_back: bool,
    /// Never gives up waiting.
    pub(crate) waits: bool,
    /// Loses so many bytes of data after a fallback.
    pub(crate) loses: usize,
    /// Ends the connection behind its own Decline.
    pub(crate) ends_after_decline: bool,
    /// Answers a Decline.
    pub(crate) answers_declines: bool,
    /// Takes any Confirm.
    pub(crate) takes_any_confirm: bool,
    /// Knows no peer again.
    pub(crate) forgets: bool,
    /// Keeps its knowledge of a peer out of sync.
    pub(crate) keeps_groups: bool,
    /// Takes its least preferred type.
    pub(crate) takes_last: bool,
    pub(crate) reads_all: bool,
    /// Changes a message of LLC before sending; an empty one is not sent.
    pub(crate) llc_outgoing: fn(&mut Vec<u8>),
    /// Changes a received message of LLC; an empty one is ignored.
    pub(crate) llc_incoming: fn(&mut Vec<u8>),
    /// Keeps the connection although its last link is over.
    pub(crate) llc_stays: bool,
}

impl Fault {
    /// The types offered by a client with this fault.
    pub(crate) fn kinds(&self) -> Kinds {
        if self.layer == "llc" { Kinds::all() } else { Kinds::SMCD_V2 }
    }

    /// No fault.
    pub(crate) const NONE: Fault = Fault {
        name: "none",
        found_by: "",
        layer: "clc",
        outgoing: |_| {},
        incoming: |_| {},
        segment: |_| {},
        refuses: |_| false,
        falls_back: false,
        waits: false,
        loses: 0,
        ends_after_decline: false,
        answers_declines: false,
        takes_any_confirm: false,
        forgets: false,
        keeps_groups: false,
        takes_last: false,
        reads_all: true,
        llc_outgoing: |_| {},
        llc_incoming: |_| {},
        llc_stays: false,
    };
}

const PROPOSAL: u8 = 1;
const ACCEPT: u8 = 2;
const CONFIRM: u8 = 3;
const DECLINE: u8 = 4;

fn is(message: &[u8], kind: u8) -> bool {
    message.get(4) == Some(&kind)
}

/// An Accept of SMC-D version 2, with the extension of a first contact or not.
fn is_d2(message: &[u8], kind: u8) -> bool {
    is(message, kind) && message[3] == 0xc4 && message[7] >> 4 == 2
}

fn set(message: &mut [u8], at: usize, bytes: &[u8]) {
    if let Some(place) = message.get_mut(at..at + bytes.len()) {
        place.copy_from_slice(bytes);
    }
}

fn mend_trailer(message: &mut [u8]) {
    let eye: [u8; 4] = message[..4].try_into().unwrap();
    let len = message.len();
    message[len - 4..].copy_from_slice(&eye);
}

fn resize(message: &mut [u8]) {
    let len = u16::try_from(message.len()).unwrap();
    message[5..7].copy_from_slice(&len.to_be_bytes());
}

/// Faults of a server visible to its clients.
pub(crate) fn of_server() -> Vec<Fault> {
    let base = Fault::NONE;
    let outgoing = |name, found_by, outgoing: fn(&mut Vec<u8>)| Fault {
        name,
        found_by,
        outgoing,
        ..Fault::NONE
    };
    let incoming = |name, found_by, incoming: fn(&mut Vec<u8>)| Fault {
        name,
        found_by,
        incoming,
        ..Fault::NONE
    };
    let refuses = |name, found_by, refuses: fn(&[u8]) -> bool| Fault {
        name,
        found_by,
        refuses,
        ..Fault::NONE
    };
    vec![
        outgoing("accept-reserved", "accept-reserved", |m| {
            if is_d2(m, ACCEPT) {
                set(m, 26, &[1])
            }
        }),
        outgoing("accept-size-reserved", "accept-reserved", |m| {
            if is_d2(m, ACCEPT) {
                m[25] |= 1
            }
        }),
        outgoing("accept-eid-other", "accept-eid", |m| {
            if is_d2(m, ACCEPT) {
                set(m, 34, b"OTHER.EID  ")
            }
        }),
        outgoing("accept-eid-zeros", "accept-eid", |m| {
            if is_d2(m, ACCEPT) {
                set(m, 45, &[0; 21])
            }
        }),
        outgoing("accept-chid-other", "accept-chid", |m| {
            if is_d2(m, ACCEPT) {
                set(m, 32, &[0xff, 2])
            }
        }),
        outgoing("accept-no-second-gid", "accept-extended-gid", |m| {
            if is_d2(m, ACCEPT) {
                set(m, 66, &[0; 8])
            }
        }),
        outgoing("accept-size-7", "accept-size-code", |m| {
            if is_d2(m, ACCEPT) {
                m[25] = 0x70
            }
        }),
        outgoing("accept-token-zero", "accept-token", |m| {
            if is_d2(m, ACCEPT) {
                set(m, 16, &[0; 8])
            }
        }),
        outgoing("accept-index-255", "accept-index", |m| {
            if is_d2(m, ACCEPT) {
                m[24] = 255
            }
        }),
        outgoing("accept-trailer", "types-answer", |m| {
            if is(m, ACCEPT) {
                *m.last_mut().unwrap() ^= 1
            }
        }),
        outgoing("accept-length", "types-answer", |m| {
            if is(m, ACCEPT) {
                m[6] -= 1
            }
        }),
        outgoing("accept-release-2", "first-release", |m| {
            if m.len() == 130 {
                m[75] = 0x22
            }
        }),
        outgoing("accept-os-0", "first-os", |m| {
            if m.len() == 130 {
                m[75] = 0x01
            }
        }),
        outgoing("accept-hostname", "first-hostname", |m| {
            if m.len() == 130 {
                set(m, 78, &[0; 32])
            }
        }),
        outgoing("accept-features-0", "first-features", |m| {
            if m.len() == 130 {
                set(m, 112, &[0, 0])
            }
        }),
        outgoing("accept-features-more", "first-features", |m| {
            if m.len() == 130 {
                set(m, 112, &[0x80, 1])
            }
        }),
        outgoing("accept-vendor", "first-vendor", |m| {
            if m.len() == 130 {
                set(m, 114, &[1])
            }
        }),
        outgoing("accept-extension-reserved", "first-reserved", |m| {
            if m.len() == 130 {
                set(m, 118, &[1])
            }
        }),
        outgoing("accept-flag-without-extension", "accept-length", |m| {
            if m.len() == 78 {
                m[7] |= 8
            }
        }),
        outgoing("accept-version-3", "types-answer", |m| {
            if is(m, ACCEPT) {
                m[7] = m[7] & 0x0f | 0x30
            }
        }),
        outgoing("accept-type-r", "types-answer", |m| {
            if is_d2(m, ACCEPT) {
                m[7] &= !1
            }
        }),
        outgoing("decline-short", "own-length", |m| {
            if is(m, DECLINE) && m.len() == 44 {
                m.drain(24..40);
                resize(m);
            }
        }),
        outgoing("decline-reserved", "own-reserved", |m| {
            if is(m, DECLINE) && m.len() == 44 {
                m[21] = 1
            }
        }),
        outgoing("decline-out-of-sync", "own-in-sync", |m| {
            if is(m, DECLINE) {
                m[7] |= 8
            }
        }),
        outgoing("decline-no-diagnosis", "own-diagnosis", |m| {
            if is(m, DECLINE) {
                set(m, 16, &[0; 4])
            }
        }),
        outgoing("decline-version-1", "own-length", |m| {
            if is(m, DECLINE) {
                m[7] = 0x10
            }
        }),
        outgoing("decline-no-reasons", "own-reasons", |m| {
            if is(m, DECLINE) && m.len() == 44 {
                set(m, 24, &[0; 16])
            }
        }),
        outgoing("decline-all-reasons", "own-reasons", |m| {
            if is(m, DECLINE) && m.len() == 44 {
                set(m, 24, &[3; 16])
            }
        }),
        incoming("trailer-not-checked", "header-trailer", |m| mend_trailer(m)),
        incoming("unpaired-taken", "unpaired-alone", |m| {
            if is(m, PROPOSAL) && m.len() == 214 {
                m.splice(210..210, *b"\x43\x02\x03\x04\x05\x06\x47\x08\xff\x01");
                m[81] = 2;
                resize(m);
            }
        }),
        incoming("eid-by-first-bytes", "eid-almost-128", |m| {
            if is(m, PROPOSAL) && m.len() == 224 && m[120..124] == *b"CONF" && m[131] != b'-' {
                set(m, 120, b"CONFORMANCE                     ");
            }
        }),
        incoming("feature-bit-not-asked", "release-feature-bit-off", |m| {
            if is(m, PROPOSAL) && m.len() == 224 {
                m[107] |= 1
            }
        }),
        incoming("release-20-with-emulated", "emulated-in-20", |m| {
            if is(m, PROPOSAL) && m.len() == 224 {
                m[83] |= 0x10;
                m[107] |= 1;
            }
        }),
        incoming("confirm-chid-not-checked", "wrong-chid", |m| {
            if is_d2(m, CONFIRM) {
                set(m, 32, &[0xff, 1])
            }
        }),
        incoming("confirm-eid-not-checked", "wrong-eid", |m| {
            if is_d2(m, CONFIRM) {
                set(m, 34, b"CONFORMANCE                     ");
            }
        }),
        incoming("confirm-size-not-checked", "confirm-size-15", |m| {
            if is_d2(m, CONFIRM) {
                m[25] &= 0x3f
            }
        }),
        incoming("confirm-release-not-checked", "confirm-first-release-2", |m| {
            if is_d2(m, CONFIRM) && m.len() == 130 {
                m[75] = m[75] & 0xf0 | 1
            }
        }),
        incoming("confirm-features-not-checked", "confirm-first-features", |m| {
            if is_d2(m, CONFIRM) && m.len() == 130 {
                m[113] = 1
            }
        }),
        refuses("reserved-checked", "reserved-proposal-6", |m| {
            is(m, PROPOSAL) && m.len() > 80 && m[60..80] != [0; 20]
        }),
        refuses("reserved-of-extension-checked", "reserved-proposal-11", |m| {
            m.len() == 224 && m[108..120] != [0; 12]
        }),
        refuses("short-decline-of-version-2-refused", "form-28-bytes-of-version-2", |m| {
            is(m, DECLINE) && m.len() == 28 && m[7] >> 4 == 2
        }),
        refuses("version-2-only", "header-version-3", |m| m[7] >> 4 > 2),
        refuses("vendor-refused", "vendor-known", |m| m.len() == 224 && m[52..55] != [0; 3]),
        refuses("peer-id-wanted", "unused-peer-id-zero", |m| m.len() == 224 && m[8..16] == [0; 8]),
        refuses("one-eid-only", "eid-1-of-8", |m| m.len() > 224 && m[80] > 1),
        refuses("four-entries-only", "device-fourth", |m| {
            is(m, PROPOSAL) && m.len() > 224 && m[81] > 4
        }),
        refuses("later-release-refused", "accepted-2", |m| m.len() == 224 && m[83] >> 4 > 1),
        Fault {
            name: "falls-back-after-errors",
            found_by: "confirm-short-length",
            falls_back: true,
            ..base.clone()
        },
        Fault { name: "waits-for-ever", found_by: "confirm-silence", waits: true, ..base.clone() },
        Fault { name: "loses-a-byte-of-data", found_by: "decline-form", loses: 1, ..base.clone() },
        Fault {
            name: "ends-after-its-decline",
            found_by: "own-length",
            ends_after_decline: true,
            ..base.clone()
        },
        Fault {
            name: "answers-a-decline",
            found_by: "decline-form",
            answers_declines: true,
            ..base.clone()
        },
        Fault {
            name: "takes-any-confirm",
            found_by: "wrong-gid",
            takes_any_confirm: true,
            ..base.clone()
        },
        Fault {
            name: "keeps-groups-out-of-sync",
            found_by: "decline-out-of-sync",
            keeps_groups: true,
            ..base.clone()
        },
        Fault {
            name: "never-knows-a-peer",
            found_by: "extension-without-flag",
            forgets: true,
            ..base.clone()
        },
        Fault { name: "takes-the-last-type", found_by: "d2-first", takes_last: true, ..base },
    ]
}

/// Faults of a client visible to its servers.
pub(crate) fn of_client() -> Vec<Fault> {
    let outgoing = |name, found_by, outgoing: fn(&mut Vec<u8>)| Fault {
        name,
        found_by,
        outgoing,
        ..Fault::NONE
    };
    let incoming = |name, found_by, incoming: fn(&mut Vec<u8>)| Fault {
        name,
        found_by,
        incoming,
        ..Fault::NONE
    };
    vec![
        outgoing("proposal-reserved", "proposal-reserved", |m| {
            if is(m, PROPOSAL) {
                m[60] = 1
            }
        }),
        outgoing("proposal-mac-group", "v2-mac", |m| {
            if is(m, PROPOSAL) {
                set(m, 32, &[1, 2, 3, 4, 5, 6])
            }
        }),
        outgoing("proposal-eid-lower", "v2-eid-form", |m| {
            if is(m, PROPOSAL) {
                set(m, 120, b"other")
            }
        }),
        outgoing("proposal-feature-missing", "v2-features-emulated", |m| {
            if is(m, PROPOSAL) {
                m[107] = 0
            }
        }),
        outgoing("proposal-feature-unknown", "v2-features", |m| {
            if is(m, PROPOSAL) {
                m[106] = 1
            }
        }),
        outgoing("proposal-vendor", "v2-vendor", |m| {
            if is(m, PROPOSAL) {
                m[56] = 1
            }
        }),
        outgoing("proposal-uuid", "v2-uuid", |m| {
            if is(m, PROPOSAL) && m.len() == 256 {
                m[238] = 0
            }
        }),
        outgoing("proposal-seid-without-bit", "v2-seid", |m| {
            if is(m, PROPOSAL) && m.len() == 256 {
                m[190] = 65
            }
        }),
        outgoing("proposal-associated", "no-associated", |m| {
            if is(m, PROPOSAL) {
                set(m, 40, &[1; 8])
            }
        }),
        outgoing("confirm-eid-other", "confirm-eid", |m| {
            if is_d2(m, CONFIRM) {
                set(m, 34, b"OTHER      ")
            }
        }),
        outgoing("confirm-chid-other", "confirm-chid", |m| {
            if is_d2(m, CONFIRM) {
                m[33] = 9
            }
        }),
        outgoing("confirm-gid-other", "confirm-gid", |m| {
            if is_d2(m, CONFIRM) {
                m[9] ^= 1
            }
        }),
        outgoing("confirm-no-features", "confirm-features", |m| {
            if m.len() == 130 {
                m[113] = 0
            }
        }),
        outgoing("confirm-all-features", "common-features", |m| {
            if m.len() == 130 {
                m[112] = 0xff
            }
        }),
        outgoing("confirm-release", "confirm-release", |m| {
            if m.len() == 130 {
                m[75] = 0x22
            }
        }),
        outgoing("confirm-no-flag", "header-answered", |m| {
            if is_d2(m, CONFIRM) {
                m[7] &= !8
            }
        }),
        outgoing("confirm-reserved", "confirm-reserved", |m| {
            if is_d2(m, CONFIRM) {
                m[26] = 1
            }
        }),
        outgoing("confirm-token-zero", "confirm-token", |m| {
            if is_d2(m, CONFIRM) {
                set(m, 16, &[0; 8])
            }
        }),
        incoming("trailer-not-checked", "header-trailer-zero", |m| mend_trailer(m)),
        incoming("size-not-checked", "accept-size-9", |m| {
            if is_d2(m, ACCEPT) {
                m[25] &= 0x3f
            }
        }),
        incoming("chid-not-checked", "chid-ff42", |m| {
            if is_d2(m, ACCEPT) {
                set(m, 32, &[0xff, 1])
            }
        }),
        incoming("eid-not-checked", "eid-foreign", |m| {
            if is_d2(m, ACCEPT) {
                set(m, 34, b"OTHER                           ")
            }
        }),
        incoming("release-not-checked", "extension-release-2", |m| {
            if m.len() == 130 {
                m[75] = 1
            }
        }),
        incoming("hostname-checked", "taken-hostname-control", |m| {
            if m.len() == 130 && m[78] == 0x1b {
                m[4] = 9
            }
        }),
        incoming("reserved-checked", "taken-all-reserved", |m| {
            if is_d2(m, ACCEPT) && m[26] != 0 {
                m[4] = 9
            }
        }),
        Fault {
            name: "falls-back-after-errors",
            found_by: "data-http",
            falls_back: true,
            ..Fault::NONE
        },
        Fault { name: "loses-a-byte-of-data", found_by: "then-data", loses: 1, ..Fault::NONE },
        Fault {
            name: "ends-when-declined",
            found_by: "form-44",
            ends_after_decline: true,
            ..Fault::NONE
        },
    ]
}
