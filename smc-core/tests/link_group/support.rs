// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Two link groups, the hosts around them, and the wires between.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use smc_core::link_group::*;
use smc_core::time::Tick;
use smc_core::wire::ids::*;
use smc_core::wire::llc::{Dialect, Llc};

pub(crate) const SERVER: usize = 0;
pub(crate) const CLIENT: usize = 1;
/// How long a message takes.
const HOP: Duration = Duration::from_micros(10);

/// The environment of a group: queue pairs and their peers.
pub(crate) struct Host {
    pub(crate) group: LinkGroup,
    pub(crate) outputs: Vec<Output>,
    /// Queue pairs of links, by key.
    queue_pairs: BTreeMap<LinkKey, Qpn>,
    next_qpn: u32,
    pub(crate) rmbs: BTreeSet<RmbId>,
    /// RNICs that cannot make queue pairs.
    pub(crate) broken: BTreeSet<RnicId>,
    pub(crate) lazy: bool,
}

pub(crate) struct Wire {
    pub(crate) from: usize,
    pub(crate) bytes: Vec<u8>,
    qpn: Qpn,
    receipt: Option<Receipt>,
    at: Tick,
}

/// The fault of the n-th message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    None,
    /// The message vanishes, but the sender believes in its arrival.
    Lose(usize),
    Double(usize),
    /// The message's queue pair fails instead, at the sender.
    Break(usize),
}

pub(crate) struct Pair {
    pub(crate) hosts: [Host; 2],
    pub(crate) now: Tick,
    pub(crate) wires: VecDeque<Wire>,
    pub(crate) sent: usize,
    pub(crate) fault: Fault,
    /// The messages so far, in order.
    pub(crate) trace: Vec<(usize, Vec<u8>)>,
    pub(crate) anomalies: Vec<(usize, Anomaly)>,
    /// Whether both ends are honest.
    pub(crate) honest: bool,
    /// Queue pairs with silent loss of their messages.
    pub(crate) dead: BTreeSet<Qpn>,
}

pub(crate) fn rnic(host: usize, n: u32) -> Rnic {
    let byte = u8::try_from(n).unwrap();
    let host = u8::try_from(host).unwrap() + 1;
    Rnic {
        id: RnicId(n),
        gid: Gid::from_ipv4([10, 9, byte, host]),
        mac: Mac([0x52, 0x54, 0, 0, byte, host]),
        mtu: Mtu::B1024,
        direct: true,
    }
}

pub(crate) fn region(host: usize, rmb: RmbId, qpn: Qpn) -> Region {
    let rkey = Rkey(rmb.0 << 16 | qpn.get());
    Region { rkey, address: u64::from(qpn.get()) << 32 | (host as u64) << 16 | u64::from(rmb.0) }
}

pub(crate) fn v1() -> Generation {
    Generation::V1 { max_links: 2 }
}

pub(crate) fn v2() -> Generation {
    Generation::V2
}

pub(crate) fn v21(max_links: u8) -> Generation {
    Generation::V21(LinkLimits { max_conns: 16, max_links })
}

fn params(role: Role, generation: Generation, profile: PeerProfile, rnics: u32) -> Params {
    let host = usize::from(role == Role::Client);
    let mut params = Params::new(role, generation, profile);
    params.rnics = (0..rnics).map(|n| rnic(host, n)).collect();
    params
}

pub(crate) fn params_of(
    generation: Generation,
    profile: PeerProfile,
    rnics: [u32; 2],
) -> [Params; 2] {
    [
        params(Role::Server, generation, profile, rnics[0]),
        params(Role::Client, generation, profile, rnics[1]),
    ]
}

const FIRST_QPN: [u32; 2] = [0x11, 0x111];

pub(crate) fn first_link(host: usize) -> FirstLink {
    let peer = 1 - host;
    let qpn = Qpn::new(FIRST_QPN[host]);
    let remote = RemoteEnd {
        gid: rnic(peer, 0).gid,
        mac: rnic(peer, 0).mac,
        qpn: Qpn::new(FIRST_QPN[peer]),
        psn: Psn::new(1),
        mtu: Mtu::B1024,
    };
    FirstLink {
        rnic: rnic(host, 0),
        qpn,
        remote,
        rmb: RmbId(0),
        region: region(host, RmbId(0), qpn),
        peer_region: region(peer, RmbId(0), remote.qpn),
    }
}

impl Host {
    fn new(host: usize, params: Params) -> Host {
        let first = first_link(host);
        Host {
            group: LinkGroup::new(params, first, Tick(0)),
            outputs: Vec::new(),
            queue_pairs: BTreeMap::from([(LinkKey::FIRST, first.qpn)]),
            next_qpn: first.qpn.get() + 1,
            rmbs: BTreeSet::from([RmbId(0)]),
            broken: BTreeSet::new(),
            lazy: false,
        }
    }

    pub(crate) fn has(&self, wanted: &Output) -> bool {
        self.outputs.contains(wanted)
    }

    pub(crate) fn terminated(&self) -> Option<(Reason, Ending)> {
        self.outputs.iter().find_map(|output| match output {
            Output::Terminated { reason, ending } => Some((*reason, *ending)),
            _ => None,
        })
    }

    pub(crate) fn qpn(&self, link: LinkKey) -> Option<Qpn> {
        self.queue_pairs.get(&link).copied()
    }
}

impl Pair {
    pub(crate) fn new([server, client]: [Params; 2]) -> Pair {
        Pair {
            hosts: [Host::new(SERVER, server), Host::new(CLIENT, client)],
            now: Tick(0),
            wires: VecDeque::new(),
            sent: 0,
            fault: Fault::None,
            trace: Vec::new(),
            anomalies: Vec::new(),
            honest: true,
            dead: BTreeSet::new(),
        }
    }

    pub(crate) fn usual(generation: Generation, rnics: [u32; 2]) -> Pair {
        Pair::new(params_of(generation, PeerProfile::SPEC, rnics))
    }

    /// A pair after first contact.
    pub(crate) fn running(generation: Generation, rnics: [u32; 2]) -> Pair {
        let mut pair = Pair::usual(generation, rnics);
        pair.run_until_idle();
        assert!(pair.usable(), "{:?}", pair.hosts[0].outputs);
        pair
    }

    pub(crate) fn usable(&self) -> bool {
        self.hosts.iter().all(|host| host.group.is_usable())
    }

    pub(crate) fn over(&self) -> bool {
        self.hosts.iter().all(|host| host.group.is_over())
    }

    /// Carries out the outputs of the groups, until no message is on its way; no timer fires.
    pub(crate) fn run_until_idle(&mut self) {
        for _ in 0..100_000 {
            self.drain(SERVER);
            self.drain(CLIENT);
            let Some(wire) = self.wires.pop_front() else { return };
            self.now = self.now.max(wire.at);
            self.deliver(wire);
        }
        panic!("groups never come to rest");
    }

    /// Lets time pass, with every due timer.
    pub(crate) fn run(&mut self, time: Duration) {
        let end = self.now.after(time);
        loop {
            self.run_until_idle();
            let due = self.hosts.iter().filter_map(|host| host.group.poll_timeout()).min();
            match due {
                Some(at) if at <= end => self.now = self.now.max(at),
                _ => break,
            }
            for host in &mut self.hosts {
                if host.group.poll_timeout().is_some_and(|at| at <= self.now) {
                    host.group.handle_timeout(self.now);
                    let next = host.group.poll_timeout();
                    assert!(next.is_none_or(|at| at > self.now), "timer does not go forward");
                }
            }
        }
        self.now = end;
    }

    pub(crate) fn drain(&mut self, host: usize) {
        while let Some(output) = self.hosts[host].group.poll_output() {
            self.execute(host, &output);
            self.hosts[host].outputs.push(output);
        }
    }

    fn execute(&mut self, host: usize, output: &Output) {
        let now = self.now;
        let this = &mut self.hosts[host];
        match output {
            Output::PostLlc { link, bytes, receipt } => {
                let n = self.sent;
                self.sent += 1;
                self.trace.push((host, bytes.clone()));
                let qpn = *this.queue_pairs.get(link).expect("message on a link that is gone");
                let wire = || Wire {
                    from: host,
                    bytes: bytes.clone(),
                    qpn,
                    receipt: *receipt,
                    at: now.after(HOP),
                };
                match self.fault {
                    Fault::Lose(which) if which == n => {
                        if let Some(receipt) = receipt {
                            this.group.handle_sent(*receipt, now);
                        }
                    }
                    Fault::Double(which) if which == n => self.wires.extend([wire(), wire()]),
                    Fault::Break(which) if which == n => {
                        self.dead.insert(qpn);
                        this.group.handle_link_failed(*link, Cause::QueuePair, now);
                    }
                    _ => self.wires.push_back(wire()),
                }
            }
            Output::PrepareLink { link, rnic, .. } => {
                if this.broken.contains(rnic) {
                    this.group.handle_link_failed(*link, Cause::Setup, now);
                } else if !this.lazy {
                    self.prepare(host, *link);
                }
            }
            Output::DestroyLink { link } => {
                this.queue_pairs.remove(link);
            }
            Output::RmbDeleted { rmb } | Output::RmbRefused { rmb } => {
                assert!(this.rmbs.remove(rmb), "{rmb:?} is gone already");
            }
            Output::RmbConfirmed { rmb } if self.honest => self.assert_known(host, *rmb),
            Output::MoveConnections { from, to, .. } => {
                assert!(this.queue_pairs.contains_key(from) && this.queue_pairs.contains_key(to));
            }
            Output::ConnectLink { link, .. }
            | Output::ActivateLink { link }
            | Output::LinkUsable { link } => {
                assert!(this.queue_pairs.contains_key(link), "{output:?} for a link that is gone");
            }
            Output::Terminated { .. } => {
                assert!(this.queue_pairs.is_empty(), "links are left at the end");
            }
            _ => {}
        }
    }

    pub(crate) fn prepare(&mut self, host: usize, link: LinkKey) {
        let this = &mut self.hosts[host];
        let qpn = Qpn::new(this.next_qpn);
        this.next_qpn += 1;
        this.queue_pairs.insert(link, qpn);
        let regions = this.rmbs.iter().map(|rmb| (*rmb, region(host, *rmb, qpn))).collect();
        let prepared = Prepared { qpn, psn: Psn::new(qpn.get() << 8), regions };
        this.group.handle_link_prepared(link, prepared, self.now);
    }

    pub(crate) fn deliver(&mut self, wire: Wire) {
        let to = 1 - wire.from;
        let link = self.end_of(wire.from, wire.qpn);
        if !self.dead.contains(&wire.qpn)
            && let Some(link) = link
        {
            if self.hosts[to].qpn(link).is_some_and(|qpn| self.dead.contains(&qpn)) {
                return;
            }
            if let Err(anomaly) = self.hosts[to].group.handle_message(link, &wire.bytes, self.now) {
                self.anomalies.push((to, anomaly));
            }
        }
        if let Some(receipt) = wire.receipt
            && !self.dead.contains(&wire.qpn)
        {
            self.hosts[wire.from].group.handle_sent(receipt, self.now);
        }
    }

    /// The link of the other host whose peer is this queue pair.
    pub(crate) fn end_of(&self, from: usize, qpn: Qpn) -> Option<LinkKey> {
        let there = self.hosts[1 - from].group.links();
        let is = |link: &&LinkRecord| link.remote.is_some_and(|remote| remote.qpn == qpn);
        there.iter().find(is).map(|link| link.key)
    }

    /// Takes a link from both ends, without a word.
    pub(crate) fn cut(&mut self, host: usize, link: LinkKey) {
        let qpn = self.hosts[host].qpn(link).unwrap();
        self.dead.insert(qpn);
        if let Some(other) = self.end_of(host, qpn) {
            let other = self.hosts[1 - host].qpn(other).unwrap();
            self.dead.insert(other);
        }
    }

    pub(crate) fn fail(&mut self, host: usize, link: LinkKey) {
        self.cut(host, link);
        self.hosts[host].group.handle_link_failed(link, Cause::QueuePair, self.now);
    }

    pub(crate) fn add_rmb(&mut self, host: usize, rmb: u32) {
        let rmb = RmbId(rmb);
        let this = &mut self.hosts[host];
        let keys: Vec<LinkKey> = this.group.key_links().collect();
        let regions: Vec<(LinkKey, Region)> = keys
            .into_iter()
            .map(|link| (link, region(host, rmb, this.queue_pairs[&link])))
            .collect();
        this.rmbs.insert(rmb);
        this.group.add_rmb(rmb, None, &regions, self.now).unwrap();
    }

    /// The peer knows an RMB on each link in use by both ends (LLC-51).
    fn assert_known(&self, host: usize, rmb: RmbId) {
        for link in self.active(host) {
            let qpn = self.hosts[host].qpn(link).unwrap();
            let Some(there) = self.end_of(host, qpn) else { continue };
            let peer = &self.hosts[1 - host].group;
            if peer.link(there).is_some_and(|link| link.state == LinkState::Active) {
                let known = peer.find_peer_rmb(there, region(host, rmb, qpn).rkey);
                assert!(known.is_some(), "{rmb:?} of {host} is not known on {there:?}");
            }
        }
    }

    /// Each RMB of each end is known to the other on each active link, with the right key.
    pub(crate) fn assert_keys(&self) {
        for host in [SERVER, CLIENT] {
            let (this, peer) = (&self.hosts[host], &self.hosts[1 - host]);
            for link in this.group.links().iter().filter(|l| l.state == LinkState::Active) {
                let remote = link.remote.unwrap().qpn;
                let confirmed = peer
                    .rmbs
                    .iter()
                    .filter(|rmb| peer.group.rmb_state(**rmb) == Some(RmbState::Confirmed));
                for rmb in confirmed {
                    let want = region(1 - host, *rmb, remote);
                    let id = this.group.find_peer_rmb(link.key, want.rkey);
                    let have = id.and_then(|id| this.group.peer_region(id, link.key));
                    assert_eq!(have, Some(want), "host {host}, {rmb:?}, {:?}", link.key);
                }
            }
        }
    }

    pub(crate) fn active(&self, host: usize) -> Vec<LinkKey> {
        let links = self.hosts[host].group.links().iter();
        links.filter(|link| link.state == LinkState::Active).map(|link| link.key).collect()
    }

    /// Names of the messages so far, `>` from the server.
    pub(crate) fn names(&self) -> Vec<String> {
        let dialect = self.hosts[0].group.params().profile.dialect;
        self.trace.iter().map(|(from, bytes)| name(*from, bytes, &dialect)).collect()
    }

    pub(crate) fn forget(&mut self) {
        self.trace.clear();
        self.anomalies.clear();
        self.hosts.iter_mut().for_each(|host| host.outputs.clear());
    }
}

pub(crate) fn name(from: usize, bytes: &[u8], dialect: &Dialect) -> String {
    let llc = Llc::parse(bytes, dialect).expect("groups write what can be read");
    let text = format!("{:?}", llc.message);
    let kind: String = text.chars().take_while(|c| c.is_alphanumeric()).collect();
    let flags = bytes[3];
    format!("{} {kind} {flags:02x}", if from == SERVER { ">" } else { "<" })
}
