// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! SMC of the Linux kernel: the sockets of AF_SMC, its devices, and its enterprise ids.
//!
//! [`sockets`] reads the kernel's table (SMC_DIAG), [`devices`] the directory of dibs, and [`ueids`],
//! [`seid`] and [`change`] use the family of generic netlink that AF_SMC has. [`Family`] sends its other
//! commands, and [`netlink`] serves any other family.
#![forbid(unsafe_code)]

mod diag;
mod eid;
pub mod netlink;

use std::fs;
use std::io;

use rustix::net::{AddressFamily, Protocol, RawProtocol, SocketFlags, SocketType, socket_with};
use serde::Serialize;

pub use diag::{Carrier, Cursors, Dmbs, Link, Socket, sockets};
pub use eid::{Change, Family, change, seid, ueids};

/// Address family of the kernel's own SMC sockets.
pub const FAMILY: u16 = 43;
/// IPPROTO_SMC: an SMC socket of the families of IP.
const IPPROTO_SMC: RawProtocol = RawProtocol::MIN.saturating_add(255);
/// Directory of the devices that AF_SMC runs SMC-D over.
pub const DIBS: &str = "/sys/class/dibs";
/// Fabric id of devices whose peers are all in one kernel.
const LOOPBACK: &str = "ffff";

/// A device that AF_SMC runs SMC-D over.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Device {
    /// Its name in [`DIBS`].
    pub name: String,
    /// The fabric id, four hexadecimal digits.
    pub chid: String,
    /// Its GID.
    pub gid: String,
}

/// Whether the kernel makes SMC sockets. It may load a module for that.
#[must_use]
pub fn has_sockets() -> bool {
    let stream = |family, protocol| {
        socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC, protocol).is_ok()
    };
    stream(AddressFamily::INET, Some(Protocol::from_raw(IPPROTO_SMC)))
        || stream(AddressFamily::from_raw(FAMILY), None)
}

/// The devices but those that connect only this kernel with itself, by name.
///
/// # Errors
/// A directory is there and cannot be read.
pub fn devices() -> io::Result<Vec<Device>> {
    let entries = match fs::read_dir(DIBS) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error),
    };
    let mut devices = Vec::new();
    for entry in entries {
        let entry = entry?;
        let read = |name: &str| fs::read_to_string(entry.path().join(name));
        // A device that has just gone is none.
        let (Ok(chid), Ok(gid)) = (read("fabric_id"), read("gid")) else { continue };
        let chid = chid.trim().trim_start_matches("0x").to_owned();
        if chid != LOOPBACK {
            let name = entry.file_name().to_string_lossy().into_owned();
            devices.push(Device { name, chid, gid: gid.trim().to_owned() });
        }
    }
    devices.sort_by(|one, other| one.name.cmp(&other.name));
    Ok(devices)
}

// Its examples are tests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
