// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The hold of a running device on its PCI function.

use std::sync::Arc;
use std::thread::JoinHandle;

use super::release::MemoryRelease;
use super::window::BarWindow;
use crate::transport::{SlabMark, Window};
use crate::virtqueue::{Health, Notify};
use ism_sys::{Registers, SharedSlice};

/// The hold of a running device on its virtio-pci function.
pub(super) struct Pci {
    pub(super) health: Arc<Health>,
    pub(super) window: Option<Arc<BarWindow>>,
    pub(super) release: Arc<MemoryRelease>,
    // The thread owns the function. At its end the thread resets and closes the function.
    pub(super) monitor: Option<JoinHandle<()>>,
}

/// The notification register of a queue: a store announces new chains to the device.
pub(super) struct NotifyRegister {
    pub(super) registers: Registers,
    pub(super) at: usize,
    pub(super) queue: u16,
}

impl Notify for NotifyRegister {
    fn notify(&self) {
        // The offset was checked when the queue was set up.
        let _ = self.registers.write_u16(self.at, self.queue);
    }
}

impl Window for Pci {
    fn size(&self) -> u64 {
        self.window.as_ref().map_or(0, |window| window.size())
    }

    fn slice(&self, offset: u64, len: u64) -> Option<SharedSlice> {
        self.window.as_ref()?.slice(offset, len)
    }

    fn is_cached(&self) -> bool {
        // The window is a BAR, and the hypervisor decides about caching.
        false
    }

    fn outlives_device(&self) -> bool {
        // The thread closes the function when the device fails, see `monitor`.
        false
    }

    fn has_memory(&self) -> bool {
        !self.release.is_over()
    }

    fn let_go(&self) {
        self.release.let_go();
    }

    fn note_mark(&self, slab_off: u64, mark: SlabMark) {
        self.release.note_mark(slab_off, mark);
    }
}

impl Drop for Pci {
    fn drop(&mut self) {
        self.health.fail("closed by the driver");
        self.release.let_go();
        // The device is reset when this returns: only then may its memory go.
        if let Some(monitor) = self.monitor.take()
            && monitor.join().is_err()
        {
            tracing::error!("the thread of a PCI device panicked");
        }
    }
}
