// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Every end of a handshake without SMC: declines, stalls, messages out of turn.

use std::sync::Arc;
use std::time::Duration;

use smc_core::handshake::{
    AfterDecline, AwaitProposal, Awaited, ClcReader, ClientStep, Config, ConfirmStep, DeclineCode,
    DeclineReason, FallbackReason, HandshakeError, PeerDecline, SendDecline, ServerStep, SmcKind,
    Terms, Tolerance, late_decline, start,
};
use smc_core::time::Tick;
use smc_core::wire::clc::{
    Diagnosis, Kind, Message, OfferV1, OfferV2, SmcTypes, SmcdV1, SmcrLink, SmcrV1, SmcrV2, Subnet,
    TypeReasons, Version,
};
use smc_core::wire::ids::{
    Chid, DmbToken, Features, Gid, GidV1, LinkId, Mac, Mtu, PeerId, Psn, Qpn, Release, Rkey,
    SizeCode,
};

use crate::support::*;

const V2_1: Terms =
    Terms { release: Release::V2_1, features: Features::EMULATED_ISM, carriers: None };

/// The server's Decline of `proposal`, in the server's and in the client's view.
fn declined_by(server: &Config, proposal: &[u8]) -> (SendDecline, PeerDecline) {
    let ServerStep::Decline(sent) = receive(server, proposal) else { panic!() };
    assert_eq!(sent.then, AfterDecline::FallBack);
    let understood = client_understands(&sent.message);
    assert_eq!(understood.code, sent.reason.code());
    (sent, understood)
}

fn client_understands(decline: &[u8]) -> PeerDecline {
    let (client, _) = propose(&client_host());
    match client.handle(decline, |_, _| None) {
        ClientStep::PeerDeclined(peer) => peer,
        other => panic!("{other:?}"),
    }
}

#[test]
fn client_with_nothing_to_offer_declines_in_place_of_a_proposal() {
    let mut no_device = client_host();
    no_device.devices.clear();
    let mut no_eid = client_host();
    no_eid.ueids.clear();
    for (config, reason) in
        [(no_device, DeclineReason::NoDevice), (no_eid, DeclineReason::NoEidConfigured)]
    {
        let decline = start(Arc::new(config), NOW).unwrap_err();
        assert_eq!((decline.reason, decline.then), (reason, AfterDecline::FallBack));
        assert_eq!(decline.message.len(), 44);
        let ServerStep::PeerDeclined(peer) = receive(&server_host(), &decline.message) else {
            panic!()
        };
        assert_eq!(peer.code, reason.code());
    }
}

// Shows: CLC-23, CLCV2-33, EID-8, ERR-1.
#[test]
fn server_declines_a_proposal_it_cannot_serve() {
    let (_, proposal) = propose(&client_host());
    let mut other_eid = server_host();
    other_eid.ueids = vec![eid("ELSEWHERE")];
    let mut other_fabric = server_host();
    other_fabric.devices = vec![emulated(VIRTIO + 1, 2)];
    let mut no_device = server_host();
    no_device.devices.clear();
    for (server, reason, code) in [
        (other_eid, DeclineReason::NoCommonEid, 0x0303_0001),
        (other_fabric, DeclineReason::NoCommonChid, 0x0303_0007),
        (no_device, DeclineReason::NoIsmDevice, 0x0303_0003),
    ] {
        let (sent, understood) = declined_by(&server, &proposal);
        assert_eq!(sent.reason, reason);
        assert_eq!(sent.fallback(), FallbackReason::DeclinedHere(reason));
        assert_eq!(understood.code.value(), code);
        let reasons = TypeReasons { smcd_v2: Diagnosis(code), ..TypeReasons::default() };
        assert_eq!(understood.reasons, reasons, "zero for types that were not offered");
        assert!(!understood.out_of_sync);
    }
}

// Shows: CLC-23.
#[test]
fn caller_of_the_server_declines_after_the_selection() {
    for reason in [
        DeclineReason::Unreachable,
        DeclineReason::NoDmb,
        DeclineReason::NoMemory,
        DeclineReason::Policy,
    ] {
        let (_, proposal) = propose(&client_host());
        let sent = eligible(&server_host(), &proposal).decline(reason);
        assert_eq!((sent.reason, sent.then), (reason, AfterDecline::FallBack));
        let understood = client_understands(&sent.message);
        assert_eq!(understood.code, reason.code());
        assert_eq!(understood.reasons.smcd_v2.0, reason.code().value());
    }
}

// Shows: CLC-52, CLCV2-81.
#[test]
fn caller_of_the_client_declines_the_accept() {
    let (client, proposal) = propose(&client_host());
    let (server, accept) = accept(eligible(&server_host(), &proposal), None);
    let sent = offered(client, &accept, None).decline(DeclineReason::NoMemory);
    let ConfirmStep::PeerDeclined(peer) = server.handle(&sent.message) else { panic!() };
    assert_eq!(peer.code, DeclineCode::NoMemory);
    assert_eq!(peer.reasons, TypeReasons::default(), "a later Decline has the diagnosis only");
    assert!(!peer.out_of_sync);
}

// Shows: CLC-35, CLC-50, CLCV2-83, ERR-6.
#[test]
fn client_that_has_forgotten_the_server_is_out_of_sync() {
    let (client, proposal) = propose(&client_host());
    let (server, accept) = accept(eligible(&server_host(), &proposal), Some(V2_1));
    let ClientStep::Decline(sent) = client.handle(&accept, |_, _| None) else { panic!() };
    assert_eq!((sent.reason, sent.then), (DeclineReason::OutOfSync, AfterDecline::FallBack));
    assert_eq!(sent.message[7], 0x28);
    let ConfirmStep::PeerDeclined(peer) = server.handle(&sent.message) else { panic!() };
    assert!(peer.out_of_sync);
    assert_eq!(peer.code, DeclineCode::OutOfSync);
}

#[test]
fn client_is_asked_for_the_peer_named_in_accept_and_only_without_the_flag() {
    let (client, proposal) = propose(&client_host());
    let (_, later) = accept(eligible(&server_host(), &proposal), Some(V2_1));
    let mut asked = None;
    client.clone().handle(&later, |chid, gid| {
        asked = Some((chid, gid));
        None
    });
    assert_eq!(asked, Some((Chid(VIRTIO), Gid([2; 16]))));
    let (_, first) = accept(eligible(&server_host(), &proposal), None);
    let step = client.handle(&first, |_, _| panic!("first contact asks nothing"));
    assert!(matches!(step, ClientStep::Offered(_)));
}

// Shows: CLC-53, CLC-63.
#[test]
fn late_decline_of_the_server_breaks_the_connection() {
    let (client, proposal) = propose(&client_host());
    let (server, accept) = accept(eligible(&server_host(), &proposal), None);
    let (_, confirm) = offered(client, &accept, None).confirm(client_dmbe(), CLIENT_LINK);
    let cases: [(usize, u8, DeclineReason); 3] = [
        (75, 0x22, DeclineReason::Release { agreed: Release::V2_1, got: Release::from_code(2) }),
        (
            113,
            0,
            DeclineReason::Features { agreed: Features::EMULATED_ISM, got: Features::empty() },
        ),
        (25, 0xf0, DeclineReason::ReservedValue { field: "DMBE size", value: 15 }),
    ];
    for (at, value, reason) in cases {
        let mut wrong = confirm.clone();
        wrong[at] = value;
        let ConfirmStep::Decline(sent) = server.clone().handle(&wrong) else { panic!("{reason}") };
        assert_eq!((sent.reason, sent.then), (reason, AfterDecline::Break));
        assert_eq!(late_decline(&sent.message).unwrap().code, reason.code());
    }
    assert_eq!(late_decline(b"application data"), None);
    assert_eq!(late_decline(&confirm), None);
}

// Shows: CLC-29, ERR-10.
#[test]
fn reserved_size_in_accept_is_declined_and_not_an_error() {
    let (client, proposal) = propose(&client_host());
    let (_, mut accept) = accept(eligible(&server_host(), &proposal), None);
    accept[25] = 0x70;
    let ClientStep::Decline(sent) = client.handle(&accept, |_, _| None) else { panic!() };
    assert_eq!(sent.reason, DeclineReason::ReservedValue { field: "DMBE size", value: 7 });
    assert_eq!(sent.then, AfterDecline::FallBack);
}

// Shows: CLC-30.
#[test]
fn largest_size_is_a_matter_of_tolerance() {
    for (tolerance, taken) in [(Tolerance::STRICT, false), (Tolerance::LINUX, true)] {
        let mut config = client_host();
        config.tolerance = tolerance;
        let (client, proposal) = propose(&config);
        let (_, mut accept) = accept(eligible(&server_host(), &proposal), None);
        accept[25] = 0x60;
        let step = client.handle(&accept, |_, _| None);
        assert_eq!(matches!(step, ClientStep::Offered(_)), taken, "{step:?}");
    }
}

fn smcr_link() -> SmcrLink {
    SmcrLink {
        peer_id: PeerId([2; 8]),
        gid: Gid([2; 16]),
        mac: Mac([2; 6]),
        qpn: Qpn::new(17),
        rkey: Rkey(5),
        index: 1,
        token: 1,
        size: SizeCode::MIN,
        mtu: Mtu::B1024,
        address: 0x1000,
        psn: Psn::new(1),
    }
}

/// One Accept of each type not offered by a client of SMC-Dv2.
fn other_accepts() -> [(SmcKind, Message); 3] {
    let smcd_v1 = SmcdV1 {
        first_contact: true,
        gid: GidV1([2; 8]),
        token: DmbToken(1),
        index: 0,
        size: SizeCode::MIN,
        link_id: LinkId([0; 4]),
    };
    let smcr_v1 = SmcrV1 { first_contact: true, link: smcr_link() };
    let smcr_v2 =
        SmcrV2 { reason_saved: false, link: smcr_link(), eid: eid("LAB"), first_contact: None };
    [
        (SmcKind::SmcdV1, Message::AcceptD1(smcd_v1)),
        (SmcKind::SmcrV1, Message::AcceptR1(smcr_v1)),
        (SmcKind::SmcrV2, Message::AcceptR2(smcr_v2)),
    ]
}

// Shows: CLC-6, CLCV2-1, CLCV2-89.
#[test]
fn accept_of_a_type_that_was_not_offered_is_declined() {
    for (kind, accept) in other_accepts() {
        let (client, _) = propose(&client_host());
        let ClientStep::Decline(sent) = client.handle(&accept.emit(), |_, _| None) else {
            panic!("{kind}")
        };
        assert_eq!(sent.reason, DeclineReason::NotOffered(kind));
        assert_eq!(sent.reason.code(), DeclineCode::ModeUnsupported);
    }
}

// Shows: CLCV2-1.
#[test]
fn confirm_of_another_type_breaks_the_connection() {
    for (_, accept) in other_accepts() {
        let confirm = match accept {
            Message::AcceptD1(body) => Message::ConfirmD1(body),
            Message::AcceptR1(body) => Message::ConfirmR1(body),
            Message::AcceptR2(body) => Message::ConfirmR2(body),
            other => other,
        };
        let (_, proposal) = propose(&client_host());
        let (server, _) = crate::support::accept(eligible(&server_host(), &proposal), None);
        let step = server.handle(&confirm.emit());
        assert_eq!(step, ConfirmStep::Fail(HandshakeError::ConfirmType));
    }
}

/// A Proposal of the client's host with other types offered instead.
fn proposal_of(version: u8, v1: Option<SmcTypes>, v2: Option<SmcTypes>) -> Vec<u8> {
    let Ok(Message::Proposal(mut proposal)) = Message::parse(&propose(&client_host()).1) else {
        panic!()
    };
    let subnet = Subnet::V4 { network: [10, 0, 0, 0], bits: 24 };
    proposal.version = if version == 1 { Version::V1 } else { Version::V2 };
    proposal.v1 = v1.map(|types| OfferV1 { types, subnet });
    proposal.v2 = match (proposal.v2, v2) {
        (Some(offer), Some(types)) => Some(OfferV2 { types, ..offer }),
        _ => None,
    };
    Message::Proposal(proposal).emit()
}

// Shows: CLC-6.
#[test]
fn version_1_clients_are_declined_in_version_1() {
    for (types, code) in
        [(SmcTypes::R, 0x0303_0002), (SmcTypes::D, 0x0303_0001), (SmcTypes::Both, 0x0303_0001)]
    {
        let proposal = proposal_of(1, Some(types), None);
        let (sent, understood) = declined_by(&server_host(), &proposal);
        assert_eq!(understood.code.value(), code);
        assert_eq!((sent.message.len(), sent.message[7]), (28, 0x10));
    }
}

// Shows: CLCV2-79.
#[test]
fn offers_of_other_types_are_declined_with_a_reason_for_each() {
    let (v1_only, v2_r, nothing) = (
        proposal_of(2, Some(SmcTypes::Both), None),
        proposal_of(2, Some(SmcTypes::R), Some(SmcTypes::R)),
        proposal_of(2, None, None),
    );
    let (sent, understood) = declined_by(&server_host(), &v1_only);
    assert_eq!(sent.reason, DeclineReason::NotConfigured(SmcKind::SmcdV1));
    assert_eq!((sent.message.len(), sent.message[7]), (44, 0x20));
    assert_eq!(understood.reasons.smcd_v1.0, 0x0303_0001);
    assert_eq!(understood.reasons.smcr_v1.0, 0x0303_0002);
    assert_eq!(understood.reasons.smcd_v2, Diagnosis::NONE);
    let (sent, understood) = declined_by(&server_host(), &v2_r);
    assert_eq!(sent.reason, DeclineReason::NotConfigured(SmcKind::SmcrV2));
    assert_eq!(understood.reasons.smcr_v2.0, 0x0303_0002);
    let (sent, _) = declined_by(&server_host(), &nothing);
    assert_eq!(sent.reason, DeclineReason::NothingOffered);
}

// Shows: CLCV2-32.
#[test]
fn any_other_offer_beside_smc_dv2_does_not_stand_in_its_way() {
    for v1 in [None, Some(SmcTypes::R), Some(SmcTypes::D), Some(SmcTypes::Both)] {
        let proposal = proposal_of(2, v1, Some(SmcTypes::Both));
        let selection = eligible(&server_host(), &proposal);
        assert_eq!(
            selection.rejected().smcr_v2,
            Some(DeclineReason::NotConfigured(SmcKind::SmcrV2))
        );
        accept(selection, None);
    }
}

// Shows: CLCV2-64.
#[test]
fn accept_with_a_chid_or_eid_that_was_not_offered_breaks_the_connection() {
    let (client, proposal) = propose(&client_host());
    let (_, accept) = accept(eligible(&server_host(), &proposal), None);
    let mut chid = accept.clone();
    chid[33] = 0x02;
    let step = client.clone().handle(&chid, |_, _| None);
    assert_eq!(step, ClientStep::Fail(HandshakeError::ChidNotOffered(Chid(0xff02))));
    let mut name = accept;
    name[34] = b'M';
    let step = client.handle(&name, |_, _| None);
    assert_eq!(step, ClientStep::Fail(HandshakeError::EidNotOffered(eid("MAB"))));
}

#[test]
fn a_silent_peer_is_given_up_at_the_deadline_and_not_before() {
    let mut client_config = client_host();
    client_config.wait = Duration::from_secs(2);
    let mut server_config = server_host();
    server_config.wait = Duration::from_secs(6);
    let server = AwaitProposal::new(Arc::new(server_config.clone()), NOW);
    assert_eq!(server.deadline(), Tick(7_000_000));
    assert_eq!(server.timed_out(Tick(6_999_999)), None);
    let awaited = Awaited::Proposal;
    assert_eq!(server.timed_out(Tick(7_000_000)), Some(HandshakeError::TimedOut { awaited }));

    let (client, proposal) = propose(&client_config);
    assert_eq!(client.deadline(), Tick(3_000_000));
    assert_eq!(client.timed_out(Tick(2_999_999)), None);
    let awaited = Awaited::Accept;
    let error = client.timed_out(Tick(3_000_000)).unwrap();
    assert_eq!(error, HandshakeError::TimedOut { awaited });
    assert!(error.is_timeout());

    let later = Tick(5_000_000);
    let selection = eligible(&server_config, &proposal);
    let first = selection.candidates()[0];
    let (server, _) = selection.accept(first, None, server_dmbe(), SERVER_LINK, later);
    assert_eq!(server.deadline(), Tick(11_000_000), "each message has its own time");
    assert_eq!(server.timed_out(Tick(10_999_999)), None);
    let awaited = Awaited::Confirm;
    assert_eq!(server.timed_out(Tick(11_000_000)), Some(HandshakeError::TimedOut { awaited }));
}

#[test]
fn messages_out_of_turn_break_the_connection() {
    let (client, proposal) = propose(&client_host());
    let (server, accept) = accept(eligible(&server_host(), &proposal), None);
    let (_, confirm) = offered(client.clone(), &accept, None).confirm(client_dmbe(), CLIENT_LINK);
    for (bytes, got) in [(&accept, Kind::Accept), (&confirm, Kind::Confirm)] {
        let error = HandshakeError::OutOfTurn { awaited: Awaited::Proposal, got };
        assert_eq!(receive(&server_host(), bytes), ServerStep::Fail(error));
    }
    for (bytes, got) in [(&proposal, Kind::Proposal), (&confirm, Kind::Confirm)] {
        let error = HandshakeError::OutOfTurn { awaited: Awaited::Accept, got };
        assert_eq!(client.clone().handle(bytes, |_, _| None), ClientStep::Fail(error));
    }
    for (bytes, got) in [(&proposal, Kind::Proposal), (&accept, Kind::Accept)] {
        let error = HandshakeError::OutOfTurn { awaited: Awaited::Confirm, got };
        assert_eq!(server.clone().handle(bytes), ConfirmStep::Fail(error));
    }
}

// Shows: CLC-56.
#[test]
fn data_behind_a_decline_stays_in_the_stream() {
    let (_, proposal) = propose(&client_host());
    let mut stream = eligible(&server_host(), &proposal).decline(DeclineReason::NoDmb).message;
    stream.extend(b"\xe2\xd4\xc3\xd9 looks like CLC and is data");
    let mut reader = ClcReader::new(Awaited::Accept);
    let mut at = 0;
    while reader.message().is_none() {
        let space = reader.space();
        let n = space.len().min(3);
        space[..n].copy_from_slice(&stream[at..at + n]);
        at += n;
        reader.filled(n).unwrap();
    }
    assert_eq!(client_understands(reader.message().unwrap()).code, DeclineCode::TooManyDmbs);
    assert!(stream[at..].ends_with(b"is data"));
    assert_eq!(at, 44);
}
