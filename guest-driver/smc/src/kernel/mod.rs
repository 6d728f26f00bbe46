//! What the kernel has of SMC: AF_SMC, its devices and its enterprise ids.

mod diag;
mod netlink;

use std::fs;
use std::io;

use rustix::net::{AddressFamily, Protocol, RawProtocol, SocketFlags, SocketType, socket_with};
use serde::Serialize;

pub(crate) use diag::{Carrier, Cursors, Socket};
pub(crate) use netlink::{Change, change, seid, ueids};

/// Address family of the kernel's own SMC sockets.
const AF_SMC: u16 = 43;
/// IPPROTO_SMC: an SMC socket of the families of IP.
const IPPROTO_SMC: RawProtocol = RawProtocol::MIN.saturating_add(255);
/// Devices of the kernel that SMC-D runs over.
const DIBS: &str = "/sys/class/dibs";
/// Fabric id of devices whose peers are all in one kernel.
const LOOPBACK: &str = "ffff";

/// A device that AF_SMC runs SMC-D over.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Device {
    /// Its name in /sys/class/dibs.
    pub(crate) name: String,
    /// The fabric id, four hexadecimal digits.
    pub(crate) chid: String,
    /// Its GID.
    pub(crate) gid: String,
}

/// Whether there are SMC sockets. The kernel may load a module for that.
pub(crate) fn has_sockets() -> bool {
    let stream = |family, protocol| {
        socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC, protocol).is_ok()
    };
    stream(AddressFamily::INET, Some(Protocol::from_raw(IPPROTO_SMC)))
        || stream(AddressFamily::from_raw(AF_SMC), None)
}

/// All sockets of AF_SMC in this network namespace.
///
/// # Errors
/// The kernel has no table of such sockets.
pub(crate) fn sockets() -> io::Result<Vec<Socket>> {
    diag::sockets(AF_SMC as u8)
}

/// The devices but those that connect only this kernel with itself, by name.
///
/// # Errors
/// A directory is there and cannot be read.
pub(crate) fn devices() -> io::Result<Vec<Device>> {
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

/// Why connections of AF_SMC would not be SMC-D, if that is so.
pub(crate) fn obstacle() -> Option<String> {
    if !has_sockets() {
        return Some("the kernel has no AF_SMC (CONFIG_SMC; \"modprobe smc\")".into());
    }
    match devices() {
        Ok(devices) if devices.is_empty() => {
            return Some("the kernel has no ISM device (guest-driver/kernel)".into());
        }
        Ok(_) => {}
        Err(error) => return Some(format!("{DIBS}: {error}")),
    }
    match ueids() {
        Ok(ueids) if ueids.is_empty() => {
            Some("AF_SMC has no enterprise id (\"smcd ueid add VIRTIO-ISM\")".into())
        }
        Ok(_) => None,
        Err(error) => Some(format!("AF_SMC does not tell its enterprise ids: {error}")),
    }
}
