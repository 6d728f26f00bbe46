// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod back_end;
mod device;
mod dma;
mod irq;
mod pci;
mod region;
mod server;
mod stream;
mod wire;

pub use back_end::{BackEnd, BackEndError, QueueLayout, VhostUser};
pub use dma::{DmaError, MemoryRegion};
pub use irq::IrqError;
pub use region::AccessError;
pub use server::{EndError, serve};
pub use stream::StreamError;
pub use wire::{BodyError, HeaderError};

/// What happens to a client that is served.
#[derive(Debug)]
pub enum Event<'a> {
    /// A request has come. It is carried out when the caller's function returns, which may wait.
    Request,
    /// A request was refused, and the client is served further.
    Refused(&'a dyn std::error::Error),
    /// The back end has ended. The function needs a reset by its driver, which makes another
    /// connection.
    BackEndLost(&'a BackEndError),
}

/// Queues that a function can have: each has a vector, and one is for changes of the configuration.
pub const MAX_QUEUES: u16 = region::MAX_VECTORS - 1;

/// What a function is, beside what its back end says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity {
    /// Its number among virtio devices.
    pub device_id: u16,
    /// Its class code: class, subclass and interface, in the lower three bytes.
    pub class: u32,
    /// Bytes of the device's configuration, at most 256.
    pub config_len: u16,
    /// Queues, 1 to [`MAX_QUEUES`].
    pub queues: u16,
    /// Entries that a queue has at most: a power of two.
    pub queue_size: u16,
}
