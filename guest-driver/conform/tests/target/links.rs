// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Links of SMC-R without RNICs: queue pairs of this process, and smc-core's link group at the
//! target's end of them.

use std::collections::HashMap;
use std::net::TcpStream;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use smc_conform::{LinkEnd as PeerEnd, QueuePair, RdmaDevice};
use smc_core::handshake::{
    Awaited, ClcReader, Config, DeclineReason, EstablishedR, LinkEnd, Role as EndRole,
};
use smc_core::link_group::{
    Ending, FirstLink, Generation, LinkGroup, LinkKey, Output, Params, PeerProfile, Prepared,
    Region, RemoteEnd, RmbId, Rnic, RnicId, Role, Timers,
};
use smc_core::time::Tick;
use smc_core::wire::clc::Version;
use smc_core::wire::ids::{Mtu, Psn, Qpn, Rkey};

use super::{Fault, abort, echo, link_end, read, write};

/// How often the target looks at TCP.
const LOOK: Duration = Duration::from_millis(10);
/// MAC address of the suite.
pub(crate) const SUITE_MAC: [u8; 6] = [2, 0x43, 0x46, 0, 0, 1];
/// RoCE GID of the suite.
pub(crate) const SUITE_GID: [u8; 16] = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 127, 0, 0, 1];

/// A message, and its receiving queue pair.
type Arrival = (u32, Vec<u8>);

/// Inboxes of the queue pairs, by number.
#[derive(Clone, Default)]
pub(crate) struct Network(Arc<Mutex<Numbers>>);

#[derive(Default)]
struct Numbers {
    last: u32,
    inboxes: HashMap<u32, Sender<Arrival>>,
}

impl Network {
    fn add(&self, inbox: Sender<Arrival>) -> u32 {
        let mut numbers = self.0.lock().unwrap();
        numbers.last += 1;
        let number = 0x100 + numbers.last;
        numbers.inboxes.insert(number, inbox);
        number
    }

    fn remove(&self, number: u32) {
        self.0.lock().unwrap().inboxes.remove(&number);
    }

    fn has(&self, number: u32) -> bool {
        self.0.lock().unwrap().inboxes.contains_key(&number)
    }

    /// Whether there is such a queue pair.
    fn send(&self, to: u32, message: &[u8]) -> bool {
        let inbox = self.0.lock().unwrap().inboxes.get(&to).cloned();
        inbox.is_some_and(|inbox| inbox.send((to, message.to_vec())).is_ok())
    }
}

impl RdmaDevice for Network {
    fn gid(&self) -> [u8; 16] {
        SUITE_GID
    }

    fn second_gid(&self) -> Option<[u8; 16]> {
        let mut other = SUITE_GID;
        other[15] = 77;
        Some(other)
    }

    fn mac(&self) -> [u8; 6] {
        SUITE_MAC
    }

    fn queue_pair(&self) -> Result<Box<dyn QueuePair>, String> {
        let (sender, inbox) = channel();
        let number = self.add(sender);
        Ok(Box::new(SuiteEnd { network: self.clone(), number, peer: None, inbox }))
    }
}

struct SuiteEnd {
    network: Network,
    number: u32,
    peer: Option<u32>,
    inbox: Receiver<Arrival>,
}

impl QueuePair for SuiteEnd {
    fn qpn(&self) -> u32 {
        self.number
    }

    fn psn(&self) -> u32 {
        7
    }

    fn rkey(&self) -> u32 {
        0x5000 + self.number
    }

    fn address(&self) -> u64 {
        u64::from(self.number) << 32
    }

    fn connect(&mut self, peer: &PeerEnd) -> Result<(), String> {
        self.peer = Some(peer.qpn);
        Ok(())
    }

    fn send(&mut self, message: &[u8]) -> Result<(), String> {
        match self.peer.is_some_and(|peer| self.network.send(peer, message)) {
            true => Ok(()),
            false => Err("the target's queue pair is gone".into()),
        }
    }

    fn receive(&mut self, limit: Duration) -> Result<Option<Vec<u8>>, String> {
        Ok(self.inbox.recv_timeout(limit).ok().map(|(_, message)| message))
    }

    fn write(&mut self, _: (u32, u64), _: &[u8]) -> Result<(), String> {
        Err("these queue pairs have no memory".into())
    }

    fn read(&self, _: usize, len: usize) -> Vec<u8> {
        vec![0; len]
    }
}

impl Drop for SuiteEnd {
    fn drop(&mut self) {
        self.network.remove(self.number);
    }
}

/// The target's queue pairs of one group.
pub(crate) struct TargetEnds {
    network: Network,
    sender: Sender<Arrival>,
    inbox: Receiver<Arrival>,
    /// Link and the peer's queue pair, once known, by the own queue pair.
    links: HashMap<u32, (LinkKey, Option<u32>)>,
}

impl TargetEnds {
    /// With a queue pair for the first link.
    pub(crate) fn new(network: &Network) -> (TargetEnds, LinkEnd) {
        let (sender, inbox) = channel();
        let mut ends =
            TargetEnds { network: network.clone(), sender, inbox, links: HashMap::new() };
        let qpn = Qpn::new(ends.add(LinkKey::FIRST));
        (ends, LinkEnd { qpn, ..link_end() })
    }

    fn add(&mut self, link: LinkKey) -> u32 {
        let number = self.network.add(self.sender.clone());
        self.links.insert(number, (link, None));
        number
    }

    fn connect(&mut self, link: LinkKey, peer: Qpn) {
        let own = self.links.values_mut().find(|(key, _)| *key == link);
        if let Some((_, to)) = own {
            *to = Some(peer.get());
        }
    }

    fn send(&self, link: LinkKey, message: &[u8]) -> bool {
        let peer = self.links.values().find(|(key, _)| *key == link).and_then(|(_, peer)| *peer);
        peer.is_some_and(|peer| self.network.send(peer, message))
    }

    fn remove(&mut self, link: LinkKey) {
        let network = self.network.clone();
        self.links.retain(|number, (key, _)| {
            if *key == link {
                network.remove(*number);
            }
            *key != link
        });
    }
}

impl Drop for TargetEnds {
    fn drop(&mut self) {
        self.links.keys().for_each(|number| self.network.remove(*number));
    }
}

/// How a connection over SMC-R ends.
#[derive(Debug, PartialEq, Eq)]
enum End {
    /// The peer has closed or reset TCP.
    Gone,
    /// The peer has declined.
    Declined,
    /// The group is over before data may flow: Decline, and TCP.
    Fallback,
}

/// The initial link group, from the result of the handshake.
fn group(established: &EstablishedR, now: Tick) -> LinkGroup {
    let (own, peer, terms) = (&established.own, &established.peer, &established.terms);
    let role = match established.role {
        EndRole::Client => Role::Client,
        EndRole::Server => Role::Server,
    };
    let generation = match terms.version {
        Version::V1 => Generation::V1 { max_links: 2 },
        Version::V2 if terms.release.has_v2_1_fields() => Generation::V21(terms.limits),
        Version::V2 => Generation::V2,
    };
    let mut params = Params::new(role, generation, PeerProfile::SPEC);
    params.timers = Timers { deletion: Duration::ZERO, ..params.timers };
    let rnic = Rnic { id: RnicId(0), gid: own.gid, mac: own.mac, mtu: Mtu::B1024, direct: true };
    let remote =
        RemoteEnd { gid: peer.gid, mac: peer.mac, qpn: peer.qpn, psn: peer.psn, mtu: peer.mtu };
    let first = FirstLink {
        rnic,
        qpn: own.qpn,
        remote,
        rmb: RmbId(0),
        region: Region { rkey: own.rkey, address: own.address },
        peer_region: Region { rkey: peer.rkey, address: peer.address },
    };
    LinkGroup::new(params, first, now)
}

/// Carries a connection over its link until the end. Aborts the connection of a peer without an
/// RNIC.
pub(crate) fn carry(
    tcp: &TcpStream,
    ends: TargetEnds,
    established: &EstablishedR,
    config: &Config,
    fault: &Fault,
) {
    if !ends.network.has(established.peer.qpn.get()) {
        return abort(tcp);
    }
    match run(tcp, ends, established, fault) {
        End::Gone => {}
        End::Declined => {
            let _ = read(tcp, ClcReader::new(Awaited::Confirm), fault);
            echo(tcp, fault);
        }
        End::Fallback => {
            if let Some(decline) = established.decline(config, DeclineReason::NoDevice) {
                write(tcp, decline.message, fault);
                echo(tcp, fault);
            }
        }
    }
}

/// Runs the link group of a connection until the end of the group or of TCP.
fn run(tcp: &TcpStream, mut ends: TargetEnds, established: &EstablishedR, fault: &Fault) -> End {
    let began = Instant::now();
    let now = || Tick(u64::try_from(began.elapsed().as_micros()).unwrap());
    let mut group = group(established, now());
    ends.connect(LinkKey::FIRST, established.peer.qpn);
    let _ = tcp.set_nonblocking(true);
    loop {
        while let Some(output) = group.poll_output() {
            if let Some(end) = carry_out(&mut group, &mut ends, output, now(), fault) {
                let _ = tcp.set_nonblocking(false);
                if end == End::Gone {
                    abort(tcp);
                }
                return end;
            }
        }
        let mut first = [0; 5];
        match tcp.peek(&mut first) {
            Ok(5) if first == [0xe2, 0xd4, 0xc3, 0xd9, 4] => {
                let _ = tcp.set_nonblocking(false);
                return End::Declined;
            }
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
            Ok(1..=4) => {}
            _ => return End::Gone,
        }
        match ends.inbox.recv_timeout(LOOK) {
            Ok((number, mut message)) => {
                (fault.llc_incoming)(&mut message);
                let link = ends.links.get(&number).map(|(link, _)| *link);
                if let Some(link) = link.filter(|_| !message.is_empty()) {
                    // The outputs of the group show a fault of the peer.
                    let _ = group.handle_message(link, &message, now());
                }
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return End::Gone,
        }
        if group.poll_timeout().is_some_and(|due| due <= now()) {
            group.handle_timeout(now());
        }
    }
}

fn carry_out(
    group: &mut LinkGroup,
    ends: &mut TargetEnds,
    output: Output,
    now: Tick,
    fault: &Fault,
) -> Option<End> {
    match output {
        Output::PostLlc { link, mut bytes, receipt } => {
            (fault.llc_outgoing)(&mut bytes);
            if !bytes.is_empty() {
                ends.send(link, &bytes);
            }
            if let Some(receipt) = receipt {
                group.handle_sent(receipt, now);
            }
        }
        Output::PrepareLink { link, .. } => {
            let number = ends.add(link);
            let region = Region { rkey: Rkey(0x7000 + number), address: u64::from(number) << 32 };
            let prepared = Prepared {
                qpn: Qpn::new(number),
                psn: Psn::new(0x99),
                regions: vec![(RmbId(0), region)],
            };
            group.handle_link_prepared(link, prepared, now);
        }
        Output::ConnectLink { link, remote, .. } => ends.connect(link, remote.qpn),
        Output::DestroyLink { link } => ends.remove(link),
        Output::GroupUsable => {
            if let Some(link) = group.pick_link() {
                group.connection_added(link, now).unwrap();
            }
        }
        Output::Terminated { .. } if fault.llc_stays => {}
        Output::Terminated { ending: Ending::Fallback, .. } => return Some(End::Fallback),
        Output::Terminated { .. } => return Some(End::Gone),
        _ => {}
    }
    None
}
