// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Crossing exchanges (RFC 7609 section 3.5.5.3; LLC-59 to LLC-75, LLCV2-29).

use std::time::Duration;

use smc_core::link_group::*;
use smc_core::testing::Rng;
use smc_core::wire::llc::DeleteReason;

use super::support::*;

/// Delivers a few messages, each queue pair in order.
fn step(pair: &mut Pair, rng: &mut Rng) {
    for _ in 0..rng.below(4) {
        pair.drain(SERVER);
        pair.drain(CLIENT);
        if let Some(wire) = pair.wires.pop_front() {
            pair.deliver(wire);
        }
    }
}

fn crossing(seed: u64, moves: u32) -> Pair {
    let mut rng = Rng::new(seed);
    let generation = [v1(), v2(), v21(2)][rng.below(3) as usize];
    let profile = [PeerProfile::SPEC, PeerProfile::LINUX][rng.below(2) as usize];
    let mut pair = Pair::new(params_of(generation, profile, [2, 2]));
    pair.run_until_idle();
    let mut next_rmb = 10;
    for _ in 0..moves {
        let host = rng.below(2) as usize;
        let now = pair.now;
        // A group about to end takes nothing new.
        if pair.hosts.iter().any(|host| !host.group.has_room()) {
            break;
        }
        let group = &mut pair.hosts[host].group;
        match rng.below(6) {
            0 | 1 => {
                pair.drain(host);
                if pair.hosts[host].group.has_room() {
                    pair.add_rmb(host, next_rmb);
                    next_rmb += 1;
                }
            }
            2 => group.remove_rmb(RmbId(10 + rng.below(next_rmb - 9)), now),
            3 => {
                let last = group.links().last().map_or(LinkKey::FIRST, |link| link.key);
                group.delete_link(last, DeleteReason::OPERATOR, now);
            }
            4 => group.handle_rnic_up(rnic(host, 1), now),
            _ => group.handle_rnic_down(RnicId(1), now),
        }
        step(&mut pair, &mut rng);
    }
    pair
}

// Shows: LLC-60, LLC-68, LLC-69, LLC-71.
#[test]
fn whatever_crosses_both_ends_agree_in_the_end() {
    let mut ended = 0;
    for seed in 0..1500 {
        let mut pair = crossing(seed, 12);
        pair.run(Duration::from_secs(30));
        if pair.hosts.iter().any(|host| host.group.is_over()) {
            // The last link may be deleted, too.
            ended += 1;
            continue;
        }
        let context = || format!("seed {seed} {:?} {:?}", pair.names(), pair.anomalies);
        assert!(pair.usable(), "{}", context());
        assert_eq!(pair.active(SERVER).len(), pair.active(CLIENT).len(), "{}", context());
        pair.assert_keys();
        for host in &pair.hosts {
            let unfinished = host.group.links().iter().find(|link| link.state != LinkState::Active);
            assert_eq!(unfinished, None, "{}", context());
            for rmb in &host.rmbs {
                assert_eq!(host.group.rmb_state(*rmb), Some(RmbState::Confirmed), "{}", context());
            }
        }
        let topologies = pair.hosts.each_ref().map(|host| host.group.topology());
        assert!(topologies[0] != Topology::None);
    }
    assert!(ended < 750, "{ended}");
}

#[test]
fn a_clone_does_what_the_original_does() {
    for seed in 0..50 {
        let mut one = crossing(seed, 8);
        let mut other = crossing(seed, 8);
        one.run_until_idle();
        other.run_until_idle();
        assert_eq!(one.trace, other.trace, "seed {seed}");
        let copy = one.hosts[SERVER].group.clone();
        assert_eq!(copy, one.hosts[SERVER].group);
    }
}

/// The client's notice of an RNIC crosses the server's Add Link (LLC-64, LLCV2-29).
// Shows: LLC-64, LLCV2-27, LLCV2-29.
#[test]
fn add_link_is_the_answer_to_a_notice_that_it_crosses() {
    for generation in [v1(), v2()] {
        let mut pair = Pair::running(generation, [1, 1]);
        pair.forget();
        pair.hosts[CLIENT].group.handle_rnic_up(rnic(CLIENT, 1), pair.now);
        pair.hosts[SERVER].group.handle_rnic_up(rnic(SERVER, 1), pair.now);
        pair.drain(CLIENT);
        pair.drain(SERVER);
        pair.run_until_idle();
        assert_eq!(pair.active(CLIENT).len(), 2);
        let adds = pair.names().iter().filter(|name| *name == "> AddLink 00").count();
        assert_eq!(adds, 1, "{:?}", pair.names());
        assert_eq!(pair.hosts[0].group.topology(), Topology::Symmetric);
        assert_eq!(pair.anomalies, []);
    }
}

/// The client wants a link deleted while another is added (LLC-65): its turn comes.
// Shows: LLC-65.
#[test]
fn a_wish_for_deletion_waits_for_the_new_link() {
    let mut params = params_of(v1(), PeerProfile::SPEC, [3, 3]);
    for params in &mut params {
        params.generation = Generation::V1 { max_links: 3 };
    }
    let mut pair = Pair::new(params);
    pair.run_until_idle();
    let second = pair.active(CLIENT)[1];
    pair.forget();
    pair.hosts[SERVER].group.handle_rnic_up(rnic(SERVER, 2), pair.now);
    pair.hosts[CLIENT].group.delete_link(second, DeleteReason::OPERATOR, pair.now);
    pair.run_until_idle();
    let names = pair.names();
    let at = |name: &str| names.iter().position(|have| have == name).unwrap();
    assert!(at("< DeleteLink 20") < at("> ConfirmLink 03"));
    assert!(at("> DeleteLink 20") > at("< ConfirmLink 83"));
    assert!(pair.hosts[CLIENT].group.link(second).is_none());
    pair.assert_keys();
}

/// The server receives the client's Delete Link while its own Confirm RKey has no reply. It sends
/// its Delete Link only after that reply (LLC-73).
// Shows: LLC-73.
#[test]
fn a_wish_for_deletion_waits_for_confirm_rkey() {
    let mut pair = Pair::running(v2(), [2, 2]);
    pair.forget();
    let second = pair.active(CLIENT)[1];
    // Without this, the server would add the link again.
    pair.hosts[CLIENT].broken.insert(RnicId(1));
    pair.add_rmb(SERVER, 7);
    pair.drain(SERVER);
    let confirm_rkey = pair.wires.pop_back().unwrap();
    pair.hosts[CLIENT].group.delete_link(second, DeleteReason::OPERATOR, pair.now);
    pair.run_until_idle();
    assert_eq!(pair.names(), ["> ConfirmRkey 00", "< DeleteLink 20"], "no Delete Link yet");
    pair.wires.push_back(confirm_rkey);
    pair.run_until_idle();
    let names = pair.names();
    assert_eq!(names[2..4], ["< ConfirmRkey 80", "> DeleteLink 20"], "{names:?}");
    assert!(pair.hosts[SERVER].has(&Output::RmbConfirmed { rmb: RmbId(7) }));
    pair.assert_keys();
}

/// The end of all may come in the middle of anything (LLC-66), and so may a question (LLC-63).
// Shows: LLC-59, LLC-63, LLC-66, LLCV2-8.
#[test]
fn the_end_and_questions_wait_for_nothing() {
    for host in [SERVER, CLIENT] {
        for steps in 0..12 {
            let mut pair = Pair::running(v1(), [1, 2]);
            pair.hosts[CLIENT].group.handle_rnic_down(RnicId(1), pair.now);
            pair.run_until_idle();
            pair.add_rmb(CLIENT, 1);
            pair.hosts[SERVER].group.handle_rnic_up(rnic(SERVER, 1), pair.now);
            for _ in 0..steps {
                pair.drain(SERVER);
                pair.drain(CLIENT);
                if let Some(wire) = pair.wires.pop_front() {
                    pair.deliver(wire);
                }
            }
            pair.drain(host);
            pair.forget();
            let mut question = [0; 44];
            (question[0], question[1]) = (7, 44);
            let now = pair.now;
            pair.hosts[host].group.handle_message(LinkKey::FIRST, &question, now).unwrap();
            pair.drain(host);
            assert_eq!(pair.trace[0].1[3], 0x80);
            pair.hosts[1 - host].group.terminate(DeleteReason::OPERATOR, now);
            pair.run_until_idle();
            assert!(pair.over(), "after {steps} messages");
        }
    }
}
