// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! SMC-D of version 1: platform ISM devices in one IP subnet.

use std::sync::Arc;

use smc_core::handshake::{
    AwaitAccept, AwaitConfirm, Choice, ClientStep, Config, ConfirmStep, DeclineReason,
    HandshakeError, Kinds, Route, ServerStep, SmcKind, Terms, start_on,
};
use smc_core::wire::clc::{Message, Version};
use smc_core::wire::ids::{Chid, Eid, Gid, GidV1};

use crate::smcr_support::*;
use crate::support::*;

fn host_d1(n: u8) -> Config {
    let mut config = host(n);
    config.devices.clear();
    config.kinds = Kinds::SMCD_V1;
    config
}

fn route_d1(n: u8) -> Route {
    Route { ism: Some(platform(5, n)), rnic: None, ..route_v4(n) }
}

fn accept_d1(server: &Config, proposal: &[u8], known: Option<Terms>) -> (AwaitConfirm, Vec<u8>) {
    let selection = eligible_on(server, &route_d1(2), proposal);
    let candidate = selection.candidates()[0];
    assert_eq!(selection.choices().next(), Some(Choice::D(Version::V1, candidate)));
    assert_eq!((candidate.chid, candidate.local), (Chid(5), platform(5, 2).gid));
    selection.accept(candidate, known, server_dmbe(), SERVER_LINK, NOW)
}

// Shows: CLC-59, CLC-61, CLC-62.
#[test]
fn first_and_subsequent_contact() {
    for known in [None, Some(Terms::V1)] {
        let (awaits_accept, proposal) = propose_on(&host_d1(1), &route_d1(1));
        assert_eq!((proposal.len(), proposal[7]), (92, 0x11), "the form of version 1");
        assert_eq!(proposal[40..48], [1; 8], "the associated ISM GID");
        let (awaits_confirm, accept) = accept_d1(&host_d1(2), &proposal, known);
        assert_eq!(accept.len(), 48);
        assert_eq!(accept[7], if known.is_none() { 0x19 } else { 0x11 });
        let accepted = offered(awaits_accept, &accept, known);
        assert_eq!((accepted.version(), accepted.eid()), (Version::V1, Eid::ZERO));
        assert_eq!(accepted.peer_host(), None);
        let (client, confirm) = accepted.confirm(client_dmbe(), CLIENT_LINK);
        assert_eq!(confirm[7], accept[7]);
        let ConfirmStep::Established(server) = awaits_confirm.handle(&confirm) else { panic!() };
        assert_eq!((client.version, server.version), (Version::V1, Version::V1));
        assert_eq!((client.own, client.peer), (server.peer, server.own));
        assert_eq!(client.devices.peer, server.devices.local);
        assert_eq!(client.first_contact, known.is_none());
        assert_eq!(client.terms, Terms::V1);
        assert_eq!((client.own_link, client.peer_link), (server.peer_link, server.own_link));
        assert_eq!((client.peer_host, server.peer_host), (None, None));
    }
}

/// Linux sends version 2 with the base of 80 bytes even if only version 1 is offered.
// Shows: CLC-62.
#[test]
fn the_form_of_version_2_is_served_as_well() {
    let mut client = host_d1(1);
    client.kinds |= Kinds::SMCD_V2;
    let (awaits_accept, proposal) = propose_on(&client, &route_d1(1));
    assert_eq!((proposal.len(), proposal[7]), (92, 0x29));
    assert_eq!((&proposal[38..40], &proposal[48..52]), (&[0, 40][..], &[0; 4][..]));
    let (_, accept) = accept_d1(&host_d1(2), &proposal, None);
    offered(awaits_accept, &accept, None);
}

/// The associated device has a field of its own for both versions.
// Shows: CLC-61, CLCV2-11.
#[test]
fn one_platform_device_serves_both_versions() {
    let both = |n| {
        let mut config = host(n);
        config.devices = vec![emulated(VIRTIO, n), platform(5, n)];
        config.kinds = Kinds::SMCD_V1 | Kinds::SMCD_V2;
        config
    };
    let (awaits_accept, proposal) = propose_on(&both(1), &route_d1(1));
    assert_eq!(proposal[7], 0x25);
    assert_eq!((&proposal[40..48], &proposal[48..50]), (&[1; 8][..], &[0, 5][..]));
    assert_eq!(proposal[89], 2, "the emulated device alone is listed");
    let selection = eligible_on(&both(2), &route_d1(2), &proposal);
    let choices: Vec<Choice> = selection.choices().collect();
    let versions: Vec<SmcKind> = choices.iter().map(Choice::kind).collect();
    assert_eq!(versions, [SmcKind::SmcdV2; 2], "no pair twice");
    assert_eq!(selection.candidates()[0].chid, Chid(5), "the associated device comes first");
    let (_, accept) = accept(selection, None);
    let accepted = offered(awaits_accept, &accept, None);
    assert_eq!((accepted.version(), accepted.devices().chid), (Version::V2, Chid(5)));

    // Without a common EID the same pair is one of version 1.
    let mut foreign = both(2);
    foreign.ueids = vec![eid("OTHER")];
    let selection = eligible_on(&foreign, &route_d1(2), &proposal);
    assert_eq!(selection.rejected().smcd_v2, Some(DeclineReason::NoCommonEid));
    assert_eq!(selection.eid(), Eid::ZERO);
    let (_, accept) = crate::support::accept(selection, None);
    assert_eq!((accept.len(), accept[7]), (48, 0x19));
}

fn declined(server: &Config, route: &Route, proposal: &[u8]) -> DeclineReason {
    match receive_on(server, route, proposal) {
        ServerStep::Decline(sent) => {
            assert_eq!((sent.message.len(), sent.message[7]), (28, 0x10));
            sent.reason
        }
        other => panic!("{other:?}"),
    }
}

// Shows: CLC-60, SEC-2.
#[test]
fn server_declines_what_is_not_in_its_subnet_or_on_its_fabric() {
    let (_, proposal) = propose_on(&host_d1(1), &route_d1(1));
    let server = host_d1(2);
    let elsewhere = Route { subnets: vec![subnet_v4(1)], ..route_d1(2) };
    assert_eq!(declined(&server, &elsewhere, &proposal), DeclineReason::DifferentSubnet);
    let bare = Route { ism: None, ..route_d1(2) };
    assert_eq!(declined(&server, &bare, &proposal), DeclineReason::NoAssociatedIsm);
    let virt = Route { ism: Some(emulated(VIRTIO, 2)), ..route_d1(2) };
    assert_eq!(declined(&server, &virt, &proposal), DeclineReason::NoAssociatedIsm);
    let other = SmcKind::SmcdV1;
    assert_eq!(declined(&host(2), &route_d1(2), &proposal), DeclineReason::NotConfigured(other));
    let mut nobody = proposal.clone();
    nobody[40..48].fill(0);
    assert_eq!(declined(&server, &route_d1(2), &nobody), DeclineReason::Unreachable);
}

// Shows: CLC-60.
#[test]
fn the_fabric_is_compared_where_it_is_told() {
    let mut client = host_d1(1);
    client.kinds |= Kinds::SMCD_V2;
    client.devices = vec![platform(5, 1)];
    let (_, proposal) = propose_on(&client, &route_d1(1));
    let other = Route { ism: Some(platform(6, 2)), ..route_d1(2) };
    let ServerStep::Decline(sent) = receive_on(&host_d1(2), &other, &proposal) else { panic!() };
    let code = DeclineReason::NoCommonChid.code().value();
    assert_eq!(sent.message[28..32], code.to_be_bytes(), "the reason for SMC-Dv1");
}

#[test]
fn client_without_what_it_takes_offers_nothing() {
    for route in [
        Route { ism: None, ..route_d1(1) },
        Route { ism: Some(emulated(VIRTIO, 1)), ..route_d1(1) },
        Route { subnets: Vec::new(), ..route_d1(1) },
    ] {
        let decline = start_on(Arc::new(host_d1(1)), route, NOW).unwrap_err();
        assert_eq!(decline.reason, DeclineReason::NoDevice);
        assert_eq!((decline.message.len(), decline.message[7]), (28, 0x10));
    }
}

fn handle(awaits: &AwaitAccept, accept: &[u8]) -> ClientStep {
    awaits.clone().handle(accept, |_, _| None)
}

#[test]
fn client_declines_an_accept_of_a_stranger_nobody_or_another_type() {
    let (awaits, proposal) = propose_on(&host_d1(1), &route_d1(1));
    let (_, later) = accept_d1(&host_d1(2), &proposal, Some(Terms::V1));
    let ClientStep::Decline(sent) = handle(&awaits, &later) else { panic!() };
    assert_eq!(sent.reason, DeclineReason::OutOfSync);
    assert_eq!((sent.message.len(), sent.message[7]), (28, 0x18));
    let (_, first) = accept_d1(&host_d1(2), &proposal, None);
    let mut nobody = first.clone();
    nobody[8..16].fill(0);
    let ClientStep::Decline(sent) = handle(&awaits, &nobody) else { panic!() };
    assert_eq!(sent.reason, DeclineReason::Unreachable);
    let (d2, _) = propose(&host(1));
    let ClientStep::Decline(sent) = handle(&d2, &first) else { panic!() };
    assert_eq!(sent.reason, DeclineReason::NotOffered(SmcKind::SmcdV1));
    assert_eq!(sent.message[7], 0x10, "of the version of Accept");
}

#[test]
fn confirm_comes_from_the_proposed_gid_and_is_of_version_1() {
    let (awaits_accept, proposal) = propose_on(&host_d1(1), &route_d1(1));
    let (awaits, accept) = accept_d1(&host_d1(2), &proposal, None);
    let (_, confirm) = offered(awaits_accept, &accept, None).confirm(client_dmbe(), CLIENT_LINK);
    let mut other = confirm.clone();
    other[15] = 9;
    let got = Gid::from_parts(GidV1([1, 1, 1, 1, 1, 1, 1, 9]), GidV1::NONE);
    let error = HandshakeError::ConfirmGid { proposed: platform(5, 1).gid, got };
    assert_eq!(awaits.clone().handle(&other), ConfirmStep::Fail(error));
    let mut flag = confirm.clone();
    flag[7] &= !0x08;
    assert!(matches!(awaits.clone().handle(&flag), ConfirmStep::Established(_)));
    let run = run(&host(1), &host(2), Memory::default());
    assert!(matches!(Message::parse(&run.confirm), Ok(Message::ConfirmD2(_))));
    let step = awaits.handle(&run.confirm);
    assert_eq!(step, ConfirmStep::Fail(HandshakeError::ConfirmType));
}
