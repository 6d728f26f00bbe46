// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A client with an arbitrary server: the client never uses a device missing from its own Proposal.
#![no_main]

use libfuzzer_sys::arbitrary::{self, Arbitrary};
use libfuzzer_sys::fuzz_target;
use smc_core::handshake::{
    AfterDecline, AwaitProposal, Choice, ClientStep, Kinds, KnownLink, ServerStep, Terms, TermsR,
    late_decline, start_on,
};
use smc_core::time::Tick;
use smc_core::wire::clc::{Message, Version};
use smc_core::wire::ids::{Eid, Features, LinkId, LinkLimits, Release};
use smc_fuzz::{Bytes, Host, dmbe, end, read};

#[derive(Arbitrary, Debug)]
struct Input {
    client: Host,
    server: Host,
    /// Whether the server has terms of the client from an earlier contact; the next field is the
    /// reverse.
    server_knows: bool,
    client_knows: bool,
    /// Index into the server's choices, modulo their number.
    choice: u8,
    accept: Bytes,
    piece: u8,
    late: Vec<u8>,
}

fuzz_target!(|input: Input| {
    let now = Tick(0);
    let (client, server) = (input.client.config(1), input.server.config(2));
    let (route, server_route) = (input.client.route(1), input.server.route(2));
    let Ok((step, proposal)) = start_on(client.clone(), route.clone(), now) else { return };
    assert!(matches!(Message::parse(&proposal), Ok(Message::Proposal(_))));
    let terms = Terms { release: Release::V2_1, features: Features::EMULATED_ISM, carriers: None };
    let limits = LinkLimits { max_conns: 64, max_links: 2 };
    let terms_r =
        |version| TermsR { version, release: Release::V2_1, features: Features::empty(), limits, carriers: None };
    let server = AwaitProposal::new(server, now);
    let honest = match server.handle_on(&proposal, || server_route.clone()) {
        ServerStep::Eligible(selection) => {
            let choices: Vec<Choice> = selection.choices().collect();
            match choices[usize::from(input.choice) % choices.len()] {
                Choice::D(_, candidate) => {
                    let known = input.server_knows.then_some(terms);
                    selection.accept(candidate, known, dmbe(22), LinkId([1; 4]), now).1
                }
                Choice::R(rnic) => {
                    let version = rnic.version();
                    let known = input.server_knows.then(|| terms_r(version));
                    let own = end(2, version, &server_route);
                    selection.accept_r(version, known, own, now).expect("it is a choice").1
                }
            }
        }
        ServerStep::Decline(decline) => decline.message,
        other => panic!("our own Proposal led to {other:?}"),
    };
    let Ok(accept) = read(step.reader(), &input.accept.apply(honest), input.piece) else { return };
    let _ = late_decline(&input.late);
    let link = |peer: &smc_core::handshake::PeerLink| match input.client_knows {
        true => KnownLink::Link(terms_r(peer.rnic.version())),
        false => KnownLink::NoGroup,
    };
    match step.handle_with(&accept, |_, _| input.client_knows.then_some(terms), link) {
        ClientStep::Offered(accepted) => {
            let devices = accepted.devices();
            let ours = |d: smc_core::handshake::IsmDevice| {
                d.chid == devices.chid && d.gid == devices.local
            };
            let mut offered = client.devices.iter().copied().chain(route.ism);
            assert!(offered.any(ours), "{devices:?} was not offered");
            let eid = accepted.eid();
            match accepted.version() {
                Version::V1 => assert!(client.kinds.contains(Kinds::SMCD_V1) && eid == Eid::ZERO),
                Version::V2 => {
                    assert!(client.ueids.contains(&eid) || client.seid == Some(eid));
                }
            }
            let (established, confirm) = accepted.confirm(dmbe(11), LinkId([2; 4]));
            assert_eq!(established.devices, devices);
            let confirm = Message::parse(&confirm);
            assert!(matches!(confirm, Ok(Message::ConfirmD2(_) | Message::ConfirmD1(_))));
        }
        ClientStep::OfferedR(accepted) => {
            let version = accepted.version();
            let kind = if version == Version::V1 { Kinds::SMCR_V1 } else { Kinds::SMCR_V2 };
            assert!(client.kinds.contains(kind) && route.rnic.is_some(), "was not offered");
            assert!(accepted.eid().is_none_or(|eid| client.ueids.contains(&eid)));
            assert!(accepted.terms().limits.in_range() && accepted.peer().index > 0);
            let first = accepted.first_contact();
            let (established, confirm) = accepted.confirm(end(1, version, &route), &[]);
            assert_eq!(established.first_contact, first);
            assert!(!first || established.mtu.bytes().is_ok());
            let confirm = Message::parse(&confirm);
            assert!(matches!(confirm, Ok(Message::ConfirmR2(_) | Message::ConfirmR1(_))));
        }
        ClientStep::Decline(decline) => {
            assert_eq!(decline.then, AfterDecline::FallBack);
            assert!(matches!(Message::parse(&decline.message), Ok(Message::Decline(_))));
        }
        ClientStep::PeerDeclined(_) | ClientStep::Fail(_) => {}
    }
});
