// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The RNICs of this machine, for SMC-R.

use guest_driver::socket::show_gid;
use serde::Serialize;
use smc_verbs::{Context, DeviceInfo, GidEntry, GidKind};

/// A port of an RNIC as shown by `--json --rdma`. Unknown values are null.
#[derive(Debug, Default, Serialize)]
pub(super) struct RnicReport {
    /// Name of the RNIC.
    pub(super) name: String,
    /// Port, from 1.
    pub(super) port: u8,
    /// Network interface.
    pub(super) netdev: Option<String>,
    /// `active` or `down`.
    pub(super) state: Option<&'static str>,
    /// Largest payload of a packet, bytes.
    pub(super) mtu: Option<u32>,
    pub(super) gids: Vec<GidReport>,
    /// Whether SMC-R version 1 can use the port now.
    pub(super) smcr_v1: bool,
    /// Whether SMC-R version 2 can use the port now.
    pub(super) smcr_v2: bool,
    /// Why the port cannot be used now.
    pub(super) problem: Option<String>,
}

/// An entry of a port's GID table.
#[derive(Debug, Serialize)]
pub(super) struct GidReport {
    pub(super) index: u8,
    /// The address in the entry.
    pub(super) gid: String,
    /// `v1` or `v2` of RoCE.
    pub(super) roce: &'static str,
    pub(super) netdev: Option<String>,
}

/// Every port of every RNIC; or why there are none.
pub(super) fn all() -> Result<Vec<RnicReport>, String> {
    let devices = smc_verbs::devices().map_err(|why| why.to_string())?;
    Ok(devices.iter().flat_map(device).collect())
}

fn device(info: &DeviceInfo) -> Vec<RnicReport> {
    let failed = |error: smc_verbs::VerbsError| RnicReport {
        name: info.name().into(),
        port: 1,
        problem: Some(error.to_string()),
        ..RnicReport::default()
    };
    let opened = Context::open(info).and_then(|context| Ok((context.limits()?.ports, context)));
    let (ports, context) = match opened {
        Ok(opened) => opened,
        Err(error) => return vec![failed(error)],
    };
    let describe = |number| {
        port(&context, info.name(), number)
            .unwrap_or_else(|e| RnicReport { port: number, ..failed(e) })
    };
    (1..=ports).map(describe).collect()
}

fn port(context: &Context, name: &str, number: u8) -> Result<RnicReport, smc_verbs::VerbsError> {
    let info = context.port(number)?;
    let gids = context.gids(number)?;
    let rnic = RnicReport {
        name: name.into(),
        port: number,
        state: Some(if info.is_active() { "active" } else { "down" }),
        mtu: info.active_mtu.bytes().ok(),
        ..RnicReport::default()
    };
    Ok(judge(rnic, info.is_active(), info.ethernet, &gids))
}

/// Derives the usability for SMC-R from the state and the GIDs.
fn judge(rnic: RnicReport, active: bool, ethernet: bool, gids: &[GidEntry]) -> RnicReport {
    let here = || gids.iter().filter(|entry| entry.net_device.is_some() && !entry.gid.is_none());
    let has = |kind| here().any(|entry| entry.kind == kind);
    let problem = if !ethernet {
        Some("it is no Ethernet port, and SMC-R needs RoCE")
    } else if !active {
        Some("the port is down: ip link set DEV up")
    } else if here().next().is_none() {
        Some("no GID of this network namespace: ip addr add ADDR/LEN dev DEV")
    } else {
        None
    };
    let usable = problem.is_none();
    let entry = |entry: &GidEntry| GidReport {
        index: entry.index,
        gid: show_gid(entry.gid.0),
        roce: match entry.kind {
            GidKind::RoceV1 => "v1",
            GidKind::RoceV2 => "v2",
        },
        netdev: entry.net_device.as_ref().map(|device| device.name.clone()),
    };
    RnicReport {
        netdev: here().find_map(|entry| Some(entry.net_device.as_ref()?.name.clone())),
        gids: gids.iter().map(entry).collect(),
        // Version 1 goes with a GID of either kind.
        smcr_v1: usable,
        smcr_v2: usable && has(GidKind::RoceV2),
        problem: problem.map(Into::into),
        ..rnic
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use smc_verbs::NetDevice;

    fn entry(kind: GidKind, netdev: Option<&str>) -> GidEntry {
        let net_device = netdev.map(|name| NetDevice { index: 2, name: name.into() });
        let gid = smc_core::wire::ids::Gid::from_ipv4([192, 0, 2, 7]);
        GidEntry { index: 1, gid, kind, net_device }
    }

    #[test]
    fn an_active_ethernet_port_with_an_address_is_good_for_what_its_gids_are() {
        let both = [entry(GidKind::RoceV1, Some("eth0")), entry(GidKind::RoceV2, Some("eth0"))];
        let rnic = judge(RnicReport::default(), true, true, &both);
        assert!(rnic.smcr_v1 && rnic.smcr_v2 && rnic.problem.is_none());
        assert_eq!((rnic.netdev.as_deref(), rnic.gids.len()), (Some("eth0"), 2));
        assert_eq!((rnic.gids[1].gid.as_str(), rnic.gids[1].roce), ("192.0.2.7", "v2"));
        let rnic = judge(RnicReport::default(), true, true, &both[..1]);
        assert!(rnic.smcr_v1 && !rnic.smcr_v2);
    }

    #[test]
    fn a_port_that_cannot_be_used_says_why() {
        let gids = [entry(GidKind::RoceV2, Some("eth0"))];
        let foreign = [entry(GidKind::RoceV2, None)];
        for (active, ethernet, gids, why) in [
            (false, true, &gids, "down"),
            (true, false, &gids, "Ethernet"),
            (true, true, &foreign, "no GID"),
        ] {
            let rnic = judge(RnicReport::default(), active, ethernet, gids);
            assert!(!rnic.smcr_v1 && !rnic.smcr_v2);
            assert!(rnic.problem.unwrap().contains(why), "{why}");
        }
    }
}
