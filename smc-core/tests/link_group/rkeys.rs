// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Confirm RKey and Delete RKey (LLC-46 to LLC-57, LLC-60 to LLC-74; RFC 7609 section 3.5.5.2).

use std::time::Duration;

use smc_core::link_group::*;
use smc_core::wire::List;
use smc_core::wire::ids::Rkey;
use smc_core::wire::llc::*;

use super::support::*;

fn confirmed(pair: &Pair, host: usize, rmb: u32) -> bool {
    pair.hosts[host].has(&Output::RmbConfirmed { rmb: RmbId(rmb) })
}

// Shows: LLC-46, LLC-53, LLCV2-32, RMB-15.
#[test]
fn an_rmb_is_confirmed_on_each_link_by_either_end() {
    for (generation, rnics) in [(v1(), 1), (v1(), 2), (v2(), 1), (v2(), 2), (v21(1), 1)] {
        for host in [SERVER, CLIENT] {
            let mut pair = Pair::running(generation, [rnics, rnics]);
            pair.forget();
            pair.add_rmb(host, 7);
            pair.run_until_idle();
            assert!(confirmed(&pair, host, 7));
            assert_eq!(pair.trace.len(), 2, "one request, one reply");
            let body = |n: usize| (pair.trace[n].1[0], pair.trace[n].1[4..].to_vec());
            assert_eq!(body(0), body(1), "reply repeats the request");
            pair.assert_keys();
        }
    }
}

// Shows: LLC-61.
#[test]
fn both_ends_may_confirm_at_once() {
    let mut pair = Pair::running(v2(), [2, 2]);
    pair.forget();
    pair.add_rmb(SERVER, 7);
    pair.add_rmb(CLIENT, 9);
    pair.run_until_idle();
    assert!(confirmed(&pair, SERVER, 7) && confirmed(&pair, CLIENT, 9));
    assert_eq!(pair.anomalies, []);
    pair.assert_keys();
}

// Shows: LLC-47, LLC-48, LG-12.
#[test]
fn eight_links_need_continuations_in_version_1() {
    let [mut server, mut client] = params_of(v1(), PeerProfile::SPEC, [8, 8]);
    server.generation = Generation::V1 { max_links: 8 };
    client.generation = Generation::V1 { max_links: 8 };
    let mut pair = Pair::new([server, client]);
    pair.run_until_idle();
    for n in 2..8 {
        let rnic = rnic(SERVER, n);
        pair.hosts[SERVER].group.handle_rnic_up(rnic, pair.now);
        pair.run_until_idle();
        assert_eq!(pair.active(SERVER).len(), n as usize + 1);
    }
    pair.forget();
    pair.add_rmb(CLIENT, 7);
    pair.run_until_idle();
    assert!(confirmed(&pair, CLIENT, 7));
    // Seven other links: two, three, two.
    let counts: Vec<u8> = pair.trace.iter().map(|(_, bytes)| bytes[4]).collect();
    assert_eq!(counts, [7, 7, 5, 5, 2, 2]);
    assert_eq!(pair.anomalies, []);
    pair.assert_keys();
}

// Shows: LLC-27, LLC-28, LLC-29, LLC-30, LLC-31, LLCV2-17.
#[test]
fn many_rmbs_reach_a_new_link_two_by_two() {
    for (server, client) in [(5, 1), (1, 5), (4, 4), (0, 0)] {
        for generation in [v1(), v2()] {
            let mut pair = Pair::running(generation, [1, 2]);
            pair.hosts[CLIENT].group.handle_rnic_down(RnicId(1), pair.now);
            pair.run_until_idle();
            for n in 0..server {
                pair.add_rmb(SERVER, 10 + n);
            }
            for n in 0..client {
                pair.add_rmb(CLIENT, 20 + n);
            }
            pair.run_until_idle();
            pair.forget();
            pair.hosts[SERVER].group.handle_rnic_up(rnic(SERVER, 1), pair.now);
            pair.run_until_idle();
            assert_eq!(pair.active(CLIENT).len(), 2);
            assert_eq!(pair.anomalies, []);
            pair.assert_keys();
            let conts = pair.names().iter().filter(|name| name.contains("AddLinkCont")).count();
            let most = 1 + server.max(client);
            let rounds = if generation == v1() { (most as usize).div_ceil(2) } else { 0 };
            assert_eq!(conts, 2 * rounds);
        }
    }
}

/// A message with keys of a new link, changed to an unknown first reference; `None` for other
/// messages.
fn forge_reference(bytes: &[u8], dialect: &Dialect) -> Option<Vec<u8>> {
    let mut llc = Llc::parse(bytes, dialect).unwrap();
    let forge = |keys: &[RkeyPair]| {
        let mut keys = keys.to_vec();
        keys.first_mut()?.reference = Rkey(0xdead);
        Some(keys)
    };
    match &mut llc.message {
        Message::AddLink(AddLink { v2: Some(v2), .. }) => v2.rkeys = forge(&v2.rkeys)?,
        Message::AddLinkCont(cont) => cont.rkeys = List::from_slice(&forge(&cont.rkeys)?)?,
        _ => return None,
    }
    Some(llc.emit(dialect))
}

/// Each end reports a key named by a reference never announced on the carrying link.
// Shows: LLC-31.
#[test]
fn a_key_with_an_unknown_reference_is_an_error() {
    for generation in [v1(), v2()] {
        for liar in [SERVER, CLIENT] {
            let mut pair = Pair::running(generation, [1, 1]);
            pair.add_rmb(liar, 10);
            pair.run_until_idle();
            pair.hosts[CLIENT].group.handle_rnic_up(rnic(CLIENT, 1), pair.now);
            pair.run_until_idle();
            pair.forget();
            pair.honest = false;
            pair.hosts[SERVER].group.handle_rnic_up(rnic(SERVER, 1), pair.now);
            let dialect = pair.hosts[SERVER].group.params().profile.dialect;
            let mut forged = false;
            for _ in 0..100 {
                pair.drain(SERVER);
                pair.drain(CLIENT);
                let Some(mut wire) = pair.wires.pop_front() else { break };
                if wire.from == liar
                    && !forged
                    && let Some(bytes) = forge_reference(&wire.bytes, &dialect)
                {
                    (wire.bytes, forged) = (bytes, true);
                }
                pair.deliver(wire);
            }
            assert!(forged, "{:?}", pair.names());
            assert_eq!(pair.anomalies, [(1 - liar, Anomaly::UnknownRkey)], "{generation:?}");
        }
    }
}

// Shows: LLC-54, LLC-57, LLCV2-34, RMB-15.
#[test]
fn deleted_rmbs_go_in_as_few_messages_as_there_can_be() {
    for (generation, messages) in [(v1(), 3), (v2(), 2)] {
        let mut pair = Pair::running(generation, [2, 2]);
        for n in 1..=10 {
            pair.add_rmb(CLIENT, n);
        }
        pair.run_until_idle();
        pair.forget();
        for n in 1..=10 {
            pair.hosts[CLIENT].group.remove_rmb(RmbId(n), pair.now);
        }
        assert!(!pair.hosts[CLIENT].has(&Output::RmbDeleted { rmb: RmbId(1) }));
        pair.run_until_idle();
        let requests = pair.trace.iter().filter(|(from, _)| *from == CLIENT).count();
        // The first message goes alone and at once.
        assert_eq!(requests, messages);
        assert_eq!(pair.hosts[CLIENT].rmbs.len(), 1);
        assert_eq!(pair.hosts[SERVER].group.peer_rmbs(), 1);
        let deleted = |o: &&Output| matches!(o, Output::PeerRmbDeleted { .. });
        assert_eq!(pair.hosts[SERVER].outputs.iter().filter(deleted).count(), 10);
    }
}

/// Gives one message to a host as if from its peer, and returns the answer.
fn ask(pair: &mut Pair, to: usize, message: Message) -> (Result<(), Anomaly>, Message) {
    let params = pair.hosts[to].group.params();
    let (version, dialect) = (params.generation.version(), params.profile.dialect);
    let bytes = Llc { version, message }.emit(&dialect);
    let result = pair.hosts[to].group.handle_message(LinkKey::FIRST, &bytes, pair.now);
    pair.drain(to);
    let (_, answer) = pair.trace.last().unwrap();
    let answer = Llc::parse(answer, &dialect).unwrap().message;
    pair.wires.clear();
    (result, answer)
}

// Shows: LLC-55, LLC-56, LLCV2-35, LLCV2-36, LLCV2-37.
#[test]
fn unknown_keys_give_a_negative_reply_and_no_more() {
    let known = region(CLIENT, RmbId(0), first_link(CLIENT).qpn).rkey;
    let rkeys = vec![known, Rkey(1), Rkey(2), Rkey(3)];
    let request = Message::DeleteRkey(DeleteRkey { rkeys: rkeys.clone(), ..Default::default() });
    let mut pair = Pair::running(v1(), [1, 1]);
    let (result, answer) = ask(&mut pair, SERVER, request.clone());
    assert_eq!(result, Err(Anomaly::UnknownRkey));
    let expected = DeleteRkey { reply: true, negative: true, error_mask: 0b0111_0000, rkeys };
    assert_eq!(answer, Message::DeleteRkey(expected));
    let mut pair = Pair::running(v2(), [1, 1]);
    let (_, answer) = ask(&mut pair, SERVER, request);
    let Message::DeleteRkeyReply(reply) = answer else { panic!("{answer:?}") };
    assert_eq!((reply.negative, reply.count, reply.not_deleted), (true, 4, 3));
    assert_eq!(reply.rkeys.as_slice(), [Rkey(1), Rkey(2), Rkey(3)]);
    assert_eq!(pair.active(SERVER).len(), 1, "the link stays up");
}

// Shows: LG-52.
#[test]
fn peers_have_255_rmbs_at_most() {
    let mut pair = Pair::running(v2(), [1, 1]);
    let confirm = |n: u32| {
        Message::ConfirmRkey(ConfirmRkey { rkey: Rkey(n), address: 1, ..Default::default() })
    };
    for n in 1..255 {
        assert_eq!(ask(&mut pair, SERVER, confirm(n << 20)).0, Ok(()));
    }
    assert_eq!(pair.hosts[SERVER].group.peer_rmbs(), MAX_RMBS);
    let (result, answer) = ask(&mut pair, SERVER, confirm(0xfff));
    assert_eq!(result, Err(Anomaly::TooManyRmbs));
    assert!(matches!(answer, Message::ConfirmRkey(reply) if reply.negative && !reply.retry));
    // A known key may be confirmed again.
    assert_eq!(ask(&mut pair, SERVER, confirm(1 << 20)).0, Ok(()));
    let full = pair.hosts[SERVER]
        .group
        .bind_peer_rmb(LinkKey::FIRST, Region { rkey: Rkey(0xffe), address: 0 });
    assert_eq!(full, Err(UseError::TooManyRmbs));
}

// Shows: LG-52.
#[test]
fn own_rmbs_are_255_at_most() {
    let mut pair = Pair::running(v2(), [1, 1]);
    for n in 1..255 {
        pair.add_rmb(SERVER, n);
    }
    pair.run_until_idle();
    let keys = [(LinkKey::FIRST, Region::default())];
    let group = &mut pair.hosts[SERVER].group;
    assert_eq!(group.add_rmb(RmbId(999), None, &keys, pair.now), Err(UseError::TooManyRmbs));
    assert_eq!(group.add_rmb(RmbId(3), None, &keys, pair.now), Err(UseError::KnownRmb(RmbId(3))));
    assert_eq!(pair.hosts[SERVER].rmbs.len(), 255);
    pair.assert_keys();
}

// Shows: LG-59.
#[test]
fn a_key_for_each_link_is_asked_for() {
    let mut pair = Pair::running(v2(), [2, 2]);
    let keys = [(LinkKey::FIRST, Region::default())];
    let missing = pair.active(SERVER)[1];
    let result = pair.hosts[SERVER].group.add_rmb(RmbId(3), None, &keys, pair.now);
    assert_eq!(result, Err(UseError::KeyMissing(missing)));
}

/// Client's Confirm RKey meets the server's Add Link (LLC-67, LLC-72).
// Shows: LLC-50, LLC-60, LLC-62, LLC-67, LLC-72, LLCV2-33.
#[test]
fn keys_that_meet_a_new_link_are_confirmed_with_it() {
    for profile in [PeerProfile::SPEC, PeerProfile::LINUX] {
        for generation in [v1(), v2()] {
            let mut pair = Pair::new(params_of(generation, profile, [1, 2]));
            pair.run_until_idle();
            pair.hosts[CLIENT].group.handle_rnic_down(RnicId(1), pair.now);
            pair.run_until_idle();
            pair.forget();
            // Both at the same moment.
            pair.hosts[SERVER].group.handle_rnic_up(rnic(SERVER, 1), pair.now);
            pair.drain(SERVER);
            pair.add_rmb(CLIENT, 7);
            pair.run(Duration::from_secs(1));
            assert!(confirmed(&pair, CLIENT, 7), "{:?}", pair.names());
            assert_eq!(pair.active(CLIENT).len(), 2);
            pair.assert_keys();
            let refused = pair.hosts[CLIENT].group.counters().rkeys_refused;
            assert_eq!(refused > 0, profile == PeerProfile::SPEC);
        }
    }
}

/// The reply to Confirm RKey comes when a link was added meanwhile (LLC-51).
// Shows: CLC-48, LLC-51.
#[test]
fn an_rmb_is_not_confirmed_before_the_newest_link_knows_it() {
    let mut pair = Pair::new(params_of(v2(), PeerProfile::LINUX, [1, 2]));
    pair.run_until_idle();
    pair.hosts[CLIENT].group.handle_rnic_down(RnicId(1), pair.now);
    pair.run_until_idle();
    pair.forget();
    pair.hosts[SERVER].group.handle_rnic_up(rnic(SERVER, 1), pair.now);
    pair.drain(SERVER);
    pair.add_rmb(CLIENT, 7);
    let mut reply = None;
    while pair.active(CLIENT).len() < 2 {
        pair.drain(SERVER);
        pair.drain(CLIENT);
        let wire = pair.wires.pop_front().unwrap();
        match wire.bytes[..4] {
            [0x26, .., 0x80] => reply = Some(wire),
            _ => pair.deliver(wire),
        }
    }
    pair.drain(CLIENT);
    pair.deliver(reply.unwrap());
    pair.drain(CLIENT);
    assert!(!confirmed(&pair, CLIENT, 7));
    pair.run_until_idle();
    assert!(confirmed(&pair, CLIENT, 7));
    pair.assert_keys();
}

/// Client's Confirm RKey meets the server's Delete Link (LLC-70, LLC-74).
// Shows: LLC-62, LLC-70, LLC-74.
#[test]
fn keys_that_meet_a_deletion_are_confirmed_without_the_link() {
    let mut pair = Pair::running(v2(), [2, 2]);
    let second = pair.active(SERVER)[1];
    pair.forget();
    pair.hosts[SERVER].group.delete_link(second, DeleteReason::OPERATOR, pair.now);
    pair.drain(SERVER);
    pair.add_rmb(CLIENT, 7);
    pair.run(Duration::from_millis(900));
    assert!(confirmed(&pair, CLIENT, 7));
    assert!(pair.hosts[CLIENT].group.counters().rkeys_refused > 0);
    pair.assert_keys();
}

/// Client's Delete RKey meets the server's Add Link: kept (LLC-78), or answered at once for Linux.
// Shows: LLC-78.
#[test]
fn deletions_that_meet_a_new_link_are_kept() {
    for (profile, last) in [(PeerProfile::SPEC, "> DeleteRkeyReply 80"), (PeerProfile::LINUX, "")] {
        let mut pair = Pair::new(params_of(v2(), profile, [1, 2]));
        pair.run_until_idle();
        pair.hosts[CLIENT].group.handle_rnic_down(RnicId(1), pair.now);
        pair.run_until_idle();
        pair.add_rmb(CLIENT, 7);
        pair.run_until_idle();
        pair.forget();
        pair.hosts[SERVER].group.handle_rnic_up(rnic(SERVER, 1), pair.now);
        pair.drain(SERVER);
        pair.hosts[CLIENT].group.remove_rmb(RmbId(7), pair.now);
        pair.run(Duration::from_secs(1));
        assert!(pair.hosts[CLIENT].has(&Output::RmbDeleted { rmb: RmbId(7) }));
        assert_eq!(pair.names().last().unwrap() == last, profile == PeerProfile::SPEC);
        assert_eq!(pair.active(SERVER).len(), 2);
        pair.assert_keys();
    }
}

// Shows: LLC-75, ERR-33, ERR-47.
#[test]
fn unanswered_keys_fail_their_link_and_go_over_another() {
    let mut pair = Pair::running(v2(), [2, 2]);
    pair.forget();
    pair.cut(CLIENT, LinkKey::FIRST);
    pair.add_rmb(CLIENT, 7);
    pair.run(Duration::from_secs(10));
    assert!(confirmed(&pair, CLIENT, 7), "{:?}", pair.names());
    assert!(pair.hosts[CLIENT].group.link(LinkKey::FIRST).is_none());
    pair.assert_keys();
}

// Shows: ERR-41.
#[test]
fn a_link_that_the_peer_names_no_key_for_is_dead() {
    let mut pair = Pair::running(v2(), [2, 2]);
    let second = pair.active(SERVER)[1];
    let message = Message::ConfirmRkey(ConfirmRkey { rkey: Rkey(9), ..Default::default() });
    assert_eq!(ask(&mut pair, SERVER, message).0, Ok(()));
    assert_eq!(pair.hosts[SERVER].group.link(second).unwrap().state, LinkState::Failed);
    assert_eq!(pair.hosts[SERVER].group.counters().anomalies(AnomalyKind::KeyMissing), 1);
}

// Shows: LLC-50, LLCV2-33.
#[test]
fn a_refusal_for_good_gives_the_rmb_back() {
    let mut pair = Pair::running(v2(), [1, 1]);
    pair.forget();
    pair.add_rmb(CLIENT, 7);
    pair.drain(CLIENT);
    let request = pair.trace[0].1.clone();
    let mut refusal = request;
    refusal[3] = 0xa0;
    pair.wires.clear();
    pair.hosts[CLIENT].group.handle_message(LinkKey::FIRST, &refusal, pair.now).unwrap();
    pair.drain(CLIENT);
    assert!(pair.hosts[CLIENT].has(&Output::RmbRefused { rmb: RmbId(7) }));
}

// Shows: LLC-52.
#[test]
fn keys_go_over_the_link_that_the_connection_wants() {
    let mut pair = Pair::running(v2(), [2, 2]);
    pair.forget();
    let second = pair.active(CLIENT)[1];
    let links = pair.active(CLIENT).into_iter();
    let regions: Vec<(LinkKey, Region)> = links
        .map(|link| (link, region(CLIENT, RmbId(7), pair.hosts[CLIENT].qpn(link).unwrap())))
        .collect();
    pair.hosts[CLIENT].rmbs.insert(RmbId(7));
    let now = pair.now;
    pair.hosts[CLIENT].group.add_rmb(RmbId(7), Some(second), &regions, now).unwrap();
    pair.run_until_idle();
    let on_second = |o: &Output| matches!(o, Output::PostLlc { link, .. } if *link == second);
    assert!(pair.hosts[CLIENT].outputs.iter().any(on_second));
    assert!(confirmed(&pair, CLIENT, 7));
    pair.assert_keys();
}
