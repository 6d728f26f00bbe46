// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Soft-RoCE adapters: making them, and what the kernel says of them.

use std::fs;
use std::io;
use std::path::Path;

use af_smc::netlink::{Attributes, Netlink, RDMA, attributes};

/// RDMA_NL_NLDEV and the command RDMA_NLDEV_CMD_NEWLINK of it (include/uapi/rdma/rdma_netlink.h).
const NEWLINK: u16 = 5 << 10 | 3;
const DELLINK: u16 = 5 << 10 | 4;
const DEV_INDEX: u16 = 1;
const DEV_NAME: u16 = 2;
const NDEV_NAME: u16 = 51;
const LINK_TYPE: u16 = 65;

const CLASS: &str = "/sys/class/infiniband";

/// Makes the adapter `name` on a network interface, as `rdma link add NAME type rxe netdev INTERFACE`.
///
/// # Errors
/// The kernel's: no RDMA, no such interface, one that has an adapter already.
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
    // It is wanted by number, which the character device's directory has too.
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
    /// Its place in the table.
    pub index: usize,
    /// Eight groups of hexadecimal digits.
    pub gid: String,
    /// As the kernel calls it: "RoCE v2".
    pub kind: String,
    /// The network interface.
    pub interface: String,
}

/// An RDMA adapter, as its directory in sysfs has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Adapter {
    /// `rxe0`.
    pub name: String,
    /// Of port 1: "4: ACTIVE".
    pub state: String,
    /// GIDs of port 1 that are in use.
    pub gids: Vec<Gid>,
    /// Whether programs can open it: `/dev/infiniband/uverbs0` and so on.
    pub node: Option<String>,
}

/// All adapters, by name. None where the kernel has no RDMA.
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
        // Entries that are not used have neither.
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

/// A virtual adapter has no device below it that would list its node; the node names its adapter.
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
