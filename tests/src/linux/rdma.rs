// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Soft-RoCE adapters: making, removing and listing them.

use std::fs;
use std::io;
use std::path::Path;

use af_smc::netlink::{Attributes, Netlink, RDMA, attributes};

/// RDMA_NL_NLDEV with the command RDMA_NLDEV_CMD_NEWLINK (include/uapi/rdma/rdma_netlink.h).
const NEWLINK: u16 = 5 << 10 | 3;
const DELLINK: u16 = 5 << 10 | 4;
const DEV_INDEX: u16 = 1;
const DEV_NAME: u16 = 2;
const NDEV_NAME: u16 = 51;
const LINK_TYPE: u16 = 65;

const CLASS: &str = "/sys/class/infiniband";

/// Makes the adapter `name` on a network interface, like
/// `rdma link add NAME type rxe netdev INTERFACE`.
///
/// # Errors
/// The kernel's: no RDMA, no such interface, or an interface with an adapter already.
pub fn add(name: &str, interface: &str) -> io::Result<()> {
    let what = Attributes::default()
        .text(DEV_NAME, name)
        .text(LINK_TYPE, "rxe")
        .text(NDEV_NAME, interface);
    Netlink::open(RDMA)?.order(NEWLINK, what.as_slice())
}

/// Takes the adapter `name` away.
///
/// # Errors
/// The kernel's: no such adapter.
pub fn remove(name: &str) -> io::Result<()> {
    // The kernel wants the number, also found in the character device's directory.
    let index = number(name)?;
    let what = Attributes::default().bytes(DEV_INDEX, &index.to_ne_bytes());
    Netlink::open(RDMA)?.order(DELLINK, what.as_slice())
}

/// RDMA_NLDEV_CMD_GET of all devices, to find one by its name.
fn number(name: &str) -> io::Result<u32> {
    const GET: u16 = 5 << 10 | 1;
    let devices = Netlink::open(RDMA)?.dump(GET, &[])?;
    for device in &devices {
        let (mut index, mut found) = (0, false);
        for attribute in attributes(device) {
            match attribute.kind {
                DEV_INDEX => index = attribute.number() as u32,
                DEV_NAME => found = attribute.text() == name,
                _ => {}
            }
        }
        if found {
            return Ok(index);
        }
    }
    Err(io::ErrorKind::NotFound.into())
}

/// An entry of an adapter's GID table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gid {
    /// Place in the table.
    pub index: usize,
    /// Eight groups of hexadecimal digits.
    pub gid: String,
    /// The kernel's name of the kind: "RoCE v2".
    pub kind: String,
    /// The network interface.
    pub interface: String,
}

/// An RDMA adapter, read from its directory in sysfs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Adapter {
    /// The adapter's name: `rxe0`.
    pub name: String,
    /// State of port 1: "4: ACTIVE".
    pub state: String,
    /// GIDs of port 1 in use.
    pub gids: Vec<Gid>,
    /// The name of the node for programs: `/dev/infiniband/uverbs0` and so on. `None`: none to open.
    pub node: Option<String>,
}

/// Lists every adapter, by name; none on a kernel without RDMA.
pub fn adapters() -> Vec<Adapter> {
    let mut names: Vec<String> = entries(Path::new(CLASS));
    names.sort();
    names.into_iter().map(adapter).collect()
}

fn adapter(name: String) -> Adapter {
    let directory = Path::new(CLASS).join(&name);
    let port = directory.join("ports/1");
    let mut indices: Vec<usize> =
        entries(&port.join("gids")).iter().filter_map(|name| name.parse().ok()).collect();
    indices.sort_unstable();
    let gids = indices.into_iter().filter_map(|index| {
        // Unused entries have neither a type nor an interface.
        let kind = line(&port.join(format!("gid_attrs/types/{index}")))?;
        let interface = line(&port.join(format!("gid_attrs/ndevs/{index}")))?;
        Some(Gid { index, gid: line(&port.join(format!("gids/{index}")))?, kind, interface })
    });
    let nodes = entries(&directory.join("device/infiniband_verbs"));
    let mut nodes = nodes.into_iter().chain(verbs_of(&name));
    Adapter {
        state: line(&port.join("state")).unwrap_or_default(),
        gids: gids.collect(),
        node: nodes
            .find(|node| Path::new("/dev/infiniband").join(node).exists())
            .map(|node| format!("/dev/infiniband/{node}")),
        name,
    }
}

/// A virtual adapter has no device directory listing its node; the node names the adapter.
fn verbs_of(name: &str) -> Vec<String> {
    let class = Path::new("/sys/class/infiniband_verbs");
    let mut nodes = entries(class);
    nodes.retain(|node| line(&class.join(node).join("ibdev")).is_some_and(|dev| dev == name));
    nodes
}

fn entries(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}

fn line(path: &Path) -> Option<String> {
    let text = fs::read_to_string(path).ok()?;
    let text = text.trim();
    (!text.is_empty()).then(|| text.to_owned())
}
