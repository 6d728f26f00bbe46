// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
use super::*;
use crate::wire::clc::Fce;
use crate::wire::ids::{DmbToken, Features, Hostname, LinkId, OsType, PeerId, Release, SizeCode};

const OWN: Gid = Gid([1; 16]);
const PEER: Gid = Gid([2; 16]);
const CHID: Chid = Chid(0xff01);
const FULL: Terms =
    Terms { release: Release::V2_1, features: Features::EMULATED_ISM, carriers: None };

fn eid(name: &str) -> Eid {
    Eid::new(name).unwrap()
}

fn config() -> Config {
    let mut config = Config::new(PeerId([1; 8]));
    config.ueids = vec![eid("ALPHA"), eid("BETA")];
    config.devices = vec![
        IsmDevice { chid: CHID, gid: OWN },
        IsmDevice { chid: Chid::LOOPBACK, gid: OWN },
        IsmDevice { chid: Chid(7), gid: Gid([7; 16]) },
    ];
    config
}

fn fce(terms: Terms) -> Option<Fce> {
    Some(Fce {
        os: OsType::LINUX,
        release: terms.release,
        hostname: Hostname::BLANK,
        features: terms.features,
        vendor: [0; 4],
    })
}

fn accept() -> SmcdV2 {
    SmcdV2 {
        gid: PEER,
        token: DmbToken(5),
        index: 0,
        size: SizeCode::MIN,
        link_id: LinkId([0; 4]),
        chid: CHID,
        eid: eid("BETA"),
        first_contact: fce(FULL),
    }
}

fn check(config: &Config, accept: &SmcdV2, known: Option<Terms>) -> Result<Agreed, Refusal> {
    let offered = config.offered_devices(None);
    check_accept(config, &offered, accept, |chid, gid| {
        assert_eq!((chid, gid), (accept.chid, accept.gid));
        known
    })
}

fn declined(reason: DeclineReason) -> Result<Agreed, Refusal> {
    Err(Refusal::Decline(reason))
}

#[test]
fn first_contact_agrees_on_the_terms_of_accept() {
    let agreed = check(&config(), &accept(), None).unwrap();
    assert_eq!(agreed.devices, Candidate { chid: CHID, local: OWN, peer: PEER });
    assert_eq!(agreed.eid, eid("BETA"));
    assert_eq!(agreed.terms, FULL);
}

// Shows: CLC-34, CLCV2-87.
#[test]
fn first_contact_with_a_known_peer_starts_anew() {
    let old = Terms { release: Release::V2_0, features: Features::empty(), carriers: None };
    assert_eq!(check(&config(), &accept(), Some(old)).unwrap().terms, FULL);
}

#[test]
fn subsequent_contact_uses_what_is_known() {
    let subsequent = SmcdV2 { first_contact: None, ..accept() };
    assert_eq!(check(&config(), &subsequent, Some(FULL)).unwrap().terms, FULL);
}

#[test]
fn subsequent_contact_with_a_stranger_is_out_of_sync() {
    let subsequent = SmcdV2 { first_contact: None, ..accept() };
    assert_eq!(check(&config(), &subsequent, None), declined(DeclineReason::OutOfSync));
}

// Shows: EID-15.
#[test]
fn chid_and_eid_have_to_be_offered_ones() {
    for chid in [0, 8, 0xff02] {
        let error = HandshakeError::ChidNotOffered(Chid(chid));
        let foreign = SmcdV2 { chid: Chid(chid), ..accept() };
        assert_eq!(check(&config(), &foreign, None), Err(Refusal::Fail(error)));
    }
    let other = SmcdV2 { eid: eid("GAMMA"), ..accept() };
    let error = HandshakeError::EidNotOffered(eid("GAMMA"));
    assert_eq!(check(&config(), &other, None), Err(Refusal::Fail(error)));
    let system = SmcdV2 { eid: eid("SYSTEM"), ..accept() };
    let mut with_seid = config();
    with_seid.seid = Some(eid("SYSTEM"));
    assert!(check(&with_seid, &system, None).is_ok());
    let mut ninth = config();
    ninth.ueids = (0..9).map(|i| eid(&format!("E{i}"))).collect();
    let unsent = SmcdV2 { eid: eid("E8"), ..accept() };
    let error = HandshakeError::EidNotOffered(eid("E8"));
    assert_eq!(check(&ninth, &unsent, None), Err(Refusal::Fail(error)), "it was not offered");
}

#[test]
fn zero_is_never_an_offered_eid() {
    let mut config = config();
    config.seid = Some(Eid::ZERO);
    let zero = SmcdV2 { eid: Eid::ZERO, ..accept() };
    let error = HandshakeError::EidNotOffered(Eid::ZERO);
    assert_eq!(check(&config, &zero, None), Err(Refusal::Fail(error)));
}

// Shows: CLCV2-36.
#[test]
fn release_above_the_proposed_one_is_declined() {
    let higher = Terms { release: Release::from_code(2), ..FULL };
    let got = SmcdV2 { first_contact: fce(higher), ..accept() };
    let reason = DeclineReason::Release { agreed: Release::V2_1, got: Release::from_code(2) };
    assert_eq!(check(&config(), &got, None), declined(reason));
    let mut old = config();
    old.release = Release::V2_0;
    let platform = SmcdV2 { chid: Chid(7), ..accept() };
    let reason = DeclineReason::Release { agreed: Release::V2_0, got: Release::V2_1 };
    assert_eq!(check(&old, &platform, None), declined(reason));
}

#[test]
fn earlier_release_is_taken_on_a_platform_device() {
    let old = Terms { release: Release::V2_0, features: Features::empty(), carriers: None };
    let got = SmcdV2 { chid: Chid(7), first_contact: fce(old), ..accept() };
    assert_eq!(check(&config(), &got, None).unwrap().terms, old);
}

// Shows: EISM-3.
#[test]
fn emulated_device_needs_the_feature_of_the_server() {
    for terms in [
        Terms { features: Features::empty(), ..FULL },
        Terms { release: Release::V2_0, features: Features::empty(), carriers: None },
    ] {
        let got = SmcdV2 { first_contact: fce(terms), ..accept() };
        let reason = DeclineReason::EmulatedNotShared(CHID);
        assert_eq!(check(&config(), &got, None), declined(reason));
        let later = SmcdV2 { first_contact: None, ..accept() };
        assert_eq!(check(&config(), &later, Some(terms)), declined(reason));
    }
}

// Shows: EISM-25.
#[test]
fn loopback_of_another_system_and_the_gid_zero_are_declined() {
    let foreign = SmcdV2 { chid: Chid::LOOPBACK, ..accept() };
    assert_eq!(check(&config(), &foreign, None), declined(DeclineReason::ForeignLoopback));
    let own = SmcdV2 { chid: Chid::LOOPBACK, gid: OWN, ..accept() };
    assert!(check(&config(), &own, None).is_ok());
    let nobody = SmcdV2 { gid: Gid::NONE, ..accept() };
    assert_eq!(check(&config(), &nobody, None), declined(DeclineReason::Unreachable));
}

fn confirm() -> SmcdV2 {
    SmcdV2 { gid: OWN, token: DmbToken(6), ..accept() }
}

fn answer(confirm: &SmcdV2) -> Result<(), Refusal> {
    check_confirm(&accept(), OWN, FULL, confirm)
}

#[test]
fn confirm_that_repeats_accept_is_taken() {
    assert_eq!(answer(&confirm()), Ok(()));
    let (accept, confirm) =
        (SmcdV2 { first_contact: None, ..accept() }, SmcdV2 { first_contact: None, ..confirm() });
    assert_eq!(check_confirm(&accept, OWN, FULL, &confirm), Ok(()));
}

// Shows: CLCV2-64, EID-15, EISM-21.
#[test]
fn confirm_that_names_others_breaks_the_connection() {
    let chid = SmcdV2 { chid: Chid(0xff02), ..confirm() };
    let error = HandshakeError::ConfirmChid { accepted: CHID, got: Chid(0xff02) };
    assert_eq!(answer(&chid), Err(Refusal::Fail(error)));
    let other = SmcdV2 { eid: eid("ALPHA"), ..confirm() };
    let error = HandshakeError::ConfirmEid { accepted: eid("BETA"), got: eid("ALPHA") };
    assert_eq!(answer(&other), Err(Refusal::Fail(error)));
    let mut half = OWN;
    half.0[15] = 0;
    for got in [half, PEER, Gid::NONE] {
        let gid = SmcdV2 { gid: got, ..confirm() };
        let error = HandshakeError::ConfirmGid { proposed: OWN, got };
        assert_eq!(answer(&gid), Err(Refusal::Fail(error)));
    }
}

// Shows: CLCV2-44.
#[test]
fn confirm_has_the_first_contact_flag_of_accept() {
    let without = SmcdV2 { first_contact: None, ..confirm() };
    let error = HandshakeError::ConfirmContact { accepted: true, got: false };
    assert_eq!(answer(&without), Err(Refusal::Fail(error)));
    let later = SmcdV2 { first_contact: None, ..accept() };
    let error = HandshakeError::ConfirmContact { accepted: false, got: true };
    assert_eq!(check_confirm(&later, OWN, FULL, &confirm()), Err(Refusal::Fail(error)));
}

// Shows: CLCV2-60.
#[test]
fn confirm_with_other_terms_is_declined_late() {
    for release in [Release::V2_0, Release::from_code(2)] {
        let other = SmcdV2 { first_contact: fce(Terms { release, ..FULL }), ..confirm() };
        let reason = DeclineReason::Release { agreed: Release::V2_1, got: release };
        assert_eq!(answer(&other), Err(Refusal::Decline(reason)));
    }
    let none = Terms { features: Features::empty(), ..FULL };
    let other = SmcdV2 { first_contact: fce(none), ..confirm() };
    let reason = DeclineReason::Features { agreed: FULL.features, got: none.features };
    assert_eq!(answer(&other), Err(Refusal::Decline(reason)));
}

// Shows: CLCV2-17.
#[test]
fn vendor_options_in_confirm_are_not_looked_at() {
    let mut extension = fce(FULL).unwrap();
    extension.vendor = [9; 4];
    assert_eq!(answer(&SmcdV2 { first_contact: Some(extension), ..confirm() }), Ok(()));
}
