// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The registers of a pretended device, through the steps of its set-up.

use std::sync::{Mutex, MutexGuard};

use super::*;
use ism_sys::lock;

/// The registers' values, and the faults of the device.
#[derive(Default)]
pub(in super::super) struct Inner {
    pub(in super::super) status: u8,
    pub(in super::super) features: u64,
    pub(in super::super) accepted: [u32; 2],
    pub(in super::super) select: u32,
    pub(in super::super) queue: u16,
    pub(in super::super) max: u16,
    pub(in super::super) vector: u16,
    pub(in super::super) config_vector: u16,
    pub(in super::super) generation: u8,
    // 8 bytes each of descriptors, driver and device area.
    pub(in super::super) addresses: [u32; 6],
    pub(in super::super) size: u16,
    pub(in super::super) enabled: Vec<u16>,
    /// Every written status.
    pub(in super::super) history: Vec<u8>,
    /// Status reads until a reset is done.
    pub(in super::super) slow_reset: u32,
    pub(in super::super) refuses_features: bool,
    pub(in super::super) refuses_vectors: bool,
    pub(in super::super) needs_reset: bool,
    pub(in super::super) never_resets: bool,
    /// Every read of the generation returns another number.
    pub(in super::super) restless: bool,
    pub(in super::super) absent: bool,
}

/// A device within the rules, except for the faults in its fields.
#[derive(Default)]
pub(in super::super) struct Mock(Mutex<Inner>);

impl Mock {
    pub(in super::super) fn new(change: impl FnOnce(&mut Inner)) -> Common<Mock> {
        let mut inner = Inner { features: 1 << 32 | 1 << 29 | 3, max: 256, ..Inner::default() };
        change(&mut inner);
        Common(Mock(Mutex::new(inner)))
    }
}

impl Common<Mock> {
    pub(in super::super) fn inner(&self) -> MutexGuard<'_, Inner> {
        lock(&self.0.0)
    }
}

impl Io for Mock {
    fn read8(&self, at: usize) -> u8 {
        let mut inner = lock(&self.0);
        match at {
            _ if inner.absent => 0xff,
            STATUS if inner.slow_reset > 0 => {
                inner.slow_reset -= 1;
                0x0f
            }
            STATUS => inner.status,
            GENERATION => {
                inner.generation = inner.generation.wrapping_add(inner.restless.into());
                inner.generation
            }
            _ => panic!("read of 8 bits at {at}"),
        }
    }
    fn read16(&self, at: usize) -> u16 {
        let inner = lock(&self.0);
        match at {
            CONFIG_VECTOR => inner.config_vector,
            NUM_QUEUES => 4,
            QUEUE_SIZE => inner.max,
            QUEUE_VECTOR => inner.vector,
            QUEUE_NOTIFY_OFF => inner.queue,
            _ => panic!("read of 16 bits at {at}"),
        }
    }
    fn read32(&self, at: usize) -> u32 {
        let inner = lock(&self.0);
        assert_eq!(at, DEVICE_FEATURE);
        (inner.features >> (32 * inner.select)) as u32
    }
    fn write8(&self, at: usize, value: u8) {
        assert_eq!(at, STATUS);
        let mut inner = lock(&self.0);
        inner.history.push(value);
        let mut status = value;
        if inner.refuses_features {
            status &= !status::FEATURES_OK;
        }
        if inner.needs_reset && value != 0 {
            status |= status::NEEDS_RESET;
        }
        if !(inner.never_resets && value == 0) {
            inner.status = status;
        }
    }
    fn write16(&self, at: usize, value: u16) {
        let mut inner = lock(&self.0);
        let vector = if inner.refuses_vectors { NO_VECTOR } else { value };
        match at {
            CONFIG_VECTOR => inner.config_vector = vector,
            QUEUE_SELECT => inner.queue = value,
            QUEUE_SIZE => inner.size = value,
            QUEUE_VECTOR => inner.vector = vector,
            QUEUE_ENABLE => {
                let queue = inner.queue;
                inner.enabled.push(queue);
            }
            _ => panic!("write of 16 bits at {at}"),
        }
    }
    fn write32(&self, at: usize, value: u32) {
        let mut inner = lock(&self.0);
        match at {
            DEVICE_FEATURE_SELECT | DRIVER_FEATURE_SELECT => inner.select = value,
            DRIVER_FEATURE => {
                let half = inner.select as usize;
                inner.accepted[half] = value;
            }
            _ => inner.addresses[(at - QUEUE_DESC) / 4] = value,
        }
    }
}

/// Configuration bytes, and the accesses to the bytes.
pub(in super::super) struct Space {
    bytes: [u8; CONFIG_LEN],
    seen: Mutex<Vec<(usize, usize)>>,
}

impl Space {
    pub(in super::super) fn new(bytes: [u8; CONFIG_LEN]) -> Space {
        Space { bytes, seen: Mutex::default() }
    }
    fn read<const N: usize>(&self, at: usize) -> [u8; N] {
        lock(&self.seen).push((at, N));
        self.bytes[at..at + N].try_into().unwrap()
    }
}

impl Io for Space {
    fn read8(&self, at: usize) -> u8 {
        self.read::<1>(at)[0]
    }
    fn read16(&self, at: usize) -> u16 {
        u16::from_le_bytes(self.read(at))
    }
    fn read32(&self, at: usize) -> u32 {
        u32::from_le_bytes(self.read(at))
    }
    fn write8(&self, _: usize, _: u8) {
        panic!("the configuration is read only");
    }
    fn write16(&self, _: usize, _: u16) {
        panic!("the configuration is read only");
    }
    fn write32(&self, _: usize, _: u32) {
        panic!("the configuration is read only");
    }
}

fn ring(size: u16) -> QueueAddresses {
    let (descriptors, available, used) = (0x1_2345_6000, 0x2_0000_1000, 0x3_0000_2000);
    QueueAddresses { size, descriptors, available, used }
}

#[test]
fn a_reset_is_waited_for() {
    let device = Mock::new(|inner| inner.slow_reset = 5);
    device.reset().unwrap();
    assert_eq!(device.status(), 0);
    assert_eq!(device.inner().slow_reset, 0);
}

#[test]
fn a_device_that_does_not_reset_is_given_up_and_one_that_is_gone_needs_none() {
    let device = Mock::new(|inner| (inner.never_resets, inner.status) = (true, 0x0f));
    assert!(matches!(device.reset(), Err(PciError::Reset { status: 0x0f })));
    Mock::new(|inner| inner.absent = true).reset().unwrap();
}

#[test]
fn features_have_two_halves_and_must_stick() {
    let device = Mock::new(|_| ());
    assert_eq!(device.offered(), 1 << 32 | 1 << 29 | 3);
    device.accept(1 << 32 | 1).unwrap();
    assert_eq!(device.inner().accepted, [1, 1]);
    let device = Mock::new(|inner| inner.refuses_features = true);
    assert!(matches!(device.accept(1), Err(PciError::Features { features: 1 })));
    let device = Mock::new(|inner| inner.needs_reset = true);
    assert!(matches!(device.accept(1), Err(PciError::NeedsReset)));
}

#[test]
fn a_queue_is_told_all_of_its_addresses_before_it_is_enabled() {
    let device = Mock::new(|_| ());
    device.start_queue(2, &ring(64), Some(3)).unwrap();
    let inner = device.inner();
    assert_eq!(inner.addresses, [0x2345_6000, 1, 0x1000, 2, 0x2000, 3]);
    assert_eq!((inner.size, inner.vector, &inner.enabled[..]), (64, 3, &[2][..]));
}

#[test]
fn a_queue_that_is_too_small_or_gets_no_vector_is_refused_and_not_enabled() {
    let device = Mock::new(|inner| inner.max = 64);
    let error = device.start_queue(1, &ring(256), Some(1)).unwrap_err();
    assert!(matches!(error, PciError::QueueSize { queue: 1, max: 64, needed: 256 }));
    let refusing = Mock::new(|inner| inner.refuses_vectors = true);
    let error = refusing.start_queue(1, &ring(256), Some(1)).unwrap_err();
    assert!(matches!(error, PciError::Vector { vector: 1, .. }));
    assert!(refusing.set_config_vector(Some(0)).is_err());
    assert!(device.inner().enabled.is_empty() && refusing.inner().enabled.is_empty());
    refusing.start_queue(1, &ring(256), None).unwrap();
}

#[test]
fn every_field_of_the_configuration_is_read_once_in_its_own_width() {
    let mut bytes = [0; CONFIG_LEN];
    for (i, byte) in bytes.iter_mut().enumerate() {
        *byte = i as u8;
    }
    let space = Space::new(bytes);
    assert_eq!(read_bytes(&space), bytes);
    let seen = lock(&space.seen);
    assert_eq!(seen.iter().map(|(_, n)| n).sum::<usize>(), CONFIG_LEN);
    for field in [(24, 2), (26, 2), (28, 4), (44, 2), (46, 2), (64, 4), (68, 4), (8, 1)] {
        assert!(seen.contains(&field), "{field:?}");
    }
}

#[test]
fn a_configuration_that_keeps_changing_is_given_up() {
    let space = Space::new([0; CONFIG_LEN]);
    Mock::new(|_| ()).read_config(&space).unwrap();
    let restless = Mock::new(|inner| inner.restless = true);
    assert!(matches!(restless.read_config(&space), Err(PciError::Unstable)));
}

#[test]
fn a_bell_outside_its_structure_is_refused() {
    let place = Place { bar: 2, offset: 0x3000, len: 0x1000 };
    assert_eq!(notify_offset(3, 3, 4, place).unwrap(), 12);
    assert_eq!(notify_offset(3, 3, 0, place).unwrap(), 0);
    for (off, multiplier) in [(1024, 4), (u16::MAX, u32::MAX), (1, 1)] {
        let error = notify_offset(1, off, multiplier, place).unwrap_err();
        assert!(matches!(error, PciError::NotifyOffset { .. }));
    }
}
