// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Views of well-formed messages, and of messages cut or damaged in every way.

use super::*;
use crate::wire::List;
use crate::wire::WireError;
use crate::wire::cdc::Cdc;
use crate::wire::clc::*;
use crate::wire::ids::*;

fn proposal() -> Vec<u8> {
    let entry = |half| GidChid { gid: GidV1([half; 8]), chid: Chid(0xff01) };
    let offer = OfferV2 {
        types: SmcTypes::D,
        release: Release::V2_1,
        eids: List::from_slice(&[Eid::new("LAB").unwrap()]).unwrap(),
        roce_gid: Gid::NONE,
        limits: LinkLimits::NONE,
        features: Features::EMULATED_ISM,
        vendor: None,
        smcd: SmcdV2Offer { seid: None, entries: List::from_slice(&[entry(1), entry(2)]).unwrap() },
    };
    let proposal = Proposal {
        version: Version::V2,
        peer_id: PeerId::NONE,
        gid: Gid::NONE,
        mac: Mac::NONE,
        ism: AssociatedIsm::default(),
        v1: None,
        v2: Some(offer),
    };
    proposal.emit()
}

/// The fields cover the input in order and without overlap; each area has exactly the extent of its
/// fields.
fn check_cover(view: &View, len: usize) {
    let mut at = 0;
    for field in &view.fields {
        assert_eq!(field.offset, at, "{view}");
        if !field.is_area {
            at += field.len;
        }
    }
    assert_eq!(at, len, "{view}");
    for (i, area) in view.fields.iter().enumerate().filter(|(_, field)| field.is_area) {
        let inside = view.fields[i + 1..].iter().take_while(|field| field.depth > area.depth);
        let len: usize = inside.filter(|field| !field.is_area).map(|field| field.len).sum();
        assert_eq!(area.len, len, "{view}");
    }
}

fn problems(view: &View) -> Vec<(usize, &str)> {
    view.fields.iter().filter_map(|field| Some((field.offset, field.problem.as_deref()?))).collect()
}

fn value<'a>(view: &'a View, name: &str) -> &'a str {
    let field = view.fields.iter().find(|field| field.name == name).unwrap();
    &field.value
}

#[test]
fn a_good_message_has_names_and_no_problems() {
    let bytes = proposal();
    let view = any(&bytes);
    check_cover(&view, bytes.len());
    assert_eq!(view.title, "CLC Proposal, version 2");
    assert_eq!(problems(&view), []);
    assert_eq!(view.error, None);
    assert_eq!(value(&view, "version and flags"), "version 2, offers v1: none, v2: SMC-D");
    assert_eq!(value(&view, "offset of V2 extension"), "28: at 80");
    assert_eq!(value(&view, "EID"), "\"LAB\"");
    assert_eq!(value(&view, "CHID"), "ff01 (emulated ISM)");
    assert_eq!(value(&view, "features"), "0001 (emulated ISM)");
    let text = view.to_string();
    assert!(
        text.contains("  218    2    CHID                         ff01 (emulated ISM)\n"),
        "{text}"
    );
}

#[test]
fn cut_messages_are_covered_and_say_where_they_end() {
    let bytes = proposal();
    for n in 0..bytes.len() {
        let view = clc(&bytes[..n]);
        check_cover(&view, n);
        assert!(!problems(&view).is_empty(), "{n} bytes:\n{view}");
        assert!(view.error.is_some());
    }
}

#[test]
fn every_bent_byte_is_covered() {
    let bytes = proposal();
    for at in 0..bytes.len() {
        for bend in [0x01, 0x80, 0xff] {
            let mut bent = bytes.clone();
            bent[at] ^= bend;
            check_cover(&any(&bent), bytes.len());
        }
    }
}

#[test]
fn an_offset_that_leads_back_or_out_is_noted_and_not_followed() {
    let mut bytes = proposal();
    bytes[51] = 20;
    let view = clc(&bytes);
    assert_eq!(problems(&view)[0], (50, "leads to 72, into what ends at 80"));
    assert_eq!(problems(&view)[1], (80, "no field is here"));
    bytes[51] = 255;
    let view = clc(&bytes);
    assert_eq!(problems(&view)[0], (50, "leads to 307, beyond the last field at 220"));
}

#[test]
fn an_unpaired_emulated_chid_is_noted() {
    let mut bytes = proposal();
    bytes[219] = 2;
    let view = clc(&bytes);
    let text = "emulated, and the next entry does not repeat it";
    assert_eq!(problems(&view), [(208, text), (218, text)]);
}

#[test]
fn bytes_that_are_no_smc_are_shown_as_such() {
    let bytes = b"GET / HTTP/1.1\r\n\r\n";
    let view = any(bytes);
    check_cover(&view, bytes.len());
    assert_eq!(problems(&view)[0], (0, "neither SMCR nor SMCD: not CLC"));
    check_cover(&any(&[]), 0);
}

#[test]
fn what_follows_a_message_is_told_apart() {
    let mut bytes = proposal();
    bytes.extend(b"data");
    let view = clc(&bytes);
    check_cover(&view, bytes.len());
    assert!(problems(&view).contains(&(224, "the message has ended before")), "{view}");
}

#[test]
fn first_contact_without_extension_is_noted_at_the_flag() {
    let accept = SmcdV2 {
        gid: Gid([1; 16]),
        token: DmbToken(5),
        index: 0,
        size: SizeCode::MIN,
        link_id: LinkId([0; 4]),
        chid: Chid(0xff01),
        eid: Eid::new("LAB").unwrap(),
        first_contact: None,
    };
    let mut bytes = Message::AcceptD2(accept).emit();
    assert_eq!(problems(&clc(&bytes)), []);
    bytes[7] |= 0x08;
    assert_eq!(problems(&clc(&bytes)), [(7, "first contact without its extension")]);
}

#[test]
fn llc_lengths_of_linux_are_recognised() {
    let mut bytes = [0; 44];
    bytes[0] = 0x27;
    bytes[1] = 44;
    let view = any(&bytes);
    check_cover(&view, 44);
    assert_eq!(view.title, "LLC Test Link, version 2");
    assert_eq!(value(&view, "length"), "44 (little-endian, as from Linux)");
    assert_eq!(problems(&view), []);
}

#[test]
fn llc_of_every_type_and_length_is_covered() {
    for first in 0..=255 {
        for fill in [0, 1, 0x2c, 0xff] {
            for n in [0, 1, 2, 3, 4, 5, 9, 43, 44, 45, 60, 71, 72, 73, 88, 119] {
                let mut bytes = vec![fill; n];
                if let Some(byte) = bytes.first_mut() {
                    *byte = first;
                }
                check_cover(&llc(&bytes, &Dialect::SPEC), n);
                check_cover(&any(&bytes), n);
            }
        }
    }
}

#[test]
fn cdc_flags_are_named() {
    let mut bytes = Cdc::default().emit();
    bytes[24] = 0x90;
    bytes[25] = 0xc0;
    let view = any(&bytes);
    check_cover(&view, 44);
    assert_eq!(value(&view, "producer flags"), "90, writer blocked, cursor update requested");
    assert_eq!(value(&view, "state flags"), "c0, sending done, connection closed");
    for n in 0..60 {
        check_cover(&cdc(&vec![0xfe; n]), n);
        check_cover(&control_block(&vec![0xfe; n]), n);
    }
}

#[test]
fn records_are_explained() {
    use crate::wire::record::{Reason, Record, RecordError};
    let leave = Record::Leave { at: 4711, reason: Reason::DeviceLeaves, more: true };
    let view = any(&leave.header());
    assert_eq!((view.title.as_str(), view.error), ("Record LEAVE", None));
    let text = view.to_string();
    assert!(text.contains("81, more bytes are held, the device is about to go"), "{text}");
    assert!(text.contains("4711"), "{text}");
    let mut data = Record::Data { at: 1, len: 2, more: false }.header().to_vec();
    let error = Some(WireError::Truncated { field: "body", at: 16, need: 2, have: 0 });
    assert_eq!(any(&data).error, error);
    data.extend(b"ab");
    assert_eq!(any(&data).error, None);
    data[3] = 9;
    let kind = crate::wire::record::Kind::Data;
    let error = RecordError::Reserved { kind, got: [0, 9] };
    assert_eq!(any(&data).error, Some(WireError::Record(error)));
}

// Shows: CLCV2-13, CLCV2-16.
#[test]
fn options_for_records_are_explained() {
    use crate::wire::clc::{CarrierFeatures, CarrierOptions};
    let options = CarrierOptions::new(CarrierFeatures::RETURN);
    let oui = Some(CarrierOptions::OUI);
    let claim = std::num::NonZeroU16::new(9);
    let offered = super::words::vendor_options(oui, options.offer(claim).options());
    assert_eq!(offered, "02000100 09 (version 2, comes back, claim 9)");
    let broken = super::words::vendor_options(oui, [0, 0, 0, 0, 1]);
    assert!(broken.contains("ignored: version 0"), "{broken}");
    assert_eq!(super::words::vendor_options(Some([1, 2, 3]), [1; 5]), "01010101 01");
    let answer = super::words::vendor_answer(options.answer());
    assert!(answer.contains("version 2, comes back"), "{answer}");
    assert_eq!(super::words::vendor_answer([0; 4]), "00000000");
}
