// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Valid Proposals, and each way of damaging one.

use super::*;
use crate::wire::Reaction;
use crate::wire::clc::{EyeCatcher, Kind, Message, Peek, peek_header};

const TYPES: [Option<SmcTypes>; 4] =
    [Some(SmcTypes::R), Some(SmcTypes::D), None, Some(SmcTypes::Both)];

fn ipv4() -> Subnet {
    Subnet::V4 { network: [10, 9, 0, 0], bits: 24 }
}

fn ipv6(n: usize) -> Subnet {
    let prefix = IpPrefix { address: [0xfd; 16], bits: 64 };
    Subnet::V6(List::from_slice(&[prefix; 8][..n]).unwrap())
}

fn eids(n: usize) -> List<Eid, 8> {
    List::from_slice(&[Eid::new("LAB-1").unwrap(); 8][..n]).unwrap()
}

fn entries(n: usize) -> List<GidChid, 8> {
    let entry = GidChid { gid: GidV1([0x5a; 8]), chid: Chid(0xff01) };
    List::from_slice(&[entry; 8][..n]).unwrap()
}

fn offer_v2(types: SmcTypes, eid_count: usize, entry_count: usize) -> OfferV2 {
    let (r, d) = (types.has_r(), types.has_d());
    OfferV2 {
        types,
        release: Release::V2_1,
        eids: eids(eid_count),
        roce_gid: if r { Gid::from_ipv4([10, 9, 0, 2]) } else { Gid::NONE },
        limits: if r { LinkLimits { max_conns: 255, max_links: 2 } } else { LinkLimits::NONE },
        features: Features::EMULATED_ISM,
        vendor: Some(VendorOffer::new([1, 2, 3], [4, 5, 6, 7, 8]).unwrap()),
        smcd: SmcdV2Offer { seid: None, entries: entries(if d { entry_count } else { 0 }) },
    }
}

fn proposal(version: Version, v1: Option<OfferV1>, v2: Option<OfferV2>) -> Proposal {
    let r = v1.is_some_and(|offer| offer.types.has_r());
    let v2_d = v2.is_some_and(|offer| offer.types.has_d());
    let d = v2_d || v1.is_some_and(|offer| offer.types.has_d());
    Proposal {
        version,
        peer_id: PeerId([9; 8]),
        gid: if r { Gid([8; 16]) } else { Gid::NONE },
        mac: Mac([7; 6]),
        ism: AssociatedIsm {
            gid: if d { GidV1([1, 1, 1, 1, 1, 1, 1, 1]) } else { GidV1::NONE },
            chid: if v2_d { Chid(7) } else { Chid::NONE },
        },
        v1,
        v2,
    }
}

fn v1_only(types: SmcTypes, subnet: Subnet) -> Proposal {
    proposal(Version::V1, Some(OfferV1 { types, subnet }), None)
}

fn v2_only(offer: OfferV2) -> Proposal {
    proposal(Version::V2, None, Some(offer))
}

fn everything() -> Proposal {
    let v1 = OfferV1 { types: SmcTypes::Both, subnet: ipv4() };
    proposal(Version::V2, Some(v1), Some(offer_v2(SmcTypes::Both, 2, 2)))
}

fn parse(bytes: &[u8]) -> Result<Proposal, WireError> {
    match Message::parse(bytes)? {
        Message::Proposal(proposal) => Ok(proposal),
        other => panic!("not a Proposal: {other:?}"),
    }
}

fn refusal(bytes: &[u8]) -> WireError {
    parse(bytes).unwrap_err()
}

fn with_length(mut bytes: Vec<u8>) -> Vec<u8> {
    let length = u16::try_from(bytes.len()).unwrap();
    bytes[5..7].copy_from_slice(&length.to_be_bytes());
    bytes
}

// Shows: CLC-12, CLC-13, CLC-15, CLCV2-6, CLCV2-31.
#[test]
fn lengths_follow_the_table() {
    let v1_ipv4 = Some(OfferV1 { types: SmcTypes::R, subnet: ipv4() });
    let all = |subnet| {
        let v1 = OfferV1 { types: SmcTypes::Both, subnet };
        proposal(Version::V2, Some(v1), Some(offer_v2(SmcTypes::Both, 8, 8)))
    };
    let seid_only = || {
        let smcd = SmcdV2Offer { seid: Some(Eid::new("SYS").unwrap()), entries: List::new() };
        v2_only(OfferV2 { smcd, ..offer_v2(SmcTypes::D, 0, 0) })
    };
    let mut table = vec![
        (v1_only(SmcTypes::R, ipv4()), 52),
        (v1_only(SmcTypes::D, ipv4()), 92),
        (proposal(Version::V2, v1_ipv4, None), 92),
        (v2_only(offer_v2(SmcTypes::R, 1, 0)), 156),
        (seid_only(), 172),
        (v2_only(offer_v2(SmcTypes::D, 1, 2)), 224),
        (all(ipv4()), 516),
        (all(ipv6(8)), 652),
        (proposal(Version::V2, None, None), 84),
    ];
    table.extend((1..=8).map(|n| (v1_only(SmcTypes::R, ipv6(n)), 52 + 17 * n)));
    for (sent, length) in table {
        let bytes = sent.emit();
        assert_eq!(bytes.len(), length);
        assert_eq!(peek_header(&bytes), Peek::Message { kind: Kind::Proposal, length });
        assert_eq!(parse(&bytes), Ok(sent));
    }
}

// Shows: CLC-59, CLCV2-2.
#[test]
fn all_sixteen_combinations_of_types_come_back() {
    for v1 in TYPES {
        for v2 in TYPES {
            let sent = proposal(
                Version::V2,
                v1.map(|types| OfferV1 { types, subnet: ipv6(2) }),
                v2.map(|types| offer_v2(types, 1, 2)),
            );
            let bytes = sent.emit();
            let bits = SmcTypes::to_bits(v2) << 2 | SmcTypes::to_bits(v1);
            assert_eq!(bytes[7], 0x20 | bits);
            assert_eq!(parse(&bytes), Ok(sent));
        }
    }
}

// Shows: CLCV2-3, CLCV2-7.
#[test]
fn offsets_are_the_ones_of_the_specification() {
    let bytes = everything().emit();
    assert_eq!(bytes[38..40], [0, 40]);
    assert_eq!(bytes[50..52], [0, 36]);
    assert_eq!(bytes[94..96], [0, 96]);
    let bytes = v2_only(offer_v2(SmcTypes::R, 1, 0)).emit();
    assert_eq!(
        (&bytes[38..40], &bytes[50..52], &bytes[86..88]),
        (&[0, 0][..], &[0, 28][..], &[0, 0][..])
    );
}

#[test]
fn gaps_between_areas_are_skipped() {
    let bytes = everything().emit();
    // Behind the base, behind the subnet extension, behind the V2 extension.
    for (at, moved) in [(80, &[39, 51][..]), (88, &[51]), (192, &[95])] {
        let mut gap = bytes.clone();
        gap.splice(at..at, [0xaa; 5]);
        for low_byte in moved {
            let low_byte = if *low_byte > at { low_byte + 5 } else { *low_byte };
            gap[low_byte] += 5;
        }
        assert_eq!(parse(&with_length(gap)), Ok(everything()), "gap at {at}");
    }
}

// Shows: CLC-14, CLCV2-8.
#[test]
fn version_1_reads_its_subnet_behind_any_area() {
    let sent = v1_only(SmcTypes::R, ipv4());
    let mut bytes = sent.emit();
    bytes.splice(40..40, [0xaa; 40]);
    bytes[39] = 40;
    assert_eq!(parse(&with_length(bytes)), Ok(sent));
}

#[test]
fn offsets_into_what_was_read_overlap() {
    let overlap = |area, at, free_from| WireError::Overlap { area, at, free_from };
    let mut subnet = everything().emit();
    subnet[39] = 39;
    assert_eq!(refusal(&subnet), overlap("IP subnet extension", 79, 80));
    subnet[39] = 0;
    assert_eq!(refusal(&subnet), overlap("IP subnet extension", 40, 80));
    let mut v2 = everything().emit();
    v2[51] = 35;
    assert_eq!(refusal(&v2), overlap("V2 extension", 87, 88));
    let mut smcd = everything().emit();
    smcd[95] -= 1;
    assert_eq!(refusal(&smcd), overlap("SMC-Dv2 extension", 191, 192));
    assert_eq!(refusal(&smcd).reaction(), Reaction::Break);
}

#[test]
fn offsets_beyond_the_end_are_out_of_range() {
    let bytes = everything().emit();
    let end = bytes.len() - 4;
    for (at, area, from, need) in [
        (38, "IP subnet extension", 40, 8),
        (50, "V2 extension", 52, 40),
        (94, "SMC-Dv2 extension", 96, 48),
    ] {
        for offset in [u16::try_from(end).unwrap(), 0xffff] {
            let mut far = bytes.clone();
            far[at..at + 2].copy_from_slice(&offset.to_be_bytes());
            let at = from + usize::from(offset);
            assert_eq!(refusal(&far), WireError::OutOfRange { area, at, need, end });
        }
    }
}

#[test]
fn an_offset_that_leaves_bytes_behind_is_no_gap() {
    let mut bytes = everything().emit();
    bytes[95] += 1;
    let (area, at, need, end) = ("SMC-Dv2 extension", 193, 68, 260);
    assert_eq!(refusal(&bytes), WireError::OutOfRange { area, at, need, end });
}

#[test]
fn length_must_be_what_the_contents_make() {
    let mut bytes = everything().emit();
    let expected = bytes.len();
    let trailer = bytes.len() - 4;
    bytes.splice(trailer..trailer, [0]);
    let got = expected + 1;
    let message = "Proposal";
    let error = WireError::LengthMismatch { message, got, expected };
    assert_eq!(refusal(&with_length(bytes)), error);
    let mut short = everything().emit();
    short.remove(trailer - 1);
    let (area, at, need, end) = ("SMC-Dv2 extension", 192, 68, 259);
    let error = WireError::OutOfRange { area, at, need, end };
    assert_eq!(refusal(&with_length(short)), error);
}

// Shows: CLC-16, CLCV2-18, EID-6, SEC-10.
#[test]
fn nine_of_anything_are_too_many() {
    let bytes = everything().emit();
    let with = |at: usize, value: u8| {
        let mut bytes = bytes.clone();
        bytes[at] = value;
        refusal(&bytes)
    };
    assert_eq!(with(87, 9), WireError::TooManyPrefixes(9));
    assert_eq!(with(88, 9), WireError::TooManyEids(9));
    assert_eq!(with(89, 9), WireError::TooManyGidEntries(9));
    assert_eq!(with(88, 255), WireError::TooManyEids(255));
    let mut r_only = v2_only(offer_v2(SmcTypes::R, 1, 0)).emit();
    r_only[81] = 9;
    assert_eq!(refusal(&r_only), WireError::TooManyGidEntries(9));
}

#[test]
fn a_count_above_what_is_there_does_not_fit() {
    for (at, value) in [(87, 1), (87, 8), (88, 3), (88, 8), (89, 3), (89, 8)] {
        let mut bytes = everything().emit();
        bytes[at] = value;
        assert_eq!(refusal(&bytes).reaction(), Reaction::Break, "{value} at {at}");
    }
}

#[test]
fn a_count_below_what_is_there_leaves_a_gap_or_a_wrong_length() {
    // The offset behind the EIDs still leads to the next area; behind the entries is the trailer.
    let mut bytes = everything().emit();
    bytes[88] = 1;
    assert_eq!(parse(&bytes).unwrap().v2.unwrap().eids.len(), 1);
    let mut bytes = everything().emit();
    bytes[89] = 1;
    let error = WireError::LengthMismatch { message: "Proposal", got: 264, expected: 254 };
    assert_eq!(refusal(&bytes), error);
}

#[test]
fn prefix_lengths_keep_to_their_family() {
    let mut bytes = v1_only(SmcTypes::R, ipv4()).emit();
    bytes[44] = 33;
    assert_eq!(refusal(&bytes), WireError::PrefixTooLong { bits: 33, max: 32 });
    let mut bytes = v1_only(SmcTypes::R, ipv6(1)).emit();
    bytes[64] = 129;
    assert_eq!(refusal(&bytes), WireError::PrefixTooLong { bits: 129, max: 128 });
}

// Shows: CLCV2-10.
#[test]
fn extension_of_an_offered_type_must_be_there() {
    let mut bytes = v2_only(offer_v2(SmcTypes::D, 1, 2)).emit();
    bytes[51] = 0;
    assert_eq!(refusal(&bytes), WireError::MissingExtension("V2 extension"));
    let mut bytes = v2_only(offer_v2(SmcTypes::D, 1, 2)).emit();
    bytes[87] = 0;
    assert_eq!(refusal(&bytes), WireError::MissingExtension("SMC-Dv2 extension"));
    bytes[81] = 0;
    bytes[83] |= SEID_OFFERED;
    assert_eq!(refusal(&bytes), WireError::MissingExtension("SMC-Dv2 extension"));
}

// Shows: CLCV2-29.
#[test]
fn smcd_extension_may_be_absent_if_it_has_nothing_to_say() {
    let sent = v2_only(offer_v2(SmcTypes::D, 1, 0));
    let mut bytes = sent.emit();
    bytes[87] = 0;
    bytes.drain(152..200);
    assert_eq!(parse(&with_length(bytes)), Ok(sent));
}

#[test]
fn version_1_must_offer_something() {
    let mut bytes = v1_only(SmcTypes::R, ipv4()).emit();
    bytes[7] |= 0b10;
    assert_eq!(refusal(&bytes), WireError::NothingOffered);
}

#[test]
fn version_2_type_bits_are_reserved_in_version_1() {
    let sent = v1_only(SmcTypes::R, ipv4());
    let mut bytes = sent.emit();
    bytes[7] |= 0x0c;
    assert_eq!(parse(&bytes), Ok(sent));
}

#[test]
fn version_3_is_read_as_2() {
    let mut bytes = everything().emit();
    bytes[7] = 0x30 | (bytes[7] & 0x0f);
    assert_eq!(parse(&bytes), Ok(everything()));
}

// Shows: CLCV2-5.
#[test]
fn fields_of_types_that_are_not_offered_are_not_looked_at() {
    let sent = v2_only(offer_v2(SmcTypes::R, 1, 0));
    let mut bytes = sent.emit();
    bytes[16..32].fill(0xaa);
    bytes[40..50].fill(0xaa);
    assert_eq!(parse(&bytes), Ok(sent));
    let sent = v2_only(offer_v2(SmcTypes::D, 1, 2));
    let mut bytes = sent.emit();
    bytes[88..106].fill(0xaa);
    assert_eq!(parse(&bytes), Ok(sent));
}

// Shows: CLCV2-8, CLCV2-9.
#[test]
fn subnet_extension_without_version_1_offer_is_skipped() {
    let sent = v2_only(offer_v2(SmcTypes::D, 1, 2));
    let mut bytes = sent.emit();
    bytes.splice(80..80, [0xff; 8]);
    bytes[39] = 40;
    bytes[51] += 8;
    assert_eq!(parse(&with_length(bytes)), Ok(sent));
}

// Shows: CLCV2-13.
#[test]
fn fields_of_v2_1_are_not_looked_at_in_v2_0() {
    let mut bytes = everything().emit();
    bytes[91] &= 0x0f;
    let v2 = parse(&bytes).unwrap().v2.unwrap();
    assert_eq!(v2.release, Release::V2_0);
    assert_eq!((v2.limits, v2.features, v2.vendor), (LinkLimits::NONE, Features::empty(), None));
}

// Shows: CLCV2-30, EID-13.
#[test]
fn seid_counts_only_with_its_bit() {
    let mut sent = v2_only(offer_v2(SmcTypes::D, 1, 2));
    let mut bytes = sent.emit();
    bytes[152..184].fill(b'S');
    assert_eq!(parse(&bytes), Ok(sent));
    bytes[83] |= SEID_OFFERED;
    if let Some(v2) = &mut sent.v2 {
        v2.smcd.seid = Some(Eid::from_wire([b'S'; 32]));
    }
    assert_eq!(parse(&bytes), Ok(sent));
}

// Shows: CLC-4.
#[test]
fn reserved_bytes_and_bits_are_not_looked_at() {
    let mut bytes = everything().emit();
    for range in [60..80, 85..87, 90..91, 92..94, 116..128, 224..240] {
        bytes[range].fill(0xff);
    }
    bytes[91] |= 0x0e;
    bytes[114] = 0xff;
    assert_eq!(parse(&bytes), Ok(everything()));
}

// Shows: CLCV2-14.
#[test]
fn vendor_options_need_a_vendor() {
    let options = [1, 0, 0, 0, 0];
    let error = WireError::VendorOptionsWithoutOui(options);
    assert_eq!(VendorOffer::new([0; 3], options), Err(error));
    let mut bytes = everything().emit();
    bytes[52..55].fill(0);
    assert_eq!(parse(&bytes).unwrap().v2.unwrap().vendor, None);
}

#[test]
fn every_truncation_and_every_extension_is_refused() {
    let bytes = everything().emit();
    for n in 0..bytes.len() {
        let error = refusal(&bytes[..n]);
        assert!(matches!(error, WireError::Truncated { .. }), "{n} bytes: {error}");
    }
    let mut longer = bytes.clone();
    longer.push(0);
    let length = bytes.len();
    assert_eq!(refusal(&longer), WireError::TrailingBytes { length, extra: 1 });
}

#[test]
fn trailing_eye_catcher_must_be_the_leading_one() {
    let mut bytes = everything().emit();
    let at = bytes.len() - 4;
    bytes[at + 3] = 0xc4;
    let got = EyeCatcher::Smcd.bytes();
    assert_eq!(refusal(&bytes), WireError::BadTrailingEyeCatcher { at, got });
}

// Shows: CLC-5.
#[test]
fn the_reserved_bytes_of_the_base_have_to_be_there() {
    let whole = proposal(Version::V2, None, None).emit();
    for len in [60, 70, 79] {
        let mut bytes = whole[..len].to_vec();
        bytes.extend(EyeCatcher::Smcr.bytes());
        bytes[6] = u8::try_from(bytes.len()).unwrap();
        let error = Message::parse(&bytes).unwrap_err();
        assert!(matches!(error, WireError::Truncated { field: "reserved", .. }), "{error}");
    }
}
