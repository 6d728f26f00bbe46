// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! AF_SMC's settings, link groups and counters (generic netlink; include/uapi/linux/smc.h).

use std::fs;
use std::io;

use af_smc::Family;
use af_smc::netlink::{Attribute, attributes};
use serde::{Deserialize, Serialize};

/// Commands of SMC_GEN_NETLINK.
const GET_LINKS: u8 = 3;
const GET_STATS: u8 = 7;
const GET_FALLBACKS: u8 = 8;

/// An SMC-R link group.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Group {
    /// The kernel's number of the group.
    pub id: u32,
    /// Version of SMC: 1 or 2.
    pub version: u8,
    /// Release of version 2.
    pub release: u8,
    /// Whether this end is the client.
    pub client: bool,
    /// SMC_LGR_NONE 0, SINGLE 1, SYMMETRIC 2, ASYMMETRIC_PEER 3, ASYMMETRIC_LOCAL 4.
    pub kind: u8,
    /// Connections.
    pub connections: u32,
    /// Negotiated in version 2.
    pub max_links: u8,
    /// Negotiated in version 2.
    pub max_connections: u8,
    /// The common EID of version 2.
    pub eid: String,
    /// Usable links, also links still being made.
    pub links: Vec<GroupLink>,
}

/// A link of a link group.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct GroupLink {
    /// The link's number.
    pub number: u8,
    /// `SMC_LNK_ACTIVATING` is 2; see [`GroupLink::is_active`].
    pub state: u32,
    /// Connections on the link.
    pub connections: u32,
    /// Name of the RDMA adapter.
    pub adapter: String,
    /// Own GID.
    pub gid: String,
    /// The peer's GID.
    pub peer_gid: String,
}

impl GroupLink {
    /// Whether AF_SMC puts connections on the link: `SMC_LNK_ACTIVE`.
    #[must_use]
    pub fn is_active(&self) -> bool {
        self.state == 3
    }
}

/// AF_SMC's counters of SMC-R since the module was loaded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counts {
    /// Connections as client, of version 1 and 2.
    pub client: [u64; 2],
    /// Connections as server, of version 1 and 2.
    pub server: [u64; 2],
    /// Failed handshakes, as client and as server.
    pub failed: [u64; 2],
    /// Bytes received and sent.
    pub bytes: [u64; 2],
}

/// How often a connection became TCP for one reason.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fallbacks {
    /// A reason of `SMC_CLC_DECL_*`.
    pub reason: u32,
    /// Number of such connections.
    pub count: u64,
    /// Whether as the server.
    pub server: bool,
}

/// Sets a variable of `/proc/sys/net/smc`.
///
/// # Errors
/// If the variable is missing, or the kernel refuses the value.
pub(super) fn set(name: &str, value: &str) -> io::Result<()> {
    fs::write(format!("/proc/sys/net/smc/{name}"), value)
}

/// Lists every SMC-R link group, with its usable links.
///
/// # Errors
/// If there is no AF_SMC.
pub fn groups() -> io::Result<Vec<Group>> {
    let mut groups: Vec<Group> = Vec::new();
    for answer in Family::open()?.dump(GET_LINKS)? {
        for attribute in attributes(&answer) {
            match attribute.kind {
                2 => groups.push(group(&attribute)),
                // Links follow their group.
                3 => groups
                    .last_mut()
                    .into_iter()
                    .for_each(|group| group.links.push(link(&attribute))),
                _ => {}
            }
        }
    }
    Ok(groups)
}

fn group(nest: &Attribute<'_>) -> Group {
    let mut group = Group { version: 1, ..Group::default() };
    for attribute in nest.nested() {
        let number = attribute.number();
        match attribute.kind {
            1 => group.id = number as u32,
            2 => group.client = number == 0,
            3 => group.kind = number as u8,
            6 => group.connections = number as u32,
            7 => {
                for attribute in attribute.nested() {
                    match attribute.kind {
                        0 => group.version = attribute.number() as u8,
                        1 => group.release = attribute.number() as u8,
                        3 => group.eid = attribute.text().trim_end().to_owned(),
                        _ => {}
                    }
                }
            }
            8 => {
                for attribute in attribute.nested() {
                    match attribute.kind {
                        2 => group.max_connections = attribute.number() as u8,
                        3 => group.max_links = attribute.number() as u8,
                        _ => {}
                    }
                }
            }
            _ => {}
        }
    }
    group
}

fn link(nest: &Attribute<'_>) -> GroupLink {
    let mut link = GroupLink::default();
    for attribute in nest.nested() {
        match attribute.kind {
            1 => link.number = attribute.number() as u8,
            2 => link.adapter = attribute.text(),
            4 => link.gid = attribute.text(),
            5 => link.peer_gid = attribute.text(),
            6 => link.connections = attribute.number() as u32,
            10 => link.state = attribute.number() as u32,
            _ => {}
        }
    }
    link
}

/// Reads the counters of SMC-R.
///
/// # Errors
/// If there is no AF_SMC.
pub fn counts() -> io::Result<Counts> {
    let mut counts = Counts::default();
    for answer in Family::open()?.dump(GET_STATS)? {
        let nests = attributes(&answer).filter(|nest| nest.kind == 7);
        for attribute in nests.flat_map(|nest| nest.nested().collect::<Vec<_>>()) {
            match attribute.kind {
                2 => smcr_counts(&attribute, &mut counts),
                3 => counts.failed[0] = attribute.number(),
                4 => counts.failed[1] = attribute.number(),
                _ => {}
            }
        }
    }
    Ok(counts)
}

fn smcr_counts(nest: &Attribute<'_>, counts: &mut Counts) {
    for attribute in nest.nested() {
        let number = attribute.number();
        match attribute.kind {
            7 => counts.client[0] = number,
            8 => counts.client[1] = number,
            9 => counts.server[0] = number,
            10 => counts.server[1] = number,
            16 => counts.bytes[0] = number,
            17 => counts.bytes[1] = number,
            _ => {}
        }
    }
}

/// Why connections became TCP.
///
/// # Errors
/// There is no AF_SMC.
pub fn fallbacks() -> io::Result<Vec<Fallbacks>> {
    let mut all = Vec::new();
    for answer in Family::open()?.dump(GET_FALLBACKS)? {
        for nest in attributes(&answer).filter(|nest| nest.kind == 8) {
            let mut found = Fallbacks { reason: 0, count: 0, server: false };
            for attribute in nest.nested() {
                match attribute.kind {
                    1 => found.server = attribute.number() == 1,
                    4 => found.reason = attribute.number() as u32,
                    5 => found.count = attribute.number(),
                    _ => {}
                }
            }
            if found.count > 0 {
                all.push(found);
            }
        }
    }
    Ok(all)
}
