// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A server with an arbitrary client: the server accepts only its own devices out of the Proposal, and
//! every message sent can be parsed.
#![no_main]

use libfuzzer_sys::arbitrary::{self, Arbitrary};
use libfuzzer_sys::fuzz_target;
use smc_core::handshake::{
    AfterDecline, AwaitAccept, AwaitProposal, Choice, ClientStep, Config, ConfirmStep,
    ConfirmStepR, KnownLink, PeerRnic, Route, Selection, ServerStep, start_on,
};
use smc_core::time::Tick;
use smc_core::wire::clc::{Message, Version};
use smc_core::wire::ids::LinkId;
use smc_fuzz::{Bytes, Host, dmbe, end, read};

#[derive(Arbitrary, Debug)]
struct Input {
    server: Host,
    client: Host,
    proposal: Bytes,
    /// Index into the choices, modulo their number.
    choice: u8,
    /// The client is known: subsequent contact.
    known: bool,
    confirm: Bytes,
    piece: u8,
}

/// The server's state after a Proposal, with the client's state if there is one.
struct Hands {
    server: std::sync::Arc<Config>,
    client: Option<AwaitAccept>,
    selection: Selection,
    now: Tick,
}

fuzz_target!(|input: Input| {
    let now = Tick(0);
    let (server, client) = (input.server.config(2), input.client.config(1));
    let (route, client_route) = (input.server.route(2), input.client.route(1));
    let (honest_client, proposal) = match start_on(client, client_route.clone(), now) {
        Ok((client, proposal)) => (Some(client), proposal),
        Err(decline) => (None, decline.message),
    };
    let step = AwaitProposal::new(server.clone(), now);
    let bytes = input.proposal.clone().apply(proposal);
    let Ok(proposal) = read(step.reader(), &bytes, input.piece) else { return };
    let selection = match step.handle_on(&proposal, || route.clone()) {
        ServerStep::Eligible(selection) => selection,
        ServerStep::Decline(decline) => {
            assert_eq!(decline.then, AfterDecline::FallBack);
            assert!(matches!(Message::parse(&decline.message), Ok(Message::Decline(_))));
            return;
        }
        ServerStep::PeerDeclined(_) | ServerStep::Fail(_) => return,
    };
    let choices: Vec<Choice> = selection.choices().collect();
    assert!(!choices.is_empty() && choices.len() <= 16);
    for choice in &choices {
        assert!(server.kinds.has(choice.kind()), "{choice:?} is not in use");
    }
    let choice = choices[usize::from(input.choice) % choices.len()];
    let hands = Hands { server, client: honest_client, selection, now };
    match choice {
        Choice::D(version, candidate) => {
            let ours = |d: smc_core::handshake::IsmDevice| {
                d.chid == candidate.chid && d.gid == candidate.local
            };
            let mut devices = hands.server.devices.iter().copied().chain(route.ism);
            assert!(devices.any(ours), "{candidate:?} is not ours");
            smcd(input, hands, version, candidate);
        }
        Choice::R(rnic) => smcr(input, hands, rnic, [&route, &client_route]),
    }
});

fn smcd(input: Input, hands: Hands, version: Version, candidate: smc_core::handshake::Candidate) {
    let Hands { server, client, selection, now } = hands;
    let known = (input.known && version == Version::V2).then(|| selection.terms());
    if version == Version::V2 {
        let eid = selection.eid();
        assert!(server.ueids.contains(&eid) || server.seid == Some(eid));
    }
    let (step, accept) = selection.accept(candidate, known, dmbe(22), LinkId([1; 4]), now);
    let message = Message::parse(&accept);
    assert!(matches!(message, Ok(Message::AcceptD2(_) | Message::AcceptD1(_))));

    // The honest client may not see its own Proposal in the answer; then there is no honest Confirm.
    let offered = client.map(|client| client.handle(&accept, |_, _| known));
    let confirm = match offered {
        Some(ClientStep::Offered(accepted)) => accepted.confirm(dmbe(11), LinkId([2; 4])).1,
        _ => Vec::new(),
    };
    let Ok(confirm) = read(step.reader(), &input.confirm.apply(confirm), input.piece) else {
        return;
    };
    match step.handle(&confirm) {
        ConfirmStep::Established(established) => {
            assert_eq!(established.devices, candidate);
            assert_eq!(established.own, dmbe(22));
            assert_eq!(established.first_contact, known.is_none());
        }
        ConfirmStep::Decline(decline) => assert_eq!(decline.then, AfterDecline::Break),
        ConfirmStep::PeerDeclined(_) | ConfirmStep::Fail(_) => {}
    }
}

fn smcr(input: Input, hands: Hands, rnic: PeerRnic, [route, client_route]: [&Route; 2]) {
    let Hands { client, selection, now, .. } = hands;
    let version = rnic.version();
    let terms = selection.terms_r(version).expect("it is a choice");
    assert!(terms.version == version && terms.limits.in_range());
    let known = input.known.then_some(terms);
    let own = end(2, version, route);
    let (step, accept) = selection.accept_r(version, known, own, now).expect("it is a choice");
    let message = Message::parse(&accept);
    assert!(matches!(message, Ok(Message::AcceptR2(_) | Message::AcceptR1(_))));
    let link = known.map_or(KnownLink::NoLink, KnownLink::Link);
    let offered = client.map(|client| client.handle_with(&accept, |_, _| None, |_| link));
    let client_end = end(1, version, client_route);
    let confirm = match offered {
        Some(ClientStep::OfferedR(accepted)) => accepted.confirm(client_end, &[]).1,
        _ => Vec::new(),
    };
    let Ok(confirm) = read(step.reader(), &input.confirm.apply(confirm), input.piece) else {
        return;
    };
    match step.handle(&confirm, |link| link.qpn == client_end.qpn) {
        ConfirmStepR::Established(established) => {
            assert_eq!(established.first_contact, known.is_none());
            assert!(established.peer.index > 0);
            assert_eq!(established.own.rkey, own.rkey);
            match established.first_contact {
                true => assert!(established.mtu.bytes().is_ok()),
                false => assert_eq!(established.peer.qpn, client_end.qpn),
            }
        }
        ConfirmStepR::Decline(decline) => {
            assert!(known.is_none() && decline.then == AfterDecline::FallBack);
        }
        ConfirmStepR::PeerDeclined(_) | ConfirmStepR::Fail(_) => {}
    }
}
