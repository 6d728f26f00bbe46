//! What can go wrong between an address and a running device.

use std::io;

use thiserror::Error;

use super::pci::{PciAddress, PciError};
use crate::virtqueue::QueueError;

/// Why a device cannot be reached or set up.
#[derive(Debug, Error)]
pub enum TransportError {
    /// The device could not be reached.
    #[error("{what}: {source}")]
    Connect {
        /// What was tried.
        what: String,
        /// What the system said.
        source: io::Error,
    },
    /// A PCI device cannot be used.
    #[error("PCI device {address}: {source}")]
    Pci {
        /// Where it is.
        address: PciAddress,
        /// Why not.
        source: PciError,
    },
    /// No PCI device can be used; which ones were tried, and what came of it.
    #[error("no free ISM device: {0}")]
    NoPciDevice(String),
    /// A step of setting the device up failed.
    #[error("setting up the device, {step}: {reason}")]
    Setup {
        /// What was tried.
        step: &'static str,
        /// What came of it.
        reason: String,
    },
    /// The device's configuration makes no sense to this driver.
    #[error("configuration field {field} is {value}")]
    Config {
        /// The field.
        field: &'static str,
        /// Its value.
        value: u64,
    },
    /// The device lacks something the driver cannot do without.
    #[error("the device does not offer {0}")]
    Missing(&'static str),
    /// The device's configuration has another length than this driver knows.
    #[error("device configuration of {len} bytes instead of {expected}")]
    ConfigLength {
        /// Its length, bytes.
        len: usize,
        /// The length that this driver knows, bytes.
        expected: usize,
    },
    /// The queues could not be made.
    #[error(transparent)]
    Queue(#[from] QueueError),
    /// A system call failed.
    #[error("{what}: {source}")]
    System {
        /// What was tried.
        what: &'static str,
        /// What the system said.
        source: io::Error,
    },
}
