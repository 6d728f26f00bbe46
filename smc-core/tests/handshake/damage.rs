// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Messages of SMC-D and SMC-R, cut, stretched, altered or made up.

use proptest::prelude::*;
use smc_core::handshake::{
    AwaitAccept, AwaitConfirm, Awaited, ClcReader, ClientStep, ConfirmStep, HandshakeError,
    ServerStep, Terms,
};
use smc_core::wire::ids::{Features, Release};

use crate::smcr_damage;
use crate::support::*;

/// The three messages of one handshake of SMC-D, and the state waiting for each.
struct Scene {
    proposal: Vec<u8>,
    client: AwaitAccept,
    accept: Vec<u8>,
    server: AwaitConfirm,
    confirm: Vec<u8>,
    known: Option<Terms>,
}

fn scene(first_contact: bool) -> Scene {
    let terms = Terms { release: Release::V2_1, features: Features::EMULATED_ISM, carriers: None };
    let known = Some(terms).filter(|_| !first_contact);
    let (client, proposal) = propose(&client_host());
    let (server, accept) = accept(eligible(&server_host(), &proposal), known);
    let accepted = offered(client.clone(), &accept, known);
    let (_, confirm) = accepted.confirm(client_dmbe(), CLIENT_LINK);
    Scene { proposal, client, accept, server, confirm, known }
}

/// How a step ended, over all three messages.
#[derive(Debug, PartialEq)]
pub(crate) enum End {
    GoesOn,
    Declined,
    Fail(HandshakeError),
}

/// The three messages of a handshake, each with its receiving step.
pub(crate) type Steps<'a> = [(&'a Vec<u8>, Box<dyn Fn(&[u8]) -> End + 'a>); 3];

/// Every message of SMC-D and SMC-R, at first and subsequent contacts, with its receiving step.
fn each(test: impl Fn(&[u8], &dyn Fn(&[u8]) -> End)) {
    let (d, r) = ([true, false].map(scene), smcr_damage::scenes());
    let all = d.iter().flat_map(Scene::steps).chain(r.iter().flat_map(smcr_damage::Scene::steps));
    for (message, step) in all {
        test(message, &*step);
    }
}

impl Scene {
    fn proposal_ends(&self, bytes: &[u8]) -> End {
        match receive(&server_host(), bytes) {
            ServerStep::Eligible(selection) => {
                assert_eq!(selection.eid(), eid("LAB"));
                for found in selection.candidates() {
                    let local = server_host().devices[0];
                    assert_eq!((found.chid, found.local), (local.chid, local.gid));
                }
                End::GoesOn
            }
            ServerStep::Decline(_) | ServerStep::PeerDeclined(_) => End::Declined,
            ServerStep::Fail(error) => End::Fail(error),
        }
    }

    fn accept_ends(&self, bytes: &[u8]) -> End {
        match self.client.clone().handle(bytes, |_, _| self.known) {
            ClientStep::Offered(accepted) => {
                let own = client_host().devices[0];
                assert_eq!(
                    (accepted.devices().chid, accepted.devices().local),
                    (own.chid, own.gid)
                );
                assert_eq!(accepted.eid(), eid("LAB"));
                assert!(accepted.terms().release <= Release::V2_1);
                End::GoesOn
            }
            ClientStep::OfferedR(_) => panic!("SMC-R was not offered"),
            ClientStep::Decline(_) | ClientStep::PeerDeclined(_) => End::Declined,
            ClientStep::Fail(error) => End::Fail(error),
        }
    }

    fn confirm_ends(&self, bytes: &[u8]) -> End {
        match self.server.clone().handle(bytes) {
            ConfirmStep::Established(established) => {
                assert_eq!(established.devices.peer, client_host().devices[0].gid);
                assert_eq!(established.own, server_dmbe());
                End::GoesOn
            }
            ConfirmStep::Decline(_) | ConfirmStep::PeerDeclined(_) => End::Declined,
            ConfirmStep::Fail(error) => End::Fail(error),
        }
    }

    fn steps(&self) -> Steps<'_> {
        [
            (&self.proposal, Box::new(|bytes| self.proposal_ends(bytes))),
            (&self.accept, Box::new(|bytes| self.accept_ends(bytes))),
            (&self.confirm, Box::new(|bytes| self.confirm_ends(bytes))),
        ]
    }
}

pub(crate) fn breaks(end: End, what: impl std::fmt::Debug) {
    assert!(matches!(end, End::Fail(_)), "{what:?}: {end:?}");
}

#[test]
fn undamaged_messages_go_on() {
    each(|message, step| assert_eq!(step(message), End::GoesOn));
}

// Shows: CLC-54, ERR-9, SEC-9.
#[test]
fn truncated_messages_break_the_connection() {
    each(|message, step| (0..message.len()).for_each(|cut| breaks(step(&message[..cut]), cut)));
}

// Shows: CLC-5.
#[test]
fn shortened_messages_with_a_fitting_length_and_trailer_break_the_connection() {
    each(|message, step| {
        let (body, trailer) = message.split_at(message.len() - 4);
        for end in 8..body.len() {
            let mut short = [&body[..end], trailer].concat();
            patch_length(&mut short);
            breaks(step(&short), end);
        }
    });
}

#[test]
fn messages_with_bytes_behind_them_break_the_connection() {
    each(|message, step| {
        for extra in [1, 4, 100] {
            let mut long = message.to_vec();
            long.resize(message.len() + extra, 0);
            breaks(step(&long), extra);
        }
    });
}

// Shows: CLC-5.
#[test]
fn stretched_messages_with_a_fitting_length_and_trailer_break_the_connection() {
    for first_contact in [true, false] {
        let scene = scene(first_contact);
        for (message, step) in scene.steps() {
            let (body, trailer) = message.split_at(message.len() - 4);
            for extra in 1..64 {
                let mut long = body.to_vec();
                long.resize(body.len() + extra, 0);
                long.extend(trailer);
                patch_length(&mut long);
                let end = step(&long);
                // An extension without its flag is tolerated (CLCV2-45).
                let stray = !first_contact && matches!(long.len(), 114 | 130);
                if stray {
                    assert_eq!(end, End::GoesOn);
                } else {
                    breaks(end, extra);
                }
            }
        }
    }
}

// Shows: CLC-5.
#[test]
fn every_other_length_breaks_the_connection() {
    each(|message, step| {
        for length in (0..=u16::MAX).filter(|length| usize::from(*length) != message.len()) {
            let mut wrong = message.to_vec();
            wrong[5..7].copy_from_slice(&length.to_be_bytes());
            breaks(step(&wrong), length);
        }
    });
}

/// Every byte of every message with every bit flipped, and set to either extreme: nothing panics,
/// and the assertions of the steps hold for accepted messages.
// Shows: CLC-2, CLC-3.
#[test]
fn every_changed_byte_ends_in_order() {
    each(|message, step| {
        let end = message.len();
        for at in 0..end {
            let values = (0..8).map(|bit| message[at] ^ 1 << bit).chain([0, 0xff]);
            for value in values.filter(|value| *value != message[at]) {
                let mut wrong = message.to_vec();
                wrong[at] = value;
                let ended = step(&wrong);
                if at < 7 || at >= end - 4 {
                    breaks(ended, (at, value));
                }
            }
        }
    });
}

/// Count and offset fields of the Proposal. Most damage makes a protocol error; some leads to an
/// apparent offer without EIDs, answered by Decline.
#[test]
fn wrong_counts_and_offsets_of_a_proposal_never_lead_on() {
    let scene = scene(true);
    for at in [80, 81] {
        for count in 0..=255 {
            let mut wrong = scene.proposal.clone();
            if wrong[at] != count {
                wrong[at] = count;
                assert_ne!(scene.proposal_ends(&wrong), End::GoesOn, "{count} at {at}");
            }
        }
    }
    for at in [50, 86] {
        for offset in 0..=u16::MAX {
            let mut wrong = scene.proposal.clone();
            if wrong[at..at + 2] != offset.to_be_bytes() {
                wrong[at..at + 2].copy_from_slice(&offset.to_be_bytes());
                assert_ne!(scene.proposal_ends(&wrong), End::GoesOn, "{offset} at {at}");
            }
        }
    }
}

/// Reads `stream` in pieces and hands the message to `step`, as an adapter does.
fn through_reader(
    mut reader: ClcReader,
    stream: &[u8],
    piece: usize,
    step: &dyn Fn(&[u8]) -> End,
) -> End {
    let mut at = 0;
    loop {
        if let Some(message) = reader.message() {
            return step(message);
        }
        let space = reader.space();
        let n = space.len().min(piece).min(stream.len() - at);
        space[..n].copy_from_slice(&stream[at..at + n]);
        at += n;
        if let Err(error) = reader.filled(n) {
            return End::Fail(error);
        }
    }
}

// Shows: CLC-57.
#[test]
fn one_byte_segments_make_no_difference() {
    let scene = scene(true);
    let readers = [Awaited::Proposal, Awaited::Accept, Awaited::Confirm];
    for ((message, step), awaited) in scene.steps().into_iter().zip(readers) {
        let mut stream = message.clone();
        stream.extend(b"data of the application");
        let end = through_reader(ClcReader::new(awaited), &stream, 1, &*step);
        assert_eq!(end, End::GoesOn);
        for cut in 0..message.len() {
            let end = through_reader(ClcReader::new(awaited), &message[..cut], 7, &*step);
            assert_eq!(end, End::Fail(HandshakeError::Closed { awaited, received: cut }));
        }
    }
}

/// A valid header, and a body of noise.
fn plausible() -> impl Strategy<Value = Vec<u8>> {
    let header = (1..=4_u8, any::<bool>(), any::<u8>());
    (header, prop::collection::vec(any::<u8>(), 20..700)).prop_map(|((kind, smcd, flags), body)| {
        let eye = [0xe2, 0xd4, 0xc3, if smcd { 0xc4 } else { 0xd9 }];
        let mut bytes = eye.to_vec();
        bytes.extend([kind, 0, 0, flags]);
        bytes.extend(body);
        bytes.extend(eye);
        patch_length(&mut bytes);
        bytes
    })
}

/// Like `plausible`, with a body of one of the lengths of Accept and Confirm.
fn plausible_answer() -> impl Strategy<Value = Vec<u8>> {
    let lengths = prop::sample::select(vec![28, 44, 48, 68, 78, 108, 114, 130, 160, 180]);
    (plausible(), lengths, any::<u8>()).prop_map(|(mut bytes, length, noise)| {
        let eye = bytes[..4].to_vec();
        bytes.resize(length - 4, noise);
        bytes.extend(eye);
        patch_length(&mut bytes);
        bytes
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, ..ProptestConfig::default() })]

    // Shows: CLC-54, SEC-9.
    #[test]
    fn noise_never_leads_on(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        each(|_, step| breaks(step(&bytes), &bytes));
    }

    #[test]
    fn noise_behind_a_header_never_leads_on(
        bytes in prop_oneof![plausible(), plausible_answer()],
        first_contact: bool,
    ) {
        let scene = scene(first_contact);
        for (_, step) in scene.steps() {
            prop_assert_ne!(step(&bytes), End::GoesOn);
        }
    }

    // Shows: SEC-9.
    #[test]
    fn altered_bytes_never_lead_elsewhere(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
    ) {
        each(|message, step| {
            let mut altered = message.to_vec();
            for (at, value) in &changes {
                let at = at.index(altered.len());
                altered[at] = *value;
            }
            // The step itself asserts the rules for accepted messages.
            step(&altered);
        });
    }

    #[test]
    fn noise_never_disturbs_the_reader(
        bytes in prop::collection::vec(any::<u8>(), 0..100),
        counts in prop::collection::vec(0..200_usize, 0..20),
    ) {
        for awaited in [Awaited::Proposal, Awaited::Accept, Awaited::Confirm] {
            let mut reader = ClcReader::new(awaited);
            let mut stream = bytes.iter().cycle();
            for &count in &counts {
                for slot in reader.space() {
                    *slot = stream.next().copied().unwrap_or(0xe2);
                }
                if reader.filled(count).is_err() {
                    break;
                }
            }
        }
    }
}
