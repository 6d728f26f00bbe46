// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The devices among which the program finds a free one.

use std::path::{Path, PathBuf};

use guest_driver::DeviceAddress;
use virtio_ism::transport::pci;

use crate::error::CliError;
use crate::paths;

/// Where programs search for a free device by default: in the directory of "smc fabric", or in a
/// virtual machine among its PCI devices.
///
/// # Errors
/// Others may write the directory.
pub(super) fn default() -> Result<PathBuf, CliError> {
    let directory = paths::directory()?;
    if sockets(&directory).is_empty() && pci::functions().is_ok_and(|found| !found.is_empty()) {
        return Ok("pci".into());
    }
    Ok(directory)
}

/// The sockets of devices in a directory. Those of the management interface and of processes lie
/// beside them.
fn sockets(directory: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
    let is_device = |path: &PathBuf| {
        path.file_name().map(|name| name.to_string_lossy()).is_some_and(|name| {
            name.ends_with(".sock") && !name.starts_with("process-") && name != paths::MANAGEMENT
        })
    };
    entries.map(|entry| entry.path()).filter(is_device).collect()
}

/// Checks that each of the named devices exists, and that one of them can be used as soon as it is
/// free. An error says what is wrong.
pub(super) fn check(devices: &[PathBuf]) -> Result<(), String> {
    let mut wrong = None;
    let mut usable = false;
    for device in devices {
        match DeviceAddress::from(device) {
            DeviceAddress::Socket(path) => {
                let kind = path.metadata();
                let kind = kind.map_err(|error| format!("device {}: {error}", path.display()))?;
                let candidates = match kind.is_dir() {
                    true => sockets(&path),
                    false => vec![path.clone()],
                };
                if candidates.is_empty() {
                    wrong = Some(format!("no device is at {}", path.display()));
                }
                for socket in candidates.iter().take_while(|_| !usable).collect::<Vec<_>>() {
                    match paths::listens(socket) {
                        Ok(()) => usable = true,
                        Err(error) => {
                            wrong = Some(format!("device {}: {error}", socket.display()));
                        }
                    }
                }
            }
            DeviceAddress::Pci(address) => {
                let functions = pci::functions().map_err(|error| error.to_string())?;
                if !functions.iter().any(|function| function.address == address) {
                    return Err(format!("no virtio-ism PCI device is at {address}"));
                }
                usable = true;
            }
            DeviceAddress::AnyPci => {
                match pci::functions().map_err(|error| error.to_string())?.is_empty() {
                    true => wrong = Some("this machine has no virtio-ism PCI device".into()),
                    false => usable = true,
                }
            }
        }
    }
    match wrong {
        Some(wrong) if !usable => Err(wrong),
        _ => Ok(()),
    }
}
