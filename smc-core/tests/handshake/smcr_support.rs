// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Hosts with RDMA adapters, and the shortest way through a handshake of SMC-R.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;

use smc_core::handshake::{
    AcceptedR, AwaitAccept, AwaitConfirmR, AwaitProposal, ClientStep, Config, ConfirmStepR,
    EstablishedR, IpSubnet, Kinds, KnownLink, LinkEnd, Rnic, Role, Route, Selection, ServerStep,
    TermsR, Tolerance, start_on,
};
use smc_core::wire::clc::Version;
use smc_core::wire::ids::{Gid, Mac, Mtu, PeerId, Psn, Qpn, Rkey, SizeCode};

use crate::support::{NOW, eid};

pub(crate) const CLIENT: u8 = 1;
pub(crate) const SERVER: u8 = 2;

/// A host of SMC-R alone.
pub(crate) fn host_r(n: u8, kinds: Kinds) -> Config {
    let mut config = Config::new(PeerId::new(0xabcd, mac(n)));
    config.kinds = kinds;
    config.tolerance = Tolerance::STRICT;
    config.ueids = vec![eid("LAB")];
    config
}

pub(crate) fn mac(n: u8) -> Mac {
    Mac([0x52, 0x54, 0, 0, 0, n])
}

pub(crate) fn gid_v4(n: u8) -> Gid {
    Gid::from_ipv4([10, 9, 0, n])
}

pub(crate) fn gid_v6(n: u8) -> Gid {
    Gid(Ipv6Addr::new(0xfd00, 0, 0, 9, 0, 0, 0, n.into()).octets())
}

/// A GID of type RoCEv1, made of the MAC.
pub(crate) fn gid_roce_v1(n: u8) -> Gid {
    Gid(Ipv6Addr::new(0xfe80, 0, 0, 0, 0x5054, 0x00ff, 0xfe00, n.into()).octets())
}

pub(crate) fn subnet_v4(third: u8) -> IpSubnet {
    IpSubnet::new(IpAddr::V4(Ipv4Addr::new(10, 9, third, 77)), 24).unwrap()
}

pub(crate) fn subnet_v6(fourth: u16) -> IpSubnet {
    IpSubnet::new(IpAddr::V6(Ipv6Addr::new(0xfd00, 0, 0, fourth, 1, 2, 3, 4)), 64).unwrap()
}

/// The resources of host `n` for an IPv4 connection.
pub(crate) fn route_v4(n: u8) -> Route {
    let rnic = Rnic {
        mac: mac(n),
        mtu: Mtu::B1024,
        gid_v1: Some(gid_roce_v1(n)),
        gid_v2: Some(gid_v4(n)),
        max_links: 2,
    };
    Route { ipv6: false, subnets: vec![subnet_v4(0)], ism: None, rnic: Some(rnic) }
}

/// The same for IPv6.
pub(crate) fn route_v6(n: u8) -> Route {
    let mut route = route_v4(n);
    route.ipv6 = true;
    route.subnets = vec![subnet_v6(8), subnet_v6(9)];
    route.rnic.as_mut().unwrap().gid_v2 = Some(gid_v6(n));
    route
}

/// The end of host `n` for a link between adapters of this version.
pub(crate) fn end(n: u8, version: Version, route: &Route) -> LinkEnd {
    let rnic = route.rnic.unwrap();
    let gid = match version {
        Version::V1 => rnic.gid_v1,
        Version::V2 => rnic.gid_v2,
    };
    LinkEnd {
        gid: gid.unwrap(),
        mac: rnic.mac,
        qpn: Qpn::new(0x10 + u32::from(n)),
        psn: Psn::new(0x1000 + u32::from(n)),
        mtu: rnic.mtu,
        rkey: Rkey(0x100 + u32::from(n)),
        address: 0xff11_0000_0000_0000 + u64::from(n),
        index: 1,
        token: 0x2000 + u32::from(n),
        size: SizeCode::new(n).unwrap(),
        direct: true,
    }
}

pub(crate) fn propose_on(client: &Config, route: &Route) -> (AwaitAccept, Vec<u8>) {
    start_on(Arc::new(client.clone()), route.clone(), NOW).unwrap()
}

pub(crate) fn receive_on(server: &Config, route: &Route, proposal: &[u8]) -> ServerStep {
    AwaitProposal::new(Arc::new(server.clone()), NOW).handle_on(proposal, || route.clone())
}

pub(crate) fn eligible_on(server: &Config, route: &Route, proposal: &[u8]) -> Selection {
    match receive_on(server, route, proposal) {
        ServerStep::Eligible(selection) => selection,
        other => panic!("{other:?}"),
    }
}

pub(crate) fn offered_r(client: AwaitAccept, accept: &[u8], known: KnownLink) -> AcceptedR {
    match client.handle_with(accept, |_, _| panic!("not SMC-D"), |_| known) {
        ClientStep::OfferedR(accepted) => accepted,
        other => panic!("{other:?}"),
    }
}

/// Two hosts and a connection between them.
#[derive(Clone)]
pub(crate) struct Pair {
    pub(crate) client: Config,
    pub(crate) server: Config,
    pub(crate) client_route: Route,
    pub(crate) server_route: Route,
    pub(crate) version: Version,
}

/// A finished handshake of SMC-R, and its messages.
pub(crate) struct RunR {
    pub(crate) proposal: Vec<u8>,
    pub(crate) accept: Vec<u8>,
    pub(crate) confirm: Vec<u8>,
    pub(crate) client: EstablishedR,
    pub(crate) server: EstablishedR,
}

impl Pair {
    pub(crate) fn new(version: Version) -> Pair {
        let kinds = match version {
            Version::V1 => Kinds::SMCR_V1,
            Version::V2 => Kinds::SMCR_V2,
        };
        Pair {
            client: host_r(CLIENT, kinds),
            server: host_r(SERVER, kinds),
            client_route: route_v4(CLIENT),
            server_route: route_v4(SERVER),
            version,
        }
    }

    pub(crate) fn v6(version: Version) -> Pair {
        let (client_route, server_route) = (route_v6(CLIENT), route_v6(SERVER));
        Pair { client_route, server_route, ..Pair::new(version) }
    }

    pub(crate) fn client_end(&self) -> LinkEnd {
        end(CLIENT, self.version, &self.client_route)
    }

    pub(crate) fn server_end(&self) -> LinkEnd {
        end(SERVER, self.version, &self.server_route)
    }

    pub(crate) fn propose(&self) -> (AwaitAccept, Vec<u8>) {
        propose_on(&self.client, &self.client_route)
    }

    pub(crate) fn receive(&self, proposal: &[u8]) -> ServerStep {
        receive_on(&self.server, &self.server_route, proposal)
    }

    pub(crate) fn accept(
        &self,
        proposal: &[u8],
        known: Option<TermsR>,
    ) -> (AwaitConfirmR, Vec<u8>) {
        let selection = eligible_on(&self.server, &self.server_route, proposal);
        selection.accept_r(self.version, known, self.server_end(), NOW).unwrap()
    }

    /// Runs a handshake without faults and checks that both sides have the same view. `known` makes
    /// a subsequent contact.
    pub(crate) fn run(&self, known: Option<TermsR>) -> RunR {
        let (awaits_accept, proposal) = self.propose();
        let (awaits_confirm, accept) = self.accept(&proposal, known);
        let link = known.map_or(KnownLink::NoGroup, KnownLink::Link);
        let accepted = offered_r(awaits_accept, &accept, link);
        assert_eq!(accepted.first_contact(), known.is_none());
        let (client, confirm) = accepted.confirm(self.client_end(), &[]);
        let server = match awaits_confirm.handle(&confirm, |_| known.is_some()) {
            ConfirmStepR::Established(server) => server,
            other => panic!("{other:?}"),
        };
        assert_eq!((client.role, server.role), (Role::Client, Role::Server));
        assert_eq!((client.own, client.peer), (server.peer, server.own));
        assert_eq!((client.terms, client.eid), (server.terms, server.eid));
        assert_eq!(client.first_contact, server.first_contact);
        assert_eq!(client.mtu, server.mtu);
        assert_eq!((client.direct, client.peer_direct), (server.peer_direct, server.direct));
        RunR { proposal, accept, confirm, client, server }
    }

    /// Runs a first contact and returns the terms of client and server. The terms differ if CLC
    /// does not agree on limits.
    pub(crate) fn run_unequal_limits(&self) -> (TermsR, TermsR) {
        let (awaits_accept, proposal) = self.propose();
        let (awaits_confirm, accept) = self.accept(&proposal, None);
        let accepted = offered_r(awaits_accept, &accept, KnownLink::NoGroup);
        let (client, confirm) = accepted.confirm(self.client_end(), &[]);
        match awaits_confirm.handle(&confirm, |_| false) {
            ConfirmStepR::Established(server) => (client.terms, server.terms),
            other => panic!("{other:?}"),
        }
    }
}
