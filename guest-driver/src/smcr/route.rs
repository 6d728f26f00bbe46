// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The RDMA resources of this host for one TCP connection.

use std::net::IpAddr;
use std::sync::Arc;

use smc_core::handshake::{Rnic, Route};

use super::host::RdmaHost;
use super::pnet::{network, network_of};
use super::port::{Port, Source};

/// A port for a connection, and its addresses there.
struct PortChoice {
    port: Arc<Port>,
    v2: Option<Source>,
    v1: Option<Source>,
}

impl RdmaHost {
    /// The port for a connection with this local address: the port of its interface, or one on its
    /// network by the operator's map (CLC-22, CLCV2-35, SEC-1).
    fn choose_port(&self, local: IpAddr) -> Option<PortChoice> {
        let map = &self.shared().options.pnet;
        let interface = match map.is_empty() {
            true => None,
            false => self.subnets().interface_of(local),
        };
        let Some(wanted) = interface.and_then(|name| network(map, &[&name])) else {
            let port = self.port_of(local)?;
            let (v2, v1) = (port.source_v2(local), port.source_v1(local));
            return Some(PortChoice { port, v2, v1 });
        };
        let ports = self.shared().ports().iter().filter(|port| port.is_active());
        let fits = ports.filter(|port| network_of(map, port) == Some(wanted));
        // The interface's own RNIC is as good as any and nearer.
        let port = fits.max_by_key(|port| port.source_v2(local).is_some())?;
        let v2 = port.source_like(local, false);
        let v1 = port.source_like(local, true);
        Some(PortChoice { port: port.clone(), v2, v1 })
    }

    /// The RDMA route for a TCP connection with this local address.
    pub(crate) fn route(&self, local: IpAddr) -> Route {
        let local = local.to_canonical();
        let options = &self.shared().options;
        let rnic = self.choose_port(local).and_then(|choice| {
            let port = choice.port;
            let network = network_of(&options.pnet, &port);
            let others = self.shared().ports().iter().filter(|other| other.is_active());
            let mut others = others.filter(|other| other.id() != port.id());
            let second = others.any(|other| network_of(&options.pnet, other) == network);
            Some(Rnic {
                mac: port.mac()?,
                mtu: port.view().mtu,
                gid_v1: choice.v1.map(|source| source.gid).filter(|_| options.v1),
                gid_v2: choice.v2.map(|source| source.gid).filter(|_| options.v2),
                max_links: if second { options.max_links } else { 1 },
            })
        });
        let subnets = match options.v1 && rnic.is_some() {
            true => self.subnets().around(local),
            false => Vec::new(),
        };
        Route { ipv6: local.is_ipv6(), subnets, rnic, ..Route::default() }
    }
}
