// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! CLC.

use smc_core::wire::clc::*;
use smc_core::wire::ids::*;
use smc_core::wire::{List, view};

use super::{array, bytes, no_problem};

const EID: &str = "SMCPROBE-EID1";

fn eid() -> Eid {
    Eid::new(EID).unwrap()
}

fn check(text: &str, expected: Message) {
    let wire = bytes(text);
    let length = usize::from(u16::from_be_bytes([wire[5], wire[6]]));
    assert_eq!(wire.len(), length, "the vector itself");
    assert_eq!(Message::parse(&wire), Ok(expected.clone()));
    assert_eq!(expected.emit(), wire);
    no_problem(&view::clc(&wire));
}

fn uuid(text: &str) -> Gid {
    Gid(array(&text.replace('-', "")))
}

#[test]
fn proposal_of_both_version_2_types_with_one_emulated_device() {
    let gid = uuid("f6d0053b-4904-446f-934f-97c2936239e7");
    let entry = |half| GidChid { gid: half, chid: Chid::LOOPBACK };
    check(
        "e2d4c3d9 0100e02e | 00*8 | 00*16 | 00*6 | 0000
         00*8 | 0000 | 001c | 00*8 | 00*20
         01 02 00 10 0000 0040 | 00*10 ffff 0a090002 | ff 02 0001 | 00*12
         SMCPROBE-EID1@32 | 00*32 00*16
         f6d0053b4904446f ffff | 934f97c2936239e7 ffff | e2d4c3d9",
        Message::Proposal(Proposal {
            version: Version::V2,
            peer_id: PeerId::NONE,
            gid: Gid::NONE,
            mac: Mac::NONE,
            ism: AssociatedIsm::default(),
            v1: None,
            v2: Some(OfferV2 {
                types: SmcTypes::Both,
                release: Release::V2_1,
                eids: List::from_slice(&[eid()]).unwrap(),
                roce_gid: Gid::from_ipv4([10, 9, 0, 2]),
                limits: LinkLimits { max_conns: 255, max_links: 2 },
                features: Features::EMULATED_ISM,
                vendor: None,
                smcd: SmcdV2Offer {
                    seid: None,
                    entries: List::from_slice(&[entry(gid.part1()), entry(gid.part2())]).unwrap(),
                },
            }),
        }),
    );
}

#[test]
fn proposal_of_smc_r_version_1_and_smc_d_version_2() {
    let peer_id = PeerId(array("95ca525400000001"));
    let v1 =
        OfferV1 { types: SmcTypes::R, subnet: Subnet::V4 { network: [10, 9, 0, 0], bits: 24 } };
    let gid = uuid("f6d0053b-4904-446f-934f-97c2936239e7");
    let entry = |half| GidChid { gid: half, chid: Chid::LOOPBACK };
    check(
        "e2d4c3d9 0100c824 | 95ca525400000001 | 00*10 ffff 0a090001 | 525400000001 | 0028
         00*8 | 0000 | 0024 | 00*8 | 00*20
         0a090000 18 0000 00
         00 02 00 10 0000 0020 | 00*16 | 00 00 0001 | 00*12
         00*32 00*16 | f6d0053b4904446f ffff | 934f97c2936239e7 ffff | e2d4c3d9",
        Message::Proposal(Proposal {
            version: Version::V2,
            peer_id,
            gid: Gid::from_ipv4([10, 9, 0, 1]),
            mac: peer_id.mac(),
            ism: AssociatedIsm::default(),
            v1: Some(v1),
            v2: Some(OfferV2 {
                types: SmcTypes::D,
                release: Release::V2_1,
                eids: List::new(),
                roce_gid: Gid::NONE,
                limits: LinkLimits::NONE,
                features: Features::EMULATED_ISM,
                vendor: None,
                smcd: SmcdV2Offer {
                    seid: None,
                    entries: List::from_slice(&[entry(gid.part1()), entry(gid.part2())]).unwrap(),
                },
            }),
        }),
    );
}

fn smcr_link() -> SmcrLink {
    SmcrLink {
        peer_id: PeerId(array("95ca525400000001")),
        gid: Gid::from_ipv4([10, 9, 0, 1]),
        mac: Mac(array("525400000001")),
        qpn: Qpn::new(0x11),
        rkey: Rkey(0x3e0),
        index: 1,
        token: 1,
        size: SizeCode::at_least(65536).unwrap(),
        mtu: Mtu::B1024,
        address: 0xff11_0000_00d9_0000,
        psn: Psn::new(0x0087_e8ec),
    }
}

fn fce() -> Fce {
    Fce {
        os: OsType::LINUX,
        release: Release::V2_1,
        hostname: Hostname::from_wire(array("(none)@32")),
        features: Features::EMULATED_ISM,
        vendor: [0; 4],
    }
}

fn smcr_v2(first_contact: Option<SmcrFce>) -> SmcrV2 {
    SmcrV2 { reason_saved: false, link: smcr_link(), eid: eid(), first_contact }
}

fn smcr_fce(gids: Option<GidList>) -> SmcrFce {
    let limits = LinkLimits { max_conns: 255, max_links: 2 };
    SmcrFce { common: fce(), direct: true, limits, gids }
}

const SMCR_LINK: &str =
    "95ca525400000001 | 00*10 ffff 0a090001 | 525400000001 | 000011 | 000003e0 | 01
    00000001 | 23 00 | ff11000000d90000 | 00 87e8ec";
const SMCR_FCE: &str = "80 21 0000 (none)@32 ff 02 0001 00*4 00*8";

// Shows: CLCV2-67.
#[test]
fn accept_of_smc_r_version_2_first_contact() {
    check(
        &format!("e2d4c3d9 0200a028 | {SMCR_LINK} | {EID}@32 | 00*8 | {SMCR_FCE} | e2d4c3d9"),
        Message::AcceptR2(smcr_v2(Some(smcr_fce(None)))),
    );
}

// Shows: CLCV2-76.
#[test]
fn confirm_of_smc_r_version_2_first_contact_with_one_gid() {
    let gids = GidList { active: smcr_link().gid, alternates: List::new() };
    check(
        &format!(
            "e2d4c3d9 0300b428 | {SMCR_LINK} | {EID}@32 | 00*8 | {SMCR_FCE}
             01000000 | 00*10 ffff 0a090001 | e2d4c3d9"
        ),
        Message::ConfirmR2(smcr_v2(Some(smcr_fce(Some(gids))))),
    );
}

#[test]
fn accept_and_confirm_of_smc_r_version_2_subsequent_contact() {
    check(
        &format!("e2d4c3d9 02006c20 | {SMCR_LINK} | {EID}@32 | 00*8 | e2d4c3d9"),
        Message::AcceptR2(smcr_v2(None)),
    );
    check(
        &format!("e2d4c3d9 03006c20 | {SMCR_LINK} | {EID}@32 | 00*8 | e2d4c3d9"),
        Message::ConfirmR2(smcr_v2(None)),
    );
}

// Shows: CLC-24.
#[test]
fn accept_and_confirm_of_smc_r_version_1() {
    let v1 = |first_contact| SmcrV1 { first_contact, link: smcr_link() };
    let text = |head| format!("e2d4c3d9 {head} | {SMCR_LINK} | e2d4c3d9");
    check(&text("02004418"), Message::AcceptR1(v1(true)));
    check(&text("02004410"), Message::AcceptR1(v1(false)));
    check(&text("03004410"), Message::ConfirmR1(v1(false)));
    // Linux sets the flag in Confirm too, reserved there in RFC 7609.
    let odd = Message::parse(&bytes(&text("03004418")));
    assert_eq!(odd, Ok(Message::ConfirmR1(v1(false))));
}

fn smcd_v2(first_contact: Option<Fce>) -> SmcdV2 {
    SmcdV2 {
        gid: uuid("3f31e22c-f0fe-4ebf-8cb6-e7fb5fa4373b"),
        token: DmbToken(0x4a43_1356_208c_140a),
        index: 0,
        size: SizeCode::at_least(65536).unwrap(),
        link_id: LinkId([0, 1, 0, 0]),
        chid: Chid::LOOPBACK,
        eid: eid(),
        first_contact,
    }
}

const SMCD_V2: &str = "3f31e22cf0fe4ebf | 4a431356208c140a | 00 20 0000 | 00010000 | ffff
    SMCPROBE-EID1@32 | 8cb6e7fb5fa4373b";

#[test]
fn accept_of_smc_d_version_2_first_contact() {
    check(
        &format!(
            "e2d4c3c4 02008229 | {SMCD_V2} | 00 21 0000 (none)@32 0000 0001 00*4 00*8 | e2d4c3c4"
        ),
        Message::AcceptD2(smcd_v2(Some(fce()))),
    );
}

#[test]
fn accept_of_smc_d_version_2_release_0() {
    let fce = Fce { release: Release::V2_0, features: Features::empty(), ..fce() };
    check(
        &format!("e2d4c3c4 02007229 | {SMCD_V2} | 00 20 0000 (none)@32 | e2d4c3c4"),
        Message::AcceptD2(smcd_v2(Some(fce))),
    );
}

#[test]
fn accept_and_confirm_of_smc_d_version_2_subsequent_contact() {
    let text = |head| format!("e2d4c3c4 {head} | {SMCD_V2} | e2d4c3c4");
    check(&text("02004e21"), Message::AcceptD2(smcd_v2(None)));
    check(&text("03004e21"), Message::ConfirmD2(smcd_v2(None)));
}

#[test]
fn declines() {
    let decline = |version, out_of_sync, code, os| {
        Message::Decline(Decline {
            version,
            out_of_sync,
            peer_id: PeerId::NONE,
            diagnosis: Diagnosis(code),
            os,
            reasons: TypeReasons::default(),
        })
    };
    check(
        "e2d4c3d9 04002c20 | 00*8 | 03030008 | 20000000 | 00*16 | e2d4c3d9",
        decline(Version::V2, false, 0x0303_0008, OsType::LINUX),
    );
    check(
        "e2d4c3d9 04001c10 | 00*8 | 03030000 | 00000000 | e2d4c3d9",
        decline(Version::V1, false, 0x0303_0000, OsType::default()),
    );
    check(
        "e2d4c3d9 04002c28 | 00*8 | 04000000 | 20000000 | 00*16 | e2d4c3d9",
        decline(Version::V2, true, 0x0400_0000, OsType::LINUX),
    );
}
