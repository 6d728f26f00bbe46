// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Links come and go (LG-7 to LG-14, LLC-15, LLC-22 to LLC-26, LLC-77, LLCV2-20 to LLCV2-40).

use std::collections::BTreeSet;
use std::time::Duration;

use smc_core::link_group::*;
use smc_core::wire::ids::*;
use smc_core::wire::llc::*;

use super::support::*;

const BOTH: [fn() -> Generation; 2] = [v1, v2];

fn topologies(pair: &Pair) -> [Topology; 2] {
    pair.hosts.each_ref().map(|host| host.group.topology())
}

// Shows: LLC-23, LLC-24, LLC-25, LLC-77, LLCV2-25, LLCV2-27, LLCV2-30, LG-10, LG-14, LG-26.
#[test]
fn client_tells_of_a_second_rnic_and_the_group_becomes_symmetric() {
    for generation in BOTH {
        let mut pair = Pair::running(generation(), [2, 1]);
        assert_eq!(topologies(&pair), [Topology::AsymmetricPeer, Topology::AsymmetricLocal]);
        pair.forget();
        pair.hosts[CLIENT].group.handle_rnic_up(rnic(CLIENT, 1), pair.now);
        pair.run_until_idle();
        assert_eq!(topologies(&pair), [Topology::Symmetric; 2], "{:?}", pair.names());
        assert_eq!(pair.active(SERVER).len(), 2);
        // New link first, then the old one goes, for this reason (LG-14).
        let delete = pair.trace.iter().position(|(_, bytes)| bytes[0] & 0xf == 4).unwrap();
        let confirm = pair.trace.iter().rposition(|(_, bytes)| bytes[0] & 0xf == 1).unwrap();
        assert!(confirm < delete);
        assert_eq!(pair.trace[delete].1[5..9], [0, 5, 0, 0]);
        assert_eq!(pair.anomalies, []);
        pair.assert_keys();
    }
}

// Shows: LG-10, LG-14.
#[test]
fn server_with_a_second_rnic_makes_the_group_symmetric() {
    for generation in BOTH {
        let mut pair = Pair::running(generation(), [1, 2]);
        pair.hosts[SERVER].group.handle_rnic_up(rnic(SERVER, 1), pair.now);
        pair.run_until_idle();
        assert_eq!(topologies(&pair), [Topology::Symmetric; 2]);
        assert_eq!(pair.active(SERVER).len(), 2);
        pair.assert_keys();
    }
}

// Shows: LG-9.
#[test]
fn there_is_no_second_asymmetric_link() {
    for generation in [v1(), v2()] {
        for host in [SERVER, CLIENT] {
            let mut rnics = [1, 1];
            rnics[host] = 2;
            let mut pair = Pair::running(generation, rnics);
            pair.hosts[host].group.handle_rnic_up(rnic(host, 2), pair.now);
            pair.run(Duration::from_secs(200));
            assert_eq!(pair.active(SERVER).len(), 2);
            let asymmetric = pair.hosts[host].group.links().iter().filter(|l| l.asymmetric);
            assert_eq!(asymmetric.count(), 1);
        }
    }
}

// Shows: LLC-77, LLCV2-30, LG-13.
#[test]
fn client_of_a_full_or_single_link_group_keeps_new_rnics_to_itself() {
    for generation in [v1(), v2(), v21(1)] {
        let mut pair = Pair::running(generation, [2, 2]);
        pair.forget();
        pair.hosts[CLIENT].group.handle_rnic_up(rnic(CLIENT, 2), pair.now);
        pair.run_until_idle();
        assert_eq!(pair.trace, []);
    }
}

// Shows: LLC-26, LLCV2-26, LLCV2-28, LG-13.
#[test]
fn server_ignores_or_merely_acknowledges_at_the_maximum() {
    for (generation, messages) in [(v1(), 0), (v2(), 1)] {
        let mut pair = Pair::running(generation, [3, 2]);
        pair.forget();
        let link = LinkKey::FIRST;
        let message = match generation.version() {
            smc_core::wire::clc::Version::V1 => Message::AddLink(add_link(false, 0, None)),
            smc_core::wire::clc::Version::V2 => Message::RequestAddLink(request()),
        };
        let bytes = Llc { version: generation.version(), message }.emit(&Dialect::SPEC);
        pair.hosts[SERVER].group.handle_message(link, &bytes, pair.now).unwrap();
        pair.run_until_idle();
        assert_eq!(pair.trace.len(), messages, "{:?}", pair.names());
    }
}

fn request() -> RequestAddLink {
    let alternates = smc_core::wire::List::new();
    RequestAddLink::Request(smc_core::wire::clc::GidList {
        active: rnic(CLIENT, 1).gid,
        alternates,
    })
}

fn add_link(reply: bool, number: u8, v2: Option<AddLinkV2>) -> AddLink {
    let from = if reply { CLIENT } else { SERVER };
    AddLink {
        reply,
        rejected: None,
        mac: rnic(from, 1).mac,
        gid: rnic(from, 1).gid,
        qpn: Qpn::new(0x999),
        link_number: number,
        mtu: Mtu::B1024,
        psn: Psn::new(5),
        v2,
    }
}

/// The client's answer to an Add Link of this shape.
fn answer(change: impl Fn(&mut AddLink)) -> (Pair, AddLink) {
    let mut pair = Pair::running(v2(), [1, 2]);
    pair.hosts[CLIENT].group.handle_rnic_down(RnicId(1), pair.now);
    pair.run_until_idle();
    pair.forget();
    let mut message = add_link(false, 9, Some(AddLinkV2::default()));
    change(&mut message);
    let llc = Llc { version: v2().version(), message: Message::AddLink(message) };
    let bytes = llc.emit(&Dialect::SPEC);
    let _ = pair.hosts[CLIENT].group.handle_message(LinkKey::FIRST, &bytes, pair.now);
    pair.drain(CLIENT);
    let sent = Llc::parse(&pair.trace[0].1, &Dialect::SPEC).unwrap().message;
    let Message::AddLink(reply) = sent else { panic!("{sent:?}") };
    (pair, reply)
}

// Shows: LLC-21, LLC-22, LLCV2-22.
#[test]
fn undefined_mtu_is_refused_with_reason_2() {
    for code in [0, 6, 15] {
        let (_, reply) = answer(|message| message.mtu = Mtu::from_code(code));
        assert_eq!(reply.rejected, Some(RejectReason::BAD_MTU));
        assert!(reply.reply && reply.link_number == 9);
    }
}

// Shows: LLC-21, LG-7, LG-20.
#[test]
fn parallel_link_is_refused_with_reason_1() {
    let (pair, reply) = answer(|message| message.gid = rnic(SERVER, 0).gid);
    assert_eq!(reply.rejected, Some(RejectReason::NO_PATH));
    assert_eq!(pair.hosts[CLIENT].group.links().len(), 1);
}

// Shows: LLC-20, LLC-22.
#[test]
fn accepted_link_echoes_the_number_and_uses_the_smaller_mtu() {
    let (pair, reply) = answer(|message| message.mtu = Mtu::from_code(1));
    assert_eq!((reply.rejected, reply.link_number, reply.mtu), (None, 9, Mtu::B1024));
    let connected = pair.hosts[CLIENT].outputs.iter().find_map(|output| match output {
        Output::ConnectLink { mtu, .. } => Some(*mtu),
        _ => None,
    });
    assert_eq!(connected, Some(Mtu::from_code(1)));
}

// Shows: CLCV2-74, CLCV2-75, LLCV2-20, LLCV2-21.
#[test]
fn client_uses_the_address_the_server_would_like() {
    let mut pair = Pair::running(v21(2), [1, 3]);
    pair.hosts[CLIENT].group.handle_rnic_down(RnicId(1), pair.now);
    pair.run_until_idle();
    pair.hosts[CLIENT].group.handle_rnic_up(rnic(CLIENT, 1), pair.now);
    pair.run_until_idle();
    let second = pair.hosts[CLIENT].group.links().last().unwrap();
    assert_ne!(second.rnic.id, RnicId(0));
    let mut params = params_of(v2(), PeerProfile::SPEC, [2, 3]);
    params[SERVER].peer_gids = vec![rnic(CLIENT, 0).gid, rnic(CLIENT, 2).gid];
    let mut pair = Pair::new(params);
    pair.run_until_idle();
    assert_eq!(pair.hosts[CLIENT].group.links()[1].rnic.id, RnicId(2));
}

// Shows: LLC-15.
#[test]
fn link_numbers_come_again_only_after_all_others() {
    let mut pair = Pair::running(v2(), [2, 2]);
    let mut seen = Vec::new();
    for _ in 0..300 {
        let second = pair.active(SERVER)[1];
        seen.push(pair.hosts[SERVER].group.link(second).unwrap().number);
        pair.hosts[SERVER].group.delete_link(second, DeleteReason::OPERATOR, pair.now);
        pair.run_until_idle();
        assert_eq!(pair.active(SERVER).len(), 2, "added again at once");
        pair.trace.clear();
    }
    let first: BTreeSet<u8> = seen[..254].iter().copied().collect();
    assert_eq!(first.len(), 254);
    assert!(!seen.contains(&0), "zero means all links");
    assert!(!seen.contains(&1), "the first link keeps its number");
}

// Shows: LG-7, ERR-36.
#[test]
fn an_answer_that_would_be_a_parallel_link_is_deleted() {
    let mut pair = Pair::usual(v2(), [1, 2]);
    // The client accepts with the RNIC of the first link.
    for _ in 0..3 {
        pair.drain(SERVER);
        pair.drain(CLIENT);
        let wire = pair.wires.pop_front().unwrap();
        pair.deliver(wire);
    }
    pair.drain(CLIENT);
    let mut wire = pair.wires.pop_back().unwrap();
    wire.bytes[12..28].copy_from_slice(&rnic(CLIENT, 0).gid.0);
    pair.wires.push_back(wire);
    pair.run_until_idle();
    assert_eq!(pair.anomalies[0], (SERVER, Anomaly::WrongAddLink("RNIC")));
    assert_eq!(pair.active(SERVER).len(), 1);
    assert!(pair.names().iter().any(|name| name.starts_with("> DeleteLink")));
    pair.run(Duration::from_secs(10));
    assert!(pair.usable());
}

// Shows: LLC-23, LG-26.
#[test]
fn server_tries_again_when_its_timer_says_so() {
    let mut pair = Pair::running(v1(), [1, 1]);
    // The client gets a second RNIC, and its word is lost.
    pair.fault = Fault::Lose(pair.sent);
    pair.hosts[CLIENT].group.handle_rnic_up(rnic(CLIENT, 1), pair.now);
    pair.run(Duration::from_secs(59));
    assert_eq!(pair.active(SERVER).len(), 1);
    pair.run(Duration::from_secs(2));
    assert_eq!(pair.active(SERVER).len(), 2);
}

// Shows: LLC-71, LLCV2-8, LLCV2-40.
#[test]
fn request_add_link_during_other_exchanges_is_answered_afterwards() {
    let mut pair = Pair::running(v2(), [1, 1]);
    pair.forget();
    pair.add_rmb(SERVER, 7);
    pair.drain(SERVER);
    let message = Message::RequestAddLink(request());
    let bytes = Llc { version: v2().version(), message }.emit(&Dialect::SPEC);
    pair.hosts[SERVER].group.handle_message(LinkKey::FIRST, &bytes, pair.now).unwrap();
    pair.drain(SERVER);
    assert_eq!(pair.names(), ["> ConfirmRkey 00"]);
    pair.run_until_idle();
    assert_eq!(pair.names()[2], "> RequestAddLink 80");
}

// Shows: LG-41.
#[test]
fn connections_spread_over_the_links() {
    let mut pair = Pair::running(v2(), [2, 2]);
    let group = &mut pair.hosts[SERVER].group;
    for _ in 0..10 {
        let link = group.pick_link().unwrap();
        group.connection_added(link, pair.now).unwrap();
    }
    let counts: Vec<u32> = group.links().iter().map(|link| link.connections).collect();
    assert_eq!(counts, [5, 5]);
}

// Shows: LG-48, LG-53.
#[test]
fn a_full_group_takes_no_more_connections() {
    let mut pair = Pair::running(v21(2), [2, 2]);
    let group = &mut pair.hosts[SERVER].group;
    for _ in 0..16 {
        assert!(group.has_room());
        let link = group.pick_link().unwrap();
        group.connection_added(link, pair.now).unwrap();
    }
    assert!(!group.has_room());
    assert_eq!(group.connection_added(LinkKey::FIRST, pair.now), Err(UseError::Full(16)));
    group.connection_removed(LinkKey::FIRST, pair.now);
    assert!(group.has_room());
}
