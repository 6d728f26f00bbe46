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

use std::fmt;
use std::sync::Arc;
use std::thread::JoinHandle;

use super::queues::Notify;
use super::running::{Carrier, Running};
use super::{PciAddress, TransportError};
use crate::sys::{Registers, SharedSlice};

mod caps;
mod common;
mod discover;
mod error;
mod function;
mod peek;
mod setup;
mod watch;
mod window;

pub use caps::CapError;
pub use discover::{Binding, Function, functions};
pub use error::PciError;
pub use peek::peek;
pub use setup::open;

use window::Window;

/// The file through which VFIO is reached.
const VFIO_NODE: &str = "/dev/vfio/vfio";

/// How a device interrupts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Interrupts {
    /// Message-signalled, with this many vectors.
    MsiX {
        /// Vectors of the device.
        vectors: u16,
    },
    /// One line, shared by all queues (and possibly with other devices).
    IntX,
}

impl fmt::Display for Interrupts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Interrupts::MsiX { vectors: 1 } => f.write_str("MSI-X (1 vector)"),
            Interrupts::MsiX { vectors } => write!(f, "MSI-X ({vectors} vectors)"),
            Interrupts::IntX => f.write_str("INTx"),
        }
    }
}

/// Opens the first virtio-ism function that no other process uses.
///
/// # Errors
/// There is none; the text says what was tried and what came of it.
pub fn open_any(move_queues: u16, guest_memory: u64) -> Result<Arc<Pci>, TransportError> {
    let found = functions()
        .map_err(|source| TransportError::System { what: "listing PCI devices", source })?;
    let mut failures = Vec::new();
    for function in found {
        match open(function.address, move_queues, guest_memory) {
            Ok(device) => return Ok(device),
            Err(TransportError::Pci { address, source }) => failures.push((address, source)),
            Err(other) => return Err(other),
        }
    }
    Err(TransportError::NoPciDevice(error::tried(&failures)))
}

/// A virtio-pci function that runs.
pub struct Pci {
    address: PciAddress,
    running: Running,
    window: Option<Arc<Window>>,
    interrupts: Interrupts,
    // Has the function, and lets go of it.
    watcher: Option<JoinHandle<()>>,
}

impl Pci {
    /// Where it is.
    pub fn address(&self) -> PciAddress {
        self.address
    }

    /// How it interrupts.
    pub fn interrupts(&self) -> Interrupts {
        self.interrupts
    }

    /// Memory that the device can reach, bytes.
    pub fn guest_memory(&self) -> usize {
        self.running.pool.size()
    }
}

/// The register that tells the device of a queue's news.
struct Bell {
    registers: Registers,
    at: usize,
    queue: u16,
}

impl Notify for Bell {
    fn notify(&self) {
        // The offset was checked when the queue was set up.
        let _ = self.registers.write_u16(self.at, self.queue);
    }
}

impl Carrier for Pci {
    fn running(&self) -> &Running {
        &self.running
    }

    fn window_size(&self) -> u64 {
        self.window.as_ref().map_or(0, |window| window.size())
    }

    fn window_slice(&self, offset: u64, len: u64) -> Option<SharedSlice> {
        self.window.as_ref()?.slice(offset, len)
    }

    fn window_is_cached(&self) -> bool {
        // A BAR: whether the processor caches it is up to the hypervisor.
        false
    }

    fn memory_outlives_device(&self) -> bool {
        // The kernel gets the function back at once, see `watch`.
        false
    }
}

impl Drop for Pci {
    fn drop(&mut self) {
        self.running.health.fail("closed by the driver");
        // The device is reset when this returns: only then may its memory go.
        if let Some(watcher) = self.watcher.take()
            && watcher.join().is_err()
        {
            tracing::error!("the thread of a PCI device panicked");
        }
    }
}

impl fmt::Debug for Pci {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pci")
            .field("address", &self.address)
            .field("features", &self.running.features)
            .finish_non_exhaustive()
    }
}
