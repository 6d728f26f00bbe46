// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The subnets of this host's addresses.

use std::net::IpAddr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rustix::net::{self, AddressFamily, SocketFlags, SocketType};
use smc_core::handshake::IpSubnet;
use smc_core::wire::ids::Gid;

use super::interfaces::{Address, addresses};
use ism_sys::lock;

/// The lifetime of the cached addresses of this host.
const FRESH: Duration = Duration::from_secs(1);

/// The addresses of this host.
#[derive(Debug, Default)]
pub(crate) struct Subnets {
    known: Mutex<Option<(Instant, Arc<[Address]>)>>,
}

impl Subnets {
    fn all(&self) -> Arc<[Address]> {
        let mut known = lock(&self.known);
        match &*known {
            Some((at, all)) if at.elapsed() < FRESH => all.clone(),
            _ => {
                let all: Arc<[Address]> = addresses().unwrap_or_default().into();
                *known = Some((Instant::now(), all.clone()));
                all
            }
        }
    }

    /// The name of the interface with this address.
    pub(crate) fn interface_of(&self, local: IpAddr) -> Option<String> {
        let local = local.to_canonical();
        let number = self.all().iter().find(|address| address.address == local)?.interface;
        let flags = SocketFlags::CLOEXEC;
        let socket = net::socket_with(AddressFamily::INET, SocketType::DGRAM, flags, None).ok()?;
        net::netdevice::index_to_name(&socket, number).ok()
    }

    /// The subnets of the interface with this address (CLC-10).
    pub(crate) fn around(&self, local: IpAddr) -> Vec<IpSubnet> {
        around(&self.all(), local)
    }

    /// Whether no router is between the interface with this address and a peer (CLCV2-54). An unknown
    /// path is taken to be near.
    pub(crate) fn is_direct(&self, local: IpAddr, peer: Gid) -> bool {
        let peer = match peer.to_ipv4() {
            Some(v4) => IpAddr::from(v4),
            None => IpAddr::from(peer.0),
        };
        let subnets = self.around(local);
        let same_family = |subnet: &&IpSubnet| subnet.network().is_ipv4() == peer.is_ipv4();
        let mut of_family = subnets.iter().filter(same_family).peekable();
        if of_family.peek().is_none() {
            return true;
        }
        of_family.any(|subnet| {
            IpSubnet::new(peer, subnet.bits()).is_some_and(|around| around == *subnet)
        })
    }
}

/// The subnet of the address itself comes first.
fn around(all: &[Address], local: IpAddr) -> Vec<IpSubnet> {
    let local = local.to_canonical();
    let Some(own) = all.iter().find(|address| address.address == local) else {
        return Vec::new();
    };
    let others = all.iter().filter(|a| a.interface == own.interface && a.address != local);
    let subnets = std::iter::once(own).chain(others);
    subnets.filter_map(|address| IpSubnet::new(address.address, address.bits)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn known(list: &[(u32, &str, u8)]) -> Subnets {
        let list = list.iter().map(|(interface, address, bits)| Address {
            interface: *interface,
            address: address.parse().unwrap(),
            bits: *bits,
        });
        let later = Instant::now() + Duration::from_secs(60);
        Subnets { known: Mutex::new(Some((later, list.collect()))) }
    }

    fn gid(address: &str) -> Gid {
        super::super::port::gid_of(address.parse().unwrap())
    }

    // Shows: CLC-10.
    #[test]
    fn subnets_are_those_of_the_interface_with_the_own_one_first() {
        let subnets = known(&[
            (2, "10.1.0.5", 16),
            (3, "10.9.0.1", 24),
            (2, "10.2.3.4", 8),
            (2, "fd00::1", 64),
        ]);
        let around = subnets.around("10.2.3.4".parse().unwrap());
        assert_eq!(around.len(), 3);
        assert_eq!(around[0].bits(), 8);
        assert!(subnets.around("10.3.3.3".parse().unwrap()).is_empty());
    }

    // Shows: CLCV2-54.
    #[test]
    fn a_peer_in_the_subnet_is_near_and_one_outside_is_not() {
        let subnets = known(&[(2, "10.9.0.1", 24), (2, "fd00::1", 64)]);
        let local = "10.9.0.1".parse().unwrap();
        assert!(subnets.is_direct(local, gid("10.9.0.77")));
        assert!(!subnets.is_direct(local, gid("10.9.1.77")));
        assert!(subnets.is_direct(local, gid("fd00::2")));
        assert!(!subnets.is_direct(local, gid("fd01::2")));
        assert!(subnets.is_direct("10.3.3.3".parse().unwrap(), gid("10.9.1.77")));
    }
}
