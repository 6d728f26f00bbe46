// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A virtio device over PCI (virtio 1.3, 4.1), as the function and its driver see it. Nothing here is
//! of ISM alone.

/// PCI vendor of virtio devices.
pub const VENDOR: u16 = 0x1af4;
/// The PCI device of a virtio device without a legacy interface is this and its virtio id.
pub const FIRST_DEVICE: u16 = 0x1040;
/// Feature: the device is not a legacy one.
pub const VERSION_1: u64 = 1 << 32;
/// Id of the capabilities by which a function tells where its structures lie.
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
    /// Which half of the offered features is shown.
    pub const DEVICE_FEATURE_SELECT: usize = 0;
    /// A half of the offered features.
    pub const DEVICE_FEATURE: usize = 4;
    /// Which half of the accepted features is shown.
    pub const DRIVER_FEATURE_SELECT: usize = 8;
    /// A half of the accepted features.
    pub const DRIVER_FEATURE: usize = 12;
    /// Vector of changes of the configuration.
    pub const CONFIG_VECTOR: usize = 16;
    /// How many queues there are.
    pub const NUM_QUEUES: usize = 18;
    /// The device status.
    pub const STATUS: usize = 20;
    /// Changes when the device's configuration does.
    pub const GENERATION: usize = 21;
    /// Which queue the fields below are of.
    pub const QUEUE_SELECT: usize = 22;
    /// Its entries.
    pub const QUEUE_SIZE: usize = 24;
    /// Its vector.
    pub const QUEUE_VECTOR: usize = 26;
    /// Whether it is enabled.
    pub const QUEUE_ENABLE: usize = 28;
    /// Place of its notification register, in units of the multiplier.
    pub const QUEUE_NOTIFY_OFF: usize = 30;
    /// Address of its descriptors.
    pub const QUEUE_DESC: usize = 32;
    /// Address of its available ring.
    pub const QUEUE_DRIVER: usize = 40;
    /// Address of its used ring.
    pub const QUEUE_DEVICE: usize = 48;
    /// Bytes of the fields above.
    pub const LEN: usize = 56;
}

/// Bits of the device status.
pub mod status {
    /// The driver has found the device.
    pub const ACKNOWLEDGE: u8 = 1;
    /// The driver knows how to drive it.
    pub const DRIVER: u8 = 2;
    /// The driver is ready.
    pub const DRIVER_OK: u8 = 4;
    /// Features are agreed on.
    pub const FEATURES_OK: u8 = 8;
    /// The device asks for a reset.
    pub const NEEDS_RESET: u8 = 64;
    /// What a bus returns for a device that is not there.
    pub const NO_DEVICE: u8 = 0xff;
}
