// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Parameters of the TCP connection: its interface, and the devices associated with the interface.

use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::ism_device::IsmDevice;
use crate::wire::List;
use crate::wire::clc::{IpPrefix, MAX_ENTRIES, Subnet};
use crate::wire::ids::{Gid, Mac, Mtu};

/// A subnet of a local interface: the common part of its hosts' addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct IpSubnet {
    network: IpAddr,
    bits: u8,
}

impl IpSubnet {
    /// The subnet of an interface's `address` with `bits` significant bits; the host part is cut
    /// off (wire errata A-1). `None` if the address has fewer bits.
    pub fn new(address: IpAddr, bits: u8) -> Option<IpSubnet> {
        let bits32 = u32::from(bits);
        let network = match address {
            IpAddr::V4(address) => {
                let host = 32_u32.checked_sub(bits32)?;
                let mask = u32::MAX.checked_shl(host).unwrap_or(0);
                IpAddr::V4(Ipv4Addr::from_bits(address.to_bits() & mask))
            }
            IpAddr::V6(address) => {
                let host = 128_u32.checked_sub(bits32)?;
                let mask = u128::MAX.checked_shl(host).unwrap_or(0);
                IpAddr::V6(Ipv6Addr::from_bits(address.to_bits() & mask))
            }
        };
        Some(IpSubnet { network, bits })
    }

    /// The lowest address of the subnet.
    pub const fn network(&self) -> IpAddr {
        self.network
    }

    /// How many leading bits all its addresses share.
    pub const fn bits(&self) -> u8 {
        self.bits
    }

    /// Link-local prefixes are the same on every link. So link-local prefixes prove nothing and are
    /// not proposed.
    fn is_link_local(&self) -> bool {
        matches!(self.network, IpAddr::V6(network) if network.segments()[0] & 0xffc0 == 0xfe80)
    }
}

/// An RDMA network adapter for connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Rnic {
    /// Ethernet address of the adapter (CLCV2-12).
    pub mac: Mac,
    /// The largest MTU its port can use now.
    pub mtu: Mtu,
    /// GID of the adapter for SMC-Rv1: of type RoCEv1, on the VLAN of the TCP connection (SEC-1);
    /// or any GID agreed between two hosts talking to each other only. `None`: no version 1.
    pub gid_v1: Option<Gid>,
    /// RoCEv2 address of the adapter, of the IP family of the TCP connection (CLCV2-20). An IPv4
    /// address is best in its mapped form, because Linux compares that form (wire errata A-18).
    /// `None`: no version 2.
    pub gid_v2: Option<Gid>,
    /// Maximum number of links of a group: 1 if no second adapter or port could take over, else 2.
    pub max_links: u8,
}

/// This host's resources for one TCP connection. The default has none: then only SMC-Dv2 is
/// possible, because SMC-Dv2 does not depend on the IP network (CLCV2-34).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Route {
    /// The TCP connection uses IPv6; an IPv4-mapped address counts as IPv4.
    pub ipv6: bool,
    /// Subnets of the connection's interface, both families mixed: the basis of proposals and
    /// checks of version 1 (CLC-10, CLC-17, CLC-18). The first IPv4 subnet is the proposed one, so
    /// it has to contain this end's address.
    pub subnets: Vec<IpSubnet>,
    /// The platform ISM device associated with the interface, for SMC-Dv1. The device also serves
    /// SMC-Dv2 if listed in [`Config::devices`](super::Config::devices) (CLCV2-91). An emulated
    /// device does not serve SMC-Dv1 (EISM-5).
    pub ism: Option<IsmDevice>,
    /// The RDMA adapter associated with the interface, for SMC-R.
    pub rnic: Option<Rnic>,
}

impl Route {
    /// The adapter and its address for SMC-Rv2, if the address has the IP family of the connection
    /// (CLCV2-20, CLCV2-68).
    pub(super) fn rnic_v2(&self) -> Option<(Rnic, Gid)> {
        let rnic = self.rnic?;
        let gid = rnic.gid_v2.filter(|gid| self.fits_family(*gid))?;
        Some((rnic, gid))
    }

    /// The adapter and its GID for SMC-Rv1.
    pub(super) fn rnic_v1(&self) -> Option<(Rnic, Gid)> {
        let rnic = self.rnic?;
        let gid = rnic.gid_v1.filter(|gid| !gid.is_none())?;
        Some((rnic, gid))
    }

    /// The ISM device for SMC-Dv1, never an emulated one (EISM-4).
    pub(super) fn ism_v1(&self) -> Option<IsmDevice> {
        self.ism.filter(|ism| !ism.chid.is_emulated() && !ism.gid.part1().is_none())
    }

    /// Whether an address is of the IP family of the TCP connection, and an address at all.
    pub(super) fn fits_family(&self, gid: Gid) -> bool {
        !gid.is_none() && gid.to_ipv4().is_none() == self.ipv6
    }

    /// The subnet in a Proposal of version 1 (CLC-15, CLC-16).
    pub(super) fn proposed_subnet(&self) -> Option<Subnet> {
        if !self.ipv6 {
            return self.subnets.iter().find_map(|subnet| match subnet.network {
                IpAddr::V4(network) => {
                    Some(Subnet::V4 { network: network.octets(), bits: subnet.bits })
                }
                IpAddr::V6(_) => None,
            });
        }
        let mut prefixes: List<IpPrefix, MAX_ENTRIES> = List::new();
        for subnet in self.subnets.iter().filter(|subnet| !subnet.is_link_local()) {
            if let IpAddr::V6(network) = subnet.network {
                let prefix = IpPrefix { address: network.octets(), bits: subnet.bits };
                // A ninth one has no room, and one in common is enough.
                if prefixes.push(prefix).is_err() {
                    break;
                }
            }
        }
        (!prefixes.is_empty()).then_some(Subnet::V6(prefixes))
    }

    /// Whether the interface is in the subnet of a Proposal, or in one of its prefixes: number and
    /// length are the same (CLC-17, CLC-18, SEC-2).
    pub(super) fn shares(&self, proposed: &Subnet) -> bool {
        match proposed {
            Subnet::V4 { network, bits } => self.has(IpAddr::V4(Ipv4Addr::from(*network)), *bits),
            Subnet::V6(prefixes) => prefixes
                .iter()
                .any(|prefix| self.has(IpAddr::V6(Ipv6Addr::from(prefix.address)), prefix.bits)),
        }
    }

    fn has(&self, address: IpAddr, bits: u8) -> bool {
        let local = |subnet: &&IpSubnet| !subnet.is_link_local();
        let subnet = IpSubnet { network: address, bits };
        self.subnets.iter().filter(local).any(|own| *own == subnet)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::ids::{Chid, GidV1};

    fn subnet(text: &str, bits: u8) -> IpSubnet {
        IpSubnet::new(text.parse().unwrap(), bits).unwrap()
    }

    #[test]
    fn a_subnet_is_an_address_without_its_host_part() {
        for (address, bits, network) in [
            ("10.9.3.77", 24, "10.9.3.0"),
            ("10.9.3.77", 22, "10.9.0.0"),
            ("10.9.3.77", 32, "10.9.3.77"),
            ("10.9.3.77", 0, "0.0.0.0"),
            ("fd00::9:1:2:3:4", 64, "fd00:0:0:9::"),
            ("fd00::9:1:2:3:4", 128, "fd00::9:1:2:3:4"),
            ("fd00::9:1:2:3:4", 0, "::"),
        ] {
            let subnet = subnet(address, bits);
            assert_eq!(subnet.network(), network.parse::<IpAddr>().unwrap(), "{address}/{bits}");
            assert_eq!(subnet.bits(), bits);
        }
        assert_eq!(IpSubnet::new("10.0.0.1".parse().unwrap(), 33), None);
        assert_eq!(IpSubnet::new("::1".parse().unwrap(), 129), None);
    }

    // Shows: CLC-10, CLC-15, CLC-16.
    #[test]
    fn proposes_the_subnets_of_the_family_of_the_connection() {
        let mut route = Route {
            subnets: vec![
                subnet("fe80::1", 64),
                subnet("fd00:1::1", 64),
                subnet("10.9.0.7", 24),
                subnet("10.8.0.7", 16),
            ],
            ..Route::default()
        };
        let proposed = route.proposed_subnet();
        assert_eq!(proposed, Some(Subnet::V4 { network: [10, 9, 0, 0], bits: 24 }));
        route.ipv6 = true;
        let Some(Subnet::V6(prefixes)) = route.proposed_subnet() else { panic!() };
        assert_eq!((prefixes.len(), prefixes[0].address[..4].to_vec()), (1, vec![0xfd, 0, 0, 1]));
        route.subnets = (0..12).map(|i| subnet(&format!("fd00:{i}::1"), 32)).collect();
        let Some(Subnet::V6(prefixes)) = route.proposed_subnet() else { panic!() };
        assert_eq!(prefixes.len(), MAX_ENTRIES, "as many as there is room for");
        route.subnets = vec![subnet("fe80::1", 64), subnet("10.9.0.7", 24)];
        assert_eq!(route.proposed_subnet(), None);
    }

    // Shows: CLCV2-20, CLCV2-68.
    #[test]
    fn addresses_have_to_fit_the_family_and_to_be_ones() {
        let v6 = Gid([0xfd; 16]);
        let v4 = Gid::from_ipv4([10, 9, 0, 1]);
        for (ipv6, gid, fits) in [
            (false, v4, true),
            (false, v6, false),
            (true, v4, false),
            (true, v6, true),
            (false, Gid::NONE, false),
            (true, Gid::NONE, false),
        ] {
            assert_eq!(Route { ipv6, ..Route::default() }.fits_family(gid), fits, "{gid} {ipv6}");
        }
    }

    // Shows: CLCV2-91, EISM-4.
    #[test]
    fn emulated_devices_and_devices_without_address_do_not_serve_version_1() {
        let ism = |chid, gid| Route {
            ism: Some(IsmDevice { chid: Chid(chid), gid }),
            ..Route::default()
        };
        assert!(ism(7, Gid([7; 16])).ism_v1().is_some());
        assert_eq!(ism(0xff01, Gid([7; 16])).ism_v1(), None);
        let half = Gid::from_parts(GidV1::NONE, GidV1([7; 8]));
        assert_eq!(ism(7, half).ism_v1(), None);
    }
}
