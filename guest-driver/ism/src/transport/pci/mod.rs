// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The transport of a virtual machine: a virtio-pci function, driven from user space.
//!
//! The kernel gives the function to this process by VFIO without IOMMU: interrupts are MSI-X, and each
//! queue's vector signals its eventfd. Without VFIO, `uio_pci_generic` gives the function, with one INTx
//! line, passed on to the queues by a thread. In both cases the device uses physical addresses, so rings and
//! buffers lie in pinned memory ([`DmaMemory`](ism_sys::DmaMemory)). Only one process at a time can have the
//! function.
//!
//! A thread per device receives configuration changes and requests to remove the device. When the device
//! fails, or the driver closes the device, the same thread resets the device and closes the function. If the
//! owner goes on without the device, the thread waits for the owner first (`release`). Views of the window
//! may still exist and read zeros from then on. So the kernel can remove the function, and a process can open
//! the function again.

mod address;
mod caps;
mod common;
mod connection;
mod discover;
mod error;
mod function;
mod interrupts;
mod monitor;
mod paths;
mod peek;
mod release;
mod setup;
mod window;

pub use address::{NoPciAddress, PciAddress};
pub use caps::CapError;
pub use discover::{Binding, Function, functions};
pub use error::{NoPciDevice, PciError};
pub use interrupts::Interrupts;
pub use peek::peek;
pub use setup::{open, open_any};
