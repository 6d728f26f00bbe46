// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! From an address to a running device.
//!
//! [`DeviceAddress::open`] connects to a virtio-ism device and sets up the device. The result is a
//! [`RunningDevice`] for every transport: control commands with their replies, event records, moves and
//! kicks, a window, and memory for the device. [`vhost_user`] is the transport of a host process or
//! container, [`pci`] the transport of a virtual machine. A transport implements `Window`, the part of a
//! device that depends on the transport.

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
pub(crate) use running::{ForkTransport, SlabMark, Window};
pub use running::{RunningDevice, SetupOptions};
