// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Information about connections, links, link groups and RNICs, for tools.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use smc_core::connection::Ring;
use smc_core::handshake::EstablishedR;
use smc_core::link_group::{LinkKey, LinkState, Role, Topology};
use smc_core::wire::clc::Version;

use super::buffers::Registered;
use super::endpoint::Endpoint;
use super::group::Group;
use super::link::Link;
use super::port::Port;
use super::shared::Shared;
use smc_info::{LinkGroupInfo, LinkInfo, RnicInfo, SmcrInfo};

fn version(version: Version) -> u8 {
    match version {
        Version::V1 => 1,
        Version::V2 => 2,
    }
}

fn state_name(state: LinkState) -> &'static str {
    match state {
        LinkState::Preparing => "preparing",
        LinkState::Adding => "being added",
        LinkState::Confirming => "being confirmed",
        LinkState::Active => "active",
        LinkState::Leaving => "closing",
        LinkState::Failed => "failed",
        LinkState::Deleting => "being deleted",
        LinkState::Gone => "gone",
    }
}

fn link_info(link: &Link, number: u8, state: &'static str) -> LinkInfo {
    let port = link.port();
    let peer = link.peer();
    LinkInfo {
        number,
        rnic: port.device().name().to_owned(),
        port: port.number(),
        local_gid: link.gid().0,
        peer_gid: peer.map_or([0; 16], |peer| peer.gid.0),
        local_qp: link.qpn().get(),
        peer_qp: peer.map_or(0, |peer| peer.qpn.get()),
        mtu: peer.and_then(|peer| peer.mtu.bytes().ok()).unwrap_or(0),
        state: state.into(),
        connections: link.connections().load(Ordering::Relaxed) as usize,
        credits: link.credits(),
    }
}

/// Information about a connection.
pub(super) fn connection(
    group: &Arc<Group>,
    endpoint: &Endpoint,
    own: &Registered,
    established: &EstablishedR,
    peer: Ring,
) -> SmcrInfo {
    let links = links(group);
    let using = endpoint.link();
    // Queue pairs of two adapters may have the same number, and addresses may change.
    let link = using.as_ref().and_then(|link| {
        let (_, info) = links.iter().find(|(key, _)| *key == link.key())?;
        Some(info.clone())
    });
    let rkey = using.and_then(|link| own.region(link.key())).map_or(0, |region| region.rkey.0);
    SmcrInfo {
        version: version(group.version()),
        release: established.terms.release.code(),
        eid: established.eid,
        first_contact: established.first_contact,
        server: group.role() == Role::Server,
        group: group.number(),
        peer_id: established.peer.peer_id.0,
        link: link.unwrap_or_default(),
        links: links.iter().filter(|(_, link)| link.state == "active").count(),
        tokens: (endpoint.token(), established.peer.token),
        rkeys: (rkey, endpoint.peer_rkey().unwrap_or(0)),
        local_buffer: own.len(),
        peer_buffer: peer.element_len(),
        eye_catcher: peer.has_eye_catcher(),
        failovers: endpoint.failovers(),
        peer_host: established.peer_host.and_then(|host| host.hostname.text().map(str::to_owned)),
    }
}

fn links(group: &Arc<Group>) -> Vec<(LinkKey, LinkInfo)> {
    let core = group.core();
    let info = |link: &Arc<Link>| {
        let machine = core.machine.as_ref().and_then(|machine| machine.link(link.key()));
        let state = machine.map_or("being made", |link| state_name(link.state));
        (link.key(), link_info(link, machine.map_or(0, |link| link.number), state))
    };
    core.links.iter().map(info).collect()
}

/// Information about a link group.
pub(super) fn group(group: &Arc<Group>) -> LinkGroupInfo {
    let links = links(group).into_iter().map(|(_, info)| info).collect();
    let core = group.core();
    let machine = core.machine.as_ref();
    let topology = match machine.map_or(Topology::None, |machine| machine.topology()) {
        Topology::None => "none",
        Topology::Single => "single",
        Topology::Symmetric => "symmetric",
        Topology::AsymmetricLocal => "asymmetric (local)",
        Topology::AsymmetricPeer => "asymmetric (peer)",
    };
    let now = group.shared().now();
    let timer = machine.and_then(|machine| machine.poll_timeout());
    LinkGroupInfo {
        group: group.number(),
        version: version(group.version()),
        release: group.terms().map_or(0, |terms| terms.release.code()),
        server: group.role() == Role::Server,
        peer_id: group.peer().peer_id().0,
        topology: topology.into(),
        connections: group.connections() as usize,
        max_connections: machine.map_or(0, |machine| machine.max_connections()),
        links,
        max_links: machine.map_or(0, |machine| machine.max_links()),
        rmbs: core.buffers.counts(),
        failovers: group.failovers().load(Ordering::Relaxed),
        timer: timer.map(|timer| timer.0.saturating_sub(now.0)),
    }
}

/// Information about a port.
pub(super) fn rnic(port: &Arc<Port>, shared: &Shared) -> RnicInfo {
    let active = port.refresh();
    let view = port.view();
    let netdev = view.gids.iter().find_map(|entry| entry.net_device.as_ref());
    let netdev = netdev.map(|device| device.name.clone());
    let name = port.device().name().to_owned();
    let pnet = super::pnet::network_of(&shared.options.pnet, port);
    let mine = |link: &&Arc<Link>| link.port().number() == port.number();
    RnicInfo {
        pnet: pnet.map(str::to_owned),
        port: port.number(),
        active,
        netdev,
        mtu: view.mtu.bytes().unwrap_or(0),
        gids: view.gids.iter().map(|entry| entry.gid.0).collect(),
        links: shared.links_over(port.device()).iter().filter(mine).count(),
        name,
    }
}
