// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! virtio-ism, device revision 1, on paper.
//!
//! Layouts, numbers and the wake-up protocol shared by the device (`vhost-device-ism`) and its drivers. The
//! prose is `docs/virtio-ism.md`; each item here names the section it implements. Everything is
//! little-endian, has no padding, and can be read from bytes without trust: parsing yields values, checking
//! them is the task of the device or the driver.
//!
//! No IO, no allocation, no `unsafe`.
#![no_std]
#![forbid(unsafe_code)]

#[cfg(loom)]
extern crate std;

pub mod command;
pub mod config;
pub mod event;
pub mod ids;
pub mod mv;
pub mod pool;
pub mod signal;
pub mod slab;
pub mod status;
pub mod virtio_pci;

pub use ids::{Chid, Gid, Token};
pub use pool::{PoolAnswer, PoolStatus};
pub use status::Status;

/// The device revision of this crate (configuration field `revision`).
pub const REVISION: u32 = 1;

/// Virtio device id reserved for ISM by the virtio specification.
pub const VIRTIO_ID_ISM: u32 = 44;

/// Index of the control queue.
pub const CONTROL_QUEUE: u16 = 0;
/// Index of the event queue.
pub const EVENT_QUEUE: u16 = 1;
/// Index of the first move queue; the others follow.
pub const FIRST_MOVE_QUEUE: u16 = 2;

/// Identifier of the shared-memory region for the window.
pub const WINDOW_SHMID: u8 = 1;
/// Identifier for handing doorbells to front ends: no region, not mapped.
pub const DOORBELL_SHMID: u8 = 2;

// The README's examples are tests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
