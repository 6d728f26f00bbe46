// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The kernel's files for PCI functions and VFIO.

/// The kernel's directory of PCI functions.
pub(super) const DEVICES: &str = "/sys/bus/pci/devices";
/// The directory of VFIO's files.
pub(super) const VFIO: &str = "/dev/vfio";
/// The device node of VFIO.
pub(super) const VFIO_NODE: &str = "/dev/vfio/vfio";
