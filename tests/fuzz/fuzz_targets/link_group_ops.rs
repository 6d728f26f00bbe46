// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Two link groups under arbitrary events: messages are delivered in any order between links, lost,
//! doubled, damaged and made up; links and RNICs fail and appear; time passes; the API is called.
//! Nothing panics, outputs and memory are bounded, no link is parallel to another, timers go forward,
//! and a group is silent after its end.
#![no_main]

use core::time::Duration;
use std::collections::VecDeque;

use libfuzzer_sys::arbitrary::{self, Arbitrary};
use libfuzzer_sys::fuzz_target;
use smc_core::link_group::{
    Cause, EyeCatcher, FirstLink, Generation, LinkGroup, LinkKey, LinkState, MAX_RMBS, Output,
    Params, PeerProfile, Prepared, Receipt, Region, RemoteEnd, RmbId, Rnic, RnicId, Role,
    SingleRnic,
};
use smc_core::time::Tick;
use smc_core::wire::ids::{Gid, LinkLimits, Mac, Mtu, Psn, Qpn, Rkey};
use smc_core::wire::llc::{DeleteReason, Dialect};

#[derive(Arbitrary, Debug)]
struct Input {
    generation: u8,
    limits: u8,
    linux_bytes: bool,
    profile: [u8; 2],
    rnics: [u8; 2],
    eye_catcher: bool,
    single: bool,
    operations: Vec<(bool, Operation)>,
}

#[derive(Arbitrary, Debug)]
enum Operation {
    /// The message at this place of the inbox arrives, the oldest one most of the time.
    Deliver {
        at: u8,
        keep: bool,
    },
    /// Delivers every message on its way, in several rounds.
    Completion,
    Lose {
        at: u8,
    },
    Damage {
        at: u8,
        byte: u16,
        mask: u8,
    },
    Raw {
        link: u8,
        bytes: Vec<u8>,
    },
    Sent {
        which: u8,
    },
    Prepared {
        with_rmbs: bool,
    },
    Fail {
        link: u8,
    },
    RnicUp(u8),
    RnicDown(u8),
    Timeout,
    Pass {
        milliseconds: u16,
    },
    AddRmb {
        id: u8,
        on: u8,
    },
    RemoveRmb {
        id: u8,
    },
    Bind {
        link: u8,
        rkey: u8,
    },
    Connect {
        link: u8,
    },
    Disconnect {
        link: u8,
    },
    DeleteLink {
        link: u8,
    },
    Decline,
    Terminate,
}

struct Wire {
    qpn: Qpn,
    bytes: Vec<u8>,
}

struct End {
    group: LinkGroup,
    inbox: VecDeque<Wire>,
    receipts: VecDeque<Receipt>,
    preparing: VecDeque<LinkKey>,
    rmbs: Vec<RmbId>,
    next_qpn: u32,
    over: bool,
}

fn rnic(host: usize, n: u8) -> Rnic {
    let (host, n) = (host as u8 + 1, n % 3);
    Rnic {
        id: RnicId(n.into()),
        gid: Gid::from_ipv4([10, 9, n, host]),
        mac: Mac([0x52, 0x54, 0, 0, n, host]),
        mtu: Mtu::B1024,
        direct: true,
    }
}

fn region(rmb: u32, qpn: u32) -> Region {
    Region { rkey: Rkey(qpn << 8 | rmb), address: u64::from(rmb) << 20 }
}

impl End {
    fn new(host: usize, input: &Input) -> End {
        let role = if host == 0 { Role::Server } else { Role::Client };
        let limits =
            LinkLimits { max_conns: 16 + input.limits % 64, max_links: 1 + input.limits % 2 };
        let generation = match input.generation % 3 {
            0 => Generation::V1 { max_links: 2 + input.limits % 3 },
            1 => Generation::V2,
            _ => Generation::V21(limits),
        };
        let bits = input.profile[host];
        let profile = PeerProfile {
            dialect: if input.linux_bytes { Dialect::TO_LINUX } else { Dialect::SPEC },
            rkeys_at_once: bits & 1 != 0,
            one_link_will_do: bits & 2 != 0,
            reject_reason: bits & 4 != 0,
        };
        let mut params = Params::new(role, generation, profile);
        params.rnics = (0..=input.rnics[host] % 3).map(|n| rnic(host, n)).collect();
        if input.eye_catcher {
            params.eye_catcher = EyeCatcher::On;
        }
        if input.single {
            params.single_rnic = SingleRnic::InvalidMtu;
        }
        let qpns = [0x100, 0x200];
        let there = rnic(1 - host, 0);
        let first = FirstLink {
            rnic: rnic(host, 0),
            qpn: Qpn::new(qpns[host]),
            remote: RemoteEnd {
                gid: there.gid,
                mac: there.mac,
                qpn: Qpn::new(qpns[1 - host]),
                psn: Psn::new(0),
                mtu: Mtu::B1024,
            },
            rmb: RmbId(0),
            region: region(0, qpns[host]),
            peer_region: region(0, qpns[1 - host]),
        };
        End {
            group: LinkGroup::new(params, first, Tick(0)),
            inbox: VecDeque::new(),
            receipts: VecDeque::new(),
            preparing: VecDeque::new(),
            rmbs: vec![RmbId(0)],
            next_qpn: qpns[host] + 1,
            over: false,
        }
    }

    fn link(&self, n: u8) -> LinkKey {
        let links = self.group.links();
        links.get(usize::from(n) % links.len().max(1)).map_or(LinkKey::FIRST, |link| link.key)
    }

    fn prepare(&mut self, with_rmbs: bool, now: Tick) {
        let Some(link) = self.preparing.pop_front() else { return };
        let qpn = self.next_qpn;
        self.next_qpn = 0x100 + (self.next_qpn + 1) % 0x1000;
        let rmbs = self.rmbs.iter().filter(|_| with_rmbs);
        let regions = rmbs.map(|rmb| (*rmb, region(rmb.0, qpn))).collect();
        let prepared = Prepared { qpn: Qpn::new(qpn), psn: Psn::new(0), regions };
        self.group.handle_link_prepared(link, prepared, now);
    }
}

/// Takes every pending output and checks the invariants.
fn drain(end: &mut End, peer: &mut End) {
    let mut count = 0;
    while let Some(output) = end.group.poll_output() {
        assert!(!end.over, "{output:?} after the end");
        count += 1;
        assert!(count <= 4000, "no end of outputs");
        match output {
            Output::PostLlc { link, bytes, receipt } => {
                assert!(bytes.len() >= 44 && bytes.len() <= 8192, "{} bytes", bytes.len());
                let qpn = end.group.link(link).map(|link| link.qpn).unwrap_or_default();
                if peer.inbox.len() < 256 {
                    peer.inbox.push_back(Wire { qpn, bytes });
                }
                end.receipts.extend(receipt);
                end.receipts.truncate(64);
            }
            Output::PrepareLink { link, .. } => end.preparing.push_back(link),
            Output::RmbRefused { rmb } | Output::RmbDeleted { rmb } => {
                assert!(end.rmbs.contains(&rmb), "{rmb:?} goes twice");
                end.rmbs.retain(|have| *have != rmb);
            }
            Output::MoveConnections { from, to, .. } => {
                assert_ne!(from, to);
                assert!(end.group.link(to).is_some() || end.group.is_over());
            }
            Output::Terminated { .. } => {
                end.over = true;
                assert!(end.group.links().is_empty());
                assert_eq!(end.group.poll_timeout(), None);
            }
            _ => {}
        }
    }
    let links = end.group.links();
    assert!(links.len() <= 300, "{} links", links.len());
    assert!(end.group.peer_rmbs() <= MAX_RMBS);
    let carries: Vec<_> = links.iter().filter(|link| link.state.carries()).collect();
    for (n, link) in carries.iter().enumerate() {
        let same = |other: &&&_| {
            let other: &smc_core::link_group::LinkRecord = other;
            other.rnic.id == link.rnic.id
                && other.remote.zip(link.remote).is_some_and(|(a, b)| a.gid.same_address(b.gid))
        };
        assert!(carries[..n].iter().find(same).is_none(), "parallel links");
    }
    let asymmetric = |link: &&smc_core::link_group::LinkRecord| {
        link.asymmetric && link.state == LinkState::Active
    };
    assert!(links.iter().filter(asymmetric).count() <= 1);
}

fn deliver(ends: &mut [End; 2], to: usize, at: u8, keep: bool, now: Tick) {
    let [server, client] = ends;
    let (end, peer) = if to == 0 { (server, client) } else { (client, server) };
    if end.inbox.is_empty() {
        return;
    }
    let at = if at < 200 { 0 } else { usize::from(at) % end.inbox.len() };
    let Some(wire) = end.inbox.remove(at) else { return };
    let is =
        |link: &&smc_core::link_group::LinkRecord| link.remote.is_some_and(|r| r.qpn == wire.qpn);
    if let Some(link) = end.group.links().iter().find(is).map(|link| link.key) {
        let _ = end.group.handle_message(link, &wire.bytes, now);
    }
    if keep && end.inbox.len() < 256 {
        end.inbox.push_back(wire);
    }
    drain(end, peer);
}

fuzz_target!(|input: Input| {
    let mut ends = [End::new(0, &input), End::new(1, &input)];
    let mut now = Tick(1);
    for (which, operation) in input.operations.into_iter().take(1024) {
        let id = usize::from(which);
        let [server, client] = &mut ends;
        let (end, peer) = if id == 0 { (server, client) } else { (client, server) };
        drain(end, peer);
        drain(peer, end);
        let group = &mut end.group;
        match operation {
            Operation::Deliver { at, keep } => deliver(&mut ends, id, at, keep, now),
            Operation::Completion => {
                for _ in 0..64 {
                    for to in [0, 1] {
                        ends[to].prepare(true, now);
                        if let Some(receipt) = ends[to].receipts.pop_front() {
                            ends[to].group.handle_sent(receipt, now);
                        }
                        let [server, client] = &mut ends;
                        drain(server, client);
                        drain(client, server);
                        deliver(&mut ends, to, 0, false, now);
                    }
                }
            }
            Operation::Lose { at } => {
                let n = usize::from(at) % end.inbox.len().max(1);
                end.inbox.remove(n);
            }
            Operation::Damage { at, byte, mask } => {
                let n = usize::from(at) % end.inbox.len().max(1);
                if let Some(wire) = end.inbox.get_mut(n) {
                    let len = wire.bytes.len();
                    wire.bytes[usize::from(byte) % len] ^= mask;
                }
            }
            Operation::Raw { link, bytes } => {
                let link = end.link(link);
                let _ = end.group.handle_message(link, &bytes, now);
            }
            Operation::Sent { which } => {
                let n = usize::from(which) % end.receipts.len().max(1);
                if let Some(receipt) = end.receipts.remove(n) {
                    group.handle_sent(receipt, now);
                }
            }
            Operation::Prepared { with_rmbs } => end.prepare(with_rmbs, now),
            Operation::Fail { link } => {
                let link = end.link(link);
                end.group.handle_link_failed(link, Cause::QueuePair, now);
            }
            Operation::RnicUp(n) => group.handle_rnic_up(rnic(id, n), now),
            Operation::RnicDown(n) => group.handle_rnic_down(rnic(id, n).id, now),
            Operation::Timeout => {
                if let Some(at) = group.poll_timeout() {
                    now = now.max(at);
                    // If the caller is late, work begun by one call may be overdue as well.
                    for _ in 0..8 {
                        group.handle_timeout(now);
                    }
                    let next = group.poll_timeout();
                    assert!(next.is_none_or(|next| next > now), "timer stands still");
                }
            }
            Operation::Pass { milliseconds } => {
                now = now.after(Duration::from_millis(milliseconds.into()));
                group.handle_timeout(now);
            }
            Operation::AddRmb { id, on } => {
                let on = end.link(on);
                let rmb = RmbId(id.into());
                let of = |link: LinkKey| {
                    let qpn = end.group.link(link)?.qpn;
                    Some((link, region(rmb.0, qpn.get())))
                };
                let regions: Vec<_> = end.group.key_links().filter_map(of).collect();
                if end.group.add_rmb(rmb, Some(on), &regions, now).is_ok() {
                    end.rmbs.push(rmb);
                }
            }
            Operation::RemoveRmb { id } => group.remove_rmb(RmbId(id.into()), now),
            Operation::Bind { link, rkey } => {
                let link = end.link(link);
                let bound = end.group.bind_peer_rmb(link, region(rkey.into(), 0x200));
                if let Ok(rmb) = bound {
                    assert!(end.group.peer_region(rmb, link).is_some());
                }
            }
            Operation::Connect { link } => {
                let link = end.link(link);
                let most = end.group.max_connections();
                let _ = end.group.connection_added(link, now);
                assert!(end.group.connections() <= most);
            }
            Operation::Disconnect { link } => {
                let link = end.link(link);
                end.group.connection_removed(link, now);
            }
            Operation::DeleteLink { link } => {
                let link = end.link(link);
                end.group.delete_link(link, DeleteReason::OPERATOR, now);
            }
            Operation::Decline => group.handle_decline(now),
            Operation::Terminate => group.terminate(DeleteReason::OPERATOR, now),
        }
        let [server, client] = &mut ends;
        drain(server, client);
        drain(client, server);
    }
});
