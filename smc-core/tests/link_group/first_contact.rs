// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! First contact (RFC 7609 section 3.5.1; LG-17 to LG-25, ERR-14 to ERR-21).

use std::time::Duration;

use smc_core::link_group::*;
use smc_core::time::Tick;
use smc_core::wire::clc::Version;

use super::support::*;

const ALL: [fn() -> Generation; 3] = [v1, v2, || v21(2)];

// Shows: LG-1, LG-8, LG-17, LG-18, LG-20, LG-24.
#[test]
fn lone_rnics_refuse_the_second_link_and_go_on_at_once() {
    for generation in ALL {
        let mut pair = Pair::usual(generation(), [1, 1]);
        pair.run_until_idle();
        assert!(pair.usable());
        assert!(pair.now < Tick(1000), "nobody waited for a timer");
        assert_eq!(pair.active(SERVER).len(), 1);
        assert_eq!(pair.hosts[0].group.topology(), Topology::Single);
        assert_eq!(pair.anomalies, []);
        pair.assert_keys();
    }
}

// Shows: LLC-10, LLC-11, LLC-13, LLC-27, LLC-32, LLC-33, LG-6, LG-18, LG-19, LG-22.
#[test]
fn version_1_goes_through_the_messages_of_figures_8_and_9() {
    let mut pair = Pair::usual(v1(), [2, 2]);
    pair.run_until_idle();
    assert_eq!(
        pair.names(),
        [
            "> ConfirmLink 03",
            "< ConfirmLink 83",
            "> AddLink 00",
            "< AddLink 80",
            "> AddLinkCont 00",
            "< AddLinkCont 80",
            "> ConfirmLink 03",
            "< ConfirmLink 83",
        ]
    );
    assert!(pair.usable());
    assert_eq!(pair.anomalies, []);
    for host in &pair.hosts {
        assert_eq!(host.group.topology(), Topology::Symmetric);
        assert_eq!(host.outputs.last(), Some(&Output::GroupUsable));
    }
    pair.assert_keys();
}

// Shows: LLC-11, LLCV2-6, LLCV2-17, LG-6, LG-19, LG-59.
#[test]
fn version_2_names_the_keys_in_add_link() {
    for generation in [v2(), v21(2)] {
        let mut pair = Pair::usual(generation, [2, 2]);
        pair.run_until_idle();
        let names = pair.names();
        let kinds: Vec<&str> = names.iter().map(String::as_str).collect();
        assert_eq!(
            kinds,
            [
                "> ConfirmLink 03",
                "< ConfirmLink 83",
                "> AddLink 00",
                "< AddLink 80",
                "> ConfirmLink 03",
                "< ConfirmLink 83",
            ]
        );
        assert!(pair.usable());
        pair.assert_keys();
    }
}

// Shows: LLCV2-39, LG-11, LG-12, LG-54.
#[test]
fn one_link_agreed_on_means_no_add_link() {
    let mut pair = Pair::usual(v21(1), [2, 2]);
    pair.run_until_idle();
    assert_eq!(pair.names(), ["> ConfirmLink 03", "< ConfirmLink 83"]);
    assert!(pair.usable());
    assert_eq!(pair.hosts[1].group.topology(), Topology::Single);
}

// Shows: LG-1, LG-8, LG-21, LG-23.
#[test]
fn one_sided_second_rnic_gives_an_asymmetric_link() {
    for generation in ALL {
        let topologies = |rnics| {
            let mut pair = Pair::usual(generation(), rnics);
            pair.run_until_idle();
            assert!(pair.usable());
            pair.assert_keys();
            [pair.hosts[0].group.topology(), pair.hosts[1].group.topology()]
        };
        assert_eq!(topologies([2, 1]), [Topology::AsymmetricPeer, Topology::AsymmetricLocal]);
        assert_eq!(topologies([1, 2]), [Topology::AsymmetricLocal, Topology::AsymmetricPeer]);
    }
}

// Shows: LG-17.
#[test]
fn an_add_link_with_no_mtu_is_refused_without_any_queue_pair() {
    let mut params = params_of(v2(), PeerProfile::LINUX, [1, 2]);
    params[0].single_rnic = SingleRnic::InvalidMtu;
    let mut pair = Pair::new(params);
    while pair.sent < 3 {
        pair.drain(SERVER);
        pair.drain(CLIENT);
        let wire = pair.wires.pop_front().unwrap();
        pair.deliver(wire);
    }
    assert!(!pair.hosts[SERVER].group.is_usable(), "the attempt is to be seen through");
    pair.run_until_idle();
    assert!(pair.usable());
    assert_eq!(pair.names()[2..], ["> AddLink 00", "< AddLink c0"]);
    for host in &pair.hosts {
        assert!(!host.outputs.iter().any(|o| matches!(o, Output::PrepareLink { .. })));
        assert!(!host.outputs.iter().any(|o| matches!(o, Output::DestroyLink { .. })));
    }
}

// Shows: LG-17.
#[test]
fn a_server_without_a_queue_pair_for_the_second_link_leaves_no_client_waiting() {
    for generation in ALL {
        let mut pair = Pair::usual(generation(), [2, 2]);
        pair.hosts[SERVER].broken.insert(RnicId(1));
        pair.run_until_idle();
        assert!(pair.usable());
        assert!(pair.now < Tick(1000), "nobody waited for a timer");
        // Version 2 has its reason among the flags.
        let refused = if generation().version() == Version::V1 { "c0" } else { "c2" };
        assert_eq!(pair.names()[2..4], ["> AddLink 00".into(), format!("< AddLink {refused}")]);
        assert_eq!([pair.active(SERVER).len(), pair.active(CLIENT).len()], [1, 1]);
        assert_eq!(pair.anomalies, []);
    }
}

// Shows: LLC-17, LLC-18, LG-12.
#[test]
fn smaller_max_links_counts_in_version_1() {
    for (server, client, both) in [(8, 3, 3), (2, 8, 2), (1, 9, 2)] {
        let [mut s, mut c] = params_of(v1(), PeerProfile::SPEC, [1, 1]);
        s.generation = Generation::V1 { max_links: server };
        c.generation = Generation::V1 { max_links: client };
        let mut pair = Pair::new([s, c]);
        pair.run_until_idle();
        assert_eq!(pair.hosts.each_ref().map(|host| host.group.max_links()), [both, both]);
    }
}

// Shows: LLC-17.
#[test]
fn zero_from_a_client_accepts_the_servers_max_links() {
    let [mut server, client] = params_of(v1(), PeerProfile::SPEC, [1, 1]);
    server.generation = Generation::V1 { max_links: 5 };
    let mut pair = Pair::new([server, client]);
    pair.drain(SERVER);
    let wire = pair.wires.pop_front().unwrap();
    pair.deliver(wire);
    pair.drain(CLIENT);
    let mut wire = pair.wires.pop_front().unwrap();
    wire.bytes[34] = 0;
    pair.deliver(wire);
    assert_eq!(pair.hosts[SERVER].group.max_links(), 5);
}

// Shows: LLCV2-13, RMB-6.
#[test]
fn eye_catchers_at_one_end_only_lead_back_to_tcp() {
    let mut params = params_of(v1(), PeerProfile::SPEC, [1, 1]);
    params[0].eye_catcher = EyeCatcher::On;
    let mut pair = Pair::new(params);
    pair.run_until_idle();
    assert_eq!(pair.hosts[1].terminated(), Some((Reason::EyeCatcher, Ending::Fallback)));
    pair.hosts[0].group.handle_decline(pair.now);
    pair.run_until_idle();
    assert_eq!(pair.hosts[0].terminated(), Some((Reason::PeerDeclined, Ending::Fallback)));
}

// Shows: LLCV2-13, RMB-6.
#[test]
fn eye_catchers_at_both_ends_are_agreed_on() {
    let mut params = params_of(v1(), PeerProfile::SPEC, [1, 1]);
    params.iter_mut().for_each(|params| params.eye_catcher = EyeCatcher::On);
    let mut pair = Pair::new(params);
    pair.run_until_idle();
    assert!(pair.usable());
}

// Shows: LLC-14.
#[test]
fn confirm_link_is_sent_once_more_after_a_second() {
    let mut pair = Pair::usual(v2(), [1, 1]);
    pair.fault = Fault::Lose(0);
    pair.run_until_idle();
    assert_eq!(pair.sent, 1);
    pair.run(Duration::from_secs(1));
    assert!(pair.usable());
    assert_eq!(pair.names()[..2], ["> ConfirmLink 03", "> ConfirmLink 03"]);
}

// Shows: CLC-38, LLC-14, ERR-14, ERR-17.
#[test]
fn silence_at_first_contact_breaks_the_tcp_connection() {
    let mut pair = Pair::usual(v2(), [1, 1]);
    pair.cut(SERVER, LinkKey::FIRST);
    pair.run(Duration::from_secs(10));
    for host in &pair.hosts {
        assert_eq!(host.terminated(), Some((Reason::NoConfirmLink, Ending::Reset)));
    }
}

// Shows: CLC-58, ERR-2, ERR-15, ERR-16, SEC-12.
#[test]
fn failed_send_of_the_first_message_leads_back_to_tcp() {
    for which in [0, 1] {
        let mut pair = Pair::usual(v2(), [1, 1]);
        pair.fault = Fault::Break(which);
        pair.run_until_idle();
        let lost = Reason::LastLinkLost(Cause::QueuePair);
        assert_eq!(pair.hosts[which].terminated(), Some((lost, Ending::Fallback)), "{which}");
    }
}

// Shows: CLC-63, ERR-3, ERR-5.
#[test]
fn point_of_no_return_is_the_add_link() {
    let mut pair = Pair::usual(v2(), [1, 1]);
    assert!(pair.hosts.iter().all(|host| host.group.may_fall_back()));
    pair.run_until_idle();
    assert!(pair.hosts.iter().all(|host| !host.group.may_fall_back()));
    // The server's link fails when the reply to Add Link is under way: too late for TCP.
    let mut pair = Pair::usual(v2(), [2, 2]);
    pair.fault = Fault::Break(4);
    pair.run_until_idle();
    assert!(!pair.hosts[0].group.may_fall_back());
}

// Shows: ERR-3, ERR-5.
#[test]
fn completion_of_add_link_commits_the_server_and_that_of_its_reply_the_client() {
    let waiting = |host: usize| {
        let mut pair = Pair::usual(v2(), [2, 2]);
        pair.hosts[host].lazy = true;
        pair.run_until_idle();
        pair
    };
    let lost = Reason::LastLinkLost(Cause::QueuePair);
    // Add Link is in the client's hands.
    let mut pair = waiting(CLIENT);
    for (host, ending) in [(SERVER, Ending::Reset), (CLIENT, Ending::Fallback)] {
        pair.fail(host, LinkKey::FIRST);
        pair.run_until_idle();
        assert_eq!(pair.hosts[host].terminated(), Some((lost, ending)));
    }
    // Nothing has been said of a second link.
    let mut pair = waiting(SERVER);
    pair.fail(SERVER, LinkKey::FIRST);
    pair.run_until_idle();
    assert_eq!(pair.hosts[SERVER].terminated(), Some((lost, Ending::Fallback)));
    // The client's acceptance has arrived, Confirm Link has not come.
    let mut pair = waiting(CLIENT);
    let link = pair.hosts[CLIENT].group.links()[1].key;
    pair.prepare(CLIENT, link);
    pair.drain(CLIENT);
    let wire = pair.wires.pop_front().unwrap();
    pair.deliver(wire);
    pair.fail(CLIENT, LinkKey::FIRST);
    pair.drain(CLIENT);
    assert_eq!(pair.hosts[CLIENT].terminated(), Some((lost, Ending::Reset)));
}

// Shows: LG-24, ERR-20, ERR-21.
#[test]
fn no_add_link_breaks_the_connection_unless_the_peer_is_linux() {
    for (profile, over) in [(PeerProfile::SPEC, true), (PeerProfile::LINUX, false)] {
        let mut pair = Pair::new(params_of(v2(), profile, [1, 1]));
        pair.fault = Fault::Lose(2);
        pair.run(Duration::from_secs(10));
        assert_eq!(pair.hosts[1].group.is_over(), over);
        assert_eq!(pair.hosts[0].group.is_over(), over);
        if over {
            assert_eq!(pair.hosts[1].terminated(), Some((Reason::NoAddLink, Ending::Reset)));
            let silent = Some((Reason::NoAddLinkReply, Ending::Reset));
            assert_eq!(pair.hosts[0].terminated(), silent);
        }
    }
}

// Shows: LG-25, ERR-18, ERR-24.
#[test]
fn a_second_link_that_is_never_confirmed_is_deleted_before_data_flow() {
    for generation in ALL {
        // The new link is dead on arrival.
        let mut params = params_of(generation(), PeerProfile::SPEC, [2, 2]);
        params[SERVER].timers.retry_add_link = None;
        let mut pair = Pair::new(params);
        while pair.hosts[1].group.links().len() < 2 {
            pair.drain(0);
            pair.drain(1);
            let wire = pair.wires.pop_front().unwrap();
            pair.deliver(wire);
        }
        pair.drain(1);
        let new = pair.hosts[1].group.links()[1].key;
        pair.cut(CLIENT, new);
        pair.run_until_idle();
        assert!(!pair.usable());
        pair.run(Duration::from_secs(15));
        assert!(pair.usable(), "{:?}", pair.names());
        assert_eq!(pair.active(SERVER), [LinkKey::FIRST]);
        assert!(pair.names().iter().any(|name| name.starts_with("> DeleteLink")));
        pair.assert_keys();
        // The client asks for another attempt, a minute later (ERR-24).
        pair.run(Duration::from_secs(60));
        assert_eq!(pair.active(SERVER).len(), 2, "{:?}", pair.names());
    }
}

// Shows: LG-24.
#[test]
fn client_without_resources_refuses() {
    let mut pair = Pair::usual(v2(), [2, 2]);
    pair.hosts[1].broken.extend([RnicId(0), RnicId(1)]);
    pair.run_until_idle();
    assert!(pair.usable());
    assert_eq!(pair.active(SERVER).len(), 1);
    assert_eq!(pair.names()[3], "< AddLink c1");
}

#[test]
fn server_without_resources_tries_no_further() {
    let mut pair = Pair::new(params_of(v2(), PeerProfile::LINUX, [2, 2]));
    pair.hosts[0].broken.insert(RnicId(1));
    pair.run_until_idle();
    assert!(pair.hosts[0].group.is_usable());
    pair.run(Duration::from_secs(4));
    assert!(pair.usable());
}
