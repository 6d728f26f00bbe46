// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Every end of a handshake of SMC-R without SMC.

use std::sync::Arc;
use std::time::Duration;

use smc_core::handshake::{
    AfterDecline, Awaited, ClcReader, ClientStep, ConfirmStepR, DeclineReason, HandshakeError,
    Kinds, KnownLink, ServerStep, SmcKind, Tolerance, start_on,
};
use smc_core::time::Tick;
use smc_core::wire::WireError;
use smc_core::wire::clc::Version;
use smc_core::wire::ids::{Eid, Features, Gid, LinkLimits, Qpn, Release};

use crate::smcr_support::*;
use crate::support::*;

fn declined_by_server(pair: &Pair) -> (DeclineReason, Vec<u8>) {
    match pair.receive(&pair.propose().1) {
        ServerStep::Decline(sent) => {
            assert_eq!(sent.then, AfterDecline::FallBack);
            (sent.reason, sent.message)
        }
        other => panic!("{other:?}"),
    }
}

// Shows: CLC-23, CLCV2-33, EID-8, ERR-1.
#[test]
fn server_declines_a_proposal_it_cannot_serve() {
    type Change = fn(&mut Pair);
    let v1: &[(Change, DeclineReason, u32)] = &[
        (|pair| pair.server_route.rnic = None, DeclineReason::NoRnic, 0x0303_0002),
        (
            |pair| pair.server_route.rnic.as_mut().unwrap().gid_v1 = None,
            DeclineReason::NoRnic,
            0x0303_0002,
        ),
        (
            |pair| pair.server_route.subnets = vec![subnet_v4(1)],
            DeclineReason::DifferentSubnet,
            0x0307_0000,
        ),
        (|pair| pair.server.peer_id = Default::default(), DeclineReason::NoRnic, 0x0303_0002),
        (
            |pair| pair.server.kinds = Kinds::SMCR_V2,
            DeclineReason::NotConfigured(SmcKind::SmcrV1),
            0x0303_0002,
        ),
    ];
    for (change, reason, code) in v1 {
        let mut pair = Pair::new(Version::V1);
        change(&mut pair);
        let (got, message) = declined_by_server(&pair);
        assert_eq!(got, *reason);
        assert_eq!((message.len(), message[7]), (28, 0x10));
        assert_eq!(message[16..20], code.to_be_bytes());
    }
    let v2: &[(Change, DeclineReason, u32)] = &[
        (|pair| pair.server_route.rnic = None, DeclineReason::NoRnic, 0x0303_0002),
        (
            |pair| pair.server_route.rnic.as_mut().unwrap().gid_v2 = Some(gid_v6(2)),
            DeclineReason::NoRnic,
            0x0303_0002,
        ),
        (|pair| pair.server.ueids = vec![eid("OTHER")], DeclineReason::NoCommonUeid, 0x0303_0000),
        (|pair| pair.server.ueids.clear(), DeclineReason::NoEidConfigured, 0x0303_0008),
        (
            |pair| pair.server_route = route_v6(SERVER),
            DeclineReason::GidFamily(gid_v4(CLIENT)),
            0x0303_0002,
        ),
        (
            |pair| pair.server.kinds = Kinds::SMCD_V2,
            DeclineReason::NotConfigured(SmcKind::SmcrV2),
            0x0303_0002,
        ),
    ];
    for (change, reason, code) in v2 {
        let mut pair = Pair::new(Version::V2);
        change(&mut pair);
        let (got, message) = declined_by_server(&pair);
        assert_eq!(got, *reason);
        assert_eq!((message.len(), message[7]), (44, 0x20));
        assert_eq!(message[16..20], code.to_be_bytes());
        assert_eq!(message[32..36], code.to_be_bytes(), "the reason for SMC-Rv2");
    }
}

// Shows: CLCV2-20, CLCV2-26, CLCV2-68, EID-10, EID-14.
#[test]
fn a_proposal_without_user_eids_or_address_is_declined() {
    let mut pair = Pair::new(Version::V2);
    pair.client.seid = Some(eid("SYSTEM"));
    pair.server.seid = Some(eid("SYSTEM"));
    let (_, proposal) = pair.propose();
    let mut nobody = proposal.clone();
    nobody[88..104].fill(0);
    let ServerStep::Decline(sent) = pair.receive(&nobody) else { panic!() };
    assert_eq!(sent.reason, DeclineReason::GidFamily(Gid::NONE));
    let mut nameless = proposal[..120].to_vec();
    nameless[80] = 0;
    nameless[6] = 124;
    nameless.extend(&proposal[proposal.len() - 4..]);
    let ServerStep::Decline(sent) = pair.receive(&nameless) else { panic!() };
    assert_eq!(sent.reason, DeclineReason::NoEidOffered);
}

// Shows: CLC-15, CLC-17, SEC-2.
#[test]
fn version_1_is_judged_by_number_and_length_of_the_subnet() {
    let pair = Pair::new(Version::V1);
    let (_, proposal) = pair.propose();
    let served = |proposal: &[u8]| matches!(pair.receive(proposal), ServerStep::Eligible(_));
    assert!(served(&proposal));
    assert_eq!(proposal[40..48], [10, 9, 0, 0, 24, 0, 0, 0]);
    for (at, value) in [(42, 1), (44, 23), (44, 25), (40, 11)] {
        let mut other = proposal.clone();
        other[at] = value;
        assert!(!served(&other), "{value} at {at}");
    }
}

// Shows: CLC-18.
#[test]
fn one_common_prefix_of_several_is_enough() {
    let mut pair = Pair::v6(Version::V1);
    pair.client_route.subnets = vec![subnet_v6(1), subnet_v6(2), subnet_v6(9)];
    pair.server_route.subnets = vec![subnet_v4(0), subnet_v6(9)];
    let run = pair.run(None);
    assert_eq!(run.proposal[47], 3, "all prefixes are proposed");
    pair.server_route.subnets = vec![subnet_v4(0), subnet_v6(8)];
    assert_eq!(declined_by_server(&pair).0, DeclineReason::DifferentSubnet);
    // Everybody has the link-local prefix.
    let local = smc_core::handshake::IpSubnet::new("fe80::1".parse().unwrap(), 64).unwrap();
    pair.client_route.subnets = vec![local, subnet_v6(9)];
    pair.server_route.subnets = vec![local, subnet_v6(8)];
    assert_eq!(declined_by_server(&pair).0, DeclineReason::DifferentSubnet);
    pair.client_route.subnets = vec![local];
    let config = Arc::new(pair.client.clone());
    let decline = start_on(config, pair.client_route.clone(), NOW).unwrap_err();
    assert_eq!(decline.reason, DeclineReason::NoDevice);
}

// Shows: CLC-51.
#[test]
fn client_without_adapter_or_eid_declines_in_place_of_a_proposal() {
    let mut bare = Pair::new(Version::V2);
    bare.client_route.rnic = None;
    let mut nameless = Pair::new(Version::V2);
    nameless.client.ueids.clear();
    let mut v1 = Pair::new(Version::V1);
    v1.client_route.rnic = None;
    for (pair, reason, length) in [
        (bare, DeclineReason::NoDevice, 44),
        (nameless, DeclineReason::NoEidConfigured, 44),
        (v1, DeclineReason::NoDevice, 28),
    ] {
        let config = Arc::new(pair.client.clone());
        let decline = start_on(config, pair.client_route.clone(), NOW).unwrap_err();
        assert_eq!((decline.reason, decline.message.len()), (reason, length));
        let ServerStep::PeerDeclined(peer) = pair.receive(&decline.message) else { panic!() };
        assert_eq!(peer.code, reason.code());
    }
}

/// An Accept of version 2 at first contact with some bytes changed.
fn accept_with(changes: &[(usize, u8)]) -> ClientStep {
    let pair = Pair::new(Version::V2);
    let (awaits, proposal) = pair.propose();
    let (_, mut accept) = pair.accept(&proposal, None);
    for (at, value) in changes {
        accept[*at] = *value;
    }
    awaits.handle(&accept, |_, _| None)
}

// Shows: CLC-29, CLCV2-57, CLCV2-58, CLCV2-68, CLCV2-85, ERR-10.
#[test]
fn client_declines_an_accept_it_cannot_live_with() {
    let got = Release::from_code(2);
    let (agreed, value) = (Release::V2_1, 7);
    let table: [(&[(usize, u8)], DeclineReason); 9] = [
        (&[(140, 15)], DeclineReason::MaxConnections(15)),
        (&[(140, 0)], DeclineReason::MaxConnections(0)),
        (&[(141, 0)], DeclineReason::MaxLinks(0)),
        (&[(141, 3)], DeclineReason::MaxLinks(3)),
        (&[(105, 0x22)], DeclineReason::Release { agreed, got }),
        (&[(50, 0x27)], DeclineReason::ReservedValue { field: "MTU", value }),
        (&[(50, 0x20)], DeclineReason::ReservedValue { field: "MTU", value: 0 }),
        (&[(50, 0x73)], DeclineReason::ReservedValue { field: "RMBE size", value }),
        (&[(26, 0), (27, 1)], DeclineReason::GidFamily(odd_gid())),
    ];
    for (changes, reason) in table {
        let ClientStep::Decline(sent) = accept_with(changes) else { panic!("{reason}") };
        assert_eq!((sent.reason, sent.then), (reason, AfterDecline::FallBack));
        assert_eq!((sent.message.len(), sent.message[7]), (44, 0x20));
    }
    // Smaller limits in the range are accepted.
    assert!(matches!(accept_with(&[(140, 16), (141, 1)]), ClientStep::OfferedR(_)));
}

/// The server's address with the IPv4 mark broken.
fn odd_gid() -> Gid {
    let mut gid = gid_v4(SERVER);
    (gid.0[10], gid.0[11]) = (0, 1);
    gid
}

// Shows: EID-14, SEC-13.
#[test]
fn an_eid_that_was_not_offered_breaks_the_connection() {
    let mut bytes = *eid("LAB").as_bytes();
    bytes[0] = b'M';
    let error = HandshakeError::EidNotOffered(Eid::from_wire(bytes));
    assert_eq!(accept_with(&[(64, b'M')]), ClientStep::Fail(error));
}

// Shows: CLCV2-89.
#[test]
fn a_version_that_was_not_offered_is_declined() {
    for (offered, chosen) in [(Version::V1, Version::V2), (Version::V2, Version::V1)] {
        let (client, other) = (Pair::new(offered), Pair::new(chosen));
        let (awaits, _) = client.propose();
        let (_, accept) = other.accept(&other.propose().1, None);
        let ClientStep::Decline(sent) = awaits.handle(&accept, |_, _| None) else { panic!() };
        let kind = if chosen == Version::V1 { SmcKind::SmcrV1 } else { SmcKind::SmcrV2 };
        assert_eq!(sent.reason, DeclineReason::NotOffered(kind));
        assert_eq!(sent.message[7] >> 4, chosen.number());
    }
}

/// A client that offers SMC-R alone has no ISM device for an SMC-D Accept. The client declines with
/// 03040000, like any type not offered, and does not break the connection.
// Shows: CLCV2-89.
#[test]
fn a_client_of_smc_r_alone_declines_an_accept_of_smc_d() {
    let (_, proposal) = propose(&client_host());
    let (_, accept) = accept(eligible(&server_host(), &proposal), None);
    let (awaits, _) = Pair::new(Version::V2).propose();
    let ClientStep::Decline(sent) = awaits.handle(&accept, |_, _| None) else { panic!() };
    assert_eq!(sent.reason, DeclineReason::NotOffered(SmcKind::SmcdV2));
    assert_eq!(sent.then, AfterDecline::FallBack);
    assert_eq!(sent.message[16..20], 0x0304_0000_u32.to_be_bytes());
}

// Shows: CLC-33, CLC-35, CLC-50, LG-61, ERR-6.
#[test]
fn subsequent_contact_on_what_the_client_lacks_is_declined() {
    for (version, length) in [(Version::V1, 28), (Version::V2, 44)] {
        let pair = Pair::new(version);
        let known = pair.run(None).client.terms;
        let (awaits, proposal) = pair.propose();
        let (confirming, accept) = pair.accept(&proposal, Some(known));
        let qpn: Qpn = pair.server_end().qpn;
        for (link, reason, sync) in [
            (KnownLink::NoGroup, DeclineReason::OutOfSync, true),
            (KnownLink::NoLink, DeclineReason::UnknownLink(qpn), false),
        ] {
            let step = awaits.clone().handle_with(&accept, |_, _| None, |_| link);
            let ClientStep::Decline(sent) = step else { panic!("{step:?}") };
            assert_eq!((sent.reason, sent.message.len()), (reason, length));
            assert_eq!(sent.message[7] & 0x08 != 0, sync);
            let step = confirming.clone().handle(&sent.message, |_| panic!());
            let ConfirmStepR::PeerDeclined(peer) = step else { panic!("{step:?}") };
            assert_eq!((peer.out_of_sync, peer.code), (sync, reason.code()));
        }
    }
}

// Shows: CLC-52, CLCV2-81.
#[test]
fn caller_of_the_client_declines_the_accept() {
    let pair = Pair::new(Version::V2);
    for (reason, code) in [
        (DeclineReason::NoRoute(gid_v4(SERVER)), 0x030e_0000),
        (DeclineReason::NotIndirect, 0x030f_0000),
        (DeclineReason::LinkNotReady, 0x0999_0002),
    ] {
        let (awaits, proposal) = pair.propose();
        let (confirming, accept) = pair.accept(&proposal, None);
        let sent = offered_r(awaits, &accept, KnownLink::NoGroup).decline(reason);
        let step = confirming.handle(&sent.message, |_| false);
        let ConfirmStepR::PeerDeclined(peer) = step else { panic!("{step:?}") };
        assert_eq!(peer.code.value(), code);
    }
}

/// The server's result for a Confirm with some bytes changed.
fn confirm_with(version: Version, first: bool, changes: &[(usize, u8)]) -> ConfirmStepR {
    let pair = Pair::new(version);
    let known = (!first).then(|| pair.run(None).client.terms);
    let (awaits, proposal) = pair.propose();
    let (confirming, accept) = pair.accept(&proposal, known);
    let link = known.map_or(KnownLink::NoGroup, KnownLink::Link);
    let accepted = offered_r(awaits, &accept, link);
    let (_, mut confirm) = accepted.confirm(pair.client_end(), &[]);
    for (at, value) in changes {
        confirm[*at] = *value;
    }
    confirming.handle(&confirm, |link| link.qpn == pair.client_end().qpn)
}

/// No data can have come over an unconfirmed link, so TCP takes over.
// Shows: CLC-29, CLC-58, CLCV2-60, ERR-10.
#[test]
fn first_contact_is_declined_late_and_becomes_tcp() {
    let agreed = Features::EMULATED_ISM;
    let release =
        |code| DeclineReason::Release { agreed: Release::V2_1, got: Release::from_code(code) };
    let reserved = |field, value| DeclineReason::ReservedValue { field, value };
    let table = [
        (Version::V2, 105, 0x22, release(2)),
        (Version::V2, 140, 16, DeclineReason::MaxConnections(16)),
        (Version::V2, 141, 1, DeclineReason::MaxLinks(1)),
        (Version::V2, 143, 0, DeclineReason::Features { agreed, got: Features::empty() }),
        (Version::V2, 50, 0x1f, reserved("MTU", 15)),
        (Version::V2, 50, 0x63, reserved("RMBE size", 6)),
        (Version::V1, 50, 0x10, reserved("MTU", 0)),
        (Version::V1, 50, 0xf3, reserved("RMBE size", 15)),
    ];
    for (version, at, value, reason) in table {
        let step = confirm_with(version, true, &[(at, value)]);
        let ConfirmStepR::Decline(sent) = step else { panic!("{reason}: {step:?}") };
        assert_eq!((sent.reason, sent.then), (reason, AfterDecline::FallBack));
        assert_eq!(sent.message[7] >> 4, version.number());
        if version == Version::V2 {
            assert_eq!(sent.message[24..40], [0; 16], "only the diagnosis");
        }
    }
}

/// The Decline of a subsequent contact would come too late (CLC-53).
// Shows: CLC-53, ERR-4.
#[test]
fn subsequent_contact_is_never_declined_after_accept() {
    for version in [Version::V1, Version::V2] {
        let step = confirm_with(version, false, &[(50, 0xf3)]);
        let reason = DeclineReason::ReservedValue { field: "RMBE size", value: 15 };
        assert_eq!(step, ConfirmStepR::Fail(HandshakeError::TooLate(reason)));
        // The MTU says nothing there.
        let step = confirm_with(version, false, &[(50, 0x10)]);
        assert!(matches!(step, ConfirmStepR::Established(_)), "{step:?}");
        let step = confirm_with(version, false, &[(40, 0x77)]);
        let ConfirmStepR::Fail(HandshakeError::ConfirmLink { qpn, .. }) = step else { panic!() };
        assert_eq!(qpn, Qpn::new(0x77));
    }
}

// Shows: CLC-64, CLCV2-55, CLCV2-56.
#[test]
fn confirm_from_elsewhere_breaks_the_connection() {
    for version in [Version::V1, Version::V2] {
        let step = confirm_with(version, true, &[(31, 9)]);
        assert!(matches!(step, ConfirmStepR::Fail(HandshakeError::ConfirmGid { .. })), "{step:?}");
        let step = confirm_with(version, true, &[(37, 9)]);
        let (proposed, got) = (mac(CLIENT), mac(9));
        assert_eq!(step, ConfirmStepR::Fail(HandshakeError::ConfirmMac { proposed, got }));
    }
    // On an indirect link the MAC is there for people.
    let step = confirm_with(Version::V2, true, &[(37, 9), (104, 0)]);
    assert!(matches!(step, ConfirmStepR::Established(_)), "{step:?}");
    let step = confirm_with(Version::V2, true, &[(64, b'M')]);
    assert!(matches!(step, ConfirmStepR::Fail(HandshakeError::ConfirmEid { .. })), "{step:?}");
    let step = confirm_with(Version::V2, true, &[(7, 0x20)]);
    let (accepted, got) = (true, false);
    assert_eq!(step, ConfirmStepR::Fail(HandshakeError::ConfirmContact { accepted, got }));
    let step = confirm_with(Version::V2, true, &[(45, 0)]);
    let (awaited, error) = (Awaited::Confirm, WireError::RmbIndexZero);
    assert_eq!(step, ConfirmStepR::Fail(HandshakeError::Malformed { awaited, error }));
}

/// Linux without SMC-Rv1 proposes no MAC, so there is none to compare with.
// Shows: CLCV2-55, CLCV2-96.
#[test]
fn a_mac_that_was_not_proposed_is_not_compared() {
    let pair = Pair::new(Version::V2);
    let (awaits, mut proposal) = pair.propose();
    proposal[8..16].fill(0);
    proposal[32..38].fill(0);
    let (confirming, accept) = pair.accept(&proposal, None);
    let (_, confirm) =
        offered_r(awaits, &accept, KnownLink::NoGroup).confirm(pair.client_end(), &[]);
    let step = confirming.handle(&confirm, |_| false);
    let ConfirmStepR::Established(server) = step else { panic!("{step:?}") };
    assert_eq!(server.peer_rnic.peer_id(), Default::default());
    assert_eq!(server.peer.peer_id, pair.client.peer_id);
}

// Shows: CLCV2-1.
#[test]
fn confirm_of_another_type_breaks_the_connection() {
    let (one, other) = (Pair::new(Version::V1), Pair::new(Version::V2));
    let d = run(&client_host(), &server_host(), Memory::default()).confirm;
    let (r1, r2) = (one.run(None).confirm, other.run(None).confirm);
    for (pair, wrong) in [(&one, [&r2, &d]), (&other, [&r1, &d])] {
        for confirm in wrong {
            let (confirming, _) = pair.accept(&pair.propose().1, None);
            let step = confirming.handle(confirm, |_| true);
            assert_eq!(step, ConfirmStepR::Fail(HandshakeError::ConfirmType));
        }
    }
}

// Shows: CLC-30.
#[test]
fn large_elements_are_a_matter_of_tolerance() {
    for (tolerance, taken) in [(Tolerance::STRICT, false), (Tolerance::LINUX, true)] {
        let mut pair = Pair::new(Version::V2);
        pair.client.tolerance = tolerance;
        let (awaits, proposal) = pair.propose();
        let (_, mut accept) = pair.accept(&proposal, None);
        accept[50] = 0xf3;
        let step = awaits.handle(&accept, |_, _| None);
        assert_eq!(matches!(step, ClientStep::OfferedR(_)), taken, "{step:?}");
    }
}

// Shows: ERR-7, ERR-8.
#[test]
fn a_silent_client_is_given_up_at_the_deadline() {
    let mut pair = Pair::new(Version::V2);
    pair.server.wait = Duration::from_secs(6);
    let (confirming, _) = pair.accept(&pair.propose().1, None);
    let end = Tick(NOW.0 + 6_000_000);
    assert_eq!(confirming.deadline(), end);
    assert_eq!(confirming.timed_out(Tick(end.0 - 1)), None);
    let awaited = Awaited::Confirm;
    assert_eq!(confirming.timed_out(end), Some(HandshakeError::TimedOut { awaited }));
}

/// Messages on TCP while LLC confirms the first link: a Decline, then data.
// Shows: ERR-2, ERR-46.
#[test]
fn a_decline_while_the_link_comes_up_leaves_the_data_alone() {
    let pair = Pair::new(Version::V2);
    let run = pair.run(None);
    let sent = run.server.decline(&pair.server, DeclineReason::LinkNotReady).unwrap();
    let mut stream = sent.message.clone();
    stream.extend(b"data");
    let mut reader = ClcReader::new(Awaited::Decline);
    let mut at = 0;
    while reader.message().is_none() {
        let space = reader.space();
        let n = space.len();
        space.copy_from_slice(&stream[at..at + n]);
        at += n;
        reader.filled(n).unwrap();
    }
    assert_eq!(&stream[at..], b"data");
    let mut reader = ClcReader::new(Awaited::Decline);
    reader.space().copy_from_slice(&run.confirm[..8]);
    assert!(matches!(reader.filled(8), Err(HandshakeError::OutOfTurn { .. })));
}

#[test]
fn limits_that_were_not_agreed_do_not_matter_before_v2_1() {
    let mut pair = Pair::new(Version::V2);
    pair.client.release = Release::V2_0;
    pair.server.limits = LinkLimits { max_conns: 99, max_links: 1 };
    let run = pair.run_unequal_limits();
    assert_eq!(run.0.limits, LinkLimits { max_conns: 255, max_links: 2 }, "the client's own");
    assert_eq!(run.1.limits, pair.server.limits, "the server's own");
}
