// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! An SMC-R connection, its link group, links and RNICs.

use std::borrow::Cow;
use std::fmt;

use serde::{Deserialize, Serialize};
use smc_core::wire::ids::Eid;

use super::{show_gid, text};

/// The values agreed by both ends of an SMC-R connection, and the link in use now.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SmcrInfo {
    /// SMC version: 1 or 2.
    pub version: u8,
    /// Release of version 2: 0 for v2.0, 1 for v2.1. 0 in version 1.
    pub release: u8,
    /// The common enterprise id; none in version 1.
    #[serde(with = "text::optional_eid")]
    pub eid: Option<Eid>,
    /// Whether this connection made the link group (first contact).
    pub first_contact: bool,
    /// Whether this end was the server of the first contact.
    pub server: bool,
    /// This end's number of the link group.
    pub group: u32,
    /// The peer's instance id in CLC messages.
    #[serde(with = "text::peer_id")]
    pub peer_id: [u8; 8],
    /// The link carrying the connection now.
    pub link: LinkInfo,
    /// Usable links of the group now.
    pub links: usize,
    /// Numbers of the RMB elements in CDC messages (alert tokens): this end's, and the peer's.
    pub tokens: (u32, u32),
    /// Keys of the RMBs on this link: this end's, and the peer's.
    pub rkeys: (u32, u32),
    /// Bytes of the own RMB element.
    pub local_buffer: u32,
    /// Bytes of the peer's RMB element.
    pub peer_buffer: u32,
    /// Whether elements begin with an eye catcher (RMB-6).
    pub eye_catcher: bool,
    /// Number of moves of the connection to another link.
    pub failovers: u32,
    /// The peer's host name, if a CLC message had one.
    pub peer_host: Option<String>,
}

/// One link of a link group.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LinkInfo {
    /// Number in the link group, as in LLC messages.
    pub number: u8,
    /// Name of the RNIC of this end.
    pub rnic: String,
    /// Its port, from 1.
    pub port: u8,
    /// The GID of this end (an IP address in version 2).
    #[serde(with = "text::roce_gid")]
    pub local_gid: [u8; 16],
    /// The peer's GID.
    #[serde(with = "text::roce_gid")]
    pub peer_gid: [u8; 16],
    /// The queue pair of this end.
    pub local_qp: u32,
    /// The peer's queue pair.
    pub peer_qp: u32,
    /// Path MTU, bytes.
    pub mtu: u32,
    /// State, in words.
    pub state: Cow<'static, str>,
    /// Connections carried by the link.
    pub connections: usize,
    /// Messages allowed before one has to be completed.
    pub credits: u32,
}

/// One link group.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LinkGroupInfo {
    /// This end's number of the link group.
    pub group: u32,
    /// SMC version: 1 or 2.
    pub version: u8,
    /// Release of version 2.
    pub release: u8,
    /// Whether this end was the server of the first contact.
    pub server: bool,
    /// The peer's instance id in CLC messages.
    #[serde(with = "text::peer_id")]
    pub peer_id: [u8; 8],
    /// The topology of the RNICs and links, in words: "single", "symmetric", "asymmetric (local)" and
    /// so on.
    pub topology: Cow<'static, str>,
    /// Connections now.
    pub connections: usize,
    /// The most connections of the group.
    pub max_connections: u32,
    /// Links, usable or being set up.
    pub links: Vec<LinkInfo>,
    /// The most links of the group.
    pub max_links: u8,
    /// RMBs of this end: in use, and kept for later connections.
    pub rmbs: (usize, usize),
    /// Number of moves of connections to another link.
    pub failovers: u64,
    /// Microseconds until the next timer of the group is due, if one runs.
    pub timer: Option<u64>,
}

/// One RNIC port.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RnicInfo {
    /// Name of the RNIC.
    pub name: String,
    /// Port, from 1.
    pub port: u8,
    /// Whether the port is usable now.
    pub active: bool,
    /// Network interface, if there is one.
    pub netdev: Option<String>,
    /// Physical network id, if configured.
    pub pnet: Option<String>,
    /// MTU, bytes.
    pub mtu: u32,
    /// GIDs usable by SMC.
    #[serde(with = "text::roce_gids")]
    pub gids: Vec<[u8; 16]>,
    /// Links over the port.
    pub links: usize,
}

fn protocol(version: u8, release: u8) -> String {
    match version {
        1 => "SMC-R v1".into(),
        _ => format!("SMC-R v2.{release}"),
    }
}

impl SmcrInfo {
    /// The protocol: "SMC-R v1", "SMC-R v2.0" or "SMC-R v2.1".
    pub fn protocol(&self) -> String {
        protocol(self.version, self.release)
    }
}

impl LinkGroupInfo {
    /// The protocol: "SMC-R v1", "SMC-R v2.0" or "SMC-R v2.1".
    pub fn protocol(&self) -> String {
        protocol(self.version, self.release)
    }

    /// The role of this end at the first contact: "server" or "client".
    pub fn role(&self) -> &'static str {
        if self.server { "server" } else { "client" }
    }
}

impl LinkInfo {
    /// The own RNIC and its port, as "mlx5_0/1".
    pub fn local_port(&self) -> String {
        format!("{}/{}", self.rnic, self.port)
    }
}

impl RnicInfo {
    /// The RNIC and its port, as "mlx5_0/1".
    pub fn full_name(&self) -> String {
        format!("{}/{}", self.name, self.port)
    }
}

impl fmt::Display for SmcrInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.protocol())?;
        write!(f, " over link group {:08x}, {}", self.group, self.link)?;
        if self.links > 1 {
            write!(f, ", {} links", self.links)?;
        }
        if let Some(eid) = &self.eid {
            write!(f, ", EID {eid}")?;
        }
        Ok(())
    }
}

impl fmt::Display for LinkInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "link {} on {}, {}#{} -> {}#{}",
            self.number,
            self.local_port(),
            show_gid(self.local_gid),
            self.local_qp,
            show_gid(self.peer_gid),
            self.peer_qp,
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_connection_tells_version_group_and_link_in_one_line() {
        let link = LinkInfo { number: 1, rnic: "rxe0".into(), port: 1, ..LinkInfo::default() };
        let info = SmcrInfo {
            version: 2,
            release: 1,
            group: 0x100,
            links: 2,
            eid: Eid::new("E").ok(),
            link,
            ..SmcrInfo::default()
        };
        assert_eq!(
            info.to_string(),
            "SMC-R v2.1 over link group 00000100, link 1 on rxe0/1, ::#0 -> ::#0, 2 links, EID E"
        );
    }
}
