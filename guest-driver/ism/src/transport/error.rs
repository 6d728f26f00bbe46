// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Errors between an address and a running device.

use std::io;

use thiserror::Error;

use super::pci::{NoPciDevice, PciAddress, PciError};
use crate::virtqueue::QueueError;

/// Why a device cannot be reached or set up.
#[derive(Debug, Error)]
pub enum TransportError {
    /// The device could not be reached.
    #[error("{what}: {source}")]
    Connect {
        /// The step that failed.
        what: String,
        /// The error of the system.
        source: io::Error,
    },
    /// Another process uses the device.
    #[error("it is in use by another process")]
    InUse,
    /// Every device of a pool is in use.
    #[error("all devices of the pool are in use by other processes")]
    AllInUse,
    /// This network namespace has its share of a pool's devices.
    #[error(
        "this container has as many devices of the pool as are free for others; others are in use \
         by its processes"
    )]
    ShareInUse,
    /// A pool is not for this process.
    #[error("the device pool is not for this user or group")]
    NotPermitted,
    /// Another user's daemon has the socket than before.
    #[error(
        "the daemon of user {uid} listens there now, and this program has used the device of user \
         {before}"
    )]
    OtherOwner {
        /// The listening user.
        uid: u32,
        /// The user whose daemon may have the device.
        before: u32,
    },
    /// A pool gives no device.
    #[error("the device pool {0}")]
    Pool(&'static str),
    /// A PCI device cannot be used.
    #[error("PCI device {address}: {source}")]
    Pci {
        /// Address of the device.
        address: PciAddress,
        /// The reason of the failure.
        source: PciError,
    },
    /// No PCI device can be used.
    #[error(transparent)]
    NoPciDevice(#[from] NoPciDevice),
    /// A step of setting the device up failed.
    #[error("setting up the device, {step}: {reason}")]
    Setup {
        /// The step that failed.
        step: &'static str,
        /// The error, as text.
        reason: String,
    },
    /// A field of the device's configuration has a value unusable for this driver.
    #[error("configuration field {field} is {value}")]
    Config {
        /// The field.
        field: &'static str,
        /// Value of the field.
        value: u64,
    },
    /// The device lacks a feature needed by the driver.
    #[error("the device does not offer {0}")]
    Missing(&'static str),
    /// The device's configuration has another length than this driver knows.
    #[error("device configuration of {len} bytes instead of {expected}")]
    ConfigLength {
        /// Length of the configuration, bytes.
        len: usize,
        /// Length known to this driver, bytes.
        expected: usize,
    },
    /// The queues could not be made.
    #[error(transparent)]
    Queue(#[from] QueueError),
    /// A system call failed.
    #[error("{what}: {source}")]
    System {
        /// The step that failed.
        what: &'static str,
        /// The error of the system.
        source: io::Error,
    },
}
