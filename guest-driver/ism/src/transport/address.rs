// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The address of a virtio-ism device.

use std::convert::Infallible;
use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use super::pci::{self, PciAddress};
use super::{RunningDevice, SetupOptions, TransportError, vhost_user};

/// The address of a device, in the form written by users.
///
/// As text, `pci` is any free PCI device of this machine, `0000:00:04.0` (or `pci:0000:00:04.0`) is the
/// device at this PCI address, and any other text is the path of a vhost-user socket or of a device pool.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum DeviceAddress {
    /// The socket of one device or of a device pool of the daemon. This process becomes the front end.
    Socket(PathBuf),
    /// The PCI function of a virtual machine.
    Pci(PciAddress),
    /// The first PCI function not in use by another process.
    AnyPci,
}

impl DeviceAddress {
    /// Connects to the device and sets up features, memory, queues and window.
    ///
    /// Waits for a device behind a socket in use by another process, for `timeout`.
    ///
    /// # Errors
    /// There is no such device, or the device is in use, lacks a needed feature, or does not answer.
    pub fn open(
        &self,
        wanted: SetupOptions,
        timeout: Duration,
    ) -> Result<Arc<RunningDevice>, TransportError> {
        match self {
            DeviceAddress::Socket(path) => vhost_user::connect(path, wanted, timeout),
            DeviceAddress::Pci(address) => {
                let at = |source| TransportError::Pci { address: *address, source };
                Ok(pci::open(*address, wanted).map_err(at)?.0)
            }
            DeviceAddress::AnyPci => Ok(pci::open_any(wanted)?),
        }
    }
}

impl From<&str> for DeviceAddress {
    fn from(text: &str) -> DeviceAddress {
        if text == "pci" {
            return DeviceAddress::AnyPci;
        }
        match text.strip_prefix("pci:").unwrap_or(text).parse() {
            Ok(address) => DeviceAddress::Pci(address),
            Err(_) => DeviceAddress::Socket(text.into()),
        }
    }
}

impl From<String> for DeviceAddress {
    fn from(text: String) -> DeviceAddress {
        text.as_str().into()
    }
}

impl From<&String> for DeviceAddress {
    fn from(text: &String) -> DeviceAddress {
        text.as_str().into()
    }
}

impl From<&Path> for DeviceAddress {
    fn from(path: &Path) -> DeviceAddress {
        match path.to_str() {
            Some(text) => text.into(),
            None => DeviceAddress::Socket(path.into()),
        }
    }
}

impl From<PathBuf> for DeviceAddress {
    fn from(path: PathBuf) -> DeviceAddress {
        path.as_path().into()
    }
}

impl From<&PathBuf> for DeviceAddress {
    fn from(path: &PathBuf) -> DeviceAddress {
        path.as_path().into()
    }
}

impl From<PciAddress> for DeviceAddress {
    fn from(address: PciAddress) -> DeviceAddress {
        DeviceAddress::Pci(address)
    }
}

impl FromStr for DeviceAddress {
    type Err = Infallible;

    fn from_str(text: &str) -> Result<DeviceAddress, Infallible> {
        Ok(text.into())
    }
}

impl fmt::Display for DeviceAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DeviceAddress::Socket(path) => path.display().fmt(f),
            DeviceAddress::Pci(address) => address.fmt(f),
            DeviceAddress::AnyPci => f.write_str("pci"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_names_a_device_and_is_printed_as_it_was() {
        for text in ["pci", "0000:00:04.0", "10000:e1:1f.7", "/run/ism/a.sock", "a.sock"] {
            let address = DeviceAddress::from(text);
            assert_eq!(address.to_string(), text);
            assert_eq!(matches!(address, DeviceAddress::Socket(_)), text.ends_with(".sock"));
        }
        assert_eq!(DeviceAddress::from("pci:0000:00:04.0"), DeviceAddress::from("0000:00:04.0"));
    }

    #[test]
    fn a_text_that_is_no_pci_address_is_a_path() {
        for text in ["0000:00:20.0", "0000:00:04.8", "0:00:04.0", "0000:00:04", "+000:00:04.0", ""]
        {
            assert!(text.parse::<PciAddress>().is_err(), "{text}");
            assert_eq!(DeviceAddress::from(text), DeviceAddress::Socket(text.into()));
        }
    }
}
