//! What is known of an SMC-R connection and its surroundings, for people.

use std::fmt;
use std::net::Ipv6Addr;

use smc_core::wire::ids::Eid;

/// The negotiated info of an SMC-R connection, and how it travels now.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SmcrInfo {
    /// SMC version: 1 or 2.
    pub version: u8,
    /// Release of version 2: 0 for v2.0, 1 for v2.1. 0 in version 1.
    pub release: u8,
    /// The common enterprise id; none in version 1.
    pub eid: Option<Eid>,
    /// Whether this connection made the link group (first contact).
    pub first_contact: bool,
    /// Whether this end was the server of the first contact.
    pub server: bool,
    /// Our number of the link group.
    pub group: u32,
    /// The peer's instance id, as told in CLC.
    pub peer_id: [u8; 8],
    /// The link that carries the connection now.
    pub link: LinkInfo,
    /// Usable links of the group now.
    pub links: usize,
    /// Number of our RMB element in CDC messages (alert token), and the peer's.
    pub tokens: (u32, u32),
    /// Key of our RMB on this link, and of the peer's.
    pub rkeys: (u32, u32),
    /// Bytes of the own RMB element.
    pub local_buffer: u32,
    /// Bytes of the peer's RMB element.
    pub peer_buffer: u32,
    /// Whether elements begin with an eye catcher (RMB-6).
    pub eye_catcher: bool,
    /// How often the connection moved to another link.
    pub failovers: u32,
    /// The peer's host name, if it told one.
    pub peer_host: Option<String>,
}

/// One link of a link group.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LinkInfo {
    /// Number in the link group, as in LLC messages.
    pub number: u8,
    /// Name of our RNIC.
    pub rnic: String,
    /// Its port, from 1.
    pub port: u8,
    /// Our GID (an IP address in version 2).
    pub local_gid: [u8; 16],
    /// The peer's GID.
    pub peer_gid: [u8; 16],
    /// Our queue pair.
    pub local_qp: u32,
    /// The peer's queue pair.
    pub peer_qp: u32,
    /// Path MTU, bytes.
    pub mtu: u32,
    /// State, in words.
    pub state: &'static str,
    /// Connections that it carries.
    pub connections: usize,
    /// Messages that may be sent before one has to be completed.
    pub credits: u32,
}

/// One link group.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LinkGroupInfo {
    /// Our number of the link group.
    pub group: u32,
    /// SMC version: 1 or 2.
    pub version: u8,
    /// Release of version 2.
    pub release: u8,
    /// Whether this end was the server of the first contact.
    pub server: bool,
    /// The peer's instance id, as told in CLC.
    pub peer_id: [u8; 8],
    /// Kind, in words: "single", "symmetric", "asymmetric (local)" and so on.
    pub kind: &'static str,
    /// Connections now.
    pub connections: usize,
    /// Connections that the group takes at most.
    pub max_connections: u32,
    /// Links, usable or on their way.
    pub links: Vec<LinkInfo>,
    /// Links that the group has at most.
    pub max_links: u8,
    /// Own RMBs: in use, and kept for the next connection.
    pub rmbs: (usize, usize),
    /// Connections that were moved to another link.
    pub failovers: u64,
    /// Microseconds until the next timer of the group is due, if one runs.
    pub timer: Option<u64>,
}

/// One RNIC port.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RnicInfo {
    /// Name of the RNIC.
    pub name: String,
    /// Port, from 1.
    pub port: u8,
    /// Whether it is usable now.
    pub active: bool,
    /// Network interface, if it has one.
    pub netdev: Option<String>,
    /// Physical network id, if configured.
    pub pnet: Option<String>,
    /// MTU, bytes.
    pub mtu: u32,
    /// GIDs that SMC may use.
    pub gids: Vec<[u8; 16]>,
    /// Links that run over it.
    pub links: usize,
}

impl fmt::Display for SmcrInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.version {
            1 => write!(f, "SMC-R v1")?,
            _ => write!(f, "SMC-R v2.{}", self.release)?,
        }
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
            "link {} on {}/{}, {}#{} -> {}#{}",
            self.number,
            self.rnic,
            self.port,
            gid(self.local_gid),
            self.local_qp,
            gid(self.peer_gid),
            self.peer_qp,
        )
    }
}

/// A RoCE GID as people write it: the IPv4 address that it embeds, or an IPv6 address.
pub fn gid(gid: [u8; 16]) -> String {
    let address = Ipv6Addr::from(gid);
    match address.to_ipv4_mapped() {
        Some(v4) => v4.to_string(),
        None => address.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gids_of_ipv4_routes_are_written_as_such() {
        let v4 = "::ffff:192.0.2.7".parse::<Ipv6Addr>().unwrap();
        assert_eq!(gid(v4.octets()), "192.0.2.7");
        let v6 = "fe80::1".parse::<Ipv6Addr>().unwrap();
        assert_eq!(gid(v6.octets()), "fe80::1");
    }

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
