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

pub(super) type Change = fn(&mut Vec<u8>);

/// A table of changes: the name, the case that finds the fault, the changed messages, the change.
macro_rules! changes {
    ($m:ident; $($name:literal by $found:literal: $when:expr => $change:expr,)*) => {
        &[$(($name, $found, |$m| if $when { $change; }),)*]
    };
}
pub(super) use changes;

/// Changes of the messages sent by a server.
const SENT_BY_SERVER: &[(&str, &str, Change)] = changes! { m;
    "accept-reserved" by "accept-reserved": is_d2(m, ACCEPT) => set(m, 26, &[1]),
    "accept-size-reserved" by "accept-reserved": is_d2(m, ACCEPT) => m[25] |= 1,
    "accept-eid-other" by "accept-eid": is_d2(m, ACCEPT) => set(m, 34, b"OTHER.EID  "),
    "accept-eid-zeros" by "accept-eid": is_d2(m, ACCEPT) => set(m, 45, &[0; 21]),
    "accept-chid-other" by "accept-chid": is_d2(m, ACCEPT) => set(m, 32, &[0xff, 2]),
    "accept-no-second-gid" by "accept-extended-gid": is_d2(m, ACCEPT) => set(m, 66, &[0; 8]),
    "accept-size-7" by "accept-size-code": is_d2(m, ACCEPT) => m[25] = 0x70,
    "accept-token-zero" by "accept-token": is_d2(m, ACCEPT) => set(m, 16, &[0; 8]),
    "accept-index-255" by "accept-index": is_d2(m, ACCEPT) => m[24] = 255,
    "accept-trailer" by "types-answer": is(m, ACCEPT) => *m.last_mut().unwrap() ^= 1,
    "accept-length" by "types-answer": is(m, ACCEPT) => m[6] -= 1,
    "accept-release-2" by "first-release": m.len() == 130 => m[75] = 0x22,
    "accept-os-0" by "first-os": m.len() == 130 => m[75] = 0x01,
    "accept-hostname" by "first-hostname": m.len() == 130 => set(m, 78, &[0; 32]),
    "accept-features-0" by "first-features": m.len() == 130 => set(m, 112, &[0, 0]),
    "accept-features-more" by "first-features": m.len() == 130 => set(m, 112, &[0x80, 1]),
    "accept-vendor" by "first-vendor": m.len() == 130 => set(m, 114, &[1]),
    "accept-extension-reserved" by "first-reserved": m.len() == 130 => set(m, 118, &[1]),
    "accept-flag-without-extension" by "accept-length": m.len() == 78 => m[7] |= 8,
    "accept-version-3" by "types-answer": is(m, ACCEPT) => m[7] = m[7] & 0x0f | 0x30,
    "accept-type-r" by "types-answer": is_d2(m, ACCEPT) => m[7] &= !1,
    "decline-short" by "own-length":
        is(m, DECLINE) && m.len() == 44 => { m.drain(24..40); resize(m); },
    "decline-reserved" by "own-reserved": is(m, DECLINE) && m.len() == 44 => m[21] = 1,
    "decline-out-of-sync" by "own-in-sync": is(m, DECLINE) => m[7] |= 8,
    "decline-no-diagnosis" by "own-diagnosis": is(m, DECLINE) => set(m, 16, &[0; 4]),
    "decline-version-1" by "own-length": is(m, DECLINE) => m[7] = 0x10,
    "decline-no-reasons" by "own-reasons": is(m, DECLINE) && m.len() == 44 => set(m, 24, &[0; 16]),
    "decline-all-reasons" by "own-reasons": is(m, DECLINE) && m.len() == 44 => set(m, 24, &[3; 16]),
};

/// Changes of the messages received by a server.
const READ_BY_SERVER: &[(&str, &str, Change)] = changes! { m;
    "trailer-not-checked" by "header-trailer": true => mend_trailer(m),
    "unpaired-taken" by "unpaired-alone":
        is(m, PROPOSAL) && m.len() == 214 => {
            m.splice(210..210, *b"\x43\x02\x03\x04\x05\x06\x47\x08\xff\x01");
            m[81] = 2;
            resize(m);
        },
    "eid-by-first-bytes" by "eid-almost-128":
        is(m, PROPOSAL) && m.len() == 224 && m[120..124] == *b"CONF" && m[131] != b'-' => {
            set(m, 120, b"CONFORMANCE                     ");
        },
    "feature-bit-not-asked" by "release-feature-bit-off":
        is(m, PROPOSAL) && m.len() == 224 => m[107] |= 1,
    "release-20-with-emulated" by "emulated-in-20":
        is(m, PROPOSAL) && m.len() == 224 => { m[83] |= 0x10; m[107] |= 1; },
    "confirm-chid-not-checked" by "wrong-chid": is_d2(m, CONFIRM) => set(m, 32, &[0xff, 1]),
    "confirm-eid-not-checked" by "wrong-eid":
        is_d2(m, CONFIRM) => set(m, 34, b"CONFORMANCE                     "),
    "confirm-size-not-checked" by "confirm-size-15": is_d2(m, CONFIRM) => m[25] &= 0x3f,
    "confirm-release-not-checked" by "confirm-first-release-2":
        is_d2(m, CONFIRM) && m.len() == 130 => m[75] = m[75] & 0xf0 | 1,
    "confirm-features-not-checked" by "confirm-first-features":
        is_d2(m, CONFIRM) && m.len() == 130 => m[113] = 1,
};

/// Changes of the messages sent by a client.
const SENT_BY_CLIENT: &[(&str, &str, Change)] = changes! { m;
    "proposal-reserved" by "proposal-reserved": is(m, PROPOSAL) => m[60] = 1,
    "proposal-mac-group" by "v2-mac": is(m, PROPOSAL) => set(m, 32, &[1, 2, 3, 4, 5, 6]),
    "proposal-eid-lower" by "v2-eid-form": is(m, PROPOSAL) => set(m, 120, b"other"),
    "proposal-feature-missing" by "v2-features-emulated": is(m, PROPOSAL) => m[107] = 0,
    "proposal-feature-unknown" by "v2-features": is(m, PROPOSAL) => m[106] = 1,
    "proposal-vendor" by "v2-vendor": is(m, PROPOSAL) => m[56] = 1,
    "proposal-uuid" by "v2-uuid": is(m, PROPOSAL) && m.len() == 256 => m[238] = 0,
    "proposal-seid-without-bit" by "v2-seid": is(m, PROPOSAL) && m.len() == 256 => m[190] = 65,
    "proposal-associated" by "no-associated": is(m, PROPOSAL) => set(m, 40, &[1; 8]),
    "confirm-eid-other" by "confirm-eid": is_d2(m, CONFIRM) => set(m, 34, b"OTHER      "),
    "confirm-chid-other" by "confirm-chid": is_d2(m, CONFIRM) => m[33] = 9,
    "confirm-gid-other" by "confirm-gid": is_d2(m, CONFIRM) => m[9] ^= 1,
    "confirm-no-features" by "confirm-features": m.len() == 130 => m[113] = 0,
    "confirm-all-features" by "common-features": m.len() == 130 => m[112] = 0xff,
    "confirm-release" by "confirm-release": m.len() == 130 => m[75] = 0x22,
    "confirm-no-flag" by "header-answered": is_d2(m, CONFIRM) => m[7] &= !8,
    "confirm-reserved" by "confirm-reserved": is_d2(m, CONFIRM) => m[26] = 1,
    "confirm-token-zero" by "confirm-token": is_d2(m, CONFIRM) => set(m, 16, &[0; 8]),
};

/// Changes of the messages received by a client.
const READ_BY_CLIENT: &[(&str, &str, Change)] = changes! { m;
    "trailer-not-checked" by "header-trailer-zero": true => mend_trailer(m),
    "size-not-checked" by "accept-size-9": is_d2(m, ACCEPT) => m[25] &= 0x3f,
    "chid-not-checked" by "chid-ff42": is_d2(m, ACCEPT) => set(m, 32, &[0xff, 1]),
    "eid-not-checked" by "eid-foreign":
        is_d2(m, ACCEPT) => set(m, 34, b"OTHER                           "),
    "release-not-checked" by "extension-release-2": m.len() == 130 => m[75] = 1,
    "hostname-checked" by "taken-hostname-control": m.len() == 130 && m[78] == 0x1b => m[4] = 9,
    "reserved-checked" by "taken-all-reserved": is_d2(m, ACCEPT) && m[26] != 0 => m[4] = 9,
};

/// The faults of two tables.
fn changes_of(
    sent: &'static [(&str, &str, Change)],
    read: &'static [(&str, &str, Change)],
) -> Vec<Fault> {
    let sent = sent.iter().map(|(name, found_by, outgoing)| Fault {
        name,
        found_by,
        outgoing: *outgoing,
        ..Fault::NONE
    });
    let read = read.iter().map(|(name, found_by, incoming)| Fault {
        name,
        found_by,
        incoming: *incoming,
        ..Fault::NONE
    });
    sent.chain(read).collect()
}

/// Faults of a server visible to its clients.
pub(crate) fn of_server() -> Vec<Fault> {
    let base = Fault::NONE;
    let refuses = |name, found_by, refuses: fn(&[u8]) -> bool| Fault {
        name,
        found_by,
        refuses,
        ..Fault::NONE
    };
    let mut all = changes_of(SENT_BY_SERVER, READ_BY_SERVER);
    all.extend([
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
    ]);
    all
}

/// Faults of a client visible to its servers.
pub(crate) fn of_client() -> Vec<Fault> {
    let mut all = changes_of(SENT_BY_CLIENT, READ_BY_CLIENT);
    all.extend([
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
    ]);
    all
}
