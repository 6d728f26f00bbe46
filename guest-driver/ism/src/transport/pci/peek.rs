// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Reads the configuration of a device without opening the device, even if another process uses it.

use std::fs;
use std::io;

use virtio_ism_abi::config::Config;
use zerocopy::FromBytes;

use super::caps::{CONFIG_SPACE, read_layout};
use super::common::read_bytes;
use super::function::{bar_of_sysfs, map_sysfs};
use super::{PciAddress, PciError, discover};
use ism_sys::Registers;

/// Command register: memory accesses are answered.
const MEMORY: u8 = 1 << 1;

/// Reads the configuration of a device without disturbing a process using the device.
///
/// # Errors
/// There is no such device, it is switched off, or this process lacks the rights.
pub fn peek(address: PciAddress) -> Result<Config, PciError> {
    let directory = discover::directory(address);
    let path = directory.join("config");
    let bytes = fs::read(&path)
        .map_err(|source| PciError::System { what: path.display().to_string(), source })?;
    let Some(space) = bytes.first_chunk::<CONFIG_SPACE>() else {
        // Without rights, the kernel shows only the beginning of the file.
        let source = io::ErrorKind::PermissionDenied.into();
        return Err(PciError::System { what: path.display().to_string(), source });
    };
    if space.get(4).is_none_or(|command| command & MEMORY == 0) {
        return Err(PciError::Off);
    }
    let layout = read_layout(space, |bar| bar_of_sysfs(&directory, bar))?;
    let (mem, at) = map_sysfs(&directory, layout.device)?;
    let registers = Registers::new(&mem, at, layout.device.len as usize)?;
    Config::read_from_bytes(&read_bytes(&registers)).map_err(|_| PciError::Unstable)
}
