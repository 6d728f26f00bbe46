// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The configuration of a target: devices, names, addresses.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use smc_core::handshake::{Config, IpSubnet, IsmDevice, Kinds, Rnic, Route};
use smc_core::wire::clc::{CarrierFeatures, CarrierOptions};
use smc_core::wire::ids::{Chid, Eid, Gid, Hostname, LinkLimits, Mac, Mtu, PeerId, Release};

use super::fabric::Fabric;
use super::{CHID, EID};

/// The system EID of hosts with one.
pub(crate) const SEID: &str = "IBM-SYSZ-ISMSEID00000000CONFORM0";
/// A prefix of the hosts with IPv6.
pub(crate) const PREFIX: ([u8; 16], u8) = ([0xfd, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0], 64);
/// CHID of the platform device.
const PLATFORM: u16 = 5;

/// One host.
#[derive(Clone)]
pub(crate) struct Host {
    pub(crate) config: Config,
    /// Of each connection.
    pub(crate) route: Route,
    /// Further addresses of a client of SMC-R, as a careless caller names them.
    pub(crate) alternates: Vec<Gid>,
    /// Listening address.
    pub(crate) address: IpAddr,
    /// The reachable devices; without a fabric every device is reachable.
    pub(crate) fabric: Option<Fabric>,
}

impl Host {
    /// SMC-D version 2 with one device, and the types in `kinds` besides.
    pub(crate) fn of(kinds: Kinds) -> Host {
        let mut config = Config::new(PeerId::new(0x5353, mac()));
        config.hostname = Hostname::from_wire(*b"target                          ");
        config.ueids = eids(&["OTHER", EID]);
        config.kinds = kinds;
        config.devices = vec![IsmDevice { chid: Chid(CHID), gid: gid() }];
        config.tolerance.sizes = smc_core::wire::clc::Limits::LINUX;
        Host {
            config,
            route: route(),
            alternates: Vec::new(),
            address: Ipv4Addr::LOCALHOST.into(),
            fabric: None,
        }
    }

    /// A host with every feature: devices of three fabrics, more EIDs than a Proposal holds and a
    /// system EID, records, IPv6 with several prefixes, and several addresses of SMC-R.
    pub(crate) fn rich() -> Host {
        let mut host = Host::of(Kinds::all());
        let config = &mut host.config;
        let platform = IsmDevice { chid: Chid(PLATFORM), gid: platform_gid() };
        let second = IsmDevice { chid: Chid(0xff02), gid: Gid(gid().0.map(|byte| byte ^ 1)) };
        config.devices.extend([platform, second]);
        config.ueids = eids(&["OTHER", EID, "E-3", "E-4", "E-5", "E-6", "E-7", "E-8", "E-9"]);
        config.seid = Some(Eid::new(SEID).unwrap());
        config.carriers = Some(CarrierOptions::new(CarrierFeatures::RETURN));
        config.limits = LinkLimits { max_conns: 100, max_links: 2 };
        let own = Gid(Ipv6Addr::new(0xfd00, 1, 0, 0, 0, 0, 0, 2).octets());
        let subnet = |text: &str, bits| IpSubnet::new(text.parse().unwrap(), bits).unwrap();
        host.route.ipv6 = true;
        host.route.subnets =
            vec![subnet("fe80::1", 64), subnet("fd00:1::2", 64), subnet("2001:db8:9::2", 48)];
        if let Some(rnic) = &mut host.route.rnic {
            (rnic.gid_v1, rnic.gid_v2) = (Some(own), Some(own));
        }
        let other = |n| Gid(Ipv6Addr::new(0xfd00, 1, 0, 0, 0, 0, 1, n).octets());
        // The first link's own address, no address, a duplicate, and one address too many.
        host.alternates = vec![own, Gid::NONE, other(1), other(1)];
        host.alternates.extend((2..=9).map(other));
        host.address = Ipv6Addr::LOCALHOST.into();
        host.fabric = Some(Fabric::default());
        host
    }

    /// Without an EID, so only version 1 remains.
    pub(crate) fn nameless() -> Host {
        let mut host = Host::of(Kinds::all());
        host.config.ueids.clear();
        host
    }

    /// SMC-R alone.
    pub(crate) fn without_d() -> Host {
        let mut host = Host::of(Kinds::SMCR_V2 | Kinds::SMCR_V1);
        host.config.devices.clear();
        host.route.ism = None;
        host
    }

    /// Release 2.0, with a platform device for both versions, and no type of SMC-R version 1.
    pub(crate) fn old() -> Host {
        let mut host = Host::of(Kinds::SMCD_V2 | Kinds::SMCD_V1 | Kinds::SMCR_V2);
        host.config.release = Release::V2_0;
        host.config.devices = vec![IsmDevice { chid: Chid(PLATFORM), gid: platform_gid() }];
        host
    }
}

fn eids(names: &[&str]) -> Vec<Eid> {
    names.iter().map(|name| Eid::new(name).unwrap()).collect()
}

pub(crate) fn mac() -> Mac {
    Mac([2, 0, 0, 0x53, 0x53, 1])
}

fn gid() -> Gid {
    Gid([0x51, 2, 3, 4, 5, 6, 0x47, 8, 0x99, 10, 11, 12, 13, 14, 15, 16])
}

fn platform_gid() -> Gid {
    let mut gid = [0; 16];
    gid[..8].copy_from_slice(b"PLATFORM");
    Gid(gid)
}

/// The loopback interface, with an adapter for SMC-R and a platform device for SMC-D version 1.
fn route() -> Route {
    let localhost = Ipv4Addr::LOCALHOST;
    let rnic = Rnic {
        mac: mac(),
        mtu: Mtu::B1024,
        gid_v1: Some(Gid::from_ipv4(localhost.octets())),
        gid_v2: Some(Gid::from_ipv4(localhost.octets())),
        max_links: 2,
    };
    let subnet = IpSubnet::new(IpAddr::V4(localhost), 8).unwrap();
    Route {
        ipv6: false,
        subnets: vec![subnet],
        ism: Some(IsmDevice { chid: Chid(PLATFORM), gid: platform_gid() }),
        rnic: Some(rnic),
    }
}
