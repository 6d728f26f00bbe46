// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
use super::*;
use crate::wire::List;
use crate::wire::clc::{
    AssociatedIsm, Diagnosis, GidChid, OfferV1, SmcTypes, SmcdV2Offer, Subnet, VendorOffer, Version,
};
use crate::wire::ids::{GidV1, LinkLimits, Mac, PeerId, Release};

fn eid(name: &str) -> Eid {
    Eid::new(name).unwrap()
}

fn eids(names: &[&str]) -> Vec<Eid> {
    names.iter().map(|name| eid(name)).collect()
}

fn gid(n: u8) -> Gid {
    Gid([n; 16])
}

fn platform(n: u8) -> Gid {
    Gid::from_parts(GidV1([n; 8]), GidV1::NONE)
}

fn device(chid: u16, gid: Gid) -> IsmDevice {
    IsmDevice { chid: Chid(chid), gid }
}

fn server() -> Config {
    let mut config = Config::new(PeerId([2; 8]));
    config.ueids = eids(&["ALPHA"]);
    config.devices = vec![device(0xff01, gid(2))];
    config
}

fn entry(n: u8, chid: u16) -> GidChid {
    GidChid { gid: GidV1([n; 8]), chid: Chid(chid) }
}

fn with_entries(entries: &[GidChid]) -> Proposal {
    let v2 = OfferV2 {
        types: SmcTypes::D,
        release: Release::V2_1,
        eids: List::from_slice(&[eid("ALPHA")]).unwrap(),
        roce_gid: Gid::NONE,
        limits: LinkLimits::NONE,
        features: Features::EMULATED_ISM,
        vendor: None,
        smcd: SmcdV2Offer { seid: None, entries: List::from_slice(entries).unwrap() },
    };
    Proposal {
        version: Version::V2,
        peer_id: PeerId::NONE,
        gid: Gid::NONE,
        mac: Mac::NONE,
        ism: AssociatedIsm::default(),
        v1: None,
        v2: Some(v2),
    }
}

/// One emulated device, 0xff01 with GID 01..01.
fn proposal() -> Proposal {
    with_entries(&[entry(1, 0xff01), entry(1, 0xff01)])
}

fn change(change: impl FnOnce(&mut OfferV2)) -> Proposal {
    let mut proposal = proposal();
    change(proposal.v2.as_mut().unwrap());
    proposal
}

fn matched(config: &Config, proposal: &Proposal) -> SmcdMatch {
    evaluate(config, &Route::default(), proposal).smcd_v2.unwrap()
}

fn refused(config: &Config, proposal: &Proposal) -> DeclineReason {
    let Evaluation { smcd_v2, rejected, .. } = evaluate(config, &Route::default(), proposal);
    assert_eq!(smcd_v2, None);
    rejected.smcd_v2.unwrap()
}

fn candidate(chid: u16, local: Gid, peer: Gid) -> Candidate {
    Candidate { chid: Chid(chid), local, peer }
}

#[test]
fn picks_the_device_with_the_same_chid() {
    let found = matched(&server(), &proposal());
    assert_eq!(found.candidates, [candidate(0xff01, gid(2), gid(1))]);
    assert_eq!(found.eid, eid("ALPHA"));
    let terms = Terms { release: Release::V2_1, features: Features::EMULATED_ISM, carriers: None };
    assert_eq!(found.terms, terms);
}

// Shows: EISM-17.
#[test]
fn keeps_the_clients_order_of_devices() {
    let mut config = server();
    config.devices = vec![
        device(7, platform(0x77)),
        device(0xff02, gid(3)),
        device(0xff01, gid(2)),
        device(0xffff, gid(8)),
    ];
    let offered = [
        entry(8, 0xffff),
        entry(8, 0xffff),
        entry(1, 0xff01),
        entry(1, 0xff01),
        entry(9, 9),
        entry(7, 7),
        entry(4, 0xff02),
        entry(4, 0xff02),
    ];
    let found = matched(&config, &with_entries(&offered));
    assert_eq!(
        found.candidates,
        [
            candidate(0xffff, gid(8), gid(8)),
            candidate(0xff01, gid(2), gid(1)),
            candidate(7, platform(0x77), platform(7)),
            candidate(0xff02, gid(3), gid(4)),
        ]
    );
}

// Shows: CLCV2-11, CLCV2-28.
#[test]
fn associated_device_comes_first_and_needs_no_array() {
    let mut config = server();
    config.devices.push(device(7, platform(0x77)));
    let mut both = proposal();
    both.ism = AssociatedIsm { gid: GidV1([6; 8]), chid: Chid(7) };
    let first = candidate(7, platform(0x77), platform(6));
    let second = candidate(0xff01, gid(2), gid(1));
    assert_eq!(matched(&config, &both).candidates, [first, second]);
    let mut alone = with_entries(&[]);
    alone.ism = both.ism;
    assert_eq!(matched(&config, &alone).candidates, [first]);
}

// Shows: EISM-5.
#[test]
fn reserved_chid_in_the_place_of_the_associated_device_is_passed_over() {
    let mut proposal = proposal();
    proposal.ism = AssociatedIsm { gid: GidV1([1; 8]), chid: Chid(0xff01) };
    let found = matched(&server(), &proposal);
    assert_eq!(found.candidates, [candidate(0xff01, gid(2), gid(1))]);
}

#[test]
fn the_same_device_twice_is_one_candidate() {
    let twice = [entry(1, 0xff01); 4];
    assert_eq!(matched(&server(), &with_entries(&twice)).candidates.len(), 1);
}

// Shows: EISM-21.
#[test]
fn peers_with_equal_first_halves_are_different_peers() {
    let offered = [entry(1, 0xff01), entry(2, 0xff01), entry(1, 0xff01), entry(3, 0xff01)];
    let found = matched(&server(), &with_entries(&offered));
    let peer = |n| Gid::from_parts(GidV1([1; 8]), GidV1([n; 8]));
    assert_eq!(
        found.candidates,
        [candidate(0xff01, gid(2), peer(2)), candidate(0xff01, gid(2), peer(3))]
    );
}

// Shows: EISM-29.
#[test]
fn refuses_what_has_no_common_chid_or_gid() {
    let cases = [
        (with_entries(&[]), DeclineReason::NoCommonChid),
        (with_entries(&[entry(1, 0xff02); 2]), DeclineReason::NoCommonChid),
        (with_entries(&[entry(1, 3)]), DeclineReason::NoCommonChid),
        (with_entries(&[entry(0, 0xff01); 2]), DeclineReason::Unreachable),
    ];
    for (proposal, reason) in cases {
        assert_eq!(refused(&server(), &proposal), reason, "{proposal:?}");
    }
}

// Shows: EISM-25, SEC-14.
#[test]
fn loopback_only_reaches_itself() {
    let mut config = server();
    config.devices = vec![device(0xffff, gid(5))];
    assert_eq!(
        refused(&config, &with_entries(&[entry(1, 0xffff); 2])),
        DeclineReason::ForeignLoopback
    );
    let half = [entry(5, 0xffff), entry(6, 0xffff)];
    assert_eq!(refused(&config, &with_entries(&half)), DeclineReason::ForeignLoopback);
    let found = matched(&config, &with_entries(&[entry(5, 0xffff); 2]));
    assert_eq!(found.candidates, [candidate(0xffff, gid(5), gid(5))]);
}

#[test]
fn foreign_loopback_ahead_of_a_good_device_does_no_harm() {
    let mut config = server();
    config.devices.insert(0, device(0xffff, gid(5)));
    let offered = [entry(1, 0xffff), entry(1, 0xffff), entry(1, 0xff01), entry(1, 0xff01)];
    let found = matched(&config, &with_entries(&offered));
    assert_eq!(found.candidates, [candidate(0xff01, gid(2), gid(1))]);
}

/// EISM-13: a lone reserved CHID at the end, before another CHID, and after a pair of its own.
fn unpaired() -> [(Proposal, u16); 3] {
    let good = [entry(1, 0xff01), entry(1, 0xff01)];
    [
        (with_entries(&[good[0], good[1], entry(4, 0xff05)]), 0xff05),
        (with_entries(&[entry(4, 0xff05), good[0], good[1]]), 0xff05),
        (with_entries(&[good[0], good[1], good[0]]), 0xff01),
    ]
}

// Shows: EISM-14.
#[test]
fn unpaired_reserved_chid_is_declined_by_default() {
    for (proposal, chid) in unpaired() {
        assert_eq!(refused(&server(), &proposal), DeclineReason::UnpairedChid(Chid(chid)));
    }
}

// Shows: EISM-14.
#[test]
fn unpaired_reserved_chid_is_skipped_on_request() {
    let mut config = server();
    config.tolerance.unpaired = Unpaired::Skip;
    for (proposal, _) in unpaired() {
        let found = matched(&config, &proposal);
        assert_eq!(found.candidates, [candidate(0xff01, gid(2), gid(1))]);
    }
}

// Shows: CLCV2-38, EISM-2, EISM-15, EISM-16.
#[test]
fn without_the_feature_reserved_chids_mean_nothing_paired_or_not() {
    let mut no_feature = server();
    no_feature.features = Features::empty();
    let mut old = server();
    old.release = Release::V2_0;
    for mut config in [no_feature, old] {
        config.devices.push(device(7, platform(0x77)));
        let mixed = with_entries(&[entry(1, 0xff01), entry(7, 7), entry(4, 0xffff)]);
        let found = matched(&config, &mixed);
        assert_eq!(found.candidates, [candidate(7, platform(0x77), platform(7))]);
        assert_eq!(found.terms.features, Features::empty());
        assert_eq!(refused(&config, &proposal()), DeclineReason::NoCommonChid);
    }
}

// Shows: EISM-3, EISM-22.
#[test]
fn emulated_devices_need_the_bit_and_the_release_at_both_ends() {
    let no_bit = change(|v2| v2.features = Features::empty());
    let no_release = change(|v2| v2.release = Release::V2_0);
    for proposal in [no_bit, no_release] {
        let reason = DeclineReason::EmulatedNotShared(Chid(0xff01));
        assert_eq!(refused(&server(), &proposal), reason);
    }
    let mut lone = with_entries(&[entry(1, 0xff01), entry(7, 7)]);
    lone.v2.as_mut().unwrap().release = Release::V2_0;
    let mut config = server();
    config.devices.push(device(7, platform(0x77)));
    assert_eq!(matched(&config, &lone).candidates.len(), 1, "no violation before v2.1");
}

// Shows: CLCV2-19, CLCV2-36.
#[test]
fn release_is_the_lower_one_and_unknown_releases_count_as_the_highest_known() {
    let table = [
        // own, proposed, agreed, features in common
        (0, 0, 0, 0),
        (0, 1, 0, 0),
        (1, 0, 0, 0),
        (1, 1, 1, 1),
        (1, 2, 1, 1),
        (1, 15, 1, 1),
        (9, 9, 1, 1),
    ];
    for (own, proposed, agreed, features) in table {
        let mut config = server();
        config.release = Release::from_code(own);
        config.devices = vec![device(7, platform(0x77))];
        let mut offer = with_entries(&[entry(7, 7)]);
        offer.v2.as_mut().unwrap().release = Release::from_code(proposed);
        let terms = matched(&config, &offer).terms;
        assert_eq!(terms.release.code(), agreed, "{own} {proposed}");
        assert_eq!(terms.features.bits(), features, "{own} {proposed}");
    }
}

// Shows: CLCV2-27, EID-7, EID-8, EID-9, EID-10, EID-13, EID-16, SEC-13.
#[test]
fn eid_table() {
    // own SEID, own UEIDs, offered SEID, offered UEIDs, result
    type Row<'a> = (
        Option<&'a str>,
        &'a [&'a str],
        Option<&'a str>,
        &'a [&'a str],
        Result<&'a str, DeclineReason>,
    );
    let table: &[Row<'_>] = &[
        (None, &["A"], None, &["A"], Ok("A")),
        (None, &["A", "B"], None, &["C", "B", "A"], Ok("B")),
        (Some("S"), &["A"], Some("S"), &["A"], Ok("S")),
        (Some("S"), &[], Some("S"), &[], Ok("S")),
        (Some("S"), &["A"], Some("T"), &["A"], Ok("A")),
        (Some("S"), &["A"], None, &["A"], Ok("A")),
        (None, &["A"], Some("S"), &["A"], Ok("A")),
        (None, &["H"], None, &["A", "B", "C", "D", "E", "F", "G", "H"], Ok("H")),
        (None, &["A"], None, &["B"], Err(DeclineReason::NoCommonEid)),
        (None, &["ABC"], None, &["ABC."], Err(DeclineReason::NoCommonEid)),
        // An SEID and a UEID of the same text are not the same.
        (Some("S"), &[], None, &["S"], Err(DeclineReason::NoCommonEid)),
        (None, &["S"], Some("S"), &[], Err(DeclineReason::NoCommonEid)),
        (None, &["A"], None, &[], Err(DeclineReason::NoEidOffered)),
        (None, &[], None, &["A"], Err(DeclineReason::NoEidConfigured)),
        (None, &[], Some("S"), &[], Err(DeclineReason::NoEidConfigured)),
    ];
    for (own_seid, own, seid, offered, expected) in table {
        let mut config = server();
        config.seid = own_seid.map(eid);
        config.ueids = eids(own);
        let proposal = change(|v2| {
            v2.smcd.seid = seid.map(eid);
            v2.eids = List::from_slice(&eids(offered)).unwrap();
        });
        match expected {
            Ok(name) => assert_eq!(matched(&config, &proposal).eid, eid(name)),
            Err(reason) => assert_eq!(refused(&config, &proposal), *reason),
        }
    }
}

// Shows: CLCV2-30.
#[test]
fn zero_is_no_eid_even_where_both_ends_have_it() {
    let mut config = server();
    config.seid = Some(Eid::ZERO);
    config.ueids = vec![Eid::ZERO];
    let proposal = change(|v2| {
        v2.smcd.seid = Some(Eid::ZERO);
        v2.eids = List::from_slice(&[Eid::ZERO]).unwrap();
    });
    assert_eq!(refused(&config, &proposal), DeclineReason::NoCommonEid);
}

#[test]
fn server_without_devices_says_so() {
    let mut config = server();
    config.devices.clear();
    assert_eq!(refused(&config, &proposal()), DeclineReason::NoIsmDevice);
}

// Shows: CLCV2-15, CLCV2-25, CLCV2-39.
#[test]
fn ignores_vendor_options_and_limits_of_smc_r() {
    let proposal = change(|v2| {
        v2.vendor = Some(VendorOffer::new([1, 2, 3], [4; 5]).unwrap());
        v2.limits = LinkLimits { max_conns: 3, max_links: 9 };
    });
    assert_eq!(matched(&server(), &proposal).candidates.len(), 1);
}

/// The sixteen combinations of offered types (CLCV2-2, CLCV2-79, CLCV2-88).
// Shows: CLCV2-2, CLCV2-32, CLCV2-79, CLCV2-80, CLCV2-88.
#[test]
fn every_combination_of_types_gets_a_reason_per_type() {
    let kinds = [None, Some(SmcTypes::R), Some(SmcTypes::D), Some(SmcTypes::Both)];
    for v1 in kinds {
        for v2 in kinds {
            let mut offer = proposal();
            offer.v1 =
                v1.map(|types| OfferV1 { types, subnet: Subnet::V4 { network: [0; 4], bits: 0 } });
            match v2 {
                Some(types) => offer.v2.as_mut().unwrap().types = types,
                None => offer.v2 = None,
            }
            let has_d2 = v2.is_some_and(|types| types.has_d());
            let accepted = evaluate(&server(), &Route::default(), &offer);
            assert_eq!(accepted.smcd_v2.is_some(), has_d2, "SMC-Dv2 goes before the others");

            let mut foreign = server();
            foreign.ueids = eids(&["OTHER"]);
            let Evaluation { smcd_v2, rejected, .. } =
                evaluate(&foreign, &Route::default(), &offer);
            assert_eq!(smcd_v2, None);
            let reasons = rejected.type_reasons();
            let expect = |offered: bool, code: u32| Diagnosis(if offered { code } else { 0 });
            assert_eq!(reasons.smcd_v2, expect(has_d2, 0x0303_0001));
            assert_eq!(reasons.smcd_v1, expect(v1.is_some_and(|t| t.has_d()), 0x0303_0001));
            assert_eq!(reasons.smcr_v2, expect(v2.is_some_and(|t| t.has_r()), 0x0303_0002));
            assert_eq!(reasons.smcr_v1, expect(v1.is_some_and(|t| t.has_r()), 0x0303_0002));
            let last = rejected.last();
            match (v1, v2) {
                (None, None) => assert_eq!(last, DeclineReason::NothingOffered),
                _ if has_d2 => assert_eq!(last, DeclineReason::NoCommonEid),
                _ => assert!(matches!(last, DeclineReason::NotConfigured(_))),
            }
        }
    }
}
