// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The virtqueues of a virtio-ism device, with their shared memory and health, over any transport.
//!
//! [`SplitQueue`] is the driver side of one virtqueue. `Queues` is all queues of one device: `ControlQueue`
//! sends commands, `EventQueue` takes event records, a `MoveQueue` posts moves and kicks. Rings and buffers
//! lie in a [`GuestPool`], reachable by the device. `Health` is the switch from a working to a gone device.
//!
//! A queue needs memory of this process, an eventfd for its interrupts and a `Notify` for its kicks; a
//! transport provides them as `Wiring`.

mod control;
mod error;
mod events;
mod health;
mod limits;
mod memory;
mod moves;
mod path;
mod queues;
mod split;
mod wiring;

pub use error::QueueError;
pub(crate) use health::Health;
pub use limits::{CONTROL_TIMEOUT, MAX_PIECES};
pub use memory::{GuestMem, GuestPool};
pub use path::MovePath;
pub(crate) use queues::Queues;
#[cfg(test)]
pub(crate) use split::device::DeviceSide;
pub use split::{DmaSpan, QueueAddresses, SplitQueue, SplitQueueError, UsedChain};
pub(crate) use wiring::{Notify, Wiring};

use control::ControlQueue;
use events::EventQueue;
use moves::MoveQueue;
