//! The transport of a virtual machine: a virtio-pci function, worked from user space.
//!
//! The function comes from VFIO without IOMMU (interrupts by MSI-X, each queue's own vector
//! straight into its eventfd) or, where that is not to be had, from `uio_pci_generic` (one INTx
//! line, which a thread takes apart). Either way the device sees physical addresses, so rings and
//! buffers lie in pinned memory ([`DmaMemory`](crate::sys::DmaMemory)), and only one process at a
//! time has the function.
//!
//! A small thread per device hears of configuration changes and of requests to give the device
//! back. When the device fails, or the driver closes it, the same thread resets it and lets go of
//! everything, although views of the window may still exist (they read zeros from then on): the
//! kernel can remove the function at once, and it can be opened again.

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
mod setup;
mod window;

pub use address::{NoPciAddress, PciAddress};
pub use caps::CapError;
pub use discover::{Binding, Function, functions};
pub use error::PciError;
pub use interrupts::Interrupts;
pub use peek::peek;
pub use setup::{open, open_any};
