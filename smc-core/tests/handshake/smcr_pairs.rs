// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Both roles of SMC-R against each other, in every relevant combination.

use smc_core::handshake::{
    ClientStep, ConfirmStepR, DeclineReason, HandshakeError, KnownLink, PeerRnic, TermsR,
};
use smc_core::wire::clc::{Message, Version};
use smc_core::wire::ids::{Features, Gid, Hostname, LinkLimits, Mac, Mtu, PeerId, Qpn, Release};

use crate::smcr_support::*;
use crate::support::*;

fn limits(max_conns: u8, max_links: u8) -> LinkLimits {
    LinkLimits { max_conns, max_links }
}

// Shows: CLC-26, CLC-36, CLCV2-36, CLCV2-37, CLCV2-44, CLCV2-86.
#[test]
fn every_version_release_family_and_contact() {
    for pair in [Pair::new(Version::V1), Pair::v6(Version::V1)] {
        let first = pair.run(None);
        assert_eq!((first.accept.len(), first.confirm.len()), (68, 68));
        assert_eq!((first.accept[7], first.confirm[7]), (0x18, 0x10));
        let later = pair.run(Some(first.client.terms));
        assert_eq!((later.accept[7], later.confirm[7]), (0x10, 0x10));
        assert_eq!(first.client.terms.version, Version::V1);
    }
    for pair in [Pair::new(Version::V2), Pair::v6(Version::V2)] {
        for (client, server) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
            let mut pair = pair.clone();
            pair.client.release = Release::from_code(client);
            pair.server.release = Release::from_code(server);
            let first = pair.run(None);
            let release = Release::from_code(client.min(server));
            assert_eq!((first.accept.len(), first.confirm.len()), (160, 180));
            assert_eq!((first.accept[7], first.confirm[7]), (0x28, 0x28));
            assert_eq!(first.client.terms.release, release);
            for message in [&first.accept, &first.confirm] {
                assert_eq!(message[105], 0x20 | release.code(), "operating system and release");
                let v2_1 = release == Release::V2_1;
                let expected = if v2_1 { [255, 2, 0, 1] } else { [0; 4] };
                assert_eq!(message[140..144], expected, "limits and features of v2.1 only");
                assert_eq!(message[144..156], [0; 12], "vendor options and reserved");
            }
            let later = pair.run(Some(first.client.terms));
            assert_eq!((later.accept.len(), later.confirm.len()), (108, 108));
            assert_eq!((later.accept[7], later.confirm[7]), (0x20, 0x20));
            assert_eq!(later.client.terms, first.client.terms);
        }
    }
}

// Shows: CLC-9.
#[test]
fn every_proposal_of_a_route_is_the_same() {
    for pair in [Pair::new(Version::V1), Pair::v6(Version::V2)] {
        assert_eq!(pair.run(None).proposal, pair.run(None).proposal);
    }
}

/// The client's wish, the server's own limit and its adapters; the server dictates.
// Shows: CLCV2-42, CLCV2-57, CLCV2-58.
#[test]
fn limits_of_accept_are_final_and_repeated() {
    for (wish, own, adapters, expected) in [
        (limits(255, 2), limits(255, 2), 2, limits(255, 2)),
        (limits(16, 1), limits(255, 2), 2, limits(16, 1)),
        (limits(255, 2), limits(32, 1), 2, limits(32, 1)),
        (limits(255, 2), limits(255, 2), 1, limits(255, 1)),
        (limits(16, 2), limits(64, 2), 2, limits(16, 2)),
        // Configured out of range: moved into the range at both ends.
        (limits(0, 0), limits(0, 9), 0, limits(16, 1)),
    ] {
        let mut pair = Pair::new(Version::V2);
        pair.client.limits = wish;
        pair.server.limits = own;
        pair.server_route.rnic.as_mut().unwrap().max_links = adapters;
        let run = pair.run(None);
        assert_eq!(run.client.terms.limits, expected, "{wish:?} {own:?}");
        let bytes = [expected.max_conns, expected.max_links];
        assert_eq!((&run.accept[140..142], &run.confirm[140..142]), (&bytes[..], &bytes[..]));
        let stated = &run.proposal[104..106];
        assert_eq!(stated, [wish.max_conns.max(16), wish.max_links.max(1)]);
    }
}

/// A Linux client's wishes are taken into the range rather than declined.
// Shows: CLCV2-22, CLCV2-23, CLCV2-59.
#[test]
fn wishes_out_of_range_are_moved_into_it() {
    let pair = Pair::new(Version::V2);
    let (_, mut proposal) = pair.propose();
    proposal[104..106].copy_from_slice(&[3, 9]);
    let selection = eligible_on(&pair.server, &pair.server_route, &proposal);
    assert_eq!(selection.terms_r(Version::V2).unwrap().limits, limits(16, 2));
    assert_eq!(selection.terms_r(Version::V1), None);
}

// Shows: CLC-27, CLCV2-90.
#[test]
fn all_pairs_of_mtus_give_the_smaller() {
    for version in [Version::V1, Version::V2] {
        for client in 1..=5 {
            for server in 1..=5 {
                let mut pair = Pair::new(version);
                pair.client_route.rnic.as_mut().unwrap().mtu = Mtu::from_code(client);
                pair.server_route.rnic.as_mut().unwrap().mtu = Mtu::from_code(server);
                let run = pair.run(None);
                assert_eq!(run.accept[50] & 15, server, "Accept has the server's own");
                assert_eq!(run.confirm[50] & 15, client.min(server), "Confirm the common one");
                assert_eq!(run.server.mtu, Mtu::from_code(client.min(server)));
            }
        }
    }
}

// Shows: CLCV2-61, EISM-23.
#[test]
fn proposal_accept_and_confirm_carry_the_features_of_one_end_the_other_and_both() {
    for (client_has, server_has) in [(false, false), (false, true), (true, false), (true, true)] {
        let mask = |has: bool| if has { Features::EMULATED_ISM } else { Features::empty() };
        let mut pair = Pair::new(Version::V2);
        pair.client.features = mask(client_has);
        pair.server.features = mask(server_has);
        let run = pair.run(None);
        assert_eq!(run.proposal[107], u8::from(client_has));
        assert_eq!(run.accept[143], u8::from(server_has));
        assert_eq!(run.confirm[143], u8::from(client_has && server_has));
        assert_eq!(run.client.terms.features, mask(client_has && server_has));
    }
}

// Shows: CLCV2-17.
#[test]
fn vendor_options_of_accept_are_repeated_in_confirm() {
    let pair = Pair::new(Version::V2);
    let (awaits, proposal) = pair.propose();
    let (confirming, mut accept) = pair.accept(&proposal, None);
    accept[144..148].copy_from_slice(&[1, 2, 3, 4]);
    let accepted = offered_r(awaits, &accept, KnownLink::NoGroup);
    assert_eq!(accepted.peer_host().unwrap().vendor, [1, 2, 3, 4]);
    let (_, confirm) = accepted.confirm(pair.client_end(), &[]);
    assert_eq!(confirm[144..148], [1, 2, 3, 4]);
    let step = confirming.handle(&confirm, |_| false);
    assert!(matches!(step, ConfirmStepR::Established(_)), "a server without any does not look");
}

// Shows: CLCV2-70, CLCV2-72, CLCV2-76.
#[test]
fn confirm_lists_the_addresses_in_use_and_in_reserve() {
    let pair = Pair::new(Version::V2);
    let list = |alternates: &[Gid]| {
        let (awaits, proposal) = pair.propose();
        let (confirming, accept) = pair.accept(&proposal, None);
        let accepted = offered_r(awaits, &accept, KnownLink::NoGroup);
        let (_, confirm) = accepted.confirm(pair.client_end(), alternates);
        let step = confirming.handle(&confirm, |_| false);
        let ConfirmStepR::Established(there) = step else { panic!("{step:?}") };
        let gids = there.peer_gids.unwrap();
        assert_eq!(confirm.len(), 164 + 16 * (1 + gids.alternates.len()));
        assert_eq!(gids.active, gid_v4(CLIENT));
        gids.alternates.to_vec()
    };
    assert_eq!(list(&[]), []);
    let twice = [gid_v4(11), gid_v4(CLIENT), Gid::NONE, gid_v4(12), gid_v4(11)];
    assert_eq!(list(&twice), [gid_v4(11), gid_v4(12)], "each address once");
    let many: Vec<Gid> = (11..=30).map(gid_v4).collect();
    assert_eq!(list(&many), many[..7], "eight in all");
}

// Shows: CLCV2-54, CLCV2-55.
#[test]
fn either_end_says_whether_routers_are_between() {
    for (here, there) in [(true, true), (true, false), (false, true), (false, false)] {
        let pair = Pair::new(Version::V2);
        let (awaits, proposal) = pair.propose();
        let selection = eligible_on(&pair.server, &pair.server_route, &proposal);
        let mut own = pair.server_end();
        own.direct = there;
        let (confirming, accept) = selection.accept_r(Version::V2, None, own, NOW).unwrap();
        assert_eq!(accept[104], if there { 0x80 } else { 0 });
        let accepted = offered_r(awaits, &accept, KnownLink::NoGroup);
        assert_eq!(accepted.direct(), there);
        let mut own = pair.client_end();
        own.direct = here;
        let (client, confirm) = accepted.confirm(own, &[]);
        assert_eq!(confirm[104], if here { 0x80 } else { 0 });
        let step = confirming.handle(&confirm, |_| false);
        let ConfirmStepR::Established(server) = step else { panic!("{step:?}") };
        assert_eq!((client.direct, client.peer_direct), (here, there));
        assert_eq!((server.direct, server.peer_direct), (there, here));
    }
}

/// Linux connects to the address of the Proposal, whatever Confirm says.
#[test]
fn first_contact_confirms_from_the_proposed_address() {
    for version in [Version::V1, Version::V2] {
        let pair = Pair::new(version);
        let (awaits, proposal) = pair.propose();
        let (confirming, accept) = pair.accept(&proposal, None);
        let accepted = offered_r(awaits, &accept, KnownLink::NoGroup);
        let mut own = pair.client_end();
        (own.gid, own.mac) = (gid_v4(99), mac(99));
        let (client, confirm) = accepted.confirm(own, &[]);
        assert_eq!((client.own.gid, client.own.mac), (pair.client_end().gid, mac(CLIENT)));
        let step = confirming.handle(&confirm, |_| false);
        assert!(matches!(step, ConfirmStepR::Established(_)), "{step:?}");
    }
}

// Shows: CLC-46, LG-5.
#[test]
fn subsequent_contact_may_use_another_link_of_the_group() {
    for version in [Version::V1, Version::V2] {
        let pair = Pair::new(version);
        let known = pair.run(None).client.terms;
        let (awaits, proposal) = pair.propose();
        let (confirming, accept) = pair.accept(&proposal, Some(known));
        let accepted = offered_r(awaits, &accept, KnownLink::Link(known));
        let mut own = pair.client_end();
        (own.gid, own.mac, own.qpn) = (gid_v4(99), mac(99), Qpn::new(99));
        let (_, confirm) = accepted.confirm(own, &[]);
        let step = confirming
            .clone()
            .handle(&confirm, |link| link.qpn == own.qpn && link.rnic.gid() == own.gid);
        let ConfirmStepR::Established(server) = step else { panic!("{step:?}") };
        assert_eq!(server.peer.qpn, own.qpn);
        let error = HandshakeError::ConfirmLink { gid: own.gid, qpn: own.qpn };
        assert_eq!(confirming.handle(&confirm, |_| false), ConfirmStepR::Fail(error));
    }
}

// Shows: CLC-33.
#[test]
fn client_asks_for_the_link_only_without_the_flag() {
    let pair = Pair::new(Version::V2);
    let known = pair.run(None).client.terms;
    let (awaits, proposal) = pair.propose();
    let (_, later) = pair.accept(&proposal, Some(known));
    let mut asked = None;
    awaits.clone().handle_with(
        &later,
        |_, _| None,
        |link| {
            asked = Some(*link);
            KnownLink::NoGroup
        },
    );
    let server = pair.server_end();
    let rnic = PeerRnic::new(Version::V2, pair.server.peer_id, server.gid, server.mac);
    assert_eq!(asked.map(|link| (link.rnic, link.qpn)), Some((rnic, server.qpn)));
    let (_, first) = pair.accept(&proposal, None);
    let step = awaits.handle_with(&first, |_, _| None, |_| panic!("first contact asks nothing"));
    assert!(matches!(step, ClientStep::OfferedR(_)));
}

/// A server may begin a second group with a known client (CLCV2-87).
// Shows: CLC-20, CLC-26, CLC-34, CLCV2-87, LG-48, LG-50.
#[test]
fn parallel_groups_are_first_contacts() {
    let pair = Pair::new(Version::V2);
    let (awaits, proposal) = pair.propose();
    let (_, accept) = pair.accept(&proposal, None);
    let known = KnownLink::Link(pair.run(None).client.terms);
    assert!(offered_r(awaits, &accept, known).first_contact());
}

// Shows: CLC-19, CLCV2-21.
#[test]
fn either_form_of_an_ipv4_address_is_the_same_adapter() {
    let pair = Pair::new(Version::V2);
    let (awaits, mut proposal) = pair.propose();
    proposal[98..100].fill(0); // ::a.b.c.d in place of ::ffff:a.b.c.d
    let (confirming, accept) = pair.accept(&proposal, None);
    let (_, confirm) =
        offered_r(awaits, &accept, KnownLink::NoGroup).confirm(pair.client_end(), &[]);
    let step = confirming.handle(&confirm, |_| false);
    let ConfirmStepR::Established(server) = step else { panic!("{step:?}") };
    assert_eq!(server.peer_rnic.gid(), gid_v4(CLIENT));
}

// Shows: CLC-19, CLC-33, LG-5, LG-60.
#[test]
fn keys_compare_by_what_identifies_an_adapter() {
    let id = PeerId([7; 8]);
    let key = |version, id, gid, mac| PeerRnic::new(version, id, gid, mac);
    let v2 = key(Version::V2, id, gid_v4(1), mac(1));
    assert_eq!(v2, key(Version::V2, id, gid_v4(1), Mac::NONE));
    assert_ne!(v2, key(Version::V2, id, gid_v4(2), mac(1)));
    assert_ne!(v2, key(Version::V2, PeerId::NONE, gid_v4(1), mac(1)));
    assert_ne!(v2, key(Version::V1, id, gid_v4(1), mac(1)));
    let v1 = key(Version::V1, id, gid_roce_v1(1), mac(1));
    assert_ne!(v1, key(Version::V1, id, gid_roce_v1(1), mac(2)), "the MAC counts in version 1");
}

#[test]
fn hosts_learn_each_others_names_in_version_2() {
    let mut pair = Pair::new(Version::V2);
    pair.client.hostname = Hostname::new("client.example").unwrap();
    pair.server.hostname = Hostname::from_wire([7; 32]);
    let run = pair.run(None);
    assert_eq!(run.server.peer_host.unwrap().hostname.text(), Some("client.example"));
    assert_eq!(run.client.peer_host.unwrap().hostname.text(), None);
}

/// Until the first link is confirmed, TCP can still take over; later it cannot.
// Shows: ERR-2, ERR-15, ERR-16, ERR-46.
#[test]
fn first_contact_may_be_declined_while_the_link_comes_up() {
    for version in [Version::V1, Version::V2] {
        let pair = Pair::new(version);
        let first = pair.run(None);
        for (end, config) in [(first.client, &pair.client), (first.server, &pair.server)] {
            let sent = end.decline(config, DeclineReason::ConfirmLinkTimeout).unwrap();
            let Ok(Message::Decline(decline)) = Message::parse(&sent.message) else { panic!() };
            assert_eq!((decline.version, decline.diagnosis.0), (version, 0x0201_0000));
            assert_eq!(sent.then, smc_core::handshake::AfterDecline::FallBack);
            let peer = smc_core::handshake::late_decline(&sent.message).unwrap();
            assert_eq!(peer.code.value(), 0x0201_0000);
        }
        let later = pair.run(Some(first.client.terms));
        assert_eq!(later.client.decline(&pair.client, DeclineReason::NoActiveLink), None);
    }
}

// Shows: CLCV2-89.
#[test]
fn accept_of_a_version_that_is_not_possible_is_not_made() {
    let pair = Pair::new(Version::V2);
    let selection = eligible_on(&pair.server, &pair.server_route, &pair.propose().1);
    assert!(selection.accept_r(Version::V1, None, pair.server_end(), NOW).is_none());
}

/// The terms of a group come from its first contact.
// Shows: CLCV2-50.
#[test]
fn subsequent_contact_keeps_the_terms_of_the_first() {
    let pair = Pair::new(Version::V2);
    let old = TermsR {
        version: Version::V2,
        release: Release::V2_0,
        features: Features::empty(),
        limits: limits(77, 1),
        carriers: None,
    };
    let later = pair.run(Some(old));
    assert_eq!((later.client.terms, later.server.terms), (old, old));
}
