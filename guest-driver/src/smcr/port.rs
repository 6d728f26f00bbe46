// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Ports of RNICs, and their choice and address for a connection.

use std::net::IpAddr;
use std::sync::{Arc, Mutex};

use smc_core::link_group::{Rnic, RnicId};
use smc_core::wire::ids::{Gid, Mac, Mtu};

use super::device::Device;
use ism_sys::lock;
use smc_verbs::{GidEntry, GidKind, VerbsError};

/// The state of a port at its last query.
#[derive(Clone, Debug)]
pub(crate) struct View {
    pub(crate) active: bool,
    pub(crate) mtu: Mtu,
    pub(crate) gids: Vec<GidEntry>,
}

/// A port.
#[derive(Debug)]
pub(crate) struct Port {
    id: RnicId,
    device: Arc<Device>,
    number: u8,
    view: Mutex<View>,
}

/// A port's address usable by a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Source {
    /// Place in the GID table.
    pub(crate) index: u8,
    /// The GID.
    pub(crate) gid: Gid,
}

impl Port {
    /// A port of a device; `id` is unique among the ports of this process.
    ///
    /// # Errors
    /// An error of the verbs.
    pub(crate) fn new(
        id: RnicId,
        device: &Arc<Device>,
        number: u8,
    ) -> Result<Arc<Port>, VerbsError> {
        let view = Mutex::new(query(device, number)?);
        Ok(Arc::new(Port { id, device: device.clone(), number, view }))
    }

    /// The number in this process.
    pub(crate) fn id(&self) -> RnicId {
        self.id
    }

    pub(crate) fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// The number in the device, from 1.
    pub(crate) fn number(&self) -> u8 {
        self.number
    }

    /// The state at the last query.
    pub(crate) fn view(&self) -> View {
        lock(&self.view).clone()
    }

    /// Queries the port. `true`: the port is usable.
    pub(crate) fn refresh(&self) -> bool {
        let view = query(&self.device, self.number);
        let mut known = lock(&self.view);
        match view {
            Ok(view) => *known = view,
            Err(error) => {
                tracing::debug!(rnic = self.device.name(), %error, "port cannot be asked");
                known.active = false;
            }
        }
        known.active && !self.device.is_dead()
    }

    /// Whether the port was usable at the last query.
    pub(crate) fn is_active(&self) -> bool {
        lock(&self.view).active && !self.device.is_dead()
    }

    pub(crate) fn mac(&self) -> Option<Mac> {
        let view = lock(&self.view);
        view.gids.iter().find_map(|entry| entry.net_device.as_ref()?.mac())
    }

    /// The port's address for version 2 on a connection with this local address.
    pub(crate) fn source_v2(&self, local: IpAddr) -> Option<Source> {
        source_v2(&lock(&self.view).gids, local)
    }

    /// The port's address for version 1.
    pub(crate) fn source_v1(&self, local: IpAddr) -> Option<Source> {
        source_v1(&lock(&self.view).gids, local)
    }

    /// The port's address for a connection over another interface: one of the same family.
    pub(crate) fn source_like(&self, local: IpAddr, v1: bool) -> Option<Source> {
        let own = if v1 { self.source_v1(local) } else { self.source_v2(local) };
        own.or_else(|| {
            let gid = alternate(&lock(&self.view).gids, gid_of(local), v1)?;
            self.source_of(gid, v1)
        })
    }

    /// The place in the GID table of a GID known to the peer.
    pub(crate) fn source_of(&self, gid: Gid, v1: bool) -> Option<Source> {
        let view = lock(&self.view);
        let kinds = if v1 { [GidKind::RoceV1, GidKind::RoceV2] } else { [GidKind::RoceV2; 2] };
        kinds.iter().find_map(|kind| {
            let entry = view.gids.iter().find(|e| e.kind == *kind && e.gid.same_address(gid))?;
            Some(Source { index: entry.index, gid: entry.gid })
        })
    }

    /// The port as a place for further links of a group, with a GID of the same kind as the first
    /// link's, `like`. `direct`: no router is in between, as on the first link (LLCV2-24).
    pub(crate) fn alternate(&self, like: Gid, v1: bool, direct: bool) -> Option<Rnic> {
        let mac = self.mac()?;
        let view = lock(&self.view);
        // The port of a removed RNIC may still claim to be active (CLCV2-73).
        if !view.active || self.device.is_dead() {
            return None;
        }
        let gid = alternate(&view.gids, like, v1)?;
        Some(Rnic { id: self.id, gid, mac, mtu: view.mtu, direct })
    }
}

fn query(device: &Arc<Device>, number: u8) -> Result<View, VerbsError> {
    let port = device.context().port(number)?;
    let gids = device.context().gids(number)?;
    Ok(View { active: port.is_active() && port.ethernet, mtu: port.active_mtu, gids })
}

/// An IP address as a GID of RoCE version 2 (LG-55).
pub(crate) fn gid_of(address: IpAddr) -> Gid {
    match address.to_canonical() {
        IpAddr::V4(v4) => Gid::from_ipv4(v4.octets()),
        IpAddr::V6(v6) => Gid(v6.octets()),
    }
}

/// The entry with the address of the TCP connection: the connection's own path is known to work
/// (CLCV2-20).
fn source_v2(gids: &[GidEntry], local: IpAddr) -> Option<Source> {
    let wanted = gid_of(local);
    let is = |e: &&GidEntry| e.kind == GidKind::RoceV2 && e.gid.same_address(wanted);
    gids.iter().find(is).map(|e| Source { index: e.index, gid: e.gid })
}

/// An entry of RoCE version 1 on the interface of the TCP connection, so on its VLAN (LG-4, SEC-1). A
/// device without one (a software device) uses its RoCE version 2 address, and the peer must do so,
/// too.
fn source_v1(gids: &[GidEntry], local: IpAddr) -> Option<Source> {
    let wanted = gid_of(local);
    let mine = gids.iter().find(|e| e.gid.same_address(wanted))?;
    let same_interface = |e: &&GidEntry| match (&e.net_device, &mine.net_device) {
        (Some(a), Some(b)) => a.index == b.index,
        _ => false,
    };
    let v1 = gids.iter().filter(|e| e.kind == GidKind::RoceV1).find(same_interface);
    let found = v1.or_else(|| gids.iter().find(|e| e.gid.same_address(wanted)))?;
    Some(Source { index: found.index, gid: found.gid })
}

/// Whether a GID is link-local: only peers on a known interface are reachable.
fn is_link_local(gid: Gid) -> bool {
    matches!(gid.0, [0xfe, second, ..] if second & 0xc0 == 0x80)
}

/// A GID like the one of another port: same kind and, in version 2, same IP family.
fn alternate(gids: &[GidEntry], like: Gid, v1: bool) -> Option<Gid> {
    let family = |e: &&GidEntry| e.gid.to_ipv4().is_some() == like.to_ipv4().is_some();
    let usable = |e: &&GidEntry| !e.gid.is_none() && (!is_link_local(e.gid) || is_link_local(like));
    let of = |kind| move |e: &&GidEntry| e.kind == kind;
    if v1 && let Some(entry) = gids.iter().find(of(GidKind::RoceV1)) {
        return Some(entry.gid);
    }
    gids.iter().filter(of(GidKind::RoceV2)).filter(usable).find(family).map(|e| e.gid)
}

#[cfg(test)]
mod tests {
    use super::*;
    use smc_verbs::NetDevice;

    fn entry(index: u8, gid: Gid, kind: GidKind, interface: u32) -> GidEntry {
        let net_device = Some(NetDevice { index: interface, name: format!("if{interface}") });
        GidEntry { index, gid, kind, net_device }
    }

    fn link_local() -> Gid {
        Gid([0xfe, 0x80, 0, 0, 0, 0, 0, 0, 0x50, 0x54, 0, 0xff, 0xfe, 0, 0, 1])
    }

    fn v4(last: u8) -> Gid {
        Gid::from_ipv4([10, 9, 0, last])
    }

    fn mlx() -> Vec<GidEntry> {
        vec![
            entry(0, link_local(), GidKind::RoceV1, 2),
            entry(1, link_local(), GidKind::RoceV2, 2),
            entry(2, v4(1), GidKind::RoceV1, 2),
            entry(3, v4(1), GidKind::RoceV2, 2),
            entry(4, v4(7), GidKind::RoceV2, 3),
        ]
    }

    // Shows: CLCV2-20, LG-55, SEC-1.
    #[test]
    fn version_2_uses_the_address_of_the_connection() {
        let local = "10.9.0.1".parse().unwrap();
        assert_eq!(source_v2(&mlx(), local), Some(Source { index: 3, gid: v4(1) }));
        let mapped = "::ffff:10.9.0.7".parse().unwrap();
        assert_eq!(source_v2(&mlx(), mapped), Some(Source { index: 4, gid: v4(7) }));
        assert_eq!(source_v2(&mlx(), "10.9.0.2".parse().unwrap()), None);
        let six = "fe80::5054:ff:fe00:1".parse().unwrap();
        assert_eq!(source_v2(&mlx(), six), Some(Source { index: 1, gid: link_local() }));
    }

    // Shows: CLC-22, SEC-1.
    #[test]
    fn version_1_prefers_its_own_kind_on_the_same_interface() {
        let local = "10.9.0.1".parse().unwrap();
        assert_eq!(source_v1(&mlx(), local), Some(Source { index: 0, gid: link_local() }));
        let rxe = [entry(0, link_local(), GidKind::RoceV2, 2), entry(1, v4(1), GidKind::RoceV2, 2)];
        assert_eq!(source_v1(&rxe, local), Some(Source { index: 1, gid: v4(1) }));
        assert_eq!(source_v1(&rxe, "10.9.0.2".parse().unwrap()), None);
    }

    // Shows: CLCV2-73.
    #[test]
    fn a_further_link_uses_an_address_of_the_same_family() {
        assert_eq!(alternate(&mlx(), v4(9), false), Some(v4(1)));
        assert_eq!(alternate(&mlx(), link_local(), true), Some(link_local()));
        assert_eq!(alternate(&[], v4(9), false), None);
        let only_local = [entry(0, link_local(), GidKind::RoceV2, 2)];
        assert_eq!(alternate(&only_local, v4(9), false), None);
        let global = Gid("2001:db8::1".parse::<std::net::Ipv6Addr>().unwrap().octets());
        assert_eq!(alternate(&only_local, global, false), None);
    }
}
