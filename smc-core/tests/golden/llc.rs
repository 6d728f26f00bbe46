// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! LLC, version 2 with the byte order of a little-endian Linux, and version 1.

use smc_core::wire::clc::Version;
use smc_core::wire::ids::*;
use smc_core::wire::llc::*;
use smc_core::wire::view;

use super::{array, bytes, no_problem};

fn check(version: Version, text: &str, message: Message) {
    let wire = bytes(text);
    let expected = Llc { version, message };
    assert_eq!(Llc::parse(&wire, &Dialect::LINUX), Ok(expected.clone()));
    assert_eq!(expected.emit(&Dialect::LINUX), wire);
    no_problem(&view::llc(&wire, &Dialect::LINUX));
}

fn v1(text: &str, message: Message) {
    check(Version::V1, text, message);
}

fn v2(text: &str, message: Message) {
    check(Version::V2, text, message);
}

fn confirm_link(reply: bool) -> ConfirmLink {
    ConfirmLink {
        reply,
        low_flags: ConfirmLink::NO_EYE_CATCHER,
        mac: Mac(array("525400000001")),
        gid: Gid::from_ipv4([10, 9, 0, 1]),
        qpn: Qpn::new(0x11),
        link_number: 1,
        link_user_id: 0x101,
        max_links: 2,
        max_conns: 255,
    }
}

const LINK: &str = "525400000001 | 00*10 ffff 0a090001 | 000011 | 01 | 00000101";

// Shows: CLCV2-84, LLC-12, LLC-16, LLCV2-10, LLCV2-11, LLCV2-13.
#[test]
fn confirm_link_in_both_versions() {
    v2(&format!("212c0003 {LINK} 02 ff 00*8"), Message::ConfirmLink(confirm_link(false)));
    v2(&format!("212c0083 {LINK} 02 ff 00*8"), Message::ConfirmLink(confirm_link(true)));
    v1(
        &format!("012c0003 {LINK} 02 00 00*8"),
        Message::ConfirmLink(ConfirmLink { max_conns: 0, ..confirm_link(false) }),
    );
}

fn add_link(v2: Option<AddLinkV2>) -> AddLink {
    AddLink {
        reply: false,
        rejected: None,
        mac: Mac(array("525400000001")),
        gid: Gid::from_ipv4([10, 9, 0, 1]),
        qpn: Qpn::new(0x12),
        link_number: 2,
        mtu: Mtu::B1024,
        psn: Psn::new(0x55_c6cb),
        v2,
    }
}

const NEW_LINK: &str = "525400000001 0000 | 00*10 ffff 0a090001 | 000012 02 03 55c6cb 00*8";

// Shows: LLC-19.
#[test]
fn add_link_request_and_refusal_of_version_2() {
    let pair =
        RkeyPair { reference: Rkey(0x3e0), new: Rkey(0x570), address: 0xff11_0000_00d9_0000 };
    let target = Gid::from_ipv4([10, 9, 0, 1]);
    let part = AddLinkV2 { direct: true, target, rkeys: vec![pair] };
    v2(
        &format!(
            "22580000 {NEW_LINK} | 80 00 00*10 ffff 0a090001 00*8 0100
             000003e0 00000570 ff11000000d90000"
        ),
        Message::AddLink(add_link(Some(part))),
    );
    let refused = AddLink { reply: true, rejected: Some(RejectReason(0)), ..add_link(None) };
    v2(&format!("222c00c0 {NEW_LINK}"), Message::AddLink(refused));
}

// Shows: LLC-19.
#[test]
fn add_link_request_and_refusal_of_version_1() {
    v1(&format!("022c0000 {NEW_LINK}"), Message::AddLink(add_link(None)));
    let refused = AddLink { reply: true, rejected: Some(RejectReason::NO_PATH), ..add_link(None) };
    v1(&format!("022c01c0 {NEW_LINK}"), Message::AddLink(refused));
}

#[test]
fn count_for_linux_reads_right_from_either_end() {
    let part = AddLinkV2 { rkeys: vec![RkeyPair::default(); 3], ..AddLinkV2::default() };
    let message = Message::AddLink(add_link(Some(part)));
    let wire = Llc { version: Version::V2, message }.emit(&Dialect::TO_LINUX);
    assert_eq!(wire[70..72], [3, 3]);
}

// Shows: LLC-4, LLC-49.
#[test]
fn confirm_rkey_is_echoed() {
    for (reply, flags) in [(false, "00"), (true, "80")] {
        let message = ConfirmRkey {
            reply,
            rkey: Rkey(0x3e0),
            address: 0xff11_0000_00d9_0000,
            ..ConfirmRkey::default()
        };
        let body = "00 000003e0 ff11000000d90000 00*27";
        v2(&format!("262c00{flags} {body}"), Message::ConfirmRkey(message));
        v1(&format!("062c00{flags} {body}"), Message::ConfirmRkey(message));
    }
}

// Shows: LLC-54.
#[test]
fn delete_rkey_in_both_versions() {
    let request = DeleteRkey { rkeys: vec![Rkey(0x3e0)], ..DeleteRkey::default() };
    v2("292c0000 01000000 000003e0 00*32", Message::DeleteRkey(request.clone()));
    let reply = DeleteRkeyReply { count: 1, ..DeleteRkeyReply::default() };
    v2("292c0080 01000000 00*36", Message::DeleteRkeyReply(reply));
    v1("092c0000 01000000 000003e0 00*32", Message::DeleteRkey(request.clone()));
    // Version 1 replies with the keys.
    let echoed = DeleteRkey { reply: true, ..request };
    v1("092c0080 01000000 000003e0 00*32", Message::DeleteRkey(echoed));
}

// Shows: LLC-3, LLCV2-38.
#[test]
fn test_link_and_its_reply() {
    let test = |reply| Message::TestLink(TestLink { reply, data: [0; 16] });
    v2("272c0000 00*40", test(false));
    v2("272c0080 00*40", test(true));
}

// Shows: LLC-34, LLCV2-31.
#[test]
fn delete_link_of_a_whole_group() {
    let delete = |orderly| {
        Message::DeleteLink(DeleteLink {
            reply: false,
            all: true,
            orderly,
            link_number: 0,
            reason: DeleteReason::OPERATOR,
        })
    };
    v2("242c0040 00 00020000 00*35", delete(false));
    v2("242c0060 00 00020000 00*35", delete(true));
    v1("042c0040 00 00020000 00*35", delete(false));
    v1("042c0060 00 00020000 00*35", delete(true));
}
