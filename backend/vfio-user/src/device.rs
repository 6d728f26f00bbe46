// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The function: its registers, and the session with the back end described by them.

mod session;

use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::event::{EventfdFlags, eventfd};

use virtio_ism_abi::virtio_pci::NO_VECTOR;
use virtio_ism_abi::virtio_pci::common::{
    CONFIG_VECTOR, DEVICE_FEATURE, DEVICE_FEATURE_SELECT, DRIVER_FEATURE, DRIVER_FEATURE_SELECT,
    GENERATION, LEN as COMMON_LEN, NUM_QUEUES, QUEUE_DESC, QUEUE_DEVICE, QUEUE_DRIVER,
    QUEUE_ENABLE, QUEUE_NOTIFY_OFF, QUEUE_SELECT, QUEUE_SIZE, QUEUE_VECTOR, STATUS,
};
use virtio_ism_abi::virtio_pci::status::{DRIVER_OK, FEATURES_OK, NEEDS_RESET};

use crate::back_end::{BackEnd, BackEndError, QueueLayout};
use crate::dma::{DmaError, DmaTable};
use crate::irq::{IrqError, Vectors};
use crate::pci::{Access, ConfigSpace, Effect};
use crate::region::{
    COMMON, CONFIG, DEVICE, MSIX_BAR, NOTIFY, NOTIFY_MULTIPLIER, PENDING_BITS, STRUCTURES_BAR,
    SharedMemory,
};
use crate::wire::{Fields, put};
use crate::{Event, Identity};

/// Receives the events of a client.
pub(crate) type Report<'a> = dyn FnMut(Event<'_>) + 'a;
/// Makes a connection to the back end.
pub(crate) type Connect<'a, B> = dyn FnMut() -> Result<B, BackEndError> + 'a;

#[derive(Debug)]
struct Queue {
    layout: QueueLayout,
    vector: u16,
    is_enabled: bool,
    /// Whether the back end serves the queue.
    is_running: bool,
    kick: OwnedFd,
}

impl Queue {
    fn reset(&mut self, size: u16) {
        self.layout = QueueLayout { size, ..QueueLayout::default() };
        self.vector = NO_VECTOR;
        self.is_enabled = false;
    }
}

/// The common configuration, except the queues.
#[derive(Clone, Copy, Debug)]
struct Common {
    offered: u64,
    accepted: u64,
    device_select: u32,
    driver_select: u32,
    config_vector: u16,
    queue_select: u16,
    status: u8,
}

/// The device's configuration at the last read.
#[derive(Debug, Default)]
struct DeviceConfig {
    bytes: Vec<u8>,
    generation: u8,
}

/// The function of one client.
pub(crate) struct Device<'a, B> {
    identity: Identity,
    space: ConfigSpace,
    common: Common,
    config: DeviceConfig,
    queues: Vec<Queue>,
    vectors: Vectors,
    memory: DmaTable,
    shared: Option<SharedMemory>,
    /// `None`: the back end has ended, and the driver has to reset the function.
    back_end: Option<B>,
    connect: &'a mut Connect<'a, B>,
    report: &'a mut Report<'a>,
}

impl<'a, B: BackEnd> Device<'a, B> {
    pub(crate) fn new(
        identity: Identity,
        shared: Option<SharedMemory>,
        connect: &'a mut Connect<'a, B>,
        report: &'a mut Report<'a>,
    ) -> Result<Device<'a, B>, BackEndError> {
        let mut back_end = connect()?;
        let offered = back_end.features()?;
        let config = DeviceConfig { bytes: back_end.config(identity.config_len)?, generation: 0 };
        let queue = |_| -> Result<Queue, BackEndError> {
            let kick = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
            let layout = QueueLayout { size: identity.queue_size, ..QueueLayout::default() };
            Ok(Queue {
                layout,
                vector: NO_VECTOR,
                is_enabled: false,
                is_running: false,
                kick: kick.map_err(std::io::Error::from)?,
            })
        };
        let vectors = identity.queues + 1;
        Ok(Device {
            identity,
            space: ConfigSpace::new(&identity, vectors, shared.as_ref()),
            common: Common {
                offered,
                accepted: 0,
                device_select: 0,
                driver_select: 0,
                config_vector: NO_VECTOR,
                queue_select: 0,
                status: 0,
            },
            config,
            queues: (0..identity.queues).map(queue).collect::<Result<_, _>>()?,
            vectors: Vectors::new(vectors)?,
            memory: DmaTable::default(),
            shared,
            back_end: Some(back_end),
            connect,
            report,
        })
    }

    /// A descriptor readable at the end of the back end.
    pub(crate) fn link(&self) -> Option<BorrowedFd<'_>> {
        self.back_end.as_ref().and_then(BackEnd::link)
    }

    /// The shared memory.
    pub(crate) fn shared(&self) -> Option<&SharedMemory> {
        self.shared.as_ref()
    }

    /// The vectors.
    pub(crate) fn vectors(&self) -> &Vectors {
        &self.vectors
    }

    /// Reports an event to the owner.
    pub(crate) fn report(&mut self, event: Event<'_>) {
        (self.report)(event);
    }

    /// Records the end of the back end: the function needs a reset.
    pub(crate) fn lose_back_end(&mut self, error: &BackEndError) {
        (self.report)(Event::BackEndLost(error));
        self.back_end = None;
        for queue in &mut self.queues {
            queue.is_running = false;
        }
        self.need_reset();
    }

    /// Sends the back end a request. After a failure, the function needs a reset.
    fn ask<T>(&mut self, what: impl FnOnce(&mut B) -> Result<T, BackEndError>) -> Option<T> {
        match what(self.back_end.as_mut()?) {
            Ok(answer) => Some(answer),
            Err(error) => {
                self.lose_back_end(&error);
                None
            }
        }
    }

    fn need_reset(&mut self) {
        if self.common.status == 0 {
            return;
        }
        self.common.status |= NEEDS_RESET;
        self.vectors.signal(self.common.config_vector);
    }

    // Memory and interrupts ------------------------------------------------------------------------

    pub(crate) fn map(
        &mut self,
        fields: &Fields<'_>,
        file: Option<OwnedFd>,
    ) -> Result<(), DmaError> {
        if self.memory.map(fields, file)? {
            self.renew_memory();
        }
        Ok(())
    }

    /// Removes mappings. On return the back end no longer uses them.
    pub(crate) fn unmap(&mut self, fields: &Fields<'_>) -> Result<(), DmaError> {
        if self.memory.unmap(fields)? {
            self.renew_memory();
        }
        Ok(())
    }

    /// Gives the back end the present memory, if queues run; without a running queue the back end has no
    /// memory.
    fn renew_memory(&mut self) {
        if !self.queues.iter().any(|queue| queue.is_running) {
            return;
        }
        let Some(back_end) = &mut self.back_end else { return };
        let regions = self.memory.regions();
        let mut running = self.queues.iter().filter(|queue| queue.is_running);
        if !running.all(|queue| session::is_usable(&queue.layout, &regions)) {
            self.stop();
            self.need_reset();
        } else if let Err(error) = back_end.set_memory(&regions) {
            self.lose_back_end(&error);
        }
    }

    pub(crate) fn set_irqs(
        &mut self,
        fields: &Fields<'_>,
        fds: Vec<OwnedFd>,
    ) -> Result<(), IrqError> {
        let changed = self.vectors.set(fields, fds)?;
        for queue in 0..self.identity.queues {
            let entry = self.queues.get(usize::from(queue));
            if entry.is_some_and(|entry| changed.contains(&entry.vector)) {
                self.renew_call(queue);
            }
        }
        self.vectors.deliver(changed);
        Ok(())
    }

    /// Gives the back end the present eventfd of a queue, if the queue runs.
    fn renew_call(&mut self, queue: u16) {
        let Some(entry) = self.queues.get(usize::from(queue)).filter(|entry| entry.is_running)
        else {
            return;
        };
        let Some(back_end) = &mut self.back_end else { return };
        if let Err(error) = back_end.set_call(queue, self.vectors.eventfd(entry.vector)) {
            self.lose_back_end(&error);
        }
    }

    // Regions --------------------------------------------------------------------------------------

    /// Reads a region; the access is checked.
    pub(crate) fn read(&mut self, region: u32, offset: u64, data: &mut [u8]) {
        if region == STRUCTURES_BAR {
            if let Some(at) = COMMON.at(offset) {
                self.read_common(at, data);
            } else if let Some(at) = DEVICE.at(offset) {
                let config = self.config.bytes.get(at..).unwrap_or_default();
                put(data, 0, config);
            }
        } else if region == MSIX_BAR {
            // The client keeps the table itself, by giving vectors eventfds.
            for (at, byte) in (offset..).zip(data) {
                if let Some(at) = PENDING_BITS.at(at) {
                    *byte = self.vectors.pending_byte(at);
                }
            }
        } else if region == CONFIG {
            let at = offset as usize;
            if let Some(Access { bar, offset, len }) = self.space.access(at, data.len()) {
                let mut value = [0; 4];
                if let Some(value) = value.get_mut(..len).filter(|_| bar != CONFIG) {
                    self.read(bar, offset, value);
                }
                self.space.set_access_data(&value);
            }
            self.space.read(at, data);
        }
    }

    /// Writes a region; the access is checked.
    ///
    /// # Errors
    /// The driver resets the function, and no back end is available.
    pub(crate) fn write(
        &mut self,
        region: u32,
        offset: u64,
        data: &[u8],
    ) -> Result<(), BackEndError> {
        if region == STRUCTURES_BAR {
            if let Some(at) = NOTIFY.at(offset) {
                self.kick(at);
            } else if let Some(at) = COMMON.at(offset) {
                return self.write_common(at, data);
            }
        } else if region == CONFIG {
            let at = offset as usize;
            match self.space.write(at, data) {
                Effect::Stored => {}
                Effect::Reset => return self.reset(),
                Effect::BusMasterOff => {
                    self.common.status &= !DRIVER_OK;
                    self.stop();
                }
                Effect::Access => {
                    let value = self.space.access_data();
                    if let Some(Access { bar, offset, len }) = self.space.access(at, data.len())
                        && let Some(value) = value.get(..len).filter(|_| bar != CONFIG)
                    {
                        return self.write(bar, offset, value);
                    }
                }
            }
        }
        Ok(())
    }

    fn kick(&mut self, at: usize) {
        let number = at / NOTIFY_MULTIPLIER as usize;
        let Some(queue) = self.queues.get(number).filter(|queue| queue.is_running) else { return };
        // There are no more queues than vectors.
        if !self.back_end.as_mut().is_some_and(|back_end| back_end.kick(number as u16)) {
            // This process owns the eventfd, and never writes enough to fill the counter.
            let _ = rustix::io::write(&queue.kick, &1u64.to_ne_bytes());
        }
    }

    fn selected(&self) -> Option<&Queue> {
        self.queues.get(usize::from(self.common.queue_select))
    }

    /// Reads the common configuration. An access of any width returns the bytes at its place.
    fn read_common(&mut self, at: usize, data: &mut [u8]) {
        if (at..at + data.len()).contains(&GENERATION) {
            self.renew_config();
        }
        let common = self.common;
        let half = |features: u64, select: u32| match select {
            0 => features as u32,
            1 => (features >> 32) as u32,
            _ => 0,
        };
        let mut bytes = [0; COMMON_LEN];
        let mut set = |at: usize, value: &[u8]| put(&mut bytes, at, value);
        set(DEVICE_FEATURE_SELECT, &common.device_select.to_le_bytes());
        set(DEVICE_FEATURE, &half(common.offered, common.device_select).to_le_bytes());
        set(DRIVER_FEATURE_SELECT, &common.driver_select.to_le_bytes());
        set(DRIVER_FEATURE, &half(common.accepted, common.driver_select).to_le_bytes());
        set(CONFIG_VECTOR, &common.config_vector.to_le_bytes());
        set(NUM_QUEUES, &self.identity.queues.to_le_bytes());
        set(STATUS, &[common.status, self.config.generation]);
        set(QUEUE_SELECT, &common.queue_select.to_le_bytes());
        if let Some(queue) = self.selected() {
            set(QUEUE_SIZE, &queue.layout.size.to_le_bytes());
            set(QUEUE_VECTOR, &queue.vector.to_le_bytes());
            set(QUEUE_ENABLE, &u16::from(queue.is_enabled).to_le_bytes());
            set(QUEUE_NOTIFY_OFF, &common.queue_select.to_le_bytes());
            set(QUEUE_DESC, &queue.layout.descriptors.to_le_bytes());
            set(QUEUE_DRIVER, &queue.layout.available.to_le_bytes());
            set(QUEUE_DEVICE, &queue.layout.used.to_le_bytes());
        }
        put(data, 0, bytes.get(at..).unwrap_or_default());
    }

    /// Rereads the device's configuration. A driver reading between two equal generations has seen one
    /// consistent state.
    fn renew_config(&mut self) {
        let len = self.identity.config_len;
        if let Some(bytes) = self.ask(|back_end| back_end.config(len))
            && bytes != self.config.bytes
        {
            self.config =
                DeviceConfig { bytes, generation: self.config.generation.wrapping_add(1) };
        }
    }

    /// Writes a field of the common configuration. An access of another width than the field is ignored;
    /// addresses may come in halves.
    fn write_common(&mut self, at: usize, data: &[u8]) -> Result<(), BackEndError> {
        let fields = Fields(data);
        let (half, word) = (u16::from_le(fields.u16(0)), u32::from_le(fields.u32(0)));
        if let (STATUS, [status]) = (at, data) {
            return self.set_status(*status);
        }
        match (at, data.len()) {
            (DEVICE_FEATURE_SELECT, 4) => self.common.device_select = word,
            (DRIVER_FEATURE_SELECT, 4) => self.common.driver_select = word,
            (DRIVER_FEATURE, 4) if self.common.status & FEATURES_OK == 0 => {
                let (shift, accepted) = match self.common.driver_select {
                    0 => (0, self.common.accepted & !u64::from(u32::MAX)),
                    1 => (32, self.common.accepted & u64::from(u32::MAX)),
                    _ => return Ok(()),
                };
                self.common.accepted = accepted | u64::from(word) << shift;
            }
            (CONFIG_VECTOR, 2) => self.common.config_vector = self.vector(half),
            (QUEUE_SELECT, 2) => self.common.queue_select = half,
            _ => self.write_queue(at, data),
        }
        Ok(())
    }

    /// The vector, or none if out of range.
    fn vector(&self, wanted: u16) -> u16 {
        if u32::from(wanted) < self.vectors.count() { wanted } else { NO_VECTOR }
    }

    fn write_queue(&mut self, at: usize, data: &[u8]) {
        let number = self.common.queue_select;
        let most = self.identity.queue_size;
        let fields = Fields(data);
        let half = u16::from_le(fields.u16(0));
        let vector = self.vector(half);
        let Some(queue) = self.queues.get_mut(usize::from(number)) else { return };
        let layout = &mut queue.layout;
        match (at, data.len()) {
            (QUEUE_VECTOR, 2) => {
                queue.vector = vector;
                self.renew_call(number);
            }
            (QUEUE_ENABLE, 2) if half == 1 && !queue.is_enabled => {
                queue.is_enabled = true;
                self.start();
            }
            // The other fields stay unchanged while the queue is enabled.
            _ if queue.is_enabled => {}
            (QUEUE_SIZE, 2) if half.is_power_of_two() && half <= most => layout.size = half,
            (QUEUE_DESC..QUEUE_DRIVER, 4 | 8) => {
                set_part(&mut layout.descriptors, at - QUEUE_DESC, data);
            }
            (QUEUE_DRIVER..QUEUE_DEVICE, 4 | 8) => {
                set_part(&mut layout.available, at - QUEUE_DRIVER, data);
            }
            (QUEUE_DEVICE..COMMON_LEN, 4 | 8) => {
                set_part(&mut layout.used, at - QUEUE_DEVICE, data);
            }
            _ => {}
        }
    }
}

/// Stores a half or the whole of an address.
fn set_part(address: &mut u64, at: usize, data: &[u8]) {
    let mut bytes = address.to_le_bytes();
    put(&mut bytes, at, data);
    *address = u64::from_le_bytes(bytes);
}

#[cfg(test)]
#[path = "device_tests.rs"]
mod tests;
