// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Parts shared by the targets: hosts for handshakes, and damage.

pub mod front;

use std::sync::Arc;

use arbitrary::Arbitrary;
use smc_core::handshake::{
    ClcReader, Config, Dmbe, HandshakeError, IpSubnet, IsmDevice, Kinds, LinkEnd, Rnic, Route,
    Tolerance,
};
use smc_core::wire::clc::Version;
use smc_core::wire::ids::{
    Chid, DmbToken, Eid, Features, Gid, Mac, Mtu, PeerId, Psn, Qpn, Release, Rkey, SizeCode,
};

/// Choices of a host's configuration, one per bit or field.
#[derive(Arbitrary, Clone, Copy, Debug)]
pub struct Host {
    release_2_0: bool,
    no_features: bool,
    eids: u8,
    seid: bool,
    devices: u8,
    linux: bool,
    /// Types of SMC as bits; 0 means the default.
    kinds: u8,
    /// Bits of the addresses and adapters on the route of the TCP connection.
    route: u8,
}

impl Host {
    /// The configuration of host number `n`.
    pub fn config(self, n: u8) -> Arc<Config> {
        let mut config = Config::new(PeerId([n; 8]));
        if self.release_2_0 {
            config.release = Release::V2_0;
        }
        if self.no_features {
            config.features = Features::empty();
        }
        if self.linux {
            config.tolerance = Tolerance::LINUX;
        }
        let names = ["A", "B", "FUZZ", "C", "D", "E", "F", "G"];
        let chosen = names.iter().enumerate().filter(|(i, _)| self.eids >> i & 1 == 0);
        config.ueids = chosen.filter_map(|(_, name)| Eid::new(name).ok()).collect();
        config.seid = if self.seid { Eid::new("SEID").ok() } else { None };
        let chids = [0xff00, 0xff01, 5, 0xffff, 6, 0xff02, 7, 0xfffe];
        let chosen = chids.iter().enumerate().filter(|(i, _)| self.devices >> i & 1 == 0);
        let gid = |chid: u16| match chid {
            // All of loopback is one host.
            0xffff => Gid([9; 16]),
            chid if chid < 0xff00 => Gid([n, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0]),
            _ => Gid([n; 16]),
        };
        config.devices =
            chosen.map(|(_, &chid)| IsmDevice { chid: Chid(chid), gid: gid(chid) }).collect();
        let kinds = Kinds::from_bits_truncate(self.kinds);
        if !kinds.is_empty() {
            config.kinds = kinds;
        }
        Arc::new(config)
    }

    /// Devices and addresses of host number `n` on the connection's route.
    pub fn route(self, n: u8) -> Route {
        let has = |bit: u8| self.route >> bit & 1 == 0;
        let ipv6 = self.kinds & 0x10 != 0;
        let v4 = Gid::from_ipv4([10, 9, 0, n]);
        let v6 = Gid([0xfd, 0, 0, 0, 0, 0, 0, 9, 0, 0, 0, 0, 0, 0, 0, n]);
        let roce_v1 = Gid([0xfe, 0x80, 0, 0, 0, 0, 0, 0, 0x50, 0x54, 0, 0xff, 0xfe, 0, 0, n]);
        let third = if has(5) { 0 } else { n };
        let address = match ipv6 {
            true => [0xfd00, 0, 0, 8 + u16::from(third), 0, 0, 0, n.into()].into(),
            false => std::net::IpAddr::from([10, 9, third, n]),
        };
        let subnet = IpSubnet::new(address, if ipv6 { 64 } else { 24 });
        let rnic = Rnic {
            mac: Mac([0x52, 0x54, 0, 0, 0, n]),
            mtu: Mtu::B1024,
            gid_v1: has(1).then_some(roce_v1),
            gid_v2: has(2).then_some(if ipv6 == has(3) { v6 } else { v4 }),
            max_links: 1 + u8::from(has(4)),
        };
        let ism =
            IsmDevice { chid: Chid(5), gid: Gid([n, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0]) };
        Route {
            ipv6,
            subnets: subnet.into_iter().collect(),
            ism: has(6).then_some(ism),
            rnic: has(0).then_some(rnic),
        }
    }
}

/// A message: an honest one with bytes changed, cut and added, or anything.
#[derive(Arbitrary, Clone, Debug)]
pub enum Bytes {
    /// The message of an honest peer.
    Honest,
    /// The honest message with bytes replaced at places modulo the length.
    Damaged(Vec<(u16, u8)>),
    /// The first part of the honest message, with these bytes behind.
    Spliced(u16, Vec<u8>),
    /// Anything.
    Raw(Vec<u8>),
}

impl Bytes {
    /// Turns an honest message into this one.
    pub fn apply(self, honest: Vec<u8>) -> Vec<u8> {
        match self {
            Bytes::Honest => honest,
            Bytes::Damaged(changes) => {
                let mut bytes = honest;
                for (at, byte) in changes {
                    let len = bytes.len().max(1);
                    if let Some(place) = bytes.get_mut(usize::from(at) % len) {
                        *place = byte;
                    }
                }
                bytes
            }
            Bytes::Spliced(at, tail) => {
                let mut bytes = honest;
                bytes.truncate(usize::from(at) % (bytes.len() + 1));
                bytes.extend(tail);
                bytes
            }
            Bytes::Raw(bytes) => bytes,
        }
    }
}

/// Reads one message like a socket delivering pieces of `piece` bytes.
///
/// # Errors
/// Errors of the reader; the end of `bytes` is the end of the stream.
pub fn read(mut reader: ClcReader, bytes: &[u8], piece: u8) -> Result<Vec<u8>, HandshakeError> {
    let mut rest = bytes;
    loop {
        if let Some(message) = reader.message() {
            assert!(bytes.starts_with(message));
            assert_eq!(message.len() + rest.len(), bytes.len(), "took a byte too many");
            return Ok(message.to_vec());
        }
        let space = reader.space();
        assert!(!space.is_empty(), "wants bytes and has no room");
        let n = space.len().min(rest.len()).min(usize::from(piece) + 1);
        let (now, later) = rest.split_at(n);
        space[..n].copy_from_slice(now);
        rest = later;
        reader.filled(n)?;
    }
}

/// An element with this token.
pub fn dmbe(token: u64) -> Dmbe {
    Dmbe { token: DmbToken(token), index: 0, size: SizeCode::MIN }
}

/// The end of a link on host number `n`.
pub fn end(n: u8, version: Version, route: &Route) -> LinkEnd {
    let rnic = route.rnic;
    let gid = rnic.and_then(|rnic| match version {
        Version::V1 => rnic.gid_v1,
        Version::V2 => rnic.gid_v2,
    });
    LinkEnd {
        gid: gid.unwrap_or_default(),
        mac: rnic.map_or(Mac::NONE, |rnic| rnic.mac),
        qpn: Qpn::new(0x10 + u32::from(n)),
        psn: Psn::new(0x1000),
        mtu: Mtu::B1024,
        rkey: Rkey(n.into()),
        address: 0x1000,
        index: 1,
        token: n.into(),
        size: SizeCode::MIN,
        direct: n & 4 == 0,
    }
}
