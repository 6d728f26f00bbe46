// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The address of a PCI function.

use std::fmt;
use std::str::FromStr;

use thiserror::Error;

/// A PCI function: `domain:bus:device.function`, in hexadecimal digits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PciAddress {
    /// Domain, 0 on most machines.
    pub domain: u32,
    /// Bus.
    pub bus: u8,
    /// Device, below 32.
    pub device: u8,
    /// Function, below 8.
    pub function: u8,
}

/// A text that is no PCI address.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{0:?} is no PCI address; an example of one: 0000:00:04.0")]
pub struct NoPciAddress(pub String);

impl FromStr for PciAddress {
    type Err = NoPciAddress;

    fn from_str(text: &str) -> Result<PciAddress, NoPciAddress> {
        read_address(text).ok_or_else(|| NoPciAddress(text.into()))
    }
}

fn read_address(text: &str) -> Option<PciAddress> {
    let (domain, rest) = text.split_once(':')?;
    let (bus, rest) = rest.split_once(':')?;
    let (device, function) = rest.split_once('.')?;
    // `from_str_radix` accepts a sign, unlike PCI addresses.
    let hex = |digits: &str, lengths: std::ops::RangeInclusive<usize>| {
        let digits = Some(digits).filter(|digits| {
            lengths.contains(&digits.len()) && digits.bytes().all(|byte| byte.is_ascii_hexdigit())
        })?;
        u32::from_str_radix(digits, 16).ok()
    };
    Some(PciAddress {
        domain: hex(domain, 4..=8)?,
        bus: hex(bus, 2..=2)? as u8,
        device: hex(device, 2..=2).filter(|device| *device < 32)? as u8,
        function: hex(function, 1..=1).filter(|function| *function < 8)? as u8,
    })
}

impl fmt::Display for PciAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let PciAddress { domain, bus, device, function } = self;
        write!(f, "{domain:04x}:{bus:02x}:{device:02x}.{function}")
    }
}
