// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The session with the back end, begun and ended by the status register.

use std::os::fd::AsFd;

use virtio_ism_abi::virtio_pci::status::{DRIVER_OK, FEATURES_OK, NEEDS_RESET};
use virtio_ism_abi::virtio_pci::{NO_VECTOR, VERSION_1};

use super::{Common, Device};
use crate::back_end::{BackEnd, BackEndError, QueueLayout};
use crate::dma::MemoryRegion;

impl<B: BackEnd> Device<'_, B> {
    pub(super) fn set_status(&mut self, status: u8) -> Result<(), BackEndError> {
        if status == 0 {
            return self.reset_virtio();
        }
        let new = status & !self.common.status;
        // The driver neither sets NEEDS_RESET nor takes bits away.
        self.common.status |= status & !(NEEDS_RESET | FEATURES_OK | DRIVER_OK);
        if new & FEATURES_OK != 0 {
            let accepted = self.common.accepted;
            let is_known = accepted & !self.common.offered == 0 && accepted & VERSION_1 != 0;
            if is_known && self.ask(|back_end| back_end.set_features(accepted)).is_some() {
                self.common.status |= FEATURES_OK;
            }
        }
        if new & DRIVER_OK != 0 && self.common.status & FEATURES_OK != 0 {
            self.common.status |= DRIVER_OK;
            self.start();
        }
        Ok(())
    }

    /// Starts the enabled queues, once the driver is ready.
    pub(super) fn start(&mut self) {
        let wanted = DRIVER_OK | FEATURES_OK;
        if self.common.status & (wanted | NEEDS_RESET) != wanted {
            return;
        }
        let Some(back_end) = &mut self.back_end else { return };
        let regions = self.memory.regions();
        let is_first = !self.queues.iter().any(|queue| queue.is_running);
        let enabled = || self.queues.iter().filter(|queue| queue.is_enabled);
        if enabled().next().is_none() {
            return;
        }
        if !enabled().all(|queue| is_usable(&queue.layout, &regions)) {
            return self.need_reset();
        }
        let mut result = if is_first { back_end.set_memory(&regions) } else { Ok(()) };
        for (number, queue) in (0..).zip(&mut self.queues) {
            if result.is_ok() && queue.is_enabled && !queue.is_running {
                let call = self.vectors.eventfd(queue.vector);
                result = back_end.start_queue(number, &queue.layout, queue.kick.as_fd(), call);
                queue.is_running = result.is_ok();
            }
        }
        if let Err(error) = result {
            self.lose_back_end(&error);
        }
    }

    /// Stops all queues, resets the device behind, and removes its memory. The registers stay.
    pub(super) fn stop(&mut self) {
        let Some(back_end) = &mut self.back_end else { return };
        let mut result = Ok(());
        let mut had_session = self.common.status & FEATURES_OK != 0;
        for (number, queue) in (0..).zip(&mut self.queues) {
            if std::mem::take(&mut queue.is_running) && result.is_ok() {
                result = back_end.stop_queue(number);
                had_session = true;
            }
        }
        if had_session && result.is_ok() {
            result = back_end.reset();
        }
        // So the client may remove memory at any time, and reuse it.
        let result = result.and_then(|()| back_end.set_memory(&[]));
        if let Err(error) = result {
            self.lose_back_end(&error);
        }
    }

    /// The reset of virtio: the driver stores 0 into the status.
    fn reset_virtio(&mut self) -> Result<(), BackEndError> {
        self.stop();
        if self.back_end.is_none() {
            let mut back_end = (self.connect)()?;
            self.common.offered = back_end.features()?;
            self.back_end = Some(back_end);
        }
        for queue in &mut self.queues {
            queue.reset(self.identity.queue_size);
        }
        self.vectors.clear_pending();
        self.common = Common {
            offered: self.common.offered,
            accepted: 0,
            device_select: 0,
            driver_select: 0,
            config_vector: NO_VECTOR,
            queue_select: 0,
            status: 0,
        };
        Ok(())
    }

    /// Resets the function. Memory and interrupts belong to the client, and stay.
    ///
    /// # Errors
    /// No back end is available.
    pub(crate) fn reset(&mut self) -> Result<(), BackEndError> {
        self.space.reset();
        self.reset_virtio()
    }
}

/// Whether the rings of a queue are aligned, each within one region.
pub(super) fn is_usable(layout: &QueueLayout, regions: &[MemoryRegion<'_>]) -> bool {
    let size = u64::from(layout.size);
    let rings = [
        (layout.descriptors, 16 * size, 16),
        (layout.available, 6 + 2 * size, 2),
        (layout.used, 6 + 8 * size, 4),
    ];
    rings.iter().all(|(start, len, align)| {
        start.is_multiple_of(*align)
            && regions.iter().any(|region| {
                let at = start.checked_sub(region.address);
                at.and_then(|at| at.checked_add(*len)).is_some_and(|end| end <= region.size)
            })
    })
}
