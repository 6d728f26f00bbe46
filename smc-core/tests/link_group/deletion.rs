// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Delete Link and Test Link (LLC-34 to LLC-45, LLC-58, ERR-29 to ERR-34, ERR-37 to ERR-40).

use std::time::Duration;

use smc_core::link_group::*;
use smc_core::time::Tick;
use smc_core::wire::llc::*;

use super::support::*;

const BOTH: [fn() -> Generation; 2] = [v1, v2];

// Shows: LLC-34, LLC-37, LLC-38, LG-42, LG-44.
#[test]
fn server_deletes_a_link_and_keeps_it_until_the_reply() {
    for generation in BOTH {
        let mut pair = Pair::running(generation(), [2, 2]);
        pair.forget();
        let second = pair.active(SERVER)[1];
        pair.hosts[SERVER].group.connection_added(second, pair.now).unwrap();
        pair.hosts[SERVER].group.delete_link(second, DeleteReason::OPERATOR, pair.now);
        pair.drain(SERVER);
        let moved = Output::MoveConnections { from: second, to: LinkKey::FIRST, dead: false };
        assert!(matches!(&pair.hosts[SERVER].outputs[..], [first, ..] if *first == moved));
        assert!(!pair.hosts[SERVER].has(&Output::DestroyLink { link: second }));
        // Prevents a new attempt at the link.
        pair.hosts[CLIENT].broken.insert(RnicId(1));
        pair.run_until_idle();
        assert!(pair.hosts[SERVER].has(&Output::DestroyLink { link: second }));
        assert_eq!(pair.names()[..2], ["> DeleteLink 20", "< DeleteLink a0"]);
        assert_eq!(pair.hosts[SERVER].group.link(LinkKey::FIRST).unwrap().connections, 1);
        assert_eq!(pair.anomalies, []);
    }
}

/// Each end moves its connections away from a link as soon as the end wants the link deleted,
/// although the server's Delete Link has to wait: for the reply to the client's Delete Link at the
/// client, for the reply to Confirm RKey at the server.
// Shows: LG-44.
#[test]
fn connections_leave_before_the_deletion_begins() {
    for host in [SERVER, CLIENT] {
        let mut pair = Pair::running(v2(), [2, 2]);
        let second = pair.active(host)[1];
        pair.hosts[host].group.connection_added(second, pair.now).unwrap();
        if host == SERVER {
            pair.add_rmb(SERVER, 7);
        }
        pair.drain(host);
        pair.forget();
        pair.hosts[host].group.delete_link(second, DeleteReason::OPERATOR, pair.now);
        pair.drain(host);
        let moved = Output::MoveConnections { from: second, to: LinkKey::FIRST, dead: false };
        assert_eq!(pair.hosts[host].outputs.first(), Some(&moved), "host {host}");
        assert_eq!(pair.hosts[host].group.link(LinkKey::FIRST).unwrap().connections, 1);
        assert_eq!(pair.hosts[host].group.link(second).unwrap().state, LinkState::Leaving);
    }
}

// Shows: LLC-40, LLC-41, LG-15, CLOSE-36.
#[test]
fn client_asks_and_the_server_deletes() {
    for generation in BOTH {
        let mut pair = Pair::running(generation(), [2, 2]);
        pair.forget();
        pair.hosts[CLIENT].broken.insert(RnicId(1));
        let second = pair.active(CLIENT)[1];
        pair.hosts[CLIENT].group.delete_link(second, DeleteReason::OPERATOR, pair.now);
        pair.run_until_idle();
        let names = pair.names();
        assert_eq!(names[..3], ["< DeleteLink 20", "> DeleteLink 20", "< DeleteLink a0"]);
        assert_eq!(pair.active(CLIENT).len(), 1);
        pair.assert_keys();
    }
}

// Shows: LLC-4, LLC-5, LLC-35, ERR-39, ERR-40.
#[test]
fn unknown_links_are_named_as_such() {
    for (host, from) in [(SERVER, '>'), (CLIENT, '<')] {
        let mut pair = Pair::running(v2(), [2, 2]);
        pair.forget();
        let message = Message::DeleteLink(DeleteLink { link_number: 77, ..Default::default() });
        let bytes = Llc { version: v2().version(), message }.emit(&Dialect::SPEC);
        let result = pair.hosts[host].group.handle_message(LinkKey::FIRST, &bytes, pair.now);
        assert_eq!(result, Err(Anomaly::UnknownLink(77)));
        pair.drain(host);
        assert_eq!(pair.names(), [format!("{from} DeleteLink 80")]);
        assert_eq!(pair.trace[0].1[4..9], [77, 0, 0x10, 0, 0]);
    }
}

// Shows: LLC-34, LLC-43, LLC-44, LG-57, CLOSE-34, CLOSE-36, ERR-31.
#[test]
fn server_ends_the_group_and_waits_only_for_its_adapter() {
    for generation in BOTH {
        let mut pair = Pair::running(generation(), [2, 2]);
        pair.forget();
        pair.hosts[SERVER].group.connection_added(LinkKey::FIRST, pair.now).unwrap();
        pair.hosts[CLIENT].group.connection_added(LinkKey::FIRST, pair.now).unwrap();
        pair.hosts[SERVER].group.terminate(DeleteReason::OPERATOR, pair.now);
        pair.run_until_idle();
        assert_eq!(pair.names(), ["> DeleteLink 40"]);
        let reason = Reason::Local(DeleteReason::OPERATOR);
        assert_eq!(pair.hosts[SERVER].terminated(), Some((reason, Ending::Reset)));
        let reason = Reason::PeerDeletedAll(DeleteReason::OPERATOR);
        assert_eq!(pair.hosts[CLIENT].terminated(), Some((reason, Ending::Reset)));
    }
}

// Shows: LLC-45, LG-46, CLOSE-34.
#[test]
fn client_asks_for_the_end_and_the_server_orders_it() {
    let mut pair = Pair::running(v2(), [2, 2]);
    pair.forget();
    pair.hosts[CLIENT].group.terminate(DeleteReason::OPERATOR, pair.now);
    pair.run_until_idle();
    assert_eq!(pair.names(), ["< DeleteLink 60", "> DeleteLink 60"]);
    assert!(pair.over());
    for host in &pair.hosts {
        assert_eq!(host.terminated().unwrap().1, Ending::Quiet);
    }
}

// Shows: LG-57, ERR-30, ERR-31.
#[test]
fn a_peer_that_does_not_answer_the_final_delete_link_is_left_alone() {
    for host in [SERVER, CLIENT] {
        let mut pair = Pair::running(v2(), [2, 2]);
        for link in pair.active(host) {
            pair.cut(host, link);
        }
        pair.forget();
        pair.hosts[host].group.terminate(DeleteReason::OPERATOR, pair.now);
        pair.run(Duration::from_secs(5));
        assert!(pair.hosts[host].group.is_over());
        // The client tries each link (ERR-30).
        assert_eq!(pair.trace.len(), if host == SERVER { 1 } else { 2 });
    }
}

// Shows: LLC-35, LG-45, LG-46, CLOSE-35.
#[test]
fn idle_group_is_ended_by_the_server() {
    let mut pair = Pair::running(v2(), [2, 2]);
    pair.forget();
    let silence = Duration::from_secs(599);
    pair.run(silence);
    assert!(pair.usable());
    pair.run(Duration::from_secs(2));
    assert_eq!(pair.hosts[SERVER].terminated(), Some((Reason::Idle, Ending::Quiet)));
    let reason = Reason::PeerDeletedAll(DeleteReason::PROGRAM);
    assert_eq!(pair.hosts[CLIENT].terminated(), Some((reason, Ending::Quiet)));
}

// Shows: LLC-42, CLOSE-35.
#[test]
fn idle_client_does_not_give_the_reason_that_is_the_servers() {
    let mut params = params_of(v2(), PeerProfile::SPEC, [1, 1]);
    params[SERVER].timers.idle = Duration::from_secs(10_000);
    let mut pair = Pair::new(params);
    pair.run(Duration::from_secs(700));
    assert!(pair.over());
    let last = pair.trace.iter().find(|(_, bytes)| bytes[0] & 0xf == 4).unwrap();
    assert_eq!((last.0, &last.1[5..9]), (CLIENT, &[0, 2, 0, 0][..]));
}

// Shows: CLOSE-35.
#[test]
fn a_group_with_connections_is_never_idle() {
    let mut pair = Pair::running(v2(), [1, 1]);
    for host in &mut pair.hosts {
        host.group.connection_added(LinkKey::FIRST, pair.now).unwrap();
    }
    pair.run(Duration::from_secs(5000));
    assert!(pair.usable());
    for host in &mut pair.hosts {
        host.group.connection_removed(LinkKey::FIRST, pair.now);
    }
    pair.run(Duration::from_secs(605));
    assert!(pair.over());
}

// Shows: LLC-4, LLC-5, LLC-6, LLC-58, LLCV2-38, SOCK-11, SOCK-12.
#[test]
fn silence_brings_test_link_and_its_echo() {
    let mut pair = Pair::running(v21(1), [1, 1]);
    pair.forget();
    pair.run(Duration::from_secs(29));
    assert_eq!(pair.trace, []);
    pair.run(Duration::from_secs(2));
    let tests = pair.names().iter().filter(|name| name.contains("TestLink 00")).count();
    let echoes = pair.names().iter().filter(|name| name.contains("TestLink 80")).count();
    assert_eq!(tests, echoes);
    assert!(tests >= 1 && pair.usable());
    // Any received message delays the test.
    pair.forget();
    for _ in 0..10 {
        pair.run(Duration::from_secs(20));
        for host in &mut pair.hosts {
            host.group.handle_received(LinkKey::FIRST, pair.now);
        }
    }
    assert_eq!(pair.trace.len() % 2, 0);
    assert!(pair.names().iter().all(|name| name.contains("TestLink")));
}

// Shows: SOCK-10, SOCK-11.
#[test]
fn keepalive_of_a_connection_tests_a_link_that_was_silent_as_long() {
    let mut pair = Pair::running(v21(1), [1, 1]);
    pair.forget();
    let silence = Duration::from_secs(10);
    let ask = |pair: &mut Pair| {
        let now = pair.now;
        pair.hosts[SERVER].group.handle_keepalive(LinkKey::FIRST, silence, now);
        pair.drain(SERVER);
        pair.run_until_idle();
        pair.names().len()
    };
    pair.run(Duration::from_secs(9));
    assert_eq!(ask(&mut pair), 0, "not silent for long enough");
    pair.run(Duration::from_secs(2));
    assert_eq!(ask(&mut pair), 2, "asked and answered");
    assert_eq!(ask(&mut pair), 2, "the answer was heard");
    assert!(pair.names().iter().all(|name| name.contains("TestLink")));
}

// Shows: LG-58, SOCK-13, ERR-34.
#[test]
fn a_link_that_does_not_answer_test_link_is_dead() {
    let mut pair = Pair::running(v2(), [1, 1]);
    pair.hosts[SERVER].group.connection_added(LinkKey::FIRST, pair.now).unwrap();
    pair.forget();
    pair.cut(SERVER, LinkKey::FIRST);
    pair.run(Duration::from_secs(33));
    let lost = Reason::LastLinkLost(Cause::NoTestReply);
    assert_eq!(pair.hosts[SERVER].terminated(), Some((lost, Ending::Reset)));
    assert_eq!(pair.hosts[CLIENT].terminated(), Some((lost, Ending::Quiet)));
}

// Shows: ERR-42.
#[test]
fn an_altered_echo_is_a_violation() {
    let mut pair = Pair::running(v2(), [2, 2]);
    pair.forget();
    pair.run(Duration::from_secs(29));
    let due = pair.hosts[SERVER].group.poll_timeout().unwrap();
    pair.now = due;
    pair.hosts[SERVER].group.handle_timeout(due);
    pair.drain(SERVER);
    let mut wire = pair.wires.pop_front().unwrap();
    wire.bytes[3] = 0x80;
    wire.bytes[19] ^= 1;
    let result = pair.hosts[SERVER].group.handle_message(LinkKey::FIRST, &wire.bytes, due);
    assert_eq!(result, Err(Anomaly::WrongEcho));
    assert_eq!(pair.hosts[SERVER].group.link(LinkKey::FIRST).unwrap().state, LinkState::Failed);
    pair.drain(SERVER);
    let delete = pair.trace.last().unwrap();
    assert_eq!(delete.1[5..9], [0, 4, 0, 0], "reason: protocol violation");
}

// Shows: LLC-36, ERR-29, ERR-32.
#[test]
fn unanswered_deletion_takes_the_carrying_link_too() {
    let mut params = params_of(v1(), PeerProfile::SPEC, [3, 3]);
    for params in &mut params {
        params.generation = Generation::V1 { max_links: 3 };
    }
    let mut pair = Pair::new(params);
    pair.run_until_idle();
    pair.hosts[SERVER].group.handle_rnic_up(rnic(SERVER, 2), pair.now);
    pair.run_until_idle();
    assert_eq!(pair.active(SERVER).len(), 3);
    for host in [SERVER, CLIENT] {
        let mut pair = Pair::new(params_of_three());
        pair.run_until_idle();
        pair.hosts[SERVER].group.handle_rnic_up(rnic(SERVER, 2), pair.now);
        pair.run_until_idle();
        let links = pair.active(host);
        pair.forget();
        // Two links die; the first to be noticed is announced over the other.
        pair.cut(host, links[0]);
        pair.fail(host, links[1]);
        pair.run(Duration::from_secs(20));
        assert_eq!(pair.hosts[host].group.link(links[0]), None, "{:?}", pair.names());
        assert_eq!(pair.hosts[host].group.link(links[1]), None);
        assert!(pair.usable());
        pair.assert_keys();
    }
}

/// Models AF_SMC waiting for the last packets of the dead link.
// Shows: ERR-29, ERR-32.
#[test]
fn an_answer_to_a_deletion_may_come_late_while_the_carrying_link_lives() {
    for host in [SERVER, CLIENT] {
        for late in [Duration::from_secs(45), Duration::from_secs(100)] {
            let mut params = params_of(v21(2), PeerProfile::LINUX, [2, 2]);
            // The peer does not notice by itself.
            params.iter_mut().for_each(|params| params.timers.test_link = None);
            let mut pair = Pair::new(params);
            pair.run_until_idle();
            let second = pair.active(host)[1];
            pair.hosts[host].group.handle_link_failed(second, Cause::Rnic, pair.now);
            pair.drain(host);
            let request = pair.wires.pop_front().unwrap();
            pair.run(late);
            assert!(pair.usable(), "{:?}", pair.names());
            // The wait is limited to a minute.
            let waits = pair.hosts[host].group.link(second).is_some();
            assert_eq!(waits, late < Duration::from_secs(60));
            pair.wires.push_back(request);
            pair.run(Duration::from_secs(120));
            assert!(pair.usable(), "{:?}", pair.names());
            assert_eq!(pair.hosts[host].group.link(second), None);
            assert_eq!(pair.active(host), pair.active(1 - host));
            pair.assert_keys();
        }
    }
}

fn params_of_three() -> [Params; 2] {
    let mut params = params_of(v1(), PeerProfile::SPEC, [3, 3]);
    for params in &mut params {
        params.generation = Generation::V1 { max_links: 3 };
    }
    params
}

#[test]
fn nothing_follows_the_end() {
    let mut pair = Pair::running(v2(), [1, 1]);
    pair.fail(SERVER, LinkKey::FIRST);
    pair.run_until_idle();
    let group = &mut pair.hosts[SERVER].group;
    let now = Tick(u64::MAX);
    assert_eq!(group.handle_message(LinkKey::FIRST, &[0x27; 44], now), Err(Anomaly::GroupOver));
    group.handle_timeout(now);
    group.handle_rnic_up(rnic(SERVER, 5), now);
    group.terminate(DeleteReason::OPERATOR, now);
    assert_eq!(group.add_rmb(RmbId(5), None, &[], now), Err(UseError::Over));
    assert_eq!((group.poll_output(), group.poll_timeout(), group.pick_link()), (None, None, None));
}
