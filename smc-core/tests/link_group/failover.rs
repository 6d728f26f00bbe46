// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Links fail (LG-30, LG-31, LG-56, ERR-22 to ERR-33), and each single message goes wrong.

use std::time::Duration;

use smc_core::link_group::*;

use super::support::*;

const BOTH: [fn() -> Generation; 2] = [v1, v2];

// Shows: LLC-36, LLC-41, LG-16, LG-30, LG-31, LG-42.
#[test]
fn connections_move_to_the_other_link() {
    for generation in BOTH {
        for host in [SERVER, CLIENT] {
            for which in [0, 1] {
                let mut pair = Pair::running(generation(), [2, 2]);
                let links = pair.active(host);
                for link in &links {
                    pair.hosts[host].group.connection_added(*link, pair.now).unwrap();
                }
                pair.forget();
                pair.fail(host, links[which]);
                pair.drain(host);
                let (from, to) = (links[which], links[1 - which]);
                let moved = Output::MoveConnections { from, to, dead: true };
                assert_eq!(pair.hosts[host].outputs[0], moved);
                assert_eq!(pair.hosts[host].group.link(to).unwrap().connections, 2);
                pair.run_until_idle();
                assert!(pair.usable());
                // The other end learns of the failure and moves, too.
                let there = &pair.hosts[1 - host].outputs;
                assert!(there.iter().any(|o| matches!(o, Output::MoveConnections { .. })));
                assert!(pair.hosts[host].has(&Output::DestroyLink { link: from }));
                // The RNICs still work, so there are two links again.
                assert_eq!(pair.active(host).len(), 2, "{:?}", pair.names());
                pair.assert_keys();
            }
        }
    }
}

// Shows: LG-26.
#[test]
fn a_link_comes_back_with_its_rnic() {
    for generation in BOTH {
        for host in [SERVER, CLIENT] {
            let mut pair = Pair::running(generation(), [2, 2]);
            pair.hosts[1 - host].broken.insert(RnicId(1));
            let second = pair.active(host)[1];
            pair.cut(host, second);
            pair.hosts[host].group.handle_rnic_down(RnicId(1), pair.now);
            pair.run_until_idle();
            assert_eq!(pair.active(SERVER).len(), 1);
            pair.hosts[1 - host].broken.clear();
            pair.run(Duration::from_secs(5));
            pair.hosts[host].group.handle_rnic_up(rnic(host, 1), pair.now);
            pair.run(Duration::from_secs(1));
            assert_eq!(pair.active(SERVER).len(), 2, "{host}: {:?}", pair.names());
            assert_eq!(pair.hosts[0].group.topology(), Topology::Symmetric);
            pair.assert_keys();
        }
    }
}

/// The second RNIC of the server goes and comes back, and the client's cannot be used yet.
fn come_back_too_soon(pair: &mut Pair) {
    pair.hosts[CLIENT].broken.insert(RnicId(1));
    let second = pair.active(SERVER)[1];
    pair.cut(SERVER, second);
    pair.hosts[SERVER].group.handle_rnic_down(RnicId(1), pair.now);
    pair.run_until_idle();
    pair.hosts[SERVER].group.handle_rnic_up(rnic(SERVER, 1), pair.now);
}

/// The port is up before the network is: the attempt after its return fails.
// Shows: LG-26.
#[test]
fn an_attempt_that_came_too_soon_is_made_again_soon() {
    for generation in BOTH {
        let mut pair = Pair::running(generation(), [2, 2]);
        come_back_too_soon(&mut pair);
        pair.run(Duration::from_secs(1));
        assert_eq!(pair.active(SERVER).len(), 1);
        pair.hosts[CLIENT].broken.clear();
        pair.run(Duration::from_secs(4));
        assert_eq!(pair.active(SERVER).len(), 2, "{:?}", pair.names());
        pair.assert_keys();
    }
}

/// Attempts failing for ever are few: one a minute, and four sooner ones after each request of the
/// client, also once a minute.
// Shows: LG-26.
#[test]
fn attempts_that_fail_for_ever_are_few() {
    let mut pair = Pair::running(v2(), [2, 2]);
    for host in &mut pair.hosts {
        host.group.connection_added(LinkKey::FIRST, pair.now).unwrap();
    }
    come_back_too_soon(&mut pair);
    pair.run(Duration::from_secs(600));
    pair.forget();
    pair.run(Duration::from_secs(600));
    let attempts = pair.names().iter().filter(|name| *name == "> AddLink 00").count();
    assert!((10..=60).contains(&attempts), "{attempts}: {:?}", pair.names());
}

// Shows: LG-56, CLOSE-37, SOCK-13.
#[test]
fn loss_of_all_links_resets_all_connections() {
    let mut pair = Pair::running(v2(), [2, 2]);
    pair.hosts[SERVER].group.connection_added(LinkKey::FIRST, pair.now).unwrap();
    pair.forget();
    for link in pair.active(SERVER) {
        pair.cut(SERVER, link);
    }
    pair.hosts[SERVER].group.handle_rnic_down(RnicId(0), pair.now);
    pair.hosts[SERVER].group.handle_rnic_down(RnicId(1), pair.now);
    pair.run_until_idle();
    let lost = Reason::LastLinkLost(Cause::Rnic);
    assert_eq!(pair.hosts[SERVER].terminated(), Some((lost, Ending::Reset)));
    pair.run(Duration::from_secs(40));
    assert!(pair.hosts[CLIENT].group.is_over(), "the peer notices by Test Link");
}

#[test]
fn an_rnic_that_goes_while_its_link_is_made_leaves_the_group_as_it_was() {
    for host in [SERVER, CLIENT] {
        let mut pair = Pair::usual(v2(), [2, 2]);
        pair.hosts[host].lazy = true;
        pair.run_until_idle();
        pair.hosts[host].group.handle_rnic_down(RnicId(1), pair.now);
        pair.run(Duration::from_secs(8));
        assert_eq!(pair.hosts[host].group.links().len(), 1);
        // A late answer has no effect.
        let late = LinkKey::FIRST;
        let prepared =
            Prepared { qpn: first_link(host).qpn, psn: Default::default(), regions: Vec::new() };
        let before = pair.hosts[host].group.clone();
        pair.hosts[host].group.handle_link_prepared(late, prepared, pair.now);
        assert_eq!(pair.hosts[host].group, before);
    }
}

/// A group's life: first contact, keys, failover, a new link, the end.
fn life(generation: Generation, profile: PeerProfile, rnics: [u32; 2], fault: Fault) -> Pair {
    let mut pair = Pair::new(params_of(generation, profile, rnics));
    pair.fault = fault;
    pair.run(Duration::from_secs(20));
    if pair.usable() {
        pair.add_rmb(SERVER, 1);
        pair.add_rmb(CLIENT, 2);
        pair.add_rmb(CLIENT, 3);
        pair.run(Duration::from_secs(20));
    }
    if pair.usable() {
        pair.hosts[CLIENT].group.handle_rnic_down(RnicId(1), pair.now);
        pair.run(Duration::from_secs(20));
    }
    if pair.usable() {
        pair.hosts[CLIENT].group.remove_rmb(RmbId(3), pair.now);
        pair.hosts[CLIENT].group.handle_rnic_up(rnic(CLIENT, 1), pair.now);
        pair.run(Duration::from_secs(70));
    }
    pair
}

/// Runs `life` with each of its messages lost, doubled or failed in turn.
fn each_message(fault: impl Fn(usize) -> Fault) {
    for generation in [v1(), v2(), v21(2), v21(1)] {
        for profile in [PeerProfile::SPEC, PeerProfile::LINUX] {
            for rnics in [[1, 1], [2, 2], [1, 2], [2, 1]] {
                let messages = life(generation, profile, rnics, Fault::None).sent;
                for n in 0..messages {
                    let fault = fault(n);
                    let mut pair = life(generation, profile, rnics, fault);
                    let context = format!("{generation:?} {rnics:?} {fault:?} {:?}", pair.names());
                    let over = pair.hosts.each_ref().map(|host| host.group.is_over());
                    if pair.usable() {
                        pair.assert_keys();
                        for host in [SERVER, CLIENT] {
                            let unfinished = pair.hosts[host]
                                .group
                                .links()
                                .iter()
                                .find(|link| link.state != LinkState::Active);
                            assert_eq!(unfinished, None, "{context}");
                        }
                    } else {
                        // The remaining end notices and ends, too.
                        pair.run(Duration::from_secs(120));
                        assert!(pair.over(), "{over:?} {context}");
                    }
                    pair.hosts[CLIENT]
                        .group
                        .terminate(smc_core::wire::llc::DeleteReason::OPERATOR, pair.now);
                    pair.run(Duration::from_secs(120));
                    assert!(pair.over(), "{context}");
                }
            }
        }
    }
}

// Shows: LLC-75, ERR-11, ERR-19, ERR-23, ERR-25, ERR-26, ERR-27, ERR-28, ERR-47.
#[test]
fn any_message_may_be_lost() {
    each_message(Fault::Lose);
}

#[test]
fn any_message_may_be_doubled() {
    each_message(Fault::Double);
}

// Shows: ERR-13.
#[test]
fn any_send_may_fail() {
    each_message(Fault::Break);
}

#[test]
fn without_faults_nothing_is_odd() {
    for generation in [v1(), v2(), v21(2), v21(1)] {
        for profile in [PeerProfile::SPEC, PeerProfile::LINUX] {
            for rnics in [[1, 1], [2, 2], [1, 2], [2, 1]] {
                let pair = life(generation, profile, rnics, Fault::None);
                assert!(pair.usable());
                assert_eq!(pair.anomalies, [], "{generation:?} {rnics:?} {:?}", pair.names());
            }
        }
    }
}

fn three_links() -> [Params; 2] {
    let mut params = params_of(v1(), PeerProfile::SPEC, [3, 3]);
    for params in &mut params {
        params.generation = Generation::V1 { max_links: 3 };
    }
    params
}

/// Add Link is lost on its link, and the link counts as failed; the attempt is repeated over
/// another one (ERR-22, ERR-23, ERR-26, ERR-28).
// Shows: ERR-22, ERR-23, ERR-26, ERR-28.
#[test]
fn unanswered_add_link_fails_the_link_it_went_over() {
    for lost in 0..5 {
        let mut pair = Pair::new(three_links());
        pair.run_until_idle();
        let links = pair.active(SERVER);
        pair.forget();
        pair.fault = Fault::Lose(pair.sent + lost);
        pair.hosts[SERVER].group.handle_rnic_up(rnic(SERVER, 2), pair.now);
        pair.run(Duration::from_secs(30));
        assert!(pair.usable(), "{lost}: {:?}", pair.names());
        let carrier = pair.hosts[SERVER].group.link(links[0]);
        assert_eq!(carrier.is_none(), lost < 4, "{lost}: {:?}", pair.names());
        assert!(pair.active(SERVER).len() >= 2, "{lost}: {:?}", pair.names());
        pair.assert_keys();
    }
}

// Shows: ERR-48.
#[test]
fn unanswered_request_add_link_fails_its_link() {
    let mut pair = Pair::running(v2(), [1, 1]);
    pair.fault = Fault::Lose(pair.sent);
    pair.hosts[CLIENT].group.handle_rnic_up(rnic(CLIENT, 1), pair.now);
    pair.run(Duration::from_secs(3));
    let lost = Reason::LastLinkLost(Cause::NoAddLinkReply);
    assert_eq!(pair.hosts[CLIENT].terminated(), Some((lost, Ending::Quiet)));
}

/// Towards Linux, Test Link says whether the link has failed.
// Shows: ERR-48.
#[test]
fn a_peer_that_is_slow_to_answer_request_add_link_keeps_its_link() {
    for alive in [true, false] {
        let mut pair = Pair::new(params_of(v2(), PeerProfile::LINUX, [1, 1]));
        pair.run_until_idle();
        pair.fault = Fault::Lose(pair.sent);
        pair.hosts[CLIENT].group.handle_rnic_up(rnic(CLIENT, 1), pair.now);
        pair.drain(CLIENT);
        if !alive {
            pair.cut(SERVER, LinkKey::FIRST);
        }
        pair.run(Duration::from_secs(5));
        assert_eq!(pair.active(CLIENT).len(), usize::from(alive), "{:?}", pair.names());
    }
}

/// The server's only attempt after a loss came too soon, and the server makes no other. The client,
/// with an RNIC never lost, asks for one (ERR-24, ERR-25, LG-26).
// Shows: LG-26, ERR-25.
#[test]
fn a_client_that_lost_a_link_asks_for_another() {
    for generation in BOTH {
        for profile in [PeerProfile::SPEC, PeerProfile::LINUX] {
            let mut params = params_of(generation(), profile, [2, 2]);
            params[SERVER].timers.retry_add_link = None;
            let mut pair = Pair::new(params);
            pair.run_until_idle();
            pair.hosts[SERVER].broken.insert(RnicId(1));
            let second = pair.active(SERVER)[1];
            pair.cut(SERVER, second);
            pair.hosts[SERVER].group.handle_link_failed(second, Cause::Rnic, pair.now);
            pair.run(Duration::from_secs(10));
            assert_eq!(pair.active(SERVER).len(), 1);
            pair.hosts[SERVER].broken.clear();
            pair.run(Duration::from_secs(45));
            assert_eq!(pair.active(SERVER).len(), 1);
            pair.run(Duration::from_secs(15));
            assert_eq!(pair.active(SERVER).len(), 2, "{:?}", pair.names());
            assert_eq!(pair.hosts[CLIENT].group.topology(), Topology::Symmetric);
            pair.assert_keys();
            // Once is enough.
            pair.forget();
            pair.run(Duration::from_secs(500));
            assert!(pair.names().iter().all(|name| name.contains("TestLink")));
        }
    }
}

/// A client that never had two links leaves the attempt to the server, for any time.
// Shows: LG-26.
#[test]
fn a_client_that_never_had_two_links_asks_for_none() {
    let mut params = params_of(v21(2), PeerProfile::LINUX, [1, 2]);
    params[SERVER].timers.retry_add_link = None;
    params[CLIENT].timers.test_link = None;
    params[SERVER].timers.test_link = None;
    let mut pair = Pair::new(params);
    pair.run_until_idle();
    pair.forget();
    pair.run(Duration::from_secs(500));
    assert!(!pair.names().iter().any(|name| name.contains("RequestAddLink")), "{:?}", pair.names());
}

/// The client frees a deleted link when its reply has arrived, or, without any word of the adapter,
/// a little later (LLC-39).
// Shows: LLC-39.
#[test]
fn client_frees_a_deleted_link_after_its_reply() {
    for word in [true, false] {
        let mut pair = Pair::running(v2(), [2, 2]);
        pair.forget();
        let second = pair.active(SERVER)[1];
        pair.hosts[SERVER].broken.insert(RnicId(1));
        pair.hosts[SERVER].group.delete_link(
            second,
            smc_core::wire::llc::DeleteReason::OPERATOR,
            pair.now,
        );
        pair.drain(SERVER);
        let wire = pair.wires.pop_front().unwrap();
        pair.deliver(wire);
        pair.drain(CLIENT);
        let freed = |pair: &Pair| {
            pair.hosts[CLIENT].outputs.iter().any(|o| matches!(o, Output::DestroyLink { .. }))
        };
        assert!(!freed(&pair));
        if word {
            pair.run_until_idle();
        } else {
            pair.wires.clear();
            pair.run(Duration::from_secs(1));
        }
        assert!(freed(&pair));
    }
}

/// Either end chooses the link for its own end of a connection (LG-29): counts or moves of one end
/// change nothing at the other.
// Shows: LG-29.
#[test]
fn ends_choose_their_links_by_themselves() {
    let mut pair = Pair::running(v2(), [2, 2]);
    let [one, other] = pair.active(SERVER)[..] else { panic!() };
    let now = pair.now;
    for _ in 0..3 {
        pair.hosts[SERVER].group.connection_added(one, now).unwrap();
        pair.hosts[CLIENT].group.connection_added(other, now).unwrap();
    }
    assert_eq!(pair.hosts[SERVER].group.pick_link(), Some(other));
    assert_eq!(pair.hosts[CLIENT].group.pick_link(), Some(one));
}

// Shows: ERR-12.
#[test]
fn first_contact_waits_longer_than_anything_later() {
    for role in [Role::Server, Role::Client] {
        let timers = Timers::of(role);
        assert!(timers.first_contact > 2 * timers.reply);
        assert!(timers.add_link > timers.reply && timers.confirm_added > timers.reply);
    }
    assert!(Timers::of(Role::Client).idle > Timers::of(Role::Server).idle);
}

/// The caller ends a connection before carrying out its move: no count is left, otherwise the group
/// would never be idle.
#[test]
fn a_connection_that_ends_during_its_move_is_not_counted_any_more() {
    let mut pair = Pair::running(v2(), [2, 2]);
    let links = pair.active(SERVER);
    let now = pair.now;
    let group = &mut pair.hosts[SERVER].group;
    group.connection_added(links[1], now).unwrap();
    group.connection_added(links[0], now).unwrap();
    group.handle_link_failed(links[1], Cause::QueuePair, now);
    group.connection_removed(links[1], now);
    assert_eq!(group.connections(), 1);
    group.connection_removed(links[0], now);
    assert_eq!(group.connections(), 0);
    group.connection_removed(links[0], now);
    assert_eq!(group.connections(), 0);
}
