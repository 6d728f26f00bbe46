// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The registers of a virtio device over PCI (virtio 1.3, 4.1.4.3) and the steps of its setup.

use std::thread;
use std::time::{Duration, Instant};

use virtio_ism_abi::config::{CONFIG_LEN, Config};
use virtio_ism_abi::virtio_pci::common::{
    CONFIG_VECTOR, DEVICE_FEATURE, DEVICE_FEATURE_SELECT, DRIVER_FEATURE, DRIVER_FEATURE_SELECT,
    GENERATION, NUM_QUEUES, QUEUE_DESC, QUEUE_DEVICE, QUEUE_DRIVER, QUEUE_ENABLE, QUEUE_NOTIFY_OFF,
    QUEUE_SELECT, QUEUE_SIZE, QUEUE_VECTOR, STATUS,
};
use virtio_ism_abi::virtio_pci::{NO_VECTOR, status};
use zerocopy::FromBytes;

use super::PciError;
use super::caps::Place;
use crate::virtqueue::QueueAddresses;
use ism_sys::Registers;

/// Register accesses as a bus does them: an absent register reads as ones and ignores stores.
pub(super) trait Io: Send + Sync {
    fn read8(&self, at: usize) -> u8;
    fn read16(&self, at: usize) -> u16;
    fn read32(&self, at: usize) -> u32;
    fn write8(&self, at: usize, value: u8);
    fn write16(&self, at: usize, value: u16);
    fn write32(&self, at: usize, value: u32);
}

impl Io for Registers {
    fn read8(&self, at: usize) -> u8 {
        self.read_u8(at).unwrap_or(u8::MAX)
    }
    fn read16(&self, at: usize) -> u16 {
        self.read_u16(at).unwrap_or(u16::MAX)
    }
    fn read32(&self, at: usize) -> u32 {
        self.read_u32(at).unwrap_or(u32::MAX)
    }
    fn write8(&self, at: usize, value: u8) {
        let _ = self.write_u8(at, value);
    }
    fn write16(&self, at: usize, value: u16) {
        let _ = self.write_u16(at, value);
    }
    fn write32(&self, at: usize, value: u32) {
        let _ = self.write_u32(at, value);
    }
}

/// Time limit of the device's reset, including the stop of its queues.
const RESET_TIMEOUT: Duration = Duration::from_millis(1000);
/// Time between two reads of the status while the device resets.
const RESET_PAUSE: Duration = Duration::from_micros(100);

/// Most reads of a configuration that changes during the read.
const CONFIG_TRIES: u32 = 16;
/// Runs of configuration fields of the same width: offset, bytes of each field, number of fields.
const CONFIG_FIELDS: [(usize, usize, usize); 6] =
    [(0, 4, 2), (8, 1, 16), (24, 2, 2), (28, 4, 4), (44, 2, 2), (48, 4, 6)];

pub(super) struct Common<I>(pub(super) I);

impl<I: Io> Common<I> {
    pub(super) fn status(&self) -> u8 {
        self.0.read8(STATUS)
    }

    /// Resets the device and waits until the reset is done. An absent device counts as reset.
    pub(super) fn reset(&self) -> Result<(), PciError> {
        self.0.write8(STATUS, 0);
        let start = Instant::now();
        loop {
            match self.status() {
                0 | status::NO_DEVICE => return Ok(()),
                status if start.elapsed() > RESET_TIMEOUT => {
                    return Err(PciError::Reset { status });
                }
                _ => thread::sleep(RESET_PAUSE),
            }
        }
    }

    /// Sets further status bits.
    pub(super) fn advance(&self, bits: u8) {
        self.0.write8(STATUS, self.status() | bits);
    }

    pub(super) fn offered(&self) -> u64 {
        let half = |n| {
            self.0.write32(DEVICE_FEATURE_SELECT, n);
            u64::from(self.0.read32(DEVICE_FEATURE))
        };
        half(0) | half(1) << 32
    }

    /// Accepts features, and checks the device's agreement.
    pub(super) fn accept(&self, features: u64) -> Result<(), PciError> {
        for (n, half) in [(0, features as u32), (1, (features >> 32) as u32)] {
            self.0.write32(DRIVER_FEATURE_SELECT, n);
            self.0.write32(DRIVER_FEATURE, half);
        }
        self.advance(status::FEATURES_OK);
        match self.status() {
            status if status & status::NEEDS_RESET != 0 => Err(PciError::NeedsReset),
            status if status & status::FEATURES_OK == 0 => Err(PciError::Features { features }),
            _ => Ok(()),
        }
    }

    pub(super) fn num_queues(&self) -> u16 {
        self.0.read16(NUM_QUEUES)
    }

    /// Sets the vector of configuration changes.
    pub(super) fn set_config_vector(&self, vector: Option<u16>) -> Result<(), PciError> {
        let vector = vector.unwrap_or(NO_VECTOR);
        self.0.write16(CONFIG_VECTOR, vector);
        if self.0.read16(CONFIG_VECTOR) == vector {
            Ok(())
        } else {
            Err(PciError::Vector { vector, what: "configuration changes".into() })
        }
    }

    /// Offset of a queue's notification register, in units of the multiplier.
    pub(super) fn notify_off(&self, queue: u16) -> u16 {
        self.0.write16(QUEUE_SELECT, queue);
        self.0.read16(QUEUE_NOTIFY_OFF)
    }

    /// Sets a queue up and enables it.
    pub(super) fn start_queue(
        &self,
        queue: u16,
        ring: &QueueAddresses,
        vector: Option<u16>,
    ) -> Result<(), PciError> {
        self.0.write16(QUEUE_SELECT, queue);
        let max = self.0.read16(QUEUE_SIZE);
        if max < ring.size {
            return Err(PciError::QueueSize { queue, max, needed: ring.size });
        }
        self.0.write16(QUEUE_SIZE, ring.size);
        let vector = vector.unwrap_or(NO_VECTOR);
        self.0.write16(QUEUE_VECTOR, vector);
        if self.0.read16(QUEUE_VECTOR) != vector {
            return Err(PciError::Vector { vector, what: format!("queue {queue}") });
        }
        for (at, address) in [
            (QUEUE_DESC, ring.descriptors),
            (QUEUE_DRIVER, ring.available),
            (QUEUE_DEVICE, ring.used),
        ] {
            self.0.write32(at, address as u32);
            self.0.write32(at + 4, (address >> 32) as u32);
        }
        self.0.write16(QUEUE_ENABLE, 1);
        Ok(())
    }

    /// Reads the device's configuration, again if it changed meanwhile.
    pub(super) fn read_config(&self, device: &impl Io) -> Result<Config, PciError> {
        for _ in 0..CONFIG_TRIES {
            let before = self.0.read8(GENERATION);
            let bytes = read_bytes(device);
            if self.0.read8(GENERATION) == before {
                return Config::read_from_bytes(&bytes).map_err(|_| PciError::Unstable);
            }
        }
        Err(PciError::Unstable)
    }
}

/// Reads the configuration, each field by accesses of its width, as virtio requires.
pub(super) fn read_bytes(device: &impl Io) -> [u8; CONFIG_LEN] {
    let mut bytes = [0; CONFIG_LEN];
    for (start, width, n) in CONFIG_FIELDS {
        for at in (0..n).map(|i| start + i * width) {
            let Some(field) = bytes.get_mut(at..at + width) else { continue };
            match width {
                1 => field.copy_from_slice(&[device.read8(at)]),
                2 => field.copy_from_slice(&device.read16(at).to_le_bytes()),
                _ => field.copy_from_slice(&device.read32(at).to_le_bytes()),
            }
        }
    }
    bytes
}

/// Offset of a queue's notification register from the start of the notification structure, bytes.
pub(super) fn notify_offset(
    queue: u16,
    notify_off: u16,
    multiplier: u32,
    place: Place,
) -> Result<usize, PciError> {
    let at = u64::from(notify_off) * u64::from(multiplier);
    if at + 2 > place.len || !at.is_multiple_of(2) {
        return Err(PciError::NotifyOffset { queue, at, size: place.len });
    }
    Ok(at as usize)
}

#[cfg(test)]
#[path = "common_tests.rs"]
pub(super) mod tests;
