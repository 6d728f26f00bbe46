// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Options for records on TCP: offered, answered and repeated, or not there at all.

use std::num::NonZeroU16;
use std::sync::Arc;

use smc_core::handshake::{
    Candidate, ClientStep, Config, ConfirmStep, ConfirmStepR, DeclineReason, Established,
    KnownLink, Route, ServerStep, start_claiming,
};
use smc_core::wire::clc::{CarrierFeatures, CarrierOptions, Version};
use smc_core::wire::ids::Release;

use crate::smcr_support::{Pair, offered_r};
use crate::support::*;

const RETURNS: CarrierOptions = CarrierOptions::new(CarrierFeatures::RETURN);
const STAYS: CarrierOptions = CarrierOptions::new(CarrierFeatures::empty());

/// Where the options are in Proposal, and in Accept and Confirm of SMC-D and SMC-R.
const PROPOSAL: std::ops::Range<usize> = 52..60;
const D: std::ops::Range<usize> = 114..118;
const R: std::ops::Range<usize> = 144..148;

fn with(mut config: Config, carriers: CarrierOptions) -> Config {
    config.carriers = Some(carriers);
    config
}

// Shows: CLCV2-13, CLCV2-16, CLCV2-17.
#[test]
fn both_ends_of_smc_d_agree_at_first_contact_and_keep_it() {
    let (client, server) = (with(client_host(), RETURNS), with(server_host(), RETURNS));
    let (_, proposal) = propose(&client);
    assert_eq!(proposal[PROPOSAL], [0x56, 0x49, 0x53, 2, 0, 1, 0, 0]);
    let first = run(&client, &server, Memory::default());
    for message in [&first.accept, &first.confirm] {
        assert_eq!(message[D], [2, 0, 0, 1]);
    }
    assert_eq!(first.client.terms.carriers, Some(RETURNS));
    let memory = Memory { client: Some(first.client.terms), server: Some(first.server.terms) };
    let later = run(&client, &server, memory);
    assert_eq!(later.accept.len(), 78, "no extension");
    assert_eq!(later.server.terms.carriers, Some(RETURNS));
}

// Shows: CLCV2-13, CLCV2-16, CLCV2-17.
#[test]
fn both_ends_of_smc_r_agree_on_what_both_can_do() {
    let mut pair = Pair::new(Version::V2);
    pair.client.carriers = Some(RETURNS);
    pair.server.carriers = Some(STAYS);
    let first = pair.run(None);
    assert_eq!(first.proposal[PROPOSAL], [0x56, 0x49, 0x53, 2, 0, 1, 0, 0]);
    for message in [&first.accept, &first.confirm] {
        assert_eq!(message[R], [2, 0, 0, 0]);
    }
    assert_eq!(first.client.terms.carriers, Some(STAYS));
    let later = pair.run(Some(first.client.terms));
    assert_eq!((later.accept.len(), later.server.terms.carriers), (108, Some(STAYS)));
}

// Shows: CLCV2-15, CLCV2-40, CLCV2-41.
#[test]
fn a_peer_without_options_sees_zeros_and_sends_them() {
    let (speaks, silent) = (with(client_host(), RETURNS), client_host());
    let (_, proposal) = propose(&silent);
    assert_eq!(proposal[PROPOSAL], [0; 8]);
    for (client, server) in [
        (&speaks, server_host()),
        (&silent, with(server_host(), RETURNS)),
        (&silent, server_host()),
    ] {
        let run = run(client, &server, Memory::default());
        assert_eq!((&run.accept[D], &run.confirm[D]), (&[0; 4][..], &[0; 4][..]));
        assert_eq!(run.client.terms.carriers, None);
    }
}

// Shows: CLCV2-13.
#[test]
fn release_v2_0_has_no_options() {
    let (client, server) = (with(client_host(), RETURNS), with(server_host(), RETURNS));
    for (old_client, old_server) in [(true, false), (false, true)] {
        let (mut client, mut server) = (client.clone(), server.clone());
        for (config, old) in [(&mut client, old_client), (&mut server, old_server)] {
            if old {
                config.release = Release::V2_0;
                config.devices = vec![platform(0x0111, config.peer_id.0[0])];
            } else {
                config.devices.push(platform(0x0111, config.peer_id.0[0]));
            }
        }
        let run = run(&client, &server, Memory::default());
        assert_eq!(run.client.terms.carriers, None);
    }
}

/// The server's Accept of a Proposal whose options were changed.
fn answer_to(options: [u8; 8]) -> Vec<u8> {
    let (client, server) = (with(client_host(), RETURNS), with(server_host(), RETURNS));
    let (_, mut proposal) = propose(&client);
    proposal[PROPOSAL].copy_from_slice(&options);
    accept(eligible(&server, &proposal), None).1
}

// Shows: CLCV2-15, CLCV2-39.
#[test]
fn options_of_another_vendor_and_those_that_cannot_be_are_not_answered() {
    assert_eq!(answer_to([0x56, 0x49, 0x53, 1, 0, 1, 0, 0])[D], [1, 0, 0, 1]);
    assert_eq!(answer_to([1, 2, 3, 1, 0, 1, 0, 0])[D], [0; 4], "another vendor");
    assert_eq!(answer_to([0x56, 0x49, 0x53, 0, 0, 1, 0, 0])[D], [0; 4], "no version");
    assert_eq!(answer_to([0x56, 0x49, 0x53, 1, 0, 1, 0, 9])[D], [0; 4], "reserved");
    assert_eq!(answer_to([0x56, 0x49, 0x53, 2, 0, 1, 0, 9])[D], [2, 0, 0, 1], "a claim");
    assert_eq!(answer_to([0x56, 0x49, 0x53, 2, 1, 1, 0, 9])[D], [0; 4], "no such feature");
    assert_eq!(answer_to([0x56, 0x49, 0x53, 3, 1, 1, 0, 9])[D], [2, 0, 0, 1], "a later version");
}

/// An Accept of a Proposal with a claim, with and without the terms of an earlier contact.
fn claimed(known: bool) -> (Option<Established>, Established) {
    let (client, server) = (with(client_host(), RETURNS), with(server_host(), RETURNS));
    let first = run(&client, &server, Memory::default());
    let [ours, theirs] =
        [first.client.terms, first.server.terms].map(|terms| known.then_some(terms));
    let claim = NonZeroU16::new(0x1234);
    let begun = start_claiming(Arc::new(client), Route::default(), claim, NOW);
    let (awaits, proposal) = begun.unwrap();
    assert_eq!(proposal[PROPOSAL], [0x56, 0x49, 0x53, 2, 0, 1, 0x12, 0x34]);
    let selection = eligible(&server, &proposal);
    assert_eq!(selection.claim(), claim);
    let (confirming, message) = accept(selection, theirs);
    let there = confirming.without_confirm(client_dmbe(), CLIENT_LINK);
    (there, offered(awaits, &message, ours).without_confirm(client_dmbe(), CLIENT_LINK))
}

#[test]
fn a_claim_replaces_confirm_after_the_first_contact_of_two_ends_with_claims() {
    let (there, here) = claimed(true);
    let there = there.unwrap();
    let devices =
        Candidate { local: there.devices.peer, peer: there.devices.local, ..there.devices };
    assert_eq!((here.devices, here.terms, here.eid), (devices, there.terms, there.eid));
    assert_eq!((here.own, here.peer), (there.peer, there.own));
    assert_eq!((here.own_link, here.peer_link), (there.peer_link, there.own_link));
    assert!(!here.first_contact && !there.first_contact);
    assert_eq!(claimed(false).0, None, "a first contact");
}

// Shows: CLCV2-17.
#[test]
fn an_answer_to_what_was_not_offered_is_declined() {
    let (client, server) = (with(client_host(), STAYS), with(server_host(), RETURNS));
    for got in [[2, 0, 0, 1], [3, 0, 0, 0], [0, 0, 0, 1], [2, 1, 0, 0]] {
        let (awaits, proposal) = propose(&client);
        let (_, mut message) = accept(eligible(&server, &proposal), None);
        message[D].copy_from_slice(&got);
        let ClientStep::Decline(decline) = awaits.handle(&message, |_, _| None) else {
            panic!("{got:?} was taken");
        };
        assert_eq!(decline.reason, DeclineReason::Vendor { agreed: [2, 0, 0, 0], got });
    }
    // A client without an offer ignores the options, and repeats the bytes.
    let (awaits, proposal) = propose(&client_host());
    let (confirming, mut message) = accept(eligible(&server, &proposal), None);
    message[D].copy_from_slice(&[1, 2, 3, 4]);
    let (established, confirm) =
        offered(awaits, &message, None).confirm(client_dmbe(), CLIENT_LINK);
    assert_eq!((established.terms.carriers, &confirm[D]), (None, &[1, 2, 3, 4][..]));
    assert!(matches!(confirming.handle(&confirm), ConfirmStep::Established(_)));
}

// Shows: CLCV2-17, CLCV2-60.
#[test]
fn a_confirm_that_does_not_repeat_the_options_is_declined() {
    let (client, server) = (with(client_host(), RETURNS), with(server_host(), RETURNS));
    let (awaits, proposal) = propose(&client);
    let (confirming, message) = accept(eligible(&server, &proposal), None);
    let (_, mut confirm) = offered(awaits, &message, None).confirm(client_dmbe(), CLIENT_LINK);
    confirm[D].fill(0);
    let ConfirmStep::Decline(decline) = confirming.handle(&confirm) else { panic!("taken") };
    let reason = DeclineReason::Vendor { agreed: [2, 0, 0, 1], got: [0; 4] };
    assert_eq!(decline.reason, reason);

    let mut pair = Pair::new(Version::V2);
    (pair.client.carriers, pair.server.carriers) = (Some(RETURNS), Some(RETURNS));
    let (awaits, proposal) = pair.propose();
    let (confirming, message) = pair.accept(&proposal, None);
    let accepted = offered_r(awaits, &message, KnownLink::NoGroup);
    let (_, mut confirm) = accepted.confirm(pair.client_end(), &[]);
    confirm[R].fill(0);
    let ConfirmStepR::Decline(decline) = confirming.handle(&confirm, |_| false) else {
        panic!("taken");
    };
    assert_eq!(decline.reason, reason);
}

#[test]
fn version_1_has_no_options() {
    let mut pair = Pair::new(Version::V1);
    (pair.client.carriers, pair.server.carriers) = (Some(RETURNS), Some(RETURNS));
    let run = pair.run(None);
    assert_eq!((run.client.terms.carriers, run.server.terms.carriers), (None, None));
    assert!(matches!(receive(&server_host(), &run.proposal), ServerStep::Decline(_)));
}
