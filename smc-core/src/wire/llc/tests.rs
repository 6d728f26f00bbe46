// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Malformed LLC messages, and the lengths of well-formed ones.

use super::*;
use crate::wire::List;
use crate::wire::clc::GidList;
use crate::wire::ids::{Gid, Mac, Mtu, Psn, Qpn, Rkey};

const SPEC: Dialect = Dialect::SPEC;

fn v1(message: Message) -> Llc {
    Llc { version: Version::V1, message }
}

fn v2(message: Message) -> Llc {
    Llc { version: Version::V2, message }
}

fn add_link(rkeys: usize) -> AddLink {
    let pair = RkeyPair { reference: Rkey(1), new: Rkey(2), address: 3 };
    AddLink {
        reply: false,
        rejected: None,
        mac: Mac([2; 6]),
        gid: Gid([7; 16]),
        qpn: Qpn::new(0x12),
        link_number: 2,
        mtu: Mtu::B1024,
        psn: Psn::new(0x55_c6cb),
        v2: Some(AddLinkV2 { direct: true, target: Gid([8; 16]), rkeys: vec![pair; rkeys] }),
    }
}

fn gid_list(n: usize) -> GidList {
    let alternates = List::from_slice(&[Gid([6; 16]); 7][..n - 1]).unwrap();
    GidList { active: Gid([5; 16]), alternates }
}

fn delete_rkey(n: usize) -> DeleteRkey {
    DeleteRkey { rkeys: vec![Rkey(0x3e0); n], ..DeleteRkey::default() }
}

fn refusal(bytes: &[u8]) -> WireError {
    Llc::parse(bytes, &SPEC).unwrap_err()
}

// Shows: LLCV2-4, LLCV2-18, LLCV2-25, LLCV2-26, LLCV2-34.
#[test]
fn version_2_lengths_follow_the_table() {
    let request = |n| Message::RequestAddLink(RequestAddLink::Request(gid_list(n)));
    for (message, length) in [
        (Message::AddLink(add_link(0)), 72),
        (Message::AddLink(add_link(255)), 4152),
        (request(1), 44),
        (request(2), 60),
        (request(8), 156),
        (Message::RequestAddLink(RequestAddLink::Reply(None)), 44),
        (Message::DeleteRkey(delete_rkey(1)), 44),
        (Message::DeleteRkey(delete_rkey(9)), 44),
        (Message::DeleteRkey(delete_rkey(10)), 48),
        (Message::DeleteRkey(delete_rkey(255)), 1028),
        (Message::ConfirmLink(ConfirmLink::default()), 44),
        (Message::TestLink(TestLink::default()), 44),
    ] {
        let sent = v2(message);
        for dialect in [Dialect::SPEC, Dialect::LINUX, Dialect::TO_LINUX] {
            let bytes = sent.emit(&dialect);
            assert_eq!(bytes.len(), length);
            assert_eq!(Llc::parse(&bytes, &dialect), Ok(sent.clone()));
        }
    }
}

// Shows: LLC-1.
#[test]
fn version_1_is_always_44_bytes() {
    let pair = RkeyPair { reference: Rkey(1), new: Rkey(2), address: 3 };
    let entry = LinkRkey { link_number: 2, rkey: Rkey(1), address: 2 };
    let add_link = AddLink { v2: None, ..add_link(0) };
    for message in [
        Message::ConfirmLink(ConfirmLink { reply: true, low_flags: 3, ..ConfirmLink::default() }),
        Message::AddLink(add_link.clone()),
        Message::AddLink(AddLink { rejected: Some(RejectReason::NO_PATH), ..add_link }),
        Message::AddLinkCont(AddLinkCont {
            left: 5,
            rkeys: List::from_slice(&[pair; 2]).unwrap(),
            ..AddLinkCont::default()
        }),
        Message::DeleteLink(DeleteLink { all: true, orderly: true, ..DeleteLink::default() }),
        Message::ConfirmRkey(ConfirmRkey {
            negative: true,
            retry: true,
            other_links: 8,
            others: List::from_slice(&[entry; 2]).unwrap(),
            ..ConfirmRkey::default()
        }),
        Message::ConfirmRkeyCont(ConfirmRkeyCont {
            left: 6,
            entries: List::from_slice(&[entry; 3]).unwrap(),
            ..ConfirmRkeyCont::default()
        }),
        Message::DeleteRkey(DeleteRkey { error_mask: 0x50, reply: true, ..delete_rkey(8) }),
        Message::TestLink(TestLink { reply: true, data: [9; 16] }),
    ] {
        let sent = v1(message);
        let bytes = sent.emit(&SPEC);
        assert_eq!(bytes.len(), LLC_LEN);
        assert_eq!(Llc::parse(&bytes, &SPEC), Ok(sent));
    }
}

// Shows: LLC-7, LLC-8, LLC-9, LLC-76, LLCV2-1, LLCV2-42.
#[test]
fn type_bytes_say_what_to_do_with_them() {
    let first = |byte| Kind::from_type_byte(byte).unwrap_err();
    for byte in [0x00, 0x05, 0x0a, 0x3f, 0x41, 0x23, 0x28, 0x2f, 0x20, 0x11] {
        assert_eq!(first(byte), WireError::UnknownLlcType(byte));
    }
    for byte in [0x81, 0xaf, 0xa1, 0x80] {
        assert_eq!(first(byte), WireError::IgnorableLlcType(byte));
    }
    for byte in [0xfe, 0xc1, 0xff] {
        assert_eq!(first(byte), WireError::CdcNotLlc(byte));
    }
}

#[test]
fn figure_32_layout_is_an_option() {
    let dialect = Dialect { add_link: AddLinkLayout::Figure32, ..SPEC };
    let sent = v1(Message::AddLink(AddLink { v2: None, ..add_link(0) }));
    let bytes = sent.emit(&dialect);
    assert_eq!(bytes[10..26], [7; 16]);
    assert_eq!(bytes[29], 2);
    assert_eq!(Llc::parse(&bytes, &dialect), Ok(sent.clone()));
    assert_eq!(sent.emit(&SPEC)[12..28], [7; 16]);
}

// Shows: LLC-1.
#[test]
fn version_1_length_byte_must_be_44() {
    let mut bytes = v1(Message::TestLink(TestLink::default())).emit(&SPEC);
    bytes[1] = 43;
    let message = "Test Link";
    assert_eq!(refusal(&bytes), WireError::LengthMismatch { message, got: 43, expected: 44 });
}

// Shows: LLCV2-3, LLCV2-4.
#[test]
fn version_2_length_must_be_what_was_received() {
    let bytes = v2(Message::AddLink(add_link(2))).emit(&SPEC);
    let with = |length: u16| {
        let mut bytes = bytes.clone();
        bytes[1..3].copy_from_slice(&length.to_be_bytes());
        refusal(&bytes)
    };
    let message = "Add Link";
    let range = |got| WireError::LengthOutOfRange { message, got, min: 44, max: 8192 };
    assert_eq!(with(43), range(43));
    assert_eq!(with(8193), range(8193));
    assert_eq!(with(103), WireError::TrailingBytes { length: 103, extra: 1 });
    let truncated = WireError::Truncated { field: message, at: 0, need: 105, have: 104 };
    assert_eq!(with(105), truncated);
}

// Shows: LLCV2-3.
#[test]
fn swapped_length_is_taken_from_linux_only() {
    let bytes = v2(Message::TestLink(TestLink::default())).emit(&Dialect::LINUX);
    assert_eq!(bytes[1..3], [0x2c, 0]);
    let message = "Test Link";
    let error = WireError::LengthOutOfRange { message, got: 0x2c00, min: 44, max: 8192 };
    assert_eq!(refusal(&bytes), error);
    assert!(Llc::parse(&bytes, &Dialect::LINUX).is_ok());
    let straight = v2(Message::TestLink(TestLink::default())).emit(&SPEC);
    assert!(Llc::parse(&straight, &Dialect::LINUX).is_ok());
}

// Shows: LLCV2-5.
#[test]
fn long_form_is_for_three_types() {
    let mut bytes = v2(Message::TestLink(TestLink::default())).emit(&SPEC);
    bytes.push(0);
    bytes[2] = 45;
    let message = "Test Link";
    assert_eq!(refusal(&bytes), WireError::LengthMismatch { message, got: 45, expected: 44 });
}

// Shows: LLCV2-18.
#[test]
fn rkey_count_must_match_the_length_except_from_linux() {
    let mut bytes = v2(Message::AddLink(add_link(2))).emit(&SPEC);
    bytes[71] = 1;
    let message = "Add Link";
    assert_eq!(refusal(&bytes), WireError::LengthMismatch { message, got: 104, expected: 88 });
    let received = Llc::parse(&bytes, &Dialect::LINUX);
    assert_eq!(received, Ok(v2(Message::AddLink(add_link(2)))));
    bytes[70] = 1;
    let field = "RKey count";
    assert_eq!(refusal(&bytes), WireError::CountOutOfRange { field, got: 257, min: 0, max: 255 });
}

#[test]
fn half_an_rkey_entry_is_refused() {
    let mut bytes = v2(Message::AddLink(add_link(2))).emit(&SPEC);
    bytes.truncate(96);
    bytes[2] = 96;
    let message = "Add Link";
    assert_eq!(refusal(&bytes), WireError::LengthMismatch { message, got: 96, expected: 104 });
    let error = Llc::parse(&bytes, &Dialect::LINUX).unwrap_err();
    assert_eq!(error, WireError::LengthMismatch { message, got: 96, expected: 88 });
}

// Shows: LLCV2-41.
#[test]
fn add_link_needs_its_version_2_part_unless_it_refuses() {
    let refused = AddLink { reply: true, rejected: Some(RejectReason(0)), v2: None, ..add_link(0) };
    let bytes = v2(Message::AddLink(refused.clone())).emit(&SPEC);
    assert_eq!((bytes.len(), bytes[3]), (44, 0xc0));
    assert_eq!(Llc::parse(&bytes, &SPEC), Ok(v2(Message::AddLink(refused))));
    let mut short = bytes;
    short[3] = 0;
    let message = "Add Link";
    assert_eq!(refusal(&short), WireError::LengthMismatch { message, got: 44, expected: 72 });
}

// Shows: LLCV2-22.
#[test]
fn reject_reason_stands_where_its_version_has_it() {
    let refused = |v2| AddLink { rejected: Some(RejectReason::BAD_MTU), v2, ..add_link(0) };
    let bytes = v1(Message::AddLink(refused(None))).emit(&SPEC);
    assert_eq!(bytes[2..4], [2, 0x40]);
    let bytes = v2(Message::AddLink(refused(None))).emit(&SPEC);
    assert_eq!(bytes[1..4], [0, 44, 0x42]);
}

// Shows: LLCV2-25, ERR-45.
#[test]
fn gid_list_of_a_request_is_checked() {
    let bytes = v2(Message::RequestAddLink(RequestAddLink::Request(gid_list(2)))).emit(&SPEC);
    for count in [0, 9] {
        let mut odd = bytes.clone();
        odd[24] = count;
        assert_eq!(refusal(&odd), WireError::GidListCount(count));
    }
    let mut odd = bytes;
    odd[24] = 1;
    let message = "Request Add Link";
    assert_eq!(refusal(&odd), WireError::LengthMismatch { message, got: 60, expected: 44 });
}

// Shows: LLC-30, LLCV2-17.
#[test]
fn rkey_counts_have_limits() {
    let field = "RKey count";
    for (llc, max) in [
        (v1(Message::DeleteRkey(delete_rkey(8))), 8),
        (v2(Message::DeleteRkey(delete_rkey(9))), 255),
    ] {
        let mut bytes = llc.emit(&SPEC);
        bytes[4] = 0;
        assert_eq!(refusal(&bytes), WireError::CountOutOfRange { field, got: 0, min: 1, max });
    }
    let mut bytes = v1(Message::DeleteRkey(delete_rkey(8))).emit(&SPEC);
    bytes[4] = 9;
    assert_eq!(refusal(&bytes), WireError::CountOutOfRange { field, got: 9, min: 1, max: 8 });
    let field = "other links";
    let mut bytes = v2(Message::ConfirmRkey(ConfirmRkey::default())).emit(&SPEC);
    bytes[4] = 3;
    assert_eq!(refusal(&bytes), WireError::CountOutOfRange { field, got: 3, min: 0, max: 2 });
}

// Shows: LLCV2-35, LLCV2-37.
#[test]
fn a_reply_may_list_fewer_rkeys_than_were_left() {
    let rkeys = List::from_slice(&[Rkey(5); 8]).unwrap();
    let reply = DeleteRkeyReply { negative: true, count: 30, not_deleted: 20, rkeys };
    let bytes = v2(Message::DeleteRkeyReply(reply)).emit(&SPEC);
    assert_eq!(bytes.len(), 44);
    assert_eq!(Llc::parse(&bytes, &SPEC), Ok(v2(Message::DeleteRkeyReply(reply))));
}

#[test]
fn every_truncation_is_refused() {
    for llc in [v1(Message::TestLink(TestLink::default())), v2(Message::AddLink(add_link(3)))] {
        let bytes = llc.emit(&SPEC);
        for n in 0..bytes.len() {
            assert!(matches!(refusal(&bytes[..n]), WireError::Truncated { .. }), "{n} bytes");
        }
        let mut longer = bytes.clone();
        longer.push(0);
        let length = bytes.len();
        assert_eq!(refusal(&longer), WireError::TrailingBytes { length, extra: 1 });
    }
}
