//! Links fail (LG-30, LG-31, LG-56, ERR-22 to ERR-33), and each single message goes wrong.

use std::time::Duration;

use smc_core::link_group::*;

use super::support::*;

const BOTH: [fn() -> Generation; 2] = [v1, v2];

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
                pair.settle();
                assert!(pair.usable());
                // The other end learns of it and moves, too.
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

#[test]
fn a_link_comes_back_with_its_rnic() {
    for generation in BOTH {
        for host in [SERVER, CLIENT] {
            let mut pair = Pair::running(generation(), [2, 2]);
            pair.hosts[1 - host].broken.insert(RnicId(1));
            let second = pair.active(host)[1];
            pair.cut(host, second);
            pair.hosts[host].group.handle_rnic_down(RnicId(1), pair.now);
            pair.settle();
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
    pair.settle();
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
        pair.settle();
        pair.hosts[host].group.handle_rnic_down(RnicId(1), pair.now);
        pair.run(Duration::from_secs(8));
        assert_eq!(pair.hosts[host].group.links().len(), 1);
        // An answer that comes late does nothing.
        let late = LinkKey::FIRST;
        let prepared =
            Prepared { qpn: first_link(host).qpn, psn: Default::default(), regions: Vec::new() };
        let before = pair.hosts[host].group.clone();
        pair.hosts[host].group.handle_link_prepared(late, prepared, pair.now);
        assert_eq!(pair.hosts[host].group, before);
    }
}

/// What happens in a group's life: first contact, keys, failover, a new link, the end.
fn life(generation: Generation, conduct: Conduct, rnics: [u32; 2], fault: Fault) -> Pair {
    let mut pair = Pair::new(params_of(generation, conduct, rnics));
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

/// Runs that life with each of its messages lost, doubled or failed in turn.
fn each_message(fault: impl Fn(usize) -> Fault) {
    for generation in [v1(), v2(), v21(2), v21(1)] {
        for conduct in [Conduct::SPEC, Conduct::LINUX] {
            for rnics in [[1, 1], [2, 2], [1, 2], [2, 1]] {
                let messages = life(generation, conduct, rnics, Fault::None).sent;
                for n in 0..messages {
                    let fault = fault(n);
                    let mut pair = life(generation, conduct, rnics, fault);
                    let context = format!("{generation:?} {rnics:?} {fault:?} {:?}", pair.names());
                    let over = pair.hosts.each_ref().map(|host| host.group.is_over());
                    if pair.usable() {
                        pair.assert_keys();
                        for host in [SERVER, CLIENT] {
                            let unsettled = pair.hosts[host]
                                .group
                                .links()
                                .iter()
                                .find(|link| link.state != LinkState::Active);
                            assert_eq!(unsettled, None, "{context}");
                        }
                    } else {
                        // Whoever is left alone notices and ends, too.
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

#[test]
fn any_message_may_be_lost() {
    each_message(Fault::Lose);
}

#[test]
fn any_message_may_be_doubled() {
    each_message(Fault::Double);
}

#[test]
fn any_send_may_fail() {
    each_message(Fault::Break);
}

#[test]
fn without_faults_nothing_is_odd() {
    for generation in [v1(), v2(), v21(2), v21(1)] {
        for conduct in [Conduct::SPEC, Conduct::LINUX] {
            for rnics in [[1, 1], [2, 2], [1, 2], [2, 1]] {
                let pair = life(generation, conduct, rnics, Fault::None);
                assert!(pair.usable());
                assert_eq!(pair.anomalies, [], "{generation:?} {rnics:?} {:?}", pair.names());
            }
        }
    }
}
