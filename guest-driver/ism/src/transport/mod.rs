// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! From an address to a running device.
//!
//! [`DeviceAddress::open`] reaches a virtio-ism device and sets it up. The result is a
//! [`RunningDevice`], whatever carries the device: control commands with their replies, event
//! records, moves and kicks, a window, and memory that the device can reach. [`vhost_user`] is the
//! transport of a host process or container, [`pci`] that of a virtual machine. A transport
//! implements `Window`, the part in which they differ.

mod address;
mod doorbells;
mod error;
#[cfg(test)]
pub(crate) mod fake;
pub mod pci;
mod running;
pub mod vhost_user;

pub use address::DeviceAddress;
pub(crate) use doorbells::Doorbells;
pub use error::TransportError;
pub use pci::{NoPciAddress, PciAddress};
pub(crate) use running::{ForkTransport, Window};
pub use running::{RunningDevice, SetupOptions};
