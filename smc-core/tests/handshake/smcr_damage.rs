// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The messages of SMC-R for the tests of `damage.rs`, and damage of fields that only SMC-R has.

use proptest::prelude::*;
use smc_core::handshake::{
    AwaitAccept, AwaitConfirmR, ClientStep, ConfirmStepR, KnownLink, ServerStep, TermsR,
};
use smc_core::wire::clc::Version;
use smc_core::wire::ids::Release;

use crate::damage::{End, Steps, breaks};
use crate::smcr_support::*;
use crate::support::*;

/// The three messages of one handshake, and the state waiting for each.
pub(crate) struct Scene {
    pair: Pair,
    proposal: Vec<u8>,
    client: AwaitAccept,
    accept: Vec<u8>,
    server: AwaitConfirmR,
    confirm: Vec<u8>,
    known: Option<TermsR>,
}

fn scene(mut pair: Pair, release: Release, first_contact: bool) -> Scene {
    pair.client.release = release;
    let known = (!first_contact).then(|| pair.run(None).client.terms);
    let (client, proposal) = pair.propose();
    let (server, accept) = pair.accept(&proposal, known);
    let link = known.map_or(KnownLink::NoGroup, KnownLink::Link);
    let accepted = offered_r(client.clone(), &accept, link);
    let (_, confirm) = accepted.confirm(pair.client_end(), &[]);
    Scene { pair, proposal, client, accept, server, confirm, known }
}

/// Both versions, releases and families, first and subsequent contact.
pub(crate) fn scenes() -> Vec<Scene> {
    let mut scenes = Vec::new();
    for first in [true, false] {
        scenes.push(scene(Pair::new(Version::V1), Release::V2_1, first));
        scenes.push(scene(Pair::v6(Version::V1), Release::V2_1, first));
        scenes.push(scene(Pair::new(Version::V2), Release::V2_1, first));
        scenes.push(scene(Pair::new(Version::V2), Release::V2_0, first));
        scenes.push(scene(Pair::v6(Version::V2), Release::V2_1, first));
    }
    scenes
}

impl Scene {
    fn proposal_ends(&self, bytes: &[u8]) -> End {
        match self.pair.receive(bytes) {
            ServerStep::Eligible(selection) => {
                assert_eq!(selection.candidates(), [], "no SMC-D here");
                let version = self.pair.version;
                let terms = selection.terms_r(version).unwrap();
                assert!(terms.limits.in_range() && terms.release <= Release::V2_1);
                assert_eq!(selection.choices().count(), 1);
                End::GoesOn
            }
            ServerStep::Decline(_) | ServerStep::PeerDeclined(_) => End::Declined,
            ServerStep::Fail(error) => End::Fail(error),
        }
    }

    fn accept_ends(&self, bytes: &[u8]) -> End {
        let known = |_: &_| self.known.map_or(KnownLink::NoGroup, KnownLink::Link);
        match self.client.clone().handle_with(bytes, |_, _| None, known) {
            ClientStep::OfferedR(accepted) => {
                assert_eq!(accepted.version(), self.pair.version);
                let expected = (accepted.version() == Version::V2).then(|| eid("LAB"));
                assert_eq!(accepted.eid(), expected);
                let terms = accepted.terms();
                assert!(terms.limits.in_range() && terms.release <= Release::V2_1);
                assert!(accepted.peer().index > 0 && !accepted.peer().gid.is_none());
                if accepted.first_contact() {
                    assert!(accepted.peer().mtu.bytes().is_ok());
                }
                End::GoesOn
            }
            ClientStep::Offered(_) => panic!("SMC-D was not offered"),
            ClientStep::Decline(_) | ClientStep::PeerDeclined(_) => End::Declined,
            ClientStep::Fail(error) => End::Fail(error),
        }
    }

    fn confirm_ends(&self, bytes: &[u8]) -> End {
        let own = self.pair.client_end();
        match self.server.clone().handle(bytes, |link| link.qpn == own.qpn) {
            ConfirmStepR::Established(server) => {
                assert!(server.peer.index > 0);
                if server.first_contact {
                    assert!(server.peer.gid.same_address(own.gid));
                    assert!(server.mtu.bytes().is_ok());
                } else {
                    assert_eq!(server.peer.qpn, own.qpn);
                }
                End::GoesOn
            }
            ConfirmStepR::Decline(_) => {
                assert!(self.known.is_none(), "too late at a subsequent contact");
                End::Declined
            }
            ConfirmStepR::PeerDeclined(_) => End::Declined,
            ConfirmStepR::Fail(error) => End::Fail(error),
        }
    }

    pub(crate) fn steps(&self) -> Steps<'_> {
        [
            (&self.proposal, Box::new(|bytes| self.proposal_ends(bytes))),
            (&self.accept, Box::new(|bytes| self.accept_ends(bytes))),
            (&self.confirm, Box::new(|bytes| self.confirm_ends(bytes))),
        ]
    }
}

/// The fields of an Accept or Confirm without an effect: numbers with a meaning to the peer only,
/// and reserved bytes. Changes of other fields are noticed.
#[test]
fn fields_that_have_to_be_right_are_checked_byte_by_byte() {
    let scene = scene(Pair::new(Version::V2), Release::V2_1, true);
    let free_of_both = [
        8..16,    // peer id
        38..45,   // queue pair, key
        46..50,   // token
        51..64,   // reserved, address, sequence number
        96..104,  // reserved
        106..140, // reserved, host name
        144..156, // vendor options, reserved
    ];
    for at in 8..scene.accept.len() - 4 {
        let mut wrong = scene.accept.clone();
        wrong[at] ^= 0x80;
        let free = free_of_both.iter().any(|range| range.contains(&at))
            || (28..38).contains(&at) // the address within its family, and the MAC
            || [45, 104, 140, 142, 143].contains(&at); // index, link type, limit, features
        let free = free || at == 105; // the operating system
        assert_eq!(scene.accept_ends(&wrong) == End::GoesOn, free, "{at}");
    }
    for at in 8..scene.confirm.len() - 4 {
        let mut wrong = scene.confirm.clone();
        wrong[at] ^= 0x80;
        let free = free_of_both.iter().any(|range| range.contains(&at))
            || [45, 104, 105, 142, 143].contains(&at)
            || (157..176).contains(&at); // reserved, addresses in reserve
        assert_eq!(scene.confirm_ends(&wrong) == End::GoesOn, free, "{at}");
    }
}

// Shows: CLCV2-71, ERR-45, SEC-10.
#[test]
fn wrong_counts_of_the_gid_list_break_the_connection() {
    let scene = scene(Pair::new(Version::V2), Release::V2_1, true);
    assert_eq!(scene.confirm[156], 1);
    for count in (0..=255).filter(|count| *count != 1) {
        let mut wrong = scene.confirm.clone();
        wrong[156] = count;
        breaks(scene.confirm_ends(&wrong), count);
    }
}

// Shows: CLCV2-45.
#[test]
fn an_extension_without_the_flag_is_tolerated_and_ignored() {
    let first = scene(Pair::new(Version::V2), Release::V2_1, true);
    let later = scene(Pair::new(Version::V2), Release::V2_1, false);
    let mut stray = first.accept.clone();
    stray[7] &= !0x08;
    stray[140] = 1; // out of range
    assert_eq!(later.accept_ends(&stray), End::GoesOn);
    let mut stray = first.confirm.clone();
    stray[7] &= !0x08;
    stray[105] = 0x2f;
    assert_eq!(later.confirm_ends(&stray), End::GoesOn);
    let mut bare = later.accept.clone();
    bare[7] |= 0x08;
    breaks(later.accept_ends(&bare), "the flag without the extension");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, ..ProptestConfig::default() })]

    #[test]
    fn noise_behind_a_header_never_leads_on(
        kind in 1..=4_u8,
        flags: u8,
        body in prop::collection::vec(any::<u8>(), 20..300),
        length in prop::sample::select(vec![28, 44, 52, 68, 92, 108, 160, 180, 196]),
        first_contact: bool,
    ) {
        for version in [Version::V1, Version::V2] {
            let scene = scene(Pair::new(version), Release::V2_1, first_contact);
            let mut bytes = vec![0xe2, 0xd4, 0xc3, 0xd9, kind, 0, 0, flags];
            bytes.extend(&body);
            bytes.resize(length - 4, 0x5a);
            bytes.extend([0xe2, 0xd4, 0xc3, 0xd9]);
            patch_length(&mut bytes);
            prop_assert_ne!(scene.proposal_ends(&bytes), End::GoesOn);
            prop_assert_ne!(scene.confirm_ends(&bytes), End::GoesOn);
            // Version 1 has no field that an Accept must repeat, so noise can be an Accept.
            let end = scene.accept_ends(&bytes);
            prop_assert!(version == Version::V1 || end != End::GoesOn);
        }
    }
}
