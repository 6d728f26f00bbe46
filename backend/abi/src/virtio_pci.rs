// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A virtio device over PCI (virtio 1.3, 4.1), for the function and its driver. Nothing here is specific to
//! ISM.

/// PCI vendor of virtio devices.
pub const VENDOR: u16 = 0x1af4;
/// Base of PCI device ids: a virtio device without a legacy interface has this plus its virtio id.
pub const FIRST_DEVICE: u16 = 0x1040;
/// Feature: the device is not a legacy one.
pub const VERSION_1: u64 = 1 << 32;
/// Id of the capabilities with the places of a function's structures.
pub const CAPABILITY: u8 = 9;
/// No MSI-X vector.
pub const NO_VECTOR: u16 = 0xffff;

/// Kinds of structures (`cfg_type` of their capabilities).
pub mod structure {
    /// The common configuration.
    pub const COMMON: u8 = 1;
    /// The notification registers.
    pub const NOTIFY: u8 = 2;
    /// The interrupt status.
    pub const ISR: u8 = 3;
    /// The configuration of the device.
    pub const DEVICE: u8 = 4;
    /// Access to the other structures by the configuration space.
    pub const ACCESS: u8 = 5;
    /// A region of shared memory.
    pub const SHARED_MEMORY: u8 = 8;
}

/// Offsets in the common configuration, bytes.
pub mod common {
    /// Selects the half of the offered features to show.
    pub const DEVICE_FEATURE_SELECT: usize = 0;
    /// A half of the offered features.
    pub const DEVICE_FEATURE: usize = 4;
    /// Selects the half of the accepted features to show.
    pub const DRIVER_FEATURE_SELECT: usize = 8;
    /// A half of the accepted features.
    pub const DRIVER_FEATURE: usize = 12;
    /// Vector of changes of the configuration.
    pub const CONFIG_VECTOR: usize = 16;
    /// Number of queues.
    pub const NUM_QUEUES: usize = 18;
    /// The device status.
    pub const STATUS: usize = 20;
    /// Changes with the device's configuration.
    pub const GENERATION: usize = 21;
    /// Selects the queue for the fields below.
    pub const QUEUE_SELECT: usize = 22;
    /// Entries of the queue.
    pub const QUEUE_SIZE: usize = 24;
    /// Vector of the queue.
    pub const QUEUE_VECTOR: usize = 26;
    /// Whether the queue is enabled.
    pub const QUEUE_ENABLE: usize = 28;
    /// Place of the queue's notification register, in units of the multiplier.
    pub const QUEUE_NOTIFY_OFF: usize = 30;
    /// Address of the descriptors.
    pub const QUEUE_DESC: usize = 32;
    /// Address of the available ring.
    pub const QUEUE_DRIVER: usize = 40;
    /// Address of the used ring.
    pub const QUEUE_DEVICE: usize = 48;
    /// Bytes of the fields above.
    pub const LEN: usize = 56;
}

/// Bits of the device status.
pub mod status {
    /// The driver has found the device.
    pub const ACKNOWLEDGE: u8 = 1;
    /// The driver knows how to drive the device.
    pub const DRIVER: u8 = 2;
    /// The driver is ready.
    pub const DRIVER_OK: u8 = 4;
    /// Features are agreed on.
    pub const FEATURES_OK: u8 = 8;
    /// The device asks for a reset.
    pub const NEEDS_RESET: u8 = 64;
    /// Value returned by a bus for an absent device.
    pub const NO_DEVICE: u8 = 0xff;
}
