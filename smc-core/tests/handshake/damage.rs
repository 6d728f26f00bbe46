// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Messages, cut, stretched, altered or made up.

use proptest::prelude::*;
use smc_core::handshake::{
    AwaitAccept, AwaitConfirm, Awaited, ClcReader, ClientStep, ConfirmStep, HandshakeError,
    ServerStep, Terms,
};
use smc_core::wire::ids::{Features, Release};

use crate::support::*;

/// The three messages of one handshake, and the state waiting for each.
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
enum End {
    GoesOn,
    Declined,
    PeerDeclined,
    Fail(HandshakeError),
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
            ServerStep::Decline(_) => End::Declined,
            ServerStep::PeerDeclined(_) => End::PeerDeclined,
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
            ClientStep::Decline(_) => End::Declined,
            ClientStep::PeerDeclined(_) => End::PeerDeclined,
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
            ConfirmStep::Decline(_) => End::Declined,
            ConfirmStep::PeerDeclined(_) => End::PeerDeclined,
            ConfirmStep::Fail(error) => End::Fail(error),
        }
    }

    /// Each message with its receiving step.
    #[expect(clippy::type_complexity, reason = "a table of two columns")]
    fn steps(&self) -> [(&Vec<u8>, Box<dyn Fn(&[u8]) -> End + '_>); 3] {
        [
            (&self.proposal, Box::new(|bytes| self.proposal_ends(bytes))),
            (&self.accept, Box::new(|bytes| self.accept_ends(bytes))),
            (&self.confirm, Box::new(|bytes| self.confirm_ends(bytes))),
        ]
    }
}

fn breaks(end: End, what: impl std::fmt::Debug) {
    assert!(matches!(end, End::Fail(_)), "{what:?}: {end:?}");
}

#[test]
fn undamaged_messages_go_on() {
    for first_contact in [true, false] {
        let scene = scene(first_contact);
        for (message, step) in scene.steps() {
            assert_eq!(step(message), End::GoesOn);
        }
    }
}

// Shows: CLC-54, ERR-9, SEC-9.
#[test]
fn truncated_messages_break_the_connection() {
    for first_contact in [true, false] {
        let scene = scene(first_contact);
        for (message, step) in scene.steps() {
            for cut in 0..message.len() {
                breaks(step(&message[..cut]), cut);
            }
        }
    }
}

// Shows: CLC-5.
#[test]
fn shortened_messages_with_a_fitting_length_and_trailer_break_the_connection() {
    for first_contact in [true, false] {
        let scene = scene(first_contact);
        for (message, step) in scene.steps() {
            let trailer = message[message.len() - 4..].to_vec();
            for end in 8..message.len() - 4 {
                let mut short = message[..end].to_vec();
                short.extend(&trailer);
                patch_length(&mut short);
                breaks(step(&short), end);
            }
        }
    }
}

#[test]
fn messages_with_bytes_behind_them_break_the_connection() {
    let scene = scene(true);
    for (message, step) in scene.steps() {
        for extra in [1, 4, 100] {
            let mut long = message.clone();
            long.resize(message.len() + extra, 0);
            breaks(step(&long), extra);
        }
    }
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
    let scene = scene(true);
    for (message, step) in scene.steps() {
        for length in 0..=u16::MAX {
            if usize::from(length) != message.len() {
                let mut wrong = message.clone();
                wrong[5..7].copy_from_slice(&length.to_be_bytes());
                breaks(step(&wrong), length);
            }
        }
    }
}

// Shows: CLC-2, CLC-3.
#[test]
fn flipped_bits_of_eye_catchers_and_type_break_the_connection() {
    let scene = scene(true);
    for (message, step) in scene.steps() {
        let end = message.len();
        for at in (0..5).chain(end - 4..end) {
            for bit in 0..8 {
                let mut wrong = message.clone();
                wrong[at] ^= 1 << bit;
                breaks(step(&wrong), (at, bit));
            }
        }
    }
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

#[test]
fn any_single_flipped_bit_ends_in_order() {
    for first_contact in [true, false] {
        let scene = scene(first_contact);
        for (message, step) in scene.steps() {
            for at in 0..message.len() {
                for bit in 0..8 {
                    let mut wrong = message.clone();
                    wrong[at] ^= 1 << bit;
                    step(&wrong);
                }
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
        let scene = scene(true);
        for (_, step) in scene.steps() {
            prop_assert!(matches!(step(&bytes), End::Fail(_)));
        }
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
        first_contact: bool,
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
    ) {
        let scene = scene(first_contact);
        for (message, step) in scene.steps() {
            let mut altered = message.clone();
            for (at, value) in &changes {
                let at = at.index(altered.len());
                altered[at] = *value;
            }
            // The step itself asserts the rules for accepted messages.
            step(&altered);
        }
    }

    #[test]
    fn noise_never_disturbs_the_reader(
        bytes in prop::collection::vec(any::<u8>(), 0..100),
        counts in prop::collection::vec(0..200_usize, 0..20),
    ) {
        for awaited in [
            Awaited::Proposal,
            Awaited::Accept,
            Awaited::Confirm,
        ] {
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
