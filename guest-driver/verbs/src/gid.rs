// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Entries of a port's GID table, from the library or from sysfs.
//!
//! The library's `ibv_query_gid_table` returns all entries in one call, since rdma-core 34. With an
//! older library `Context::gids` reads sysfs, with one file for each attribute.

use std::ffi::{CStr, CString};
use std::fs;
use std::path::{Path, PathBuf};

use smc_core::wire::ids::{Gid, Mac};

use super::ffi;

/// Last index in the range of an address handle.
const LAST_INDEX: u32 = 255;
/// Missing entries in sysfs after which the table is taken to end.
const GAP: u32 = 16;

/// The format of packets from a GID.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum GidKind {
    /// RoCE version 1: its own Ethernet type.
    RoceV1,
    /// RoCE version 2: UDP.
    RoceV2,
}

/// A network device.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct NetDevice {
    /// Number of the interface; 0 if the kernel reports none.
    pub index: u32,
    /// Name of the interface in this network namespace.
    pub name: String,
}

impl NetDevice {
    /// The interface's present Ethernet address; `None` if the interface has none or is gone.
    pub fn mac(&self) -> Option<Mac> {
        #[cfg(feature = "double")]
        if let Some(mac) = super::double::mac() {
            return Some(mac);
        }
        let path = Path::new("/sys/class/net").join(&self.name).join("address");
        parse_mac(fs::read_to_string(path).ok()?.trim())
    }
}

/// An entry of a port's GID table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GidEntry {
    /// Index in the table, as used by queue pairs.
    pub index: u8,
    /// The GID.
    pub gid: Gid,
    /// The format of packets.
    pub kind: GidKind,
    /// The network device with the address; `None` if the device is in another network namespace.
    pub net_device: Option<NetDevice>,
}

/// Converts an entry of the library; `None` if a queue pair cannot use it.
pub(super) fn entry_of(entry: &ffi::GidEntry) -> Option<GidEntry> {
    let kind = match entry.gid_type {
        ffi::GID_TYPE_ROCE_V1 => GidKind::RoceV1,
        ffi::GID_TYPE_ROCE_V2 => GidKind::RoceV2,
        _ => return None,
    };
    let index = u8::try_from(entry.gid_index).ok()?;
    let net_device = interface_name(entry.ndev_ifindex)
        .map(|name| NetDevice { index: entry.ndev_ifindex, name });
    Some(GidEntry { index, gid: Gid(entry.gid.0), kind, net_device })
}

fn interface_name(index: u32) -> Option<String> {
    let mut name = [0u8; libc::IF_NAMESIZE];
    // SAFETY: the buffer has the length required by the function.
    let found = unsafe { libc::if_indextoname(index, name.as_mut_ptr().cast()) };
    if found.is_null() {
        return None;
    }
    Some(CStr::from_bytes_until_nul(&name).ok()?.to_str().ok()?.to_owned())
}

fn interface_index(name: &str) -> u32 {
    let Ok(name) = CString::new(name) else { return 0 };
    // SAFETY: the name is a C string.
    unsafe { libc::if_nametoindex(name.as_ptr()) }
}

/// The directory of a port in sysfs.
pub(super) fn port_dir(device: &str, port: u8) -> PathBuf {
    Path::new("/sys/class/infiniband").join(device).join("ports").join(port.to_string())
}

/// The network devices of all ports of a device, from sysfs.
pub(super) fn net_devices(device: &str) -> Vec<NetDevice> {
    let mut found = Vec::new();
    for port in 1..=u8::MAX {
        let dir = port_dir(device, port);
        if !dir.is_dir() {
            break;
        }
        for entry in sysfs_table(&dir) {
            found.extend(entry.net_device.filter(|device| !found.contains(device)));
        }
    }
    found
}

/// The table below a port's directory. An absent entry cannot be read, or is zero.
pub(super) fn sysfs_table(dir: &Path) -> Vec<GidEntry> {
    let mut table = Vec::new();
    let mut missing = 0;
    for index in 0..=LAST_INDEX {
        if missing == GAP {
            break;
        }
        match sysfs_entry(dir, index) {
            Some(entry) => {
                missing = 0;
                table.push(entry);
            }
            None => missing += 1,
        }
    }
    table
}

fn sysfs_entry(dir: &Path, index: u32) -> Option<GidEntry> {
    let read = |what: &str| {
        let text = fs::read_to_string(dir.join(what).join(index.to_string())).ok()?;
        Some(text.trim().to_owned())
    };
    let gid = parse_gid(&read("gids")?).filter(|gid| !gid.is_none())?;
    let kind = match read("gid_attrs/types")?.as_str() {
        "IB/RoCE v1" => GidKind::RoceV1,
        "RoCE v2" => GidKind::RoceV2,
        _ => return None,
    };
    let net_device = read("gid_attrs/ndevs")
        .filter(|name| !name.is_empty())
        .map(|name| NetDevice { index: interface_index(&name), name });
    Some(GidEntry { index: u8::try_from(index).ok()?, gid, kind, net_device })
}

/// Eight groups of four hexadecimal digits.
fn parse_gid(text: &str) -> Option<Gid> {
    let address: std::net::Ipv6Addr = text.parse().ok()?;
    Some(Gid(address.octets()))
}

/// Six groups of two hexadecimal digits.
fn parse_mac(text: &str) -> Option<Mac> {
    let mut bytes = [0; 6];
    let mut groups = text.split(':');
    for byte in &mut bytes {
        let group = groups.next().filter(|group| group.len() == 2)?;
        *byte = u8::from_str_radix(group, 16).ok()?;
    }
    groups.next().is_none().then_some(Mac(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(index: u32, gid_type: u32) -> ffi::GidEntry {
        let gid = ffi::GidBytes(Gid::from_ipv4([10, 0, 0, 1]).0);
        ffi::GidEntry { gid, gid_index: index, port_num: 1, gid_type, ndev_ifindex: 0 }
    }

    #[test]
    fn entries_that_a_queue_pair_cannot_use_are_left_out() {
        assert_eq!(entry_of(&entry(3, 1)).unwrap().kind, GidKind::RoceV1);
        let v2 = entry_of(&entry(255, 2)).unwrap();
        assert_eq!((v2.index, v2.kind), (255, GidKind::RoceV2));
        assert_eq!(v2.gid.to_ipv4(), Some([10, 0, 0, 1]));
        assert_eq!(v2.net_device, None);
        assert_eq!(entry_of(&entry(256, 2)), None);
        assert_eq!(entry_of(&entry(0, 0)), None, "InfiniBand");
        assert_eq!(entry_of(&entry(0, 9)), None);
    }

    #[test]
    fn sysfs_tells_the_same_with_gaps() {
        let dir = smc_test_support::TestDir::new();
        let write = |what: &str, index: u32, text: &str| {
            let file = dir.join(what).join(index.to_string());
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(file, text).unwrap();
        };
        let v4 = "0000:0000:0000:0000:0000:ffff:0a00:0001\n";
        write("gids", 0, "0000:0000:0000:0000:0000:0000:0000:0000\n");
        write("gid_attrs/types", 0, "RoCE v2\n");
        write("gids", 2, v4);
        write("gid_attrs/types", 2, "RoCE v2\n");
        write("gid_attrs/ndevs", 2, "lo\n");
        write("gids", 3, v4);
        write("gid_attrs/types", 3, "IB/RoCE v1\n");
        write("gids", 4, "rubbish");
        let table = sysfs_table(&dir);
        let [second, third] = table.as_slice() else { panic!("{table:?}") };
        assert_eq!((second.index, second.kind), (2, GidKind::RoceV2));
        assert_eq!(second.gid, Gid::from_ipv4([10, 0, 0, 1]));
        assert_eq!(second.net_device.as_ref().unwrap().name, "lo");
        assert_eq!((third.index, third.kind), (3, GidKind::RoceV1));
        assert_eq!(third.net_device, None);
        assert!(sysfs_table(Path::new("/nowhere")).is_empty());
    }

    #[test]
    fn interfaces_are_found_by_name_and_number() {
        let index = interface_index("lo");
        if index != 0 {
            assert_eq!(interface_name(index).as_deref(), Some("lo"));
        }
        assert_eq!(interface_name(0), None);
        assert_eq!(interface_index("no\0name"), 0);
    }

    #[test]
    fn ethernet_addresses_have_six_groups() {
        assert_eq!(parse_mac("02:00:5e:10:00:ff"), Some(Mac([2, 0, 0x5e, 0x10, 0, 0xff])));
        for bad in ["", "02:00:5e:10:00", "02:00:5e:10:00:ff:00", "2:0:5e:10:0:ff", "0g:0:0:0:0:0"]
        {
            assert_eq!(parse_mac(bad), None, "{bad}");
        }
    }
}
