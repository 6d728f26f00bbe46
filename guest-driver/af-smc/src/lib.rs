// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! SMC of the Linux kernel: the sockets of AF_SMC, its devices, and its enterprise ids.
//!
//! [`sockets`] reads the kernel's table (SMC_DIAG), [`devices`] the directory of dibs, and [`ueids`],
//! [`seid`] and [`change`] use the family of generic netlink of AF_SMC. [`Family`] sends its other commands,
//! and [`netlink`] serves any other family. [`for_each_tcp`] reads the kernel's table of TCP sockets
//! (INET_DIAG).
#![forbid(unsafe_code)]

mod diag;
mod eid;
pub mod netlink;
mod tcp;

use std::fs;
use std::io;

use rustix::net::{AddressFamily, Protocol, RawProtocol, SocketFlags, SocketType, socket_with};
use serde::Serialize;

pub use diag::{Carrier, Cursors, Dmbs, Link, Socket, sockets};
pub use eid::{Change, Family, change, seid, ueids};
pub use tcp::{TcpCounts, TcpSocket, TcpState, for_each_tcp};

/// Address family of the kernel's own SMC sockets.
pub const FAMILY: u16 = 43;
/// IPPROTO_SMC: an SMC socket of the families of IP.
const IPPROTO_SMC: RawProtocol = RawProtocol::MIN.saturating_add(255);
/// Directory of AF_SMC's devices for SMC-D.
pub const DIBS: &str = "/sys/class/dibs";
/// Fabric id of devices whose peers are all in one kernel.
const LOOPBACK: &str = "ffff";

/// A device of AF_SMC for SMC-D.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Device {
    /// Name of the device in [`DIBS`].
    pub name: String,
    /// The fabric id, four hexadecimal digits.
    pub chid: String,
    /// GID of the device.
    pub gid: String,
}

/// Whether the kernel makes SMC sockets. The check may load a kernel module.
#[must_use]
pub fn has_sockets() -> bool {
    let stream = |family, protocol| {
        socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC, protocol).is_ok()
    };
    stream(AddressFamily::INET, Some(Protocol::from_raw(IPPROTO_SMC)))
        || stream(AddressFamily::from_raw(FAMILY), None)
}

/// The devices by name, except the device between this kernel and itself.
///
/// # Errors
/// A present directory cannot be read.
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
        // A just removed device is skipped.
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

// The examples of the README are tests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
