// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Messages of SMC-R captured from Linux, and this side's reaction: own messages with the same
//! contents are the same bytes.

use smc_core::handshake::{
    Choice, ClientStep, Config, ConfirmStepR, IsmDevice, Kinds, KnownLink, LinkEnd, PeerRnic, Rnic,
    Route, Selection, ServerStep, SmcKind, TermsR,
};
use smc_core::wire::clc::{SmcrLink, Version};
use smc_core::wire::ids::{
    Chid, Features, Gid, Hostname, LinkLimits, Mac, Mtu, OsType, PeerId, Psn, Qpn, Release, Rkey,
    SizeCode,
};

use crate::smcr_support::*;
use crate::support::*;

const SERVER_ID: PeerId = PeerId([0x95, 0xca, 0x52, 0x54, 0, 0, 0, 1]);
const CLIENT_ID: PeerId = PeerId([0x3c, 0x11, 0x52, 0x54, 0, 0, 0, 2]);

/// A Proposal of SMC-R and SMC-D of v2.1 with one UEID and the loopback device. Linux leaves peer
/// id and MAC zero.
fn proposal_v2() -> Vec<u8> {
    let mut bytes = hex("e2d4c3d9 0100e02e");
    bytes.extend([0; 8 + 16 + 6 + 2 + 8 + 2]);
    bytes.extend(hex("001c"));
    bytes.extend([0; 8 + 20]);
    bytes.extend(hex("01 02 00 10 0000 0040 00000000000000000000 ffff 0a090002 ff 02 0001"));
    bytes.extend([0; 12]);
    bytes.extend(blank_padded("SMCPROBE-EID1"));
    bytes.extend([0; 32 + 16]);
    bytes.extend(hex("f6d0053b4904446f ffff 934f97c2936239e7 ffff e2d4c3d9"));
    assert_eq!(bytes.len(), 224);
    bytes
}

/// A Proposal of SMC-Rv1 and, without an EID, SMC-Dv2.
fn proposal_v1() -> Vec<u8> {
    let mut bytes = hex("e2d4c3d9 0100c824 3c11525400000002");
    bytes.extend(hex("00000000000000000000 ffff 0a090002 525400000002 0028"));
    bytes.extend([0; 8 + 2]);
    bytes.extend(hex("0024"));
    bytes.extend([0; 8 + 20]);
    bytes.extend(hex("0a090000 18 0000 00"));
    bytes.extend(hex("00 02 00 10 0000 0020"));
    bytes.extend([0; 16]);
    bytes.extend(hex("00 00 0001"));
    bytes.extend([0; 12 + 32 + 16]);
    bytes.extend(hex("f6d0053b4904446f ffff 934f97c2936239e7 ffff e2d4c3d9"));
    assert_eq!(bytes.len(), 200);
    bytes
}

/// Bytes 8 to 63 of the Accept.
const SERVER_LINK: &str = "95ca525400000001 00000000000000000000 ffff 0a090001 525400000001 \
    000011 000003e0 01 00000001 23 00 ff11000000d90000 00 87e8ec";
/// Bytes 8 to 63 of the Confirm.
const CLIENT_LINK: &str = "3c11525400000002 00000000000000000000 ffff 0a090002 525400000002 \
    000011 00000284 01 00000001 23 00 ff11000001230000 00 4f0d21";

/// Accept or Confirm of version 2 without GID list.
fn answer_v2(head: &str, link: &str, first_contact: bool) -> Vec<u8> {
    let mut bytes = hex(head);
    bytes.extend(hex(link));
    bytes.extend(blank_padded("SMCPROBE-EID1"));
    bytes.extend([0; 8]);
    if first_contact {
        bytes.extend(hex("80 21 0000"));
        bytes.extend(blank_padded("(none)"));
        bytes.extend(hex("ff 02 0001 00000000 0000000000000000"));
    }
    bytes
}

fn accept_v2(first_contact: bool) -> Vec<u8> {
    let head = if first_contact { "e2d4c3d9 0200a028" } else { "e2d4c3d9 02006c20" };
    let mut bytes = answer_v2(head, SERVER_LINK, first_contact);
    bytes.extend(hex("e2d4c3d9"));
    assert_eq!(bytes.len(), if first_contact { 160 } else { 108 });
    bytes
}

fn confirm_v2(first_contact: bool) -> Vec<u8> {
    let head = if first_contact { "e2d4c3d9 0300b428" } else { "e2d4c3d9 03006c20" };
    let mut bytes = answer_v2(head, CLIENT_LINK, first_contact);
    if first_contact {
        bytes.extend(hex("01000000 00000000000000000000 ffff 0a090002"));
    }
    bytes.extend(hex("e2d4c3d9"));
    assert_eq!(bytes.len(), if first_contact { 180 } else { 108 });
    bytes
}

fn answer_v1(kind: u8, link: &str, first_contact: bool) -> Vec<u8> {
    let mut bytes = hex("e2d4c3d9 00004410");
    bytes[4] = kind;
    bytes[7] |= if first_contact { 0x08 } else { 0 };
    bytes.extend(hex(link));
    bytes.extend(hex("e2d4c3d9"));
    assert_eq!(bytes.len(), 68);
    bytes
}

/// The server of the capture.
fn server() -> Config {
    let mut config = Config::new(SERVER_ID);
    config.kinds = Kinds::SMCR_V1 | Kinds::SMCR_V2;
    config.ueids = vec![eid("SMCPROBE-EID1")];
    config.hostname = Hostname::from_wire(blank_padded("(none)").try_into().unwrap());
    config
}

/// The client of the capture.
fn client() -> Config {
    Config { peer_id: CLIENT_ID, ..server() }
}

fn route(n: u8) -> Route {
    let rnic = Rnic {
        mac: Mac([0x52, 0x54, 0, 0, 0, n]),
        mtu: Mtu::B1024,
        // As the capture was made, with an address of RoCEv2 in version 1 too.
        gid_v1: Some(gid_v4(n)),
        gid_v2: Some(gid_v4(n)),
        max_links: 2,
    };
    Route { ipv6: false, subnets: vec![subnet_v4(0)], ism: None, rnic: Some(rnic) }
}

fn server_end() -> LinkEnd {
    LinkEnd {
        gid: gid_v4(1),
        mac: Mac([0x52, 0x54, 0, 0, 0, 1]),
        qpn: Qpn::new(0x11),
        psn: Psn::new(0x87_e8ec),
        mtu: Mtu::B1024,
        rkey: Rkey(0x3e0),
        address: 0xff11_0000_00d9_0000,
        index: 1,
        token: 1,
        size: SizeCode::new(2).unwrap(),
        direct: true,
    }
}

fn client_end() -> LinkEnd {
    LinkEnd {
        gid: gid_v4(2),
        mac: Mac([0x52, 0x54, 0, 0, 0, 2]),
        psn: Psn::new(0x4f_0d21),
        rkey: Rkey(0x284),
        address: 0xff11_0000_0123_0000,
        ..server_end()
    }
}

const TERMS_V2: TermsR = TermsR {
    version: Version::V2,
    release: Release::V2_1,
    features: Features::EMULATED_ISM,
    limits: LinkLimits { max_conns: 255, max_links: 2 },
    carriers: None,
};

fn select(proposal: &[u8]) -> Selection {
    eligible_on(&server(), &route(1), proposal)
}

// Shows: CLCV2-8.
#[test]
fn the_proposal_of_linux_is_what_this_client_sends_with_the_same_contents() {
    let mut config = Config::new(PeerId::NONE);
    config.kinds = Kinds::SMCD_V2 | Kinds::SMCR_V2;
    config.ueids = vec![eid("SMCPROBE-EID1")];
    let gid = hex("f6d0053b4904446f 934f97c2936239e7").try_into().unwrap();
    config.devices = vec![IsmDevice { chid: Chid::LOOPBACK, gid: Gid(gid) }];
    let mut route = route(2);
    route.rnic.as_mut().unwrap().mac = Mac::NONE;
    assert_eq!(propose_on(&config, &route).1, proposal_v2());
}

// Shows: CLCV2-67.
#[test]
fn server_takes_version_2_of_linux_at_first_contact() {
    let selection = select(&proposal_v2());
    let peer = PeerRnic::new(Version::V2, PeerId::NONE, gid_v4(2), Mac::NONE);
    assert_eq!(selection.choices().collect::<Vec<_>>(), [Choice::R(peer)]);
    assert_eq!(selection.terms_r(Version::V2), Some(TERMS_V2));
    let (awaits, accept) = selection.accept_r(Version::V2, None, server_end(), NOW).unwrap();
    assert_eq!(accept, accept_v2(true));

    let ConfirmStepR::Established(established) = awaits.handle(&confirm_v2(true), |_| panic!())
    else {
        panic!()
    };
    assert!(established.first_contact);
    assert_eq!(established.terms, TERMS_V2);
    assert_eq!(established.peer, client_end_link());
    assert_eq!(established.peer_rnic, peer, "the group is found by the GID when the id is zero");
    assert_eq!(established.mtu, Mtu::B1024);
    assert!(established.peer_direct);
    let gids = established.peer_gids.unwrap();
    assert_eq!((gids.active, gids.alternates.len()), (gid_v4(2), 0));
    assert_eq!(established.peer_host.unwrap().os, OsType::LINUX);
}

fn client_end_link() -> SmcrLink {
    let LinkEnd { gid, mac, qpn, psn, mtu, rkey, address, index, token, size, .. } = client_end();
    let peer_id = CLIENT_ID;
    SmcrLink { peer_id, gid, mac, qpn, rkey, index, token, size, mtu, address, psn }
}

// Shows: CLCV2-96.
#[test]
fn server_takes_version_2_of_linux_at_a_subsequent_contact() {
    let selection = select(&proposal_v2());
    let (awaits, accept) =
        selection.accept_r(Version::V2, Some(TERMS_V2), server_end(), NOW).unwrap();
    assert_eq!(accept, accept_v2(false));
    let mut asked = None;
    let step = awaits.handle(&confirm_v2(false), |link| {
        asked = Some(*link);
        true
    });
    let ConfirmStepR::Established(established) = step else { panic!() };
    let link = asked.unwrap();
    assert_eq!((link.qpn, link.rnic.gid()), (Qpn::new(0x11), gid_v4(2)));
    assert!(!established.first_contact);
    assert_eq!((established.peer_gids, established.peer_host), (None, None));
}

// Shows: CLCV2-67.
#[test]
fn client_takes_version_2_of_linux_at_first_contact() {
    let (awaits, _) = propose_on(&client(), &route(2));
    let accepted = offered_r(awaits, &accept_v2(true), KnownLink::NoGroup);
    assert!(accepted.first_contact() && accepted.direct());
    assert_eq!((accepted.version(), accepted.terms()), (Version::V2, TERMS_V2));
    assert_eq!(accepted.eid(), Some(eid("SMCPROBE-EID1")));
    assert_eq!(accepted.peer().peer_id, SERVER_ID);
    assert_eq!(accepted.peer().address, 0xff11_0000_00d9_0000);
    let (established, confirm) = accepted.confirm(client_end(), &[]);
    assert_eq!(confirm, confirm_v2(true));
    assert_eq!(established.peer_link().qpn, Qpn::new(0x11));
}

#[test]
fn client_takes_version_2_of_linux_at_a_subsequent_contact() {
    let (awaits, _) = propose_on(&client(), &route(2));
    let accepted = offered_r(awaits, &accept_v2(false), KnownLink::Link(TERMS_V2));
    assert!(!accepted.first_contact());
    assert_eq!(accepted.confirm(client_end(), &[]).1, confirm_v2(false));
}

// Shows: CLC-25.
#[test]
fn server_takes_version_1_of_linux() {
    let selection = select(&proposal_v1());
    let kinds: Vec<SmcKind> = selection.choices().map(|choice| choice.kind()).collect();
    assert_eq!(kinds, [SmcKind::SmcrV1]);
    let Some(Choice::R(peer)) = selection.choices().next() else { panic!() };
    assert_eq!((peer.peer_id(), peer.mac()), (CLIENT_ID, Mac([0x52, 0x54, 0, 0, 0, 2])));
    for known in [None, selection.terms_r(Version::V1)] {
        let first = known.is_none();
        let selection = select(&proposal_v1());
        let (awaits, accept) = selection.accept_r(Version::V1, known, server_end(), NOW).unwrap();
        assert_eq!(accept, answer_v1(2, SERVER_LINK, first));
        // Linux sets the first-contact flag in Confirm too.
        let step = awaits.handle(&answer_v1(3, CLIENT_LINK, first), |_| !first);
        let ConfirmStepR::Established(established) = step else { panic!("{step:?}") };
        assert_eq!(established.first_contact, first);
        assert_eq!(established.peer, client_end_link());
        assert_eq!(established.terms.version, Version::V1);
        assert_eq!((established.eid, established.peer_host), (None, None));
    }
}

// Shows: CLC-24.
#[test]
fn client_takes_version_1_of_linux() {
    for first in [true, false] {
        let (awaits, proposal) = propose_on(&client(), &route(2));
        assert_eq!(proposal[7], 0x20, "SMC-R of both versions");
        let known = match first {
            true => KnownLink::NoGroup,
            false => KnownLink::Link(TermsR { version: Version::V1, ..TERMS_V2 }),
        };
        let accepted = offered_r(awaits, &answer_v1(2, SERVER_LINK, first), known);
        assert_eq!((accepted.first_contact(), accepted.direct()), (first, true));
        let (established, confirm) = accepted.confirm(client_end(), &[]);
        assert_eq!(confirm, answer_v1(3, CLIENT_LINK, false), "no flag, as RFC 7609 has it");
        assert_eq!(established.eid, None);
    }
}

// Shows: CLC-12.
#[test]
fn a_proposal_of_rfc_7609_is_served_in_version_1() {
    let mut bytes = hex("e2d4c3d9 01003410 3c11525400000002");
    bytes.extend(hex("00000000000000000000 ffff 0a090002 525400000002"));
    bytes.extend(hex("0000 0a090000 18 0000 00 e2d4c3d9"));
    let selection = select(&bytes);
    let (_, accept) = selection.accept_r(Version::V1, None, server_end(), NOW).unwrap();
    assert_eq!(accept, answer_v1(2, SERVER_LINK, true));
    // A host without version 2 sends the same bytes.
    let mut client = client();
    client.kinds = Kinds::SMCR_V1;
    assert_eq!(propose_on(&client, &route(2)).1, bytes);
}

// Shows: CLC-51.
#[test]
fn linux_declines_end_a_handshake_of_smc_r_in_either_role() {
    let zeros = "0000000000000000";
    let v2 = hex(&format!("e2d4c3d9 04002c20 {zeros} 03030002 20000000 {zeros}{zeros} e2d4c3d9"));
    let v1 = hex(&format!("e2d4c3d9 04001c10 {zeros} 03030000 00000000 e2d4c3d9"));
    for (bytes, code) in [(v2, 0x0303_0002), (v1, 0x0303_0000)] {
        let (awaits, proposal) = propose_on(&client(), &route(2));
        let ClientStep::PeerDeclined(peer) = awaits.handle(&bytes, |_, _| None) else { panic!() };
        assert_eq!(peer.code.value(), code);
        let ServerStep::PeerDeclined(peer) = receive_on(&server(), &route(1), &bytes) else {
            panic!()
        };
        assert_eq!(peer.code.value(), code);
        let selection = select(&proposal);
        let (awaits, _) = selection.accept_r(Version::V2, None, server_end(), NOW).unwrap();
        let ConfirmStepR::PeerDeclined(peer) = awaits.handle(&bytes, |_| false) else { panic!() };
        assert_eq!(peer.code.value(), code);
    }
}
