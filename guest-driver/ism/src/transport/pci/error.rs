// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Why a PCI device cannot be used, or none can.

use std::io;

use thiserror::Error;

use super::PciAddress;
use super::paths::{DEVICES, VFIO_NODE};
use crate::virtqueue::QueueError;
use ism_sys::{DmaError, OutOfBounds, VfioError};

/// Why a PCI device cannot be used.
#[derive(Debug, Error)]
pub enum PciError {
    /// There is no such function.
    #[error("there is no such device in {DEVICES}")]
    Absent,
    /// The function is another device.
    #[error("it has id {vendor:04x}:{device:04x} instead of 1af4:106c (virtio-ism)")]
    OtherDevice {
        /// PCI vendor.
        vendor: u16,
        /// PCI device.
        device: u16,
    },
    /// The bound driver does not hand the function to user space, or no driver is bound.
    #[error(
        "it is bound to {}; \"smc devices --bind\" hands it to user space",
        .driver.as_deref().unwrap_or("no driver")
    )]
    NotBound {
        /// The kernel driver of the function, if bound.
        driver: Option<String>,
    },
    /// The function is behind an IOMMU.
    #[error(
        "it is in IOMMU group {group}, but the device does not offer ACCESS_PLATFORM and so \
         bypasses the IOMMU: use VFIO without IOMMU (no iommu device in the VM) or UIO"
    )]
    Iommu {
        /// The IOMMU group.
        group: u32,
    },
    /// VFIO bound the function without a group.
    #[error("it is bound to vfio-pci but has no group: is {VFIO_NODE} there?")]
    NoGroup,
    /// Another process uses the function.
    #[error("it is in use by another process")]
    InUse,
    /// A VFIO call failed.
    #[error("VFIO: {0}")]
    Vfio(VfioError),
    /// A file of the system.
    #[error("{what}: {source}")]
    System {
        /// The failed file or call.
        what: String,
        /// The error of the kernel.
        source: io::Error,
    },
    /// The device lacks a feature needed by the driver.
    #[error("the device does not offer {0}")]
    Missing(&'static str),
    /// The queues could not be made.
    #[error(transparent)]
    Queue(#[from] QueueError),
    /// The list of capabilities is invalid.
    #[error("capabilities: {0}")]
    Capability(#[from] super::caps::CapError),
    /// The BAR of a structure cannot be mapped.
    #[error("BAR {bar} cannot be mapped")]
    NotMappable {
        /// The BAR.
        bar: u8,
    },
    /// The device does not come out of reset.
    #[error("status {status:#04x} after reset")]
    Reset {
        /// Value of the status register.
        status: u8,
    },
    /// The device does not accept the features, for example while its backend is not connected.
    #[error("the device does not accept features {features:#x} (is its daemon running?)")]
    Features {
        /// The requested features.
        features: u64,
    },
    /// The device failed during setup.
    #[error("the device asks for a reset while it is set up (is its daemon running?)")]
    NeedsReset,
    /// The function does not answer memory accesses.
    #[error("it is switched off")]
    Off,
    /// A queue is too small.
    #[error("queue {queue} has room for {max} entries instead of {needed}")]
    QueueSize {
        /// The queue.
        queue: u16,
        /// Entries offered by the device.
        max: u16,
        /// Entries needed by the driver.
        needed: u16,
    },
    /// A queue's notification register lies outside its structure.
    #[error("queue {queue} is notified at {at:#x}, beyond {size:#x} bytes")]
    NotifyOffset {
        /// The queue.
        queue: u16,
        /// Its offset from the start of the notification structure, bytes.
        at: u64,
        /// Bytes of the structure.
        size: u64,
    },
    /// The device has no resources for an interrupt.
    #[error("the device refused interrupt vector {vector} for {what}")]
    Vector {
        /// The vector.
        vector: u16,
        /// The queue, or configuration changes.
        what: String,
    },
    /// The device has no interrupts.
    #[error("the device has neither MSI-X nor INTx")]
    NoInterrupts,
    /// The configuration changed during each read.
    #[error("the configuration keeps changing")]
    Unstable,
    /// No memory for the device.
    #[error("memory for the device: {0}")]
    Dma(#[from] DmaError),
    /// A computed range lies outside.
    #[error(transparent)]
    Bounds(#[from] OutOfBounds),
}

impl PciError {
    /// Whether another attempt may succeed soon: a process is about to close the function, perhaps this
    /// one, or the function answers without a daemon, because the daemon is not connected or the virtual
    /// machine is about to move.
    pub(crate) fn is_temporary(&self) -> bool {
        matches!(self, PciError::InUse | PciError::Features { .. } | PciError::NeedsReset)
    }
}

impl From<VfioError> for PciError {
    fn from(error: VfioError) -> PciError {
        match error {
            VfioError::InUse => PciError::InUse,
            other => PciError::Vfio(other),
        }
    }
}

/// Why no PCI device can be used.
#[derive(Debug, Error)]
pub enum NoPciDevice {
    /// The kernel does not list PCI devices.
    #[error("listing PCI devices: {0}")]
    List(io::Error),
    /// None is free.
    #[error("no free ISM device: {why}")]
    Unusable {
        /// The devices, with the reason for each.
        why: String,
        /// Whether another attempt may succeed soon.
        is_temporary: bool,
    },
}

/// A text for users: the tried devices, with the error of each.
pub(super) fn tried(failures: &[(PciAddress, PciError)]) -> String {
    if failures.is_empty() {
        return "this machine has no virtio-ism PCI device (1af4:106c)".into();
    }
    let each: Vec<_> =
        failures.iter().map(|(address, error)| format!("{address}: {error}")).collect();
    each.join("; ")
}
