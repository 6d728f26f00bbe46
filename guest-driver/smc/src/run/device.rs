// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The devices from which the program chooses a free one.

use std::path::PathBuf;

use guest_driver::DeviceAddress;
use smc_settings::Place;
use virtio_ism::transport::pci;

use crate::error::CliError;
use crate::paths;

/// The default place to search for a free device: the directory of the first fabric accessible to
/// this user, or the PCI devices of a virtual machine.
///
/// # Errors
/// There is neither, and others may write the directory of the user's own fabric.
pub(super) fn default() -> Result<PathBuf, CliError> {
    let none = match smc_settings::find_fabric() {
        Ok(found) => return Ok(found.directory),
        Err(none) => none,
    };
    if pci::functions().is_ok_and(|found| !found.is_empty()) {
        return Ok("pci".into());
    }
    match none.denied() {
        Some(looked) if looked.place != Place::Own => Ok(looked.directory.clone()),
        _ => paths::directory(),
    }
}

/// Checks that each of the named devices exists, and that at least one is usable once free. The
/// error is a sentence.
pub(super) fn check(devices: &[PathBuf]) -> Result<(), String> {
    let mut wrong = None;
    let mut usable = false;
    for device in devices {
        match DeviceAddress::from(device) {
            DeviceAddress::Socket(path) => {
                let kind = path.metadata();
                let kind = kind.map_err(|error| format!("device {}: {error}", path.display()))?;
                let candidates = match kind.is_dir() {
                    true => smc_settings::device_sockets(&path).unwrap_or_default(),
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
