// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! virtio-ism, device revision 1, on paper.
//!
//! Layouts, numbers and the wake-up protocol that the device (`vhost-device-ism`) and its drivers
//! share. The prose is `docs/virtio-ism.md`; each item here names the section it implements.
//! Everything is little-endian, has no padding, and can be read from bytes without trust: parsing
//! yields values, judging them is the device's (or the driver's) business.
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

/// The revision of the device that this crate describes (configuration field `revision`).
pub const REVISION: u32 = 1;

/// Virtio device id reserved for ISM by the virtio specification.
pub const VIRTIO_ID_ISM: u32 = 44;

/// Index of the control queue.
pub const CONTROL_QUEUE: u16 = 0;
/// Index of the event queue.
pub const EVENT_QUEUE: u16 = 1;
/// Index of the first move queue; the others follow.
pub const FIRST_MOVE_QUEUE: u16 = 2;

/// Identifier of the shared-memory region that is the window.
pub const WINDOW_SHMID: u8 = 1;
/// Identifier with which doorbells are handed to front ends: no region, and nothing to be mapped.
pub const DOORBELL_SHMID: u8 = 2;

// Its examples are tests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
