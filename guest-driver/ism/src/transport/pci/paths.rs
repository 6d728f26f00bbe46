// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Files through which the kernel shows PCI functions and VFIO.

/// The directory in which the kernel lists PCI functions.
pub(super) const DEVICES: &str = "/sys/bus/pci/devices";
/// The directory of VFIO's files.
pub(super) const VFIO: &str = "/dev/vfio";
/// The file through which a process reaches VFIO.
pub(super) const VFIO_NODE: &str = "/dev/vfio/vfio";
