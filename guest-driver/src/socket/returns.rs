// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The resources for connections' returns, and the choice of connections to try again after a refusal.
//!
//! No event reports that the peer's device has come to this machine, or is there again. So one of the
//! connections with a peer asks again after a short pause, and when it gets a ring, the others follow.
//! Each of them by itself waits longer and longer ([`smc_core::carrier::BackOff`]).

use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustc_hash::FxHashMap;
use smc_core::handshake::{Config, Kinds};

use super::devices::{Current, OpenDevice};
use crate::conn::{Conn, PeerDevice};
use crate::handshake::link::RingRdma;
use crate::handshake::ring::RingParams;
use crate::smcd::{Fabric, Fabrics};

/// Pause between two tries of the connections with one peer.
const RETRY_PAUSE: Duration = Duration::from_secs(1);

impl Current {
    /// The resources for a connection's return to a ring: its device, if open, or its RNICs.
    pub(super) fn ring_params(&self, conn: &Conn, buffer: u32) -> RingParams {
        let reactor = conn.reactor();
        let is_its = |open: &&OpenDevice| Arc::ptr_eq(&open.reactor, reactor);
        let open = self.open.iter().find(is_its).filter(|open| {
            let device = open.fabric.device();
            !device.is_leaving() && !device.is_gone()
        });
        let fabrics = Fabrics(open.map(|open| open.fabric.clone()).into_iter().collect());
        let rdma = self.rdma.as_ref().filter(|(_, rdma)| Arc::ptr_eq(rdma, reactor));
        let rdma = rdma.zip(conn.local_ip()).map(|((host, reactor), local)| RingRdma {
            host: host.clone(),
            observer: reactor.clone(),
            route: host.route(local),
        });
        let mut config = Config::clone(&self.config);
        config.kinds -= match rdma {
            Some(_) => Kinds::all() - Kinds::SMCR_V2,
            None => Kinds::SMCR_V1 | Kinds::SMCR_V2,
        };
        config.devices.retain(|device| {
            let gid = |fabric: &Arc<Fabric>| fabric.device().gid().0;
            fabrics.0.iter().any(|f| gid(f) == device.gid.0 && f.chid().0 == device.chid.0)
        });
        RingParams { config: Arc::new(config), fabrics, rdma, buffer }
    }
}

/// Has the due ones of these connections try again.
pub(super) fn retry(all: &[Arc<Conn>]) {
    let signs: Vec<_> = all.iter().map(|conn| conn.sign_of_device()).collect();
    let due = due(&signs, Instant::now());
    due.into_iter().filter_map(|at| all.get(at)).for_each(|conn| conn.retry_return());
}

/// The newest signs of one peer.
#[derive(Default)]
struct PeerSigns {
    ring: Option<Instant>,
    refused: Option<Instant>,
    /// The connection refused first.
    first: Option<(Instant, usize)>,
}

/// Indices of the connections due to try again.
fn due(signs: &[Option<(IpAddr, PeerDevice)>], now: Instant) -> Vec<usize> {
    let known = || signs.iter().enumerate().filter_map(|(at, sign)| Some((at, (*sign)?)));
    let mut peers: FxHashMap<IpAddr, PeerSigns> = FxHashMap::default();
    for (at, (peer, sign)) in known() {
        let peer = peers.entry(peer).or_default();
        match sign {
            PeerDevice::Ring(since) => peer.ring = peer.ring.max(Some(since)),
            PeerDevice::Refused(when) => {
                peer.refused = peer.refused.max(Some(when));
                let first = peer.first.get_or_insert((when, at));
                *first = (*first).min((when, at));
            }
        }
    }
    let is_due = |at: usize, peer: IpAddr, refused: Instant| {
        peers.get(&peer).is_some_and(|peer| {
            let has_device = peer.ring.is_some_and(|since| since > refused);
            let last = peer.refused.unwrap_or(refused);
            let is_next = peer.first.is_some_and(|(_, first)| first == at);
            has_device || is_next && now.saturating_duration_since(last) >= RETRY_PAUSE
        })
    };
    let refused = known().filter_map(|(at, (peer, sign))| match sign {
        PeerDevice::Refused(when) => Some((at, peer, when)),
        PeerDevice::Ring(_) => None,
    });
    refused.filter(|&(at, peer, when)| is_due(at, peer, when)).map(|(at, ..)| at).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 1));
    const B: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 2));

    fn due_of(signs: &[(IpAddr, PeerDevice)], now: Instant) -> Vec<usize> {
        due(&signs.iter().copied().map(Some).chain([None]).collect::<Vec<_>>(), now)
    }

    #[test]
    fn one_connection_with_each_peer_tries_again_after_the_pause_and_the_next_one_after_another() {
        let begin = Instant::now();
        let refused = |at: u64| PeerDevice::Refused(begin + Duration::from_millis(at));
        let mut signs = [(A, refused(20)), (A, refused(10)), (B, refused(700)), (A, refused(30))];
        let at = |millis| begin + Duration::from_millis(millis);
        assert_eq!(due_of(&signs, at(1029)), [] as [usize; 0]);
        assert_eq!(due_of(&signs, at(1030)), [1]);
        signs[1] = (A, refused(1030));
        assert_eq!(due_of(&signs, at(1699)), [] as [usize; 0]);
        assert_eq!(due_of(&signs, at(2030)), [0, 2]);
    }

    #[test]
    fn when_one_has_a_ring_all_that_were_refused_before_follow() {
        let begin = Instant::now();
        let at = |millis| begin + Duration::from_millis(millis);
        let refused = |millis| PeerDevice::Refused(at(millis));
        let ring = |millis| PeerDevice::Ring(at(millis));
        let signs = [
            (A, refused(10)),
            (A, ring(5)),
            (A, ring(20)),
            (A, refused(21)),
            (A, refused(19)),
            (B, refused(10)),
        ];
        assert_eq!(
            due_of(&signs, at(30)),
            [0, 4],
            "an older ring says nothing, nor another peer's"
        );
        assert_eq!(due_of(&signs[..2], at(30)), [] as [usize; 0]);
        assert_eq!(due_of(&signs[1..3], at(5000)), [] as [usize; 0], "none was refused");
    }
}
