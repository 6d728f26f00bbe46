// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Odd, late and lying messages (LLC-5 to LLC-9, LLC-76, LLCV2-2 to LLCV2-12, ERR-35 to ERR-43, SEC-10,
//! SEC-16).

use std::time::Duration;

use proptest::prelude::*;
use smc_core::link_group::*;
use smc_core::testing::Rng;
use smc_core::time::Tick;
use smc_core::wire::List;
use smc_core::wire::clc::GidList;
use smc_core::wire::ids::*;
use smc_core::wire::llc::*;

use super::support::*;

fn list_of<T: Copy + Default, const N: usize>(items: &[T]) -> List<T, N> {
    List::from_slice(items).unwrap()
}

fn emit(pair: &Pair, message: Message) -> Vec<u8> {
    let params = pair.hosts[0].group.params();
    Llc { version: params.generation.version(), message }.emit(&params.profile.dialect)
}

fn deliver_to(pair: &mut Pair, to: usize, message: Message) -> Result<(), Anomaly> {
    let bytes = emit(pair, message);
    let result = pair.hosts[to].group.handle_message(LinkKey::FIRST, &bytes, pair.now);
    pair.drain(to);
    result
}

fn first_state(pair: &Pair, host: usize) -> Option<LinkState> {
    pair.hosts[host].group.link(LinkKey::FIRST).map(|link| link.state)
}

// Shows: LLC-7, LLC-8, LLC-9, LLC-76, LLCV2-1, LLCV2-2, LLCV2-6, LLCV2-42, ERR-43.
#[test]
fn type_bytes_are_told_apart() {
    for (byte, expected, dead) in [
        (0x81, Some(AnomalyKind::Optional), false),
        (0xaf, Some(AnomalyKind::Optional), false),
        (0xfe, Some(AnomalyKind::NotLlc), false),
        (0x3f, Some(AnomalyKind::Malformed), true),
        (0x41, Some(AnomalyKind::Malformed), true),
        (0x23, Some(AnomalyKind::Malformed), true),
        (0x28, Some(AnomalyKind::Malformed), true),
        (0x07, Some(AnomalyKind::WrongVersion), true),
    ] {
        let mut pair = Pair::running(v2(), [2, 2]);
        let mut bytes = [0; 44];
        (bytes[0], bytes[1], bytes[2]) = (byte, if byte < 0x20 { 44 } else { 0 }, 44);
        if byte < 0x20 {
            bytes[2] = 0;
        }
        let result = pair.hosts[SERVER].group.handle_message(LinkKey::FIRST, &bytes, pair.now);
        assert_eq!(result.map_err(|anomaly| anomaly.kind()).err(), expected, "{byte:02x}");
        assert_eq!(first_state(&pair, SERVER) == Some(LinkState::Failed), dead, "{byte:02x}");
    }
}

// Shows: LLCV2-9, LG-15, ERR-43.
#[test]
fn requests_of_the_wrong_end_bring_the_link_down() {
    let confirm = Message::ConfirmLink(ConfirmLink::default());
    let mut pair = Pair::running(v2(), [2, 2]);
    assert_eq!(deliver_to(&mut pair, SERVER, confirm), Err(Anomaly::WrongRole("Confirm Link")));
    assert_eq!(first_state(&pair, SERVER), Some(LinkState::Failed));
    // A client of version 2 has no Add Link (LLCV2-9).
    let mut pair = Pair::running(v2(), [2, 2]);
    let mut add = pair.trace[2].1.clone();
    add[3] = 0;
    let result = pair.hosts[SERVER].group.handle_message(LinkKey::FIRST, &add, pair.now);
    assert_eq!(result, Err(Anomaly::WrongRole("Add Link")));
    let mut pair = Pair::running(v2(), [2, 2]);
    let gids = GidList { active: rnic(SERVER, 1).gid, alternates: list_of(&[]) };
    let request = Message::RequestAddLink(RequestAddLink::Request(gids));
    let result = deliver_to(&mut pair, CLIENT, request);
    assert_eq!(result, Err(Anomaly::WrongRole("Request Add Link")));
}

// Shows: ERR-43.
#[test]
fn replies_to_nothing_are_dropped_until_there_are_too_many() {
    let mut pair = Pair::running(v2(), [2, 2]);
    let reply = || Message::TestLink(TestLink { reply: true, data: [0; 16] });
    for _ in 0..MOST_ANOMALIES {
        assert!(deliver_to(&mut pair, SERVER, reply()).is_err());
        assert_eq!(first_state(&pair, SERVER), Some(LinkState::Active));
    }
    assert!(deliver_to(&mut pair, SERVER, reply()).is_err());
    assert_eq!(first_state(&pair, SERVER), Some(LinkState::Failed));
    let counters = pair.hosts[SERVER].group.counters();
    assert_eq!(counters.anomalies(AnomalyKind::UnexpectedReply), u64::from(MOST_ANOMALIES) + 1);
    assert_eq!(counters.anomalies(AnomalyKind::TooMany), 1);
}

// Shows: SEC-16.
#[test]
fn each_kind_of_anomaly_has_a_counter_of_its_own() {
    for (n, kind) in AnomalyKind::ALL.into_iter().enumerate() {
        assert_eq!(kind as usize, n);
    }
}

#[test]
fn honest_messages_between_odd_ones_keep_the_link() {
    let mut pair = Pair::running(v2(), [1, 1]);
    for _ in 0..10 * MOST_ANOMALIES {
        let reply = Message::TestLink(TestLink { reply: true, data: [0; 16] });
        assert!(deliver_to(&mut pair, SERVER, reply).is_err());
        assert_eq!(deliver_to(&mut pair, SERVER, Message::TestLink(TestLink::default())), Ok(()));
    }
}

// Shows: CLCV2-84, LLC-6, LLC-12, LLCV2-12, LLCV2-14, LLCV2-15, ERR-35.
#[test]
fn confirm_link_must_describe_its_link() {
    type Change = fn(&mut ConfirmLink);
    let changes: [(&str, Change); 6] = [
        ("queue pair", |m| m.qpn = Qpn::new(0xbad)),
        ("GID", |m| m.gid = Gid::from_ipv4([6, 6, 6, 6])),
        ("MAC", |m| m.mac = Mac::NONE),
        ("MAC", |m| m.mac = Mac([9; 6])),
        ("limit", |m| m.max_conns = 99),
        ("eye catcher flag", |m| m.low_flags = 0),
    ];
    for (host, reply) in [(SERVER, true), (CLIENT, false)] {
        for (field, change) in changes {
            let mut pair = Pair::usual(v21(2), [1, 1]);
            pair.drain(SERVER);
            let peer = 1 - host;
            let mut message = ConfirmLink {
                reply,
                low_flags: 3,
                mac: rnic(peer, 0).mac,
                gid: rnic(peer, 0).gid,
                qpn: first_link(peer).qpn,
                link_number: 1,
                link_user_id: 7,
                max_links: 2,
                max_conns: 16,
            };
            change(&mut message);
            let result = deliver_to(&mut pair, host, Message::ConfirmLink(message));
            assert_eq!(result, Err(Anomaly::WrongConfirmLink(field)));
            assert_eq!(pair.hosts[host].terminated().map(|t| t.1), Some(Ending::Fallback));
        }
    }
}

// Shows: LLC-35, ERR-35, ERR-44, SEC-16.
#[test]
fn a_wrong_confirm_link_on_an_added_link_costs_that_link_only() {
    let mut pair = Pair::usual(v2(), [2, 2]);
    for _ in 0..4 {
        pair.drain(SERVER);
        pair.drain(CLIENT);
        let wire = pair.wires.pop_front().unwrap();
        pair.deliver(wire);
    }
    pair.drain(SERVER);
    let mut wire = pair.wires.pop_front().unwrap();
    wire.bytes[28] ^= 1;
    pair.wires.push_front(wire);
    pair.run_until_idle();
    assert_eq!(pair.anomalies[0], (CLIENT, Anomaly::WrongConfirmLink("queue pair")));
    assert!(pair.usable(), "{:?}", pair.names());
    assert_eq!(pair.active(CLIENT), [LinkKey::FIRST]);
    let wish = pair.trace.iter().find(|(_, bytes)| bytes[0] == 0x24).unwrap();
    assert_eq!((wish.0, &wish.1[5..9]), (CLIENT, &[0, 4, 0, 0][..]));
}

// Shows: LLC-30, ERR-38.
#[test]
fn contradicting_counts_are_an_outage() {
    let mut pair = Pair::running(v1(), [1, 2]);
    pair.hosts[CLIENT].group.handle_rnic_down(RnicId(1), pair.now);
    pair.run_until_idle();
    for n in 1..6 {
        pair.add_rmb(CLIENT, n);
    }
    pair.run_until_idle();
    pair.hosts[SERVER].group.handle_rnic_up(rnic(SERVER, 1), pair.now);
    let mut replies = 0;
    while let Some(mut wire) = {
        pair.drain(SERVER);
        pair.drain(CLIENT);
        pair.wires.pop_front()
    } {
        if wire.bytes[0] == 3 && wire.bytes[3] == 0x80 {
            replies += 1;
            if replies == 2 {
                wire.bytes[5] = 1;
            }
        }
        pair.deliver(wire);
    }
    let anomaly = Anomaly::WrongCount { left: 1, expected: 4 };
    assert!(pair.anomalies.contains(&(SERVER, anomaly)), "{:?}", pair.anomalies);
    assert!(pair.hosts[SERVER].group.is_over(), "it was the only link");
}

// Shows: LLC-48, ERR-38.
#[test]
fn continuations_of_confirm_rkey_must_count_down() {
    let mut pair = Pair::running(v1(), [1, 1]);
    let cont = |left| Message::ConfirmRkeyCont(ConfirmRkeyCont { left, ..Default::default() });
    let early = deliver_to(&mut pair, SERVER, cont(3));
    assert_eq!(early, Err(Anomaly::WrongTime("Confirm RKey Continuation")));
    let others = list_of(&[LinkRkey::default(); 2]);
    let first = ConfirmRkey { other_links: 7, others, ..Default::default() };
    assert_eq!(deliver_to(&mut pair, SERVER, Message::ConfirmRkey(first)), Ok(()));
    let wrong = deliver_to(&mut pair, SERVER, cont(4));
    assert_eq!(wrong, Err(Anomaly::WrongCount { left: 4, expected: 5 }));
}

// Shows: LG-16, ERR-37.
#[test]
fn commands_on_a_link_given_up_are_ignored() {
    let mut pair = Pair::running(v2(), [2, 2]);
    pair.hosts[CLIENT].group.handle_link_failed(LinkKey::FIRST, Cause::QueuePair, pair.now);
    pair.drain(CLIENT);
    let rkey = Message::ConfirmRkey(ConfirmRkey { rkey: Rkey(9), ..Default::default() });
    assert_eq!(deliver_to(&mut pair, CLIENT, rkey), Err(Anomaly::DeadLink(LinkKey::FIRST)));
    let all = Message::DeleteLink(DeleteLink { all: true, ..Default::default() });
    assert_eq!(deliver_to(&mut pair, CLIENT, all), Ok(()));
    assert!(pair.hosts[CLIENT].group.is_over());
}

// Shows: LLC-10.
#[test]
fn no_link_carries_anything_before_confirm_link() {
    let mut pair = Pair::usual(v2(), [1, 1]);
    let rkey = Message::ConfirmRkey(ConfirmRkey { rkey: Rkey(9), ..Default::default() });
    let result = deliver_to(&mut pair, CLIENT, rkey).map_err(|anomaly| anomaly.kind());
    assert_eq!(result, Err(AnomalyKind::WrongTime));
}

/// A random message of any type, with sometimes valid fields.
fn some_message(rng: &mut Rng, pair: &Pair, to: usize) -> Message {
    let reply = rng.one_in(2);
    let peer = 1 - to;
    let links = pair.hosts[to].group.links();
    let link = links.get(rng.below(3) as usize);
    let number = link.map_or(rng.below(4) as u8, |link| link.number);
    let rkey = region(peer, RmbId(rng.below(3)), Qpn::new(0x11 + 0x100 * rng.below(2))).rkey;
    let gid = rnic(peer, rng.below(3)).gid;
    let pair_of = |n: u32| RkeyPair { reference: rkey, new: Rkey(n), address: 0 };
    match rng.below(10) {
        0 => Message::ConfirmLink(ConfirmLink {
            reply,
            low_flags: 3,
            mac: rnic(peer, 0).mac,
            gid,
            qpn: link.and_then(|l| l.remote).map_or(Qpn::new(rng.below(9)), |r| r.qpn),
            link_number: number,
            link_user_id: 0,
            max_links: rng.below(4) as u8,
            max_conns: 16,
        }),
        1 | 2 => Message::AddLink(AddLink {
            reply,
            rejected: rng.one_in(4).then_some(RejectReason(rng.below(16) as u8)),
            mac: rnic(peer, 1).mac,
            gid,
            qpn: Qpn::new(rng.below(1000)),
            link_number: number.wrapping_add(rng.below(2) as u8),
            mtu: Mtu::from_code(rng.below(7) as u8),
            psn: Psn::new(0),
            v2: Some(AddLinkV2 {
                direct: true,
                target: gid,
                rkeys: (0..rng.below(4)).map(pair_of).collect(),
            }),
        }),
        3 => Message::AddLinkCont(AddLinkCont {
            reply,
            link_number: number,
            left: rng.below(5) as u8,
            rkeys: list_of(&[pair_of(1)]),
        }),
        4 => Message::DeleteLink(DeleteLink {
            reply,
            all: rng.one_in(20),
            orderly: rng.one_in(2),
            link_number: number,
            reason: DeleteReason(rng.below(6) << 16),
        }),
        5 => Message::ConfirmRkey(ConfirmRkey {
            reply,
            negative: reply && rng.one_in(3),
            retry: rng.one_in(2),
            other_links: rng.below(4) as u8,
            rkey,
            address: 0,
            others: list_of(&[LinkRkey { link_number: number, rkey, address: 1 }]),
        }),
        6 => Message::ConfirmRkeyCont(ConfirmRkeyCont {
            reply,
            negative: false,
            left: rng.below(5) as u8,
            entries: list_of(&[LinkRkey { link_number: number, rkey, address: 1 }]),
        }),
        7 => Message::TestLink(TestLink { reply, data: [0; 16] }),
        8 => Message::DeleteRkey(DeleteRkey {
            reply: false,
            negative: false,
            error_mask: 0,
            rkeys: vec![rkey; 1 + rng.below(3) as usize],
        }),
        _ if rng.one_in(2) => Message::DeleteRkeyReply(DeleteRkeyReply::default()),
        _ => {
            let gids = GidList { active: gid, alternates: list_of(&[]) };
            Message::RequestAddLink(RequestAddLink::Request(gids))
        }
    }
}

/// A peer sending arbitrary messages during the host's normal work.
fn hostile_life(seed: u64) {
    let mut rng = Rng::new(seed);
    let generation = [v1(), v2(), v21(1), v21(2)][rng.below(4) as usize];
    let profile = [PeerProfile::SPEC, PeerProfile::LINUX][rng.below(2) as usize];
    let host = rng.below(2) as usize;
    let mut pair = Pair::new(params_of(generation, profile, [1 + rng.below(2), 1 + rng.below(2)]));
    pair.honest = false;
    if rng.one_in(2) {
        pair.run_until_idle();
    }
    for _ in 0..300 {
        let links: Vec<LinkKey> = pair.hosts[host].group.links().iter().map(|l| l.key).collect();
        let link = links.get(rng.below(3) as usize).copied().unwrap_or(LinkKey::FIRST);
        match rng.below(12) {
            0..7 => {
                let message = some_message(&mut rng, &pair, host);
                let bytes = emit(&pair, message);
                let _ = pair.hosts[host].group.handle_message(link, &bytes, pair.now);
            }
            7 => {
                let mut bytes = emit(&pair, some_message(&mut rng, &pair, host));
                let at = rng.below(bytes.len() as u32) as usize;
                bytes[at] = rng.bits() as u8;
                bytes.truncate(rng.below(100) as usize);
                let _ = pair.hosts[host].group.handle_message(link, &bytes, pair.now);
            }
            8 => {
                pair.now = pair.now.after(Duration::from_millis(u64::from(rng.below(3000))));
                pair.hosts[host].group.handle_timeout(pair.now);
            }
            9 => match rng.below(6) {
                0 => pair.hosts[host].group.handle_rnic_up(rnic(host, 2), pair.now),
                1 => pair.hosts[host].group.handle_rnic_down(RnicId(2), pair.now),
                2 => pair.hosts[host].group.handle_link_failed(link, Cause::QueuePair, pair.now),
                3 => pair.hosts[host].group.delete_link(link, DeleteReason::OPERATOR, pair.now),
                4 => pair.hosts[host].group.handle_received(link, pair.now),
                _ => drop(pair.hosts[host].group.connection_added(link, pair.now)),
            },
            10 => {
                let rmb = 10 + rng.below(5);
                let group = &pair.hosts[host].group;
                if !group.is_over() && group.rmb_state(RmbId(rmb)).is_none() && pair.usable() {
                    pair.add_rmb(host, rmb);
                }
            }
            _ => pair.hosts[host].group.remove_rmb(RmbId(10 + rng.below(5)), pair.now),
        }
        pair.drain(host);
        // The host gets receipts for its messages, but no answers.
        let group = &pair.hosts[host].group;
        assert!(group.links().len() <= 12 && group.peer_rmbs() <= MAX_RMBS, "bounded");
        assert!(group.poll_timeout().is_some() || group.is_over(), "nothing is awaited: stuck");
        if rng.one_in(2) {
            pair.wires.clear();
        } else {
            pair.run_until_idle();
        }
    }
    // In any case, the group ends on request.
    pair.hosts[host].group.terminate(DeleteReason::OPERATOR, pair.now);
    pair.run(Duration::from_secs(60));
    assert!(pair.hosts[host].group.is_over());
    assert!(pair.hosts[host].terminated().is_some());
}

// Shows: SEC-10.
#[test]
fn no_peer_can_do_more_than_end_the_group() {
    for seed in 0..1000 {
        if std::panic::catch_unwind(|| hostile_life(seed)).is_err() {
            panic!("seed {seed}");
        }
    }
}

proptest! {
    // Shows: SEC-10.
    #[test]
    fn any_bytes_do_no_harm(bytes in proptest::collection::vec(any::<u8>(), 0..200), server: bool) {
        let host = usize::from(!server);
        for generation in [v1(), v2()] {
            let mut pair = Pair::usual(generation, [1, 2]);
            let _ = pair.hosts[host].group.handle_message(LinkKey::FIRST, &bytes, Tick(1));
            pair.run_until_idle();
            let _ = pair.hosts[host].group.handle_message(LinkKey::FIRST, &bytes, pair.now);
            pair.run(Duration::from_secs(10));
        }
    }
}
